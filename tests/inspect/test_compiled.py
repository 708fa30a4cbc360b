"""A compiled step has the bits of jit, never compiles again, and refuses others."""

import copy
import functools
import statistics
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.small import full_but

import stepfold as sf
from stepfold.inspect.compiled import abstract_arguments

TX = optax.sgd(0.1, momentum=0.9)
WEIGHTS = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32) / 8


def init(key):
    return {"w": jnp.asarray(WEIGHTS), "b": jnp.zeros(128)}


def loss_fn(params, batch, key):
    out = jnp.tanh(batch["x"] @ params["w"] + params["b"]).mean(-1)
    return sf.mean((out - batch["y"].astype(out.dtype) + jax.random.uniform(key)) ** 2)


def make(params=init):
    return sf.init_state(params, TX, jax.random.key(0))


SHAPE = jax.eval_shape(make)
STEP = sf.make_train_step(loss_fn, TX)
EVAL = sf.make_eval_step(loss_fn)


def on_host(labels=np.int32):
    x = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    return {"x": x, "y": np.arange(16, dtype=labels)}


def plan_on(mesh):
    return mesh and sf.make_sharding(SHAPE, mesh)


@functools.cache
def first_state(mesh):
    return sf.init_state(init, TX, jax.random.key(0), sharding=plan_on(mesh))


def born(mesh):
    return jax.tree.map(jnp.copy, first_state(mesh))


def placed(batch, mesh):
    return sf.shard_batch(batch, mesh) if mesh else jax.device_put(batch, jax.devices()[0])


FORMS = {
    "host": lambda batch, _: batch,
    "uncommitted": lambda batch, _: jax.tree.map(jnp.asarray, batch),
    "placed": placed,
}


@pytest.fixture(params=full_but(["mesh"], ["one device", "mesh"]))
def mesh(request):
    return sf.make_mesh((1, 8, 1, 1)) if request.param == "mesh" else None


@functools.cache
def program(mesh, donate):
    """Compile the step, once for all tests, which call copies of it."""
    return sf.compile_step(STEP, first_state(mesh), on_host(), donate=donate)


def kept(mesh, looked):
    """A step that donates nothing, as it is at first, and after a call under other settings."""
    step, state, batch = copy.copy(program(mesh, False)), first_state(mesh), on_host()
    if looked:
        with jax.default_matmul_precision("float32"):
            step(state, batch)
    return step, state, batch


def donating(mesh):
    """A step that was not called yet, and donates the state."""
    return copy.copy(program(mesh, True))


looked = pytest.mark.parametrize("looked", [False, True], ids=["at first", "looked at"])


@pytest.fixture
def safe(mesh):
    """Leave out what ends or stops the process: jax 0.10 on several CPU devices, under jit too."""
    if mesh and jax.__version_info__ < (0, 12):
        pytest.skip("jax 0.10 crashes or hangs where several CPU devices are given a donated array")


def gone(arrays):
    return {leaf.is_deleted() for leaf in jax.tree.leaves(arrays)}


def places(arrays):
    return jax.tree.map(lambda leaf: leaf.sharding, arrays)


# What comes back


PLANS = {
    "of the state": lambda: sf.make_sharding(
        SHAPE, sf.make_mesh((2, 2, 2, 1)), [("params/w", P("fsdp", "tp"))]
    ),
    "given": lambda: plan_on(sf.make_mesh()),
    "one for all": lambda: NamedSharding(sf.make_mesh(), P()),
}


@pytest.mark.parametrize("name", full_but(["given"], PLANS))
def test_the_state_comes_back_in_the_shardings_of_the_plan(name):
    plan, state = PLANS[name](), make()
    wanted = plan if name != "one for all" else jax.tree.map(lambda _: plan, SHAPE)
    if name == "of the state":
        state = sf.init_state(init, TX, jax.random.key(0), sharding=plan)
    step = sf.compile_step(
        STEP, state, on_host(), sharding=None if name == "of the state" else plan
    )
    for _ in range(3):
        state, _ = step(state, on_host())
        assert places(state) == places(step.state) == wanted
    assert step.batch["x"].sharding.spec == P(("dp", "fsdp"))


def test_the_bits_are_those_of_jit(mesh):
    ours, theirs = born(mesh), born(mesh)
    batch = placed(on_host(), mesh)
    step, jitted = donating(mesh), jax.jit(STEP)
    for _ in range(3):
        (ours, seen), (theirs, wanted) = step(ours, batch), jitted(theirs, batch)
    unkeyed = lambda state: state._replace(key=jax.random.key_data(state.key))
    chex.assert_trees_all_equal((unkeyed(ours), seen), (unkeyed(theirs), wanted))


def test_an_evaluation_gives_the_bits_of_jit_and_donates_nothing(mesh):
    state, batch = born(mesh), placed(on_host(), mesh)
    step = sf.compile_step(EVAL, SHAPE, abstract(batch), sharding=plan_on(mesh))
    for _ in range(2):
        chex.assert_trees_all_equal(step(state, batch), jax.jit(EVAL)(state, batch))
    assert gone(state) == {False}


# Donation


def test_the_state_is_donated_under_any_settings(mesh):
    state, batch, step = born(mesh), placed(on_host(), mesh), donating(mesh)
    for precision in (None, None, "float32"):
        before = state
        with jax.default_matmul_precision(precision):
            state, _ = step(state, batch)
        assert gone(before) == {True}
        assert gone((state, batch)) == {False}


@looked
def test_without_donation_the_state_stays(mesh, looked):
    step, state, batch = kept(mesh, looked)
    for _ in range(2):
        after, _ = step(state, batch)
    assert gone(state) == {False}
    assert after.step == 1


def test_an_evaluation_that_gives_a_pair_never_donates():
    """Its first result has the structure of a state that is one array, but is none."""
    state = jnp.ones(8)
    step = sf.compile_step(lambda state, batch: (jnp.sum(state * batch), {}), state, jnp.ones(8))
    assert step(state, jnp.ones(8))[0] == 8
    assert not state.is_deleted()


@looked
@pytest.mark.usefixtures("safe")
def test_a_donated_state_used_again_is_refused(mesh, looked):
    state, step = born(mesh), donating(mesh)
    if looked:
        with jax.default_matmul_precision("float32"):
            step(born(mesh), on_host())
    step(state, on_host())
    words = "^state/step, state/params/b, .*: the arrays were donated to .*; .*donate=False"
    with pytest.raises(sf.errors.ConfigError, match=words):
        step(state, on_host())


# Calls compile nothing and trace nothing


def count_rows(state, batch):
    """A step that compiles quickly, with the arguments and results of any other."""
    return state._replace(step=state.step + 1), {"rows": batch["y"].sum()}


def abstract(batch):
    """The batch of `FORMS` as an abstract one, in the same place."""
    shape = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, batch))
    give = lambda leaf, form: form.update(sharding=getattr(leaf, "sharding", None))
    return jax.tree.map(give, batch, shape)


EXAMPLES = {
    **FORMS,
    "labels as numpy counts them": lambda batch, _: on_host(np.int64),
    "abstract": lambda batch, _: abstract(batch),
    "abstract and placed": lambda batch, mesh: abstract(placed(batch, mesh)),
}


@functools.cache
def counting(mesh, example):
    """Compile a step that notes when it is traced, for an example in any form."""
    traced = []

    def counted(state, batch):
        traced.append(batch)
        return count_rows(state, batch)

    step = sf.compile_step(counted, first_state(mesh), EXAMPLES[example](on_host(), mesh))
    assert len(traced) == 1
    return step, traced


@pytest.mark.parametrize("example", EXAMPLES)
def test_calls_compile_and_trace_nothing(mesh, example, compiles):
    """A jitted step takes int64 for int32 without a word, and so does the fast path."""
    compiled, traced = counting(mesh, example)
    for form in (*FORMS.values(), EXAMPLES["labels as numpy counts them"]):
        step, state, batch = copy.copy(compiled), born(mesh), form(on_host(), mesh)
        placed(batch, mesh)  # jax cuts an array in pieces by a program of its own, once
        compiles.clear()
        traced.clear()
        for _ in range(3):
            state, _ = step(state, batch)
        assert (compiles, traced) == ([], [])
        assert int(state.step) == 3


def scaled_loss(params, batch, key):
    scale = jnp.where(batch["on"], batch["scale"], 0.0)
    return sf.mean((batch["x"] @ params["w"]) ** 2 * scale)


def with_scalars(scale, on=True):
    return {"x": on_host()["x"], "scale": scale, "on": on}


@functools.cache
def scaling(mesh):
    step = sf.make_train_step(scaled_loss, TX)
    return sf.compile_step(step, first_state(mesh), with_scalars(1.0), donate=False)


@looked
def test_python_scalars_stay_allowed_if_the_example_had_them(mesh, looked, compiles):
    step, state, loss = copy.copy(scaling(mesh)), first_state(mesh), []
    if looked:
        with jax.default_matmul_precision("float32"):
            step(state, with_scalars(1.0))
    compiles.clear()
    for given in ((1.0, True), (2.0, True), (2.0, False)):
        _, metrics = step(state, with_scalars(*given))
        loss.append(metrics["loss"])
    assert compiles == []
    first, second, third = (float(one.compute()) for one in loss)
    assert (second, third) == (2 * first, 0)
    with pytest.raises(
        sf.errors.RetraceError, match=r"batch/scale: expected float32\[\], got int 2"
    ):
        step(state, with_scalars(2))


# What a call costs


def calls(function, *args):
    """Count what Python functions run, jax's own too."""
    count = 0

    def seen(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(seen)
    try:
        made = function(*args)
    finally:
        sys.setprofile(None)
    return count, made


@pytest.mark.usefixtures("safe")
@pytest.mark.parametrize("form", ["host", "placed"])
def test_a_call_runs_at_most_two_more_functions_than_a_jitted_one(mesh, form):
    batch, ours, theirs = FORMS[form](on_host(), mesh), born(mesh), born(mesh)
    step, options = copy.copy(counting(mesh, form)[0]), {}
    if mesh and form != "placed":  # whose places it would otherwise not know
        shardings = places((step.state, step.batch))
        options = {"in_shardings": shardings, "out_shardings": (shardings[0], None)}
    jitted = jax.jit(count_rows, donate_argnums=0, **options)
    counts = []
    for _ in range(40):
        own, (ours, _) = calls(step, ours, batch)
        jax.block_until_ready(ours)  # since many programs at once can hang on eight CPU devices
        plain, (theirs, _) = calls(jitted, theirs, batch)
        jax.block_until_ready(theirs)
        counts.append((plain, own))
    # Some calls pay for a miss of one of jax's caches, of either; few jitted calls do less.
    plain, own = zip(*counts[2:], strict=True)
    assert min(own) <= statistics.median(plain) + 2, counts


# Refused


def put(part, change):
    """Change one leaf of the state or of the batch."""

    def changed(state, batch, mesh):
        if part in batch:
            return state, {**batch, part: change(batch[part])}
        if part in state.params:
            return state._replace(params={**state.params, part: change(state.params[part])}), batch
        return state._replace(**{part: change(getattr(state, part))}), batch

    return changed


def elsewhere(leaf):
    return jax.device_put(leaf, jax.devices()[3])


def less(batch, name):
    return {key: leaf for key, leaf in batch.items() if key != name}


FAULTS = {
    "narrower parameter": (
        put("w", lambda leaf: leaf.astype(jnp.bfloat16)),
        r"  state/params/w: expected float32\[64,128\], got bfloat16\[64,128\]",
    ),
    "narrower batch": (
        put("x", lambda leaf: leaf.astype(np.float16)),
        r"  batch/x: expected float32\[16,64\], got float16\[16,64\]",
    ),
    "unsigned labels": (
        put("y", lambda leaf: leaf.astype(np.uint8)),
        r"  batch/y: expected int32\[16\], got uint8\[16\]",
    ),
    "Python's float": (
        put("step", lambda _: 0.0),
        r"  state/step: expected int32\[\], got float 0.0",
    ),
    "weak labels": (
        put("y", lambda _: jnp.full(16, 0)),
        r"  batch/y: expected int32\[16\] with a strong type, got a weak type, as Python numbers",
    ),
    "number for an array": (put("y", lambda _: 3), r"  batch/y: expected int32\[16\], got int 3"),
    "shorter batch": (
        put("x", lambda leaf: leaf[:8]),
        r"  batch/x: expected float32\[16,64\], got float32\[8,64\]",
    ),
    "another rank": (
        put("y", lambda leaf: leaf[:, None]),
        r"  batch/y: expected int32\[16\], got int32\[16,1\]",
    ),
    "another kind of key": (
        put("key", lambda _: jax.random.key(0, impl="rbg")),
        r"  state/key: expected key<fry>\[\], got key<rbg>\[\]",
    ),
    "raw key": (
        put("key", lambda _: jax.random.PRNGKey(0)),
        r"  state/key: expected key<fry>\[\], got uint32\[2\]",
    ),
    "missing leaf": (
        lambda state, batch, _: (state, less(batch, "y")),
        r"  batch/y: missing, expected int32\[16\]",
    ),
    "extra leaf": (
        lambda state, batch, _: (state, {**batch, "mask": np.ones(16, np.float32)}),
        r"  batch/mask: unexpected float32\[16\]",
    ),
    "None besides": (
        lambda state, batch, _: (state, {**batch, "mask": None}),
        "  batch: expected the containers .*'x': .*, got .*'mask'",
    ),
    "a list for a tuple": (
        put("opt_state", list),
        "  state: expected the containers .*, got .*",
    ),
    "a string": (put("y", lambda _: "cat"), r"  batch/y: expected int32\[16\], got str 'cat'"),
    "two at once": (
        lambda state, batch, _: (state._replace(step=np.float32(0)), less(batch, "x")),
        r"  state/step: expected int32\[\], got float32\[\]\n  batch/x: missing, expected float32",
    ),
}


@looked
def test_another_argument_is_refused_by_its_path(mesh, looked, compiles):
    step, state, batch = kept(mesh, looked)
    for fault, (change, words) in FAULTS.items():
        wrong = change(state, batch, mesh)
        compiles.clear()
        for _ in range(2):
            with pytest.raises(sf.errors.RetraceError, match=words) as caught:
                step(*wrong)
        assert str(caught.value).startswith("the step was compiled for other arguments, and would")
        assert caught.value.__suppress_context__, fault
        step(state, batch)
        assert compiles == [], fault


WHOLE = r"  state/params/w: expected it on .*'fsdp'.* of the mesh .*, got it on .*\(\) of the mesh"


@looked
def test_arrays_that_are_whole_where_they_were_cut_are_refused(looked, compiles):
    mesh = sf.make_mesh((1, 8, 1, 1))
    step, state, batch = kept(mesh, looked)
    everywhere = NamedSharding(mesh, P())
    params = {**state.params, "w": jax.device_put(state.params["w"], everywhere)}
    whole = jax.device_put(batch, everywhere)
    compiles.clear()
    with pytest.raises(sf.errors.RetraceError, match=WHOLE):
        step(state._replace(params=params), batch)
    with pytest.raises(
        sf.errors.RetraceError, match="batch/x: expected it on .*\n  batch/y: expected it"
    ):
        step(state, whole)
    assert compiles == []


@looked
def test_state_of_the_example_is_accepted_with_weak_types(mesh, looked, compiles):
    step, state, batch = kept(mesh, looked)
    want = step(state, batch)
    weak = state._replace(step=0, params={**state.params, "b": jnp.full(128, 0.0)})
    step(weak, batch)
    compiles.clear()
    chex.assert_trees_all_equal(step(weak, batch), want)
    assert compiles == []


def test_advice_on_shapes_is_given_for_changed_shapes_only():
    step, state, batch = kept(None, False)
    for faults, is_given in (
        (("shorter batch", "another rank"), True),
        (("narrower batch", "unsigned labels", "missing leaf", "extra leaf"), False),
    ):
        for fault in faults:
            with pytest.raises(sf.errors.RetraceError) as caught:
                step(*FAULTS[fault][0](state, batch, None))
            assert ("Keep the batch shape" in str(caught.value)) == is_given, fault


# Used inside of something else


def stacked(arrays):
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), arrays)


OUTER = {
    "jit": lambda step, state, batch: jax.jit(step)(state, batch),
    "eval_shape": lambda step, state, batch: jax.eval_shape(step, state, batch),
    "scan": lambda step, state, batch: jax.lax.scan(step, state, stacked(batch)),
    "vmap": lambda step, state, batch: jax.vmap(step)(stacked(state), stacked(batch)),
    "vmap over batches": lambda step, state, batch: jax.vmap(step, (None, 0))(
        state, stacked(batch)
    ),
}


def test_traced_it_is_the_step_itself():
    step, state, batch = kept(None, True)
    batch = jax.tree.map(jnp.asarray, batch)
    for outer in OUTER.values():
        got, wanted = (
            jax.eval_shape(lambda *args, one=one, outer=outer: outer(one, *args), state, batch)
            for one in (step, STEP)
        )
        assert got == wanted
    got, wanted = (jax.jit(one)(state, batch)[0].params for one in (step, STEP))
    chex.assert_trees_all_equal(got, wanted)


# Under other settings


def test_other_settings_run_what_was_compiled(mesh, compiles):
    step, state, batch = kept(mesh, False)
    wanted = step(state, batch)[1]
    compiles.clear()
    with jax.default_matmul_precision("tensorfloat32"):
        seen = step(state, batch)[1]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("raise"):
        again = step(state, batch)[1]
    assert compiles == []
    chex.assert_trees_all_equal(wanted, seen, again)


@looked
def test_a_nan_is_found_where_it_is_looked_for(looked):
    step, state, batch = kept(None, looked)
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        step(state, {**batch, "x": batch["x"] * np.nan})


@looked
def test_under_disable_jit_the_step_runs_eagerly(looked, mesh):
    compiled, state, batch = kept(mesh, looked)
    seen = []

    def step(state, batch):
        seen.append(batch["x"])
        return state, {}

    compiled.step = step
    with jax.disable_jit():
        compiled(state, batch)
    assert seen[0] is batch["x"]
    compiled(state, batch)
    assert len(seen) == 1


def test_a_step_compiled_under_disable_jit_is_the_same_program():
    def step(state, batch):
        return jax.lax.scan(lambda total, x: (total + x, {}), state, batch)

    state, batch = jnp.zeros(4), jnp.ones((8, 4))
    with jax.disable_jit():
        eager = sf.compile_step(step, state, batch)
        assert eager(state, batch)[0].tolist() == [8.0] * 4
    jitted = sf.compile_step(step, state, batch)
    wanted = jitted.compiled.cost_analysis(), jitted.compiled.as_text().count("while(")
    assert (eager.compiled.cost_analysis(), eager.compiled.as_text().count("while(")) == wanted
    assert eager(state, batch)[0].tolist() == [8.0] * 4


# Errors of the user's own


@functools.cache
def failing():
    """Compile a step that fails with the last of these words."""
    words = []

    def check(total):
        if words:
            raise ValueError(words[-1])
        return total

    def loss_fn(params, batch, key):
        out = (batch["x"] @ params["w"]).mean(-1)
        total = jax.pure_callback(check, jax.ShapeDtypeStruct((), out.dtype), batch["x"].sum())
        return sf.mean(out**2 * jax.lax.stop_gradient(total))

    step = sf.compile_step(sf.make_train_step(loss_fn, TX), SHAPE, on_host(), donate=False)
    return step, words


@looked
@pytest.mark.parametrize("message", ["of my own", "cannot delete the file", "donate something"])
def test_an_error_at_run_time_comes_through_unchanged(message, looked):
    step, words = failing()
    step = copy.copy(step)
    words.clear()
    if looked:
        with jax.default_matmul_precision("float32"):
            step(first_state(None), on_host())
    words.append(message)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(step(first_state(None), on_host()))


# What cannot be compiled


@pytest.mark.parametrize(
    ("step", "got"),
    [
        (lambda: jax.jit(STEP), "PjitFunction .* as it is"),
        (lambda: program(None, False), "CompiledStep"),
        (lambda: None, "NoneType None"),
    ],
)
def test_what_is_no_plain_step_is_refused(step, got):
    words = f"compile_step: expected a step .*, neither jitted nor compiled, got {got}"
    with pytest.raises(sf.errors.ConfigError, match=words):
        sf.compile_step(step(), make(), on_host())


def test_a_state_on_two_meshes_is_refused():
    key = jax.device_put(jax.random.key(0), NamedSharding(sf.make_mesh((8, 1, 1, 1)), P()))
    state = born(sf.make_mesh((1, 8, 1, 1)))._replace(key=key)
    with pytest.raises(
        sf.errors.ShardingError, match="state: expected all of it on one mesh, got .*'dp'"
    ):
        sf.compile_step(STEP, state, on_host())


FIRST, THIRD = jax.devices()[0], jax.devices()[3]


# Where things are


# What changed


def test_a_state_that_is_partly_elsewhere_is_refused_by_its_paths():
    mesh = sf.make_mesh()
    state = sf.init_state({"w": jnp.ones((64, 64))}, optax.sgd(0.1), jax.random.key(0))
    state = sf.sharding.place(state, sf.make_sharding(state, mesh))
    state = state._replace(key=jax.device_put(jax.random.key(0), jax.devices()[3]))
    words = r"on the devices of P\(\) of the mesh .*, got state/key elsewhere; move the state"
    with pytest.raises(sf.errors.ShardingError, match=words):
        abstract_arguments(state, jnp.ones((8, 64)))


def test_batch_on_other_devices_is_refused_with_advice_on_batches():
    state = jax.device_put(jnp.ones(8), FIRST)
    words = r"^batch: expected .*, got batch/x elsewhere; place the batch with jax.device_put \("
    with pytest.raises(sf.errors.ShardingError, match=words):
        abstract_arguments(state, {"x": jax.device_put(jnp.ones(8), THIRD)})


@pytest.mark.parametrize(
    ("state", "batch", "message"),
    [
        (
            {"w": "a"},
            np.ones(2),
            "state/w: expected an array, got str 'a'; pass the state of sf.init_state",
        ),
        (
            np.ones(2),
            {"x": ["a"]},
            r"batch/x/0: .*; pass a tree of arrays and numbers, such as next\(batches\)",
        ),
    ],
)
def test_the_error_for_other_types_says_what_to_pass(state, batch, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        abstract_arguments(state, batch)


# It drops every program of this process, so it comes last.
def test_without_its_caches_jax_runs_what_was_compiled(mesh, compiles):
    step, state, batch = kept(mesh, False)
    wanted = step(state, batch)[1]
    jax.clear_caches()
    compiles.clear()
    seen = step(state, batch)[1]
    assert compiles == []
    chex.assert_trees_all_equal(wanted, seen)


def test_options_of_the_compiler_change_the_program():
    """Without optimization, a product and a sum are not fused: both round."""

    def add_product(state, batch):
        return state, {"sum": state * batch + batch}

    x = jnp.asarray(np.random.default_rng(0).normal(size=4096), jnp.float32)
    exact = jax.block_until_ready(x * x) + x
    for options, rounds_twice in ((None, False), ({"xla_backend_optimization_level": 0}, True)):
        step = sf.compile_step(add_product, x, x, donate=False, compiler_options=options)
        for compiled in (step, step.compiled):
            assert np.array_equal(compiled(x, x)[1]["sum"], exact) == rounds_twice


@pytest.mark.parametrize(
    "options",
    [{"xla_no_such_option": 1}, {"xla_allow_excess_precision": "maybe"}, ["x"], {1: 2}, {"a": []}],
)
def test_other_options_of_the_compiler_are_refused(options):
    with pytest.raises(sf.errors.ConfigError, match=r"^compiler_options: expected "):
        sf.compile_step(STEP, SHAPE, on_host(), compiler_options=options)
