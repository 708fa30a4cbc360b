"""Laws for one's own training program: checks of a loss, of batches, of resuming, of layouts.

Each check raises a `LawError` that lists the laws that do not hold, and what to do, so that it fits
a test or a notebook. The laws are those that `fit` relies on: a loss is totals and weights, batch
*i* is a function of *i*, a run that is cut continues with the same bits, and a mesh changes at most
the rounding.
"""

import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.test_util import check_grads

from stepfold import tree
from stepfold.checkpoint.leaves import is_key
from stepfold.core.gradients import make_grad
from stepfold.core.loss import total_of
from stepfold.core.precision import Precision
from stepfold.core.validation import read_function, read_integer, read_positive
from stepfold.data.shared_memory import dump
from stepfold.data.workers import workers as in_workers
from stepfold.debug.bisect import find_bad_rows
from stepfold.debug.diff import diff
from stepfold.errors import ConfigError, StepfoldError, refuse
from stepfold.runs.report.read import read_metrics_file
from stepfold.sharding.place import place, shard_batch
from stepfold.sharding.plan import make_sharding
from stepfold.writers.jsonl import last_step

__all__ = ("LawError", "check_batches", "check_layouts", "check_loss", "check_resume")


def __dir__() -> list[str]:
    return list(__all__)


class LawError(StepfoldError, AssertionError):
    """Raised by a check of a program, with the laws that do not hold.

    >>> from stepfold import testing
    >>> issubclass(testing.LawError, AssertionError)
    True
    """


class _Laws:
    """The laws that a check has tried, and those that do not hold."""

    def __init__(self, check: str) -> None:
        self._check, self._names, self._problems = check, list[str](), list[str]()

    def add(self, name: str, problem: str, advice: str) -> None:
        """Add a law; a problem says why it does not hold."""
        self._names.append(name)
        if problem:
            self._problems.append(f"{name}: {problem}; {advice}")

    def end(self) -> list[str]:
        """Return the names of all laws, or raise if one does not hold."""
        if self._problems:
            count = len(self._problems)
            title = f"{count} law{'s do' if count > 1 else ' does'} not hold"
            raise LawError("\n  ".join([f"{self._check}: {title}", *self._problems]))
        return self._names


def check_loss(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    key: Any = None,
    stateful: bool = False,
    model_state: Any = (),
    rtol: float = 1e-4,
    bf16: float | None = 0.1,
) -> list[str]:
    """Check that a loss function gives the same for however its batch is divided and padded.

    - *deterministic*: two traces with one key give the same bits.
    - *order*: the order of the rows does not matter.
    - *split*: gradients, loss and metrics of parts of the batch, as `accumulate=n` merges them, are
      those of the batch, so ragged batches and several processes are exact too.
    - *padding*: rows whose mask is false do not matter, if the batch has a `"mask"`.
    - *finite* and *slope*: gradients are finite, and those of finite differences in float64.
    - *bf16*: parameters and batch in bfloat16 change the loss by little.

    A loss that depends on its key, as with dropout, draws other numbers for other rows. The laws of
    rows and slopes are then not checked: check it again with dropout turned off. Whether a second
    batch has the same shapes, so that nothing compiles again, is for `check_batches` to say.

    Args:
      loss_fn: a `LossFn`.
      params: parameters.
      batch: a batch of at least two rows.
      key: the key; by default `jax.random.key(0)`.
      stateful: whether the loss carries a model state. The laws of rows and slopes are then not
        checked.
      model_state: the model state.
      rtol: the relative rounding that is allowed.
      bf16: the relative change of the loss in bfloat16 that is allowed; None checks none.

    Returns:
      The names of the laws that were checked, and hold.

    Raises:
      LawError: with each law that does not hold, by how much, and the rows or terms that show it.

    >>> import jax.numpy as jnp, stepfold as sf
    >>> from stepfold import testing
    >>> batch = {"x": jnp.arange(8.0), "mask": jnp.array([1, 1, 1, 1, 1, 1, 0, 0], bool)}
    >>> def loss_fn(params, batch, key):
    ...     return sf.mean((params * batch["x"] - 1.0) ** 2, batch["mask"])
    >>> testing.check_loss(loss_fn, jnp.array(0.3), batch)
    ['deterministic', 'finite', 'order', 'split', 'padding', 'slope', 'bf16']
    >>> def mean_of_all(params, batch, key):
    ...     return sf.mean((params * batch["x"] - 1.0) ** 2)
    >>> testing.check_loss(mean_of_all, jnp.array(0.3), batch)
    Traceback (most recent call last):
    ...
    stepfold.testing.LawError: check_loss: 1 law does not hold
      padding: ...
    """
    read_function("loss_fn", loss_fn, "a loss function (params, batch, key) -> …")
    key = jax.random.key(0) if key is None else key
    count = _row_count(batch)
    laws = _Laws("check_loss")

    def trace(**options: Any) -> Callable[..., dict[str, Any]]:
        run = _trace_loss(make_grad(loss_fn, stateful=stateful, **options), model_state)
        return lambda batch, key=key: run(params, batch, key)

    evaluate = trace()

    def add(name: str, find_problem: Callable[[Any], str], what: str, advice: str) -> None:
        """Add a law of a batch, and name rows that show that it does not hold."""
        if problem := find_problem(batch):
            rows, _ = find_bad_rows(batch, lambda part: bool(find_problem(part)))
            shown = f", see rows {', '.join(map(str, rows[0]))}" if rows else ""
            problem = f"{problem} {what}{shown}"
        laws.add(name, problem, advice)

    problem = _difference(evaluate(batch), trace()(batch), None, " of two traces with one key")
    advice = "draw random numbers from the key, not from numpy or a counter"
    laws.add("deterministic", problem, advice)
    find_nonfinite: Any = lambda batch: ", ".join(_nonfinite(evaluate(batch))[:4])
    add("finite", find_nonfinite, "is NaN or inf", "let sf.debug.replay find the operation")
    if find_nonfinite(batch):
        return laws.end()
    other_key = evaluate(batch, jax.random.fold_in(key, 1))
    if not (stateful or _difference(evaluate(batch), other_key)):
        take: Any = lambda batch, rows: jax.tree.map(lambda x: x[rows] if np.ndim(x) else x, batch)
        order = np.random.default_rng(0).permutation(count)
        add(
            "order",
            lambda batch: _difference(evaluate(batch), evaluate(take(batch, order)), rtol),
            "of the same rows in another order",
            "let no row depend on its place, and draw random numbers from the key alone",
        )
        parts = next(each for each in range(min(3, count), count + 1) if count % each == 0)
        split = trace(accumulate=parts)
        add(
            "split",
            lambda batch: _difference(evaluate(batch), split(batch), rtol),
            f"with accumulate={parts}",
            "return sf.mean(values, where), a total and a weight, not a mean of means",
        )
        if isinstance(batch, Mapping) and "mask" in batch:
            add(
                "padding",
                lambda batch: _difference(evaluate(batch), evaluate(_padded(batch)), rtol),
                "with two more rows whose mask is false",
                "give the mask to each mean, as in sf.mean(values, batch['mask'])",
            )
        _check_slope(laws, loss_fn, params, batch, key)
    if bf16 is not None:
        losses = []
        for function in (loss_fn, Precision(jnp.bfloat16).applied_to(loss_fn)):
            run = jax.jit(make_grad(function, stateful=stateful))
            losses.append(float(total_of(run(params, batch, key, model_state)[1])))
        _check_bf16(laws, losses[0], losses[1], bf16)
    return laws.end()


def _trace_loss(grad: Callable[..., Any], model_state: Any) -> Callable[..., dict[str, Any]]:
    """Compile a loss and its gradient, and name what they return."""
    means: Any = lambda metrics: {name: each.compute() for name, each in metrics.items()}

    @jax.jit
    def run(params: Any, batch: Any, key: Any) -> dict[str, Any]:
        grads, terms, metrics, _ = grad(params, batch, key, model_state)
        return {"gradient": grads, "term": means(terms), "metric": means(metrics)}

    return run


def _check_bf16(laws: _Laws, exact: float, narrow: float, limit: float) -> None:
    """Compare the loss in bfloat16 with that in float32."""
    is_close = abs(narrow - exact) <= limit * max(abs(exact), 1e-6)
    problem = f"the loss is {narrow:.4g} in bfloat16, and {exact:.4g} in float32"
    laws.add("bf16", "" if is_close else problem, "compute sums, softmax and norms in float32")


def _check_slope(laws: _Laws, loss_fn: Any, params: Any, batch: Any, key: Any) -> None:
    """Compare the gradient with finite differences in float64, in a random direction."""
    with jax.enable_x64(True):
        widen: Any = lambda x: jnp.asarray(x, jnp.float64) if tree.is_float(x) else x
        params, batch = jax.tree.map(widen, (params, batch))
        loss = jax.jit(lambda params: total_of(make_grad(loss_fn)(params, batch, key, ())[1]))
        if loss(params).dtype != jnp.float64:
            return  # the loss computes in a narrower dtype
        problem = ""
        try:
            check_grads(loss, (params,), 1, ["rev"], atol=1e-6, rtol=1e-3, eps=1e-6)
        except AssertionError:
            problem = "the gradient is not the slope that differences in float64 give"
    advice = "look for stop_gradient, rounding and custom derivatives; a kink may do it too"
    laws.add("slope", problem, advice)


def check_batches(make: Callable[[], Any], *, steps: int = 8, workers: int = 0) -> list[str]:
    """Check that batch *i* is a function of *i*: read twice, resumed, by other workers.

    - *again*: a second iterator gives the same batches.
    - *resume*: an iterator that gets the position of another one continues with its batches.
    - *source*: reading changes nothing, so a position that was read once gives the same again. A
      transform that writes into its example breaks this.
    - *form*: all batches have one structure, and the shapes and dtypes of the first.
    - *workers*: worker processes make the same batches.

    Args:
      make: makes new batches, such as `lambda: sf.batches(data, 32, seed=0)`.
      steps: the number of batches to read.
      workers: the number of processes for the last law; 0 leaves it out.

    Returns:
      The names of the laws that were checked, and hold.

    Raises:
      LawError: with each law that does not hold, and the first batch that shows it.

    >>> import numpy as np, stepfold as sf
    >>> from stepfold import testing
    >>> data = {"x": np.arange(32, dtype=np.float32)}
    >>> testing.check_batches(lambda: sf.batches(data, 4, seed=0))
    ['again', 'form', 'resume', 'source']
    >>> stream = iter(np.arange(99, dtype=np.float32).reshape(33, 3))
    >>> testing.check_batches(lambda: stream)
    Traceback (most recent call last):
    ...
    stepfold.testing.LawError: check_batches: 1 law does not hold
      again: ...
    """
    read_function("make", make, "a function () -> batches")
    read_integer("steps", steps, 2)
    laws, first = _Laws("check_batches"), _read(make(), steps)
    if len(first) < 2:
        refuse("make", "batches, at least two", f"{len(first)}")
    problem = _different_batch(first, _read(make(), steps))
    advice = "make a new source each time, and take no random numbers but those of the seed"
    laws.add("again", problem, advice)
    forms = [tree.diff(first[0], batch, f"batch {n}")[:1] for n, batch in enumerate(first)]
    if len(first) < steps:  # the last one may be shorter
        del forms[-1]
    advice = "pad or drop what is left over, or the step compiles again"
    laws.add("form", next((lines[0] for lines in forms if lines), ""), advice)
    if not hasattr(make(), "get_state"):
        return laws.end()
    problems = []
    for cut in sorted({1, len(first) // 2, len(first) - 1}):
        stopped, resumed = make(), make()
        _read(stopped, cut)
        resumed.set_state(stopped.get_state())
        problem = _different_batch(first[cut:], _read(resumed, len(first) - cut))
        problems += [f"{problem} after {cut}"] if problem else []
    laws.add("resume", "".join(problems[:1]), "let get_state hold all that decides the next batch")
    batches = make()
    start = batches.get_state()
    _read(batches, len(first))
    batches.set_state(start)
    problem = _different_batch(first, _read(batches, len(first)))
    advice = "let transforms and collate return new arrays, and not write into those they get"
    laws.add("source", problem, advice)
    if workers:
        problem = _different_batch(first, _read(in_workers(make(), workers), len(first)))
        advice = "let a batch depend on its index alone, not on what a process has read before"
        laws.add("workers", problem, advice)
    return laws.end()


def _read(batches: Any, count: int) -> list[Any]:
    """Read batches, and copy them, since their arrays may be filled again."""
    copy: Any = lambda x: np.array(x) if tree.is_array(x) else x
    return [jax.tree.map(copy, batch) for _, batch in zip(range(count), batches, strict=False)]


def _different_batch(wanted: Sequence[Any], got: Sequence[Any]) -> str:
    """Say which of two lists of batches is the first that differs in a bit, or nothing."""
    for number, pair in enumerate(zip(wanted, got, strict=False)):
        if problem := _difference(*pair, None, f" in batch {number}"):
            return problem
    return f"{len(got)} batches, not {len(wanted)}" if len(wanted) != len(got) else ""


def check_layouts(
    step: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    batch: Any,
    meshes: Sequence[Mesh],
    *,
    rules: Any = None,
    rtol: float | None = 1e-4,
) -> list[str]:
    """Check that a step gives the same on each mesh, to rounding or to the bit.

    Args:
      step: a `StepFn`, un-jitted.
      state: the state, of one device; it is not donated.
      batch: a batch on the host.
      meshes: the meshes to compare with one device.
      rules: rules for `make_sharding`; by default its own.
      rtol: the relative rounding that is allowed; None asks for equal bits, as `ordered` gives.

    Returns:
      The shapes of the meshes that were compared.

    Raises:
      LawError: with the mesh and the first leaf that differs.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf
    >>> from stepfold import testing
    >>> step = sf.make_train_step(lambda p, x, key: sf.mean(p * x), tx := optax.sgd(0.1))
    >>> state = sf.init_state(jnp.ones(8), tx, jax.random.key(0))
    >>> testing.check_layouts(step, state, np.ones((8, 8), np.float32), [sf.make_mesh()])
    [...]
    """
    read_function("step", step, "a step (state, batch) -> …")
    if rtol is not None:
        read_positive("rtol", rtol, allow_zero=True)
    laws, wanted = _Laws("check_layouts"), jax.device_get(jax.jit(step)(state, batch))
    for mesh in meshes:
        plan = make_sharding(state, mesh) if rules is None else make_sharding(state, mesh, rules)
        got = jax.device_get(jax.jit(step)(place(state, plan), shard_batch(batch, mesh)))
        problem = _difference(wanted, got, rtol, " of one device")
        advice = "let no part of the step depend on how rows or parameters are divided"
        laws.add(f"mesh {dict(mesh.shape)}", problem, advice)
    return laws.end()


def check_resume(
    run: Callable[[str], Any], *, cuts: int = 3, seed: int = 0, timeout: float = 600.0
) -> None:
    """Check that a run that is cut several times ends as one that was not.

    `run(directory)` is your call of `fit` with `run_dir=directory` and `checkpoints=…`. It runs
    once to the end, and once with cuts at random log points, by SIGKILL and SIGTERM in turn, each
    in its own process. Then the checkpoints and the rows of metrics have to be equal.

    Args:
      run: a function that pickle or, if it is installed, cloudpickle can send to another process.
      cuts: the number of cuts.
      seed: chooses their steps.
      timeout: seconds that a process may take.

    Raises:
      LawError: with the step at which they part, and what may be the cause.
      ConfigError: if the run fails without a cut, or saves no checkpoints.
    """
    read_function("run", run, "a function of a directory, which calls fit")
    read_integer("cuts", cuts)
    with tempfile.TemporaryDirectory(prefix="stepfold-resume-") as folder:
        uncut, cut, program = (Path(folder, name) for name in ("whole", "cut", "run.pickle"))
        try:
            data, buffers = dump(run)
        except (ConfigError, pickle.PicklingError, TypeError) as error:
            expected = "a function that can be sent to another process"
            advice = "let it make what it uses, or define that in a module"
            refuse("run", expected, f"one that cannot: {error}", advice, cause=error)
        program.write_bytes(pickle.dumps((data, [np.frombuffer(x, np.uint8) for x in buffers])))
        deadline = time.monotonic() + timeout
        _run(program, uncut, deadline)
        curves, _, _ = read_metrics_file(uncut / "metrics.jsonl")
        rows = sorted({int(step) for curve in curves.values() for step in curve.steps})
        if not rows:
            refuse("run", "a call of fit with run_dir=directory, and log points", "neither")
        random = np.random.default_rng(seed)
        chosen = sorted(random.choice(rows[:-1] or rows, min(cuts, len(rows)), replace=False))
        for number, step in enumerate(chosen):
            kill = (signal.SIGKILL, signal.SIGTERM)[number % 2]
            _run(program, cut, deadline, int(step), kill)
        _run(program, cut, deadline)
        difference = diff(uncut, cut)
        if not difference.compared["checkpoints"]:
            expected = "a run with checkpoints=sf.Checkpoints(every=…, keep=None)"
            refuse("run", expected, "; ".join(difference.missing))
        problem = "" if difference.is_equal else str(difference)
        if not problem and difference.compared["rows"] < len(rows):
            problem = (
                f"only {difference.compared['rows']} of {len(rows)} rows of metrics are in both"
            )
        if problem:
            where = ", ".join(f"{int(step):,}" for step in chosen)
            raise LawError(
                f"check_resume: the run that was cut and resumed at step {where} differs from the "
                "one without cuts; let state, batches and hooks keep all that decides the next "
                "step\n" + problem.replace(f"{uncut}", "whole").replace(f"{cut}", "cut")
            )


_CHILD = """
import pickle, sys
sys.path[:] = {path}
with open(sys.argv[1], "rb") as file:
    data, buffers = pickle.load(file)
pickle.loads(data, buffers=buffers)(sys.argv[2])
"""


def _run(
    program: Path, directory: Path, deadline: float, until: float = np.inf, kill: int = 0
) -> None:
    """Run the program in a process, to the end, or until it has logged a step."""
    log = program.with_suffix(".log")
    command = [sys.executable, "-c", _CHILD.format(path=sys.path), str(program), str(directory)]
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise ConfigError("timeout: the run did not end in time; give it more seconds")
                if (last_step(directory / "metrics.jsonl") or 0) >= until:
                    process.send_signal(kill)
                    process.wait(max(1.0, deadline - time.monotonic()))
                    return
                time.sleep(0.01)
        finally:
            process.kill()
    if process.returncode:
        end = log.read_text(errors="replace").strip()[-2000:]
        raise ConfigError(f"run: its process ended with code {process.returncode}:\n{end}")


# Comparisons


def _difference(wanted: Any, got: Any, rtol: float | None = None, what: str = "") -> str:
    """Say which leaf differs, by more than rounding or in a bit, or nothing."""
    first, second = (dict(tree.named_leaves(_numbers(each))) for each in (wanted, got))
    if first.keys() != second.keys():
        return f"{min(first.keys() ^ second.keys())} is in one of them alone{what}"
    for name, leaf in first.items():
        try:
            if rtol is None:
                chex.assert_trees_all_equal(leaf, second[name], strict=True)
            else:
                sizes = (np.max(np.abs(x), initial=1e-3) for x in (leaf, second[name]))
                limits = {"rtol": rtol, "atol": rtol * float(max(sizes))}
                chex.assert_trees_all_close(leaf, second[name], **limits)
        except AssertionError:
            return _describe_change(name or "the array", leaf, second[name]) + what
    return ""


def _describe_change(name: str, wanted: np.ndarray, got: np.ndarray) -> str:
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        return f"{name} is {tree.describe_value(got)}, not {tree.describe_value(wanted)}"
    if wanted.size == 1 or wanted.dtype.kind not in "fiu":
        return f"{name} is {got.item():.6g}, not {wanted.item():.6g}" if wanted.size == 1 else name
    return f"{name} differs by up to {np.abs(np.float64(got) - np.float64(wanted)).max():.3g}"


def _numbers(node: Any) -> Any:
    """Replace keys by their numbers, and bring all arrays to the host."""
    plain: Any = lambda leaf: np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    return jax.tree.map(plain, node)


def _nonfinite(node: Any) -> list[str]:
    leaves = tree.named_leaves(_numbers(node))
    return [name for name, x in leaves if x.dtype.kind == "f" and not np.isfinite(x).all()]


def _row_count(batch: Any) -> int:
    sizes = {np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf)}
    if len(sizes) != 1 or min(sizes) < 2:
        refuse("batch", "arrays of one number of rows, at least two", f"{sorted(sizes)} rows")
    return int(sizes.pop())


def _padded(batch: Any) -> dict[str, Any]:
    """Append two rows of other values, whose mask is false."""

    def pad(leaf: Any) -> Any:
        if not np.ndim(leaf):
            return leaf
        array = jnp.asarray(leaf)
        rows = array[:2]
        return jnp.concatenate([array, 3 * rows + 1 if tree.is_float(array) else rows])

    mask = jnp.asarray(batch["mask"])
    padded: dict[str, Any] = jax.tree.map(pad, dict(batch))
    return padded | {"mask": jnp.concatenate([mask, jnp.zeros_like(mask[:2])])}
