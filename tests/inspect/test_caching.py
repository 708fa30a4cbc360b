import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import stepfold as sf
from stepfold.inspect.caching import check_cache, compile_cached

DIGEST = 32
SETTINGS = [name for name in jax.config.values if re.search("compilation_cache|persistent", name)]


def lowered(number=2.0):
    return jax.jit(lambda x: jnp.sin(x) * number).lower(1.0)


@pytest.fixture(autouse=True)
def without_a_cache():
    """Leave the cache that the tests share."""
    with cache_at(None):
        yield


@contextmanager
def cache_at(place):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", place)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.fixture
def heard():
    """Say of each program whether jax found it in a cache."""
    said = []

    def listen(name, **_):
        if name.endswith(("cache_hits", "cache_misses")):
            said.append(name.removeprefix("/jax/compilation_cache/cache_"))

    jax.monitoring.register_event_listener(listen)
    yield said
    jax.monitoring.unregister_event_listener(listen)


def settings():
    return {name: getattr(jax.config, name) for name in SETTINGS}


def test_a_program_is_compiled_once_and_then_taken_from_the_directory(tmp_path, heard):
    place = tmp_path / "made" / "here"
    for number, said in [(2.0, "misses"), (2.0, "hits"), (3.0, "misses"), (3.0, "hits")]:
        program = compile_cached(lowered(number), place)
        assert heard.pop() == said
        assert not heard
        assert program(1.0) == jnp.sin(1.0) * number
    (tmp_path / "made" / "here" / "tmpabc").write_text("what a killed process left")
    compile_cached(lowered(), place)
    assert heard == ["hits"]


def test_a_step_from_the_directory_gives_the_same_bits(tmp_path, heard):
    tx = optax.sgd(0.1, momentum=0.9)
    step = sf.make_train_step(lambda p, x, key: sf.mean(jnp.tanh(x @ p["w"]) ** 2), tx)
    batch = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    ends = []
    for cache in (None, tmp_path, str(tmp_path)):
        state = sf.init_state({"w": jnp.arange(3.0)}, tx, jax.random.key(0))
        compiled = sf.compile_step(step, state, batch, compilation_cache=cache)
        for _ in range(3):
            state, metrics = compiled(state, batch)
        assert state.step == 3
        ends.append([np.asarray(x).tobytes() for x in jax.tree.leaves((state[:3], metrics))])
    assert heard == ["misses", "hits"]
    assert ends[0] == ends[1] == ends[2]


@pytest.mark.parametrize("change", ["flip", "flip the digest", "cut", "empty"])
def test_what_was_damaged_is_told_of_and_compiled_and_written_anew(change, tmp_path, heard):
    compile_cached(lowered(), tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    places = {"flip": range(DIGEST, len(whole), len(whole) // 5), "flip the digest": [5]}
    for place in places.get(change, [0]):
        damaged = bytearray(whole)
        if change in places:
            damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged[: {"cut": len(whole) // 2, "empty": 0}.get(change)])
        heard.clear()
        with pytest.warns(RuntimeWarning, match="-cache is damaged, and is compiled and written a"):
            assert compile_cached(lowered(), tmp_path)(1.0) == jnp.sin(1.0) * 2
        assert heard == ["misses"]
        assert compile_cached(lowered(), tmp_path)(1.0) == jnp.sin(1.0) * 2
        assert heard == ["misses", "hits"]


def test_what_is_whole_and_no_program_ends_no_run(tmp_path):
    compile_cached(lowered(), tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(hashlib.sha256(b"no program").digest() + b"no program")
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        assert compile_cached(lowered(), tmp_path)(1.0) == jnp.sin(1.0) * 2


def test_a_directory_that_is_of_no_use_is_told_of_and_the_program_compiled(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(RuntimeWarning, match=r"file/x is of no use, .* without it: Not a directory"):
        assert compile_cached(lowered(), tmp_path / "file" / "x")(1.0) == jnp.sin(1.0) * 2


def test_the_settings_of_the_process_are_its_own_again(tmp_path, heard):
    before = settings()
    compile_cached(lowered(), tmp_path)
    assert settings() == before

    class Refused:
        def as_text(self):
            return ""

        def compile(self):
            assert settings() != before
            raise RuntimeError("no such thing")

    with pytest.raises(RuntimeError, match="no such thing"):
        compile_cached(Refused(), tmp_path)
    assert settings() == before


def test_a_cache_that_the_user_has_set_is_used_before_and_after(tmp_path, heard):
    mine = str(tmp_path / "mine")
    with cache_at(mine):
        jax.jit(lambda x: x * 5.0)(1.0)
        compile_cached(lowered(7.0), tmp_path / "given")
        assert (jax.config.jax_compilation_cache_dir, len(list(tmp_path.glob("given/*")))) == (
            mine,
            1,
        )
        heard.clear()
        jax.clear_caches()
        jax.jit(lambda x: x * 5.0)(1.0)
        assert heard == ["hits"]
        lowered(7.0).compile()  # it was not kept where the user's are
        assert heard == ["hits", "misses"]


def test_threads_do_not_mix_up_the_settings_or_what_they_keep(tmp_path):
    before = settings()
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda k: compile_cached(lowered(k), tmp_path / str(k % 2)), range(6)))
    assert [float(program(0.5) / made[1](0.5)) for program in made] == pytest.approx(range(6))
    assert settings() == before
    assert [len(list((tmp_path / name).iterdir())) for name in "01"] == [3, 3]


def test_a_directory_is_read_before_anything_is_compiled(tmp_path):
    (tmp_path / "file").touch()
    assert (check_cache(None), check_cache(str(tmp_path))) == (None, tmp_path)
    with pytest.raises(sf.ConfigError, match="compilation_cache: .* got .*/file, which is a file"):
        check_cache(tmp_path / "file")
    for wrong in (True, 3, ""):
        with pytest.raises(sf.ConfigError, match="compilation_cache: expected a directory, or N"):
            check_cache(wrong)
    with pytest.raises(sf.ConfigError, match="compilation_cache: .* which is a file"):
        sf.compile_step(lambda s, b: s, 1.0, 1.0, compilation_cache=tmp_path / "file")
