import copy
import functools
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import stepfold as sf

TX = optax.adam(0.1)


def init(key):
    return {"w": jax.random.normal(key, (64, 128)) / 8, "b": jnp.zeros(128)}


def loss_fn(params, batch, key):
    out = jnp.tanh(batch["x"] @ params["w"] + params["b"]).mean(-1)
    return sf.mean((out - batch["y"].astype(out.dtype) + jax.random.normal(key, out.shape)) ** 2)


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


def born(mesh):
    return sf.init_state(init, TX, jax.random.key(0), sharding=plan_on(mesh))


def placed(batch, mesh):
    return sf.shard_batch(batch, mesh) if mesh else jax.device_put(batch, jax.devices()[0])


FORMS = {
    "host": lambda batch, _: batch,
    "uncommitted": lambda batch, _: jax.tree.map(jnp.asarray, batch),
    "placed": placed,
}


@pytest.fixture(params=["one device", "mesh"])
def mesh(request):
    return sf.make_mesh((1, 8, 1, 1)) if request.param == "mesh" else None


def kept(mesh, looked):
    """A step that donates nothing, as it is at first, and after it was called in another guise."""
    step, state, batch = once(mesh, looked)
    return copy.copy(step), state, batch


@functools.cache
def once(mesh, looked):
    state, batch = born(mesh), on_host()
    step = sf.compile_step(STEP, state, batch, donate=False)
    if looked:
        with jax.default_matmul_precision("float32"):
            step(state, batch)
    return step, state, batch


looked = pytest.mark.parametrize("looked", [False, True], ids=["at first", "looked at"])


@pytest.fixture
def safe(mesh):
    """Leave out what ends the process: jax 0.10 on several CPU devices, with a plain jit too."""
    if mesh and jax.__version_info__ < (0, 12):
        pytest.skip("jax 0.10 crashes where several CPU devices are given a donated array")


def gone(arrays):
    return {leaf.is_deleted() for leaf in jax.tree.leaves(arrays)}


# What comes back


MESHES = [(1, 8, 1, 1), (8, 1, 1, 1), (2, 4, 1, 1), (2, 2, 2, 1)]


@pytest.mark.parametrize("dims", MESHES, ids=str)
def test_the_state_comes_back_in_the_shardings_of_the_plan(dims):
    mesh = sf.make_mesh(dims)
    plan = sf.make_sharding(SHAPE, mesh, [("params/w", P("fsdp", "tp"))])
    state = sf.init_state(init, TX, jax.random.key(0), sharding=plan)
    step = sf.compile_step(STEP, state, on_host())
    for _ in range(3):
        state, _ = step(state, on_host())
        assert jax.tree.map(lambda leaf: leaf.sharding, state) == plan
    assert step.state.params["w"].sharding.spec == P("fsdp", "tp")
    assert step.batch["x"].sharding.spec == P(("dp", "fsdp"))


def test_a_plan_may_be_given_for_a_state_that_has_no_place():
    plan = plan_on(sf.make_mesh())
    step = sf.compile_step(STEP, make(), on_host(), sharding=plan)
    state, _ = step(make(), on_host())
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == plan


def test_one_sharding_stands_for_the_whole_state():
    everywhere = NamedSharding(sf.make_mesh(), P())
    step = sf.compile_step(STEP, SHAPE, on_host(), sharding=everywhere)
    state, _ = step(make(), on_host())
    assert {leaf.sharding for leaf in jax.tree.leaves(state)} == {everywhere}


def test_a_state_stays_on_the_device_it_was_put_on():
    state = jax.device_put(make(), jax.devices()[3])
    step = sf.compile_step(STEP, state, on_host())
    for _ in range(2):
        state, metrics = step(state, on_host())
    assert {leaf.device for leaf in jax.tree.leaves(state)} == {jax.devices()[3]}
    assert metrics["loss"].total.device == jax.devices()[3]


def test_the_bits_are_those_of_jit(mesh):
    ours, theirs = born(mesh), born(mesh)
    batch = placed(on_host(), mesh)
    step, jitted = sf.compile_step(STEP, ours, batch), jax.jit(STEP)
    for _ in range(3):
        (ours, seen), (theirs, wanted) = step(ours, batch), jitted(theirs, batch)
    unkeyed = lambda state: state._replace(key=jax.random.key_data(state.key))
    chex.assert_trees_all_equal((unkeyed(ours), seen), (unkeyed(theirs), wanted))


def test_an_evaluation_gives_the_bits_of_jit(mesh):
    state, batch = born(mesh), placed(on_host(), mesh)
    step = sf.compile_step(EVAL, state, batch)
    chex.assert_trees_all_equal(step(state, batch), jax.jit(EVAL)(state, batch))


# Tracing


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("step", [STEP, EVAL], ids=["train", "eval"])
def test_compiling_traces_the_step_once(step, form, mesh):
    runs = []

    def counted(state, batch):
        runs.append(batch)
        return step(state, batch)

    state, batch = born(mesh), FORMS[form](on_host(), mesh)
    compiled = sf.compile_step(counted, state, batch)
    assert len(runs) == 1
    compiled(state, batch)
    assert len(runs) == 1


# Donation


def test_the_state_is_donated(mesh):
    state, batch = born(mesh), placed(on_host(), mesh)
    step = sf.compile_step(STEP, state, batch)
    for _ in range(3):
        before = state
        state, _ = step(state, batch)
        assert gone(before) == {True}
        assert gone((state, batch)) == {False}


def test_the_state_is_donated_under_other_settings_too(mesh):
    state = born(mesh)
    step = sf.compile_step(STEP, state, on_host())
    with jax.default_matmul_precision("float32"):
        after, _ = step(state, on_host())
    assert gone(state) == {True}
    assert gone(after) == {False}


@looked
def test_without_donation_the_state_stays(mesh, looked):
    step, state, batch = kept(mesh, looked)
    for _ in range(2):
        after, _ = step(state, batch)
    assert gone(state) == {False}
    assert after.step == 1


def test_an_evaluation_never_donates(mesh):
    state = born(mesh)
    step = sf.compile_step(EVAL, state, on_host())
    for _ in range(2):
        step(state, on_host())
    assert gone(state) == {False}


def test_an_evaluation_that_gives_a_pair_never_donates():
    """Its first result has the structure of a state that is one array, but is none."""
    state = jnp.ones(8)
    step = sf.compile_step(lambda state, batch: (jnp.sum(state * batch), {}), state, jnp.ones(8))
    assert step(state, jnp.ones(8))[0] == 8
    assert not state.is_deleted()


@looked
@pytest.mark.usefixtures("safe")
def test_a_donated_state_used_again_is_refused(mesh, looked):
    state = born(mesh)
    step = sf.compile_step(STEP, state, on_host())
    if looked:
        with jax.default_matmul_precision("float32"):
            step(born(mesh), on_host())
    step(state, on_host())
    words = "params/w, .*…: the arrays were donated to an earlier call and are gone; .*donate=False"
    with pytest.raises(sf.ConfigError, match=words):
        step(state, on_host())


@pytest.mark.usefixtures("safe")
def test_one_donated_leaf_is_named(mesh):
    state = born(mesh)
    step = sf.compile_step(STEP, state, on_host())
    after, _ = step(state, on_host())
    with pytest.raises(sf.ConfigError, match="^params/b: the arrays were donated"):
        step(after._replace(params={**after.params, "b": state.params["b"]}), on_host())


# Calls compile nothing and trace nothing


@functools.cache
def counting(mesh, example):
    traced = []

    def counted(params, batch, key):
        traced.append(key)
        return loss_fn(params, batch, key)

    state, batch = born(mesh), FORMS[example](on_host(), mesh)
    step = sf.compile_step(sf.make_train_step(counted, TX), state, batch)
    return step, traced


@pytest.mark.parametrize("example", FORMS)
@pytest.mark.parametrize("given", FORMS)
def test_calls_compile_and_trace_nothing(mesh, example, given, compiles):
    step, traced = counting(mesh, example)
    step, state, batch = copy.copy(step), born(mesh), FORMS[given](on_host(), mesh)
    placed(batch, mesh)  # jax cuts an array in pieces by a program of its own, once
    compiles.clear()
    traced.clear()
    for _ in range(3):
        state, _ = step(state, batch)
    assert (compiles, traced) == ([], [])
    assert int(state.step) == 3


@pytest.mark.parametrize("example", ["host", "placed"])
@pytest.mark.parametrize("kind", ["train", "eval"])
def test_abstract_examples(mesh, example, kind, compiles):
    batch = FORMS[example](on_host(), mesh)
    shape = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, on_host()))
    if example == "placed" and mesh:
        shape = sf.shard_batch(shape, mesh)
    step = STEP if kind == "train" else EVAL
    step = sf.compile_step(step, SHAPE, shape, sharding=plan_on(mesh))
    state = born(mesh)
    placed(batch, mesh)
    compiles.clear()
    made = step(state, batch)
    assert compiles == []
    assert (made[0].step == 1) if kind == "train" else (made["loss"].count == 16)


@pytest.mark.parametrize("example", ["host", "placed", "abstract"])
def test_labels_as_numpy_counts_them_are_the_labels_of_jax(mesh, example, compiles):
    """A jitted step takes int64 for int32 without a word, and so does the fast path."""
    if example == "abstract":
        batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, on_host()))
        batch = sf.shard_batch(batch, mesh) if mesh else batch
    else:
        batch = FORMS[example](on_host(np.int64), mesh)
    state = born(mesh)
    step = sf.compile_step(STEP, state, batch)
    compiles.clear()
    for _ in range(2):
        state, _ = step(state, on_host(np.int64))
    assert compiles == []


def test_labels_as_numpy_counts_them_under_other_settings(mesh):
    state = born(mesh)
    step = sf.compile_step(STEP, state, on_host(np.int64))
    with jax.default_matmul_precision("float32"):
        state, _ = step(state, on_host(np.int64))
    assert state.step == 1


def test_parameters_from_the_host_are_taken(mesh, compiles):
    step, state, batch = kept(mesh, False)
    params = jax.tree.map(np.asarray, state.params)
    compiles.clear()
    step(state._replace(params=params), batch)
    assert compiles == []


def scaled_loss(params, batch, key):
    scale = jnp.where(batch["on"], batch["scale"], 0.0)
    return sf.mean((batch["x"] @ params["w"]) ** 2 * scale)


@looked
def test_python_scalars_stay_allowed_if_the_example_had_them(mesh, looked, compiles):
    scalars = lambda scale, on: {"x": on_host()["x"], "scale": scale, "on": on}
    state, loss = born(mesh), []
    step = sf.make_train_step(scaled_loss, TX)
    step = sf.compile_step(step, state, scalars(1.0, True), donate=False)
    if looked:
        with jax.default_matmul_precision("float32"):
            step(state, scalars(1.0, True))
    compiles.clear()
    for given in ((1.0, True), (2.0, True), (2.0, False)):
        _, metrics = step(state, scalars(*given))
        loss.append(metrics["loss"])
    assert compiles == []
    first, second, third = (float(one.compute()) for one in loss)
    assert (second, third) == (2 * first, 0)
    with pytest.raises(sf.RetraceError, match=r"batch/scale: expected float32\[\], got int 2"):
        step(state, scalars(2, True))


def test_a_scalar_must_not_become_an_array_of_its_own_type():
    state, scalars = born(None), {"x": on_host()["x"], "scale": 1.0, "on": np.bool_(True)}
    step = sf.compile_step(sf.make_train_step(scaled_loss, TX), state, scalars, donate=False)
    step(state, scalars | {"scale": jnp.asarray(2.0)})  # weak as well
    words = r"batch/scale: expected float32\[\] with a weak type.*got a strong type"
    with pytest.raises(sf.RetraceError, match=words):
        step(state, scalars | {"scale": np.float32(2.0)})


def test_batches_in_turns(mesh, compiles):
    state = born(mesh)
    forms = [form(on_host(), mesh) for form in FORMS.values()]
    step = sf.compile_step(STEP, state, on_host())
    for form in forms:
        placed(form, mesh)
    compiles.clear()
    for form in forms * 2:
        state, _ = step(state, form)
    assert compiles == []
    assert state.step == 6


def test_no_batch_at_all(mesh):
    step = sf.make_train_step(lambda params, batch, key: (params["w"] ** 2).mean(), TX)
    state = born(mesh)
    step = sf.compile_step(step, state, None)
    assert step(state, None)[0].step == 1


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


@pytest.mark.parametrize("form", FORMS)
def test_a_call_runs_at_most_two_more_functions_than_a_jitted_one(mesh, form):
    batch, ours, theirs = FORMS[form](on_host(), mesh), born(mesh), born(mesh)
    step = sf.compile_step(STEP, ours, batch)
    options = {}
    if mesh and form != "placed":  # whose places it would otherwise not know
        places = jax.tree.map(lambda leaf: leaf.sharding, (step.state, step.batch))
        options = {"in_shardings": places, "out_shardings": (places[0], None)}
    jitted = jax.jit(STEP, donate_argnums=0, **options)
    counts = []
    for _ in range(7):
        own, (ours, _) = calls(step, ours, batch)
        plain, (theirs, _) = calls(jitted, theirs, batch)
        counts.append((plain, own))
    # Some calls pay for a miss of one of jax's caches, of either.
    plain, own = (min(column) for column in zip(*counts[2:], strict=True))
    assert own <= plain + 2, counts


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
    "weak step": (
        put("step", lambda _: jnp.asarray(0)),
        r"  step: expected int32\[\] with a strong type, got a weak type, as Python numbers have",
    ),
    "weak parameter": (
        put("b", lambda _: jnp.full(128, 0.0)),
        r"  params/b: expected float32\[128\] with a strong type, got a weak type",
    ),
    "narrower parameter": (
        put("w", lambda leaf: leaf.astype(jnp.bfloat16)),
        r"  params/w: expected float32\[64,128\], got bfloat16\[64,128\]",
    ),
    "narrower batch": (
        put("x", lambda leaf: leaf.astype(np.float16)),
        r"  batch/x: expected float32\[16,64\], got float16\[16,64\]",
    ),
    "unsigned labels": (
        put("y", lambda leaf: leaf.astype(np.uint8)),
        r"  batch/y: expected int32\[16\], got uint8\[16\]",
    ),
    "Python's int": (
        put("step", lambda _: 0),
        r"  step: expected int32\[\], got the Python number 0, which is weakly typed",
    ),
    "Python's float": (put("step", lambda _: 0.0), r"  step: expected int32\[\], got float 0.0"),
    "Python's bool": (put("step", lambda _: True), r"  step: expected int32\[\], got bool True"),
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
        r"  key: expected key<fry>\[\], got key<rbg>\[\]",
    ),
    "raw key": (
        put("key", lambda _: jax.random.PRNGKey(0)),
        r"  key: expected key<fry>\[\], got uint32\[2\]",
    ),
    "keys": (
        put("key", lambda key: jax.random.split(jax.random.key(0), 2)),
        r"  key: expected key<fry>\[\], got key<fry>\[2\]",
    ),
    "missing leaf": (
        lambda state, batch, _: (state, less(batch, "y")),
        r"  batch/y: missing, expected int32\[16\]",
    ),
    "extra leaf": (
        lambda state, batch, _: (state, {**batch, "mask": np.ones(16, np.float32)}),
        r"  batch/mask: unexpected float32\[16\]",
    ),
    "renamed leaf": (
        lambda state, batch, _: (state, {**less(batch, "y"), "label": batch["y"]}),
        r"  batch/y: missing, expected int32\[16\]\n  batch/label: unexpected int32\[16\]",
    ),
    "renamed parameter": (
        lambda state, batch, _: (
            state._replace(params={"v": state.params["w"], "b": state.params["b"]}),
            batch,
        ),
        r"  params/w: missing, .*\n  params/v: unexpected float32\[64,128\]",
    ),
    "None for a leaf": (put("y", lambda _: None), r"  batch/y: missing, expected int32\[16\]"),
    "None for the state": (lambda _, batch, __: (None, batch), "  step: missing, expected int32"),
    "None besides": (
        lambda state, batch, _: (state, {**batch, "mask": None}),
        "  batch: expected the containers .*'x': .*, got .*'mask'",
    ),
    "a list for a tuple": (
        put("opt_state", list),
        "  state: expected the containers .*, got .*",
    ),
    "a tuple for a state": (
        lambda state, batch, _: (tuple(state), batch),
        r"  step: missing, expected int32\[\]",
    ),
    "a string": (put("y", lambda _: "cat"), r"  batch/y: expected int32\[16\], got str 'cat'"),
    "strings": (
        put("y", lambda _: np.array(["cat"])),
        r"  batch/y: expected int32\[16\], got <U3\[1\]",
    ),
    "an object": (put("y", lambda _: object()), r"  batch/y: expected int32\[16\], got object <"),
    "swapped arguments": (lambda state, batch, _: (batch, state), r"  step: missing, expected"),
    "two at once": (
        lambda state, batch, _: (state._replace(step=np.float32(0)), less(batch, "x")),
        r"  step: expected int32\[\], got float32\[\]\n  batch/x: missing, expected float32\[16,64",
    ),
}


@looked
@pytest.mark.parametrize("fault", FAULTS)
def test_another_argument_is_refused_by_its_path(fault, mesh, looked, compiles):
    step, state, batch = kept(mesh, looked)
    change, words = FAULTS[fault]
    wrong = change(state, batch, mesh)
    compiles.clear()
    for _ in range(2):
        with pytest.raises(sf.RetraceError, match=words) as caught:
            step(*wrong)
    assert str(caught.value).startswith("the step was compiled for other arguments, and would")
    assert caught.value.__suppress_context__
    step(state, batch)
    assert compiles == []


WHOLE = r"params/w: expected it on .*'fsdp'.* of the mesh .*, got it on .*\(\) of the mesh"


@looked
def test_a_parameter_that_is_whole_where_it_was_cut_is_refused(looked, compiles):
    mesh = sf.make_mesh((1, 8, 1, 1))
    step, state, batch = kept(mesh, looked)
    whole = jax.device_put(state.params["w"], NamedSharding(mesh, P()))
    compiles.clear()
    with pytest.raises(sf.RetraceError, match=WHOLE):
        step(state._replace(params={**state.params, "w": whole}), batch)
    assert compiles == []


@looked
def test_a_batch_that_is_whole_where_it_was_cut_is_refused(looked, compiles):
    mesh = sf.make_mesh((1, 8, 1, 1))
    step, state, batch = kept(mesh, looked)
    whole = jax.device_put(batch, NamedSharding(mesh, P()))
    compiles.clear()
    with pytest.raises(sf.RetraceError, match="batch/x: expected it on .*\n  batch/y: expected it"):
        step(state, whole)
    assert compiles == []


@looked
def test_another_mesh_of_the_same_devices_is_taken_where_arrays_lie_alike(looked, compiles):
    mesh = sf.make_mesh((1, 8, 1, 1))
    step, state, batch = kept(mesh, looked)
    other = NamedSharding(sf.make_mesh((8,), ("x",)), P("x"))
    batch = jax.device_put(batch, other)
    compiles.clear()
    step(state, batch)
    assert compiles == []


def test_a_state_of_one_array_is_called_something():
    step = sf.compile_step(lambda state, batch: (state + batch, {}), jnp.ones(8), jnp.ones(8))
    with pytest.raises(
        sf.RetraceError, match=r"\n  state: expected float32\[8\], got float32\[4\]"
    ):
        step(jnp.ones(4), jnp.ones(8))


def test_another_container_for_the_state_is_called_something():
    step = sf.compile_step(lambda s, batch: ((s[0] + batch,), {}), (jnp.ones(8),), jnp.ones(8))
    with pytest.raises(sf.RetraceError, match=r"\n  state: expected the containers .*, got"):
        step([jnp.ones(8)], jnp.ones(8))


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


@looked
@pytest.mark.parametrize("outer", OUTER)
def test_traced_it_is_the_step_itself(outer, looked):
    step, state, batch = kept(None, looked)
    batch = jax.tree.map(jnp.asarray, batch)
    got, wanted = (OUTER[outer](one, state, batch) for one in (step, STEP))
    chex.assert_trees_all_equal_shapes_and_dtypes(got, wanted)
    if outer != "eval_shape":
        chex.assert_trees_all_close(got[0].params, wanted[0].params, rtol=1e-4, atol=1e-6)


def test_the_step_itself_is_at_hand():
    step, state, batch = kept(None, False)
    assert step.step is STEP
    assert jax.eval_shape(step.step, state, batch)[0] == SHAPE


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
        return STEP(state, batch)

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


def test_an_error_while_tracing_comes_through_unchanged():
    error = TypeError("of my own")

    def loss_fn(params, batch, key):
        raise error

    with pytest.raises(TypeError) as caught:
        sf.compile_step(sf.make_train_step(loss_fn, TX), make(), on_host())
    assert caught.value is error


@looked
@pytest.mark.parametrize("words", ["of my own", "cannot delete the file", "donate something"])
def test_an_error_at_run_time_comes_through_unchanged(words, looked):
    fails = False

    def check(total):
        if fails:
            raise ValueError(words)
        return total

    def loss_fn(params, batch, key):
        out = (batch["x"] @ params["w"]).mean(-1)
        total = jax.pure_callback(check, jax.ShapeDtypeStruct((), out.dtype), batch["x"].sum())
        return sf.mean(out**2 * jax.lax.stop_gradient(total))

    state = make()
    step = sf.compile_step(sf.make_train_step(loss_fn, TX), state, on_host())
    if looked:
        with jax.default_matmul_precision("float32"):
            state, _ = step(state, on_host())
    fails = True
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        jax.block_until_ready(step(state, on_host()))


# What cannot be compiled


def test_a_jitted_step_is_refused():
    words = r"compile_step: expected a step .*, neither jitted .*, got PjitFunction .* as it is"
    with pytest.raises(sf.ConfigError, match=words):
        sf.compile_step(jax.jit(STEP), make(), on_host())


def test_a_compiled_step_is_refused():
    with pytest.raises(sf.ConfigError, match="neither jitted nor compiled, got CompiledStep"):
        sf.compile_step(kept(None, False)[0], make(), on_host())


def test_what_is_no_step_is_refused():
    with pytest.raises(sf.ConfigError, match="compile_step: expected a step .* got NoneType None"):
        sf.compile_step(None, make(), on_host())


def test_a_partial_step_is_a_step():
    step = functools.partial(lambda rate, state, batch: (state - rate * batch, {}), 0.5)
    assert sf.compile_step(step, jnp.ones(2), jnp.ones(2))(jnp.ones(2), jnp.ones(2))[0].sum() == 1


def test_a_plan_for_another_state_is_refused():
    plan = plan_on(sf.make_mesh())
    odd = plan._replace(params={"w": plan.params["w"], "v": plan.key})
    words = "the plan is for another tree:\n  params/b: has no sharding"
    with pytest.raises(sf.TreeMismatchError, match=words):
        sf.compile_step(STEP, SHAPE, on_host(), sharding=odd)


def test_a_plan_in_other_containers_is_refused():
    plan = plan_on(sf.make_mesh())
    odd = plan._replace(opt_state=list(plan.opt_state))
    words = r"the plan is for another tree:\n  expected the containers PyTreeDef"
    with pytest.raises(sf.TreeMismatchError, match=words):
        sf.compile_step(STEP, SHAPE, on_host(), sharding=odd)


def test_a_state_on_two_meshes_is_refused():
    key = jax.device_put(jax.random.key(0), NamedSharding(sf.make_mesh((8, 1, 1, 1)), P()))
    state = born(sf.make_mesh((1, 8, 1, 1)))._replace(key=key)
    with pytest.raises(sf.ShardingError, match="state: expected all of it on one mesh, got .*'dp'"):
        sf.compile_step(STEP, state, on_host())


def test_a_batch_that_does_not_divide_is_refused():
    batch = jax.tree.map(lambda leaf: leaf[:12], on_host())
    with pytest.raises(sf.ShardingError, match="12 rows do not divide by the 8 parts"):
        sf.compile_step(STEP, born(sf.make_mesh()), batch)


def test_what_the_step_says_of_its_state_comes_through():
    other = sf.init_state(init, optax.sgd(0.1), jax.random.key(0))
    with pytest.raises(sf.TreeMismatchError, match="made with another optimizer"):
        sf.compile_step(STEP, other, on_host())


# It drops every program of this process, so it comes last.
def test_without_its_caches_jax_runs_what_was_compiled(mesh, compiles):
    state, batch = born(mesh), on_host()
    step = sf.compile_step(STEP, state, batch, donate=False)
    wanted = step(state, batch)[1]
    jax.clear_caches()
    compiles.clear()
    seen = step(state, batch)[1]
    assert compiles == []
    chex.assert_trees_all_equal(wanted, seen)
