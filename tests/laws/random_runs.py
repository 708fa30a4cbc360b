"""What random runs are made of: tasks, data, hooks and cuts, for `fit` and for the reference."""

import functools
import itertools
import json
import shutil
import signal
from types import SimpleNamespace

import clu.metrics
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tests.laws.reference import Crash, Signal

import stepfold as sf
from stepfold.adapter import Trainer, TrainingArguments
from stepfold.adapter.outputs import (
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
)
from stepfold.checkpoint.manifest import read_checked

LIMIT = 48  # batches that a run may pull, beyond the last step of any of them
EXAMPLES, WIDTH = 28, 8
SPIKE = 200.0  # added to the target of an example that is poisoned, if it is not NaN
RNG = np.random.default_rng(0)
X = RNG.normal(size=(1024, WIDTH)).astype(np.float32)
Y = RNG.normal(size=1024).astype(np.float32)
TEST = {"x": X[:20], "y": Y[:20], "mask": np.ones(20, bool)}


WARNINGS = (
    "its files are now in",
    "nothing was trained",
    "expected enough for",
    "expected get_state",
    "as in the resumed run",
    "but fit has no such hook, so the state is dropped",
)


class Broken(Exception):
    """User code raised it."""


# Tasks


@flax.struct.dataclass
class Median(clu.metrics.CollectingMetric.from_outputs(("error",))):
    def compute(self):
        return np.median(super().compute()["error"])


@flax.struct.dataclass
class Collected(clu.metrics.Collection):
    size: clu.metrics.Average.from_output("size")
    last: clu.metrics.LastValue.from_output("size")


def init(key):
    params = {"w": jax.random.normal(key, (WIDTH,)) / 4, "scale": jnp.ones(())}
    return params, {"mean": jnp.zeros(WIDTH)}


def loss_fn(kind, params, batch, key, model_state=None):
    x = batch["x"] if model_state is None else batch["x"] - model_state["mean"]
    kept = jax.random.bernoulli(key, 0.9, x.shape).astype(jnp.float32)
    error = ((x * kept) @ params["w"] * params["scale"] - batch["y"]) ** 2
    terms = {"fit": sf.mean(error, batch["mask"]), "norm": 1e-2 * (params["w"] ** 2).sum()}
    size = jnp.abs(params["w"]).sum()
    metrics = {
        "averages": lambda: {"close": sf.mean(error < 1, batch["mask"])},
        "collection": lambda: Collected.single_from_model_output(size=size),
        "collecting": lambda: {"median": Median.from_model_output(error=error)},
    }[kind]()
    if model_state is None:
        return terms, metrics
    return terms, metrics, {"mean": 0.9 * model_state["mean"] + 0.1 * batch["x"].mean(0)}


# By name: the optimizer, whether there is a model state, and whether steps may be skipped.
TASKS = {
    "plain": (optax.sgd(0.02, momentum=0.9), False, False),
    "averaged": (sf.ema_params(optax.adam(1e-2), 0.9), True, False),
    "skipping": (optax.adam(1e-2), False, True),
}
MESHES = {"one": None, "dp": ((2,), ("dp",)), "fsdp": ((4,), ("fsdp",))}


@functools.cache
def mesh_of(name):
    dims = MESHES[name]
    return dims and sf.make_mesh(*dims, devices=jax.devices()[: dims[0][0]])


@functools.cache
def plan_of(task, mesh):
    if mesh == "one":
        return None
    return sf.make_sharding(_shape(task), mesh_of(mesh), sf.sharding.fsdp(min_size=1))


@functools.cache
def _shape(task):
    return jax.eval_shape(lambda: _state(task))


def _state(task):
    tx, is_stateful, _ = TASKS[task]
    make = init if is_stateful else lambda key: init(key)[0]
    return sf.init_state(make, tx, jax.random.key(0), stateful=is_stateful)


@functools.cache
def _first(task):
    return jax.tree.map(np.asarray, jax.jit(lambda: _state(task)._replace(key=None))())


def place(task, mesh, state):
    """Put a state on a mesh, as a restored one is."""
    plan = plan_of(task, mesh)
    return jax.device_put(state, jax.devices()[0] if plan is None else plan)


def first_state(task):
    return _first(task)._replace(key=jax.random.key(0))


@functools.cache
def step_of(task, kind):
    """Make a step; `fit` keeps its programs on the function, and so do all draws of a process."""
    tx, is_stateful, skips = TASKS[task]
    loss = functools.partial(loss_fn, kind)
    return sf.make_train_step(loss, tx, stateful=is_stateful, skip_nonfinite=skips)


@functools.cache
def jitted(step):
    return jax.jit(step)


@functools.cache
def eval_step(task):
    loss = functools.partial(loss_fn, "averages")
    return jax.jit(sf.make_eval_step(loss, stateful=TASKS[task][1]))


# Data


def rows_of(kind, poison, value, changes=()):
    """Make examples: of plain arrays, of a mixture, or of a stream. One may be poisoned."""
    y = Y[:EXAMPLES].copy()
    y[poison] += 0 if poison is None else value
    data = {"x": X[:EXAMPLES], "y": y, "mask": np.ones(EXAMPLES, bool)}
    if kind == "mix":
        first, second = (
            jax.tree.map(lambda a: a[part], data) for part in np.split(np.arange(EXAMPLES), 2)
        )
        stages = {60: (1, 3), 150: (1, 0)} | {8 * batch: weights for batch, weights in changes}
        return sf.mix([(first, 2), (second, 1)], seed=3, stages=sorted(stages.items()))
    return Stream(200, poison, value) if kind == "stream" else data


class Stream:
    """Examples in order, with a state of its own."""

    def __init__(self, length, poison, value):
        self.length, self.poison, self.value, self.next = length, poison, value, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == self.length:
            raise StopIteration
        self.next += 1
        row = self.next - 1
        spike = np.float32(self.value if row == self.poison else 0)
        return {"x": X[row], "y": Y[row] + spike, "mask": np.bool_(True)}

    def get_state(self):
        return {"next": self.next}

    def set_state(self, state):
        self.next = state["next"]


class Source(SimpleNamespace):
    """What the batches of a run are made of; the attributes are drawn."""

    def make(self):
        """Make the batches that `fit` gets."""
        if self.kind == "list":
            return [*itertools.islice(self._plain(), self.length)]
        batches = self._plain()
        return sf.prefetch(batches) if self.prefetch else batches

    def _plain(self, changes=()):
        options = {"remainder": self.remainder}
        if self.kind in ("arrays", "sizes", "list"):
            options |= {"seed": 5, "start": self.start, "epochs": self.own_epochs}
        size = [(0, 4), (self.change, 8)] if self.kind == "sizes" else 8
        rows = rows_of(self.kind, self.poison, self.value, changes)
        batches = sf.batches(rows, size, **options)
        return batches.without(self.skips) if self.skips else batches

    def data(self, skips, changes=()):
        """Return what the reference knows: the batches, and to which epoch each belongs.

        A change of the weights of a mixture is one more stage, from a batch on.
        """
        all_skips = [*self.skips, *skips]
        if self.kind == "list":
            batches = self.make()
            epochs = [i // self.length for i in range(LIMIT)]
            return Data(batches * self.passes, epochs, 0, is_iterator=False)
        batches = self._plain(changes)
        batches = batches.without(skips) if skips else batches
        made = [None] * self.start + [*itertools.islice(batches, LIMIT)]
        epochs = None
        if self.kind in ("arrays", "sizes"):
            kept = [i for i in range(2 * LIMIT) if not any(a <= i < b for a, b in all_skips)]
            by_index = [*itertools.islice(self._epochs(), 2 * LIMIT)]
            epochs = [by_index[i] for i in kept]
        indices = [i for i in range(4 * LIMIT) if not any(a <= i < b for a, b in all_skips)]
        return Data(made, epochs, self.start, indices=indices)

    def _epochs(self):
        """Yield the epoch of each batch."""
        epoch = row = 0
        for index in itertools.count():
            size = 4 if self.kind == "sizes" and index < self.change else 8
            left = EXAMPLES - row
            if left <= 0 or (left < size and self.remainder == "drop"):
                epoch, row = epoch + 1, 0
            yield epoch
            row += size


class Data:
    def __init__(self, batches, epochs, first, *, indices=(), is_iterator=True):
        self.batches, self.epochs, self.first = batches, epochs, first
        self.indices, self.is_iterator = indices, is_iterator
        sizes = [None if batch is None else len(batch["y"]) for batch in batches]
        self.size_changes = [i for i in range(1, len(sizes)) if sizes[i] != sizes[i - 1]]

    def steps_of(self, epochs):
        """The steps that `epochs` more epochs take, from the first batch on."""
        return next(i for i, epoch in enumerate(self.epochs) if epoch >= epochs) - self.first


# Hooks, and what goes wrong


class Cut:
    """Raise, signal or crash at one place, once; `fit` and the reference each have one."""

    def __init__(self, place=None, action=None, crash=None):
        self.place, self.action, self._crash, self.fit = place, action, crash, None

    def __call__(self, *place):
        if place != self.place:
            return
        self.place = None
        if self.action == "raise":
            raise Broken(f"at {place}")
        if self.action == "crash":
            if self._crash is not None:
                self._crash()
            raise Crash
        number = signal.SIGTERM if self.action == "stop" else signal.SIGUSR1
        if self.fit is None:
            signal.raise_signal(number)
        elif self.action == "save":
            self.fit.is_save_requested = True
        else:
            self.fit.is_signaled = True
            if place[0] in ("pull", "evaluate"):
                raise Signal


class Spec(SimpleNamespace):
    """A hook as the reference takes it; `seen` lists its events, `script` what it returns."""

    wants_epochs = False

    def react(self, event, state):
        state += 1
        self.seen.append((self.name, event.kind, event.step, event.total, dict(event.metrics)))
        self.cut(self.name, event.kind, event.step)
        if self.script == (event.kind, event.step) or self.has_enough(state):
            return f"{self.name} has seen enough", state
        if self.replaces and event.kind == "eval" and event.step % self.replaces == 0:
            halved = jax.tree.map(lambda leaf: leaf * 0.5, event.state.params)
            return sf.hooks.Replace(event.state._replace(params=halved), self.name), state
        if self.reweights and event.step and event.step % self.reweights == 0:
            return sf.hooks.Reweight([state % 3, 1 + state % 2], self.name), state
        loss = event.metrics.get("train/loss", 0.0)
        if self.goes_back and loss > 1e3:
            n = min(event.step, self.goes_back)
            return sf.hooks.GoBack(skip=(event.step - n + 1, event.step + 1), limit=2), state
        return {f"{self.name}/events": state}, state

    def has_enough(self, state):
        """Whether its state stops the run, also before the first event of a resumed one."""
        return 0 < self.limit <= state

    def for_fit(self):
        """The same hook for `fit`."""

        def update(state, event):
            if event.kind == "start":
                return state, sf.Stop("hook", "enough") if self.has_enough(state) else None
            if event.kind == "epoch":
                event = SimpleNamespace(kind="epoch", step=event.epoch, metrics={}, total=None)
            returned, state = self.react(event, state)
            return state, returned if event.kind != "epoch" else None

        returns = [sf.Stop, sf.hooks.GoBack] if self.goes_back else [sf.Stop]
        return sf.Hook(
            *(0, update, self.name),
            also=("start", "epoch") if self.wants_epochs else ("start",),
            exact=self.is_exact,
            returns=[*returns, sf.hooks.Replace, sf.hooks.Reweight],
        )


class Evaluated(SimpleNamespace):
    """An evaluation as the reference takes it."""

    def __init__(self, task, drawn):
        super().__init__(task=task, **vars(drawn))

    def results(self, state):
        mesh = getattr(jax.tree.leaves(state)[0].sharding, "mesh", None)
        for batch in _test_batches():
            placed = batch if mesh is None else sf.shard_batch(batch, mesh)
            yield eval_step(self.task)(state, placed)


def evaluation(task, drawn, cut):
    """Make the evaluation that `fit` gets."""

    def measure(state):
        cut("evaluate", drawn.name, int(state.step))
        return sf.evaluate(eval_step(task), state, _test_batches())

    return sf.Evaluation(measure, **vars(drawn))


def _test_batches():
    return sf.batches(TEST, 8, epochs=1, remainder="pad")


class CutBatches:
    """Batches with a cut before a pull; all else is theirs."""

    def __init__(self, batches, cut, start):
        self._batches, self._cut, self._start = batches, cut, start

    def __iter__(self):
        return self

    def __next__(self):
        self._cut("pull", self._batches.get_state()["step"] - self._start + 1)
        return next(self._batches)

    def __len__(self):
        return len(self._batches)

    def __getattr__(self, name):
        return getattr(self._batches, name)

    def without(self, ranges):
        return CutBatches(self._batches.without(ranges), self._cut, self._start)


def copy_as_killed(folder, other):
    """Copy what a killed process leaves; its lock is that of a dead process then.

    Rows may wait in a thread. They matter only if there is no checkpoint to resume from.
    """
    written = (".lock-*", "run.json*", "report.html*")  # by threads, at any time
    shutil.copytree(folder, other, ignore=shutil.ignore_patterns(*written))
    if not any(
        map(sf.checkpoint.verify, [other / "checkpoints", *other.glob("temporary/series-*")])
    ):
        (other / "metrics.jsonl").unlink(missing_ok=True)


# The two ways to run the same parts


class OwnPart:
    """A part of the user, which is due at multiples of some steps, and notes them."""

    name = "own"

    def __init__(self, every, seen):
        self.every, self.seen, self.last = every, seen, None

    def open(self, run):
        self.last = None  # the run may go back

    def next(self, run):
        return run.step + self.every - run.step % self.every

    def is_due(self, run):
        is_new = not run.is_at_start and run.step != self.last
        return run.step % self.every == 0 and is_new

    def __call__(self, run):
        self.last = run.step
        self.seen.append((run.step, run.batches_used))
        return run


def own_parts(every, seen):
    return [OwnPart(every, seen)] if every else []


def call_fit(parts):
    return sf.fit(
        parts.step, parts.state, parts.batches, run_dir=parts.folder,
        checkpoints=parts.checkpoints, evaluation=parts.evaluations, hooks=parts.hooks,
        log_every=parts.log_every, steps_per_call=parts.steps_per_call, **parts.length,
    )  # fmt: skip


def call_trainer(parts):
    length = dict(parts.length)
    arguments = TrainingArguments(
        output_dir=str(parts.folder), logs_dir=".", report_to=("jsonl",), log_steps=parts.log_every,
        max_steps=length.pop("steps", None), steps_per_call=parts.steps_per_call,
        progress_bar_type="none",
    )  # fmt: skip
    trainer = TrainerOfParts(
        arguments, parts, rules=sf.sharding.fsdp(min_size=1), devices=jax.devices()[:1],
        evaluations=parts.evaluations, hooks=parts.hooks,
    )  # fmt: skip
    trainer.train(**length)
    return trainer.result


class TrainerOfParts(Trainer):
    """A trainer whose methods return parts that were made before."""

    def __init__(self, arguments, parts, **given):
        self.parts = parts
        super().__init__(arguments, **given)

    def configure_dataloaders(self):
        steps = self.sizes.steps
        return TrainerConfigureDataloaderOutput(self.parts.batches, steps, None, None)

    def configure_model(self):
        tx = TASKS[self.parts.task][0]
        return TrainerConfigureModelOutput(None, tx, None, None, state=self.parts.state)

    def configure_functions(self):
        mesh = mesh_of(self.parts.mesh) or self.mesh
        return TrainerConfigureFunctionOutput(self.parts.step, mesh, self.parts.checkpoints, None)


# What a call leaves


def read_rows(path):
    """Read `metrics.jsonl`; each line is another step, in ascending order."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    steps = [row.pop("step") for row in rows]
    assert steps == sorted(set(steps))
    return dict(zip(steps, rows, strict=True))


def history_of(rows):
    """Return the steps and the values of each metric."""
    history = {}
    for step, row in sorted(rows.items()):
        for name, value in row.items():
            steps, values = history.setdefault(name, ([], []))
            steps.append(step)
            values.append(float(value))
    return {name: [*map(list, curve)] for name, curve in history.items()}


def read_skips(folder):
    note = folder / "rollbacks.json"
    done = read_checked(note) if note.exists() else []
    return [skipped for _, _, skipped, _ in done]


def known_warnings(caught):
    """Return the parts of warnings that the reference knows."""
    messages = [str(warning.message) for warning in caught]
    return [next((text for text in WARNINGS if text in message), message) for message in messages]
