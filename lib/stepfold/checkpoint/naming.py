"""What the arrays of a tree are called in a file."""

from collections.abc import Callable
from typing import Any, NamedTuple

from stepfold import tree
from stepfold.checkpoint.tensors import Spec
from stepfold.errors import ConfigError

_RESERVED = "__metadata__"


class Named(NamedTuple):
    """An array, or an abstract one, with its path in the tree and its name in the file."""

    path: str
    name: str
    value: Any

    @property
    def spec(self) -> Spec:
        """Say what the header of a file says of it."""
        return Spec(self.value.shape, self.value.dtype)


def named_arrays(whose: str, params: Any, names: Callable[[str], str] | None) -> list[Named]:
    """List the leaves of a tree with their names, in jax's order.

    Args:
      whose: what the tree is called in messages.
      params: any tree.
      names: a function from a path, such as `layers/0/kernel`, to a name; by default its `/` become
        `.`, as in torch.

    Raises:
      ConfigError: if a name is none, two are the same, or there is no leaf.

    >>> [leaf.name for leaf in named_arrays("params", {"layers": [{"bias": 1}]}, None)]
    ['layers.0.bias']
    """
    if names is not None and not callable(names):
        raise ConfigError(f"names: expected a function of a path, got {tree.spell(names)}")
    found: dict[str, Named] = {}
    for path, value in tree.named_leaves(params):
        name = path.replace("/", ".") if names is None else names(path)
        if not isinstance(name, str) or name in ("", _RESERVED):
            raise ConfigError(
                f"{whose}: expected a name for the array at {path!r}, got {name!r}, which names "
                "none in safetensors; put the array into a dict, or give names=…"
            )
        if name in found:
            raise ConfigError(
                f"{whose}: {found[name].path} and {path} would both be called {name!r}; give "
                "names=… that tells them apart"
            )
        found[name] = Named(path or "params", name, value)
    if not found:
        raise ConfigError(f"{whose}: expected arrays, got none: {tree.spell(params)}")
    return list(found.values())
