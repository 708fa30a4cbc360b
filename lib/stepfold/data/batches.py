"""Batches of a source or of a stream, shared out over processes, and resumable."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from stepfold import tree
from stepfold.data.cuts import Cuts, read_share, read_sizes
from stepfold.data.indexed import Batches
from stepfold.data.integers import read_integer
from stepfold.data.order import Order
from stepfold.data.reading import Making, Reading
from stepfold.data.sources.kinds import is_stream, read_source
from stepfold.data.sources.rows import ENDLESS
from stepfold.data.sources.streams import Stream
from stepfold.data.streamed import Streamed
from stepfold.data.transforming import read_transform
from stepfold.errors import ConfigError

_REMAINDERS = ("drop", "pad", "keep")


def batches(
    source: Any,
    batch_size: int | Sequence[tuple[int, int]],
    *,
    seed: int | None = None,
    start: int = 0,
    epochs: int | None = None,
    remainder: Literal["drop", "pad", "keep"] = "drop",
    transform: Callable[..., Any] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    process_index: int | None = None,
    process_count: int | None = None,
) -> Batches | Streamed:
    """Make batches of a source, of which the batch at step i depends on i alone.

    Hence a run that begins at step ten million begins as fast as one at 0, a resumed run sees what
    an uninterrupted one sees, and so does one on another number of processes: each is given its
    share of the rows of the same global batch, and the shares in order are that batch. Batches that
    are in order, of arrays, are views of the source that cannot be written to.

    A stream is what can be read in order alone: an iterator, an iterable without `[i]` (a grain
    `IterDataset`, a streaming Hugging Face dataset, a `tf.data.Dataset`), or a function that makes
    either. Every process reads all of it and keeps its share of the rows. It cannot be shuffled
    here, nor sought; it is resumed by the state that it has of its own, if it has one.

    Args:
      source: what `len()` and `[i]` work on, a tree of arrays with one leading axis, or a stream of
        examples.
      batch_size: the examples of a global batch; or a ramp, pairs of the step from which on a size
        holds, as `[(0, 64), (1000, 256)]`. It is not a function of the step, since to know where
        step i begins all the steps before it would have to be asked.
      seed: what the orders of the epochs follow from, each its own, and what `transform` draws;
        None is the source's order. A source without an end, or a stream, has an order of its own,
        so that a seed is only for what `transform` draws.
      start: the step to begin at.
      epochs: how often to go through the source; None is for ever, and once where that is all that
        can be. Each epoch is cut by itself, so that no batch reaches into the next. It may be
        another when a run is resumed.
      remainder: what becomes of the rest of an epoch that fills no batch: "drop" leaves it out,
        "keep" makes a smaller batch of it, and "pad" fills it up with examples from the same rest,
        and adds to every batch a `mask` that is false for those. If examples have a `mask`, it is
        set to zero there.
      transform: a function of an example, before it becomes part of a batch; or of an example and
        a `numpy.random.Generator`, if it has two arguments without a default. What that draws
        follows from the seed, the epoch and the example's index alone.
      collate: what makes a batch of a list of examples; by default they are stacked leaf by leaf.
      process_index: which process this is; by default jax is asked when the first batch is made.
      process_count: how many processes there are.

    Raises:
      ConfigError: if an argument is not as described.
      DataError: if there is no example, or not enough for one batch.

    >>> import numpy as np, stepfold as sf
    >>> source = {"x": np.arange(5), "y": np.arange(5) ** 2}
    >>> for batch in sf.batches(source, 2, epochs=1, remainder="pad"):
    ...     print(batch["x"], batch["mask"])
    [0 1] [ True  True]
    [2 3] [ True  True]
    [4 4] [ True False]
    >>> first, second = sf.batches(source, 2, seed=0, epochs=1)
    >>> resumed = next(sf.batches(source, 2, seed=0, epochs=1, start=1))
    >>> np.array_equal(resumed["y"], second["y"])
    True

    Random changes are as repeatable as all else:

    >>> flip = lambda x, rng: -x if rng.random() < 0.5 else x
    >>> next(sf.batches(np.arange(6), 6, seed=0, transform=flip))
    array([-3,  2,  4,  1, -5,  0])
    >>> next(sf.batches(iter(range(6)), 6, seed=0, transform=flip))
    array([ 0,  1,  2, -3,  4, -5])
    """
    sizes = read_sizes(batch_size)
    seed = None if seed is None else read_integer("seed", seed, 0)
    start = read_integer("start", start, 0)
    epochs = None if epochs is None else read_integer("epochs", epochs, 1)
    if remainder not in _REMAINDERS:
        raise ConfigError(f"remainder: expected 'drop', 'pad' or 'keep', got {remainder!r}")
    if collate is not None and not callable(collate):
        raise ConfigError(f"collate: expected a function, got {tree.spell(collate)}")
    making = Making(read_transform(transform, seed), collate, remainder == "pad")
    share = read_share(process_index, process_count)
    # What a position means hangs on these: where there are more epochs, it means the same.
    pipeline: dict[str, Any] = {
        "seed": seed,
        "batch_size": sizes[0][1] if len(sizes) == 1 else [list(pair) for pair in sizes],
        "remainder": remainder,
    }
    if is_stream(source):
        stream = Stream(source)
        _check_stream(stream, making, seed, start, epochs)
        pipeline["stream"] = stream.package
        return Streamed(stream, making, sizes, share, pipeline, epochs)
    rows = read_source(source)
    if rows.length == ENDLESS:
        _check_endless(making, seed, epochs)
    pipeline |= {"length": rows.length, "source": rows.fingerprint}
    cuts = Cuts(rows.length, sizes, whole=remainder == "drop", epochs=epochs)
    order = Order(rows.length, None if rows.length == ENDLESS else seed)
    return Batches(Reading(rows, making), cuts, order, share, pipeline, start)


def _check_endless(making: Making, seed: int | None, epochs: int | None) -> None:
    if epochs is not None or (seed is not None and not making.draws):
        raise ConfigError(
            f"source: an endless one has no epochs and an order of its own, got seed={seed}, "
            f"epochs={epochs}; leave both out, and give the seed to what made the source"
        )


def _check_stream(
    stream: Stream, making: Making, seed: int | None, start: int, epochs: int | None
) -> None:
    if seed is not None and not making.draws:
        raise ConfigError(
            f"seed: a stream has an order of its own, got seed={seed}; shuffle it where it is made,"
            " or give a source with len() and [i], such as a list of it"
        )
    if start:
        raise ConfigError(
            f"start: a stream is not read from elsewhere than its beginning, got start={start}; "
            "resume with set_state() what has a state of its own, as grain's have, give a source "
            "with len() and [i], or leave out examples by hand, as in "
            "sf.batches(itertools.islice(stream, n, None), …)"
        )
    if stream.once and epochs is not None and epochs > 1:
        raise ConfigError(
            f"epochs: what can be read only once has one epoch, got epochs={epochs}; give a list "
            "of it, or a function that makes it anew, such as lambda: read(path)"
        )
