"""A run that was cut, and gone on with, comes to what it would have come to: every bit of it."""

import functools
import os
import signal
import threading
import time

import jax
import numpy as np
import pytest
from tests.laws import course, network
from tests.small import full_but

import stepfold as sf
from stepfold.checkpoint.store import DirectoryStore
from stepfold.checkpoint.writer import OrbaxSave

SIGNALS = {"SIGTERM": (SystemExit, signal.SIGTERM), "SIGINT": (KeyboardInterrupt, signal.SIGINT)}


class Batches:
    """Batches that do something, once, when a step's is pulled; before or after they moved on."""

    def __init__(self, at=None, do=None, *, after=False):
        self.inner, self.at, self.do, self.after = course.batches(), at, do, after

    def __iter__(self):
        return self

    def __next__(self):
        due = self.get_state()["step"] == self.at and self.do is not None
        if due and not self.after:
            do, self.do = self.do, None
            do()
        batch = next(self.inner)
        if due and self.after:
            do, self.do = self.do, None
            return do(batch)
        return batch

    def get_state(self):
        return self.inner.get_state()

    def set_state(self, state):
        self.inner.set_state(state)


class Once:
    """Do something the first time that it is time to."""

    def __init__(self, when, do):
        self.when, self.do = when, do

    def __call__(self, *given):
        if self.do is not None and self.when(*given):
            do, self.do = self.do, None
            return do()
        return None


def fails():
    raise OSError("cut here")


def at_log(step):
    return lambda event: bool(event.per_step) and event.step == step


def measured(step, do):
    """An evaluation beside the other one, that does something at a step."""
    once = Once(lambda state: int(state.step) == step, do)

    def measure(state):
        once(state)
        return {"norm": np.linalg.norm(state.params["w"])}

    return [course.evaluation(), sf.Evaluation(measure, every=course.EVALUATE, name="own")]


@functools.cache
def uncut(measures):
    """Run it without a cut, with the evaluation beside the other one or without."""
    return course.run(evaluation=measured(0, fails) if measures else course.evaluation())


def goes_on(folder, cut=0, **options):
    """Go on to the end, and see that it comes to what it would have come to."""
    result = course.run(folder, **options)
    wanted = uncut(isinstance(options.get("evaluation"), list))
    assert result.steps == course.STEPS
    assert result.resumed is not None
    assert result.resumed >= cut
    assert network.bits(result.state) == network.bits(wanted.state)
    assert course.curves(result.history) == course.curves(wanted.history)
    assert result.stop_reason == wanted.stop_reason
    found = sf.restore(folder / "checkpoints", course.start())
    assert (found.step, found.data["step"]) == (course.STEPS, course.STEPS)
    assert network.bits(found.state) == network.bits(wanted.state)
    return result


def is_saved(folder, step):
    """See that what was saved last is the state of a step, with the position of the next batch."""
    found = sf.checkpoint.contents(folder / "checkpoints")
    assert (found.step, found.data["step"]) == (step, step)
    restored = sf.restore(folder / "checkpoints", course.start())
    assert int(restored.state.step) == step


# Exceptions


def without_fault(options):
    """Return the options with which a run that was cut resumes."""
    if isinstance(options.get("evaluation"), list):
        return {"evaluation": measured(0, fails)}
    return {name: options[name] for name in options if name == "steps_per_call"}


def calling(do_at, do):
    """Make the step of the course, with a call of the host in it that fails at a step."""
    once = Once(lambda step: int(step) == do_at, do)

    def called(step):
        once(step)
        return np.float32(0)

    def step(state, batch):
        nothing = jax.experimental.io_callback(
            called, jax.ShapeDtypeStruct((), np.float32), state.step
        )
        return course.STEP(state, {**batch, "y": batch["y"] + nothing})

    return step


def test_an_error_of_the_step_on_the_device(tmp_path):
    with pytest.raises(jax.errors.JaxRuntimeError, match="cut here"):
        course.run(tmp_path, step=calling(13, fails))
    goes_on(tmp_path, 7, step=calling(None, fails))


# Stops


@pytest.mark.full
def test_a_time_limit_again_and_again(tmp_path):
    reached = 0
    for _ in range(3):
        result = course.run(tmp_path, time_limit=0)
        assert result.stop_reason.message.startswith(
            "the time limit of 0 s was reached; stopped at step"
        )
        assert (result.resumed or 0) == reached < result.steps
        reached = result.steps
    goes_on(tmp_path, reached)


# Signals


def interrupted(name, **options):
    kind, _ = SIGNALS[name]
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(kind) as caught:
        course.run(**options)
    assert {one: signal.getsignal(one) for one in before} == before
    if name == "SIGTERM":
        assert caught.value.code == 143
    result = caught.value.result
    assert isinstance(result, sf.FitResult)
    done = f"all {course.STEPS} steps were done" if result.steps == course.STEPS else "not yet"
    assert str(result.stop_reason) in (done, f"{name} at step {result.steps}")
    is_saved(options["folder"], result.steps)
    assert int(result.state.step) == result.steps
    return result


def sends(name):
    return lambda: os.kill(os.getpid(), SIGNALS[name][1])


both = pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.full)])
SIGNALLED = {  # when, and the first and last step that the run may end at
    "while a batch is made": ("SIGINT", lambda send: {"data": Batches(13, send)}, 13, 14),
    "before the first batch": ("SIGTERM", lambda send: {"data": Batches(1, send)}, 1, 2),
    "when a batch was just made": (
        "SIGTERM",
        lambda send: {"data": Batches(13, lambda batch: send() or batch, after=True)},
        *(13, 14),
    ),
    "in a call of several steps": (
        "SIGTERM",
        lambda send: {"data": Batches(17, send), "steps_per_call": 5},
        *(15, 20),
    ),
    "in a hook": ("SIGTERM", lambda send: {"hooks": Once(at_log(5), send)}, 5, 9),
    "in a hook at the end": ("SIGINT", lambda send: {"hooks": Once(at_log(40), send)}, 40, 40),
    "in an evaluation": ("SIGINT", lambda send: {"evaluation": measured(30, send)}, 30, 30),
}


USUAL = ("while a batch is made",)


@pytest.mark.parametrize(
    "when", [pytest.param(w, marks=() if w in USUAL else pytest.mark.full) for w in SIGNALLED]
)
def test_a_signal(when, tmp_path):
    name, make, first, last = SIGNALLED[when]
    for _ in range(2 if when == "while a batch is made" else 1):  # once more right after a resume
        assert first <= interrupted(name, folder=tmp_path, **make(sends(name))).steps <= last
    goes_on(tmp_path, first, **without_fault(make(fails)))


@both
def test_a_signal_while_it_compiles(name, tmp_path):
    once = Once(lambda: True, sends(name))

    def step(state, batch):
        once()
        return course.STEP(state, batch)

    assert interrupted(name, folder=tmp_path, step=step).steps <= 1
    goes_on(tmp_path)


@pytest.mark.parametrize(
    ("name", "when"),
    [("SIGTERM", "begins"), pytest.param("SIGINT", "is being written", marks=pytest.mark.full)],
)
def test_a_signal_while_it_saves(name, when, tmp_path, monkeypatch):
    moments = {"begins": (DirectoryStore, "begin"), "is being written": (OrbaxSave, "commit")}
    owner, method = moments[when]
    real = getattr(owner, method)
    once = Once(lambda: True, sends(name))
    monkeypatch.setattr(owner, method, lambda *given: once() or real(*given))
    interrupted(name, folder=tmp_path)
    goes_on(tmp_path, 7)


class Waits:
    """Wait for ten minutes, and be sent a signal soon.

    It sleeps in short steps, since one that arrives just before a sleep does not end it.
    """

    def __init__(self, name):
        self.name, self.began = name, None

    def __call__(self):
        self.began = time.monotonic()
        threading.Timer(0.1, sends(self.name)).start()
        while time.monotonic() < self.began + 600:
            time.sleep(0.01)


def waits_for_data(waits):
    once = Once(lambda: True, waits)

    def data():
        for batch in sf.batches(course.data(), 32, epochs=1, remainder="pad"):
            once()
            yield batch

    return {"evaluation": sf.Evaluation(course.MEASURE, data, every=course.EVALUATE)}


WAITING = {  # what waits, and the step from which the run is resumed at the earliest
    "data": (lambda waits: {"data": Batches(13, waits)}, 13),
    "data of an evaluation": (waits_for_data, course.EVALUATE),
    "an evaluation": (lambda waits: {"evaluation": measured(12, waits)}, 7),
}


@both
@pytest.mark.parametrize("what", full_but(["data"], WAITING))
def test_a_signal_breaks_off_waiting(name, what, tmp_path):
    (make, step), waits = WAITING[what], Waits(name)
    with pytest.raises(SIGNALS[name][0]):
        course.run(tmp_path, **make(waits))
    assert time.monotonic() - waits.began < 300
    if what != "an evaluation":
        is_saved(tmp_path, sf.checkpoint.latest_step(tmp_path / "checkpoints"))
    goes_on(tmp_path, step, **without_fault(make(fails)))


def test_without_checkpoints_a_signal_gives_the_result_all_the_same():
    with pytest.raises(KeyboardInterrupt, match="SIGINT at step 13") as caught:
        course.run(data=Batches(13, sends("SIGINT")))
    assert caught.value.result.steps == 13


def test_in_a_thread_of_its_own_it_runs_without_handling_signals():
    found, before = [], signal.getsignal(signal.SIGINT)
    hook = lambda event: found.append(signal.getsignal(signal.SIGINT))
    thread = threading.Thread(target=lambda: found.append(course.run(hooks=hook)))
    thread.start()
    thread.join()
    *handlers, result = found
    assert set(handlers) == {before}
    assert course.told(result) == course.whole()


# What is not seen coming


def course_with(action, where, folder, steps):
    """Run the course, and do something at a moment of it."""
    jax.config.update("jax_num_cpu_devices", 1)
    from tests.laws import course  # the devices come first

    moments = {"log": 25, "evaluation": 24, "midway": 15}

    def hook(event):
        kind = "log" if event.per_step else "evaluation"
        if event.step == moments.get(where) and where in (kind, "midway"):
            action()

    begin, commit = DirectoryStore.begin, OrbaxSave.commit

    def begins(store, state, metadata, *options):
        save = begin(store, state, metadata, *options)
        save.step = metadata.step
        if where == "save" and save.step == 21:
            action()
        return save

    def commits(save, finish=None):
        if where == "last save" and save.step == steps:
            time.sleep(0.5)  # by now the fold is over
            action()
            time.sleep(0.5)
        commit(save, finish)
        if where == "saved" and save.step == 21:
            action()

    DirectoryStore.begin, OrbaxSave.commit = begins, commits
    course.run(folder, hooks=hook, steps=steps)


def gets_a_signal(number, where, folder, steps):
    course_with(lambda: os.kill(os.getpid(), number), where, folder, steps)
    print("went on")


def full(*values):
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("where", "steps"),
    [
        ("save", {14, 21}),
        full("saved", {21}),
        full("log", {14, 21}),
        full("evaluation", {14, 21}),
    ],
)
def test_a_process_that_is_killed(forks, where, steps, tmp_path):
    end = forks.run(gets_a_signal, int(signal.SIGKILL), where, str(tmp_path), course.STEPS)
    assert end.code == -signal.SIGKILL, end
    assert goes_on(tmp_path).resumed in steps


@pytest.mark.parametrize(
    ("where", "name", "codes"),
    [
        ("midway", "SIGTERM", {143}),
        full("midway", "SIGINT", {1, 130, -signal.SIGINT}),
        full("last save", "SIGTERM", {143}),
    ],
)
def test_the_exit_code_tells_of_a_signal(forks, where, name, codes, tmp_path):
    end = forks.run(gets_a_signal, int(SIGNALS[name][1]), where, str(tmp_path), 20)
    assert end.code in codes, end
    assert "went on" not in end.output
    assert sf.checkpoint.latest_step(tmp_path / "checkpoints") == (
        20 if where == "last save" else 18
    )
    if where == "midway":  # the other was over: it had its last evaluation at step 20
        goes_on(tmp_path)
