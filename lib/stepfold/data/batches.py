"""Resumable batches of a source or a stream, sharded over processes."""

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
    """Make batches of a source, where the batch at step i depends only on i.

    Starting at step 10,000,000 is as fast as starting at step 0, and a resumed run sees the same
    batches as an uninterrupted one. So does a run on another number of processes: each process gets
    its shard of the rows of the same global batch. In-order batches of arrays are read-only views
    of the source.

    A stream supports only sequential reads. It is an iterator, an iterable without `[i]` (a grain
    `IterDataset`, a streaming Hugging Face dataset, a `tf.data.Dataset`), or a function that
    returns either. Every process reads the whole stream and keeps its shard of the rows. `batches`
    neither shuffles a stream nor seeks in it. A stream resumes from its own state, if it has one.

    Args:
      source: an object with `len()` and `[i]`, a tree of arrays that share their leading axis, or a
        stream of examples.
      batch_size: the global batch size; or a ramp, pairs of a step and the size from that step on,
        such as `[(0, 64), (1000, 256)]`. It cannot be a function of the step, because finding the
        rows of step i would take a call for every earlier step.
      seed: the seed of the shuffle order, which differs in every epoch, and of the generators for
        `transform`. None keeps the source's order. Streams and infinite sources have their own
        order, and use a seed only for `transform`.
      start: the first step.
      epochs: the number of epochs. None repeats the source forever, or reads it once if it cannot
        be read again. No batch spans two epochs. A resumed run may use another number.
      remainder: how to handle the examples at the end of an epoch that do not fill a batch. "drop"
        skips them, "keep" makes a smaller batch of them, and "pad" repeats them until the batch is
        full. "pad" also adds a `mask` to every batch, which is false for the repeated rows; a
        `mask` in the examples is set to zero there instead.
      transform: a function of an example, applied before batching; or of an example and a
        `numpy.random.Generator`, if it has two arguments without a default. The random numbers
        depend only on the seed, the epoch and the index of the example.
      collate: a function from a list of examples to a batch; by default, leaves are stacked.
      process_index: the index of this process; by default JAX's, read with the first batch.
      process_count: the number of processes.

    Raises:
      ConfigError: if an argument is invalid.
      DataError: if the source has no examples, or too few for one batch.

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

    Random transforms are reproducible too:

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
    # A saved position is only valid for these settings. The number of epochs does not matter.
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
