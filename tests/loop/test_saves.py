"""What is saved with a checkpoint and when, and what an interruption must not change."""

import functools
import itertools
import signal
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.runs.runs import Cut
from tests.small import STEP, TX, batches, start

import stepfold as sf
from stepfold.cluster.voting import Voting


def run(folder, data=None, **options):
    data = batches() if data is None else data
    return sf.fit(STEP, start(), data, **{"run_dir": folder, **options})


LOSSES = {0: 4.0, 2: 3.0, 4: 1.0, 6: 2.0, 7: 0.5, 8: 1.0}


def evaluation(**options):
    return sf.Evaluation(lambda state: {"loss": LOSSES.get(int(state.step), 9.0)}, **options)


def test_a_checkpoint_has_the_metrics_of_its_own_step_and_no_older_ones(tmp_path):
    checkpoints = sf.Checkpoints(every=7, keep=None)
    result = run(
        tmp_path, steps=21, log_every=5, evaluation=evaluation(every=3), checkpoints=checkpoints
    )
    names = []
    for saved in (7, 14, 21):
        metrics = sf.checkpoint.contents(tmp_path / "checkpoints", step=saved).metrics
        names.append(sorted({name.partition("/")[0] for name in metrics}))
        for name, value in metrics.items():
            curve = result.history[name]
            assert curve[curve.steps.index(saved)] == value
    assert names == [[], [], ["eval", "train"]]


def enough(event):
    """Stop at the first log point."""
    return "enough" if event.is_train else None


enough.needs_exact_state = True


@pytest.mark.parametrize(
    ("saves", "options", "best", "saved"),
    [
        ({"every": 5}, {"steps": 10}, 4, [2, 4, 5, 10]),
        ({"every_minutes": 60}, {"steps": 10}, 4, [2, 4, 10]),
        ({"every": 5, "keep": 1}, {"steps": 10}, 4, [4, 10]),
        ({"every": 4, "mode": "max"}, {"steps": 8}, 2, [2, 4, 8]),
        ({"best": "train/loss", "mode": "max", "every": 5}, {"steps": 8}, 5, [5, 8]),
        ({}, {"steps": 2, "at_start": True}, 2, [0, 2]),
        ({"mode": "max"}, {"steps": 2, "at_start": True}, 0, [0, 2]),
        ({}, {"hooks": enough, "steps": 10, "every": 4, "log_every": 7}, 7, [4, 7]),
        ({"every": 4}, {"batches": batches(epochs=2), "every": None}, 8, [4, 8]),
    ],
)
def test_the_best_state_is_saved_whatever_the_schedule(saves, options, best, saved, tmp_path):
    options = {"every": 2, "at_start": False, "batches": batches(), **options}
    schedule = {name: options.pop(name) for name in ("every", "at_start")}
    plan = sf.Checkpoints(tmp_path, **{"keep": None, "best": "eval/loss", **saves})
    data = options.pop("batches")
    options = {"log_every": 5, "checkpoints": plan, **options}
    options["evaluation"] = evaluation(**schedule)
    result = sf.fit(STEP, start(), data, **options)
    assert (result.best, sorted(sf.checkpoint.verify(tmp_path))) == (best, saved)


def test_a_resumed_run_saves_only_what_is_better_than_before(tmp_path):
    plan = {"checkpoints": sf.Checkpoints(tmp_path, keep=None, best="eval/loss")}
    for steps in (5, 9):
        result = sf.fit(
            STEP, start(), batches(), steps=steps, evaluation=evaluation(every=2), **plan
        )
    assert (result.best, sorted(sf.checkpoint.verify(tmp_path))) == (4, [2, 4, 5, 9])


@pytest.mark.parametrize(
    ("seconds", "warned", "noted"),
    [
        (1, [], "Saves took 33% of the time; every 19 steps, they would take 5 %"),
        (
            20,
            ["2 saves took 40 of the last 44 s; every 380 steps, they would take 5 % of the time"],
            "Saves took 91% of the time; every 380 steps, they would take 5 %",
        ),
    ],
)
def test_saves_that_hold_the_run_up_cause_one_warning_and_a_note(
    seconds, warned, noted, tmp_path, monkeypatch
):
    """On a clock that only saves move, and each step by a second."""
    now, save = [0.0], sf.checkpoint.Series.save

    def wait(seconds):
        now[0] += seconds

    slow = lambda self, *args, **options: (wait(seconds), save(self, *args, **options))
    monkeypatch.setattr(sf.checkpoint.Series, "save", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for module in ("fold", "run", "saves"):
        monkeypatch.setattr(f"stepfold.loop.{module}.perf_counter", lambda: now[0])
    checkpoints = sf.Checkpoints(every=2)
    with warnings.catch_warnings(record=True, action="always") as caught:
        run(tmp_path, steps=8, log_every=1, hooks=lambda event: wait(1), checkpoints=checkpoints)
    assert [str(warning.message).removeprefix("checkpoints: ") for warning in caught] == warned
    assert all(warning.filename == __file__ for warning in caught)
    assert noted in (tmp_path / "report.html").read_text()


def does_not_look(event):
    """Take the place of the hook that stops at a NaN in the loss."""


does_not_look.replaces_nonfinite_stop = True
NOT_SAVED = "not saved, because a parameter is NaN"


@pytest.mark.parametrize(
    ("first", "every", "hooks", "message"),
    [
        (0, 2, (), f"train/loss is nan in step 1; stopped at step 2; {NOT_SAVED}; see "),
        (9, 4, (), f"train/loss is nan in step 3; stopped at step 4; {NOT_SAVED}; see "),
        (0, 4, does_not_look, f"stopped at step 4; {NOT_SAVED}"),
    ],
)
def test_parameters_that_are_nan_are_never_saved(first, every, hooks, message, tmp_path):
    """The save comes before the log point that would find the NaN."""
    data = np.ones(64, np.float32)
    data[first:] = np.nan
    data, plan = sf.batches({"x": data}, 4), sf.Checkpoints(every=every, keep=None)
    result = run(tmp_path, data, steps=16, checkpoints=plan, hooks=hooks)
    assert str(result.stop_reason).startswith(message)
    assert str(result.stop_reason).endswith(NOT_SAVED) == bool(hooks)
    assert result.history["train/loss"].steps == [every]
    assert sf.checkpoint.latest_step(tmp_path / "checkpoints") is None


@pytest.mark.filterwarnings("ignore:batches. expected get_state and set_state")
def test_parameters_that_were_never_finite_are_saved(tmp_path):
    """A mask of minus infinity is a parameter to some libraries."""
    frozen = {"w": "train", "mask": "freeze"}
    tx = optax.multi_transform({"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}, frozen)
    params = {"w": jnp.ones(3), "mask": jnp.array([0.0, -jnp.inf])}
    state = sf.init_state(params, tx, jax.random.key(0))
    held = sf.make_train_step(lambda p, b, key: sf.mean((p["w"] * b) ** 2), tx)
    found = [np.ones(3, np.float32)] * 4
    result = sf.fit(held, state, found, run_dir=tmp_path, checkpoints=sf.Checkpoints())
    assert sf.checkpoint.latest_step(tmp_path / "checkpoints") == 4
    assert result.stop_reason.message == "the batches ended at step 4"


def test_an_evaluation_that_runs_out_is_not_passed_over():
    ended = iter(())
    own = sf.Evaluation(lambda state: {"loss": next(ended)}, every=2)
    with pytest.raises(
        sf.errors.DataError, match="eval: the evaluation raised StopIteration; make"
    ):
        sf.fit(STEP, start(), batches(), steps=4, evaluation=own)


def test_a_step_that_no_memory_holds_is_explained_and_what_was_saved_is_good(tmp_path):
    def huge(params, batch, key):  # 64 TiB and more on the way
        row = jnp.arange(1 << 22, dtype=jnp.float32) * params["w"].sum()
        square = jnp.outer(row, row).at[0].set(1.0)[jnp.int32(batch["x"].sum())]
        return sf.mean(square.sum())

    run = functools.partial(sf.fit, run_dir=tmp_path, checkpoints=sf.Checkpoints(every=5))
    run(STEP, start(), batches(), steps=10)
    with pytest.raises(sf.errors.OutOfMemoryError, match=r"temporaries +\d+ TiB +100%") as error:
        run(sf.make_train_step(huge, TX), start(), batches(), steps=30)
    assert "Most of it is temporaries" in str(error.value)
    assert sf.checkpoint.verify(tmp_path / "checkpoints") == {5: [], 10: []}


# What an interruption must not change


def test_what_was_measured_before_a_stop_is_shown_though_no_batch_comes_after_it(tmp_path):
    """The batches do not say how many there are, and a signal comes after the last of them."""
    signals = [signal.SIGINT]

    class Ending:
        def __init__(self):
            self.inner = batches(epochs=4)
            self.get_state, self.set_state = self.inner.get_state, self.inner.set_state

        def __iter__(self):
            return self

        def __next__(self):
            if signals and self.get_state()["step"] == 16:
                signal.raise_signal(signals.pop())
            return next(self.inner)

    plan = {"checkpoints": sf.Checkpoints(every=100)}
    with pytest.raises(KeyboardInterrupt, match="SIGINT at step 16"):
        run(tmp_path, Ending(), **plan)
    assert run(tmp_path, Ending(), **plan).history["train/loss"].steps == [10, 16]


def test_a_part_comes_after_the_evaluations_of_its_step_though_a_signal_cuts_them(tmp_path):
    class Halve:
        name = "halving"

        def next(self, run):
            return run.step + 4 - run.step % 4

        def is_due(self, run):
            return run.step in (4, 8) and not run.has_note("halved")

        def __call__(self, run):
            halved = jax.tree.map(lambda leaf: leaf / 2, run.state.params)
            return run._replace(state=run.state._replace(params=halved)).note("halved")

    def measure(state):
        if signals and state.step == 4:
            signal.raise_signal(signals.pop())
        return {"w": float(state.params["w"])}

    def curve(folder):
        each = sf.Evaluation(measure, every=4)
        result = run(folder, batches(epochs=3), evaluation=each, hooks=Halve(), **plan)
        return [*result.history["eval/w"]]

    plan, signals = {"checkpoints": sf.Checkpoints(every=100)}, []
    expected = curve(tmp_path / "uncut")
    signals.append(signal.SIGTERM)
    with pytest.raises(SystemExit):
        curve(tmp_path / "cut")
    assert curve(tmp_path / "cut") == expected


@pytest.mark.parametrize("is_known", [True, False])
def test_with_several_processes_a_signal_has_no_effect_before_all_agree(monkeypatch, is_known):
    """It comes after the last vote before the batches end, if their number is known."""

    def interrupted():
        yield from itertools.islice(batches(), 4)
        signal.raise_signal(signal.SIGTERM)

    class Listed(list):
        def __iter__(self):
            return interrupted()

    monkeypatch.setattr(sys.modules["stepfold.runs.fit"], "Inbox", Voting)  # of which this is one
    data = Listed(range(4)) if is_known else interrupted()
    with pytest.raises(SystemExit) as caught:
        sf.fit(STEP, start(), data, log_every=3, evaluation=evaluation())
    result = caught.value.result
    assert result.steps == 4
    assert "eval/loss" not in result.history
    assert result.stop_reason.kind == ("exhausted" if is_known else "signal")


def test_a_last_step_that_went_wrong_is_why_it_stopped():
    data = [{"x": np.full(4, value, np.float32)} for value in [1] * 19 + [np.nan]]
    for steps, end in ((20, "all 20 steps were done"), (None, "the batches ended at step 20")):
        result = sf.fit(STEP, start(), data, steps=steps)
        assert result.capsule.step == 20
        assert str(result.stop_reason) == f"train/loss is nan in step 20, seen when {end}"


def test_an_exception_of_a_hook_goes_on_though_its_save_fails(tmp_path):
    class Hook:
        def __call__(self, event):
            raise Cut

        states = iter(["ready"])  # checked before the first step

        def get_state(self):
            return next(self.states, object())  # which no checkpoint can hold

        def set_state(self, state): ...

    with pytest.raises(Cut) as error:
        run(tmp_path, steps=20, checkpoints=sf.Checkpoints(every=100), hooks=[Hook()])
    note = "only the state is saved, for sf.restore, not for a resume: extra/fit/hooks"
    assert note in error.value.__notes__[0]
    saved = sf.restore(tmp_path / "checkpoints", error.value.result.state)
    assert (saved.step, saved.data) == (error.value.result.steps, None)
    assert saved.state.params == error.value.result.state.params
