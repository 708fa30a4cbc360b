"""`choose` takes the cheapest of the arguments that fit."""

import dataclasses
import functools
import re
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import stepfold as sf
from stepfold.inspect.choose import remat_policies
from stepfold.table import amount

TX = optax.sgd(0.1)
BATCH = jax.ShapeDtypeStruct((512, 64), jnp.float32)


def init(key):
    return {"in": jnp.ones((64, 512)), "out": jnp.ones((512, 64))}


def loss_fn(params, batch, key):
    for _ in range(3):
        batch = jnp.tanh(batch @ params["in"]) @ params["out"]
    return sf.mean(batch.mean(-1) ** 2)


SHAPE = jax.eval_shape(lambda: sf.init_state(init, TX, jax.random.key(0)))
make_step = functools.partial(sf.make_train_step, loss_fn, TX)


def build(devices, *, dims=(1, -1, 1, 1), **options):
    plan = sf.make_sharding(SHAPE, sf.make_mesh(dims, devices=devices))
    return make_step(**options), plan


PLAIN, SPLIT, AGAIN = {}, {"accumulate": 16}, {"accumulate": 16, "remat": True}


@functools.cache
def compiled(**options):
    return sf.compile_step(make_step(**options), SHAPE, BATCH)


@functools.cache
def peak(**options):
    return sf.describe(compiled(**options), SHAPE, BATCH).memory.peak


def test_the_cheapest_is_the_one_with_the_fewest_flops_that_fits():
    """Rematerialization costs FLOPs; among equals the one with less memory is cheaper."""
    assert peak(**SPLIT) < peak()
    choice = sf.inspect.choose(make_step, SHAPE, BATCH, [AGAIN, PLAIN, SPLIT])
    assert choice.arguments == SPLIT
    assert choice.report.memory.peak == peak(**SPLIT)
    only = sf.inspect.choose(compiled, SHAPE, BATCH, [AGAIN, PLAIN], limit=peak() - 1)
    assert only.arguments == AGAIN
    both = sf.inspect.choose(compiled, SHAPE, BATCH, [AGAIN, PLAIN], limit=peak())
    assert both.arguments == PLAIN
    assert both.report.flops.dots < only.report.flops.dots


def test_the_table_has_all():
    choice = sf.inspect.choose(compiled, SHAPE, BATCH, [PLAIN, SPLIT], limit=peak() - 1)
    head, _, plain, split, _, last = str(choice).splitlines()
    assert head.split() == ["on", "each", "device", "memory", "FLOPs", "extra", "sent", "fits"]
    assert plain.startswith("no arguments  ")
    assert plain.endswith("  no")
    assert split.startswith("accumulate=16 ")
    assert split.endswith("  yes")
    assert last == "the cheapest that fits: accumulate=16"


def test_layouts_are_compared_by_what_they_send_and_hold():
    plans = [sf.make_sharding(SHAPE, sf.make_mesh(dims)) for dims in ((8, 1, 1, 1), (1, 8, 1, 1))]
    reports = [sf.describe(make_step(), SHAPE, BATCH, sharding=plan) for plan in plans]
    assert reports[0].moved < reports[1].moved
    layouts = [{"sharding": plan} for plan in plans]
    choice = sf.inspect.choose(make_step, SHAPE, BATCH, layouts)
    assert choice.arguments is layouts[0]
    limit = reports[0].memory.peak - 1
    choice = sf.inspect.choose(
        make_step, SHAPE, BATCH, [*layouts, SPLIT], limit=limit, sharding=plans[1]
    )
    assert choice.arguments in (layouts[1], SPLIT)
    assert choice.report.devices == 8
    assert "\nsharding 0  " in str(choice)


@pytest.mark.full
def test_a_function_of_devices_makes_the_plans_of_all_and_runs_with_the_choice():
    devices = jax.devices()[:4]
    layouts = [{"dims": (1, -1, 1, 1)}, {"dims": (-1, 1, 1, 1)}]
    choice = sf.inspect.choose(build, SHAPE, BATCH, layouts, devices=devices)
    assert choice.arguments is layouts[1]
    step, plan = build(devices, **layouts[1])
    assert choice.report == sf.describe(step, SHAPE, BATCH, sharding=plan)
    limit = choice.report.memory.peak - 1
    choice = sf.inspect.choose(build, SHAPE, BATCH, [*layouts, SPLIT], devices=devices, limit=limit)
    assert (choice.arguments, choice.report.devices) == (SPLIT, 4)
    step, plan = build(devices, **choice.arguments)
    state = sf.init_state(init, TX, jax.random.key(0), sharding=plan)
    batches = sf.batches(jnp.ones((512, 64)), 512, seed=0)
    assert sf.fit(step, state, batches, steps=2).steps == 2


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda devices: make_step(), r"\(step, plan\) from it, got function"),
        (lambda devices: (*build(devices), None), r"\(step, plan\) from it, got tuple"),
        (lambda devices: (make_step(), None), "a plan from it, a tree of shardings, got NoneType"),
        (lambda devices: build(devices)[::-1], "a plan from it, a tree of shardings, got function"),
        (lambda devices: build(jax.devices()), "a plan for the devices that it gets, got one for "),
    ],
)
def test_what_a_function_of_devices_returns_is_checked(function, words):
    with pytest.raises(sf.errors.ConfigError, match=f"make_step: expected {words}") as caught:
        sf.inspect.choose(function, SHAPE, BATCH, [PLAIN], devices=jax.devices()[:4])
    assert caught.value.__notes__[-1:] == ["candidates: raised for no arguments"]


def test_a_function_of_devices_takes_no_other_plan():
    devices, plan = jax.devices(), build(jax.devices())[1]
    for options in ({"sharding": plan}, {"candidates": [PLAIN, {"sharding": plan}]}):
        with pytest.raises(
            sf.errors.ConfigError, match="sharding: expected none with devices=…, got one"
        ):
            sf.inspect.choose(
                build, SHAPE, BATCH, **{"candidates": [PLAIN]} | options, devices=devices
            )


def test_if_none_fits_the_error_lists_all():
    words = r"(?s)^candidates: expected one that fits into 1.00 KiB, got none; .*\n\non each device"
    with pytest.raises(sf.errors.OutOfMemoryError, match=words) as caught:
        sf.inspect.choose(compiled, SHAPE, BATCH, [PLAIN, SPLIT], limit=1024)
    assert "\nno arguments " in str(caught.value)
    assert "\naccumulate=16 " in str(caught.value)


def refuse_programs(monkeypatch, unless="no text of a program"):
    """Let the compiler refuse programs without a text, as for a device with less memory."""
    compile_any = jax.stages.Lowered.compile

    def compile_some(lowered):
        if unless in lowered.as_text():
            return compile_any(lowered)
        raise RuntimeError("RESOURCE_EXHAUSTED: Used 19G of 15G")

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_some)


def test_what_the_compiler_refuses_does_not_fit(monkeypatch):
    refuse_programs(monkeypatch, unless="while")  # those that accumulate
    choice = sf.inspect.choose(make_step, SHAPE, BATCH, [PLAIN, SPLIT, AGAIN])
    assert choice.arguments == SPLIT
    *_, plain, split, again, _, _ = str(choice).splitlines()
    assert plain.endswith("no: RESOURCE_EXHAUSTED: Used 19G of 15G")
    with pytest.raises(
        sf.errors.OutOfMemoryError, match=r"(?s)fits into a device, .*arguments .*no: R"
    ):
        sf.inspect.choose(make_step, SHAPE, BATCH, [PLAIN])
    # Its FLOPs are known without a program, and are what the others are compared with.
    share = amount(choice.report.flops.dots)
    assert f"  {share}     0%  " in plain
    assert f"  {share}     0%  " in split
    more = sf.describe(compiled(**AGAIN), SHAPE, BATCH).flops.dots / choice.report.flops.dots
    assert f"  {more - 1:.0%}  " in again


def test_other_errors_name_the_candidate():
    with pytest.raises(sf.errors.DataError, match="accumulate=7: expected a divisor") as caught:
        sf.inspect.choose(make_step, SHAPE, BATCH, [{"accumulate": 7}])
    assert caught.value.__notes__[-1:] == ["candidates: raised for accumulate=7"]


@pytest.mark.parametrize("candidates", [[], {}, {"accumulate": 1}, [1], None, "no"])
def test_what_is_no_list_of_arguments_is_refused(candidates):
    words = r'candidates: expected a list of arguments, got .*; pass \[\{"accumulate": 1\}, '
    with pytest.raises(sf.errors.ConfigError, match=words):
        sf.inspect.choose(make_step, SHAPE, BATCH, candidates)


@pytest.mark.parametrize("limit", [0, -1, "16G", True])
def test_a_limit_is_a_number_of_bytes(limit):
    with pytest.raises(sf.errors.ConfigError, match="limit: expected bytes, a number above 0, got"):
        sf.inspect.choose(make_step, SHAPE, BATCH, [PLAIN], limit=limit)


# Rematerialization


def make_remat(remat, names=("hidden",)):
    def layer(x, weights):
        hidden = jnp.tanh(x @ weights["in"])
        for name in names:
            hidden = checkpoint_name(hidden, name)
        return jnp.sin(hidden) @ weights["out"], None

    def stacked_loss(params, batch, key):
        layers = jax.tree.map(lambda x: jnp.stack([x] * 3), params)
        return sf.mean(jax.lax.scan(jax.checkpoint(layer, policy=remat), batch, layers)[0] ** 2)

    return sf.make_train_step(stacked_loss, TX)


NOTHING = {"remat": jax.checkpoint_policies.nothing_saveable}


@pytest.mark.full
def test_the_policy_that_fits_is_chosen_from_a_table_of_all():
    choice = sf.inspect.choose_remat(make_remat, SHAPE, BATCH, limit=6 * 2**20)
    assert choice.arguments == NOTHING
    assert choice.report.memory.peak <= 6 * 2**20
    _, _, *rows, _, last = str(choice).splitlines()
    cells = [re.split("  +", row) for row in rows]
    # Of the six products of three layers and twelve of their gradients, three are computed again.
    assert [(name, extra, fits) for name, _, _, extra, _, fits in cells] == [
        ("everything_saveable", "0%", "no"),
        ("dots_saveable", "0%", "no"),
        ("dots_with_no_batch_dims_saveable", "0%", "no"),
        ("nothing_saveable", "17%", "yes"),
        ("names saved: hidden", "17%", "no"),
    ]
    assert last == "the cheapest that fits: nothing_saveable"


@pytest.mark.full
def test_a_function_of_devices_makes_the_plan_for_each_policy():
    def build(devices, remat):
        plan = sf.make_sharding(SHAPE, sf.make_mesh(devices=devices))
        return make_remat(remat, names=()), plan

    choice = sf.inspect.choose_remat(build, SHAPE, BATCH, devices=jax.devices()[:2])
    assert (choice.arguments, choice.report.devices) != (NOTHING, 2)
    assert choice.report.devices == 2
    assert "names" not in str(choice)


def test_a_step_that_ignores_its_policy_is_refused():
    words = "make_step: expected a step whose gradients use remat, got one that ignores it; pass it"
    for step in (make_step(), sf.make_eval_step(loss_fn)):
        with pytest.raises(sf.errors.ConfigError, match=words):
            sf.inspect.choose_remat(lambda remat, step=step: step, SHAPE, BATCH)


def test_if_no_policy_fits_the_error_has_the_flops_of_all(monkeypatch):
    refuse_programs(monkeypatch)
    with pytest.raises(sf.errors.OutOfMemoryError, match="into a device, got none; ") as caught:
        sf.inspect.choose_remat(make_remat, SHAPE, BATCH)
    assert re.findall(r" (\d+%) ", str(caught.value)) == ["0%", "0%", "0%", "17%", "17%"]


def test_what_the_host_keeps_comes_last(monkeypatch):
    """The fewest FLOPs do not count then, since the time of copies is not known."""

    def describe(step, *arguments, **options):
        report = sf.describe(compiled(**step), SHAPE, BATCH)
        memory = dataclasses.replace(report.memory, host=len(step) == 1 and 3 * 2**20)
        return dataclasses.replace(report, memory=memory)

    monkeypatch.setattr(sys.modules["stepfold.inspect.choose"], "describe", describe)
    choice = sf.inspect.choose(dict, SHAPE, BATCH, [SPLIT, AGAIN])
    assert choice.arguments == AGAIN
    assert " + 3.00 MiB on the host  " in str(choice)
    assert sf.inspect.choose(dict, SHAPE, BATCH, [SPLIT]).arguments == SPLIT


@pytest.mark.parametrize(
    ("platform", "kinds", "counts"),
    [("tpu", ["device", "pinned_host"], (5, 7)), ("tpu", ["device"], (4, 5)), ("cpu", [], (4, 5))],
)
def test_policies_offload_where_the_device_can(platform, kinds, counts):
    memories = [SimpleNamespace(kind=kind) for kind in (*kinds, *["pinned_host"] * (not kinds))]
    device = SimpleNamespace(platform=platform, addressable_memories=lambda: memories)
    assert (len(remat_policies([], device)), len(remat_policies(["a"], device))) == counts
