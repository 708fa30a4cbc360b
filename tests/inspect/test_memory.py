"""The memory of a step by category, and the errors of a step that does not fit."""

import dataclasses
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import stepfold as sf
from stepfold.inspect.compiled import CompiledStep
from stepfold.inspect.memory import bytes_per_device, exhausted, is_exhausted
from stepfold.inspect.memory import memory_of as memory_of_program

TX = optax.adam(0.1)
W, B, COUNT, KEY = 64 * 128 * 4, 128 * 4, 4, 8


def init(key):
    return {"w": jax.random.normal(key, (64, 128)), "b": jnp.zeros(128)}


def loss_fn(params, batch, key):
    return sf.mean((batch["x"] @ params["w"] + params["b"]).mean(-1) * batch["y"])


STEP, EVAL = sf.make_train_step(loss_fn, TX), sf.make_eval_step(loss_fn)


def make_batch(rows):
    return {"x": np.ones((rows, 64), np.float32), "y": np.ones(rows, np.float32)}


BATCH = make_batch(16)


@cache
def compiled(dims=None, step=STEP, build=init, rows=16, tx=TX, **options):
    shape = jax.eval_shape(lambda: sf.init_state(build, tx, jax.random.key(0)))
    plan = dims and sf.make_sharding(shape, sf.make_mesh(dims))
    return sf.compile_step(step, shape, make_batch(rows), sharding=plan, **options)


def memory_of(step):
    return memory_of_program(step.compiled, step.state, step.batch)


def parts(memory):
    return memory.params, memory.opt_state, memory.model_state, memory.rest, memory.batch


# By hand


@pytest.mark.parametrize(
    ("dims", "cut", "rows"),
    [(None, 1, 16), ((2, 4, 1, 1), 4, 2)],
    ids=str,
)
def test_bytes_by_category(dims, cut, rows):
    memory = memory_of(compiled(dims))
    params = W // cut + B  # too small a bias to be cut
    assert parts(memory) == (params, 2 * params + COUNT, 0, 4 + KEY, rows * (64 + 1) * 4)
    assert memory.state == 3 * params + COUNT + 4 + KEY


def test_a_model_state_is_apart():
    def loss_fn(params, batch, key, seen):
        total = seen["mean"] * jnp.bfloat16(0.9) + batch["x"].mean(0).astype(jnp.bfloat16)
        return sf.mean(batch["x"] @ params["w"]), {}, {"mean": total}

    def build(key):
        return {"w": jnp.ones((64, 4))}, {"mean": jnp.zeros(64, jnp.bfloat16)}

    shape = jax.eval_shape(lambda: sf.init_state(build, TX, jax.random.key(0), stateful=True))
    step = sf.make_train_step(loss_fn, TX, stateful=True)
    assert memory_of(sf.compile_step(step, shape, BATCH)).model_state == 64 * 2


def test_narrow_parameters_and_wide_keys():
    narrow = lambda key: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), init(key))
    key = jax.random.key(0, impl="rbg")
    loss_fn = lambda params, batch, key: sf.mean((params["w"] ** 2).mean(0) + params["b"])
    state = sf.init_state(narrow, optax.sgd(0.1), key)
    memory = memory_of(sf.compile_step(sf.make_train_step(loss_fn, optax.sgd(0.1)), state, BATCH))
    assert parts(memory)[:4] == ((W + B) // 2, 0, 0, 4 + 16)


def test_a_state_that_is_no_train_state_is_all_parameters():
    state = {"w": jnp.ones((64, 32)), "n": jnp.zeros((), jnp.int32)}
    step = lambda state, batch: ({"w": state["w"] * batch, "n": state["n"] + 1}, {})
    memory = memory_of(sf.compile_step(step, state, jnp.ones(32)))
    assert parts(memory) == (64 * 32 * 4 + 4, 0, 0, 0, 32 * 4)


@pytest.mark.parametrize(
    ("dims", "step"), [(None, STEP), ((1, 8, 1, 1), STEP), ((2, 4, 1, 1), EVAL)]
)
def test_the_peak_is_no_less_than_what_the_program_says(dims, step):
    step = compiled(dims, step)
    memory, program = memory_of(step), step.compiled.memory_analysis()
    held = program.argument_size_in_bytes + program.temp_size_in_bytes
    assert memory.peak >= held + program.output_size_in_bytes - program.alias_size_in_bytes
    assert memory.peak == sum(parts(memory)) + memory.temporaries + memory.output
    assert min(parts(memory)) >= 0 <= min(memory.temporaries, memory.output)


def test_donation_saves_the_output():
    kept, given = memory_of(compiled(donate=False)), memory_of(compiled())
    assert kept.output - given.output == pytest.approx(given.state, abs=64)
    assert given.output < 256
    assert kept.output >= kept.state


def test_accumulation_lowers_the_temporaries():
    def deep(params, batch, key):
        hidden = batch["x"]
        for _ in range(4):
            hidden = jnp.tanh(hidden @ params["w"] @ params["w"].T)
        return sf.mean(hidden.mean(-1) * batch["y"])

    of = lambda n: memory_of(compiled(None, sf.make_train_step(deep, TX, accumulate=n), rows=1024))
    assert of(16).temporaries < of(1).temporaries / 4


def test_what_is_cut_unevenly_is_what_a_share_is():
    mesh = sf.make_mesh((8,), ("x",))
    place = lambda shape, *spec: jax.ShapeDtypeStruct(
        shape, jnp.int8, sharding=NamedSharding(mesh, P(*spec))
    )
    arrays = {"a": place((16, 3), "x"), "b": place((5,)), "c": place(())}
    assert bytes_per_device(arrays) == 2 * 3 + 5 + 1
    assert bytes_per_device(()) == 0


# In the memory of the host


@pytest.mark.parametrize(
    "dims", [pytest.param(None, marks=pytest.mark.full), (1, 8, 1, 1)], ids=str
)
def test_what_is_on_the_host_is_apart(dims):
    shape = jax.eval_shape(lambda: sf.init_state(init, TX, jax.random.key(0)))
    mesh = sf.make_mesh(dims) if dims else sf.make_mesh(devices=jax.devices()[:1])
    here = sf.make_sharding(shape, mesh)
    host = jax.tree.map(lambda to: to.with_memory_kind("pinned_host"), here.opt_state)
    plan = here._replace(opt_state=host)

    def step(state, batch):
        opt_state = jax.device_put(state.opt_state, here.opt_state)
        state, metrics = STEP(state._replace(opt_state=opt_state), batch)
        return state._replace(opt_state=jax.device_put(state.opt_state, host)), metrics

    report, plain = (
        sf.describe(step, shape, BATCH, sharding=plan),
        sf.describe(STEP, shape, BATCH, sharding=here),
    )
    assert (report.memory.host, report.memory.opt_state) == (plain.memory.opt_state, 0)
    assert report.memory.state + report.memory.host == plain.memory.state
    assert plain.memory.host == 0
    assert re.search(r"\nin the host's memory +\d+(\.\d+)? KiB$", str(report.memory))
    assert "host" not in str(plain.memory)
    assert report.to_dict()["memory"]["host"] == report.memory.host


@dataclasses.dataclass
class Program:
    """What a compiler says of a program's memory."""

    argument_size_in_bytes: int = 1000
    output_size_in_bytes: int = 1200
    alias_size_in_bytes: int = 900
    temp_size_in_bytes: int = 50
    generated_code_size_in_bytes: int = 7
    peak_memory_in_bytes: int = 0
    host_temp_size_in_bytes: int = 3

    def memory_analysis(self):
        return self


def test_the_compilers_own_peak_counts_where_it_is_higher():
    memory = memory_of_program(Program(), (), ())
    assert (memory.temporaries, memory.output, memory.host) == (57, 300, 3)
    memory = memory_of_program(Program(peak_memory_in_bytes=2000), (), ())
    assert (memory.temporaries, memory.peak) == (700, 1000)


# What does not fit


def normalized(error):
    return re.sub(r"\s+", " ", str(error))


def test_a_step_that_does_not_fit_says_what_takes_most_and_what_to_turn():
    """A device that has no memory left says so when it is called, or when what it gave is read."""

    def run(state, batch):
        raise RuntimeError("INTERNAL: a step before: RESOURCE_EXHAUSTED: no room for 9 bytes.\nNo.")

    good = compiled()
    parts = good.compiled, good.jaxpr, good.state, good.batch
    step = CompiledStep(good.step, run, *parts, trains=True)
    with pytest.raises(sf.errors.OutOfMemoryError) as error:
        step(sf.init_state(init, TX, jax.random.key(0)), BATCH)
    message = normalized(error.value)
    assert "cannot be run in this device's memory; it needs on each device" in message
    assert "optimizer's state 65.0 KiB" in message
    assert "Most of it is the state: shard it over more devices" in message
    assert message.endswith("XLA reports: RESOURCE_EXHAUSTED: no room for 9 bytes.")
    assert isinstance(error.value, MemoryError)
    assert isinstance(error.value.__cause__, RuntimeError)


def test_what_does_not_even_compile_says_what_state_and_batch_take():
    step = compiled()
    found = normalized(exhausted(RuntimeError("RESOURCE_EXHAUSTED: no"), step.state, step.batch))
    assert "cannot be compiled" in found
    assert "without temporaries" in found
    assert re.search(r"temporaries [\d.]+ \w+", found) is None
    assert "accumulate=n" in found
    assert "sf.sharding.fsdp()" in found


@pytest.mark.parametrize("error", [RuntimeError("INTERNAL: no"), ValueError("RESOURCE_EXHAUSTED")])
def test_other_errors_are_not_of_memory(error):
    assert not is_exhausted(error)
