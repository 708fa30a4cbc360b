"""The files of temporary steps: what they hold, what damage does, and what is left behind."""

import shutil
import socket
import threading
import warnings
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import stepfold as sf
from stepfold.checkpoint import transport
from stepfold.checkpoint.tier import TierStore
from stepfold.errors import CheckpointError

from .sameness import check_same


def mesh_of(count):
    return jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(-1, 1), ("fsdp", "tp"))


def make_state(seed, count=8):
    """Return a state of every kind of leaf, over some devices."""
    rng, mesh = np.random.default_rng(seed), mesh_of(count)
    place = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, P(*spec)))
    return {
        "rows": place(rng.normal(size=(16, 6)).astype(np.float32), "fsdp"),
        "columns": place(jnp.asarray(rng.normal(size=(3, 8)), jnp.bfloat16), None, "fsdp"),
        "whole": place(rng.integers(0, 99, 5, np.int32)),
        "empty": place(np.zeros((0, 3), np.float32)),
        "key": place(jax.random.key(seed)),
        "keys": place(jax.random.split(jax.random.key(seed), 8), "fsdp"),
        "bits": place(rng.integers(0, 2, 7).astype(bool)),
        "scalar": place(np.float32(seed)),
        "numpy": rng.integers(0, 99, 4),
        "number": seed,
    }


def described(folder, **options):
    options = {"every": 1, "keep": 2, **options}
    return sf.Checkpoints(folder / "durable", temporary=sf.Temporary(folder / "local", **options))


def saved(folder, seeds=(1, 2), **options):
    """Save steps, and return their files, the newest first."""
    with described(folder, **options) as series:
        for seed in seeds:
            assert series.due(seed)
            values = {"data": {"at": seed, "rows": np.arange(seed)}, "extra": [np.full(3, seed)]}
            series.save(make_state(seed), step=seed, metrics={"loss": seed / 2}, **values)
    (inner,) = (folder / "local").iterdir()
    return [next(inner.glob(f"{seed}-*")) for seed in reversed(seeds)]


def has(restored, seed, count=8):
    check_same(restored.state, make_state(seed, count))
    assert (restored.step, restored.metrics) == (seed, {"loss": seed / 2})
    assert restored.data["at"] == seed
    np.testing.assert_array_equal(restored.data["rows"], np.arange(seed))
    np.testing.assert_array_equal(restored.extra[0], np.full(3, seed))


@pytest.mark.parametrize("count", [8, 3, 1])
def test_a_state_of_every_kind_is_restored_onto_any_devices(tmp_path, count):
    state = make_state(0, count) if count != 3 else make_state(0, 8)
    saved(tmp_path)
    has(described(tmp_path).restore(state), 2, 8 if count == 3 else count)


def test_a_save_is_one_file_which_has_each_value_once(tmp_path):
    path, _ = saved(tmp_path)
    size = sum(
        np.asarray(leaf).nbytes for leaf in jax.tree.leaves(make_state(2)) if not is_key(leaf)
    )
    assert size < path.stat().st_size < size + 5000


def is_key(leaf):
    return jnp.issubdtype(getattr(leaf, "dtype", np.int32), jax.dtypes.prng_key)


def test_a_flipped_bit_anywhere_falls_back(tmp_path, count):
    newest, _ = saved(tmp_path)
    good = newest.read_bytes()
    places = np.linspace(0, len(good) - 1, count(12, 200), dtype=int)
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 1 << int(place % 8)
        newest.write_bytes(bad)
        with pytest.warns(RuntimeWarning, match="local.*step 2 is damaged, and an older one"):
            has(described(tmp_path).restore(make_state(0)), 1)
    newest.write_bytes(good)
    has(described(tmp_path).restore(make_state(0)), 2)


@pytest.mark.parametrize("left", [0, 10, 0.5, 0.98, -1])
def test_a_file_that_was_cut_falls_back(tmp_path, left):
    newest, _ = saved(tmp_path)
    good = newest.read_bytes()
    newest.write_bytes(good[: int(left * len(good)) if 0 < left < 1 else left])
    with pytest.warns(RuntimeWarning, match="step 2 is damaged"):
        has(described(tmp_path).restore(make_state(0)), 1)


def test_a_missing_file_is_no_step(tmp_path):
    newest, _ = saved(tmp_path)
    newest.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        has(described(tmp_path).restore(make_state(0)), 1)


@pytest.mark.parametrize("how", ["wiped", "all damaged"])
def test_a_run_without_good_steps_starts_from_the_beginning(tmp_path, how):
    files = saved(tmp_path)
    if how == "wiped":
        shutil.rmtree(tmp_path / "local")
    for path in files if how == "all damaged" else []:
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    with described(tmp_path) as series:
        with warnings.catch_warnings(record=True, action="always") as caught:
            assert not series.has_checkpoint()
        texts = [str(warning.message) for warning in caught]
        assert sum("there is no other step" in text for text in texts) == len(files) * (
            how == "all damaged"
        )
        assert series.steps() == []
        assert series.due(1)
        series.save(make_state(1), step=1)
        assert series.due(2)
        series.save(make_state(2), step=2)
        assert series.due(3)
        series.save(make_state(3), step=3)
        series.wait()
        assert series.steps() == [2, 3]
    names = [path.name for path in files[0].parent.iterdir()]
    assert len(names) == 3, "damaged files were left"


def test_two_saves_of_a_step_do_not_mix(tmp_path):
    """After going back, a step is saved again, with other values."""
    with described(tmp_path, keep=5) as series:
        for seed in (1, 2, 3):
            assert series.due(seed)
            series.save(make_state(seed), step=seed)
        series.wait()
        series.delete_after(1)
        assert series.steps() == [1]
        assert series.due(2)
        series.save(make_state(7), step=2)
        series.wait()
        check_same(series.restore(make_state(0)).state, make_state(7))
    with described(tmp_path, keep=5) as series:
        assert series.due(2)
        series.save(make_state(8), step=2)
        series.wait()
        check_same(series.restore(make_state(0)).state, make_state(8))


def test_replicas_are_a_count():
    assert sf.Temporary("a", every=1).replicas == 1
    for bad in (-1, 1.5, None):
        with pytest.raises(sf.errors.ConfigError, match="replicas: expected"):
            sf.Temporary("a", every=1, replicas=bad)


def test_the_folder_of_temporary_steps_is_no_directory_to_save_in(tmp_path):
    path, _ = saved(tmp_path)
    with pytest.raises(CheckpointError, match="the directory of a series, got that of"):
        sf.save(path.parent, {"w": jnp.ones(2)}, step=3)
    assert sf.checkpoint.verify(path.parent) == {1: [], 2: []}
    assert sf.checkpoint.contents(path.parent).step == 2


# Requests between processes


@pytest.fixture
def server():
    """Start a server that returns the request, and what follows it twice."""

    def answer(request, connection):
        if request == "fail":
            raise CheckpointError("no such step")
        content = np.empty(request, np.uint8)
        connection.fill(content)
        return [request], [content.data, content.data]

    return transport.Server(answer)


def test_requests_and_their_bytes_arrive(server):
    content = np.arange(100_000).astype(np.uint8)
    for size in (0, 1, 100_000):
        answer, received = transport.send_request(server.address, size, [content[:size].data])
        assert answer == [size]
        np.testing.assert_array_equal(received, np.tile(content[:size], 2))


def test_an_error_of_the_other_process_is_raised_here(server):
    with pytest.raises(CheckpointError, match="^no such step$"):
        transport.send_request(server.address, "fail")


def test_a_request_without_the_token_gets_no_answer(server):
    wrong = server.address._replace(token="0" * 32)
    with pytest.raises(CheckpointError, match="cannot be reached"):
        transport.send_request(wrong, 0)
    with socket.create_connection(server.address[:2]) as other:  # not a message at all
        other.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
        with suppress(ConnectionError):
            assert other.recv(10) == b""
    assert transport.send_request(server.address, 0)[0] == [0]


def test_a_process_that_is_gone_is_an_error(server):
    host, port, token = server.address
    with socket.create_server((host, 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(CheckpointError, match="cannot be reached: .*refused"):
        transport.send_request(transport.Address(host, port, token), 0)


def test_many_requests_at_once(server):
    found = []
    ask = lambda size: found.append(
        transport.send_request(server.address, size, [bytes(size)])[0][0]
    )
    threads = [threading.Thread(target=ask, args=(size,)) for size in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [*range(40)]


@pytest.mark.parametrize("name", ["../secret", "host.json", "/etc/passwd", "1-a.1-0.slices.part"])
def test_other_processes_read_and_write_only_files_of_steps(tmp_path, name):
    (tmp_path / "secret").write_text("secret")
    store = TierStore(tmp_path / "inner")
    for request in (["read", [name, 0, 3]], ["store", [name, 0]]):
        with pytest.raises(CheckpointError, match="no such file"):
            store._answer(request, None)
