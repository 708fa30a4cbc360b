"""Which value of a metric is better follows from its name only where there is no doubt."""

import pytest

import stepfold as sf
from stepfold.adapter import TrainingArguments
from stepfold.core.metric_modes import known_mode, mode_of

LOWER = """loss eval/loss val_loss evalLoss loss2 loss_mean train/loss/0 NLL negative_log_likelihood
perplexity word_error_rate valMAE eval.rmse fid_score bits_per_byte eval/cross-entropy"""
HIGHER = """accuracy eval/acc top-1-accuracy accuracy@5 F1 f1_macro eval_f1@0.5 aucRoc mAP mIoU
rougeL rouge_1 bleu4 recall_at_10 episode_return reward/mean exact_match"""
DOUBTFUL = """score glossy lossless other loss_scale learning_rate bits_per_second entropy
accuracy_loss reward_model/loss neg_mean_squared_error -loss 1-accuracy rewards/chosen 2 /"""


@pytest.mark.parametrize("name", LOWER.split())
def test_lower_is_better(name):
    assert known_mode(name) == "min"


@pytest.mark.parametrize("name", HIGHER.split())
def test_higher_is_better(name):
    assert known_mode(name) == "max"


@pytest.mark.parametrize("name", DOUBTFUL.split())
def test_a_name_with_a_doubt_is_refused_without_a_mode(name):
    assert known_mode(name) is None
    for make, argument in (
        (lambda **mode: sf.Checkpoints("x", best=name, **mode), "best"),
        (lambda **mode: sf.hooks.stop_early(name, patience=1, **mode), "metric"),
    ):
        with pytest.raises(
            sf.errors.ConfigError, match=f"^{argument}: expected .* got .*mode='min' if"
        ):
            make()
        make(mode="min")
    with pytest.raises(sf.errors.ConfigError, match="write greater_is_better=True or False"):
        TrainingArguments(metric_for_best_model=name)
    TrainingArguments(metric_for_best_model=name, greater_is_better=True)


def test_a_given_mode_counts_whatever_the_name():
    assert mode_of("best", "loss", "max") == "max"
    with pytest.raises(
        sf.errors.ConfigError, match="mode: expected one of 'min', 'max', got 'lowest'"
    ):
        mode_of("best", "loss", "lowest")
