"""Temporary steps of two processes, each with the directory of a host, or with one for both."""

import importlib
import json
import math
import os
import re
import shutil
import signal
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import stepfold as sf
from stepfold.checkpoint import tier, transport
from stepfold.checkpoint.store import DirectoryStore
from stepfold.core.processes import KeyValues

from . import launch

SHAPES = {"all": (16, 100), "some": (100, 8), "one": (900,)}
BYTES = 4 * sum(map(math.prod, SHAPES.values()))


def make_state(seed, mesh):
    """Return a state that is sharded over all devices, over two of them, or replicated."""
    state = {}
    specs = {"all": P("fsdp"), "some": P(None, "tp"), "one": P()}
    for name, shape in SHAPES.items():
        rng = np.random.default_rng([seed, len(name)])
        values = rng.normal(size=shape).astype(np.float32)
        place = NamedSharding(mesh, specs[name])
        state[name] = jax.make_array_from_callback(shape, place, lambda i, v=values: v[i])
    numbers = np.asarray(jax.random.key_data(jax.random.key(seed)))
    place = NamedSharding(mesh, P())
    data = jax.make_array_from_callback((2,), place, lambda i: numbers[i])
    return state | {"key": jax.random.wrap_key_data(data), "numpy": np.full(3, seed)}


def is_same(state, wanted):
    """Whether the parts of this process have the same bits."""
    same = True
    for name, leaf in state.items():
        have, want = leaf, wanted[name]
        if not isinstance(leaf, jax.Array):
            same &= np.array_equal(have, want)
            continue
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            have, want = map(jax.random.key_data, (leaf, wanted[name]))
        pairs = zip(have.addressable_shards, want.addressable_shards, strict=True)
        same &= all(np.array_equal(one.data, other.data) for one, other in pairs)
    return bool(same)


def loses(start, folder, replicas, lost, is_shared):
    """Save, lose the directory of one host, and restore; print from where, and what was written."""
    process, mesh = start().process, sf.make_mesh((1, 2, 2, 1))
    meet = KeyValues("test").gather
    folder = Path(folder)
    own = folder / ("host" if is_shared else f"host{process}")
    temporary = sf.Temporary(own, every=1, replicas=replicas)
    described = sf.Checkpoints(folder / "durable", every=3, temporary=temporary)
    with described as series:
        for step in range(1, 6):
            if series.due(step):
                series.save(make_state(step, mesh), step=step, data={"own": [process, step]})
        series.wait()
        meet(True, "the end of all saves")
        assert series.steps() == [3, 5]
        size = sum(path.stat().st_size for path in own.glob("series-*/5-*"))
        meet(True, "a look")
    if process == lost:
        shutil.rmtree(own)
    meet(True, "a loss")
    reads, open_arrays = [], DirectoryStore.open_arrays
    DirectoryStore.open_arrays = lambda *args: reads.append(args) or open_arrays(*args)
    found = {}
    with warnings.catch_warnings(record=True, action="always") as caught:
        for name in ("open", "closed"):
            if name == "open":
                with described as series:
                    restored = series.restore(make_state(0, mesh))
            else:
                restored = described.restore(make_state(0, mesh))
            wanted = make_state(restored.step, mesh)
            found[name] = [restored.step, is_same(restored.state, wanted), restored.data["own"]]
    DirectoryStore.open_arrays = open_arrays
    print(json.dumps([found, size, len(reads), [str(warning.message) for warning in caught]]))


@pytest.mark.parametrize("lost", [0, 1])
def test_a_state_survives_the_loss_of_a_host(processes, tmp_path, lost):
    outputs = map(json.loads, processes.run(loses, str(tmp_path), 1, lost, False))
    for process, (found, size, reads, caught) in enumerate(outputs):
        assert [*found.values()] == [[5, True, [process, 5]]] * 2
        assert (reads, caught) == (0, []), "a permanent step was read"
        assert BYTES < size < BYTES + 12_000


def test_without_replicas_the_permanent_step_is_taken(processes, tmp_path):
    outputs = [*map(json.loads, processes.run(loses, str(tmp_path), 0, 1, False))]
    for process, (found, size, _, caught) in enumerate(outputs):
        assert [*found.values()] == [[3, True, [process, 3]]] * 2
        if process == 0:
            (text,) = caught
            assert "step 5 is not complete, and step 3 is taken" in text
            assert "the slices of process 1 are missing" in text
        assert size < BYTES


def test_processes_that_share_a_directory_write_each_slice_once(processes, tmp_path):
    outputs = map(json.loads, processes.run(loses, str(tmp_path), 1, None, True))
    for process, (found, size, reads, caught) in enumerate(outputs):
        assert [*found.values()] == [[5, True, [process, 5]]] * 2
        assert (reads, caught) == (0, [])
        assert BYTES < size < BYTES + 12_000


def fails(start, folder, where, last=4):
    """Let something fail in process 1; print the error, the warnings and the steps."""
    process, mesh = start().process, sf.make_mesh()
    meet = KeyValues("test").gather
    folder, problem, seen = Path(folder), "", []
    replicas = process if where == "replicas" else 1
    temporary = sf.Temporary(folder / f"host{process}", every=1, replicas=replicas)
    described = sf.Checkpoints(folder / "durable", every=5, temporary=temporary)
    module = importlib.import_module("stepfold.checkpoint.restore")  # `restore` is a function
    originals = tier.sync, module.make_leaf, transport.Server.__init__

    def fail(*_):
        raise OSError(28, "No space left on device")

    def closes(server, answer):
        originals[2](server, answer)
        server._listener.close()

    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            if where == "server" and process == 1:
                transport.Server.__init__ = closes
            with described as series:
                for step in range(1, last + 1):
                    tier.sync = fail if (where, process, step) == ("disk", 1, 3) else originals[0]
                    assert series.due(step)
                    series.save(make_state(step, mesh), step=step)
                    series.wait()
                    tier.sync = originals[0]
                    meet(True, "the end of a save")
                    names = sorted((folder / f"host{process}").glob("series-*/*-*"))
                    seen.append([path.name.partition("-")[0] for path in names])
                    meet(True, "a look")
                if where == "restore" and process == 1:
                    module.make_leaf = fail
                restored = series.restore(make_state(0, mesh))
                assert is_same(restored.state, make_state(restored.step, mesh))
                seen.append(restored.step)
        except (sf.errors.CheckpointError, OSError) as error:
            problem = str(error)
        finally:
            tier.sync, module.make_leaf, transport.Server.__init__ = originals
    meet(True, "the end")
    print(json.dumps([problem, seen, [str(warning.message) for warning in caught]]))


def test_a_full_disk_of_one_host_skips_a_save(processes, tmp_path):
    first, second = map(json.loads, processes.run(fails, str(tmp_path), "disk"))
    assert first[0] == second[0] == ""
    for seen in (first[1], second[1]):
        assert set(seen[1]) == {"2"}
        assert "2" in seen[2], "the last complete step was deleted"
        assert set(seen[3]) == {"4"}
        assert seen[4] == 4
    (text,) = second[2]
    assert "temporary saves fail" in text
    assert "3: not saved: no space left" in text


def test_a_process_that_nobody_reaches_ends_no_run(processes, tmp_path):
    first, second = map(json.loads, processes.run(fails, str(tmp_path), "server", 5))
    assert (first[0], second[0]) == ("", "")
    assert (first[1][-1], second[1][-1]) == (5, 5)
    (text,) = [text for text in first[2] if "temporary saves fail" in text]
    assert re.search(r"1: not saved: .* cannot be reached: ", text)
    assert not any("temporary saves fail" in text for text in second[2])


def test_processes_that_disagree_are_refused(processes, tmp_path):
    outputs = map(json.loads, processes.run(fails, str(tmp_path), "replicas"))
    for problem, _, _ in outputs:
        assert problem == "replicas: expected the same number in all processes, got 0 and 1"


def test_a_restore_that_fails_in_one_process_fails_in_all(processes, tmp_path):
    first, second = map(json.loads, processes.run(fails, str(tmp_path), "restore"))
    assert "another process could not restore it" in first[0]
    assert "No space left" in second[0]


def fits(start, folder, hosts, victim):
    """Fit with an evaluation; a process kills itself after step 9."""
    process = start(heartbeat=10, shutdown=5).process
    rng, tx = np.random.default_rng(0), optax.adam(1e-2)
    rows = {"x": rng.normal(size=(64, 16)).astype(np.float32)}
    init = lambda key: {"w": jax.random.normal(key, (16, 32))}
    loss_fn = lambda params, batch, key: sf.mean((jnp.tanh(batch["x"] @ params["w"]) ** 2).mean(-1))
    shape = jax.eval_shape(lambda: sf.init_state(init, tx, jax.random.key(0)))
    plan = sf.make_sharding(shape, sf.make_mesh(), sf.sharding.fsdp(min_size=1))
    step = sf.make_train_step(loss_fn, tx, grad=sf.sharding.ordered(plan, blocks=8))

    def dies(event):
        if process == victim and event.is_train and event.step == 9:
            os.kill(os.getpid(), signal.SIGKILL)

    temporary = hosts and sf.Temporary(hosts[process], every=2)
    result = sf.fit(
        step, lambda: sf.init_state(init, tx, jax.random.key(0), sharding=plan),
        sf.batches(rows, 16, seed=0), steps=16, log_every=1, hooks=[dies, sf.progress("none")],
        checkpoints=sf.Checkpoints(f"{folder}/run", every=12, temporary=temporary),
        evaluation=sf.Evaluation(
            sf.make_eval_step(loss_fn), lambda: sf.batches(rows, 16, epochs=1), every=4
        ),
    )  # fmt: skip
    whole = NamedSharding(sf.make_mesh(), P())
    state = result.state._replace(key=jax.random.key_data(result.state.key))
    state = jax.jit(lambda tree: tree, out_shardings=whole)(state)
    numbers = [np.asarray(leaf.addressable_data(0)) for leaf in jax.tree.leaves(state)]
    curves = {name: [*curve] for name, curve in result.history.items()}
    print(json.dumps([result.resumed, [each.tobytes().hex() for each in numbers], curves]))


@pytest.mark.full
@pytest.mark.parametrize(("victim", "lost", "count"), [(0, None, 2), (1, 0, 2), (0, 1, 1)])
def test_a_run_that_is_started_again_ends_with_the_same_bits(tmp_path, victim, lost, count):
    run = lambda *args, n: launch.ends_of_processes(fits, n, args=args)
    ends = run(str(tmp_path / "whole"), None, None, n=2)
    assert not any(end.code for end in ends), launch.report(ends)
    _, *wanted = json.loads(ends[0].output)
    hosts = [str(tmp_path / f"host{process}") for process in range(2)]
    ends = run(str(tmp_path), hosts, victim, n=2)
    assert ends[victim].code == -signal.SIGKILL
    if lost is not None:
        shutil.rmtree(hosts[lost])
    ends = run(str(tmp_path), hosts[:count], None, n=count)
    assert not any(end.code for end in ends), launch.report(ends)
    for end in ends:
        resumed, *found = json.loads(end.output)
        assert resumed in (6, 8)  # the save of step 8 may not have ended
        assert found[0] == wanted[0]
        for name, curve in wanted[1].items():
            # Norms and evaluations are sums over devices, whose rounding depends on their number.
            assert found[1][name] == (curve if count == 2 else pytest.approx(curve, rel=1e-5))
