"""`python -m stepfold.inspect` describes the step of a script."""

import re
import sys

import jax
import pytest

from stepfold.inspect.__main__ import main

SCRIPT = """
import jax, jax.numpy as jnp, optax, stepfold as sf
from sizes import WIDTH

tx = optax.adam(1e-3)

def new_state():
    return sf.init_state(jnp.ones((WIDTH, 64)), tx, jax.random.key(0))

state = jax.eval_shape(new_state)
batch, longer = (jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32) for rows in (64, 128))

def batch_of(rows):
    return jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)

def build(devices, **options):
    step = sf.make_train_step(lambda params, x, key: sf.mean((x @ params) ** 2), tx, **options)
    return step, sf.make_sharding(state, sf.make_mesh(devices=devices))

def make(devices):
    step, plan = build(devices)
    return step, state, batch, plan

def one_device(devices):
    return *make(devices)[:3], None

def too_large(devices):
    raise sf.errors.OutOfMemoryError("the step cannot be compiled")

def step_only(devices):
    return build(devices)[0]

def no_plan(devices):
    return build(devices)[0], None

def fewer(devices):
    return build(devices[:2])

def two_arguments(devices, layout):
    return build(devices)

number = 3
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "sizes.py").write_text("WIDTH = 64\n")
    path = tmp_path / "a_script.py"
    path.write_text(SCRIPT)
    yield path
    sys.modules.pop("sizes", None)


@pytest.mark.parametrize("function", ["build", "make"])
def test_it_describes_the_step_for_the_devices_here(script, capsys, function):
    assert main([f"{script}:{function}"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"a step on {jax.device_count()} cpu devices (fsdp 8)\n4.10 k param")
    assert "\npeak, predicted " in printed


def test_a_plan_may_use_some_of_the_devices(script, capsys):
    assert main([f"{script}:fewer"]) == 0
    assert capsys.readouterr().out.startswith("a step on 2 cpu devices (fsdp 2)\n")


def test_state_and_batch_are_values_or_functions_of_the_script(script, capsys):
    assert main([f"{script}:build"]) == 0
    abstract = capsys.readouterr().out
    assert re.search(r"\nbatch +2.00 KiB", abstract)
    assert main([f"{script}:build", "--state", "new_state"]) == 0
    assert capsys.readouterr().out == abstract
    assert main([f"{script}:build", "--batch", "longer"]) == 0
    assert re.search(r"\nbatch +4.00 KiB", capsys.readouterr().out)


def test_without_a_plan_it_is_one_device(script, capsys):
    assert main([f"{script}:one_device"]) == 0
    assert capsys.readouterr().out.startswith("a step on 1 cpu device\n")


def test_a_step_that_does_not_fit_is_exit_code_1(script, capsys):
    assert main([f"{script}:too_large"]) == 1
    assert capsys.readouterr().err == "the step cannot be compiled\n"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (":step_only", ":step_only: expected (step, plan) from it, got function "),
        (":no_plan", ":no_plan: expected a plan from it, a tree of shardings, got NoneType None; "),
        (":two_arguments", ": expected a function of devices, got two_arguments(devices, layout)"),
        (":number", ": expected a function number(devices), got 3"),
        (":nothing", ": expected a function nothing(devices), got None"),
        ("", "function: expected train.py:build, got "),
        (".gone:make", "function: expected train.py:build, got "),
    ],
)
def test_mistakes_are_exit_code_2(script, capsys, function, words):
    assert main([f"{script}{function}"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            "build --state nothing",
            "--state: expected a name in {}, got 'nothing'; name a state, or a f",
        ),
        ("build --batch longr", "--batch: expected a name in {}, got 'longr'; did you mean 'longe"),
        ("build --batch batch_of", "--batch: expected a batch, or a function without arguments "),
        ("build --batch tx", "batch/init: expected an array, got function "),
        ("make --state state", ":make: expected (step, plan) from it with --state or --batch, got"),
        ("make --batch batch", ":make: expected (step, plan) from it with --state or --batch, got"),
    ],
)
def test_values_that_a_script_lacks_are_exit_code_2(script, capsys, arguments, words):
    name, *options = arguments.split()
    assert main([f"{script}:{name}", *options]) == 2
    assert words.format(script) in capsys.readouterr().err


def test_an_unknown_slice_is_exit_code_2(script, capsys):
    assert main([f"{script}:make", "--on", "h100:8"]) == 2
    assert "topology: expected a TPU slice such as" in capsys.readouterr().err


def test_the_help_shows_a_function(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    printed = capsys.readouterr().out
    assert "usage: python -m stepfold.inspect" in printed
    assert "def build(devices):" in printed
