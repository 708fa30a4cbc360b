"""Evaluate a state on a whole dataset, exactly, however it is batched."""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stepfold import tree
from stepfold.core.processes import KeyValues, Position, spell_processes
from stepfold.core.state import TrainState, check_not_donated
from stepfold.core.transfers import allow_transfers
from stepfold.core.validation import (
    check_flags,
    read_function,
    read_instance,
    read_integer,
    spell_call,
    takes,
)
from stepfold.errors import DataError, refuse, warn
from stepfold.inspect.compiled import CompiledStep
from stepfold.loop.feed import WHOLE_DATA, BatchFeed, check_batches, owned
from stepfold.loop.metrics import are_metrics, merge_metrics, metric_values
from stepfold.optim.ema import get_ema
from stepfold.sharding.place import place_batch, process_mesh

if TYPE_CHECKING:
    from clu.metrics import Metric

_END = object()
_MERGE_EVERY = 64  # results that are kept on the device before they are fetched together


def evaluate(
    eval_step: Callable[[Any, Any], Mapping[str, "Metric"]], state: Any, batches: Iterable[Any]
) -> dict[str, float]:
    """Evaluate a state on batches; return one number for each metric.

    Totals and weights are merged, never the means of batches, and added up in float64. The result
    does not depend on how the examples are batched, padded under a mask, or sharded.

    Args:
      eval_step: an `EvalFn`, as `make_eval_step` returns, jitted or not. It is compiled for each
        shape of batch, so only once if the last batch is padded.
      state: the state. If it is on a mesh, batches on the host are sharded over its axes "dp" (or
        "data") and "fsdp"; for other axes, shard the batches yourself.
      batches: the batches; all of them are used.

    Raises:
      ConfigError: if `batches` is not an iterable of batches or has no end, if the state was
        donated, or if the step does not return metrics.
      DataError: if there is no batch, or if processes that share the state have different numbers
        of batches.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf
    >>> state = sf.init_state({"w": jnp.ones(())}, optax.sgd(0.1), jax.random.key(0))
    >>> measure = sf.make_eval_step(lambda p, b, key: sf.mean(p["w"] * b["x"], b["mask"]))
    >>> data = {"x": np.arange(10.0)}
    >>> sf.evaluate(measure, state, sf.batches(data, 4, epochs=1, remainder="pad"))
    {'loss': 4.5}
    """
    return evaluate_at(None, eval_step, state, batches)


def evaluate_at(
    position: Position | None,
    eval_step: Callable[..., Any],
    state: Any,
    batches: Iterable[Any],
) -> dict[str, float]:
    """Evaluate as `evaluate` does; each batch counts as progress in `position`."""
    check_batches(batches, make=WHOLE_DATA)
    step = jitted("eval_step", eval_step)
    check_not_donated(state)
    check_end("evaluate", batches)
    mesh = mesh_of(state)
    metrics: list[Any] = []
    try:
        for batch in placed_batches("evaluate", batches, mesh, position):
            result = step(state, batch)
            if not are_metrics(result):
                got = tree.describe_value(result)
                advice = "make it with make_eval_step, or return {name: sf.mean(values, mask)}"
                refuse("evaluate", "metrics by name from the step", got, advice)
            metrics.append(result)
            if len(metrics) == _MERGE_EVERY:
                metrics = [merge_metrics(metrics)]
    except DataError:
        jax.block_until_ready(metrics)  # if this process exited first, others would hang in them
        raise
    if not metrics:
        refuse_empty("evaluate")
    return metric_values(merge_metrics(metrics))


def jitted(argument: str, step: Any) -> Callable[[Any, Any], Any]:
    """Compile a function of a state and a batch on the host, unless it is compiled."""
    read_function(argument, step, "a function of a state and a batch")
    is_jitted = isinstance(step, CompiledStep) or hasattr(step, "lower")
    compiled = step if is_jitted else jax.jit(step)
    settings: Any = jax.config
    is_guarded = settings.jax_transfer_guard_host_to_device == "disallow"

    def call(state: Any, batch: Any) -> Any:
        with allow_transfers("host_to_device") if is_guarded else nullcontext():
            return compiled(state, batch)

    return call


def check_end(function: str, batches: Any) -> None:
    """Refuse endless batches."""
    if getattr(batches, "endless", False):
        got = f"{tree.describe_value(batches)} without an end"
        refuse(function, "batches that end", got, f"give {WHOLE_DATA}")


def refuse_empty(function: str) -> NoReturn:
    """Refuse an iterable without batches."""
    advice = "an iterator that was used up has to be made again for each evaluation"
    refuse(function, "at least one batch", "none", advice, kind=DataError)


def placed_batches(
    function: str,
    batches: Iterable[Any],
    mesh: Mesh | None,
    position: Position | None = None,
) -> Iterator[Any]:
    """Yield batches, on the mesh if there is one; all of its processes get the same number."""
    if mesh is not None and mesh.is_multi_process:
        ready = _in_step(function, batches, position)
    else:
        ready = owned(batches)
    for batch in ready:
        yield batch if mesh is None else place_batch(batch, mesh)


def _in_step(function: str, batches: Iterable[Any], position: Position | None) -> Iterator[Any]:
    """Yield batches; if some processes have fewer, raise in all of them instead of hanging.

    If the numbers of batches are unknown, the processes vote on each batch. A vote is read after
    the next batch is pulled, and dispatched before the step of the previous batch, so that the
    device has work while a process waits for the vote.
    """
    expected = "the same number of batches in every process"
    values = KeyValues(function)
    feed = BatchFeed(batches)
    counts = values.gather(feed.batches_left(feed.first_used), "the start of it")
    if None not in counts:
        if len(set(counts)) > 1:
            advice = "sf.batches with the same arguments gives that"
            refuse(function, expected, f"{counts}", advice, kind=DataError)
        yield from _counted(batches, position)
        return
    iterator = itertools.chain(_counted(batches, position), itertools.repeat(_END))
    gather = Gather()

    def pull() -> tuple[Any, jax.Array]:
        batch = next(iterator)
        return batch, gather(np.array([batch is not _END]))

    following = pull()
    for number in itertools.count():
        (batch, votes), following = following, pull()
        has_batch = np.asarray(votes.addressable_data(0))[:, 0]
        if not has_batch.all():
            following[1].block_until_ready()  # as in `evaluate`
        if not has_batch.any():
            return
        if not has_batch.all():
            ended = spell_processes(np.flatnonzero(~has_batch).tolist())
            got = f"{number} in {ended}, and more in the others"
            refuse(function, expected, got, "give every process the same number", kind=DataError)
        yield batch


def _counted(batches: Iterable[Any], position: Position | None) -> Iterator[Any]:
    """Yield batches, each of which counts as progress."""
    for batch in owned(batches):
        if position is not None:
            position.move("a batch of an evaluation", position.step)
        yield batch


class Gather:
    """Gather a small row from each process, on one device per process."""

    def __init__(self) -> None:
        mesh = process_mesh()
        self._sharding = NamedSharding(mesh, PartitionSpec("process"))
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._copy = jax.jit(lambda rows: rows, out_shardings=everywhere)

    def __call__(self, row: np.ndarray) -> jax.Array:
        shape = (len(self._sharding.device_set), len(row))
        rows = jax.make_array_from_process_local_data(self._sharding, row[None], shape)
        gathered: jax.Array = self._copy(rows)
        return gathered


def mesh_of(state: Any) -> Mesh | None:
    """Return the mesh of several devices that a state is on, or None."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(state)]
    meshes = {sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)}
    large = [mesh for mesh in meshes if isinstance(mesh, Mesh) and mesh.size > 1]
    return large[0] if large else None


@dataclass(frozen=True)
class Evaluation:
    """What `fit` evaluates during a run, on which data, and when.

    Every evaluation also runs at the end of the run.

    Attributes:
      measure: an `EvalFn`; or, without batches, any function of the state that returns numbers by
        name, such as one that generates text and scores it.
      batches: an iterable of batches, such as a list or `sf.batches(…, epochs=1)`, or a function
        that makes one. Each evaluation reads an iterator from its present position.
      every: the steps between evaluations, if any.
      every_epochs: the epochs of the training data between evaluations, if any.
      at_start: whether to evaluate before the first step too.
      ema: whether to evaluate the average that `ema_params` keeps, in place of the parameters. It
        is found at any depth of the optimizer's state, as `get_ema` does.
      name: the prefix of the metrics, as in `eval/loss`, and the `kind` of the events.
      remote: whether another process makes it, by `evaluate_run`. `fit` then saves each step at
        which it is due, keeps that step until its result has arrived, and reads the result at its
        next event. In version 0.2 this was `elsewhere`, which still works with a
        DeprecationWarning.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf
    >>> state = sf.init_state({"w": jnp.ones(())}, optax.sgd(0.1), jax.random.key(0))
    >>> measure = sf.make_eval_step(lambda p, b, key: sf.mean(p["w"] * b["x"]))
    >>> batches = sf.batches({"x": np.arange(10.0)}, 5, epochs=1)
    >>> sf.Evaluation(measure, batches, every=100)(state)
    {'eval/loss': 4.5}
    >>> sf.Evaluation(lambda state: {"norm": optax.tree.norm(state.params)})(state)
    {'eval/norm': 1.0}
    """

    measure: Callable[..., Any]
    batches: Callable[[], Iterable[Any]] | Iterable[Any] | None = None
    _: KW_ONLY
    every: int | None = None
    every_epochs: int | None = None
    at_start: bool = False
    ema: bool = False
    name: str = "eval"
    remote: bool = False
    elsewhere: InitVar[bool | None] = None
    # The position of an iterator at which each evaluation begins.
    _start: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self, elsewhere: bool | None) -> None:
        if elsewhere is not None:
            warn("Evaluation: elsewhere=… is now remote=…", DeprecationWarning)
            object.__setattr__(self, "remote", elsewhere)
        read_function("measure", self.measure)
        if self.batches is not None and not callable(self.batches):
            check_batches(self.batches, make=WHOLE_DATA)
            check_end("evaluate", self.batches)
            if iter(self.batches) is self.batches:
                self._read_start(self.batches)
        check_flags(at_start=self.at_start, ema=self.ema, remote=self.remote)
        for period in ("every", "every_epochs"):
            if (value := getattr(self, period)) is not None:
                object.__setattr__(self, period, read_integer(period, value))
        if not isinstance(self.name, str) or self.name.splitlines() != [self.name]:
            refuse("name", "a string of one line", repr(self.name))
        wanted = "state" if self.batches is None else "state, batch"
        if not takes(self.measure, 1 + (self.batches is not None)):
            advice = "give sf.make_eval_step(loss_fn), and batches, as sf.batches(…, epochs=1)"
            refuse("measure", f"a function ({wanted}) -> metrics", spell_call(self.measure), advice)

    def _read_start(self, batches: Any) -> None:
        if not hasattr(batches, "get_state") or not hasattr(batches, "set_state"):
            expected = "some that can be read again for each evaluation"
            advice = "give a list, sf.batches(…, epochs=1), or a function that makes them"
            refuse("batches", expected, batches, advice)
        object.__setattr__(self, "_start", copy.deepcopy(batches.get_state()))

    def _make_batches(self) -> Iterable[Any]:
        batches: Any = self.batches
        if callable(batches):
            return batches()  # type: ignore[no-any-return]
        if self._start is not None:
            batches.set_state(copy.deepcopy(self._start))
        return batches  # type: ignore[no-any-return]

    def check_state(self, state: Any) -> None:
        """Refuse a state without an average if `ema` needs one."""
        if self.ema:
            read_instance(f"{self.name}: ema=True", state, TrainState, "a TrainState")
            jax.eval_shape(get_ema, state)

    def __call__(self, state: Any, position: Position | None = None) -> dict[str, float]:
        if self.ema:
            check_not_donated(state)
            self.check_state(state)
            state = state._replace(params=jax.jit(get_ema)(state))
        try:
            if self.batches is not None:
                batches = self._make_batches()
                metrics = evaluate_at(position, self.measure, state, batches)
                return {f"{self.name}/{name}": value for name, value in metrics.items()}
            numbers = self.measure(state)
        except StopIteration as error:  # would pass for the end of the training data
            raise DataError(
                f"{self.name}: the evaluation raised StopIteration; make the iterator again for "
                "each evaluation"
            ) from error
        read_instance(self.name, numbers, Mapping, "numbers by name")
        return metric_values(numbers, f"{self.name}/")
