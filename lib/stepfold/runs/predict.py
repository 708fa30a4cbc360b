"""Compute the outputs of a model for every example, in order, in memory or to files."""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from stepfold import tree
from stepfold.core.state import check_not_donated
from stepfold.core.validation import absolute_path, read_integer
from stepfold.errors import DataError, refuse
from stepfold.loop.evaluate import check_end, jitted, mesh_of, placed_batches, refuse_empty
from stepfold.loop.feed import WHOLE_DATA, check_batches
from stepfold.runs.prediction_files import PredictionFiles, fingerprint
from stepfold.sharding.place import row_counts


def predict(
    step: Callable[[Any, Any], Any],
    state: Any,
    batches: Iterable[Any],
    *,
    to: str | os.PathLike[str] | None = None,
    shard_rows: int = 1024,
) -> Any:
    """Compute the outputs of a step for every example, in order and without padding.

    The outputs are fetched one batch late, so that the device has work in the meantime. With a
    state on a mesh of several processes, all of them call this and get all outputs.

    With `to`, outputs are written to files while they are computed, so that only the rows of one
    file and of a few batches are in memory. A call that was interrupted, even by a kill, continues
    after its last file if it is made again. It first reads the files, to find those that are
    damaged. Batches of a source with `len()` seek to that row; others are read again up to there,
    but not computed. With the same batch size the files are the same, bit for bit. A folder is
    refused if it started with another state, or with other data as far as that shows: in the
    length, the position or the first batch.

    Padding is what `sf.batches(…, remainder="pad")` added to its last batch. In batches from
    elsewhere and in those of a stream, a row is padding if the `mask` of the batch is zero there.

    Args:
      step: a function `(state, batch) -> outputs`, jitted or not. The outputs are any tree of
        arrays whose first axis has the rows of the batch. It is compiled for each shape of batch.
      state: the state; anything that the step takes, such as the parameters alone. If it is on a
        mesh, batches on the host are sharded over it, as in `evaluate`.
      batches: the batches, from their present position to their end, such as
        `sf.batches(data, 256, epochs=1, remainder="pad")`. Those of `sf.batches` that are shuffled,
        or that drop the last rows of a source, are refused. With several processes, rows
        of a batch are ordered by process, as `sf.batches` divides them.
      to: a folder for files in numpy's format, `rows-000000000000-000000001024.npz` and so on, each
        with an array for every output by its path, such as `scores/top`; the path of a single array
        is `output`. With several processes, process 0 writes.
      shard_rows: the rows in a file.

    Returns:
      The outputs as a tree of numpy arrays; with `to`, the paths of the files, in order.

    Raises:
      ConfigError: if the outputs do not have the rows of the batch or change their form, if
        `batches` has no end, is shuffled or drops rows, the state was donated, or the folder is
        that of other predictions.
      DataError: if there is no batch, or if processes that share the state have different numbers
        of batches.
      CheckpointError: if a file cannot be written or is damaged.

    >>> import jax, numpy as np, os, stepfold as sf, tempfile
    >>> def step(params, batch):
    ...     return {"double": 2 * batch["x"], "even": batch["x"] % 2 == 0}
    >>> make = lambda: sf.batches({"x": np.arange(5)}, 2, epochs=1, remainder="pad")
    >>> sf.predict(step, {}, make())
    {'double': array([0, 2, 4, 6, 8], dtype=int32), 'even': array([ True, False,  True, ...])}
    >>> files = sf.predict(step, {}, make(), to=tempfile.mkdtemp(), shard_rows=3)
    >>> [np.load(file)["double"].tolist() for file in files]
    [[0, 2, 4], [6, 8]]
    """
    check_batches(batches, make=WHOLE_DATA)
    call = jitted("step", step)
    shard_rows = read_integer("shard_rows", shard_rows)
    check_not_donated(state)
    check_end("predict", batches)
    if to is not None:
        to = absolute_path("to", to)  # batches may change the working directory
    feed = _Feed(batches, mesh_of(state))
    if to is None:
        return _joined([*_outputs(call, state, feed)])
    count = 1 if feed.mesh is None else len({d.process_index for d in feed.mesh.devices.flat})
    if count < jax.process_count():
        expected = f"a state on a mesh of all {jax.process_count()} processes, for one folder"
        advice = "shard it by sf.make_sharding and sf.sharding.place, or leave out to="
        refuse("to", expected, f"one of {count}", advice)
    with PredictionFiles.opened(to, shard_rows) as files:
        files.check(fingerprint(state), feed.identity())
        for part in _outputs(call, state, feed, files.rows, is_complete=files.is_complete):
            files.add(part)
        return files.finish()


def _joined(parts: list[Any]) -> Any:
    """Concatenate trees of arrays, and free them leaf by leaf."""
    structure: Any = jax.tree.structure(parts[0])
    rows = [jax.tree.leaves(part) for part in parts]
    parts.clear()
    joined = []
    for index in range(structure.num_leaves):
        joined.append(np.concatenate([leaves[index] for leaves in rows]))
        for leaves in rows:
            leaves[index] = None
    return jax.tree.unflatten(structure, joined)


class _Feed:
    """Placed batches, each with the number of its real rows if the batches can count them.

    Those of a source can, and go to the batch of a row without reading those before it. For others
    the number is None.
    """

    def __init__(self, batches: Any, mesh: Mesh | None) -> None:
        self._batches, self.mesh = batches, mesh
        state = batches.get_state() if hasattr(batches, "get_state") else None
        position = state if isinstance(state, dict) else {}
        pipeline = position.get("pipeline")
        # The settings of `sf.batches`; empty for others.
        self._settings: dict[str, Any] = {**pipeline} if isinstance(pipeline, dict) else {}
        _check_rows(self._settings)
        self.pads = self._settings.get("remainder", "pad") == "pad"
        self._start, self._can_count = 0, False
        if self._settings and hasattr(batches, "count_rows"):
            self._start = position["step"]
            self._settings["skipped"] = position.get("skipped", [])
            self._can_count = batches.count_rows(self._start) is not None
        self._number = self._start
        self._rest = placed_batches("predict", batches, mesh)
        self._first = next(self._rest, None)
        if self._first is None:
            refuse_empty("predict")

    def identity(self) -> dict[str, Any]:
        """Return what is known of the data, as JSON."""
        settings = {name: x for name, x in self._settings.items() if name != "batch_size"}
        rows = rows_of(self._first)
        return {"start": self._start, **settings, "first": [rows, fingerprint(self._first)]}

    def seek(self, row: int) -> int:
        """Go to the batch of a row, if the batches can; return how many rows to skip from there."""
        if not row or not self._can_count:
            return row
        stop = len(self._batches)
        while self._number < stop and (count := self._count() or 0) <= row:
            self._number, row = self._number + 1, row - count
        self._batches.set_state(self._batches.state_at(self._number))
        self._first, self._rest = None, placed_batches("predict", self._batches, self.mesh)
        return row

    def __iter__(self) -> Iterator[tuple[Any, int | None]]:
        first, self._first = [] if self._first is None else [self._first], None
        for batch in itertools.chain(first, self._rest):
            yield batch, self._count()
            self._number += 1

    def _count(self) -> int | None:
        if not self._can_count:
            return None
        own, total = self._batches.count_rows(self._number)
        is_global = self.mesh is not None and self.mesh.is_multi_process
        return int(total if is_global else own)


def _check_rows(settings: Mapping[str, Any]) -> None:
    """Refuse batches of `sf.batches` in a shuffled order, or without the last rows of a source."""
    length, size = settings.get("length"), settings.get("batch_size")
    if length is None:  # a stream has its own order, and an unknown length
        return
    got = None if settings["seed"] is None else f"a shuffled order by seed={settings['seed']}"
    if settings["remainder"] == "drop" and (not isinstance(size, int) or length % size):
        dropped = f"remainder='drop', which leaves out the last of {length}"
        got = dropped if got is None else f"{got} and {dropped}"
    if got is not None:
        refuse("predict", "batches of all rows, in order", got, f"give {WHOLE_DATA}")


def rows_of(batch: Any) -> int:
    """Return the number of rows of a batch."""
    rows = row_counts("predict", batch)
    if not rows:
        got = tree.summary(batch)
        refuse("predict", "batches of arrays with rows", got, kind=DataError)
    return rows.pop()


class _Pending(NamedTuple):
    """The outputs of a batch, which may still be computed."""

    outputs: Any
    mask: Any  # None if the number of real rows is known
    order: np.ndarray  # of the rows of the data
    real: int | None  # rows without padding
    skip: int

    def read(self) -> Any:
        """Wait for the outputs, and return copies of the real rows, in order."""
        outputs, mask = jax.device_get((self.outputs, self.mask))
        rows = self.order if mask is None else self.order[_is_real(mask)[self.order]]
        rows = rows[: self.real][self.skip :]
        return jax.tree.map(lambda leaf: np.asarray(leaf)[rows], outputs)


def _outputs(
    call: Callable[[Any, Any], Any],
    state: Any,
    feed: _Feed,
    done: int = 0,
    *,
    is_complete: bool = False,
) -> Iterator[Any]:
    """Yield the outputs of the rows after `done` rows; with `is_complete`, refuse further rows.

    Batches of which all rows are done are not computed.
    """
    fetch = _make_fetch(feed.mesh)
    skip, pending, form = feed.seek(done), None, None
    try:
        for batch, count in feed:
            rows = rows_of(batch)
            mask: Any = None
            if count is None and feed.pads and isinstance(batch, Mapping):
                mask = batch.get("mask")
                mask = mask if np.shape(mask)[:1] == (rows,) else None
            if skip or is_complete:
                real = rows if count is None else count
                if mask is not None:
                    real = int(_is_real(jax.device_get(fetch(mask))).sum())
                if real <= skip:
                    skip -= real
                    continue
                if is_complete:
                    _refuse_rows(done, "more")
            outputs = call(state, batch)
            form = _check_form(outputs, rows, form)
            order = _data_order(batch, rows)
            outputs, mask = fetch((outputs, mask))
            started = _Pending(outputs, mask, order, count, skip)
            skip = 0
            if pending is not None:
                yield pending.read()
            pending = started
    except DataError:
        jax.block_until_ready(pending)  # as in `evaluate`
        raise
    if skip:
        _refuse_rows(done, f"{done - skip}")
    if pending is not None:
        yield pending.read()


def _make_fetch(mesh: Mesh | None) -> Callable[[Any], Any]:
    """Return a function that starts to copy arrays to the host, from all processes."""
    copy = None
    if mesh is not None and mesh.is_multi_process:
        copy = jax.jit(lambda arrays: arrays, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def fetch(arrays: Any) -> Any:
        arrays = arrays if copy is None else copy(arrays)
        for leaf in jax.tree.leaves(arrays):
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()
        return arrays

    return fetch


def _refuse_rows(done: int, got: str) -> NoReturn:
    advice = "give another folder, or delete this one"
    refuse("to", f"a folder of these data, of which {done} rows are written", got, advice)


def _is_real(mask: np.ndarray) -> np.ndarray:
    """Return which rows a mask does not mark as padding."""
    is_real: np.ndarray = (mask != 0).reshape(len(mask), -1).any(1)
    return is_real


Form = dict[str, tuple[Any, tuple[int, ...]]]
"""The dtype and the shape of a row of each output."""


def _check_form(outputs: Any, rows: int, form: Form | None) -> Form:
    """Check that outputs have the rows of the batch, and the form of those before."""
    leaves = tree.named_leaves(outputs, "outputs")
    if not leaves:
        got = tree.describe_value(outputs)
        refuse("step", "arrays with the rows of the batch as outputs", got, "return some")
    for name, leaf in leaves:
        if not tree.is_array(leaf) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            got, advice = tree.describe_value(leaf), "return jax.random.key_data of a key"
            refuse(name, "an array of numbers", got, advice)
        if leaf.shape[:1] != (rows,):
            expected = f"an array whose first axis has the {rows} rows of the batch"
            advice = "return one output for each example; sf.evaluate computes means and totals"
            refuse(name, expected, tree.describe_value(leaf), advice)
    new = {name: (leaf.dtype, leaf.shape[1:]) for name, leaf in leaves}
    before = new if form is None else form
    for name in {**before, **new}:
        if new.get(name) != before.get(name):
            expected = f"{_spell(before.get(name))}, as in the first batch"
            advice = "return the same outputs for every batch, padded to one length"
            refuse(name, expected, _spell(new.get(name)), advice)
    return new


def _spell(form: tuple[Any, tuple[int, ...]] | None) -> str:
    if form is None:
        return "no such output"
    dtype, shape = form
    return f"{dtype}[{','.join(['rows', *map(str, shape)])}]"


@cache
def _find_order(sharding: Sharding, shape: tuple[int, ...]) -> np.ndarray:
    """Order the rows of a batch by process; the mesh may have another order."""
    regions: Any = sharding.devices_indices_map(shape)
    ranges = [
        (device.process_index, *index[0].indices(shape[0])[:2]) for device, index in regions.items()
    ]
    distinct = dict.fromkeys((start, stop) for _, start, stop in sorted(ranges))
    return np.concatenate([np.arange(*each) for each in distinct])


def _data_order(batch: Any, rows: int) -> np.ndarray:
    """Return the order of the data in a batch; shards of one process are in order."""
    leaf = next(leaf for leaf in jax.tree.leaves(batch) if np.ndim(leaf))
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return _find_order(leaf.sharding, leaf.shape)
    return np.arange(rows)
