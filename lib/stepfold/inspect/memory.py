"""The memory that one device needs for a step: what is kept, what comes and goes, and the peak."""

import math
import re
from dataclasses import dataclass
from typing import Any

import jax

from stepfold.core.state import TrainState
from stepfold.errors import OutOfMemoryError
from stepfold.table import size, table

# Of a step that was waiting for another, only the second is said.
_EXHAUSTED = re.compile("RESOURCE_EXHAUSTED|Out of memory")

_ADVICE = {  # of two that are alike, the first is the easiest to turn
    "output": "is what comes out: donate the state, so that the new one takes its place",
    "temporaries": "comes and goes within the step: make_train_step(…, accumulate=n) divides it, "
    "remat=True keeps less for the backward pass, precision='bf16' halves it",
    "state": "is the state: cut it over more devices (sf.make_sharding with sf.fsdp()), or take an "
    "optimizer that keeps less",
    "batch": "is the batch: make it smaller, or spread it over more devices",
}


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, the fullest where they differ.

    Attributes:
      params: the parameters; of a state that is no `TrainState`, all of it.
      opt_state: the optimizer's state.
      model_state: the model's state.
      rest: step and key.
      batch: the batch.
      temporaries: what the program allocates while it runs.
      output: what comes out, but for what takes the place of the donated state.
    """

    params: int
    opt_state: int
    model_state: int
    rest: int
    batch: int
    temporaries: int
    output: int

    @property
    def state(self) -> int:
        """Add up what is there between steps."""
        return self.params + self.opt_state + self.model_state + self.rest

    @property
    def peak(self) -> int:
        """Add up all of it: what a device must hold at once."""
        return self.state + self.batch + self.temporaries + self.output

    @property
    def advice(self) -> str:
        """Say what to turn, by what is largest."""
        return f"Most of it {_ADVICE[max(_ADVICE, key=lambda part: getattr(self, part))]}."

    def __str__(self) -> str:
        rows = [
            ("parameters", self.params),
            ("optimizer's state", self.opt_state),
            ("model's state", self.model_state),
            ("step and key", self.rest),
            ("batch", self.batch),
            ("temporaries", self.temporaries),
            ("output besides the state", self.output),
            ("peak, predicted", self.peak),
        ]
        cells = [(n, size(x), f"{x / max(self.peak, 1):.0%}") for n, x in rows if x]
        return table(("on each device", "bytes", "share"), cells)


def memory_of(compiled: jax.stages.Compiled, state: Any, batch: Any) -> Memory:
    """Read the memory of a compiled step, with the abstract state and batch that it takes.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> state = sf.init_state(jnp.ones((64, 32)), optax.adam(0.1), jax.random.key(0))
    >>> step = sf.make_train_step(lambda p, x, key: sf.mean((x @ p) ** 2), optax.adam(0.1))
    >>> step = sf.compile_step(step, state, jnp.ones((8, 64)))
    >>> memory = memory_of(step.compiled, step.state, step.batch)
    >>> memory.params, memory.opt_state, memory.batch
    (8192, 16388, 2048)
    """
    program: Any = compiled.memory_analysis()
    return _memory(
        state,
        batch,
        temporaries=program.temp_size_in_bytes,
        output=program.output_size_in_bytes - program.alias_size_in_bytes,
    )


def _memory(state: Any, batch: Any, temporaries: int, output: int) -> Memory:
    parts: tuple[Any, ...]
    if isinstance(state, TrainState):
        parts = state.params, state.opt_state, state.model_state, (state.step, state.key)
    else:
        parts = state, (), (), ()
    params, opt_state, model_state, rest = map(held, parts)
    return Memory(params, opt_state, model_state, rest, held(batch), temporaries, output)


def is_exhausted(error: BaseException) -> bool:
    """Tell whether an error says that there is no memory left on a device."""
    return isinstance(error, RuntimeError) and bool(_EXHAUSTED.search(str(error)))


def exhausted(
    error: BaseException, state: Any, batch: Any, compiled: jax.stages.Compiled | None = None
) -> OutOfMemoryError:
    """Make of what XLA says of memory what a person can act upon.

    Args:
      error: what XLA raised.
      state: the abstract state, with shardings.
      batch: the abstract batch.
      compiled: the program; None, if it was not even compiled.
    """
    if compiled is None:
        memory = _memory(state, batch, 0, 0)
        what = "compiled for the memory there is; without what comes and goes within it, it takes"
        advice = f"What {_ADVICE['temporaries']}. What {_ADVICE['state']}."
    else:
        memory = memory_of(compiled, state, batch)
        what, advice = "run in the memory there is; it takes", memory.advice
    said = re.search(f"({_EXHAUSTED.pattern}).*", str(error))
    return OutOfMemoryError(
        f"the step cannot be {what}\n\n{memory}\n\n{advice}\nXLA said: {said[0] if said else error}"
    )


def held(arrays: Any) -> int:
    """Count the bytes that one device holds of abstract arrays with shardings.

    >>> import jax, jax.numpy as jnp, stepfold as sf
    >>> held(sf.shard_batch(jax.ShapeDtypeStruct((64, 4), jnp.float32), sf.make_mesh()))
    128
    """
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(arrays)
    )
