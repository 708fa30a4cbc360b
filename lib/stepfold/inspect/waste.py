"""Memory that a step could do without: donated and not used again, or whole on every device."""

import re

import jax

from stepfold import tree
from stepfold.inspect.compiled import CompiledStep
from stepfold.inspect.memory import held


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
