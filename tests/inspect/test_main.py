import sys

import jax
import pytest

from stepfold.inspect.__main__ import main

SCRIPT = """
import jax, jax.numpy as jnp, optax, stepfold as sf
from sizes import WIDTH

tx = optax.adam(1e-3)

def make(devices):
    shape = jax.eval_shape(lambda: sf.init_state(jnp.ones((WIDTH, 64)), tx, jax.random.key(0)))
    batch = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)
    step = sf.make_train_step(lambda params, x, key: sf.mean((x @ params) ** 2), tx)
    return step, shape, batch, sf.make_sharding(shape, sf.make_mesh(devices=devices))

def one_device(devices):
    return *make(devices)[:3], None

def too_large(devices):
    raise sf.OutOfMemoryError("the step cannot be compiled")

def step_only(devices):
    return make(devices)[0]

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


def test_it_describes_the_step_for_the_devices_here(script, capsys):
    assert main([f"{script}:make"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"a step on {jax.device_count()} cpu devices (fsdp 8)\n4.10 k param")
    assert "\npeak, predicted " in printed


def test_without_a_plan_it_is_one_device(script, capsys):
    assert main([f"{script}:one_device"]) == 0
    assert capsys.readouterr().out.startswith("a step on 1 cpu device\n")


def test_a_step_that_does_not_fit_is_exit_code_1(script, capsys):
    assert main([f"{script}:too_large"]) == 1
    assert capsys.readouterr().err == "the step cannot be compiled\n"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (":step_only", ":step_only: expected (step, state, batch, plan), got "),
        (":number", ": expected a function number(devices), got 3"),
        (":nothing", ": expected a function nothing(devices), got None"),
        ("", "expected script.py:make, got "),
        (".gone:make", "expected script.py:make, got "),
    ],
)
def test_mistakes_are_exit_code_2(script, capsys, function, words):
    assert main([f"{script}{function}"]) == 2
    assert words in capsys.readouterr().err


def test_an_unknown_slice_is_exit_code_2(script, capsys):
    assert main([f"{script}:make", "--on", "h100:8"]) == 2
    assert "topology: expected a TPU slice such as" in capsys.readouterr().err


def test_the_help_shows_a_function(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    printed = capsys.readouterr().out
    assert "usage: python -m stepfold.inspect" in printed
    assert "def make(devices):" in printed
