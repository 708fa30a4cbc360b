"""Names and layouts of parameters in other libraries, such as those of models on the hub.

A `NameMap` maps slices of leaves to slices of file tensors, both ways, so that a load and an export
agree.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from stepfold import tree
from stepfold.checkpoint.leaves import Leaf, Region, as_slices, region
from stepfold.core.validation import as_integer, read_instance, read_integer, suggest
from stepfold.errors import refuse

_PLACEHOLDER = re.compile(r"{([A-Za-z_]\w*)}")


class NameRule(NamedTuple):
    """Map leaves of a tree to arrays of another library.

    A placeholder such as `{layer}` stands for one component of a path or a name. One that occurs
    on both sides stands for the same text. One that occurs only in `theirs` counts from 0, and its
    arrays are stacked in the leaf: `("layers/up", "h.{layer}.up.weight")` stacks `h.0.up.weight`,
    `h.1.up.weight` and so on along the first axis of `layers/up`. Two of them stack along two axes,
    in the order of their first occurrence.

    Attributes:
      ours: the path of a leaf, such as `layers/up`, or a tuple of paths of leaves that are joined
        in one array of theirs.
      theirs: the name of an array, such as `h.{layer}.up.weight`, or a tuple of names of arrays
        that are joined in one leaf of ours.
      transpose: the axes of their array in the order of ours, as for `numpy.transpose`: `(1, 0)`
        for a linear layer of torch, `(2, 3, 1, 0)` for a two-dimensional convolution. Axes of
        stacked arrays are not counted.
      axis: the axis of their array along which arrays or leaves are joined; -1 is the last.
      sizes: the sizes of the arrays of `theirs` along `axis`, or their ratio; equal by default.
      stack: the first axis of our leaf along which arrays are stacked.

    >>> import stepfold as sf
    >>> sf.checkpoint.NameRule("layers/up", "h.{layer}.mlp.weight", transpose=(1, 0)).theirs
    'h.{layer}.mlp.weight'
    """

    ours: str | tuple[str, ...]
    theirs: str | tuple[str, ...]
    transpose: tuple[int, ...] | None = None
    axis: int = 0
    sizes: tuple[int, ...] | None = None
    stack: int = 0


@dataclass(frozen=True)
class NameMap:
    """Map the parameters of a model to names and layouts of another library, in both directions.

    `load_params` and `export_params` take it as `names`. It has to name every leaf. The first rule
    that matches a path applies.

    Args:
      rules: a `NameRule` each, or a plain tuple of its first fields.
      ignore: names that no leaf has, such as `h.{layer}.attn.mask`, with all names below them. They
        are not read, and not written.
      tied: a copy each, such as `{"lm_head.weight": "wte.weight"}`. Copies are written. Files
        need not have them. If they do, the values have to be equal.

    Raises:
      ConfigError: if a rule is invalid.

    >>> import jax, jax.numpy as jnp, os, safetensors.numpy, stepfold as sf, tempfile
    >>> names = sf.checkpoint.NameMap([
    ...     ("embed", "wte.weight"),
    ...     sf.checkpoint.NameRule("layers/up", "h.{layer}.up.weight", transpose=(1, 0)),
    ...     sf.checkpoint.NameRule(("layers/query", "layers/key"), "h.{layer}.attn.weight", axis=1),
    ... ])
    >>> layers = {"query": jnp.ones((2, 4, 4)), "key": jnp.ones((2, 4, 2))}
    >>> params = {"embed": jnp.ones((5, 4)), "layers": layers | {"up": jnp.ones((2, 4, 8))}}
    >>> file = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> sf.checkpoint.export_params(file, params, names=names)
    >>> for name, array in sorted(safetensors.numpy.load_file(file).items()):
    ...     print(name, array.shape)
    h.0.attn.weight (4, 6)
    h.0.up.weight (8, 4)
    h.1.attn.weight (4, 6)
    h.1.up.weight (8, 4)
    wte.weight (5, 4)
    >>> loaded = sf.checkpoint.load_params(file, params, names=names)
    >>> bool(jax.tree.all(jax.tree.map(jnp.array_equal, loaded, params)))
    True
    """

    rules: Sequence[NameRule | tuple[Any, ...]]
    ignore: Sequence[str] = ()
    tied: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("rules", "ignore"):
            read_instance(f"NameMap: {name}", getattr(self, name), (list, tuple), "a list")
        read_instance("NameMap: tied", self.tied, Mapping, "a dict of names")
        rules = [_read_rule(f"NameMap: rules[{i}]", rule) for i, rule in enumerate(self.rules)]
        object.__setattr__(self, "rules", tuple(rules))
        for text in (*self.ignore, *itertools.chain(*self.tied.items())):
            _placeholders("NameMap: ignore, tied", text)

    def ignores(self, name: str) -> bool:
        """Whether a name in a file is skipped."""
        return any(re.match(rf"{_regex(text, '.')}(\.|$)", name) for text in self.ignore)

    def arrays_of(self, argument: str, leaves: Mapping[str, Leaf]) -> "dict[str, NamedArray]":
        """Return by name the arrays that hold leaves in a file, without tied copies."""
        arrays: dict[str, NamedArray] = {}
        for rule, texts, joined in self._groups(argument, leaves):
            for array in _arrays_of_rule(rule, texts, joined):
                path = array.slices[0].path
                if array.name in arrays:
                    got = f"{array.name!r}, the name of {arrays[array.name].slices[0].path}"
                    refuse(path, "a unique name", got, "correct the rules of the NameMap")
                arrays[array.name] = array
        for copy, name in self.tied.items():
            if name not in arrays or copy in arrays:
                expected = "a name without a leaf for one with a leaf"
                advice = suggest(name, arrays) or "correct it, or leave it out"
                refuse("NameMap: tied", expected, f"{copy!r} for {name!r}", advice)
        return arrays

    def _groups(
        self, argument: str, leaves: Mapping[str, Leaf]
    ) -> "list[tuple[NameRule, dict[str, str], dict[str, Leaf]]]":
        """List sets of joined leaves, with their rule and the texts of its placeholders."""
        groups: dict[tuple[str, ...], tuple[NameRule, dict[str, str], dict[str, Leaf]]] = {}
        unnamed = []
        for path in leaves:
            rule, texts = self._match(path)
            if rule is None:
                unnamed.append(path)
                continue
            paths = tuple(ours.format(**texts) for ours in _texts(rule.ours))
            if missing := [other for other in paths if other not in leaves]:
                expected = f"leaves at {', '.join(paths)}, which are one array"
                got, advice = f"none at {', '.join(missing)}", "correct the rules of the NameMap"
                refuse(path, expected, got, advice)
            groups[paths] = rule, texts, {other: leaves[other] for other in paths}
        if unnamed:
            got = f"none for {', '.join(unnamed[:6])}{', …' * (len(unnamed) > 6)}"
            refuse(argument, "a rule that matches the path of every leaf", got, "add rules")
        return list(groups.values())

    def _match(self, path: str) -> tuple[NameRule | None, dict[str, str]]:
        for rule in self.rules:
            for ours in _texts(rule[0]):
                if matched := re.fullmatch(_regex(ours, "/"), path):
                    return NameRule(*rule), matched.groupdict()
        return None, {}


class LeafSlice(NamedTuple):
    """A region of a leaf that is a region of an array in a file.

    `order` has the axes of the array in the order of the leaf. `stacked` has the axes of the leaf
    that the array does not have.
    """

    path: str
    ours: Region
    theirs: Region
    order: tuple[int, ...]
    stacked: tuple[int, ...] = ()

    def to_ours(self, array: Any) -> Any:
        """Return the region of an array in the layout of the leaf, as a view."""
        return np.expand_dims(array[as_slices(self.theirs)].transpose(self.order), self.stacked)

    def to_theirs(self, values: Any) -> Any:
        """Return the values of the region of the leaf in the layout of the array, as a view."""
        return values.squeeze(self.stacked).transpose(np.argsort(self.order))


class NamedArray(NamedTuple):
    """An array in a file, and the slices of leaves that it consists of."""

    name: str
    leaf: Leaf
    slices: tuple[LeafSlice, ...]


def array_of_leaf(name: str, path: str, leaf: Leaf) -> NamedArray:
    """Return the array of a leaf that is stored as it is."""
    full = region((), leaf.shape)
    return NamedArray(name, leaf, (LeafSlice(path, full, full, tuple(range(len(full)))),))


# Rules


def _read_rule(argument: str, value: Any) -> NameRule:
    if not isinstance(value, tuple) or not 2 <= len(value) <= len(NameRule._fields):
        refuse(argument, "a NameRule, or a tuple of its fields", tree.describe_value(value))
    rule = NameRule(*value)
    ours, theirs = _texts(rule.ours), _texts(rule.theirs)
    if min(len(ours), len(theirs)) != 1:
        got = f"{len(ours)} paths and {len(theirs)} names"
        refuse(argument, "one path or one name", got, "write several rules")
    names = {text: {*_placeholders(argument, text)} for text in (*ours, *theirs)}
    for text, own in names.items():
        is_same = own == names[ours[0] if text in ours else theirs[0]]
        if not is_same or not own <= names[theirs[0]]:
            expected = f"the placeholders of {theirs[0]!r}, the same in all paths and in all names"
            refuse(argument, expected, repr(text), "correct what is between { and }")
    order, sizes = _integers(rule.transpose, ()), _integers(rule.sizes, (1,) * len(theirs))
    if {*order} != {*range(len(order))}:
        got = repr(rule.transpose)
        refuse(f"{argument}: transpose", "every axis once, such as (1, 0)", got)
    if len(sizes) != len(theirs) or min(size or 0 for size in sizes) < 1:
        refuse(f"{argument}: sizes", f"a size for each of {len(theirs)} names", repr(rule.sizes))
    if as_integer(rule.axis) is None or (rule.axis and len(ours) == len(theirs)):
        expected = "an integer, and 0 unless arrays are joined"
        refuse(f"{argument}: axis", expected, repr(rule.axis))
    read_integer(f"{argument}: stack", rule.stack, 0)
    return rule


def _texts(side: Any) -> tuple[str, ...]:
    return side if isinstance(side, tuple) else (side,)


def _integers(value: Any, default: tuple[int, ...]) -> list[int | None]:
    value = default if value is None else value
    return [as_integer(each) for each in value] if isinstance(value, tuple) else [None]


def _placeholders(argument: str, text: Any) -> list[str]:
    if not isinstance(text, str) or not text or re.search("[{}]", _PLACEHOLDER.sub("", text)):
        expected = "a path or a name, with placeholders such as {layer}"
        refuse(argument, expected, repr(text), "write a word between { and }")
    return list(dict.fromkeys(_PLACEHOLDER.findall(text)))


def _regex(text: str, separator: str) -> str:
    """Return a regular expression in which placeholders are groups of the same name."""
    pieces, names = [], set()
    for i, piece in enumerate(_PLACEHOLDER.split(text)):
        group = f"(?P={piece})" if piece in names else f"(?P<{piece}>[^{separator}]+)"
        pieces.append(group if i % 2 else re.escape(piece))
        names |= {piece} if i % 2 else set()
    return "".join(pieces)


def _arrays_of_rule(
    rule: NameRule, texts: Mapping[str, str], leaves: Mapping[str, Leaf]
) -> Iterator[NamedArray]:
    """Yield the arrays of one leaf, or of leaves that are joined."""
    names, order = _texts(rule.theirs), rule.transpose
    counted = [name for name in _placeholders("", names[0]) if name not in texts]
    stacked = range(rule.stack, rule.stack + len(counted))
    shapes = {path: _shape_in_file(rule, path, leaf, stacked) for path, leaf in leaves.items()}
    (first, leaf), *others = leaves.items()
    shape, counts = shapes[first], [leaf.shape[i] for i in stacked]
    axis = rule.axis % max(len(shape), 1)
    for path, other in others:
        same = [other.shape[i] for i in stacked] == counts and other.dtype == leaf.dtype
        if not same or _set(shapes[path], axis, 0) != _set(shape, axis, 0):
            expected = f"what can be joined with {first}, {leaf}, along axis {axis} of {names[0]}"
            refuse(path, expected, f"{other}", "correct the rules of the NameMap, or cast it")
    sizes = [_size(shapes[path], axis) for path in leaves]
    ratio = rule.sizes or (1,) * len(names)
    unit, rest = divmod(sum(sizes), sum(ratio))
    if rest:
        expected = f"a size that divides by {sum(ratio)} along axis {axis} of {names[0]}"
        refuse(first, expected, f"{sum(sizes)}", "correct the sizes in the NameMap")
    for index in np.ndindex(*counts):
        for name, (start, stop) in zip(names, _spans(unit * part for part in ratio), strict=True):
            slices = []
            for path, (begin, end) in zip(leaves, _spans(sizes), strict=True):
                low, high = max(start, begin), min(stop, end)
                full = [(0, size) for size in shape]
                theirs = _set(full, axis, (low - start, high - start))
                ours = _set(full, axis, (low - begin, high - begin))
                axes = tuple(range(len(full))) if order is None else order
                inner = [ours[i] for i in axes]
                inner[rule.stack : rule.stack] = [(i, i + 1) for i in index]
                slices.append(LeafSlice(path, tuple(inner), theirs, axes, tuple(stacked)))
            counts_by_name = dict(zip(counted, index, strict=True))
            size = Leaf(_set(shape, axis, stop - start), leaf.dtype)
            yield NamedArray(name.format(**texts, **counts_by_name), size, tuple(slices))


def _shape_in_file(
    rule: NameRule, path: str, leaf: Leaf, stacked: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape of an array in a file, as if no other leaf or array was joined with it."""
    inner = [size for i, size in enumerate(leaf.shape) if i not in stacked]
    order = list(range(len(inner)) if rule.transpose is None else rule.transpose)
    needs = []
    if stacked:
        needs.append(f"{len(stacked)} stacked" + f" at {rule.stack}" * bool(rule.stack))
    if rule.transpose is not None:
        needs.append(f"transpose={rule.transpose}")
    if is_joined := len(_texts(rule.ours)) != len(_texts(rule.theirs)):
        needs.append(f"axis={rule.axis}")
    fits = len(leaf.shape) >= rule.stack + len(stacked) and len(order) == len(inner)
    if not fits or (is_joined and not -len(inner) <= rule.axis < len(inner)):
        expected = f"dimensions for {_texts(rule.theirs)[0]} with {', '.join(needs)}"
        refuse(path, expected, f"{leaf}", "correct the rule in the NameMap")
    return tuple(inner[order.index(i)] for i in range(len(inner)))


def _spans(sizes: Iterable[int]) -> Iterable[tuple[int, int]]:
    return itertools.pairwise(itertools.accumulate(sizes, initial=0))


def _size(shape: Sequence[int], axis: int) -> int:
    return shape[axis] if shape else 1  # a scalar is never joined


def _set(values: Sequence[Any], index: int, value: Any) -> tuple[Any, ...]:
    return tuple(value if i == index else old for i, old in enumerate(values))
