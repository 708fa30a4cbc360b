"""Parameters as torch calls them and lays them out."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from stepfold import tree
from stepfold.errors import ConfigError

_WEIGHTS = ("kernel", "scale", "embedding")
Names = Callable[[str], str] | Mapping[str, str] | None


def torch_names(names: Names = None) -> Callable[[str], str]:
    """Give the function from a path to the name that torch has for it.

    By default `layers/0/kernel` is `layers.0.weight`, and so are `scale` and `embedding`.

    Args:
      names: other names, by path; or a function that gives them.

    Raises:
      ConfigError: if it is neither.

    >>> called = torch_names({"head/kernel": "lm_head.weight"})
    >>> called("layers/0/kernel"), called("head/kernel"), called("norm/bias")
    ('layers.0.weight', 'lm_head.weight', 'norm.bias')
    """
    if callable(names):
        return names
    if names is not None and not isinstance(names, Mapping):
        raise ConfigError(
            f"names: expected a function of a path, or names by path, got {tree.spell(names)}"
        )
    given = names or {}

    def called(path: str) -> str:
        *front, last = path.split("/")
        return given.get(path) or ".".join([*front, "weight" if last in _WEIGHTS else last])

    return called


def check_names(params: Any, names: Names) -> None:
    """Refuse names for paths that are not there.

    Raises:
      ConfigError: with the paths.
    """
    if isinstance(names, Mapping):
        there = [path for path, _ in tree.named_leaves(params)]
        missing = [path for path in names if path not in there]
        if missing:
            raise ConfigError(
                f"names: expected paths of parameters, of which there are {', '.join(there[:8])}, "
                f"got {', '.join(missing)}"
            )


def torch_layout(params: Any) -> Any:
    """Turn what is called a kernel as torch has it.

    Matrices, from inputs by outputs to outputs by inputs; kernels of convolutions over two and
    three dimensions, from (…, in, out) to (out, in, …). One of three axes may be either a
    convolution over one dimension or an attention's, and stays as it is; so does what has another
    name.

    >>> turned = torch_layout({"dense": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}})
    >>> turned["dense"]["kernel"].shape
    (2, 3)
    """

    def turned(path: Any, leaf: Any) -> Any:
        if tree.path_name(path).rsplit("/", 1)[-1] != "kernel" or jnp.ndim(leaf) not in (2, 4, 5):
            return leaf
        return jnp.moveaxis(leaf, (-1, -2), (0, 1))

    return jax.tree_util.tree_map_with_path(turned, params)
