"""Steps in object storage: against a server of the S3 protocol, and the same code on files."""

import json
import os
import re
import threading
import time
import warnings
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests import s3

import stepfold as sf
from stepfold import object_storage
from stepfold.checkpoint import bucket
from stepfold.checkpoint.manifest import decode_checked, encode_checked
from stepfold.checkpoint.store import open_store

from .sameness import check_same


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch, s3.Server() as server:
        s3.use_credentials(patch)
        yield server


@pytest.fixture(params=["s3", "file"])
def url(request, tmp_path):
    if request.param == "file":
        return f"file://{tmp_path}/run"
    return request.getfixturevalue("server").url(tmp_path.name)


@pytest.fixture
def folder(tmp_path):
    """Name a folder that is a series when it is given as the URL."""
    return tmp_path / "run"


def file_url(folder):
    return f"file://{folder}"


def state(value=0):
    rng = np.random.default_rng(value)
    return {
        "w": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32),
        "half": jnp.asarray(rng.normal(size=(3, 5)), jnp.bfloat16),
        "small": jnp.asarray(rng.integers(-8, 8, 7), jnp.int4),
        "flag": jnp.asarray([True, False, bool(value)]),
        "empty": jnp.zeros((0, 3)),
        "scalar": jnp.float32(value),
        "numpy": np.arange(value, value + 4),
        "key": jax.random.key(value),
        "number": value,
    }


def like():
    return jax.tree.map(lambda leaf: leaf, state(99))


def objects(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_state_comes_back_with_all_that_was_saved_with_it(url):
    assert sf.checkpoint.latest_step(url) is None
    sf.save(url, state(1), step=1, data={"at": 1}, metrics={"loss": 0.5}, extra={"lr": 0.1})
    restored = sf.restore(url, like())
    check_same(restored.state, state(1))
    assert restored[1:5] == (1, {"at": 1}, {"lr": 0.1}, {"loss": 0.5})
    found = sf.checkpoint.contents(url)
    assert (found.step, found.data, found.metrics) == (1, {"at": 1}, {"loss": 0.5})
    assert found.leaves["half"].dtype == "bfloat16"
    assert sf.checkpoint.verify(url) == {1: []}
    part = sf.restore(url, like(), parts=("w",))
    assert np.array_equal(part.state["w"], state(1)["w"])
    assert part.loaded == {"w": "w"}


def test_a_series_keeps_the_last_and_the_best_steps_and_takes_metrics_later(url):
    with sf.Checkpoints(url, keep=2, best="loss") as series:
        for step in range(1, 6):
            series.save(state(step), step=step, metrics={"loss": abs(step - 2)})
        series.wait()
        series.add_later(5, metrics={"acc": 0.5}, extra={"seen": 5})
        assert series.directory == url
        assert (series.steps(), series.latest_step(), series.best_step()) == ([2, 4, 5], 5, 2)
    check_same(sf.restore(url, like(), step="best").state, state(2))
    restored = sf.restore(url, like())
    assert restored.metrics == {"loss": 3.0, "acc": 0.5}
    assert restored.extra == {"seen": 5}
    assert sf.checkpoint.verify(url) == {2: [], 4: [], 5: []}
    assert open_store(url).other_names() == []


SPECS = [P("fsdp"), P(None, "tp"), P(("fsdp", "tp")), P()]


@pytest.mark.parametrize("spec", SPECS)
def test_any_mesh_restores_what_another_saved(spec, folder, monkeypatch):
    monkeypatch.setattr(bucket, "_OBJECT", 100)  # shards lie across objects
    numbers = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)

    def placed(count, dims, spec):
        mesh = sf.make_mesh(dims, devices=jax.devices()[:count])
        return {"w": jax.device_put(numbers, NamedSharding(mesh, spec))}

    sf.save(file_url(folder), placed(8, (1, 4, 2, 1), spec), step=1)
    meshes = [(8, (1, 2, 4, 1), SPECS), (4, (1, 1, 4, 1), SPECS[1:3]), (1, (1, 1, 1, 1), SPECS[:1])]
    for count, dims, others in meshes:
        for other in others:
            wanted = placed(count, dims, other)
            check_same(sf.restore(file_url(folder), wanted).state, wanted)


def test_large_and_small_leaves_share_objects(folder, monkeypatch):
    monkeypatch.setattr(bucket, "_OBJECT", 1000)
    rng = np.random.default_rng(0)
    saved = {f"leaf{i}": rng.normal(size=1 + 37 * (i % 4) ** 3) for i in range(40)}
    sf.save(file_url(folder), saved, step=1)
    sizes = [path.stat().st_size for path in objects(folder) if path.suffix.startswith(".0")]
    total = sum(array.nbytes for array in saved.values())
    assert sorted(sizes, reverse=True) == [1000] * (total // 1000) + [total % 1000]
    check_same(sf.restore(file_url(folder), saved).state, saved)
    assert sf.checkpoint.contents(file_url(folder)).bytes == total


def test_the_loop_waits_only_for_the_copy(server, tmp_path):
    donate = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    may_write = threading.Event()

    def wait(number, method, name):
        if method == "PUT" and "/saves/" in name:
            assert may_write.wait(60)

    with s3.Proxy(server, wait) as proxy:
        url = proxy.url(tmp_path.name)
        with sf.Checkpoints(url, keep=None) as series:
            tree, numpy = {"w": jnp.arange(1000.0)}, np.zeros(3)
            requests = len(proxy.log)
            series.save({**tree, "n": numpy}, step=1)
            # One request, which finds that the step is new, is made before it returns.
            assert [method for method, _ in proxy.log[requests:]] in (["GET"], ["GET", "PUT"])
            numpy += 1
            for _ in range(3):
                tree = jax.block_until_ready(donate(tree))
            assert series.saving == 1
            may_write.set()
            series.wait()
        found = sf.restore(url, {"w": jnp.zeros(1000), "n": numpy}).state
    assert np.array_equal(found["w"], np.arange(1000.0))
    assert not found["n"].any()


def test_of_two_writers_of_a_step_exactly_one_wins(folder):
    both, ends = threading.Barrier(2, timeout=30), {}

    def write(value):
        try:
            with sf.Checkpoints(file_url(folder), keep=None) as series:
                # Both have found that the step is new before either commits.
                series.save(state(value), step=1, before_commit=both.wait)
        except sf.errors.CheckpointError as error:
            ends[value] = str(error)

    threads = [threading.Thread(target=write, args=(value,)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ((loser, error),) = ends.items()
    assert "step 1 already exists; delete it" in error
    check_same(sf.restore(file_url(folder), like()).state, state(3 - loser))
    assert open_store(file_url(folder)).other_names() == []  # the other's folder is gone


def test_a_flipped_bit_is_detected_or_immaterial(folder, count, monkeypatch):
    monkeypatch.setattr(bucket, "_OBJECT", 500)
    url = file_url(folder)
    sf.save(url, state(1), step=1, metrics={"loss": 0.5}, extra={"lr": 0.1})
    with sf.Checkpoints(url) as series:
        series.add_later(1, metrics={"acc": 1.0}, extra={"lr": 0.2})
    whole = sf.restore(url, like())
    flips = outcomes = 0
    rng = np.random.default_rng(0)
    for path in objects(folder):
        good = path.read_bytes()
        for place in rng.permutation(8 * len(good))[: count(12, 400)]:
            flips += 1
            bad = bytearray(good)
            bad[place // 8] ^= 1 << (place % 8)
            path.write_bytes(bad)
            try:
                found = sf.restore(url, like(), fall_back=False)
            except sf.errors.CheckpointError:
                outcomes += 1
                assert path.name == "stepfold.json" or any(sf.checkpoint.verify(url).values())
            else:
                check_same(found.state, whole.state)
                assert found[1:5] == whole[1:5]
        path.write_bytes(good)
    assert outcomes >= flips * 0.7  # a file that is never read is immaterial
    check_same(sf.restore(url, like()).state, state(1))


def test_a_damaged_step_is_set_aside_by_a_marker_and_saved_again(url, server, tmp_path):
    for step in (1, 2):
        sf.save(url, state(step), step=step)
    if url.startswith("file"):
        (shards,) = (tmp_path / "run").glob("saves/2-*/0.000000")
        shards.write_bytes(shards.read_bytes()[:-1] + b"?")
    else:
        (name,) = (n for n in server.objects(f"{tmp_path.name}/saves/2-") if n.endswith("0.000000"))
        server.write(name, server.read(name)[:-1] + b"?")
    assert len(sf.checkpoint.verify(url)[2]) == 1
    with (
        sf.Checkpoints(url) as series,
        pytest.warns(RuntimeWarning, match=r"step 2 is damaged, kept as 2\.damaged, and an older"),
    ):
        restored = series.restore(like())
    assert (restored.step, list(restored.damaged)) == (1, [2])
    check_same(restored.state, state(1))
    store = open_store(url)
    assert (store.steps(), store.other_names()) == ([1], ["2.damaged"])
    sf.save(url, state(3), step=2)
    check_same(sf.restore(url, like()).state, state(3))
    assert store.set_aside(2) == "2.damaged-2"
    assert store.set_aside(2) is None
    assert store.other_names() == ["2.damaged", "2.damaged-2"]


def test_a_step_that_goes_meanwhile_is_not_read(folder, monkeypatch):
    url = file_url(folder)
    sf.save(url, state(1), step=1)
    monkeypatch.setattr(bucket.BucketStore, "steps", lambda store: [1, 2])
    assert sf.restore(url, like()).step == 1
    with pytest.raises(
        sf.errors.CheckpointError, match="no checkpoint can be restored: each was deleted before"
    ):
        sf.restore(url, like(), step=2)


def test_a_commit_of_a_newer_version_is_not_read_and_not_removed(folder):
    url = file_url(folder)
    for step in (1, 2):
        sf.save(url, state(step), step=step)
    path = folder / "2.commit"
    commit = decode_checked(path.read_bytes(), "")
    path.write_bytes(encode_checked({"format": commit["format"] + 1, "folders": []}))
    make_old(folder)
    with (
        sf.Checkpoints(url) as series,
        pytest.raises(sf.errors.CheckpointError, match="newer stepfold"),
    ):
        series.restore(like())
    assert list(folder.glob("saves/2-*/0.json"))
    with pytest.raises(sf.errors.CheckpointError, match="pip install -U stepfold"):
        sf.restore(url, like(), step=2)


@pytest.mark.parametrize(
    "changed",
    [
        {"object_bytes": 0},
        {"object_bytes": "1"},
        {"manifests": []},
        {"manifests": 3},
        {"manifests": [1]},
        {"folder": "../../"},
        {"folder": None},
        {"format": "1"},
    ],
)
def test_a_commit_of_other_content_is_damage(changed, folder):
    url = file_url(folder)
    for step in (1, 2):
        sf.save(url, state(step), step=step)
    path = folder / "2.commit"
    path.write_bytes(encode_checked(decode_checked(path.read_bytes(), "") | changed))
    assert sf.checkpoint.latest_step(url) == 1
    assert len(sf.checkpoint.verify(url)[2]) == 1
    with pytest.warns(RuntimeWarning, match="step 2 is damaged"):
        assert sf.restore(url, like()).step == 1


def without_a_shard(content):
    content["shards"].pop()


def with_shards_in_another_order(content):
    content["shards"].reverse()


def with_a_huge_leaf_and_its_shard(content):
    content["leaves"]["w"][0] = [1 << 40, 8]
    for shard in content["shards"]:
        if shard[0] == "w":
            shard[1] = [[0, 1 << 40], [0, 8]]


def without_arrays(content):
    content["arrays"].clear()


def of_two_processes(content):
    content["processes"] = 2


@pytest.mark.parametrize(
    "change",
    [
        without_a_shard,
        with_shards_in_another_order,
        with_a_huge_leaf_and_its_shard,
        without_arrays,
        of_two_processes,
    ],
)
def test_a_manifest_of_other_content_is_damage(change, folder):
    url = file_url(folder)
    for step in (1, 2):
        sf.save(url, state(step), step=step, data=np.arange(4))
    (path,) = folder.glob("saves/2-*/0.json")
    content = decode_checked(path.read_bytes(), "")
    change(content)
    path.write_bytes(encode_checked(content))
    commit = decode_checked((folder / "2.commit").read_bytes(), "")
    commit["manifests"] = [zlib.crc32(path.read_bytes())]
    (folder / "2.commit").write_bytes(encode_checked(commit))
    assert sf.checkpoint.verify(url)[2]
    like = state(99)
    if change is with_a_huge_leaf_and_its_shard:
        like["w"] = jax.ShapeDtypeStruct((1 << 40, 8), jnp.float32)
        with pytest.raises(sf.errors.CheckpointError):
            sf.restore(url, like, step=2)
        return
    with pytest.warns(RuntimeWarning, match="step 2 is damaged"):
        assert sf.restore(url, like).step == 1


def test_a_renamed_commit_is_a_copy(folder):
    url = file_url(folder)
    sf.save(url, state(1), step=1)
    os.rename(folder / "1.commit", folder / "7.commit")
    with pytest.raises(sf.errors.CheckpointError, match="step 7, got a copy of that of step 1"):
        sf.restore(url, like())


def make_old(folder):
    """Change the time in the names of all saves, and in the commits that name them."""
    for path in list(folder.glob("saves/*-*-*")):
        step, made, number = path.name.split("-")
        old = f"{step}-{int(made, 16) - 90000:x}-{number}"
        path.rename(path.with_name(old))
        for commit in folder.glob("*.*"):
            if path.name.encode() in commit.read_bytes():
                content = json.loads(commit.read_bytes().partition(b"\n")[2])
                commit.write_bytes(encode_checked({**content, "folder": f"saves/{old}/"}))


def test_only_old_folders_without_a_commit_are_left_overs(folder):
    url = file_url(folder)
    for step in (1, 2, 3, 4):
        sf.save(url, state(step), step=step)
    store = open_store(url, save=True)
    assert store.set_aside(2) == "2.damaged"
    (folder / "3.commit").unlink()  # killed before its commit
    (folder / "4.commit").write_bytes(b"?")  # which folder it names is not known
    names = lambda: sorted(path.parent.name.split("-")[0] for path in folder.glob("saves/*/0.json"))
    (unfinished,) = (name for name in store.other_names() if name.startswith("saves/3-"))
    store.clean()  # it may be the save of a run that is alive
    assert names() == ["1", "2", "3", "4"]
    make_old(folder)
    store.clean()
    assert names() == ["1", "2", "4"]
    assert sf.restore(url, like(), step=1).step == 1
    assert not (folder / unfinished / "0.json").exists()


def test_what_others_put_there_is_left_alone(folder):
    url = file_url(folder)
    sf.save(url, state(1), step=1)
    others = ["saves/notes.txt", "saves/3-x-y/a", "12.txt", "012.commit", "run.json", "5a/state/a"]
    for name in others:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    with sf.Checkpoints(url, keep=1) as series:
        series.save(state(2), step=2)
    assert sf.checkpoint.verify(url) == {2: []}
    assert all((folder / name).exists() for name in others)


# What the server does


def test_refused_writes_name_the_object_and_no_secret(server, tmp_path):
    def refuse(number, method, name):
        return 403 if method == "PUT" and name.endswith(refused) else None

    with s3.Proxy(server, refuse) as proxy:
        url = proxy.url(tmp_path.name)
        for refused in ("stepfold.json", "0.000000", "0.json", "1.commit"):
            with pytest.raises(sf.errors.CheckpointError) as caught:
                sf.save(url, state(1), step=1)
            assert re.match(
                rf"s3://{s3.BUCKET}/{tmp_path.name}/.*{refused}: cannot be written: .*; check the "
                "credentials and what they permit",
                str(caught.value),
            )
            for secret in s3.CREDENTIALS.values():
                assert secret not in str(caught.value)
            assert sf.checkpoint.latest_step(url) is None
        # A commit that may still arrive keeps its folder; of the other saves nothing is left.
        assert [name.partition("-")[0] for name in open_store(url).other_names()] == ["saves/1"]


def test_a_missing_bucket_is_an_error_before_step_1(server):
    url = server.url("run").replace(s3.BUCKET, "another-bucket")
    with pytest.raises(
        sf.errors.CheckpointError, match=r"s3://another-bucket/run/.*cannot be written"
    ):
        sf.Checkpoints(url).open()


@pytest.mark.parametrize("what", ["0.000000", "0.json", "1.commit"])
def test_a_lost_answer_is_no_failure(what, server, tmp_path):
    lost = []

    def lose(number, method, name):
        if method == "PUT" and name.endswith(what) and not lost:
            lost.append(name)
            return "drop"
        return None

    with s3.Proxy(server, lose) as proxy:
        url = proxy.url(tmp_path.name)
        sf.save(url, state(1), step=1)
        assert lost
        check_same(sf.restore(url, like()).state, state(1))
        assert open_store(url).other_names() == []


@pytest.mark.parametrize("fault", ["error", "hang"])
def test_a_server_that_fails_is_an_error_within_bounds(fault, server, tmp_path, monkeypatch):
    retries = {"max_retries": 2, "initial_delay": "50ms", "max_delay": "100ms"}
    monkeypatch.setattr(object_storage, "_RETRIES", retries)
    monkeypatch.setattr(object_storage, "_TIMEOUT", 1.0)
    release = threading.Event()

    def fail(number, method, name):
        if method == "PUT" and name.endswith("0.000000"):
            return 503 if fault == "error" else (release.wait(20) and None)
        return None

    with s3.Proxy(server, fail) as proxy:
        url = proxy.url(tmp_path.name)
        begun = time.monotonic()
        words = {"error": "All 2 retry attempts failed", "hang": "did not answer in 1 s"}[fault]
        with pytest.raises(sf.errors.CheckpointError, match=words):
            sf.save(url, state(1), step=1)
        assert time.monotonic() - begun < 6
        release.set()
        sf.save(proxy.url(f"{tmp_path.name}-2"), state(1), step=1) if fault == "hang" else None


def test_lists_that_are_out_of_date_cost_no_step(server, tmp_path):
    is_stale = False
    with s3.Proxy(server, lambda *_: "stale" if is_stale else None) as proxy:
        url = proxy.url(tmp_path.name)
        sf.save(url, state(1), step=1)
        sf.save(url, state(2), step=2)
        store = open_store(url, save=True)
        assert store.steps() == [1, 2]
        is_stale = True
        # Step 3 is not listed yet.
        sf.save(url, state(3), step=3)
        assert sf.checkpoint.latest_step(url) == 2
        check_same(sf.restore(url, like(), step=1).state, state(1))
        with pytest.raises(sf.errors.CheckpointError, match="step 3 already exists; delete it"):
            sf.save(url, state(4), step=3)
        # Step 2 is still listed.
        store.delete(2)
        store.delete(2)
        assert store.steps() == [1, 2]
        assert sf.checkpoint.latest_step(url) == 1
        assert sf.checkpoint.verify(url) == {1: []}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            restored = sf.restore(url, like())
        assert (restored.step, restored.damaged) == (1, {})
        is_stale = False
        assert store.other_names() == []
        check_same(sf.restore(url, like()).state, state(3))


# URLs


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("hdfs://a/b", "got 'hdfs://a/b'; the scheme is s3, gs or file"),
        ("s3://", "got 's3://'; the scheme"),
        ("s3://bucket/run?profile=me", "and s3 takes endpoint and aws_region in the query"),
        ("gs://bucket/run?endpoint=http://a", "and s3 takes endpoint and aws_region in the query"),
        ("s3://bucket/run#1", "s3 takes endpoint"),
        ("s3://a/run", 'Invalid S3 bucket name: "a"'),
        ("file://home/run", "the scheme is s3, gs or file (file:///a/folder)"),
    ],
)
def test_a_url_that_is_none_is_refused(url, words):
    with pytest.raises(
        sf.errors.ConfigError, match=r"directory: expected a URL such as "
    ) as caught:
        sf.checkpoint.latest_step(url)
    assert words in str(caught.value)


def test_a_url_with_a_secret_is_refused_without_it():
    with pytest.raises(sf.errors.ConfigError, match="expected a URL without a secret") as caught:
        sf.checkpoint.latest_step("s3://name:password@bucket/run")
    assert "password@" not in str(caught.value)


def test_a_path_that_was_a_url_is_refused():
    with pytest.raises(sf.errors.ConfigError, match="as a str such as 's3://bucket/run'"):
        sf.checkpoint.latest_step(Path("s3://bucket/run"))


def test_buckets_of_google_are_opened_with_their_driver():
    base, spec = object_storage._read_url("gs://bucket/a%20b/run/")
    assert base == "gs://bucket/a b/run/"
    assert spec == {"driver": "gcs", "bucket": "bucket", "path": "a b/run/"}
