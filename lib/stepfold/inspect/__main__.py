"""`python -m stepfold.inspect script.py:make --on v5e:4x4`: describe a step for other hardware.

def make(devices):
    plan = sf.make_sharding(abstract_state, sf.make_mesh(devices=devices))
    return sf.make_train_step(loss_fn, tx), abstract_state, abstract_batch, plan  # or None
"""

import argparse
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from stepfold.errors import ConfigError, OutOfMemoryError, StepfoldError, refuse
from stepfold.inspect.report import describe
from stepfold.sharding.topology import devices_of
from stepfold.tree import describe_value


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return 1 if the step does not fit, 2 if an argument is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m stepfold.inspect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("function", metavar="script.py:make", help="where to find make(devices)")
    parser.add_argument("--on", help="a TPU slice such as v5e:4x4 (default: the devices here)")
    options = parser.parse_args(arguments)
    try:
        make = _load(options.function)
        parts = make(jax.devices() if options.on is None else devices_of(options.on))
        if not isinstance(parts, tuple) or len(parts) != 4:
            refuse(options.function, "(step, state, batch, plan)", describe_value(parts))
        step, state, batch, plan = parts
        print(describe(step, state, batch, sharding=plan))  # noqa: T201  this is a command
    except StepfoldError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1 if isinstance(error, OutOfMemoryError) else 2
    return 0


def _load(spelled: str) -> Callable[..., Any]:
    path, _, name = spelled.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise ConfigError(f"expected script.py:make, got {spelled}; name a file and its function")
    sys.path.insert(0, str(Path(path).resolve().parent))  # as Python does for a script
    function = runpy.run_path(path).get(name)
    if not callable(function):
        refuse(path, f"a function {name}(devices)", f"{function!r:.80}")
    return function  # type: ignore[no-any-return]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
