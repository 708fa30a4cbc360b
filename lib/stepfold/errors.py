"""The exceptions of stepfold, and nothing else.

Every error raised on purpose is a `StepfoldError`, so that one `except` clause can tell the
library's advice from a bug. Each is also the built-in that fits, so that code which has never
heard of stepfold still catches it.

>>> import stepfold as sf
>>> try:
...     sf.make_train_step(lambda params, batch, key: 0.0, tx="adam")
... except ValueError as error:
...     print(type(error).__name__)
ConfigError
"""


class StepfoldError(Exception):
    """Be the common ancestor of every error that stepfold raises on purpose.

    >>> import stepfold as sf
    >>> issubclass(sf.LossError, sf.StepfoldError)
    True
    """


class ConfigError(StepfoldError, ValueError):
    """Say that something was built from arguments that do not fit together.

    >>> import stepfold as sf
    >>> sf.value_and_grad(lambda params, batch, key: 0.0, accumulate=0)
    Traceback (most recent call last):
    ...
    stepfold.errors.ConfigError: accumulate: expected an integer of at least 1, got 0
    """


class LossError(StepfoldError, ValueError):
    """Say that a loss function breaks the loss contract; raised while it is traced.

    >>> import jax, jax.numpy as jnp, stepfold as sf
    >>> step = sf.make_eval_step(lambda params, batch, key: params * batch)
    >>> state = sf.TrainState(0, jnp.ones(3), (), (), jax.random.key(0))
    >>> step(state, jnp.ones(3))
    Traceback (most recent call last):
    ...
    stepfold.errors.LossError: loss: expected a scalar, got float32[3]; ...
    """


class ShardingError(StepfoldError, ValueError):
    """Say that arrays cannot be laid out on the devices as asked.

    >>> import stepfold as sf
    >>> issubclass(sf.ShardingError, ValueError)
    True
    """


class CheckpointError(StepfoldError, OSError):
    """Say that a checkpoint could not be written, or cannot be trusted.

    >>> import stepfold as sf
    >>> issubclass(sf.CheckpointError, OSError)
    True
    """


class TreeMismatchError(StepfoldError, ValueError):
    """Say that two trees which must agree do not, and at which paths.

    >>> import optax, jax, jax.numpy as jnp, stepfold as sf
    >>> state = sf.init_state(jnp.ones(3), optax.adam(1e-3), jax.random.key(0))
    >>> step = sf.make_train_step(lambda params, batch, key: params.sum(), optax.sgd(1e-3))
    >>> step(state, None)
    Traceback (most recent call last):
    ...
    stepfold.errors.TreeMismatchError: the state was made with another optimizer ...
    """


class DataError(StepfoldError, ValueError):
    """Say that a batch, or what it is made from, is not as it has to be.

    >>> import jax, jax.numpy as jnp, stepfold as sf
    >>> grad = sf.value_and_grad(lambda params, batch, key: params * batch.mean(), accumulate=4)
    >>> grad(jnp.ones(()), jnp.ones(6), jax.random.key(0), ())
    Traceback (most recent call last):
    ...
    stepfold.errors.DataError: accumulate=4 does not divide the leading axis of 6 ...
    """


class OutOfMemoryError(StepfoldError, MemoryError):
    """Say that a device's memory does not hold a step, what takes most of it, and what to turn.

    >>> import stepfold as sf
    >>> issubclass(sf.OutOfMemoryError, MemoryError)
    True
    """


class RetraceError(StepfoldError, TypeError):
    """Say that a call would have compiled again, and which leaf changed.

    >>> import stepfold as sf
    >>> issubclass(sf.RetraceError, TypeError)
    True
    """
