"""A replay recomputes the step of a capsule and says which rows and which line made it fail."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.small import TX, start

import stepfold as sf
from stepfold.debug.rerun import replay
from stepfold.loop.feed import RecentBatches
from stepfold.runs.capsule import read_capsule


def loss(params, batch, key):
    return sf.mean(params["w"] * jnp.log(batch["x"]))


STEP = sf.make_train_step(loss, TX)


def good(count=3):
    return [{"x": np.linspace(1, 2, 8, dtype=np.float32) + i} for i in range(count)]


def with_rows(*rows, value=0.0):
    batch = good(1)[0]
    batch["x"][list(rows)] = value
    return batch


def run(batches, step=STEP, state=None, **options):
    return sf.fit(step, start() if state is None else state, batches, **options).capsule


# What is found.


def test_it_prints_what_happened():
    replayed = replay(run([*good(), with_rows(2)]), STEP, state=start())
    first, examples, where, leaves, row = str(replayed).splitlines()
    assert first == "step 4: reproduced; not finite: train/grad_norm, train/loss"
    assert (examples, leaves, row) == ("examples: row 2", "leaves: params/w", "row 2: x=0.0")
    assert where.startswith("where: log made inf at ")
    assert where.endswith("(loss)")


def test_the_operation_is_one_of_the_loss_and_not_of_its_gradient():
    def normalized(params, batch, key):
        norm = jnp.sqrt(params["w"] * batch["x"])  # its derivative at 0 is inf
        return sf.mean(batch["x"] / norm)

    step = sf.make_train_step(normalized, TX)
    where = replay(run([*good(), with_rows(2)], step), step, state=start()).where
    line = normalized.__code__.co_firstlineno + 2
    assert where.startswith("div made nan at ")
    assert where.endswith(f"test_rerun.py:{line} (normalized)")


def test_nonfinite_values_in_the_batch_and_the_state_are_not_blamed_on_an_operation():
    replayed = replay(run([*good(), with_rows(5, value=np.nan)]), STEP, state=start())
    assert replayed.examples == ((5,),)
    assert replayed.where == "batch/x contains NaN or inf in the batch itself"
    state = lambda: start()._replace(params={"w": jnp.float32(np.nan)})
    replayed = replay(run(good(), state=state()), STEP, state=state())
    assert (replayed.step, replayed.leaves, replayed.where) == (1, (), "")
    assert "where: no single operation makes NaN or inf" in replayed.notes[-1]


def test_another_step_does_not_reproduce_it():
    capsule = run([*good(), with_rows(2)])
    other = sf.make_train_step(lambda p, b, key: sf.mean(p["w"] * b["x"]), TX)
    replayed = replay(capsule, other, state=start())
    assert not replayed.reproduced
    assert (replayed.examples, replayed.where, replayed.leaves) == ((), "", ())
    assert any(line.startswith("train/loss was -inf, and is ") for line in replayed.notes)
    skipping = sf.make_train_step(loss, TX, skip_nonfinite=True)  # its loss does not count
    replayed = replay(capsule, skipping, state=start())
    assert (replayed.examples, replayed.leaves) == ((), ())


def test_a_step_without_the_metric_and_several_processes_are_refused(monkeypatch):
    capsule = run([with_rows(2)])
    bare = lambda state, batch: (state, {"other": sf.mean(batch["x"])})
    with pytest.raises(sf.errors.ConfigError, match="whose metrics have loss, got one with other"):
        replay(capsule, bare, state=start())
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(sf.errors.ConfigError, match="replay: expected one process, got 2"):
        replay(capsule, STEP, state=start())


def test_a_step_that_cannot_be_traced_is_bisected_and_reported():
    def step(state, batch):
        return state + 1, {"loss": sf.mean(np.log(np.asarray(batch["x"])))}

    eager = lambda state, batch: step(state, batch)
    eager.lower = None  # as a jitted step has it, which is called as it is
    with np.errstate(divide="ignore"):
        replayed = replay(run([with_rows(2)], eager, jnp.zeros(())), eager, state=jnp.zeros(()))
    assert replayed.examples == ((2,),)
    assert replayed.notes[-1].startswith("where: the step cannot be evaluated operation by operat")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda step: jax.jit(step, donate_argnums=0),
        lambda step: sf.compile_step(step, start(), good(1)[0]),
    ],
    ids=["jitted", "compiled"],
)
def test_arguments_stay_as_they_are(wrap):
    step, data = wrap(STEP), [batch["x"] for batch in [*good(), with_rows(2)]]
    batches = sf.batches({"x": np.concatenate(data)}, 8)
    capsule = run(batches, step, steps=4)
    position, state = batches.get_state(), start()
    for _ in range(2):
        replayed = replay(capsule, step, state=state)
        assert (replayed.reproduced, replayed.examples) == (True, ((2,),))
        assert replayed.where.startswith("log made inf")
    assert batches.get_state() == position
    assert not state.params["w"].is_deleted()


# The way from the checkpoint to the step. A metric shows the parameters, to the bit.

SUM = sf.make_train_step(lambda p, b, key: (sf.mean(p["w"] * b), {"w": sf.mean(p["w"])}), TX)


def numbers(step=6):
    data = np.arange(40, dtype=np.float32) / 100
    data[4 * step - 1] = np.nan
    return sf.batches(data, 4)


def as_list():
    return [numbers().at(i) for i in range(9)]


def leave(folder=None, batches=None):
    plan = sf.Checkpoints(every=3, keep=None) if folder else None
    batches = numbers() if batches is None else batches
    return sf.fit(SUM, start(), batches, steps=10, run_dir=folder, checkpoints=plan).capsule


def check(capsule, state=None, batches=None, step=6):
    replayed = replay(capsule, SUM, state=state, batches=batches)
    assert (replayed.step, replayed.origin, replayed.reproduced) == (step, step, True)
    assert replayed.examples == ((3,),)
    assert replayed.newly_nonfinite == ("train/grad_norm", "train/loss")
    return replayed


def test_without_a_checkpoint_it_is_recomputed_from_the_start():
    capsule = leave()
    check(capsule, start())
    check(capsule, start()._replace(step=0))  # a Python number is an array
    later, _ = jax.jit(SUM)(start(), numbers().at(0))
    for state, got in (
        (None, "None"),
        (jax.eval_shape(start), "an abstract"),
        (later, "one of ste"),
    ):
        with pytest.raises(
            sf.errors.ConfigError, match=f"of step 0 that the run started with.* got {got}"
        ):
            replay(capsule, SUM, state=state)


def test_wrong_batches_on_the_way_are_noticed(tmp_path):
    batches = [batch + (i == 4) for i, batch in enumerate(as_list())]
    replayed = replay(leave(tmp_path), SUM, batches=batches)
    assert not replayed.reproduced
    assert replayed.notes[0].startswith("train/w was ")


def test_batches_are_given_for_a_capsule_in_a_file(tmp_path):
    path = leave(tmp_path).path
    check(read_capsule(path), jax.eval_shape(start), numbers())
    check(path, start(), numbers())
    check(str(path), start(), as_list())
    check(path, start(), iter(as_list()[3:6]))  # cannot be moved, and begins after the checkpoint


@pytest.mark.parametrize("is_kept", [True, False])
def test_batches_of_an_iterator_come_from_those_that_are_given(monkeypatch, is_kept):
    if not is_kept:
        monkeypatch.setattr(RecentBatches, "LIMIT", 0)
    capsule = leave(batches=iter(as_list()))
    assert capsule.has_batch == is_kept
    check(capsule, start(), as_list())
    check(capsule, start(), iter(as_list()))


def test_after_a_checkpoint_of_the_step_before_its_batch_is_enough(tmp_path):
    capsule = leave(tmp_path, numbers(4))
    check(capsule, batches=(), step=4)
    words = "batches: expected those of the run, for steps 4 to 4, got None"
    with pytest.raises(sf.errors.ConfigError, match=words):
        replay(capsule.path, SUM, state=start())
    check(capsule.path, start(), numbers(4), step=4)


def test_a_state_and_batches_are_required_for_a_file(tmp_path):
    capsule = leave(tmp_path)
    check(capsule)
    with pytest.raises(
        sf.errors.ConfigError, match="state: expected an abstract state for a capsule"
    ):
        replay(capsule.path, SUM, batches=numbers())
    words = "batches: expected those of the run, for steps 4 to 6, got None; the capsule has none"
    with pytest.raises(sf.errors.ConfigError, match=words):
        replay(capsule.path, SUM, state=start())
    with pytest.raises(sf.errors.DataError, match="for steps 4 to 6, got an end before step 5"):
        replay(capsule.path, SUM, state=start(), batches=iter(as_list()[3:4]))
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(sf.errors.CheckpointError, match="expected step 3 to restore, got none"):
        replay(capsule, SUM)


# A run that went back, so that it skipped batches.


def derailing(bad):
    """Batches of which 4 and 5 derail a run, and one row of `bad` is NaN."""
    data = np.arange(80, dtype=np.float32) / 100
    data[16:24], data[4 * bad + 3] = 1e4, np.nan
    return sf.batches(data, 4)


def go_back(folder, batches):
    """Skip batches 4 and 5 after step 6, then run to the NaN."""
    requests = [sf.hooks.GoBack(skip=(5, 7), why="derailed")]
    return sf.fit(
        SUM, start(), batches, steps=16, log_every=2, run_dir=folder,
        checkpoints=sf.Checkpoints(every=3, keep=None),
        hooks=lambda event: requests.pop() if event.step == 6 and requests else None,
    ).capsule  # fmt: skip


@pytest.mark.parametrize("bad", [7, 12], ids=["from before the skip", "from after it"])
def test_batches_that_the_run_skipped_are_skipped(tmp_path, bad):
    capsule = go_back(tmp_path, derailing(bad))
    assert (capsule.step, capsule.skipped) == (bad - 1, ((4, 6),))
    assert read_capsule(capsule.path).skipped == ((4, 6),)
    check(capsule, step=bad - 1)
    batches = derailing(bad)
    for given in (batches, sf.prefetch(derailing(bad)), derailing(bad).without([(4, 6)])):
        check(capsule.path, start(), given, step=bad - 1)
        check(capsule, batches=given, step=bad - 1)
    assert batches.get_state() == derailing(bad).get_state()


def test_batches_that_cannot_skip_are_refused_after_a_skip(tmp_path):
    path = go_back(tmp_path, derailing(7)).path
    given = [derailing(7).at(i) for i in range(16)]
    words = r"batches: expected some that skip \[\(4, 6\)\], as the run did, got list"
    with pytest.raises(sf.errors.ConfigError, match=words):
        replay(path, SUM, state=start(), batches=given)
    check(path, start(), iter([given[3], *given[6:]]))  # from the checkpoint of step 3 on


# Metrics that are all NaN.

NAN = sf.make_train_step(lambda p, b, key: sf.mean(p["w"] * b), TX)


def test_where_all_metrics_are_nan_those_of_the_step_before_are_compared(tmp_path):
    plan = sf.Checkpoints(every=3, keep=None)
    capsule = sf.fit(NAN, start(), numbers(), steps=10, run_dir=tmp_path, checkpoints=plan).capsule
    assert np.isnan([*capsule.metrics.values()]).all()
    assert replay(capsule.path, NAN, state=start(), batches=numbers()).reproduced is True
    wrong = [batch + (i == 4) for i, batch in enumerate(as_list())]
    replayed = replay(capsule.path, NAN, state=start(), batches=wrong)
    assert replayed.reproduced is False
    assert replayed.notes[0].startswith("train/grad_norm of step 5 was ")


def test_where_nothing_can_be_compared_it_is_not_called_reproduced(tmp_path):
    plan = sf.Checkpoints(every=5, keep=None)
    capsule = sf.fit(NAN, start(), numbers(), steps=10, run_dir=tmp_path, checkpoints=plan).capsule
    replayed = replay(capsule, NAN)
    assert (capsule.distance, replayed.reproduced) == (0, None)
    assert str(replayed).startswith("step 6: not compared, as all metrics are NaN; not finite:")


def test_an_attribute_of_an_earlier_version_is_named_anew():
    replayed = replay(run([*good(), with_rows(2)]), STEP, state=start())
    with pytest.raises(AttributeError, match="Replay.spoilt is now Replay.newly_nonfinite"):
        replayed.spoilt  # noqa: B018
    with pytest.raises(AttributeError, match="Replay has no attribute 'other'"):
        replayed.other  # noqa: B018
