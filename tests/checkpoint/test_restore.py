"""Restoring: which step, onto which devices, and what is refused."""

import itertools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.small import full_but

import stepfold as sf
from stepfold.checkpoint.store import DirectoryStore
from stepfold.core.processes import KeyValues
from stepfold.errors import CheckpointError, ConfigError, TreeMismatchError

from .folders import damage, names
from .sameness import check_same

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))


def init(key):
    return {"w": jax.random.normal(key, (16, 8)), "b": jnp.zeros(8)}


def loss(params, batch, key):
    noise = jax.random.normal(key, (8,))
    return ((batch @ params["w"] + params["b"] - noise) ** 2).mean()


def make(seed=0, plan=None):
    return sf.init_state(init, TX, jax.random.key(seed), sharding=plan)


def noise(seed):
    """Give numbers that are stored as they are, since nothing makes them smaller."""
    return np.random.default_rng(seed).normal(size=4096).astype(np.float32)


def numbers(value):
    return {"w": jnp.asarray(noise(value)), "i": jnp.int32(value)}


@pytest.fixture(scope="module")
def saved_series(tmp_path_factory):
    folder = tmp_path_factory.mktemp("series")
    with sf.Checkpoints(folder, keep=None, best="loss") as opened:
        for step, value in {1: 4.0, 2: 1.0, 3: 2.0, 4: 3.0}.items():
            opened.save(numbers(step), step=step, metrics={"loss": value}, data={"at": step})
    return folder


@pytest.fixture
def series(saved_series, tmp_path):
    """Give a folder with steps 1 to 4, of which 2 has the least loss, and 3 the next."""
    return shutil.copytree(saved_series, tmp_path, dirs_exist_ok=True)


@pytest.mark.parametrize("sharded", full_but([True], [False, True]))
def test_a_step_goes_on_without_compiling_again(tmp_path, compiles, sharded):
    mesh = sf.make_mesh() if sharded else None
    plan = (
        sf.make_sharding(jax.eval_shape(make), mesh, sf.sharding.fsdp(min_size=1))
        if sharded
        else None
    )
    batch = np.ones((8, 16), np.float32)
    batch = sf.shard_batch(batch, mesh) if sharded else batch
    step = jax.jit(sf.make_train_step(loss, TX), out_shardings=(plan, None) if sharded else None)
    state, _ = jax.block_until_ready(step(make(plan=plan), batch))
    sf.save(tmp_path, state)
    wanted, _ = jax.block_until_ready(step(state, batch))
    abstract = jax.eval_shape(make, 1)
    if sharded:
        abstract = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            abstract,
            plan,
        )
    for like in (state, abstract):
        restored = sf.restore(tmp_path, like)
        check_same(restored.state, state)
        count = len(compiles)
        got, _ = jax.block_until_ready(step(restored.state, batch))
        check_same(got, wanted)
        assert len(compiles) == count


def test_a_state_that_was_given_away_still_says_how(tmp_path):
    state = make()
    wanted = jax.tree.map(jnp.copy, state)
    sf.save(tmp_path, state)
    jax.block_until_ready(jax.jit(lambda state: state, donate_argnums=0)(state))
    assert state.params["w"].is_deleted()
    check_same(sf.restore(tmp_path, state).state, wanted)


def test_words_come_back(tmp_path):
    extra, metrics = {"lr": 0.1, "name": ["a"], "raw": b"\0\xff"}, {"loss": 0.5}
    sf.save(tmp_path, numbers(1), step=5, data={"position": 7}, metrics=metrics, extra=extra)
    found = sf.restore(tmp_path, numbers(0))
    assert (found.step, found.data, found.metrics, found.extra) == (
        5,
        {"position": 7},
        metrics,
        extra,
    )
    assert (found.loaded, found.not_loaded, found.damaged) == ({"i": "i", "w": "w"}, {}, {})
    sf.save(tmp_path, numbers(1), step=6)
    assert sf.restore(tmp_path, numbers(0))[2:5] == (None, None, {})


def test_any_step_is_restored(series):
    like = numbers(0)
    assert sf.restore(series, like).step == 4
    assert sf.restore(series, like, step="best").step == 2
    assert sf.restore(str(series), like, step=3).step == 3
    assert sf.restore(series, like, step="best", best=("loss", "max")).step == 1
    check_same(sf.restore(series, like, step=1).state, numbers(1))


@pytest.mark.parametrize(
    ("step", "way", "instead"),
    [("latest", [4, 3, 2, 1], "an older"), ("best", [2, 3, 4, 1], "the next best is taken")],
)
def test_the_next_is_taken_as_long_as_one_is_good(series, step, way, instead):
    broken = []
    for bad, good in itertools.pairwise(way):
        damage(series, bad, noise(bad))
        broken.append(bad)
        with pytest.warns(RuntimeWarning) as warned:
            found = sf.restore(series, numbers(0), step=step)
        assert [
            f"step {each} is damaged, and {instead}" in str(warning.message)
            for each, warning in zip(broken, warned, strict=True)
        ] == [True] * len(broken)
        assert all(warning.filename == __file__ for warning in warned)
        assert found.step == good
        assert list(found.damaged) == broken
        assert found.damaged[bad][0].endswith("the values are not those that were saved")
        check_same(found.state, numbers(good))
    damage(series, way[-1], noise(way[-1]))
    words = f"no checkpoint can be restored: .*step {way[-1]}: [iw].*: the values are not"
    with pytest.raises(CheckpointError, match=words):
        sf.restore(series, numbers(0), step=step)


@pytest.mark.parametrize("options", [{"step": 4}, {"fall_back": False}])
def test_a_damaged_step_that_was_asked_for_is_refused_and_left(series, options):
    damage(series, 4, noise(4))
    with pytest.raises(
        CheckpointError, match=r"be restored: step 4: w\[0:4096\]: the values are not"
    ):
        sf.restore(series, numbers(0), **options)
    assert names(series) == ["1", "2", "3", "4"]


def test_damage_that_is_not_looked_at_does_not_matter(series):
    damage(series, 4, noise(4))
    found = sf.restore(series, numbers(0), parts=("i",))
    assert (found.step, found.not_loaded) == (4, {"w": "not among the parts"})
    check_same(found.state, {"i": jnp.int32(4), "w": numbers(0)["w"]})


def test_another_tree_is_refused_before_anything_is_read(series):
    damage(series, 4, noise(4))
    with pytest.raises(TreeMismatchError, match=r"w +float32\[4096\] +float32\[65\]"):
        sf.restore(series, {"w": jnp.ones(65), "i": jnp.int32(0)})
    assert names(series) == ["1", "2", "3", "4"]


def test_what_fits_is_loaded_and_the_rest_stays(tmp_path):
    sf.save(tmp_path, {"params": {"w": jnp.ones(2), "head": jnp.ones(3)}, "old": 1}, step=1)
    like = {"params": {"w": jnp.zeros(2), "head": jnp.zeros(4), "new": jnp.zeros(1)}}
    found = sf.restore(tmp_path, like, partial=True)
    check_same(found.state, {"params": like["params"] | {"w": jnp.ones(2)}})
    assert found.state["params"]["head"] is like["params"]["head"]
    assert found.loaded == {"params/w": "params/w"}
    assert found.not_loaded == {
        "params/head": "saved float32[3], wanted float32[4]",
        "params/new": "saved nothing, wanted float32[1]",
        "old": "saved int64[], wanted nothing",
    }


def test_renamed_leaves_and_other_containers_are_found(tmp_path):
    sf.save(tmp_path, {"encoder": [jnp.ones(2), (jnp.zeros(1),)]}, step=1)
    like = {"body": (jnp.zeros(2), [jnp.ones(1)])}
    found = sf.restore(tmp_path, like, rename={"encoder": "body"})
    check_same(found.state, {"body": (jnp.ones(2), [jnp.zeros(1)])})
    assert found.loaded == {"body/0": "encoder/0", "body/1/0": "encoder/1/0"}
    with pytest.raises(TreeMismatchError, match="differs at 4 paths"):
        sf.restore(tmp_path, like)


def test_wide_numbers_are_not_narrowed_in_silence(tmp_path):
    with jax.enable_x64(True):
        sf.save(tmp_path, {"f": jnp.array([0.1], jnp.float64)}, step=1)
    for place in (None, jax.sharding.SingleDeviceSharding(jax.devices()[1])):
        like = {"f": jax.ShapeDtypeStruct((1,), np.float64, sharding=place)}
        with pytest.raises(TreeMismatchError, match="float64.*(enable_x64|x64)"):
            sf.restore(tmp_path, like)


def test_the_default_device_is_the_callers(tmp_path):
    with jax.default_device(jax.devices()[3]):
        state = {"w": jnp.ones(2)}
        sf.save(tmp_path, state, step=1)
        check_same(sf.restore(tmp_path, state).state, state)


def test_memory_of_another_kind_is_kept(tmp_path):
    place = NamedSharding(sf.make_mesh(), P("fsdp"), memory_kind="pinned_host")
    state = {"w": jax.device_put(np.arange(8.0, dtype=np.float32), place)}
    sf.save(tmp_path, state, step=1)
    check_same(sf.restore(tmp_path, state).state, state)


def test_a_place_that_does_not_fit_is_told_with_its_path(tmp_path):
    sf.save(tmp_path, {"a": {"w": jnp.ones(6)}}, step=1)
    place = NamedSharding(sf.make_mesh(), P("fsdp"))
    like = {"a": {"w": jax.ShapeDtypeStruct((6,), jnp.float32, sharding=place)}}
    with pytest.raises(sf.errors.ShardingError, match="a/w: "):
        sf.restore(tmp_path, like)


@pytest.mark.parametrize("best", [5, ("a", "max", "c"), ("loss", "least")])
def test_what_is_no_best_is_refused(series, best):
    with pytest.raises(ConfigError, match="best|mode"):
        sf.restore(series, numbers(0), step="best", best=best)


def test_a_step_that_is_deleted_while_it_is_read_is_not_called_damaged(series, monkeypatch):
    read = DirectoryStore.read_manifest

    def read_late(store, step):
        shutil.rmtree(series / "4", ignore_errors=True)
        return read(store, step)

    monkeypatch.setattr(DirectoryStore, "read_manifest", read_late)
    found = sf.restore(series, numbers(0))
    assert (found.step, found.damaged) == (3, {})
    with pytest.raises(CheckpointError, match="expected step 4 to restore, got steps 1, 2, 3;"):
        sf.restore(series, numbers(0), step=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("folder")
    with sf.Checkpoints(path, keep=None, best="loss") as series:
        for step, loss in {2: 3.0, 9: 1.0, 10: 2.0}.items():
            series.save({"w": np.ones(2)}, step=step, metrics={"loss": loss})
    return path


@pytest.mark.parametrize(
    ("step", "wanted"), [(3, "step 3"), (-1, "step -1"), ("latest", ""), ("best", "")]
)
def test_what_is_not_there_is_told_with_what_is(folder, tmp_path, step, wanted):
    like = {"w": np.ones(2)}
    if wanted:
        words = f"expected {wanted} to restore, got steps 2, 9, 10; look at the path, or save first"
        with pytest.raises(CheckpointError, match=words):
            sf.restore(folder, like, step=step)
    words = f"expected {wanted or 'a checkpoint'} to restore, got none; look at the path"
    for none in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError, match=words):
            sf.restore(none, like, step=step)


@pytest.mark.parametrize("step", ["newest", None, True, 2.0, "3"])
def test_what_is_no_step_is_refused(folder, step):
    words = f"step: expected 'latest', 'best' or a number, got {step!r}"
    with pytest.raises(ConfigError, match=words):
        sf.restore(folder, {"w": np.ones(2)}, step=step)


def test_a_steps_own_folder_is_answered_with_what_to_give(folder):
    words = f"this is one of the steps in {folder}: give that, with step=9"
    with pytest.raises(CheckpointError, match=words):
        sf.restore(folder / "9", {"w": np.ones(2)})


@pytest.mark.parametrize("place", ["open_arrays", "steps", "read_manifest"])
def test_all_processes_learn_of_any_error(series, monkeypatch, place):
    """A process with any error takes part in the agreement before it raises."""
    gathered = []

    def gather(_, value, *__, **___):
        gathered.append(value)
        return [value]

    def fail(*_):
        raise RuntimeError("of any kind")

    monkeypatch.setattr(KeyValues, "gather", gather)
    monkeypatch.setattr(DirectoryStore, place, fail)
    with pytest.raises(RuntimeError, match="of any kind"):
        sf.restore(series, numbers(0))
    assert gathered[-1]  # an error, not "" or 0
