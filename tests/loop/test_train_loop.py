"""The order in which things happen: what is read when, what is compiled, what is saved."""

import contextlib
import functools
import gc
import itertools
import re
import signal
import time
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests import small

import stepfold as sf
from stepfold.loop import train_loop
from stepfold.loop.consensus import Several

TX = optax.adam(0.1)


def loss_fn(params, batch, key):
    return sf.mean((batch["x"] @ params["w"]) ** 2, batch["mask"])


def init(key):
    return {"w": jax.random.normal(key, (16,))}


@functools.cache
def initial_state(mesh):
    make = lambda key: sf.init_state(init, TX, key)
    plan = mesh and sf.make_sharding(jax.eval_shape(make, jax.random.key(0)), mesh)
    return sf.init_state(init, TX, jax.random.key(0), sharding=plan)


def start(mesh=None):
    return jax.tree.map(jnp.copy, initial_state(mesh))


DATA = {"x": np.ones((64, 16), np.float32), "mask": np.arange(64) % 3 > 0}


def batches(seed=0, **options):
    return sf.batches(DATA, 16, seed=seed, **options)


def evaluation(**options):
    measure = sf.make_eval_step(lambda params, batch, key: loss_fn(params, batch, key))
    return sf.Evaluation(measure, lambda: sf.batches(DATA, 16, epochs=1), **options)


STEP = sf.make_train_step(loss_fn, TX)


def step():
    """A step that jax has not seen before."""
    return sf.make_train_step(lambda params, batch, key: loss_fn(params, batch, key), TX)


@pytest.fixture
def reads(monkeypatch):
    """Note whenever an array of a device is waited for or read, whoever does it."""
    noted = []
    array = type(jnp.ones(()))
    for name in ("_value", "block_until_ready", "__array__"):
        monkeypatch.setattr(array, name, noting(noted, name, getattr(array, name)))
    for name in ("asarray", "array", "stack", "concatenate"):  # these may go by the buffer
        monkeypatch.setattr(np, name, noting_arrays(noted, name, getattr(np, name)))
    return noted


def noting_arrays(noted, name, real):
    def note(first, *given, **options):
        if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(first)):
            noted.append(name)
        return real(first, *given, **options)

    return note


def noting(noted, name, real):
    if isinstance(real, property):
        return property(lambda self: noted.append(name) or real.fget(self))

    def note(self, *given, **options):
        noted.append(name)
        return real(self, *given, **options)

    return note


@pytest.mark.parametrize(
    "read", ["float", "np.asarray", "jax.device_get", "jax.block_until_ready", "bool", "str"]
)
def test_a_read_is_noted(read, reads):
    array = jnp.ones(()) + 1
    reads.clear()
    eval(read)(array)
    assert reads


@pytest.mark.parametrize("form", ["step", "jitted", "compiled"])
def test_nothing_waits_for_the_device_between_log_points(form, reads):
    """Only when some steps after a log point are under way are the metrics before it read."""
    made = {
        "step": lambda: STEP,
        "jitted": lambda: jax.jit(STEP),
        "compiled": lambda: sf.compile_step(STEP, start(), next(batches())),
    }
    seen = []

    def noted():
        for number, batch in enumerate(batches()):
            seen.append((number, len(reads)))
            yield batch

    sf.fit(made[form](), start(), noted(), steps=40, log_every=10)
    read_at = [
        number
        for (number, before), (_, after) in itertools.pairwise(seen)
        if after != before and number
    ]
    assert read_at == [13, 23, 33]


@pytest.mark.filterwarnings("ignore:batches. expected get_state and set_state")
def test_a_checkpoint_that_is_not_due_reads_nothing(reads, tmp_path):
    seen = []

    def noted():
        for number, batch in enumerate(batches()):
            seen.append((number, len(reads)))
            yield batch

    hooks = [lambda event: None]
    checkpoints = sf.Checkpoints(tmp_path, every=100)
    sf.fit(STEP, start(), noted(), steps=9, log_every=10, hooks=hooks, checkpoints=checkpoints)
    assert {count for number, count in seen if number} == {seen[1][1]}


@pytest.mark.parametrize("devices", [1, 8])
def test_a_step_and_an_evaluation_are_compiled_once_in_a_run(devices, compiles, tmp_path):
    if devices > 1 and jax.__version_info__ < (0, 12):
        pytest.skip("jax 0.10 crashes where several CPU devices are given a donated array")
    mesh = sf.make_mesh() if devices > 1 else None
    checkpoints = sf.Checkpoints(every=7, keep=1)
    plan = {"log_every": 2, "checkpoints": checkpoints}

    def run(folder, steps, train, evaluations):
        state = start(mesh)
        compiles.clear()
        sf.fit(train, state, batches(), steps=steps, run_dir=tmp_path / folder,
               evaluation=evaluations, **plan)  # fmt: skip
        return len(compiles)

    own = lambda name: evaluation(every=6, name=name)
    run("warm", 8, step(), own("warm"))
    run("warm", 10, step(), own("warm"))  # a resume too
    evaluations, train = [own("a"), own("b")], step()
    assert run("run", 8, train, evaluations) == 3
    assert run("run", 16, train, evaluations) == 0


def test_several_steps_in_a_call_are_few_programs(compiles):
    options = {"log_every": 10, "evaluation": sf.Evaluation(lambda state: {}, every=6)}
    sf.fit(STEP, start(), batches(), steps=12, **options)
    state, train = start(), step()
    compiles.clear()
    sf.fit(train, state, batches(), steps=31, steps_per_call=4, **options)
    assert len(compiles) <= 4  # one for each number of steps from one thing to do to the next


# What a hook is shown


def shown(**options):
    events = []
    options = {"steps": 12, "log_every": 5, "hooks": [events.append], **options}
    result = sf.fit(STEP, start(), batches(), **options)
    return events, result


def test_a_hook_is_shown_every_log_point_and_every_evaluation():
    events, result = shown(evaluation=evaluation(every=4))
    assert [(event.step, sorted(event.metrics)) for event in events] == [
        (4, ["eval/loss"]),
        (5, ["train/grad_norm", "train/loss"]),
        (8, ["eval/loss"]),
        (10, ["train/grad_norm", "train/loss"]),
        (12, ["train/grad_norm", "train/loss"]),
        (12, ["eval/loss"]),
    ]
    assert {event.total for event in events} == {12}
    assert [len(event.per_step.get("train/loss", ())) for event in events] == [0, 5, 0, 5, 2, 0]
    for event in events:
        for name, value in event.metrics.items():
            curve = result.history[name]
            assert curve[curve.steps.index(event.step)] == value


def test_the_state_that_a_hook_is_shown_is_there():
    events = []
    hook = lambda event: events.append((event.step, int(event.state.step)))
    sf.fit(STEP, start(), batches(), steps=20, log_every=5, hooks=hook)
    assert [step for step, _ in events] == [5, 10, 15, 20]
    assert [now - step for step, now in events] == [2, 2, 2, 0]


def test_the_batch_that_a_hook_is_shown_is_the_last():
    events, _ = shown()
    assert events[-1].batch["x"].shape == (16, 16)


def test_a_hook_is_closed_at_the_end_and_after_an_error():
    class Open:
        closed = 0

        def __call__(self, event):
            if self.closed:
                raise AssertionError("closed")

        def close(self):
            self.closed += 1

    for fails in (lambda event: None, lambda event: 1 / 0):
        hook = Open()
        with contextlib.suppress(ZeroDivisionError):
            shown(hooks=[hook, fails])
        assert hook.closed == 1


# What is saved with it


def run(folder, *, seed=0, **options):
    options = {"checkpoints": sf.Checkpoints(every=7, keep=None, best="eval/loss"), **options}
    return sf.fit(STEP, start(), batches(seed), **{"run_dir": folder, "log_every": 5, **options})


def test_a_checkpoint_has_the_metrics_of_its_own_step_and_no_older_ones(tmp_path):
    result = run(tmp_path, steps=21, evaluation=evaluation(every=3))
    for saved in (7, 14, 21):
        metrics = sf.contents(tmp_path / "checkpoints", step=saved).metrics
        for name, value in metrics.items():
            curve = result.history[name]
            assert (name, saved in curve.steps) == (name, True)
            assert curve[curve.steps.index(saved)] == value
    assert "eval/loss" in sf.contents(tmp_path / "checkpoints", step=21).metrics
    curve = result.history["eval/loss"]
    assert result.best == curve.steps[curve.index(min(curve))]


def test_the_best_is_the_step_at_which_the_best_was_measured(tmp_path):
    values = iter([3.0, 1.0, 2.0, 4.0])
    own = sf.Evaluation(lambda state: {"loss": next(values)}, every=7)
    assert run(tmp_path, steps=28, evaluation=own).best == 14
    assert sf.restore(tmp_path / "checkpoints", start(), step="best").step == 14


def enough(event):
    """Stop at the first log point, step 5, which is read two steps later."""
    return "enough" if event.is_train else None


LOSSES = {0: 4.0, 2: 3.0, 4: 1.0, 6: 2.0, 7: 0.5, 8: 1.0}


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
        ({}, {"hooks": enough, "steps": 10, "every": 4}, 7, [4, 7]),
        ({"every": 4}, {"batches": batches(epochs=2), "every": None}, 8, [4, 8]),
    ],
)
def test_the_best_state_is_saved_whatever_the_schedule(saves, options, best, saved, tmp_path):
    options = {"every": 2, "at_start": False, "batches": batches(), **options}
    schedule = {name: options.pop(name) for name in ("every", "at_start")}
    own = sf.Evaluation(lambda state: {"loss": LOSSES.get(int(state.step), 9.0)}, **schedule)
    plan = sf.Checkpoints(tmp_path, **{"keep": None, "best": "eval/loss", **saves})
    given = options.pop("batches")
    options |= {"checkpoints": plan, "evaluation": own, "log_every": 5}
    result = sf.fit(STEP, start(), given, **options)
    assert (result.best, sorted(sf.verify(tmp_path))) == (best, saved)


def test_a_resumed_run_saves_only_what_is_better_than_before(tmp_path):
    own = sf.Evaluation(lambda state: {"loss": LOSSES.get(int(state.step), 9.0)}, every=2)
    plan = {"checkpoints": sf.Checkpoints(tmp_path, keep=None, best="eval/loss")}
    for steps in (5, 9):
        result = sf.fit(STEP, start(), batches(), steps=steps, evaluation=own, **plan)
    assert (result.best, sorted(sf.verify(tmp_path))) == (4, [2, 4, 5, 9])


@pytest.mark.parametrize("is_slow", [False, True])
def test_saves_that_hold_the_run_up_cause_one_warning_and_a_note(is_slow, tmp_path, monkeypatch):
    save = sf.Series.save
    slow = lambda self, *args, **options: (time.sleep(0.3), save(self, *args, **options))
    monkeypatch.setattr(sf.Series, "save", slow)
    monkeypatch.setattr(train_loop, "_SLOW_SAVES", 0.5 if is_slow else 30.0)
    with warnings.catch_warnings(record=True, action="always") as caught:
        sf.fit(
            STEP, start(), batches(), steps=8, run_dir=tmp_path,
            checkpoints=sf.Checkpoints(every=2),
        )  # fmt: skip
    assert len(caught) == is_slow
    words = r"saves took \d of the last \d s; every [\d]+ steps, they would take 5 % of the time"
    assert all(re.search(words, str(warning.message)) for warning in caught)
    assert [warning.filename for warning in caught] == [__file__] * is_slow
    note = r"Saves took \d\d % of the time; every [\d,]+ steps, they would take 5 %"
    assert re.search(note.replace(" %", "%", 1), (tmp_path / "report.html").read_text())


def test_parameters_that_are_not_finite_are_never_saved(tmp_path):
    nan = {"x": np.full((64, 16), np.nan, np.float32), "mask": DATA["mask"]}
    found = sf.batches(nan, 16, seed=0)
    plan = sf.Checkpoints(every=2, keep=None)
    result = sf.fit(STEP, start(), found, steps=5, run_dir=tmp_path, checkpoints=plan)
    words = "; stopped at step 2; not saved, because a parameter is NaN; see"
    assert words in result.stop_reason.message
    assert sf.latest_step(tmp_path / "checkpoints") is None


def test_a_nan_without_a_hook_that_looks_for_it_stops_at_the_save(tmp_path):
    data = sf.batches({"x": np.full(64, np.nan, np.float32)}, 4)
    hook = lambda event: None
    hook.replaces_nonfinite_stop = True
    plan = sf.Checkpoints(every=4)
    result = learn_on_numbers(tmp_path, data, steps=16, checkpoints=plan, hooks=hook)
    assert str(result.stop_reason) == "stopped at step 4; not saved, because a parameter is NaN"
    assert result.history["train/loss"].steps == [4]


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
    assert sf.latest_step(tmp_path / "checkpoints") == 4
    assert result.stop_reason.message == "the batches ended at step 4"


def test_an_evaluation_that_runs_out_is_not_passed_over():
    ended = iter(())
    own = sf.Evaluation(lambda state: {"loss": next(ended)}, every=2)
    with pytest.raises(
        sf.DataError, match="eval: expected numbers by name, got StopIteration; make"
    ):
        sf.fit(STEP, start(), batches(), steps=4, evaluation=own)


def test_a_step_that_no_memory_holds_is_explained_and_what_was_saved_is_good(tmp_path):
    def huge(params, batch, key):  # 64 TiB and more on the way
        row = jnp.arange(1 << 22, dtype=jnp.float32) * params["w"].sum()
        square = jnp.outer(row, row).at[0].set(1.0)[jnp.int32(batch["x"].sum())]
        return sf.mean(square.sum(), batch["mask"].any())

    run = functools.partial(sf.fit, run_dir=tmp_path, checkpoints=sf.Checkpoints(every=5))
    run(STEP, start(), batches(), steps=10)
    with pytest.raises(sf.OutOfMemoryError, match=r"temporaries +\d+ TiB +100%") as error:
        run(sf.make_train_step(huge, TX), start(), batches(), steps=30)
    assert "Most of it is temporaries" in str(error.value)
    assert sf.verify(tmp_path / "checkpoints") == {5: [], 10: []}


# What an interruption must not change


def test_why_it_stops_is_said_though_a_save_comes_before_the_log_point(tmp_path):
    data = np.ones(64, np.float32)
    data[9] = np.nan  # of step 3
    plan = sf.Checkpoints(every=4)
    result = learn_on_numbers(tmp_path, sf.batches({"x": data}, 4), steps=16, checkpoints=plan)
    assert result.stop_reason.message.startswith("train/loss is nan in step 3")


def test_what_was_said_before_a_stop_is_shown_though_no_batch_comes_after_it(tmp_path):
    """The batches do not say how many there are, and a signal comes when the last is folded in."""

    class Ending:
        def __init__(self, interrupted):
            self._inner = sf.batches({"x": np.zeros(64, np.float32)}, 4, epochs=1)
            self._interrupted = interrupted

        def __iter__(self):
            return self

        def __next__(self):
            if self._interrupted and self.get_state()["step"] == 16:
                signal.raise_signal(signal.SIGINT)
            return next(self._inner)

        def get_state(self):
            return self._inner.get_state()

        def set_state(self, state):
            self._inner.set_state(state)

    def run(interrupted):
        plan = sf.Checkpoints(every=100)
        return learn_on_numbers(tmp_path, Ending(interrupted), checkpoints=plan)

    with pytest.raises(KeyboardInterrupt, match="SIGINT at step 16"):
        run(interrupted=True)
    assert run(interrupted=False).history["train/loss"].steps == [10, 16]


@pytest.mark.parametrize("is_known", [True, False])
def test_with_several_processes_a_signal_has_no_effect_before_all_agree(monkeypatch, is_known):
    """It comes after the last vote before the batches end, if their number is known."""

    def interrupted():
        yield from itertools.islice(batches(), 4)
        signal.raise_signal(signal.SIGTERM)

    class Listed(list):
        def __iter__(self):
            return interrupted()

    monkeypatch.setattr(train_loop, "Alone", Several)  # of which this is one
    own = sf.Evaluation(lambda state: {"loss": 1.0})
    data = Listed(range(4)) if is_known else interrupted()
    with pytest.raises(SystemExit) as caught:
        sf.fit(STEP, start(), data, log_every=3, evaluation=own)
    result = caught.value.result
    assert result.steps == 4
    assert "eval/loss" not in result.history
    assert result.stop_reason.kind == ("exhausted" if is_known else "signal")


def test_a_last_step_that_went_wrong_is_why_it_stopped():
    data = [{"x": np.full(4, value, np.float32)} for value in [1] * 19 + [np.nan]]
    for steps, end in ((20, "all 20 steps were done"), (None, "the batches ended at step 20")):
        result = sf.fit(small.STEP, small.start(), data, steps=steps)
        assert result.capsule.step == 20
        assert str(result.stop_reason) == f"train/loss is nan in step 20, seen when {end}"


class Broken(Exception):
    pass


def learn_on_numbers(directory, batches=None, **options):
    batches = batches or sf.batches({"x": np.zeros(16, np.float32)}, 4, seed=0)
    return sf.fit(small.STEP, small.start(), batches, run_dir=directory, **options)


def test_an_exception_of_a_hook_goes_on_though_its_save_fails(tmp_path):
    class Hook:
        def __call__(self, event):
            raise Broken

        states = iter(["ready"])  # checked before the first step

        def get_state(self):
            return next(self.states, object())  # which no checkpoint can hold

        def set_state(self, state): ...

    with pytest.raises(Broken) as error:
        learn_on_numbers(
            tmp_path,
            steps=20,
            checkpoints=sf.Checkpoints(every=100),
            hooks=[Hook()],
        )
    note = "only the state is saved, for sf.restore, not for a resume: extra/fit/hooks"
    assert note in error.value.__notes__[0]
    saved = sf.restore(tmp_path / "checkpoints", error.value.result.state)
    assert (saved.step, saved.data) == (error.value.result.steps, None)
    assert saved.state.params == error.value.result.state.params


def test_a_run_that_was_done_and_was_given_more_steps_is_interrupted_as_any_other(tmp_path):
    run = functools.partial(learn_on_numbers, tmp_path, checkpoints=sf.Checkpoints(every=100))
    run(steps=20)
    stopped = run(steps=40, hooks=lambda event: "enough" if event.step == 30 else None)
    assert stopped.stop_reason.message == "enough; stopped at step 34"
    assert run(steps=40).history["train/loss"].steps == [10, 20, 30, 40]


# iterate


def add(state, batch):
    return state + batch, {"seen": sf.mean(batch)}


def test_it_pulls_no_batch_before_it_is_asked_to():
    pulled = []
    batches = (pulled.append(i) or jnp.float32(i) for i in itertools.count())
    fold = sf.iterate(add, jnp.float32(0), batches)
    assert pulled == []
    next(fold)
    assert pulled == [0]


def test_without_batches_it_gives_nothing():
    assert list(sf.iterate(add, jnp.float32(0), [])) == []


def test_an_error_of_the_step_or_of_the_data_comes_through():
    def broken():
        yield jnp.float32(1)
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        list(sf.iterate(add, jnp.float32(0), broken()))


def test_a_run_leaves_no_cycle_that_keeps_its_state():
    gc.collect()
    gc.disable()
    try:
        result = sf.fit(STEP, start(), itertools.islice(batches(), 4))
        state = weakref.ref(jax.tree.leaves(result.state)[0])
        del result
        assert state() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("per_call", [1, 3, 16])
def test_the_state_of_an_event_is_at_most_four_steps_ahead(per_call):
    ahead = []
    hook = lambda event: ahead.append(int(event.state.step) - event.step)
    data = itertools.islice(batches(), 70)
    sf.fit(STEP, start(), data, log_every=20, hooks=hook, steps_per_call=per_call)
    assert len(ahead) == 4
    assert max(ahead[:3]) == 4
