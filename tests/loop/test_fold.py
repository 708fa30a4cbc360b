"""The fold alone: a run is a value, parts come between two steps, and a step costs little."""

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from tests.small import STEP, batches, start

import stepfold as sf
from stepfold.loop.feed import BatchFeed
from stepfold.loop.fold import Setup, _replace, fold, stretch
from stepfold.loop.hook import Hooks
from stepfold.loop.inbox import Inbox
from stepfold.loop.run import Kind, Request, Run
from stepfold.loop.schedule import Schedule
from stepfold.loop.step_runner import StepRunner

BATCHES = [{"x": np.full(4, i, np.float32)} for i in range(12)]


class EveryThird:
    """A part as users write it: it is due after each third step, and may end the run."""

    name = "every third"

    def __init__(self, ends_at=math.inf, fails_at=math.inf):
        self.seen, self.ends_at, self.fails_at = [], ends_at, fails_at

    def next(self, run):
        return run.step + 3 - run.step % 3

    def is_due(self, run):
        return run.step % 3 == 0 and run.step > 0 and self.seen[-1:] != [run.step]

    def __call__(self, run):
        if run.step == self.fails_at:
            raise ZeroDivisionError
        self.seen.append(run.step)
        if run.step >= self.ends_at:
            return run.ask(Request(Kind.STOP, run.step, sf.Stop("hook", "enough")))
        return run._replace(notes=(*run.notes, [run.step, "seen"]))


def setup_of(parts, *, total=None, steps_per_call=1):
    def step(state, batch):
        return state + batch["x"][0], {"loss": batch["x"][0]}

    return Setup(
        schedule=Schedule(100, total),
        runner=StepRunner(step),
        feed=BatchFeed(BATCHES, steps_per_call=steps_per_call),
        hooks=Hooks([]),
        inbox=Inbox(),
        parts=parts,
    )


def stretch_of(run, setup, until):
    return stretch(run, [run.batch, run.state], setup, until)


def runs(part, *, total=None, steps_per_call=1):
    setup = setup_of([part], total=total, steps_per_call=steps_per_call)
    return fold(Run.start(np.float32(0), 0, 0, total, {}), setup)


def test_a_run_is_folded_until_its_batches_end():
    part = EveryThird()
    *_, last = runs(part)
    assert (last.step, last.batches_used, last.state) == (12, 12, sum(range(12)))
    assert (last.stop.kind, last.is_complete) == ("exhausted", True)
    assert part.seen == [3, 6, 9, 12]
    assert [step for step, _ in last.notes] == part.seen


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"next": lambda run: run.step},
            "part 'every third': next.run.: expected a step after 0, got 0",
        ),
        (
            {"is_due": lambda run: run.step > 0},
            "part 'every third' is always due: is_due.run. was True",
        ),
    ],
    ids=["next", "is_due"],
)
def test_a_part_that_would_hold_the_run_forever_is_refused(changes, message):
    part = EveryThird()
    vars(part).update(changes)
    with pytest.raises(sf.errors.ConfigError, match=message):
        list(runs(part))


@pytest.mark.parametrize("steps_per_call", [1, 2, 5])
def test_no_call_crosses_a_step_at_which_a_part_is_due(steps_per_call):
    part = EveryThird(ends_at=9)
    *_, last = runs(part, steps_per_call=steps_per_call)
    assert part.seen == [3, 6, 9]
    assert str(last.stop) == "enough; stopped at step 9"


def test_a_run_ends_at_its_total():
    *_, last = runs(EveryThird(), total=7)
    assert (last.step, last.stop.kind) == (7, "completed")


def test_an_exception_leaves_the_run_before_the_part_and_earlier_runs_as_they_were():
    seen = []
    with pytest.raises(ZeroDivisionError):
        seen.extend(runs(EveryThird(fails_at=6)))
    assert (seen[-1].step, float(seen[-1].state), seen[-1].notes) == (6, 15.0, ([3, "seen"],))
    earlier = next(run for run in seen if run.step == 3)
    assert (earlier.batches_used, earlier.notes) == (3, ())


def test_a_note_is_of_its_step():
    run = Run.start(0.0, 3, 3, 20, {}).note("halved").note("weights of a mixture", "weights")
    assert run.has_note()
    assert run.has_note("halved")
    assert run.has_note("weights of a mixture", "weights")
    assert not run.has_note("doubled")
    assert not run._replace(step=4).has_note()
    assert not run._replace(step=4).has_note("halved")


def test_a_stretch_changes_the_fields_that_it_names():
    setup, run = setup_of([]), Run.start(np.float32(0), 3, 3, 20, {}).note("rates halved")
    after, error = stretch_of(run, setup, 5)
    changed = {
        name: value for name, value in after._asdict().items() if getattr(run, name) is not value
    }
    assert (error, len(after.current.calls), changed.pop("current")) == (None, 2, after.current)
    assert changed.pop("batch") is BATCHES[1]
    assert changed == {"state": 1.0, "step": 5, "batches_used": 5}
    done, _ = stretch_of(run._replace(is_complete=True), setup_of([]), 4)
    assert not done.is_complete
    assert stretch_of(run._replace(is_complete=True), setup_of([]), 3)[0].is_complete


def test_a_run_is_the_same_after_a_checkpoint():
    run = Run.start(start(), 0, 0, 20, {})._replace(
        step=7, batches_used=7, logged_metrics={"train/loss": 1.0}, logged_step=5
    )
    run = run.log(7, {"train/loss": 0.5}, ()).note("rates halved")
    run = run.ask(Request(Kind.STOP, 9, sf.Stop("hook", "enough"), by_hook=True))
    saved = run.to_checkpoint([["counter", 3]])
    again = Run.start(start(), 0, 0, 20, {}).from_checkpoint(saved, run.state, 7)
    assert again.to_checkpoint([["counter", 3]]) == {**saved, "total": 20}
    assert again.requests.due(9) == run.requests.due(9)


def test_a_checkpoint_keeps_its_names():
    """A run reads what an earlier version of stepfold saved in this format."""
    saved = {
        "format": 3,
        "total": 20,
        "batches_used": 8,
        "history": {},
        "hooks": [],
        "stop": None,
        "epoch_ended_at": 4,
        "logged_step": 6,
        "began": 1,
        "is_complete": False,
        "evaluated": {"eval": 5},
        "logged_metrics": {"train/loss": 0.5},
        "hyperparams": {},
        "buffer": {"chunks": [], "values": None, "closed": []},
        "replacements": [[3, "rates halved"]],
    }
    run = Run.start(start(), 0, 0, 20, {}).from_checkpoint(saved, start(), 7)
    assert (run.epoch_ended_at, run.logged_step, run.began, run.evaluated) == (4, 6, 1, {"eval": 5})
    assert (run.logged_metrics, run.notes) == ({"train/loss": 0.5}, ([3, "rates halved"],))
    again = run._replace(batches_used=8).to_checkpoint([])  # which the batches know
    assert again == saved


@pytest.mark.parametrize(
    ("name", "value"),
    [("began", "0"), ("evaluated", []), ("is_complete", 1), ("total", 2.5), ("replacements", {})],
)
def test_a_checkpoint_of_other_types_is_refused(name, value):
    saved = Run.start(start(), 0, 0, 20, {}).to_checkpoint([])
    with pytest.raises(TypeError, match=name):
        Run.start(start(), 0, 0, 20, {}).from_checkpoint({**saved, name: value}, start(), 3)


# Of Python and C functions: in a step more than in the bare loop, and at a log point. "everything"
# has a directory, checkpoints, an evaluation and a hook too.
MOST_CALLS = {"plain": (8, 220), "everything": (10, 400)}
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")  # functions until Python 3.12


class Counted:
    """Batches that count the calls of the loop from the pull of step 41 to that of step 241."""

    def __init__(self):
        self.inner, self.pulled, self.calls = batches(), 0, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.pulled += 1
        if self.pulled == 41:
            sys.setprofile(self.count)
        elif self.pulled == 241:
            sys.setprofile(None)
        return next(self.inner)

    def count(self, frame, event, _):
        is_function = event == "call" and frame.f_code.co_name not in COMPREHENSIONS
        self.calls += is_function or event == "c_call"

    def __getattr__(self, name):
        return getattr(self.inner, name)


@pytest.mark.parametrize("kind", MOST_CALLS)
def test_a_step_and_a_log_point_make_few_calls(kind, tmp_path):
    """Bounds that count, since a time depends on the machine."""

    def bare(pulled):
        state = start()
        for _ in range(250):
            state, _ = compiled(state, next(pulled))

    def fitted(log_every):
        options = {"steps": 250, "log_every": log_every, "hooks": [sf.progress("none")]}
        if kind == "everything":
            options["run_dir"] = tmp_path / f"{log_every}"
            options["checkpoints"] = sf.Checkpoints(every=10**6, best="eval/loss")
            options["evaluation"] = sf.Evaluation(lambda state: {"loss": 1.0}, every=10**6)
            options["hooks"].append(sf.hooks.stop_early("eval/loss", patience=3))
        return lambda pulled: sf.fit(STEP, start(), pulled, **options)

    def cost(loop):
        counted = Counted()
        loop(counted)
        return counted.calls / 200

    compiled = sf.compile_step(STEP, start(), next(batches()))
    a_bare_step, a_step, with_logs = cost(bare), cost(fitted(1000)), cost(fitted(10))
    found = a_step - a_bare_step, 10 * (with_logs - a_step)
    assert all(n <= most for n, most in zip(found, MOST_CALLS[kind], strict=True)), found


def test_a_run_is_described_in_a_line_however_long_an_interval_is():
    seen = []

    class Look:
        name = "look"

        def next(self, run):
            return run.step + 1500

        def is_due(self, run):
            seen.extend([run] if run.step == 1500 else [])
            return False

        def __call__(self, run):
            return run

    data = [{"x": np.zeros(1, np.float32)}] * 1501
    sf.fit(STEP, start(), data, log_every=5000, hooks=[Look(), sf.progress("none")])
    assert repr(seen[0]) == "Run(step=1500, total=None, began=0, end=None)"
    assert repr(seen[0].current) == "Steps(1500 calls, step=0)"


def test_a_replacement_after_the_save_of_its_step_is_ignored_with_a_warning():
    setup = setup_of([])
    setup.saves = SimpleNamespace(has_saved=lambda run: True)
    run = Run.start(np.float32(0), 0, 0, None, {})
    says = "^step 0: Replace ignored, since the step is already saved: no better$"
    with pytest.warns(UserWarning, match=says):
        assert _replace(run, setup, sf.hooks.Replace(np.float32(1), "no better"), 0) is run
