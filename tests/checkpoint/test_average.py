"""The average of checkpoints: exact in float64, leaf by leaf; what is nearly right fails."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepfold as sf
from stepfold.checkpoint import arrays

DTYPES = ["float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "complex64"]


def params(seed, dtype="float32"):
    rng = np.random.default_rng(seed)
    make = lambda *shape: (rng.normal(size=shape) * 100).astype(jnp.dtype(dtype))
    return {"layers": [{"w": make(16, 8)}, {"w": make(16, 8)}], "scale": make(), "none": make(0, 3)}


def save(folder, trees):
    for step, tree in enumerate(trees, 1):
        sf.save(folder, {"step": np.int32(step), "params": tree, "rest": np.ones(3)}, step=step)


def mean(trees):
    def of(*leaves):
        wide = np.complex128 if leaves[0].dtype.kind == "c" else np.float64
        return (sum(leaf.astype(wide) for leaf in leaves) / len(leaves)).astype(leaves[0].dtype)

    return jax.tree.map(of, *trees)


def narrow_mean(trees):
    """Add in the dtype of the leaves."""
    return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]) / len(leaves), *trees)


def moving_mean(trees):
    """Average each with the average so far, in float32."""
    move = lambda a, b: (0.5 * a.astype(np.float32) + 0.5 * b.astype(np.float32)).astype(b.dtype)
    total = trees[0]
    for tree in trees[1:]:
        total = jax.tree.map(move, total, tree)
    return total


def bits(tree):
    return [(leaf.dtype.name, leaf.shape, leaf.tobytes()) for leaf in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Give eight steps that have a branch of each dtype, and the trees of each branch."""
    folder = tmp_path_factory.mktemp("steps")
    trees = {dtype: [params(i, dtype) for i in range(8)] for dtype in DTYPES}
    for step in range(1, 9):
        sf.save(folder, {dtype: trees[dtype][step - 1] for dtype in DTYPES}, step=step)
    return folder, trees


@given(
    dtype=st.sampled_from(DTYPES),
    steps=st.lists(st.integers(1, 8), min_size=1, max_size=8, unique=True),
)
def test_the_average_is_that_of_float64(saved, dtype, steps):
    folder, trees = saved
    got = sf.checkpoint.average_checkpoints(folder, steps, trees[dtype][0], part=dtype)
    assert bits(got) == bits(mean([trees[dtype][step - 1] for step in steps]))


@pytest.mark.parametrize("wrong", [narrow_mean, moving_mean])
def test_what_is_nearly_right_fails_the_same_law(wrong, saved):
    folder, trees = saved
    trees = trees["bfloat16"]
    assert bits(
        sf.checkpoint.average_checkpoints(folder, range(1, 9), trees[0], part="bfloat16")
    ) != bits(wrong(trees))


def test_without_like_it_is_nested_dicts_of_numpy_arrays(saved):
    folder, trees = saved
    got = sf.checkpoint.average_checkpoints(folder, [1, 5], part="bfloat16")
    assert got.keys() == {"layers", "scale", "none"}
    assert type(got["layers"]["1"]["w"]) is np.ndarray
    assert bits(got) == bits(mean([trees["bfloat16"][0], trees["bfloat16"][4]]))


def test_each_leaf_gets_its_sharding(saved):
    folder, trees = saved
    trees = trees["bfloat16"]
    mesh = sf.make_mesh()
    plan = sf.make_sharding(trees[0], mesh, sf.sharding.fsdp(min_size=8))
    form = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        trees[0],
        plan,
    )
    got = sf.checkpoint.average_checkpoints(folder, [2, 3, 7], form, part="bfloat16")
    assert jax.tree.map(lambda leaf: leaf.sharding, got) == plan
    assert not got["layers"][0]["w"].sharding.is_fully_replicated
    assert bits(jax.device_get(got)) == bits(mean([trees[i] for i in (1, 2, 6)]))


def test_any_part_can_be_averaged(tmp_path):
    tx = sf.ema_params(jax_sgd(), 0.5)
    for step in (1, 2):
        state = sf.init_state({"w": jnp.full(3, float(step))}, tx, jax.random.key(0))
        sf.save(tmp_path, state, step=step)
    like = state.opt_state.ema
    assert (
        sf.checkpoint.average_checkpoints(tmp_path, [1, 2], like, part="opt_state/ema")[
            "w"
        ].tolist()
        == [1.5] * 3
    )
    assert float(sf.checkpoint.average_checkpoints(tmp_path, [2], part="params/w").sum()) == 6
    whole = sf.checkpoint.average_checkpoints(
        tmp_path, [1, 2], state, part=""
    )  # step and key are equal
    assert jax.random.key_data(whole.key).tolist() == jax.random.key_data(state.key).tolist()


def jax_sgd():
    import optax

    return optax.sgd(0.1)


def test_integers_and_keys_have_to_be_equal(tmp_path):
    for step, key in ((1, 0), (2, 0), (3, 1)):
        tree = {"ids": np.arange(3) + (step == 2), "key": jax.random.key(key)}
        sf.save(tmp_path, {"params": {**tree, "w": np.ones(2)}}, step=step)
    assert sf.checkpoint.average_checkpoints(tmp_path, [1])["ids"].tolist() == [0, 1, 2]
    with pytest.raises(
        sf.errors.TreeMismatchError, match="2: params/ids: expected equal values in all"
    ):
        sf.checkpoint.average_checkpoints(tmp_path, [1, 2])
    with pytest.raises(
        sf.errors.TreeMismatchError, match=r"3: params/key: .*key<threefry2x32>\[\] has no mean"
    ):
        sf.checkpoint.average_checkpoints(tmp_path, [1, 3])


def test_steps_with_other_leaves_are_refused_with_the_path(tmp_path):
    save(tmp_path, [params(0), params(1) | {"scale": np.ones(2)}, params(2) | {"more": np.ones(1)}])
    with pytest.raises(
        sf.errors.TreeMismatchError,
        match=r"2: params: .* step 1,.*\s+scale: expected float32\[\], got float64\[2\]",
    ):
        sf.checkpoint.average_checkpoints(tmp_path, [1, 2])
    with pytest.raises(
        sf.errors.TreeMismatchError, match=r"more: expected nothing, got float64\[1\]"
    ):
        sf.checkpoint.average_checkpoints(tmp_path, [1, 3])
    with pytest.raises(sf.errors.TreeMismatchError, match=r"scale .*float32\[\] .*float32\[5\]"):
        sf.checkpoint.average_checkpoints(
            tmp_path, [1], params(0) | {"scale": np.ones(5, np.float32)}
        )


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    for step in (1, 2, 3):
        tree = {f"{i}": np.full(9, 1.0 * step * i) for i in range(16)}
        sf.save(folder, {"params": tree, "rest": np.ones(3)}, step=step)
    return folder


@pytest.mark.parametrize(
    ("steps", "options", "message"),
    [
        ([], {}, r"steps: expected different steps, at least one, got \[\]"),
        ([1, 1], {}, r"steps: expected different steps, at least one, got \[1, 1\]"),
        (1, {}, "steps: expected a list of steps, got int 1"),
        ([1.5], {}, "steps: expected an integer of at least 0, got 1.5"),
        ([1, 9], {}, "expected step 9 to restore, got steps 1, 2, 3"),
        ([1], {"part": "param"}, "part: expected a path that was saved, got 'param'; there are pa"),
        ([1], {"part": None}, "part: expected the path of a branch, such as 'params', got NoneT"),
    ],
)
def test_wrong_arguments_are_refused(steps, options, message, three):
    with pytest.raises(sf.StepfoldError, match=message):
        sf.checkpoint.average_checkpoints(three, steps, **options)


def restored_at_once(folder, steps):
    like = {"params": {f"{i}": np.ones(9) for i in range(16)}}
    trees = [sf.restore(folder, like, step=step, parts=("params",)) for step in steps]
    return jax.tree.map(lambda *leaves: sum(leaves) / 3, *(tree.state["params"] for tree in trees))


@pytest.mark.parametrize("read", [sf.checkpoint.average_checkpoints, restored_at_once])
def test_one_leaf_is_read_at_a_time(read, three, monkeypatch):
    read_regions, read_arrays, most = arrays.ArrayReader.read_regions, [], 0

    def tracked(reader, name, wanted):
        nonlocal most
        most = max(most, sum(array() is not None for array in read_arrays))
        regions = read_regions(reader, name, wanted)
        read_arrays.extend(map(weakref.ref, regions.values()))
        return regions

    monkeypatch.setattr(arrays.ArrayReader, "read_regions", tracked)
    assert read(three, [1, 2, 3])["2"].tolist() == [4.0] * 9
    assert (most <= 1) is (read is sf.checkpoint.average_checkpoints)
