"""The memory that a step needs on one device: by category, at its peak, and how to reduce it."""

import math
from dataclasses import dataclass
from typing import Any

import jax

from stepfold.core.state import TrainState
from stepfold.errors import OutOfMemoryError
from stepfold.internals import texts
from stepfold.table import size, table

_ADVICE = {  # of categories of one size, the first, since it is the easiest to change
    "output": "is the output: donate the state, so that the new one takes its place",
    "temporaries": "is temporaries: make_train_step(…, accumulate=n) divides them, remat=True "
    "keeps less for the backward pass, precision='bf16' halves them",
    "state": "is the state: shard it over more devices (sf.make_sharding with sf.sharding.fsdp()), "
    "store the moments in bfloat16 (sf.optim.low_precision), or use an optimizer with less state",
    "batch": "is the batch: make it smaller, or shard it over more devices",
}


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, the fullest if they differ.

    Attributes:
      params: the parameters; all of a state that is not a `TrainState`.
      opt_state: the optimizer's state.
      model_state: the model's state.
      rest: step and key.
      batch: the batch.
      temporaries: what the program allocates while it runs, and its code. A TPU's compiler counts
        buffers in on-chip memory too.
      output: the outputs, except those that reuse the donated state.
      host: bytes in the host's memory, as of arrays on "pinned_host"; not in the other categories.
    """

    params: int
    opt_state: int
    model_state: int
    rest: int
    batch: int
    temporaries: int
    output: int
    host: int = 0

    @property
    def state(self) -> int:
        """The bytes of a device that are in use between steps."""
        return self.params + self.opt_state + self.model_state + self.rest

    @property
    def peak(self) -> int:
        """The bytes that a device must have: the sum of all categories."""
        return self.state + self.batch + self.temporaries + self.output

    @property
    def advice(self) -> str:
        """How to reduce the largest category."""
        return f"Most of it {_ADVICE[max(_ADVICE, key=lambda name: getattr(self, name))]}."

    def __str__(self) -> str:
        rows = {
            "parameters": self.params,
            "optimizer's state": self.opt_state,
            "model's state": self.model_state,
            "step and key": self.rest,
            "batch": self.batch,
            "temporaries": self.temporaries,
            "output besides the state": self.output,
            "peak, predicted": self.peak,
        }
        cells = [(n, size(x), f"{x / max(self.peak, 1):.0%}") for n, x in rows.items() if x]
        cells += [("in the host's memory", size(self.host), "")] if self.host else []
        return table(("on each device", "bytes", "share"), cells)


def memory_of(compiled: jax.stages.Compiled | None, state: Any, batch: Any) -> Memory:
    """Return the memory of a step; without a program, that of its abstract arguments."""
    parts: tuple[Any, ...] = state, (), (), ()
    if isinstance(state, TrainState):
        parts = state.params, state.opt_state, state.model_state, (state.step, state.key)
    temporaries = output = host = 0
    if compiled is not None:
        program: Any = compiled.memory_analysis()
        output = program.output_size_in_bytes - program.alias_size_in_bytes
        held = program.argument_size_in_bytes + output
        temporaries = program.temp_size_in_bytes + program.generated_code_size_in_bytes
        temporaries = max(temporaries, program.peak_memory_in_bytes - held)
        host = program.host_temp_size_in_bytes
    host += bytes_per_device([x for x in jax.tree.leaves((state, batch)) if _is_on_host(x)])
    parts = jax.tree.map(lambda leaf: () if _is_on_host(leaf) else leaf, (*parts, batch))
    params, opt_state, model_state, rest, batch = map(bytes_per_device, parts)
    return Memory(params, opt_state, model_state, rest, batch, temporaries, output, host)


def _is_on_host(leaf: Any) -> bool:
    return leaf.sharding.memory_kind in ("pinned_host", "unpinned_host")


def bytes_per_device(arrays: Any) -> int:
    """Count the bytes of abstract arrays with shardings on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(arrays)
    )


def is_exhausted(error: BaseException) -> bool:
    """Whether XLA raised an error because a device has no memory left."""
    return isinstance(error, RuntimeError) and bool(texts.OUT_OF_MEMORY.search(str(error)))


def exhausted(
    error: BaseException, state: Any, batch: Any, compiled: jax.stages.Compiled | None = None
) -> OutOfMemoryError:
    """Return an error that says what takes the memory, and how to reduce it.

    `compiled` is None if compiling failed.
    """
    memory = memory_of(compiled, state, batch)
    if compiled is None:
        failure = "compiled for this device's memory; without temporaries it needs"
        advice = f"If most {_ADVICE['temporaries']}. If most {_ADVICE['state']}."
    else:
        failure, advice = "run in this device's memory; it needs", memory.advice
    cause = texts.OUT_OF_MEMORY.search(str(error))  # without what led to it
    reason = cause[0] if cause else error
    return OutOfMemoryError(
        f"the step cannot be {failure}\n\n{memory}\n\n{advice}\nXLA reports: {reason}"
    )
