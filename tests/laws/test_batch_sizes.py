"""Each size of batches that change their size is compiled before step 1.

The random runs hold the bits of such runs, cut, resumed, and without some of their batches.
"""

import itertools
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clu.metrics import Average
from tests.small import full_but

import stepfold as sf

from . import course, network

# tests/laws/test_folding.py compares the bits of optimized programs.
pytestmark = pytest.mark.not_optimized

RAMP = [(0, 8), (7, 16), (20, 8), (90, 32)]


def ramp(sizes=RAMP, **options):
    return sf.batches(course.data(), sizes, **{"seed": 0, **options})


def make_step(events, tx=course.TX):
    def loss(params, batch, key):
        events.append(len(batch["y"]))  # when it is traced
        return course.loss(params, batch, key)

    return sf.make_train_step(loss, tx, accumulate=2)


def noted(events):
    """Note the first steps of a run."""
    return lambda event: events.append("step") if "step" not in events else None


@pytest.mark.parametrize("on_mesh", full_but([False], [False, True]))
def test_each_size_is_compiled_once_before_the_first_step(compiles, caplog, tmp_path, on_mesh):
    events, state = [], course.start()
    sizes, data, wrap = RAMP, course.data(), lambda batches: batches
    if on_mesh:
        mesh = sf.make_mesh()
        sizes = [(start, 2 * len(mesh.devices.flat) * size) for start, size in RAMP]
        data = {name: np.tile(leaf, (16, *[1] * (leaf.ndim - 1))) for name, leaf in data.items()}
        plan = sf.make_sharding(jax.eval_shape(course.start), mesh, sf.sharding.fsdp(min_size=1))
        state = sf.sharding.place(state, plan)
        wrap = lambda batches: sf.prefetch(batches, sharding=lambda b: sf.shard_batch(b, mesh))
    batches = wrap(sf.batches(data, sizes, seed=0))
    caplog.set_level(logging.INFO, "stepfold")
    step = make_step(events)
    sf.fit(step, state, batches, steps=30, log_every=5, run_dir=tmp_path, hooks=[noted(events)])
    traced = events[: events.index("step")]
    assert {2 * rows for rows in traced} == {size for _, size in sizes[:3]}
    assert events == [*traced, "step"]
    used = ", ".join(str(size) for _, size in sizes[:2])
    assert [r.getMessage() for r in caplog.records if r.name == "stepfold"] == [
        f"compiled the step for batches of {used}"
    ]
    info = json.loads((tmp_path / "run.json").read_text())
    assert info["arguments"]["batches"]["batch_size"] == [list(pair) for pair in sizes]
    if not on_mesh:  # another run of the step compiles nothing
        state = course.start()
        compiles.clear()
        sf.fit(step, state, sf.batches(data, sizes, seed=0), steps=30, log_every=5)
        assert compiles == []


def test_a_single_size_compiles_and_logs_nothing_else(caplog):
    events = []
    caplog.set_level(logging.INFO, "stepfold")
    sf.fit(make_step(events), course.start(), ramp(RAMP[:2]), steps=7)
    sf.fit(make_step(events), course.start(), ramp(8), steps=7)
    assert set(events) == {4}
    assert [r for r in caplog.records if r.name == "stepfold"] == []


def test_an_array_with_as_many_rows_by_chance_is_compiled_when_it_comes():
    """The table of eight rows is not of the batch, whose first size is eight."""
    events = []

    def collate(examples):
        x, y = (np.stack([example[name] for example in examples]) for name in ("x", "y"))
        return {"x": x, "y": y, "table": np.arange(8, dtype=np.float32)}

    def loss(params, batch, key):
        events.append((len(batch["x"]), len(batch["table"])))
        error = (batch["x"] @ params["w"] - batch["y"]) ** 2
        size = 1e-3 * (batch["table"].sum() * params["w"] ** 2).sum()
        return {"fit": sf.mean(error), "size": size}

    step, batches = sf.make_train_step(loss, course.TX), ramp([(0, 8), (3, 16)], collate=collate)
    result = sf.fit(step, course.start(), batches, steps=6)
    assert list(dict.fromkeys(events)) == [(8, 8), (16, 16), (16, 8)]
    run, state = jax.jit(step), course.start()
    for batch in itertools.islice(ramp([(0, 8), (3, 16)], collate=collate), 6):
        state, _ = run(state, batch)
    assert network.bits(result.state) == network.bits(state)


def each_row(params, batch, key):
    rows = (batch["x"] @ params["w"] - batch["y"]) ** 2
    return sf.mean(rows, batch["mask"]), {"rows": Average(total=rows, count=jnp.ones_like(rows))}


@pytest.mark.parametrize(
    ("step", "size", "says"),
    [
        (course.STEP, 15, "accumulate=2: expected a divisor of the batch size 15"),
        (sf.make_train_step(each_row, course.TX), 16, "expected metrics of the same shapes"),
    ],
)
def test_what_a_later_size_breaks_is_an_error_before_the_first_step(step, size, says):
    seen, batches = [], ramp([(0, 8), (12, size)])
    with pytest.raises(sf.StepfoldError, match=says) as caught:
        sf.fit(step, course.start(), batches, steps=20, hooks=[seen.append], log_every=1)
    assert seen == []
    assert f"compiling ahead for the batches of {size}" in "".join(caught.value.__notes__)


def test_a_compiled_step_is_refused_for_sizes_that_it_does_not_take():
    step = sf.compile_step(course.STEP, course.start(), next(ramp()))
    with pytest.raises(
        sf.errors.ConfigError, match="for batches of 8 and later of 16, got CompiledStep"
    ):
        course.run(step=step, data=ramp(), steps=10)
    assert course.run(step=step, data=ramp(), steps=7).steps == 7


def test_another_shape_within_a_size_is_still_refused():
    with pytest.raises(sf.errors.RetraceError, match=r"batch/x: expected float32\[8,3\], got"):
        course.run(data=ramp([(0, 8), (30, 16)], remainder="keep"))
