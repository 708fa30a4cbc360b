"""What the page on Hugging Face says is compared with the Trainer of transformers."""

import jax
import numpy as np
import optax
import pytest

from stepfold.adapter import Trainer, TrainingArguments

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from tests.clients.torch_net import (  # noqa: E402
    TEST,
    TRAIN,
    Rows,
    difference,
    loss_fn,
    make_net,
    params_of,
)

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
cross_entropy = torch.nn.functional.cross_entropy


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make_net()

    def forward(self, image, labels=None):
        logits = self.net(image)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Counting(Model):
    """A model that takes the number of targets, as those of transformers do."""

    def forward(self, image, labels=None, **options):
        logits, num_items_in_batch = self.net(image), options.get("num_items_in_batch")
        if num_items_in_batch is None:
            return {"loss": cross_entropy(logits, labels), "logits": logits}
        loss = cross_entropy(logits, labels, reduction="sum") / num_items_in_batch
        return {"loss": loss, "logits": logits}


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


@pytest.fixture(autouse=True)
def as_a_user_would(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with jax.numpy_dtype_promotion("standard"):
        yield


def accuracy(predicted):
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def theirs(model=None, *, kind=InOrder, data=TRAIN, callbacks=(), resume=None, **options):
    arguments = {
        "output_dir": "theirs",
        "num_train_epochs": 3,
        "per_device_train_batch_size": 100,
        "per_device_eval_batch_size": 128,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
        "eval_strategy": "epoch",
    }
    trainer = kind(
        model=model or Model(),
        args=transformers.TrainingArguments(**arguments | options),
        train_dataset=Rows(data),
        eval_dataset=Rows(TEST),
        compute_metrics=accuracy,
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def ours(*, data=TRAIN, given=(), **options):
    arguments = {
        "num_train_epochs": 3,
        "total_batch_size": 100,
        "eval_batch_size": 128,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "shuffle_train_dataset": False,
        "eval_strategy": "epoch",
        "progress_bar_type": "none",
    }
    trainer = Trainer(
        TrainingArguments(**arguments | options),
        model=params_of(make_net()),
        loss_fn=loss_fn,
        dataset_train=data,
        dataset_eval=TEST,
        devices=jax.devices()[:1],
        **dict(given),
    )
    trainer.train()
    return trainer


def curve(trainer, name="loss"):
    return [row[name] for row in trainer.state.log_history if name in row]


def check_equal(a, b, *, steps):
    assert a.state.global_step == int(b.state.step) == steps
    np.testing.assert_allclose(b.history["train/loss"], curve(a), atol=1e-4)
    np.testing.assert_allclose(b.history["train/grad_norm"], curve(a, "grad_norm"), rtol=1e-2)
    np.testing.assert_allclose(b.history["eval/loss"], curve(a, "eval_loss"), atol=1e-4)
    np.testing.assert_allclose(b.history["eval/accuracy"], curve(a, "eval_accuracy"), atol=1e-6)
    assert difference(a.model, b.state.params) < 1e-3


ACCUMULATE = {"gradient_accumulation_steps": 3}


def test_a_run_with_the_defaults_of_transformers_is_equal():
    """Its schedule is linear, it clips to a norm of 1, and decays no weights."""
    trainer = theirs()
    arguments = trainer.args
    assert (arguments.lr_scheduler_type, arguments.max_grad_norm) == ("linear", 1.0)
    assert arguments.weight_decay == 0
    check_equal(trainer, ours(), steps=45)


def test_accumulation_over_a_total_batch():
    check_equal(theirs(**ACCUMULATE), ours(total_batch_size=300, **ACCUMULATE), steps=15)


def test_the_denominator_of_accumulation():
    """Of labels that are in part -100, a model that takes their number divides as stepfold does."""
    ignored = np.arange(1500) // 100 % 3 / 3 > np.random.default_rng(0).random(1500)
    ignored[::100] = True  # for a causal model it does not count the first label
    data = {**TRAIN, "labels": np.where(ignored, -100, TRAIN["labels"])}
    options = {"data": data, "max_steps": 5, "max_grad_norm": 100.0, **ACCUMULATE}
    result = ours(total_batch_size=300, optimizer="sgd", weight_decay=None, **options)
    counting = theirs(Counting(), optim="sgd", **options)
    plain = theirs(optim="sgd", **options)
    assert difference(counting.model, result.state.params) < 1e-6
    assert difference(plain.model, result.state.params) > 1e-5


def test_weight_decay_leaves_out_biases():
    trainer = theirs(weight_decay=0.1, lr_scheduler_type="cosine", warmup_steps=5)
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 45)
    mask = lambda params: {name: "weight" in name for name in params}
    adamw = optax.adamw(rate, weight_decay=0.1, mask=mask)
    tx = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    plain = {"lr_scheduler_type": None, "weight_decay": None, "max_grad_norm": None}
    plain["learning_rate"] = 5e-5  # the default
    check_equal(trainer, ours(given={"tx": tx}, **plain), steps=45)
    everything = ours(weight_decay=0.1, lr_scheduler_type="cosine", warmup_steps=5)
    assert difference(trainer.model, everything.state.params) > 1e-3


def test_the_last_batch_of_an_epoch():
    """It is dropped here; dropping it there also drops examples of evaluations."""
    result = ours(total_batch_size=128)
    kept = theirs(per_device_train_batch_size=128)
    assert (kept.state.global_step, int(result.state.step)) == (36, 33)
    dropped = theirs(per_device_train_batch_size=128, dataloader_drop_last=True)
    assert difference(dropped.model, result.state.params) < 1e-3
    assert curve(dropped, "eval_accuracy")[-1] != result.history["eval/accuracy"][-1]
    found = result.history["eval/accuracy"][-1] * 297
    assert found == pytest.approx(round(found))


def test_loss_of_an_interval_is_its_mean():
    found = ours(logging_steps=15).history["train/loss"]
    np.testing.assert_allclose(found, curve(theirs(logging_steps=15)), atol=1e-4)


def test_early_stopping_and_the_best_checkpoint():
    options = {"learning_rate": 2.5, "lr_scheduler_type": "constant", "num_train_epochs": 20}
    options |= {"save_strategy": "epoch", "save_total_limit": 1, "metric_for_best_model": "loss"}
    stop = transformers.EarlyStoppingCallback(2)
    more = {"optim": "sgd", "max_grad_norm": 1.0, "load_best_model_at_end": True}
    trainer = theirs(callbacks=[stop], **options, **more)
    here = {"optimizer": "sgd", "weight_decay": None, "early_stopping_patience": 2}
    result = ours(output_dir="ours", **options, **here)
    for losses, steps, best in (
        (curve(trainer, "eval_loss"), trainer.state.global_step, trainer.state.best_global_step),
        ([*result.history["eval/loss"]], int(result.state.step), result.best),
    ):
        assert best == 15 * (1 + int(np.argmin(losses)))
        assert steps == best + 30 == 15 * len(losses)
    # There the best replaces the model, here it is next to the last one.
    assert int(result.best_state.step) == result.best


def test_saves_have_to_meet_evaluations_there():
    options = {"eval_strategy": "steps", "eval_steps": 10, "metric_for_best_model": "loss"}
    saves = {"save_strategy": "steps", "save_steps": 15}
    with pytest.raises(ValueError, match="round multiple"):
        theirs(load_best_model_at_end=True, **options, **saves)
    result = ours(output_dir="ours", save_total_limit=9, **options, **saves)
    losses = result.history["eval/loss"]
    assert losses.steps == [10, 20, 30, 40, 45]
    assert result.best == losses.steps[int(np.argmin(losses))] == 45
    found = {int(path.name) for path in (result.checkpoint_manager.directory).iterdir()}
    assert found == {10, 15, 20, 30, 40, 45}


def test_a_resume():
    class Cut(transformers.TrainerCallback):
        def on_step_end(self, arguments, state, control, **_):
            control.should_training_stop = state.global_step == 20

    options = {"kind": transformers.Trainer, "save_strategy": "steps", "save_steps": 10}
    whole = theirs(kind=transformers.Trainer)
    theirs(callbacks=[Cut()], **options)
    resumed = theirs(resume=True, **options)
    assert difference(resumed.model, params_of(whole.model.net)) == 0
    assert len(curve(theirs(**options))) == 45  # without the argument, it starts over
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        theirs(output_dir="none", resume=True)


def test_a_nan_does_not_end_a_run_and_is_logged_as_zero():
    options = {"learning_rate": 1e30, "max_grad_norm": 1e30}
    trainer = theirs(optim="sgd", **options)
    assert trainer.state.global_step == 45
    assert curve(trainer)[-1] == 0
    result = ours(optimizer="sgd", weight_decay=None, **options)
    assert result.result.stop_reason.kind == "nonfinite"
