"""The exceptions of stepfold.

Every error that stepfold raises on purpose is a `StepfoldError`, so that one `except` clause can
tell it from a bug. Each subclass also derives from the built-in exception that fits, so that
generic handlers catch it. `refuse` raises those that an argument, a field or a leaf causes, so that
their messages read alike. All others are sentences: what happened, then what to do. `warn` shows
all warnings, so that they point to the line of the user.
"""

import inspect
import sys
import traceback
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

__all__ = (
    "CheckpointError",
    "ConfigError",
    "DataError",
    "LossError",
    "OutOfMemoryError",
    "PeerTimeoutError",
    "RetraceError",
    "ShardingError",
    "StepfoldError",
    "TreeMismatchError",
)


def __dir__() -> list[str]:
    return list(__all__)


class StepfoldError(Exception):
    """Base class of all stepfold errors.

    >>> import stepfold as sf
    >>> issubclass(sf.errors.LossError, sf.StepfoldError)
    True
    """


class ConfigError(StepfoldError, ValueError):
    """Raised if arguments are invalid or do not fit together.

    >>> import stepfold as sf
    >>> try:
    ...     sf.make_grad(lambda params, batch, key: params, accumulate=0)
    ... except ValueError as error:
    ...     print(error)
    accumulate: expected an integer of at least 1, got 0
    """


class LossError(StepfoldError, ValueError):
    """Raised if a loss function breaks the loss contract, usually while it is traced.

    >>> import jax, jax.numpy as jnp, stepfold as sf
    >>> step = sf.make_eval_step(lambda params, batch, key: params * batch)
    >>> state = sf.TrainState(0, jnp.ones(3), (), (), jax.random.key(0))
    >>> step(state, jnp.ones(3))
    Traceback (most recent call last):
    ...
    stepfold.errors.LossError: loss: expected a scalar, got float32[3]; ...
    """


class ShardingError(StepfoldError, ValueError):
    """Raised if arrays cannot be sharded over the devices as requested.

    >>> import stepfold as sf
    >>> issubclass(sf.errors.ShardingError, ValueError)
    True
    """


class CheckpointError(StepfoldError, OSError):
    """Raised if a checkpoint cannot be written, or is missing or damaged.

    >>> import stepfold as sf
    >>> issubclass(sf.errors.CheckpointError, OSError)
    True
    """


class TreeMismatchError(StepfoldError, ValueError):
    """Raised if two pytrees that must match differ; the message names the paths.

    >>> import optax, jax, jax.numpy as jnp, stepfold as sf
    >>> state = sf.init_state(jnp.ones(3), optax.adam(1e-3), jax.random.key(0))
    >>> step = sf.make_train_step(lambda params, batch, key: params.sum(), optax.sgd(1e-3))
    >>> step(state, None)
    Traceback (most recent call last):
    ...
    stepfold.errors.TreeMismatchError: the state was made with another optimizer ...
    """


class DataError(StepfoldError, ValueError):
    """Raised if a batch, or the data it is made from, is invalid.

    >>> import jax, jax.numpy as jnp, stepfold as sf
    >>> grad = sf.make_grad(lambda params, batch, key: params * batch.mean(), accumulate=4)
    >>> grad(jnp.ones(()), jnp.ones(6), jax.random.key(0), ())
    Traceback (most recent call last):
    ...
    stepfold.errors.DataError: accumulate=4: expected a divisor of the batch size 6, ...
    """


class OutOfMemoryError(StepfoldError, MemoryError):
    """Raised if a step does not fit into the memory of a device.

    The message names what takes most of it, and what to change.

    >>> import stepfold as sf
    >>> issubclass(sf.errors.OutOfMemoryError, MemoryError)
    True
    """


class RetraceError(StepfoldError, TypeError):
    """Raised if a call would compile again; the message names the leaf that changed.

    >>> import stepfold as sf
    >>> issubclass(sf.errors.RetraceError, TypeError)
    True
    """


class PeerTimeoutError(StepfoldError, TimeoutError):
    """Raised if another process does not answer within `start_distributed(timeout=…)`.

    Attributes:
      processes: those that did not answer.

    >>> import stepfold as sf
    >>> issubclass(sf.errors.PeerTimeoutError, TimeoutError)
    True
    """

    def __init__(self, message: str, processes: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.processes = tuple(processes)


def refuse(
    argument: object,
    expected: str,
    got: Any,
    advice: str = "",
    *,
    kind: type[Exception] = ConfigError,
    cause: BaseException | None = None,
) -> NoReturn:
    """Raise an error that reads `{argument}: expected {expected}, got {got}; {advice}`.

    Args:
      argument: the name of the argument, or the path of what is wrong.
      expected: what it takes.
      got: text, or the value itself, which is described by its type or shape. Describe a value that
        may be a string before, with `describe_value` or `repr`.
      advice: what to do.
      kind: the class of the error.
      cause: the exception that explains it, as in `raise … from cause`.

    >>> refuse("steps", "an integer of at least 1", 0.5, "give the number of steps")
    Traceback (most recent call last):
    ...
    stepfold.errors.ConfigError: steps: expected an integer of at least 1, got float 0.5; ...
    """
    text = got
    if not isinstance(got, str):
        from stepfold.tree import describe_value  # lazy: imports jax

        text = describe_value(got)
    raise kind(f"{argument}: expected {expected}, got {text}{advice and '; '}{advice}") from cause


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Show a warning at the line of the user: the innermost frame outside stepfold and jax.

    Frames of the standard library are skipped too, since a context manager or a thread calls
    stepfold through them. A thread without a frame of the user warns at the line of stepfold.

    Frames are skipped by module. `warnings.warn(skip_file_prefixes=…)` skips by file, and the
    `__init__` of a dataclass has none.

    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     warn("hooks: expected one of these, got two")
    >>> [str(warning.message) for warning in caught]
    ['hooks: expected one of these, got two']
    """
    frames = [frame for frame, _ in traceback.walk_stack(inspect.currentframe())][1:]
    frame = next((frame for frame in frames if not _is_skipped(frame)), frames[0])
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__") or "<string>",
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _is_skipped(frame: FrameType) -> bool:
    package = (frame.f_globals.get("__name__") or "").partition(".")[0]
    return package in ("stepfold", "jax", "jaxlib") or package in sys.stdlib_module_names
