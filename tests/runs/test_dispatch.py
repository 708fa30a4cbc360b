"""What a run reads from devices, compiles and shows to hooks, and when."""

import contextlib
import gc
import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.small import EVAL_STEP, STEP, TX, batches, examples, full_but, loss_fn, start

import stepfold as sf
from stepfold.loop.step_runner import StepRunner


def evaluation(measure=EVAL_STEP, **options):
    return sf.Evaluation(measure, lambda: sf.batches(examples(), 8, epochs=1), **options)


def step():
    """Make a step that jax has not seen before."""
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


def noting_pulls(reads, seen):
    """Yield batches, and note before each how often arrays were read."""
    for number, batch in enumerate(batches()):
        seen.append((number, len(reads)))
        yield batch


@pytest.mark.parametrize("form", ["step", "jitted", "compiled"])
def test_nothing_waits_for_the_device_between_log_points(form, reads):
    """Metrics are read when the steps up to the next log point are under way."""
    made = {
        "step": lambda: STEP,
        "jitted": lambda: jax.jit(STEP),
        "compiled": lambda: sf.compile_step(STEP, start(), next(batches())),
    }
    seen = []
    sf.fit(made[form](), start(), noting_pulls(reads, seen), steps=40, log_every=10)
    read_at = [
        number
        for (number, before), (_, after) in itertools.pairwise(seen)
        if after != before and number
    ]
    assert read_at == [19, 29]


@pytest.mark.filterwarnings("ignore:batches. expected get_state and set_state")
def test_a_checkpoint_that_is_not_due_reads_nothing(reads, tmp_path):
    seen, checkpoints = [], sf.Checkpoints(tmp_path, every=100)
    hooks = [lambda event: None]
    data = noting_pulls(reads, seen)
    sf.fit(STEP, start(), data, steps=9, log_every=10, hooks=hooks, checkpoints=checkpoints)
    assert {count for number, count in seen if number} == {seen[1][1]}


@pytest.mark.parametrize("devices", full_but([8], [1, 8]))
def test_a_step_and_an_evaluation_are_compiled_once_in_a_run(devices, compiles, tmp_path):
    if devices > 1 and jax.__version_info__ < (0, 12):
        pytest.skip("jax 0.10 crashes where several CPU devices are given a donated array")
    plan = sf.make_sharding(start(), sf.make_mesh()) if devices > 1 else jax.devices()[0]

    def run(folder, steps, train, evaluations):
        state = jax.device_put(start(), plan)
        compiles.clear()
        sf.fit(
            train, state, batches(8), steps=steps, run_dir=tmp_path / folder, log_every=2,
            evaluation=evaluations, checkpoints=sf.Checkpoints(every=7, keep=1),
        )  # fmt: skip
        return len(compiles)

    own = lambda name: evaluation(
        sf.make_eval_step(lambda *args: loss_fn(*args)), every=6, name=name
    )
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


@pytest.mark.parametrize(
    ("per_call", "log_every"), [(10, 10), (10, 100), (16, 16), (16, 32), (8, 64), (5, 20)]
)
def test_usual_numbers_of_steps_in_a_call_are_one_program(per_call, log_every, monkeypatch):
    """Of calls as long as asked for, and one more for the last steps."""
    counts, call = [], StepRunner.__call__
    note = lambda *given: counts.append(len(given[2])) or call(*given)
    monkeypatch.setattr(StepRunner, "__call__", note)
    last = 2 * log_every + per_call + 1
    options = {"steps": last, "steps_per_call": per_call, "log_every": log_every}
    sf.fit(STEP, start(), batches(), **options)
    assert counts == [per_call] * (last // per_call) + [last % per_call]


# What a hook is shown


def test_a_hook_is_shown_every_log_point_and_every_evaluation():
    """The random runs hold which events there are; here is what else an event has."""
    events = []
    sf.fit(
        STEP, start(), batches(), steps=12, log_every=5, hooks=events.append,
        evaluation=evaluation(every=4),
    )  # fmt: skip
    assert {event.total for event in events} == {12}
    assert [(event.step, len(event.per_step.get("train/loss", ()))) for event in events] == [
        *((4, 0), (5, 5), (8, 0), (10, 5), (12, 2), (12, 0))
    ]
    assert events[-1].batch["x"].shape == (4,)


@pytest.mark.parametrize(
    ("log_every", "per_call", "is_exact", "ahead"),
    [
        *((5, 1, False, 5), (19, 3, False, 19), (20, 1, False, 10), (20, 3, False, 10)),
        *((24, 16, False, 16), (40, 1, False, 10), (20, 3, True, 0)),
    ],
)
def test_the_state_that_a_hook_is_shown_is_a_few_steps_ahead_unless_it_is_exact(
    log_every, per_call, is_exact, ahead
):
    found, last = [], 3 * log_every + log_every // 2
    hook = lambda event: found.append((event.step, int(event.state.step) - event.step))
    hook.needs_exact_state = is_exact
    options = {
        "log_every": log_every,
        "steps_per_call": per_call,
        "hooks": sf.hooks.only_warn(hook),
    }
    sf.fit(STEP, start(), itertools.islice(batches(), last), **options)
    log_points = [*range(log_every, last, log_every), last]
    assert found == [(step, min(ahead, last - step)) for step in log_points]


def test_a_hook_is_closed_at_the_end_and_after_an_error():
    class Open:
        closed = 0

        def __call__(self, event):
            assert not self.closed

        def close(self):
            self.closed += 1

    for fails in (lambda event: None, lambda event: 1 / 0):
        hook = Open()
        with contextlib.suppress(ZeroDivisionError):
            sf.fit(STEP, start(), batches(), steps=12, hooks=[hook, fails])
        assert hook.closed == 1


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


# iterate


def add(state, batch):
    return state + batch, {"seen": sf.mean(batch)}


def test_iterate_pulls_no_batch_before_it_is_asked_to():
    pulled = []
    data = (pulled.append(i) or jnp.float32(i) for i in itertools.count())
    fold = sf.iterate(add, jnp.float32(0), data)
    assert pulled == []
    next(fold)
    assert pulled == [0]
    assert list(sf.iterate(add, jnp.float32(0), [])) == []


def test_iterate_passes_an_error_of_the_step_or_of_the_data():
    def broken():
        yield jnp.float32(1)
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        list(sf.iterate(add, jnp.float32(0), broken()))
