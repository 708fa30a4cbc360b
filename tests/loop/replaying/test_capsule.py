import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.loop.hooks.stopping import Nonfinite
from stepfold.loop.replaying.capsule import take_capsule
from stepfold.loop.replaying.rereading import Mark

TX = optax.sgd(0.1)
STEP = sf.make_train_step(lambda p, b, key: sf.mean(p["w"] * b), TX)
DATA = np.arange(40, dtype=np.float32)


def start():
    return sf.init_state({"w": jnp.ones(())}, TX, jax.random.key(5))


def spoilt(step):
    data = DATA.copy()
    data[4 * step - 1] = np.nan
    return data


def run(batches, folder=None, steps=10, **options):
    plan = sf.Checkpoints(every=3, keep=None) if folder else None
    options = {"log_every": 4, "steps": steps, **options}
    return sf.fit(STEP, start(), batches, run_dir=folder, checkpoints=plan, **options)


def test_a_run_that_went_well_has_none():
    assert run(sf.batches(DATA, 4)).capsule is None


def test_it_knows_the_step_its_batch_and_its_key():
    capsule = run(sf.batches(spoilt(6), 4)).capsule
    assert (capsule.step, capsule.metric, capsule.lost) == (6, "train/loss", ())
    assert set(capsule.metrics) == {"train/loss", "train/grad_norm"}
    assert np.isnan(capsule.metrics["train/loss"])
    assert np.array_equal(capsule.batch, spoilt(6)[20:24], equal_nan=True)
    key = jax.random.fold_in(start().key, 5)  # five were folded in before it
    assert (jax.random.key_data(capsule.key) == jax.random.key_data(key)).all()


def test_it_refers_to_the_newest_checkpoint_before_the_step(tmp_path):
    capsule = run(sf.batches(spoilt(6), 4), tmp_path).capsule
    assert capsule.checkpoint == (tmp_path / "checkpoints", 3)
    assert (capsule.mark.step, capsule.mark.position["step"], capsule.distance) == (3, 3, 2)
    assert str(capsule) == (
        "step 6: train/loss is nan; replay begins with the checkpoint of step 3, 2 steps before it"
    )


def test_the_batches_stand_afterwards_where_they_stood():
    batches = sf.batches(spoilt(6), 4)
    result = run(batches)
    assert batches.get_state()["step"] == result.steps


def test_batches_that_are_gone_are_said_to_be():
    capsule = run(iter(list(sf.batches(spoilt(6), 4, epochs=1)))).capsule
    assert capsule.batch is None
    assert capsule.lost[0].startswith("the batch: it cannot be had again: batches: expected some")
    assert "not kept: the batch" in str(capsule)


def test_whatever_a_source_raises_the_result_is_there():
    class Once:
        """Reads its data one single time."""

        def __init__(self):
            self.step, self.most = 0, 0

        def __iter__(self):
            return self

        def __next__(self):
            if self.step < self.most:
                raise LookupError("that is archived")
            self.step = self.most = self.step + 1
            return spoilt(6)[4 * self.step - 4 : 4 * self.step]

        def get_state(self):
            return self.step

        def set_state(self, state):
            self.step = state

    result = run(Once())
    assert result.stopped.startswith("train/loss is nan in step 6")
    assert result.capsule.lost == ("the batch: it cannot be had again: that is archived",)


def test_a_source_that_writes_into_its_batches_does_not_write_into_the_kept_one():
    class Buffer:
        def __init__(self):
            self.step, self.own = 0, np.zeros(4, np.float32)

        def __iter__(self):
            return self

        def __next__(self):
            self.own[:] = spoilt(2)[4 * self.step : 4 * self.step + 4]
            self.step += 1
            return self.own

        def get_state(self):
            return self.step

        def set_state(self, state):
            self.step = state

    batches = Buffer()
    capsule = run(batches, steps=4).capsule
    batches.own[:] = 9
    assert np.array_equal(capsule.batch, spoilt(2)[4:8], equal_nan=True)


@pytest.mark.parametrize("step", [1, 4, 5, 8, 9])
def test_the_batch_is_that_of_the_step_wherever_log_points_are(step):
    for batches in (sf.batches(spoilt(step), 4), list(sf.batches(spoilt(step), 4, epochs=1))):
        capsule = run(batches, steps_per_call=3).capsule
        wanted = spoilt(step)[4 * step - 4 : 4 * step]
        assert np.array_equal(capsule.batch, wanted, equal_nan=True)


def test_a_list_that_is_gone_through_again_is_counted_round():
    batches = list(sf.batches(spoilt(2), 4, epochs=1))
    found = Nonfinite(12, "train/loss", {})
    capsule = take_capsule(
        found, state=start(), marks=[Mark(0, None)], batches=batches, directory=None
    )
    assert np.array_equal(capsule.batch, batches[1], equal_nan=True)


def test_a_step_before_all_that_is_known_has_no_batch():
    found = Nonfinite(3, "train/loss", {})
    batches = sf.batches(DATA, 4, start=5)
    marks = [Mark(5, batches.get_state())]
    capsule = take_capsule(found, state=start(), marks=marks, batches=batches, directory=None)
    assert capsule.lost == ("the batch: it was folded in before the run went on from a checkpoint",)
    with pytest.raises(sf.ConfigError, match="expected a checkpoint of a state before step 3"):
        sf.replay(capsule, STEP, state=start())


def test_a_state_without_a_key_has_none():
    found = Nonfinite(1, "train/loss", {})
    capsule = take_capsule(
        found, state={"w": 1}, marks=[Mark(0, None)], batches=[1], directory=None
    )
    assert capsule.key is None


def test_what_only_warns_keeps_nothing():
    with pytest.warns(UserWarning, match="train/loss is nan in step"):
        result = run(sf.batches(spoilt(6), 4), hooks=sf.only_warn(sf.stop_on_nonfinite()))
    assert (result.capsule, "nan" in result.stopped) == (None, False)
