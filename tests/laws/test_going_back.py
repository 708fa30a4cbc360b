"""A run that goes back equals one that has skipped the same batches from the start, bit for bit.

The random runs hold it for streams, temporary checkpoints, epochs, and cuts before and after.
"""

import gc
import json
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.small import full_but

import stepfold as sf
from stepfold.hooks.objects import BaseHook
from stepfold.loop.feed import BatchFeed
from stepfold.loop.hook import Hooks
from stepfold.loop.intervals import Steps
from stepfold.loop.run import Kind, Request, Run
from stepfold.runs import rollback
from stepfold.runs.session import Session
from stepfold.writers.jsonl import JsonlWriter

from . import network

pytestmark = pytest.mark.not_optimized

STEPS, EVERY = 60, 10
SOURCE = np.random.default_rng(0).normal(size=(512, 8)).astype(np.float32)


def loss_fn(params, batch, key):
    target = batch["x"].sum(-1) + batch["poison"]
    noise = 0.01 * jax.random.normal(key, target.shape)
    return sf.mean((batch["x"] @ params["w"] - target + noise) ** 2)


TX = optax.adam(0.02)
NOT_JITTED = sf.make_train_step(loss_fn, TX)
STEP = jax.jit(NOT_JITTED)


def init():
    return sf.init_state({"w": jnp.zeros(8)}, TX, jax.random.key(0))


def batches(poison=(), value=1e4):
    """Batches of 8; those with these batch indices are poisoned."""
    bad = np.zeros(512, np.float32)
    plain = sf.batches(np.arange(512), 8, seed=0)
    for index in poison:
        bad[plain.at(index)] = value
    return sf.batches({"x": SOURCE, "poison": bad}, 8, seed=0)


def fit(data, folder, hooks=(), step=STEP, **options):
    options = {"steps": STEPS, "log_every": 4, "checkpoints": sf.Checkpoints(every=EVERY)} | options
    return sf.fit(step, init(), data, run_dir=folder, hooks=hooks, **options)


def spike(**options):
    return sf.hooks.on_spike(**{"window": 8, "deviations": 100.0, **options}, action="go_back")


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same(run, other, folder, other_folder):
    state, wanted = (network.bits(one.state) for one in (run, other))
    assert state == wanted
    assert run.history == other.history
    assert {n: c.steps for n, c in run.history.items()} == {
        n: c.steps for n, c in other.history.items()
    }
    assert rows(folder) == rows(other_folder)


MOMENTS = pytest.mark.parametrize(
    "at", full_but(["delete_after"], ["_write", "delete_after", "restore"])
)


@pytest.fixture(scope="module")
def skipping(tmp_path_factory):
    """Return runs that skip batches from the start, which others are compared with."""
    runs = {}

    def find(*ranges, log_every=4):
        key = ranges, log_every
        if key not in runs:
            folder = tmp_path_factory.mktemp("skipping")
            runs[key] = fit(batches().without(ranges), folder, log_every=log_every), folder
        return runs[key]

    return find


def check(run, folder, skipped):
    other, other_folder = skipped
    same(run, other, folder, other_folder)


@pytest.mark.parametrize(
    ("log_every", "per_call"), full_but([(4, 3)], [(1, 1), (4, 3), (7, 1), (20, 3)])
)
def test_two_poisoned_batches_are_skipped(tmp_path, per_call, log_every):
    folder, other = tmp_path / "a", tmp_path / "b"
    options = {"steps_per_call": per_call, "log_every": log_every, "step": NOT_JITTED}
    run = fit(batches([23, 41]), folder, spike(), **options)
    want = fit(batches([23, 41]).without([(23, 24), (41, 42)]), other, **options)
    assert (run.steps, run.stop_reason.kind) == (STEPS, "completed")
    same(run, want, folder, other)
    info = json.loads((folder / "run.json").read_text())
    assert [entry["skipped"] for entry in info["rollbacks"]] == [[23, 24], [41, 42]]
    assert [entry["to"] for entry in info["rollbacks"]] == [20, 40]
    assert "train/loss is" in info["rollbacks"][0]["why"]
    ends = [attempt["stop"]["kind"] for attempt in info["attempts"]]
    assert ends == ["go_back", "go_back", "completed"]
    assert "went back from step" in (folder / "report.html").read_text()


@pytest.mark.full
def test_checkpoints_in_a_bucket_are_left_too(tmp_path, skipping):
    folder = tmp_path / "a"
    options = {"log_every": 8, "checkpoints": sf.Checkpoints(f"file://{tmp_path}/bucket", every=6)}
    run = fit(batches([18, 41]), folder, spike(), **options)
    check(run, folder, skipping((18, 19), (41, 42), log_every=8))
    entries = json.loads((folder / "run.json").read_text())["rollbacks"]
    assert [entry["to"] for entry in entries] == [18, 36]


@pytest.mark.full
def test_a_nan_is_skipped(tmp_path, skipping):
    run = fit(batches([23, 24], np.nan), tmp_path, sf.hooks.on_nonfinite(action="go_back", skip=2))
    check(run, tmp_path, skipping((23, 25)))


def test_it_stops_with_the_reason_after_the_limit(tmp_path):
    run = fit(batches([13, 23, 33]), tmp_path, spike(limit=2))
    assert run.stop_reason.kind == "spike"
    assert str(run.stop_reason).startswith("train/loss is ")
    assert "; went back 2 times before, the limit; stopped at step " in str(run.stop_reason)
    run = fit(
        batches([13, 23], np.nan),
        tmp_path / "nan",
        sf.hooks.on_nonfinite(limit=1, action="go_back"),
    )
    assert run.stop_reason.kind == "nonfinite"
    assert run.capsule.step == 23
    assert run.capsule.rollbacks == sf.debug.read_capsule(run.capsule.path).rollbacks
    assert "without batch 13" in str(run.capsule)


@pytest.mark.parametrize(
    ("reason", "is_train", "kind", "saved"),
    [
        (sf.Stop("corrupt", "bits differ"), False, "corrupt", 10),
        (sf.Stop("corrupt", "bits differ"), True, "corrupt", 10),
        ("enough", True, "hook", 20),
    ],
)
def test_a_reason_to_stop_at_the_step_of_a_spike_ends_the_run(
    tmp_path, reason, is_train, kind, saved
):
    def at(returned, is_train):
        return lambda event: returned if (event.step, event.is_train) == (20, is_train) else None

    hooks = [at(sf.hooks.GoBack(skip=1), True), at(reason, is_train)]
    evaluation = sf.Evaluation(lambda state: {"one": 1.0}, every=20)
    run = fit(batches(), tmp_path, hooks, evaluation=evaluation)
    assert (run.steps, run.stop_reason.kind) == (20, kind)
    assert "rollbacks" not in json.loads((tmp_path / "run.json").read_text())
    assert max(sf.checkpoint.verify(tmp_path / "checkpoints")) == saved


def test_an_evaluation_at_the_end_may_let_the_run_go_back(tmp_path):
    gone = []

    def hook(event):
        if not event.is_train and event.step == STEPS and not gone:
            gone.append(event.step)
            return sf.hooks.GoBack(skip=3, why="the last evaluation")
        return None

    evaluation = sf.Evaluation(lambda state: {"one": 1.0})
    run = fit(batches(), tmp_path / "a", hook, evaluation=evaluation)
    assert (run.steps, run.resumed, run.stop_reason.kind) == (STEPS, 50, "completed")
    other = fit(batches().without([(57, 60)]), tmp_path / "b", evaluation=evaluation)
    same(run, other, tmp_path / "a", tmp_path / "b")


@MOMENTS
@pytest.mark.parametrize("is_signal", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_signal_or_an_exception_while_a_run_goes_back_loses_nothing(
    tmp_path, skipping, monkeypatch, at, is_signal
):
    owner = rollback.Rollbacks if at == "_write" else sf.checkpoint.Series
    whole, calls = getattr(owner, at), []

    def cut(self, *args, **options):
        calls.append(at)
        if len(calls) == 1:
            if not is_signal:
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGTERM)
        return whole(self, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(owner, at, cut)
        with pytest.raises(SystemExit if is_signal else KeyboardInterrupt) as caught:
            fit(batches([23]), tmp_path, spike())
    assert not is_signal or caught.value.result.steps == 20
    check(fit(batches([23]), tmp_path, spike()), tmp_path, skipping((23, 24)))


def test_the_loss_of_the_lock_while_the_run_goes_back_ends_it(tmp_path, monkeypatch):
    whole = rollback.Rollbacks.note

    def loses(self, *args):
        sessions = [each for each in gc.get_objects() if type(each) is Session]
        (session,) = (each for each in sessions if each.rollbacks is self)
        stop = sf.Stop("error", "another run may use the directory")
        session.inbox.notify(Request(Kind.STOP, 0, stop))
        return whole(self, *args)

    monkeypatch.setattr(rollback.Rollbacks, "note", loses)
    run = fit(batches([23]), tmp_path, spike())
    assert (run.steps, run.stop_reason.kind) == (20, "error")


def test_it_stops_if_there_is_no_checkpoint_before(tmp_path):
    run = fit(batches([9]), tmp_path, spike())
    assert run.stop_reason.kind == "spike"
    assert (
        "; there is no checkpoint before it (Checkpoints(at_start=True) saves one); stopped at step"
        in str(run.stop_reason)
    )


def test_a_hook_chooses_how_far_to_go_back_and_what_to_skip(tmp_path, skipping):
    def hook(event):
        if event.step == 36 and not done:
            done.append(True)
            return sf.hooks.GoBack(to=25, skip=(28, 31), why="as I like")
        return None

    done = []
    run = fit(batches(), tmp_path, hook)
    check(run, tmp_path, skipping((27, 30)))
    note = json.loads((tmp_path / "run.json").read_text())["rollbacks"]
    assert note == [{"at": 40, "to": 20, "skipped": [27, 30], "why": "as I like"}]


def skip_the_next(feed, ranges, whole=BatchFeed.skip):
    whole(feed, [(first + 1, stop + 1) for first, stop in ranges])


def keep(name):
    """Let a run keep a part of itself when it goes back."""
    whole = Run.from_checkpoint
    return lambda run, *args: whole(run, *args)._replace(**{name: getattr(run, name)})


def forget_the_interval(run, *args, whole=Run.from_checkpoint):
    return whole(run, *args)._replace(current=Steps(), closed=())


MUTANTS = {
    "skips the batch after": (BatchFeed, "skip", skip_the_next),
    "keeps the history": (Run, "from_checkpoint", keep("history")),
    "keeps the rows": (JsonlWriter, "resume", lambda writer, step: None),
    "forgets the open interval": (Run, "from_checkpoint", forget_the_interval),
    "keeps the state of hooks": (Hooks, "from_saved", lambda hooks, saved, before: before),
    "keeps later checkpoints": (
        sf.checkpoint.Series,
        "delete_after",
        lambda series, step, _=None: None,
    ),
}


def go_back(data, folder):
    hooks = [running_mean(), spike()]
    return fit(data, folder, hooks, log_every=6, checkpoints=sf.Checkpoints(every=4), steps=32)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """A run that skips a batch from the start, which one that goes back equals."""
    folder, other = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    want = go_back(batches([18]).without([(18, 19)]), other), other
    check(go_back(batches([18]), folder), folder, want)
    return want


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.filterwarnings("ignore")
def test_one_that_goes_back_almost_right_is_found(tmp_path, wanted, monkeypatch, name):
    owner, method, mutant = MUTANTS[name]
    monkeypatch.setattr(owner, method, mutant)
    with pytest.raises((AssertionError, sf.StepfoldError, ValueError, KeyError)):
        check(go_back(batches([18]), tmp_path), tmp_path, wanted)


class running_mean(BaseHook):
    """Log the mean of the loss over the run, and losses that are large."""

    provides, can_stop, run_state = ("mean/",), False, ("_total", "_count")
    _total, _count = 0.0, 0

    def reset(self, step):
        self._total, self._count = 0.0, 0

    def __call__(self, event):
        self._total += float(np.sum(event.per_step["train/loss"]))
        self._count += len(event.per_step["train/loss"])
        worst = float(np.max(event.per_step["train/loss"]))
        large = {"mean/large": worst} if worst > 1e3 else {}
        return {"mean/loss": self._total / self._count, **large}


@pytest.mark.full
def test_a_new_run_in_the_directory_does_not_skip(tmp_path, skipping):
    fit(batches([23]), tmp_path, spike())
    for path in (tmp_path / "checkpoints").iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    with pytest.warns(UserWarning, match="previous-1"):
        run = fit(batches(), tmp_path)
    check(run, tmp_path, skipping())


class Own:
    """Batches that can be resumed, but not skip some."""

    def __init__(self):
        self._inner = batches()

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._inner)

    def get_state(self):
        return self._inner.get_state()

    def set_state(self, state):
        self._inner.set_state(state)


def test_what_cannot_go_back_is_refused(tmp_path):
    hook = lambda event: sf.hooks.GoBack(skip=1)
    with pytest.raises(sf.errors.ConfigError, match=r"hooks: expected checkpoints=… .* got none"):
        fit(batches(), tmp_path / "a", hook, checkpoints=None)
    with pytest.raises(sf.errors.ConfigError, match="batches: expected some that can skip a part"):
        fit(
            Own(),
            tmp_path / "b",
            lambda event: sf.hooks.GoBack(skip=1) if event.step > 12 else None,
        )
    with pytest.raises(sf.errors.ConfigError, match="on_spike: expected checkpoints=… to go"):
        fit(batches(), tmp_path / "e", spike(), checkpoints=None)
    with pytest.raises(sf.errors.ConfigError, match="batches: expected some that can skip a part"):
        fit(Own(), tmp_path / "f", sf.hooks.on_nonfinite(action="go_back"))
    fit(batches(), tmp_path / "g", sf.hooks.only_warn(spike()), checkpoints=None, steps=2)
    for skip in (0, (5, 5)):
        with pytest.raises(
            sf.errors.ConfigError, match=r"GoBack\(skip=…\): expected a number of steps"
        ):
            fit(
                batches(),
                tmp_path / f"c{skip}",
                lambda event, skip=skip: sf.hooks.GoBack(skip=skip),
            )
    for to in (40,):
        with pytest.raises(
            sf.errors.ConfigError, match=r"GoBack\(to=…\): expected a step before 4"
        ):
            fit(batches(), tmp_path / f"d{to}", lambda event, to=to: sf.hooks.GoBack(to=to))
