"""The compilation cache of a run, and what `run.json` and the report say about programs."""

import json
import os

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from tests.small import TX, batches, loss_fn, start

import stepfold as sf
from stepfold.runs import programs
from stepfold.runs.programs import Programs


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    """Configure no cache, as most users do; small programs are kept in that of a run too."""
    monkeypatch.setattr(programs, "has_virtual_devices", lambda: False)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    reset_cache()


def train(folder, steps, step=None, data=None, **options):
    """Train by a step that no earlier call has compiled; return the last attempt of `run.json`."""
    step = step or sf.make_train_step(loss_fn, TX)
    checkpoints = sf.Checkpoints(every=2)
    options = {"steps": steps, "run_dir": folder, "checkpoints": checkpoints, **options}
    sf.fit(step, start(), data or batches(), **options)
    return json.loads((folder / "run.json").read_text())["attempts"][-1]


def entries(run_dir):
    return {path for path in (run_dir / "compiled").glob("*-program") if "step_once" in path.name}


def test_a_restart_loads_its_programs_and_says_so(tmp_path, capsys):
    assert train(tmp_path, 2)["compiled"]["new"]["count"] > 0
    assert len(entries(tmp_path)) == 1
    compiled = train(tmp_path, 4)["compiled"]
    assert (compiled["loaded"]["count"], compiled["new"]["count"]) == (1, 0)
    assert compiled["reasons"] == []
    assert "from the compilation cache" in (tmp_path / "report.html").read_text()
    assert "compiled the step" not in capsys.readouterr().err


def test_virtual_devices_have_no_cache(tmp_path, monkeypatch):
    monkeypatch.undo()
    train(tmp_path, 2)
    assert not (tmp_path / "compiled").exists()


def test_the_settings_of_jax_are_as_before(tmp_path):
    before = {**jax.config.values}
    train(tmp_path / "a", 2)
    assert jax.config.values == before

    def fail(event):
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "b/compiled")
        raise KeyError("a hook")

    with pytest.raises(KeyError, match="a hook"):
        train(tmp_path / "b", 2, hooks=fail)
    assert jax.config.values == before


@pytest.mark.parametrize(("seconds", "expected"), [(1.0, 0.1), (0.5, 0.5)])
def test_programs_that_compile_fast_are_kept_unless_jax_is_told_otherwise(
    seconds, expected, tmp_path
):
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, seconds)
    seen = []
    try:
        train(tmp_path, 2, hooks=lambda event: seen.append(getattr(jax.config, name)))
    finally:
        jax.config.update(name, before)
    assert seen == [expected]


def test_a_cache_that_the_user_configured_is_used_and_it_can_be_off(tmp_path):
    off = sf.RunDirectory(tmp_path / "off", compilation_cache=False)
    train(tmp_path / "off", 2, run_dir=off)
    own = str(tmp_path / "own")
    jax.config.update("jax_compilation_cache_dir", own)
    train(tmp_path / "configured", 2)
    assert jax.config.jax_compilation_cache_dir == own
    assert os.listdir(own)
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        train(tmp_path / "disabled", 2)
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    for name in ("off", "configured", "disabled"):
        assert not (tmp_path / name / "compiled").exists()


def test_the_cache_is_on_or_off(tmp_path):
    with pytest.raises(sf.errors.ConfigError, match="compilation_cache: expected True or False"):
        sf.RunDirectory(tmp_path, compilation_cache="a/directory")


@pytest.fixture
def tells_all(monkeypatch):
    """Give reasons for programs that compile fast too, as those of tests do."""
    monkeypatch.setattr(programs, "_MIN_SECONDS", 0.0)
    monkeypatch.setattr(programs, "_SHOWN_SECONDS", 0.0)


def test_a_restart_that_compiles_its_step_says_what_changed(
    tmp_path, tells_all, capsys, monkeypatch
):
    train(tmp_path, 2)
    assert "compiled the step" not in capsys.readouterr().err  # there is nothing to compare with

    def other_loss_fn(params, batch, key):
        return sf.mean(abs(params["w"] - batch["x"]))

    train(tmp_path, 4, sf.make_train_step(other_loss_fn, TX))
    assert "its code, a constant or a setting of XLA" in capsys.readouterr().err
    changed = sf.batches({"x": np.ones((16, 2), np.float32)}, 4, seed=0)
    train(tmp_path, 6, data=changed)
    assert "batch changed from x float32[4] to x float32[4,2]" in capsys.readouterr().err
    known = programs.versions()
    monkeypatch.setattr(programs, "versions", lambda: known | {"jax": "99.0"})
    for path in entries(tmp_path):
        path.unlink()
    (reason,) = train(tmp_path, 8, data=changed)["compiled"]["reasons"]
    assert reason.endswith(f"s: jax changed from {known['jax']} to 99.0")
    assert "jax changed from" in (tmp_path / "report.html").read_text()


class Plain:
    """A stand-in for zstandard, which finds no damage."""

    class ZstdCompressor:
        compress = decompress = staticmethod(bytes)

    ZstdDecompressor = ZstdCompressor


def flip(share):
    def damage(content):
        at = int(share * (len(content) - 1))
        return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]

    return damage


@pytest.mark.parametrize(
    "damage",
    [*map(flip, (0, 0.1, 0.5, 0.9, 1)), lambda x: x[:-10], lambda x: x[:2], lambda x: b""],
    ids=["start", "tenth", "middle", "nine tenths", "end", "shorter", "two bytes", "empty"],
)
def test_a_damaged_entry_is_replaced_with_a_warning(damage, tmp_path, monkeypatch):
    monkeypatch.setattr("jax._src.compilation_cache.zstd", None)
    monkeypatch.setattr("jax._src.compilation_cache.zstandard", Plain)
    train(tmp_path, 2)
    (path,) = entries(tmp_path)
    content = path.read_bytes()
    path.write_bytes(damage(content))
    with pytest.warns(UserWarning, match="the compiled program is damaged") as caught:
        compiled = train(tmp_path, 4)["compiled"]
    assert [str(path) in str(warning.message) for warning in caught] == [True]
    assert (compiled["loaded"]["count"], compiled["new"]["count"]) == (0, 1)
    (path,) = entries(tmp_path)
    assert len(path.read_bytes()) > len(content) / 2
    compiled = train(tmp_path, 6)["compiled"]
    assert (compiled["loaded"]["count"], compiled["new"]["count"]) == (1, 0)


def test_an_entry_in_place_of_another_is_damaged(tmp_path):
    files = programs.ProgramFiles(tmp_path / "compiled")
    files.put("a", b"one")
    files.put("b", b"another")
    files.put("b", b"later")  # kept as it is
    assert (files.get("a"), files.get("b"), files.get("c")) == (b"one", b"another", None)
    (tmp_path / "compiled/a-program").replace(tmp_path / "compiled/b-program")
    with pytest.warns(UserWarning, match="b-program: the compiled program is damaged"):
        assert files.get("b") is None
    assert files.get("b") is None


def test_a_full_disk_leaves_no_part_of_an_entry(tmp_path, monkeypatch):
    def fail(path, content):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", fail)
    with pytest.raises(OSError, match="No space left"):
        programs.ProgramFiles(tmp_path).put("a", b"one")
    assert [*tmp_path.iterdir()] == []


def test_a_start_reads_no_entry_and_deletes_what_a_killed_process_was_writing(
    tmp_path, monkeypatch
):
    train(tmp_path, 2)
    before = sorted((tmp_path / "compiled").iterdir())
    for age, name in ((0, "live.new"), (7200, "left.new")):
        path = tmp_path / "compiled" / name
        path.touch()
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    monkeypatch.setattr("io.open", None)
    Programs(tmp_path).clean()
    assert sorted((tmp_path / "compiled").iterdir()) == sorted(
        [*before, tmp_path / "compiled/live.new"]
    )


def test_the_oldest_entries_beyond_the_limit_are_deleted(tmp_path, monkeypatch):
    train(tmp_path, 2)
    (newest,) = entries(tmp_path)
    content = newest.read_bytes()
    for age in range(1, 4):
        older = newest.with_name(f"older-{age}-program")
        older.write_bytes(content)
        os.utime(older, (1000 - age, 1000 - age))
    for other in (tmp_path / "compiled").iterdir():
        if other != newest and not other.name.startswith("older"):
            other.unlink()
    monkeypatch.setattr(programs, "_MAX_BYTES", 2 * len(content))
    Programs(tmp_path).clean()
    names = sorted(path.name for path in (tmp_path / "compiled").iterdir())
    assert names == [newest.name, "older-1-program"]
