"""The memory that one device needs for a step: what is kept, what comes and goes, and the peak."""

import math
import re
from dataclasses import dataclass
from typing import Any

import jax

from stepfold import tree
from stepfold.core.state import TrainState
from stepfold.inspect.compiled import CompiledStep


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


def memory_of(step: CompiledStep) -> Memory:
    """Read the memory of a compiled step.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> state = sf.init_state(jnp.ones((64, 32)), optax.adam(0.1), jax.random.key(0))
    >>> step = sf.make_train_step(lambda p, x, key: sf.mean((x @ p) ** 2), optax.adam(0.1))
    >>> memory = memory_of(sf.compile_step(step, state, jnp.ones((8, 64))))
    >>> memory.params, memory.opt_state, memory.batch
    (8192, 16388, 2048)
    """
    state = step.state
    parts: tuple[Any, ...]
    if isinstance(state, TrainState):
        parts = state.params, state.opt_state, state.model_state, (state.step, state.key)
    else:
        parts = state, (), (), ()
    params, opt_state, model_state, rest = map(held, parts)
    program: Any = step.compiled.memory_analysis()
    return Memory(
        params,
        opt_state,
        model_state,
        rest,
        batch=held(step.batch),
        temporaries=program.temp_size_in_bytes,
        output=program.output_size_in_bytes - program.alias_size_in_bytes,
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


def not_reused(step: CompiledStep) -> list[tuple[str, int]]:
    """List the donated leaves, with their bytes, whose memory no output takes over.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> state = sf.init_state(jnp.ones((64, 32)), optax.adam(0.1), jax.random.key(0))
    >>> step = sf.make_train_step(lambda p, x, key: sf.mean((x @ p) ** 2), optax.adam(0.1))
    >>> not_reused(sf.compile_step(step, state, jnp.ones((8, 64))))
    []
    """
    donated, _ = jax.tree.map(lambda info: info.donated, step.compiled.args_info[0])
    text = step.compiled.as_text() or ""
    header = text[: text.find("\n")]
    aliases = re.search(r"input_output_alias=\{(.*?)\}, \w+=", header)
    taken = {int(found) for found in re.findall(r": \((\d+),", aliases[1] if aliases else "")}
    numbers = _numbers(text)
    named = jax.tree_util.tree_leaves_with_path(step.state)
    return [
        (tree.path_name(path), held(leaf))
        for (path, leaf), given in zip(named, jax.tree.leaves(donated), strict=True)
        if given and numbers.get("state" + jax.tree_util.keystr(path)) not in taken
    ]


def _numbers(text: str) -> dict[str, int]:
    """Read which parameter of the program is which argument; those it does not use have none."""
    entry = text[text.find("\nENTRY ") :]
    found = re.findall(r" parameter\((\d+)\)[^\n]*op_name=\"((?:\\.|[^\"\\])*)\"", entry)
    return {_unescaped(name): int(number) for number, name in found}


def _unescaped(name: str) -> str:
    """Read a name as C writes it, bytes beyond ASCII as octal numbers."""
    raw = re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), name.encode())
    return re.sub(r"\\(.)", r"\1", raw.decode(errors="replace"))


def whole_though_large(step: CompiledStep, least: int = 1 << 20) -> list[tuple[str, int]]:
    """List the leaves of the state that are whole on each of several devices.

    Args:
      step: a compiled step.
      least: the bytes from which on they are listed.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> state = sf.init_state(jnp.ones((512, 512)), optax.sgd(0.1), jax.random.key(0))
    >>> step = sf.make_eval_step(lambda params, x, key: sf.mean(x @ params))
    >>> plan = sf.make_sharding(state, sf.make_mesh())
    >>> whole_though_large(sf.compile_step(step, state, jnp.ones((8, 512)), sharding=plan))
    []
    """
    return [
        (name, held(leaf))
        for name, leaf in tree.named_leaves(step.state)
        if len(leaf.sharding.device_set) > 1 and held(leaf) >= least
        if leaf.sharding.shard_shape(leaf.shape) == leaf.shape
    ]
