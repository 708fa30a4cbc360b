"""Evaluate the checkpoints of a run in another process, which only reads them."""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax

from stepfold import tree
from stepfold.checkpoint.claims import Lease
from stepfold.checkpoint.restore import restore_from
from stepfold.checkpoint.results import (
    LEASES,
    Result,
    add_result,
    find_results,
    is_saved,
    read_result,
    read_run,
)
from stepfold.checkpoint.store import Store, complete_steps, open_store, open_to_read
from stepfold.core.optimizer import find_nodes
from stepfold.core.processes import agreement, broadcast_from_first
from stepfold.core.state import TrainState
from stepfold.core.validation import absolute_path, check_flags, is_url, read_positive
from stepfold.errors import CheckpointError, TreeMismatchError, refuse, warn
from stepfold.loop.evaluate import Evaluation
from stepfold.optim.ema import EmaParamsState
from stepfold.runs.arguments import check_evaluations
from stepfold.runs.info import read_run_info

Steps = Literal["newest", "all"]
_SHARE = 0.05  # the largest share of the time to spend on looking for checkpoints
_PAUSE, _MAX_PAUSE = 0.1, 60.0  # seconds between two looks
_UNFINISHED = ("signal", "error", "go_back")  # to be resumed


class RunEvaluation(NamedTuple):
    """What a call of `evaluate_run` has done.

    Attributes:
      metrics: the numbers of each step that it evaluated, as they are in the history of the run.
      left_out: the steps that it left out, because a newer one was there.

    >>> import stepfold as sf
    >>> found = sf.runs.RunEvaluation(metrics={20: {"eval/loss": 0.5}}, left_out=[10])
    >>> found.metrics[20]["eval/loss"]
    0.5
    """

    metrics: dict[int, dict[str, float]]
    left_out: list[int]


def evaluate_run(
    run_dir: str | os.PathLike[str],
    build: Any,
    evaluations: Evaluation | Sequence[Evaluation],
    *,
    steps: Steps = "newest",
    follow: bool = True,
    timeout: float | None = None,
) -> RunEvaluation:
    """Evaluate each checkpoint of a run as it appears, in another process than `fit`.

    It restores the parameters alone, on the devices of this process, and changes no checkpoint. A
    result is written once next to the checkpoints, whichever process is killed. The bits are those
    of the same evaluation in `fit`, on the same kind of devices. If `fit` has the evaluation with
    `remote=True`, the numbers join its history, its files, its hooks and the ranking of its
    checkpoints. Of any other run, each checkpoint is evaluated, and only the ranking changes.

    It returns when the run has ended and all of its steps are evaluated. A run that a signal, an
    error or a kill has interrupted has not ended, since it may be resumed. The step that is being
    evaluated is not deleted by `Checkpoints(keep=…)`. Run one such process for an evaluation; a
    second one would only repeat its work. With several processes, all of them call this. On the
    command line it is `python -m stepfold evaluate script.py:make RUN_DIR`, where `make()` returns
    the state and the evaluations.

    Args:
      run_dir: the run directory, or the directory or URL of the checkpoints. It may be empty still.
      build: a state like that of the run, concrete or abstract (`jax.eval_shape`), or a function
        that returns one. Its shardings decide on which devices the parameters are. The optimizer
        need not be that of the run, except for an `Evaluation` with `ema=True`.
      evaluations: an `Evaluation`, or several. Their names are those in `fit`; `fit` alone decides
        at which steps they are due.
      steps: which steps to evaluate if several wait: "newest" leaves out all but the newest one,
        "all" evaluates each in order.
      follow: whether to wait for more checkpoints until the run ends.
      timeout: the number of seconds without a new checkpoint after which to return.

    Returns:
      The numbers of the steps that this call evaluated, and the steps that it left out.

    Raises:
      ConfigError: if an argument is not as described.
      TreeMismatchError: if the parameters of the run do not match the state.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> state = sf.init_state({"w": jnp.ones(())}, optax.sgd(0.1), jax.random.key(0))
    >>> for step in (2, 4):
    ...     sf.save(folder, state._replace(params={"w": jnp.float32(step)}), step=step)
    >>> measure = sf.make_eval_step(lambda p, x, key: sf.mean(p["w"] * x))
    >>> evaluation = sf.Evaluation(measure, [np.ones(4, np.float32)])
    >>> sf.evaluate_run(folder, jax.eval_shape(lambda: state), evaluation, follow=False)
    RunEvaluation(metrics={4: {'eval/loss': 4.0}}, left_out=[2])
    """
    metrics: dict[int, dict[str, float]] = {}
    left_out: list[int] = []
    options: Any = {"steps": steps, "follow": follow, "timeout": timeout}
    for step, numbers in follow_run(run_dir, build, evaluations, **options):
        if numbers is None:
            left_out.append(step)
        else:
            metrics[step] = {**metrics.get(step, {}), **numbers}
    return RunEvaluation(metrics, left_out)


def follow_run(
    run_dir: Any,
    build: Any,
    evaluations: Any,
    *,
    steps: Steps = "newest",
    follow: bool = True,
    timeout: float | None = None,
    on_wait: Callable[[str], None] | None = None,
) -> Iterator[tuple[int, dict[str, float] | None]]:
    """Do what `evaluate_run` does, and yield each step with its numbers; None if left out.

    `on_wait` is called with the location of the checkpoints when the first wait begins.
    """
    check_flags(follow=follow)
    if steps not in ("newest", "all"):
        refuse("steps", "'newest' or 'all'", repr(steps))
    if timeout is not None:
        read_positive("timeout", timeout)
    if not is_url(run_dir):
        run_dir = absolute_path("run_dir", run_dir)
    like = build() if callable(build) else build
    items = check_evaluations(evaluations, like)
    return _Follower(run_dir, like, items, takes_all=steps == "all").follow(
        timeout=timeout if follow else 0.0, on_wait=on_wait
    )


class _Due(NamedTuple):
    """What to do with a step."""

    step: int
    identity: str
    names: list[str]  # of the evaluations to make
    left_out: list[str]


class _Follower:
    """The checkpoints of a run, and the evaluations that they still need."""

    def __init__(
        self, run_dir: Any, like: Any, evaluations: Sequence[Evaluation], *, takes_all: bool
    ) -> None:
        self._run_dir, self._takes_all = run_dir, takes_all
        self._evaluations = {evaluation.name: evaluation for evaluation in evaluations}
        has_ema = any(evaluation.ema for evaluation in evaluations)
        self._like, self._parts = _parts_of(like, has_ema=has_ema)
        self._store: Store = open_to_read(run_dir)
        self._lease: Lease | None = None
        self._done: set[tuple[int, str, str]] = set()  # left out, or not readable
        self._whole = set[Result]()  # results that were read, and are not damaged
        self._has_warned = False

    def follow(
        self, timeout: float | None, on_wait: Callable[[str], None] | None
    ) -> Iterator[tuple[int, dict[str, float] | None]]:
        """Yield the steps until the run has ended, or nothing new came for `timeout` seconds."""
        try:
            since = time.monotonic()
            while True:
                start = time.monotonic()
                due, has_ended = self._look()
                for each in due:
                    if each.left_out:
                        yield each.step, None
                due = [each for each in due if each.names]
                if due:
                    yield from self._evaluate(due[0])
                    since = time.monotonic()
                    continue
                idle = time.monotonic() - since
                is_over = has_ended or (timeout is not None and idle >= timeout)
                if broadcast_from_first([is_over])[0]:
                    return
                if on_wait is not None:
                    on_wait(self._store.location)
                    on_wait = None
                cost = (time.monotonic() - start) / _SHARE
                time.sleep(min(max(_PAUSE, cost), _MAX_PAUSE, timeout or _MAX_PAUSE))
        finally:
            if self._lease is not None:
                self._lease.release()

    def _look(self) -> tuple[list[_Due], bool]:
        """Return the steps to evaluate, and whether the run has ended, as process 0 sees them."""
        due, has_ended = list[_Due](), False
        with agreement(f"{self._run_dir}: cannot be read"):
            if jax.process_index() == 0:
                if not self._store.steps():
                    self._store = find_store(self._run_dir)
                self._warn_of_names()
                has_ended = self._has_ended()  # read before the steps: none comes later
                due = self._find_due()
                self._hold([each.step for each in due if each.names])
        answer: list[Any] = [self._store.location, has_ended, due]
        location, has_ended, due = broadcast_from_first(answer)
        if location != self._store.location:
            self._store = open_store(location)
        return [_Due(*each) for each in due], has_ended

    def _warn_of_names(self) -> None:
        """Warn once of evaluations that are not among those that the run awaits."""
        awaited = read_run(self._store).get("names", [])
        unknown = [name for name in self._evaluations if name not in awaited]
        if awaited and unknown and not self._has_warned:
            self._has_warned = True
            text = (
                f"evaluations: expected names that the run awaits, {', '.join(awaited)}, got "
                f"{', '.join(unknown)}; such numbers rank checkpoints, but are not in its history"
            )
            warn(text, RuntimeWarning)

    def _hold(self, steps: list[int]) -> None:
        """Hold a lease on steps: the run does not delete them, and waits for it at its end."""
        if not self._store.steps():
            return
        if self._lease is None:
            self._lease = Lease(self._store, LEASES)
        self._lease.hold({"names": [*self._evaluations], "steps": steps})

    def _find_due(self) -> list[_Due]:
        """List the steps in order, with the evaluations of each that have no result yet."""
        results, awaited = {*find_results(self._store)}, read_run(self._store).get("names", [])
        complete = complete_steps(self._store)
        last: dict[str, int] = {}  # the newest step of each evaluation, due or done
        due = []
        for step, metadata in complete.items():
            names = []
            for name in self._evaluations:
                if name in metadata.awaits or name not in awaited:
                    last[name] = step
                    result = Result(name, step, metadata.identity)
                    is_done = result in results and self._is_whole(result)
                    if not is_done and (step, metadata.identity, name) not in self._done:
                        names.append(name)
            due.append(_Due(step, metadata.identity, names, []))
        if self._takes_all:
            return [each for each in due if each.names]
        split = []
        for each in due:
            names = [name for name in each.names if last[name] == each.step]
            left_out = [name for name in each.names if name not in names]
            self._done |= {(each.step, each.identity, name) for name in left_out}
            split.append(each._replace(names=names, left_out=left_out))
        return [each for each in split if each.names or each.left_out]

    def _is_whole(self, result: Result) -> bool:
        """Read a result once, and delete it if it is damaged, to make it again."""
        if result not in self._whole:
            if read_result(self._store, result) is None:
                self._store.delete_note(result.path)
                return False
            self._whole.add(result)
        return True

    def _evaluate(self, due: _Due) -> Iterator[tuple[int, dict[str, float]]]:
        """Evaluate a step, unless it is deleted before it is restored."""
        try:
            restored, _ = restore_from(
                [self._store], self._like, step=due.step, fall_back=False, parts=self._parts
            )
        except TreeMismatchError:
            raise
        except CheckpointError as error:
            if self._is_saved(due):
                self._done |= {(due.step, due.identity, name) for name in due.names}
                text = f"step {due.step} is not evaluated, since it cannot be restored: {error}"
                warn(text, RuntimeWarning)
            return
        if not self._is_saved(due):
            return  # it was saved again with other values
        state = restored.state
        if isinstance(state, TrainState):
            state = state._replace(opt_state=_averages_of(state))  # the rest was not restored
        for name in due.names:
            metrics = self._evaluations[name](state)
            is_first = False
            with agreement(f"{self._store.location}: not evaluated"):
                if jax.process_index() == 0:
                    result = Result(name, due.step, due.identity)
                    is_first = add_result(self._store, result, metrics)
            if broadcast_from_first([is_first])[0]:
                yield due.step, metrics

    def _is_saved(self, due: _Due) -> bool:
        """Whether the checkpoint still exists; the answer is the same in all processes."""
        return broadcast_from_first([is_saved(self._store, due.step, due.identity)])[0]

    def _has_ended(self) -> bool:
        if note := read_run(self._store):
            return bool(note.get("has_ended"))
        if is_url(self._run_dir):
            return False
        attempts = read_run_info(self._run_dir).get("attempts") or [{}]
        stop = attempts[-1].get("stop")
        return stop is not None and stop["kind"] not in _UNFINISHED


def find_store(run_dir: Any) -> Store:
    """Open the checkpoints of a run, in the directory that `run.json` names, if any."""
    if not is_url(run_dir):
        arguments: Mapping[str, Any] = read_run_info(run_dir).get("arguments") or {}
        directory = (arguments.get("checkpoints") or {}).get("directory")
        if directory is not None:
            return open_store(directory if is_url(directory) else run_dir / directory)
    return open_to_read(run_dir)


def _parts_of(state: Any, *, has_ema: bool) -> tuple[Any, list[str] | None]:
    """Return the state to restore, and its parts: all but the optimizer, except for an average."""
    if not isinstance(state, TrainState):
        return state, None
    parts = ["params", "model_state", "step", "key"]
    if not has_ema:
        return state._replace(opt_state=()), parts
    averages = {id(leaf) for leaf in jax.tree.leaves(_averages_of(state))}
    names = [name for name, leaf in tree.named_leaves(state) if id(leaf) in averages]
    return state, [*parts, *map(re.escape, names)]


def _averages_of(state: TrainState) -> list[Any]:
    return [node._replace(inner=()) for node in find_nodes(state.opt_state, EmaParamsState)]
