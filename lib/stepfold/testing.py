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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from stepfold import tree
from stepfold.core.gradients import make_grad
from stepfold.core.loss import total_of
from stepfold.core.precision import Precision
from stepfold.core.validation import read_function, read_integer, read_positive
from stepfold.debug.diff import diff
from stepfold.errors import ConfigError, StepfoldError, refuse
from stepfold.loop.replay.bisect import find_bad_rows
from stepfold.loop.report.read import read_metrics
from stepfold.loop.writers.jsonl import last_step
from stepfold.sharding.place import place, shard_batch
from stepfold.sharding.plan import make_sharding


class LawError(StepfoldError, AssertionError):
    """Raised by a check of a program, with the laws that do not hold.

    >>> from stepfold import testing
    >>> issubclass(testing.LawError, AssertionError)
    True
    """


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
    - *split*: the totals and weights of two parts add up to those of the batch, so accumulation,
      ragged batches and several processes are exact.
    - *padding*: rows whose mask is false do not matter, if the batch has a `"mask"`.
    - *finite* and *slope*: gradients are finite, and those of finite differences in float64.
    - *bf16*: parameters and batch in bfloat16 change the loss by little.

    A loss that depends on its key, as with dropout, draws other numbers for other rows. Its order,
    split, padding and slope are not checked: check it again with dropout turned off.

    Args:
      loss_fn: a `LossFn`.
      params: parameters.
      batch: a batch of at least two rows.
      key: the key; by default `jax.random.key(0)`.
      stateful: whether the loss carries a model state. The laws of rows are then not checked.
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
    rows = _row_count(batch)
    function = make_grad(loss_fn, stateful=stateful)
    evaluate = jax.jit(_named(function, model_state))
    whole = evaluate(params, batch, key)
    laws = _Laws("check_loss", ["deterministic", "finite"])

    again = jax.jit(_named(make_grad(loss_fn, stateful=stateful), model_state))
    if differing := _differences(whole, again(params, batch, key)):
        laws.broken(
            "deterministic",
            f"{differing} of two traces with one key",
            "draw random numbers from the key, not from numpy or a counter",
        )
    is_bad: Any = lambda batch: bool(_nonfinite(evaluate(params, batch, key)))
    if bad := _nonfinite(whole):
        shown, _ = find_bad_rows(batch, is_bad)
        where = f", from row {', '.join(map(str, shown[0]))}" if shown else ""
        laws.broken(
            "finite",
            f"{', '.join(bad[:4])} is NaN or inf{where}",
            "let sf.replay find the operation",
        )
    other = evaluate(params, batch, jax.random.fold_in(key, 1))
    is_random = bool(_differences(whole, other))
    if not (is_random or stateful or bad):
        _check_rows(laws, evaluate, params, batch, key, rows, rtol)
        _check_slope(laws, loss_fn, params, batch, key)
    if bf16 is not None and not bad:
        _check_bf16(laws, loss_fn, params, batch, key, model_state, bf16)
    return laws.end()


def _check_rows(
    laws: "_Laws", evaluate: Any, params: Any, batch: Any, key: Any, rows: int, rtol: float
) -> None:
    """Check the laws of rows: their order, their division, and padding."""
    laws.names += ["order", "split"]
    whole = evaluate(params, batch, key)
    take: Any = lambda index: jax.tree.map(lambda x: x[index] if np.ndim(x) else x, batch)
    order = np.random.default_rng(0).permutation(rows)
    if differing := _far(whole, evaluate(params, take(order), key), rtol):
        laws.broken(
            "order",
            f"{differing} of the same rows in another order",
            "let no row depend on its place, and draw random numbers from the key alone",
        )
    parts = [evaluate(params, take(index), key) for index in np.array_split(np.arange(rows), 2)]
    merged = _merge(*parts)
    if differing := _far(_computed(whole), _computed(merged), rtol):
        laws.broken(
            "split",
            f"{differing} for two halves whose totals and weights are added up",
            "return sf.mean(values, where), a total and a weight, not a mean of means",
        )
    if not (isinstance(batch, Mapping) and "mask" in batch):
        return
    laws.names.append("padding")
    padded = jax.tree.map(_pad, dict(batch))
    padded["mask"] = jnp.concatenate(
        [jnp.asarray(batch["mask"]), jnp.zeros_like(jnp.asarray(batch["mask"])[:2])]
    )
    if differing := _far(whole, evaluate(params, padded, key), rtol):
        laws.broken(
            "padding",
            f"{differing} with two more rows whose mask is false",
            "give the mask to each mean, as in sf.mean(values, batch['mask'])",
        )


def _check_slope(laws: "_Laws", loss_fn: Any, params: Any, batch: Any, key: Any) -> None:
    """Compare gradients with central differences in float64, in a few directions."""
    with jax.enable_x64(True):
        wide: Any = lambda node: jax.tree.map(
            lambda x: jnp.asarray(x, jnp.float64) if _is_float(x) else x, node
        )
        params, batch = wide(params), wide(batch)
        objective: Any = lambda p: total_of(make_grad(loss_fn)(p, batch, key, ())[1])
        grads = jax.jit(jax.grad(objective))(params)
        value = jax.jit(objective)
        if value(params).dtype != jnp.float64:
            return  # the loss computes in a narrower dtype
        laws.names.append("slope")
        random = np.random.default_rng(0)
        for _ in range(3):
            direction = jax.tree.map(
                lambda x: random.normal(size=np.shape(x)) if _is_float(x) else np.zeros_like(x),
                params,
            )
            move: Any = lambda h: jax.tree.map(
                lambda x, d: x + h * d if _is_float(x) else x,  # noqa: B023  called at once
                params,
                direction,  # noqa: B023
            )
            slope = float(value(move(1e-6)) - value(move(-1e-6))) / 2e-6
            pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True)
            wanted = float(sum(np.vdot(np.asarray(g), d) for g, d in pairs))
            scale = max(abs(slope), abs(wanted), 1e-6)
            if abs(slope - wanted) > 1e-3 * scale:
                laws.broken(
                    "slope",
                    f"the gradient gives {wanted:.6g} in a direction, differences {slope:.6g}",
                    "look for stop_gradient, rounding and custom derivatives; a kink may do it too",
                )
                return


def _check_bf16(
    laws: "_Laws", loss_fn: Any, params: Any, batch: Any, key: Any, model_state: Any, limit: float
) -> None:
    """Compare the loss in bfloat16, as `precision="bf16"` computes it."""
    laws.names.append("bf16")
    stateful = bool(jax.tree.leaves(model_state))
    losses = []
    for function in (loss_fn, Precision(jnp.bfloat16).applied_to(loss_fn)):
        objective = make_grad(function, stateful=stateful)
        terms = jax.jit(objective)(params, batch, key, model_state)[1]
        losses.append(float(total_of(terms)))
    change = abs(losses[1] - losses[0]) / max(abs(losses[0]), 1e-6)
    if not change <= limit:
        laws.broken(
            "bf16",
            f"the loss is {losses[1]:.4g} in bfloat16, and {losses[0]:.4g} in float32",
            "compute sums, softmax and norms in float32",
        )


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
    laws = _Laws("check_batches", ["again", "form"])
    first = _read(make(), steps)
    if len(first) < 2:
        refuse("make", "batches, at least two", f"{len(first)}")
    laws.equal(
        "again", first, _read(make(), steps),
        "make a new source each time, and take no random numbers but those of the seed",
    )  # fmt: skip
    for number, batch in enumerate(first):
        lines = tree.diff(first[0], batch, "batch")
        if lines and not (number == len(first) - 1 < steps - 1):  # the last one may be shorter
            laws.broken("form", f"batch {number}: {lines[0]}", "pad or drop what is left over")
            break
    if not hasattr(make(), "get_state"):
        return laws.end()
    laws.names += ["resume", "source"]
    for cut in {1, len(first) // 2, len(first) - 1}:
        one, other = make(), make()
        _read(one, cut)
        other.set_state(one.get_state())
        laws.equal(
            "resume", first[cut:], _read(other, len(first) - cut),
            f"let get_state after {cut} batches hold all that decides the next one",
        )  # fmt: skip
    batches = make()
    start = batches.get_state()
    _read(batches, len(first))
    batches.set_state(start)
    laws.equal(
        "source", first, _read(batches, len(first)),
        "let transforms and collate return new arrays, and not write into those they get",
    )  # fmt: skip
    if workers:
        from stepfold.data.workers import workers as in_processes

        laws.names.append("workers")
        laws.equal(
            "workers", first, _read(in_processes(make(), workers), len(first)),
            "let a batch depend on its index alone, not on what a process has read before",
        )  # fmt: skip
    return laws.end()


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
    laws, wanted = _Laws("check_layouts", []), jax.device_get(jax.jit(step)(state, batch))
    for mesh in meshes:
        name = f"mesh {dict(mesh.shape)}"
        laws.names.append(name)
        plan = make_sharding(state, mesh) if rules is None else make_sharding(state, mesh, rules)
        placed, sharded = place(state, plan), shard_batch(batch, mesh)
        got = jax.device_get(jax.jit(step)(placed, sharded))
        differing = _differences(wanted, got) if rtol is None else _far(wanted, got, rtol)
        if differing:
            advice = "let no part of the step depend on how rows or parameters are divided"
            laws.broken(name, f"{differing} of one device", advice)
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
        whole, cut = Path(folder, "whole"), Path(folder, "cut")
        program = Path(folder, "run.pickle")
        program.write_bytes(_pickle(run))
        deadline = time.monotonic() + timeout
        _run(program, whole, deadline)
        rows = _rows(whole)
        if not rows or not (whole / "run.json").exists():
            refuse("run", "a call of fit with run_dir=directory, and log points", "neither")
        random = np.random.default_rng(seed)
        chosen = sorted(random.choice(rows[:-1] or rows, min(cuts, len(rows)), replace=False))
        for number, step in enumerate(chosen):
            _run(program, cut, deadline, until=int(step), signal_number=_SIGNALS[number % 2])
        _run(program, cut, deadline)
        found = diff(whole, cut)
        if found.checkpoint is None and any("checkpoint" in text for text in found.missing):
            expected = "a run with checkpoints=sf.Checkpoints(every=…, keep=None)"
            refuse("run", expected, "; ".join(found.missing))
        problem = "" if found.differs_at is None else str(found)
        if not problem and _rows(cut) != rows:
            extra = sorted({*rows} ^ {*_rows(cut)})
            problem = f"rows of steps {', '.join(map(str, extra[:8]))} are in one run alone"
        if problem:
            problem = problem.replace(f"{whole}", "whole").replace(f"{cut}", "cut")
            where = ", ".join(f"{int(step):,}" for step in chosen)
            raise LawError(
                f"check_resume: expected the run without cuts, got another after cuts at step "
                f"{where}; let state, batches and hooks keep all that decides the next step\n"
                f"{problem}"
            )


_SIGNALS = (signal.SIGKILL, signal.SIGTERM)
_CHILD = """
import pickle, sys
sys.path[:] = {path}
with open(sys.argv[1], "rb") as file:
    run = pickle.load(file)
run(sys.argv[2])
"""


def _pickle(run: Any) -> bytes:
    has_cloudpickle = find_spec("cloudpickle") is not None
    try:
        if has_cloudpickle:
            import cloudpickle

            return bytes(cloudpickle.dumps(run))
        return pickle.dumps(run)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        advice = "let it make what it uses, or define that in a module"
        if not has_cloudpickle:
            advice += ", or pip install 'stepfold[workers]' for functions of a script or a notebook"
        expected = "a function that can be sent to another process"
        refuse("run", expected, f"one that uses what cannot: {error}", advice, cause=error)


def _run(
    program: Path,
    directory: Path,
    deadline: float,
    *,
    until: int | None = None,
    signal_number: int = 0,
) -> None:
    """Run the program in a process, to the end, or until it has logged a step."""
    log = program.with_suffix(".log")
    code = _CHILD.format(path=sys.path)
    command = [sys.executable, "-c", code, str(program), str(directory)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None and time.monotonic() < deadline:
                if until is not None and (last_step(directory / "metrics.jsonl") or 0) >= until:
                    process.send_signal(signal_number)
                    process.wait(max(1.0, deadline - time.monotonic()))
                    return
                time.sleep(0.01)
            exit_code = process.poll()
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    if exit_code is None:
        refuse("timeout", "a longer time for the run", "an end of the time")
    if exit_code != 0:
        end = log.read_text(errors="replace").strip()[-2000:]
        raise ConfigError(f"run: expected it to end with code 0, got {exit_code}:\n{end}")


def _rows(directory: Path) -> list[int]:
    curves, _, _ = read_metrics(directory / "metrics.jsonl")
    return sorted({int(step) for curve in curves.values() for step in curve.steps})


# What the checks share


class _Laws:
    """The laws that a check has tried, and those that do not hold."""

    def __init__(self, check: str, names: list[str]) -> None:
        self._check, self.names, self._problems = check, names, dict[str, str]()

    def broken(self, name: str, what: str, advice: str) -> None:
        self._problems.setdefault(name, f"{name}: {what}; {advice}")

    def equal(self, name: str, wanted: Sequence[Any], got: Sequence[Any], advice: str) -> None:
        """Compare batches, to the bit."""
        for number, (one, other) in enumerate(zip(wanted, got, strict=False)):
            if differing := _differences(one, other):
                self.broken(name, f"{differing} in batch {number}", advice)
                return
        if len(wanted) != len(got):
            self.broken(name, f"{len(got)} batches instead of {len(wanted)}", advice)

    def end(self) -> list[str]:
        if self._problems:
            count = len(self._problems)
            title = f"{count} law{'s do' if count > 1 else ' does'} not hold"
            raise LawError("\n  ".join([f"{self._check}: {title}", *self._problems.values()]))
        return self.names


def _read(batches: Any, count: int) -> list[Any]:
    """Read batches, and copy them, since their arrays may be filled again."""
    iterator, found = iter(batches), []
    for _ in range(count):
        try:
            batch = next(iterator)
        except StopIteration:
            break
        found.append(jax.tree.map(lambda x: np.array(x) if tree.is_array(x) else x, batch))
    return found


def _differences(wanted: Any, got: Any) -> str:
    """Say which leaf differs in a bit, or nothing."""
    return _compare(chex.assert_trees_all_equal, wanted, got)


def _far(wanted: Any, got: Any, rtol: float) -> str:
    """Say which leaf differs by more than rounding, or nothing."""
    scale: Any = lambda x: np.max(np.abs(np.asarray(x)), initial=0.0)

    def close(one: Any, other: Any) -> None:
        atol = rtol * float(max(scale(one), scale(other), 1e-3))
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)

    return _compare(lambda a, b: jax.tree.map(close, a, b) and None, wanted, got)


def _compare(check: Callable[[Any, Any], Any], wanted: Any, got: Any) -> str:
    one, other = (dict(tree.named_leaves(_numbers(each))) for each in (wanted, got))
    if one.keys() != other.keys():
        return f"{min(one.keys() ^ other.keys())} is in one of them alone"
    for name, leaf in one.items():
        try:
            check(leaf, other[name])
        except AssertionError:
            return _describe_change(name or "the array", leaf, other[name])
    return ""


def _describe_change(name: str, wanted: np.ndarray, got: np.ndarray) -> str:
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        return f"{name} is {tree.describe_value(got)}, not {tree.describe_value(wanted)}"
    if wanted.size == 1 or wanted.dtype.kind not in "fiu":
        return f"{name} is {got.item():.6g}, not {wanted.item():.6g}" if wanted.size == 1 else name
    return f"{name} differs by up to {np.abs(np.float64(got) - np.float64(wanted)).max():.3g}"


def _numbers(node: Any) -> Any:
    """Replace keys by their numbers, and bring all arrays to the host."""

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf)

    return jax.tree.map(plain, node)


def _nonfinite(node: Any) -> list[str]:
    leaves = tree.named_leaves(_numbers(node))
    return [name for name, x in leaves if x.dtype.kind == "f" and not np.isfinite(x).all()]


def _is_float(leaf: Any) -> bool:
    return tree.is_array(leaf) and bool(jnp.issubdtype(jnp.result_type(leaf), jnp.floating))


def _row_count(batch: Any) -> int:
    sizes = {np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf)}
    if len(sizes) != 1 or min(sizes) < 2:
        refuse("batch", "arrays of one number of rows, at least two", f"{sorted(sizes)} rows")
    return int(sizes.pop())


def _named(function: Any, model_state: Any) -> Any:
    """Name what a gradient function returns."""

    def run(params: Any, batch: Any, key: Any) -> dict[str, Any]:
        grads, terms, metrics, _ = function(params, batch, key, model_state)
        return {"gradient": grads, "term": terms, "metric": metrics}

    return run


def _merge(one: Any, other: Any) -> dict[str, Any]:
    """Merge the terms and metrics of two parts of a batch."""
    return {
        kind: {name: part.merge(other[kind][name]) for name, part in one[kind].items()}
        for kind in ("term", "metric")
    }


def _computed(results: Any) -> dict[str, Any]:
    """Return the values of terms and metrics, without their totals and weights."""
    return {
        kind: {name: metric.compute() for name, metric in results[kind].items()}
        for kind in ("term", "metric")
    }


def _pad(leaf: Any) -> Any:
    """Append two rows of other values."""
    if not np.ndim(leaf):
        return leaf
    array = jnp.asarray(leaf)
    rows = array[:2]
    return jnp.concatenate([array, 3 * rows + 1 if _is_float(rows) else rows])
