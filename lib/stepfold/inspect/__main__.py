"""`python -m stepfold.inspect train.py:build --on v5e:4x4`: describe a step for other hardware.

tx, batch = optax.adam(1e-3), jax.ShapeDtypeStruct((1024, 64), jnp.float32)
state = jax.eval_shape(lambda: sf.init_state(init, tx, jax.random.key(0)))

def build(devices):  # as sf.inspect.choose takes it
    plan = sf.make_sharding(state, sf.make_mesh(devices=devices))
    return sf.make_train_step(loss_fn, tx), plan
"""

import argparse
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from stepfold.core.validation import spell_call, suggest, takes
from stepfold.errors import OutOfMemoryError, StepfoldError, refuse
from stepfold.inspect.report import Report, describe
from stepfold.sharding.plan import read_step_and_plan
from stepfold.sharding.topology import devices_of


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return 1 if the step does not fit, 2 if an argument is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m stepfold.inspect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "where to find build(devices) -> (step, plan)"
    parser.add_argument("function", metavar="train.py:build", help=text)
    text = "the name of the state in the script (default: state), of an abstract one, or of a "
    text += "function without arguments that returns it"
    parser.add_argument("--state", metavar="NAME", help=text)
    text = "the name of a batch, likewise (default: batch); for --on with the rows of all processes"
    parser.add_argument("--batch", metavar="NAME", help=text)
    parser.add_argument("--on", help="a TPU slice such as v5e:4x4 (default: the devices here)")
    options = parser.parse_args(arguments)
    try:
        print(_describe(options))  # noqa: T201  this is a command
    except StepfoldError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1 if isinstance(error, OutOfMemoryError) else 2
    return 0


def _describe(options: argparse.Namespace) -> Report:
    path, _, name = options.function.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        refuse("function", "train.py:build", options.function, "name a file and its function")
    sys.path.insert(0, str(Path(path).resolve().parent))  # as Python does for a script
    values = runpy.run_path(path)
    build = values.get(name)
    if not callable(build):
        refuse(path, f"a function {name}(devices)", f"{build!r:.80}")
    if not takes(build, 1):
        refuse(options.function, "a function of devices", spell_call(build), "give others defaults")
    devices = jax.devices() if options.on is None else devices_of(options.on)
    parts = build(devices)
    if not isinstance(parts, tuple) or len(parts) != 4:
        step, plan = read_step_and_plan(options.function, parts, devices)
        state, batch = (_read_value(values, path, options, each) for each in ("state", "batch"))
    elif options.state or options.batch:
        expected, got = "(step, plan) from it with --state or --batch", "state and batch too"
        refuse(options.function, expected, got)
    else:
        step, state, batch, plan = parts
    return describe(step, state, batch, sharding=plan)


def _read_value(values: Mapping[str, Any], path: str, options: Any, argument: str) -> Any:
    """Return the state or a batch of a script, which may be made by a function."""
    name = getattr(options, argument) or argument
    if name not in values:
        advice = suggest(name, values) or f"name a {argument}, or a function that returns one"
        refuse(f"--{argument}", f"a name in {path}", repr(name), advice)
    value = values[name]
    if callable(value) and not takes(value, 0):
        expected = f"a {argument}, or a function without arguments that returns one"
        refuse(f"--{argument}", expected, spell_call(value))
    return value() if callable(value) else value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
