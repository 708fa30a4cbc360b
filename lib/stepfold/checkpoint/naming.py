"""The names of a tree's arrays in a file."""

from collections.abc import Callable
from typing import Any, NamedTuple

from stepfold import tree
from stepfold.checkpoint.tensors import Spec
from stepfold.errors import ConfigError

_RESERVED = "__metadata__"


class Named(NamedTuple):
    """An array, concrete or abstract, with its path in the tree and its name in the file."""

    path: str
    name: str
    value: Any

    @property
    def spec(self) -> Spec:
        return Spec(self.value.shape, self.value.dtype)


def named_arrays(whose: str, params: Any, names: Callable[[str], str] | None) -> list[Named]:
    """List the leaves of a tree with their names, in the order of jax.

    `whose` is the name of the tree in error messages. By default the `/` of a path become `.`, as
    in torch. Names have to be unique, and the tree needs at least one leaf.
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
