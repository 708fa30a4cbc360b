"""A plausible misuse works as meant, warns, or is refused: never a wrong result in silence."""

import jax
import numpy as np
import pytest
from tests.small import EVAL_STEP, STEP, batches, examples, start

import stepfold as sf


def fit(**options):
    given = options.pop("batches", None) or batches()
    return sf.fit(STEP, start(), given, **{"steps": 6, **options})


LOSSES = {2: 1.0, 4: 2.0, 6: 3.0}
MEASURE = sf.Evaluation(lambda state: {"loss": LOSSES[int(state.step)]}, every=2)


# The loop


def test_the_best_step_is_saved_though_the_schedule_has_no_save_there(tmp_path):
    plan = sf.Checkpoints(tmp_path, every=3, keep=1, best="eval/loss")
    assert fit(evaluation=MEASURE, checkpoints=plan).best == 2
    assert sf.restore(tmp_path, start(), step="best").step == 2


def test_a_best_metric_that_is_measured_only_at_the_end_ranks_the_last_step(tmp_path):
    plan = sf.Checkpoints(tmp_path, every=3, best="eval/loss")
    own = sf.Evaluation(lambda state: {"loss": 1.0})
    assert (
        fit(batches=batches(epochs=1, size=4), evaluation=own, checkpoints=plan, steps=3).best == 3
    )


def test_another_model_in_a_used_directory_is_sent_to_another_directory(tmp_path):
    plan = {"run_dir": tmp_path, "checkpoints": sf.Checkpoints(every=3)}
    fit(**plan)
    other = jax.tree.map(lambda leaf: leaf, start())._replace(params={"v": np.ones((), np.float32)})
    with pytest.raises(sf.TreeMismatchError, match="to train another model, give another directo"):
        sf.fit(STEP, other, batches(), steps=9, **plan)


def test_an_evaluation_hook_of_a_kind_that_there_is_not_is_refused():
    with pytest.raises(sf.ConfigError, match="every: kind: expected one of train, eval, got 'evl"):
        fit(evaluation=MEASURE, hooks=sf.every(2, print, kind="evl"))


def test_a_writer_to_the_file_that_fit_writes_is_refused(tmp_path):
    hook = sf.log_to(sf.jsonl_writer(tmp_path / "metrics.jsonl"))
    with pytest.raises(sf.ConfigError, match="expected writers to other files than those that fit"):
        fit(run_dir=tmp_path, hooks=hook)


def test_a_thinned_writer_has_the_last_interval_of_batches_of_unknown_number():
    rows = []

    class Rows(sf.Writer):
        def write_scalars(self, step, scalars):
            rows.append(step)

    given = (batch for batch in [*batches(epochs=2)])
    fit(batches=given, steps=None, log_every=1, hooks=sf.log_to(Rows(), every=5))
    assert rows == [5, 8]


def test_a_metric_of_some_batches_is_the_mean_over_those():
    def measure(state, batch):
        names = ("loss", "odd") if batch["x"][0] > 1 else ("loss",)
        return {name: sf.mean(batch["x"]) for name in names}

    with jax.disable_jit():
        found = sf.evaluate(measure, start(), [{"x": np.float32([x])} for x in (0, 2, 4)])
    assert found == {"loss": 2.0, "odd": 3.0}


def test_an_evaluation_does_not_depend_on_how_batches_are_padded():
    whole = sf.evaluate(EVAL_STEP, start(), [examples(10)])
    ragged = sf.evaluate(
        EVAL_STEP, start(), sf.batches(examples(10), 4, epochs=1, remainder="keep")
    )
    assert whole == pytest.approx(ragged)
