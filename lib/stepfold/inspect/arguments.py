"""What a step is given: as abstract arrays that know their places, and what changed in it."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from stepfold import tree
from stepfold.errors import ConfigError, ShardingError
from stepfold.sharding.placement import shard_batch
from stepfold.sharding.plan import places_of


def placed(state: Any, batch: Any, sharding: Any = None) -> tuple[Any, Any]:
    """Give state and batch as abstract arrays that know their places.

    Args:
      state: a state, or an abstract one.
      batch: a batch, or an abstract one. Where it has no place of its own and the state is on a
        mesh, it is spread as by `shard_batch`.
      sharding: the state's plan, or one sharding for all of it; by default where its arrays are.

    Raises:
      TreeMismatchError: if the plan is for another state.
      ShardingError: if parts of the state are on different meshes.
    """
    _check_arrays(state, "state")
    _check_arrays(batch, "batch")
    places = _own_places(state)
    if sharding is not None:
        places = [*places_of(state, sharding)]
    home = _home(places)
    _check_devices(state, places, home)
    state = _strong(_abstract(state, [place or home for place in places]))
    if isinstance(home, NamedSharding) and isinstance(home.mesh, Mesh) and home.mesh.size > 1:
        spread = shard_batch(_abstract(batch, None), home.mesh)
        homes = [leaf.sharding for leaf in jax.tree.leaves(spread)]
    else:
        spread, homes = batch, [home for _ in jax.tree.leaves(batch)]
    own = _own_places(batch)
    chosen = [place or home for place, home in zip(own, homes, strict=True)]
    return state, _abstract(spread if not any(own) else batch, chosen)


def _check_arrays(arrays: Any, root: str) -> None:
    for name, leaf in tree.named_leaves(arrays, root):
        if not tree.is_data(leaf, abstract=True):
            raise ConfigError(f"{name}: expected an array, got {tree.spell(leaf)}; {_ADVICE[root]}")


_ADVICE = {
    "state": "give what sf.init_state made, or the .state of what gave it back",
    "batch": "a batch is a tree of numbers, as next(batches) gives: leave out texts, and make "
    "numpy's arrays of other libraries'",
}


def _strong(state: Any) -> Any:
    """Give the form that a state comes back in: without weak types, which a step never returns."""
    return jax.tree.map(lambda leaf: leaf.update(weak_type=False), state)


def _own_places(arrays: Any) -> list[Sharding | None]:
    """List where leaves were put on purpose."""
    leaves = jax.tree.leaves(arrays)
    chosen = [getattr(leaf, "committed", True) for leaf in leaves]
    return [
        getattr(leaf, "sharding", None) if here else None
        for leaf, here in zip(leaves, chosen, strict=True)
    ]


def _home(places: list[Sharding | None]) -> Sharding:
    """Give the place of what has none of its own: everywhere, where there is a mesh."""
    meshes = {place.mesh for place in places if isinstance(place, NamedSharding)}
    if len(meshes) > 1:
        raise ShardingError(
            f"state: expected all of it on one mesh, got {sorted(map(str, meshes))}"
        )
    if meshes:
        (mesh,) = meshes
        return NamedSharding(mesh, PartitionSpec())
    return next(filter(None, places), SingleDeviceSharding(jax.local_devices()[0]))


def _check_devices(state: Any, places: list[Sharding | None], home: Sharding) -> None:
    named = zip(tree.named_leaves(state, "state"), places, strict=True)
    odd = [name for (name, _), place in named if place and place.device_set != home.device_set]
    if odd:
        raise ShardingError(
            f"state: expected all of it on the devices of {_spell(home)}, but elsewhere are "
            f"{', '.join(odd[:4])}{' …' if len(odd) > 4 else ''}; sf.place(state, plan) moves them"
        )


def _abstract(arrays: Any, places: Sequence[Sharding] | None) -> Any:
    leaves, structure = jax.tree.flatten(arrays)
    forms = jax.eval_shape(lambda *leaves: leaves, *leaves)
    chosen: Any = places or [None for _ in forms]
    return jax.tree.unflatten(
        structure,
        [
            jax.ShapeDtypeStruct(form.shape, form.dtype, sharding=place, weak_type=form.weak_type)
            for form, place in zip(forms, chosen, strict=True)
        ],
    )


def in_guise_of(given: Any, batch: Any) -> Any:
    """Leave out the places that a batch does not bring along itself.

    jax traces for arrays on a mesh and for arrays of the host apart, although both run the same
    program: the fast path is for what looks like the example.
    """
    own = zip(jax.tree.leaves(batch), _own_places(given), strict=True)
    leaves = [leaf if place else leaf.update(sharding=None) for leaf, place in own]
    return jax.tree.unflatten(jax.tree.structure(batch), leaves)


def changes(wanted: Any, got: Any, root: str) -> list[str]:
    """List what is not as it was compiled for, a line a path."""
    lines = tree.diff(wanted, jax.tree.map(_as_jax_takes_it, got), root)
    if lines:
        return [line if line[0] != ":" else f"state{line}" for line in lines]
    pairs = zip(tree.named_leaves(wanted, root), jax.tree.leaves(got), strict=True)
    return [
        f"{name or 'state'}: {change}"
        for (name, form), leaf in pairs
        if (change := _change(form, leaf))
    ]


def _as_jax_takes_it(leaf: Any) -> Any:
    """Give numpy's arrays in the dtype that jax makes of them: without x64 an int64 is an int32."""
    if not isinstance(leaf, np.ndarray | np.generic) or not tree.is_data(leaf):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def is_weak(leaf: Any) -> bool:
    """Tell whether a leaf's dtype is weak, as that of Python's numbers is."""
    number = isinstance(leaf, int | float | complex) and not isinstance(leaf, bool | np.generic)
    return bool(getattr(leaf, "weak_type", number))


def _change(form: Any, leaf: Any) -> str | None:
    if not tree.is_array(leaf) and is_weak(leaf) and not form.weak_type:
        return f"expected {tree.spell(form)}, got the Python number {leaf!r}, whose type is weak"
    if is_weak(leaf) != form.weak_type:
        kinds = {True: "a weak type, as of Python numbers", False: "a type of its own"}
        return (
            f"expected {tree.spell(form)} with {kinds[form.weak_type]}, got {kinds[is_weak(leaf)]}"
        )
    place = leaf.sharding if getattr(leaf, "committed", False) else None
    if place is None or place.is_equivalent_to(form.sharding, len(form.shape)):
        return None
    return f"expected it on {_spell(form.sharding)}, got it on {_spell(place)}"


def _spell(place: Any) -> str:
    if isinstance(place, NamedSharding):
        return f"{place.spec} of the mesh {dict(place.mesh.shape)}"
    return ", ".join(str(device) for device in sorted(place.device_set, key=lambda d: d.id))
