"""Random runs: `fit`, cut and resumed, does what the reference fold says, to the bit."""

import functools
import shutil
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tests.laws import network, random_runs, reference
from tests.laws.random_runs import Broken, Cut, Source, Spec
from tests.small import full_but

import stepfold as sf
from stepfold.loop import run as run_module
from stepfold.loop.hook import Hooks
from stepfold.loop.intervals import intervals_from_json
from stepfold.loop.run import Run
from stepfold.loop.schedule import Schedule
from stepfold.runs import resume as resume_module

pytestmark = pytest.mark.not_optimized


class Found(Exception):
    """A run differs from the reference."""


# What is drawn


MESHES = st.sampled_from(["one", "one", "dp", "fsdp"])


@st.composite
def sources(draw):
    kind = draw(st.sampled_from(["arrays", "arrays", "sizes", "list", "mix", "stream"]))
    has_epochs = kind in ("arrays", "sizes")
    skips = draw(st.sampled_from([(), (), ((2, 4), (7, 8))])) if kind != "list" else ()
    own_epochs = draw(st.sampled_from([None, None, 3])) if has_epochs else None
    return Source(
        kind=kind,
        skips=skips,
        own_epochs=own_epochs,
        start=draw(st.sampled_from([0, 0, 3])) if has_epochs and not skips else 0,
        remainder=draw(st.sampled_from(["drop", "pad", "keep"])) if kind == "arrays" else "drop",
        prefetch=draw(st.booleans()) and kind != "list",
        change=draw(st.integers(2, 9)),
        length=draw(st.integers(3, 9)),
        passes=1,
    )


def lengths(source):
    steps = st.builds(lambda n: {"steps": n}, st.integers(4, 24))
    more = st.builds(lambda n: {"more_steps": n}, st.integers(3, 12))
    epochs = st.builds(lambda n: {"epochs": n}, st.integers(1, 3))
    kinds = [steps, steps, more]
    has_epochs = source.kind in ("arrays", "sizes", "list") and source.own_epochs is None
    if has_epochs and not source.start:
        kinds.append(epochs)
    if source.own_epochs or source.kind in ("list", "stream"):
        kinds.append(st.just({}))
    return st.one_of(kinds)


@st.composite
def cuts(draw, hooks, evaluations):
    action = draw(st.sampled_from(["raise", "stop", "save", "crash"]))
    step = draw(st.integers(1, 20))
    places = [("pull", step)]
    kinds = ["train", *(e.name for e in evaluations)]
    if hooks:
        places.append((draw(st.sampled_from(hooks)), draw(st.sampled_from(kinds)), step))
    if evaluations and action != "save":
        places.append(("evaluate", draw(st.sampled_from(evaluations)).name, step))
    return draw(st.sampled_from(places)), action


def period(max_value, *, epochs):
    by_step = st.builds(lambda n: (n, None), st.integers(1, max_value))
    by_epoch = st.builds(lambda n: (None, n), st.integers(1, 2))
    return st.one_of(by_step, by_step, by_epoch) if epochs else by_step


@st.composite
def runs(draw):
    source = draw(sources())
    has_epochs = source.kind in ("arrays", "sizes", "list")
    task = draw(st.sampled_from(sorted(random_runs.TASKS)))
    kinds = ["averages", "collection", *(["collecting"] if has_equal_batches(source) else [])]
    evaluations = []
    for name in draw(st.sampled_from([[], ["eval"], ["eval", "test"]])):
        every, every_epochs = draw(period(8, epochs=has_epochs))
        evaluations.append(
            SimpleNamespace(
                name=name, every=every, every_epochs=every_epochs, at_start=draw(st.booleans())
            )
        )
    checkpoints = temporary = None
    names = ["train", *(e.name for e in evaluations)]
    if draw(st.integers(0, 5)):
        every, every_epochs = draw(period(9, epochs=has_epochs))
        if draw(st.integers(0, 4)) == 0:  # only the best, and at the end
            every = every_epochs = None
        checkpoints = SimpleNamespace(
            every=every, every_epochs=every_epochs, keep=draw(st.integers(1, 3)),
            at_start=draw(st.booleans()),
            keep_every=draw(st.sampled_from([None, None, 4])), keep_best=1,
            best=draw(st.sampled_from([None, *(f"{name}/loss" for name in names)])), mode=None,
        )  # fmt: skip
        if checkpoints.best is not None:
            checkpoints.mode = draw(st.sampled_from([None, "min", "max"]))
        if draw(st.integers(0, 3)) == 0:
            temporary = SimpleNamespace(every=draw(st.integers(1, 4)), every_epochs=None)
    log_every = draw(st.integers(1, 9) | st.sampled_from([12, 20, 24]))
    # Adam bounds what a poisoned example can do; SGD would diverge.
    can_go_back = checkpoints is not None and source.kind != "list" and task != "plain"
    goes_back = draw(st.sampled_from([0, 0, 0, 3])) if can_go_back else 0
    has_nan = not goes_back and draw(st.integers(0, 4)) == 0
    is_poisoned = goes_back or has_nan
    source.poison = draw(st.integers(0, random_runs.EXAMPLES - 1)) if is_poisoned else None
    source.value = np.nan if has_nan else random_runs.SPIKE
    sessions = []
    count = draw(st.integers(1, 3)) if checkpoints and source.kind != "list" else 1
    for number in range(count):
        before = sessions[-1] if sessions else None
        changes = [before is None or draw(st.integers(0, 2)) == 0 for _ in range(5)]
        lists = st.lists(st.sampled_from(["a", "b", "c"]), unique=True)
        hooks = draw(lists) if changes[0] else before.hooks
        scripts = st.tuples(st.sampled_from(names), st.integers(1, 20)) | st.none()
        is_last = number == count - 1
        sessions.append(SimpleNamespace(
            hooks=hooks, script=draw(scripts) if changes[1] else before.script,
            exact=draw(st.sampled_from([(), (), ("a",)])),
            epochs=("a", "b", "c") if has_epochs and draw(st.booleans()) else (),
            mesh=draw(MESHES) if changes[2] else before.mesh,
            kind=draw(st.sampled_from(kinds)) if changes[4] else before.kind,
            length=draw(lengths(source)) if changes[3] else before.length,
            cut=(None, None) if is_last else draw(cuts(hooks, evaluations)),
            limit=draw(st.sampled_from([0, 0, 0, 3, 6])) if changes[1] else before.limit,
        ))  # fmt: skip
    if source.kind == "list":
        source.passes = sessions[0].length.get("epochs", 1)
    return SimpleNamespace(
        source=source, task=task, evaluations=evaluations, checkpoints=checkpoints,
        temporary=temporary, log_every=log_every, goes_back=goes_back,
        replaces=draw(st.sampled_from([0, 0, 2, 3])),
        reweights=draw(st.sampled_from([0, 2, 3])) if source.kind == "mix" else 0,
        part=draw(st.sampled_from([0, 0, 2, 3])),
        steps_per_call=1 if source.remainder == "keep" else draw(st.sampled_from([1, 1, 3])),
        sessions=sessions,
        has_trainer=draw(st.booleans())
        and may_have_trainer(source, sessions, evaluations, goes_back)
        and not any(item.at_start for item in [*evaluations, *filter(None, [checkpoints])]),
    )  # fmt: skip


def may_have_trainer(source, sessions, evaluations, goes_back):
    """Whether `Trainer` can do a run with batches of its own."""
    has_length = all("epochs" not in session.length for session in sessions)
    # At a stop it evaluates, and keeps that in the row of the step when the run continues.
    may_stop = [goes_back or call.limit or call.script is not None for call in sessions]
    has_same_rows = not (evaluations and any(may_stop[:-1]))
    return has_length and has_same_rows and source.kind != "list"


def has_equal_batches(source):
    return source.kind != "sizes" and source.remainder != "keep"


# The law, and what it finds


PARTS = full_but([0], range(16))  # of the draws, so that shares of the full tier get equally many


def draw_runs(number, test, phases=tuple(Phase), part=0):
    """Call a test with this many random runs; those of each part are others."""
    limits = settings(
        max_examples=number,
        database=None,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=[*HealthCheck],
    )
    limits(seed(part)(given(runs())(test)))()


@pytest.mark.parametrize("part", PARTS)
def test_runs_that_are_cut_and_resumed_are_the_reference_fold(part, count):
    draw_runs(count(6, 125), check, part=part)


def one_run(**changed):
    """Make a run of one call; options of a call are taken from `calls`."""
    source = {"kind": "arrays", "skips": (), "own_epochs": None, "start": 0, "remainder": "pad"}
    source |= {"prefetch": False, "change": 2, "length": 3, "passes": 1, "poison": None, "value": 0}
    call = {"hooks": ["a"], "script": None, "exact": (), "epochs": (), "mesh": "one"}
    call |= {"length": {"steps": 12}, "cut": (None, None), "kind": "averages"}
    call |= {"limit": 0}
    run = {"task": "plain", "evaluations": [], "temporary": None}
    run |= {
        "log_every": 5,
        "goes_back": 0,
        "replaces": 0,
        "reweights": 0,
        "part": 0,
        "steps_per_call": 1,
        "has_trainer": False,
    }
    run["checkpoints"] = SimpleNamespace(
        every=50,
        every_epochs=None,
        keep=3,
        keep_every=None,
        keep_best=1,
        best=None,
        mode=None,
        at_start=False,
    )
    run["source"] = Source(**source | changed.pop("source", {}))
    run["sessions"] = [SimpleNamespace(**call | each) for each in changed.pop("calls", [{}])]
    return SimpleNamespace(**run | changed)


EVERY_4 = SimpleNamespace(
    every=4, every_epochs=None, keep=1, keep_every=None, keep_best=1, best=None, mode=None,
    at_start=True,
)  # fmt: skip
PULL_8 = {"cut": (("pull", 8), "raise")}
EVALUATION = SimpleNamespace(name="eval", every=4, every_epochs=None, at_start=False)
# What the random runs have found, or would find if they drew it.
FOUND = {
    "a stop that is due after a cut": one_run(
        log_every=1, calls=[{"script": ("train", 7), **PULL_8}, {"script": ("train", 7)}]
    ),
    "a stop at the event of a signal": one_run(
        calls=[{"script": ("train", 5), "cut": (("a", "train", 5), "stop")}, {}]
    ),
    "a hook that has stopped the run stops it again": one_run(
        evaluations=[EVALUATION],
        calls=[{"hooks": ["b"], "limit": 3}, {"hooks": ["b"], "limit": 3}],
    ),
    "a hook that has stopped the run, with a higher limit": one_run(
        calls=[{"hooks": ["b"], "limit": 1}, {"hooks": ["b"], "limit": 2}]
    ),
    "a hook that has stopped the run in its last step": one_run(
        calls=[{"hooks": ["b"], "limit": 3}, {"hooks": ["b"], "limit": 3, "length": {"steps": 20}}]
    ),
    "a hook that would stop a run that is done but for its last event": one_run(
        evaluations=[EVALUATION],
        calls=[
            {"hooks": ["a", "b"], "cut": (("a", "train", 12), "raise")},
            {"hooks": ["a", "b"], "limit": 3},
        ],
    ),
    "a stop, and a signal in the last evaluation": one_run(
        evaluations=[EVALUATION],
        calls=[{"script": ("train", 5), "cut": (("evaluate", "eval", 7), "stop")}, {}],
    ),
    "signals in evaluations after the last step of an epoch": one_run(
        evaluations=[EVALUATION, SimpleNamespace(**vars(EVALUATION) | {"name": "test"})],
        calls=[
            {"epochs": ("a",), "cut": (("evaluate", "eval", 4), "stop")},
            {"epochs": ("a",), "cut": (("evaluate", "test", 4), "stop")},
            {"epochs": ("a",)},
        ],
    ),
    "a hook that has stopped the run stops it again, without another hook": one_run(
        calls=[{"hooks": ["a", "b"], "limit": 1}, *2 * [{"hooks": ["b"], "limit": 1}]]
    ),
    "a stop that is due after a cut, without another hook": one_run(
        evaluations=[EVALUATION],
        calls=[
            {"hooks": ["a", "b"], "limit": 1, "cut": (("a", "train", 4), "raise")},
            *2 * [{"hooks": ["b"], "limit": 1}],
        ],
    ),
    "a kill after a temporary checkpoint": one_run(
        temporary=SimpleNamespace(every=5, every_epochs=None),
        calls=[{"cut": (("pull", 8), "crash")}, {}],
    ),
    "a stop while several steps are dispatched": one_run(
        steps_per_call=3, calls=[{"script": ("train", 5)}]
    ),
    "a stop in the last evaluation": one_run(
        evaluations=[EVALUATION],
        source={"own_epochs": 3},
        calls=[{"script": ("eval", 12), "length": {}}, {"length": {"steps": 17}}],
    ),
    "a metric that is new after a cut": one_run(
        calls=[{**PULL_8, "kind": "averages"}, {"kind": "collection"}]
    ),
    "a hook that is gone after a cut": one_run(
        calls=[{"hooks": ["a", "b"], **PULL_8}, {"hooks": ["b"]}]
    ),
    "a metric that is gone after a cut": one_run(
        calls=[{**PULL_8, "kind": "collection"}, {"kind": "averages"}]
    ),
    "collected values of batches of two sizes": one_run(
        source={"remainder": "keep"}, calls=[{"kind": "collecting"}], log_every=6
    ),
    "epochs from a later start": one_run(source={"start": 3}, calls=[{"length": {"epochs": 1}}]),
    "a hook of epochs that is new after a cut": one_run(
        calls=[{"cut": (("pull", 5), "stop")}, {"epochs": ("a",)}]
    ),
    "no batches left after going back, in a run that trained": one_run(
        source={
            "kind": "sizes",
            "own_epochs": 3,
            "change": 9,
            "poison": 0,
            "value": 200.0,
            "remainder": "drop",
        },
        task="averaged",
        evaluations=[SimpleNamespace(name="eval", every=1, every_epochs=None, at_start=False)],
        checkpoints=EVERY_4,
        temporary=SimpleNamespace(every=1, every_epochs=None),
        goes_back=3,
        log_every=6,
        calls=[
            {"hooks": [], "length": {"more_steps": 6}, "cut": (("pull", 1), "save")},
            {"hooks": ["a", "b"], "length": {"more_steps": 6}},
        ],
    ),
    "a run that a hook stopped, continued with fewer steps than it has done": one_run(
        source={"skips": ((2, 4), (7, 8))},
        steps_per_call=3,
        calls=[
            {
                "hooks": ["a", "b"],
                "limit": 3,
                "epochs": ("a", "b"),
                "length": {"steps": 6},
                "cut": (("pull", 6), "raise"),
            },
            {"hooks": ["a", "b"], "limit": 3, "length": {"steps": 6}, "cut": (("pull", 1), "stop")},
            {"hooks": ["a", "b"], "limit": 3, "length": {"steps": 4}},
        ],
    ),
    "a number that a hook returns twice at a step": one_run(evaluations=[EVALUATION], log_every=4),
    "a trainer of batches from a later start": one_run(source={"start": 3}, has_trainer=True),
    "a trainer with a jitted step and batches of two sizes": one_run(
        source={"remainder": "keep"}, has_trainer=True
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_run_that_once_differed(name):
    check(FOUND[name])


def is_log_point_late(monkeypatch):
    late = lambda self, step: step == self.total or (step > 1 and (step - 1) % self.log_every == 0)
    monkeypatch.setattr(Schedule, "is_log_point", late)


def evaluation_is_lost_at_a_resume(monkeypatch):
    due, begun = Schedule.evaluates, resume_module.continue_from

    def lossy(self, evaluation, step, began):
        return step not in (began, self.lost) and due(self, evaluation, step, began)

    def begin(session, restored, *args):
        monkeypatch.setattr(Schedule, "lost", restored.step)
        return begun(session, restored, *args)

    monkeypatch.setattr(Schedule, "lost", None, raising=False)
    monkeypatch.setattr(Schedule, "evaluates", lossy)
    monkeypatch.setattr(resume_module, "continue_from", begin)


def metrics_go_to_others_at_a_resume(monkeypatch):
    def mixed(saved):
        rotate = lambda leaves: [*leaves[1:], *leaves[:1]]
        chunks = [
            dict(zip(chunk, rotate([*chunk.values()]), strict=True)) for chunk in saved["chunks"]
        ]
        return intervals_from_json({**saved, "chunks": chunks})

    monkeypatch.setattr(run_module, "intervals_from_json", mixed)


def state_of_hooks_is_restored_by_position(monkeypatch):
    def by_position(self, saved, before):
        states = [state for _, state in saved]
        return (*states, *self.init)[: len(before)]

    monkeypatch.setattr(Hooks, "from_saved", by_position)


def restores(monkeypatch, change):
    """Let runs continue from a checkpoint in which something was changed."""
    restore = Run.from_checkpoint
    changed = lambda self, saved, *args: restore(self, saved and {**saved, **change}, *args)
    monkeypatch.setattr(Run, "from_checkpoint", changed)


def epoch_ends_again_at_a_resume(monkeypatch):
    restores(monkeypatch, {"epoch_ended_at": 0})


def stop_is_lost_at_a_resume(monkeypatch):
    restores(monkeypatch, {"stop": None})


@pytest.mark.full
@pytest.mark.parametrize(
    "defect",
    [
        is_log_point_late,
        evaluation_is_lost_at_a_resume,
        metrics_go_to_others_at_a_resume,
        state_of_hooks_is_restored_by_position,
        epoch_ends_again_at_a_resume,
        stop_is_lost_at_a_resume,
    ],
)
def test_a_defect_is_found_within_200_runs(monkeypatch, defect):
    defect(monkeypatch)
    drawn = []

    def differs(run):
        drawn.append(run)
        try:
            check(run)
        except Exception as error:  # a raw error is a difference too
            raise Found(len(drawn)) from error

    def search():
        for run in FOUND.values():
            differs(run)
        draw_runs(200, differs, [Phase.generate])

    with pytest.raises(Found):
        search()


# What is compared


def check(run):
    with tempfile.TemporaryDirectory() as folder, jax.numpy_dtype_promotion("standard"):
        folder = Path(folder) / "0"
        directory = SimpleNamespace(permanent={}, temporary={}, rows={}, skips=[])
        for number, session in enumerate(run.sessions, 1):
            wanted = expected(run, session, directory)
            following = folder.with_name(str(number))
            found = observed(run, session, folder, following)
            lines = [*differences(found, wanted)]
            assert not lines, f"in call {number}:\n" + "\n".join(lines[:9])
            if found["raised"] == "Crash":
                directory.rows = {}


def specs(run, session, cut):
    seen = []
    hooks = [
        Spec(
            name=name, seen=seen, cut=cut, script=session.script if name == "a" else None,
            goes_back=run.goes_back if name == "b" else 0,
            replaces=run.replaces if name == "c" else 0,
            reweights=run.reweights if name == "c" else 0,
            limit=session.limit if name == "b" else 0,
            is_exact=name in session.exact, wants_epochs=name in session.epochs,
        )
        for name in session.hooks
    ]  # fmt: skip
    return hooks, seen


def expected(run, session, directory):
    """Return what the reference says that a call of `fit` does."""
    cut = Cut(*session.cut)
    hooks, seen = specs(run, session, cut)
    is_exact = any(hook.is_exact for hook in hooks)
    delay = 0 if is_exact else reference.delay_of(run.log_every)
    step = random_runs.step_of(run.task, session.kind)
    place = functools.partial(random_runs.place, run.task, session.mesh)

    def total(data, present, saved):
        length = session.length
        if "epochs" in length:
            return data.steps_of(length["epochs"])
        if "more_steps" not in length:
            return length.get("steps")
        if saved is not None and not saved.is_complete and saved.total is not None:
            return saved.total
        return present.step + length["more_steps"]

    call = SimpleNamespace(
        data=run.source.data, cut=cut, hooks=hooks, total=total, delay=delay,
        state=place(random_runs.first_state(run.task)), step=random_runs.jitted(step), place=place,
        wants_epochs=any(hook.wants_epochs for hook in hooks)
        or (run.has_trainer and run.source.kind in ("arrays", "sizes")),
        evaluations=[random_runs.Evaluated(run.task, e) for e in run.evaluations],
        checkpoints=run.checkpoints, temporary=run.temporary, part=run.part, part_seen=[],
        log_every=run.log_every, steps_per_call=run.steps_per_call,
    )  # fmt: skip
    fold, raised = reference.Fit(call, directory), None
    try:
        fold()
    except (Broken, reference.Crash) as error:
        raised = type(error).__name__
    if fold.is_signaled and raised is None:
        raised = "SystemExit"
    crashed = raised == "Crash"
    return outcome(
        has_same_program(run), raised, None if raised else fold.stop,
        fold.run.step, fold.run.state, seen, call.part_seen,
        {} if crashed else directory.rows, random_runs.history_of(fold.run.rows), fold.warnings,
        [sorted(directory.permanent), sorted(directory.temporary)], directory.skips,
    )  # fmt: skip


def observed(run, session, folder, following):
    """Return what a call of `fit`, or a trainer, does."""
    crash = lambda: random_runs.copy_as_killed(folder, following)
    cut = Cut(*session.cut, crash)
    (hooks, seen), part_seen = specs(run, session, cut), []
    batches = run.source.make()
    if run.source.kind != "list":
        batches = random_runs.CutBatches(batches, cut, run.source.start)
    step = random_runs.step_of(run.task, session.kind)
    step = random_runs.jitted(step) if run.steps_per_call == 1 else step
    state = random_runs.place(run.task, session.mesh, random_runs.first_state(run.task))
    parts = SimpleNamespace(
        step=step, state=state, batches=batches,
        task=run.task, mesh=session.mesh, folder=folder, length=session.length,
        evaluations=[random_runs.evaluation(run.task, e, cut) for e in run.evaluations],
        hooks=[*(hook.for_fit() for hook in hooks), *random_runs.own_parts(run.part, part_seen)],
        checkpoints=_checkpoints(run, folder),
        log_every=run.log_every, steps_per_call=run.steps_per_call,
    )  # fmt: skip
    raised = stop = None
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            call = random_runs.call_trainer if run.has_trainer else random_runs.call_fit
            result = call(parts)
            stop = result.stop_reason.kind
        except (Broken, reference.Crash, SystemExit) as error:
            raised, result = type(error).__name__, error.result
    if raised == "Crash":
        shutil.rmtree(folder)
        following.rename(folder)
    saved = sorted(sf.checkpoint.verify(folder / "checkpoints")) if run.checkpoints else []
    local = next((folder / "temporary").glob("series-*"), None)
    return outcome(
        has_same_program(run), raised, stop, result.steps, result.state, seen, part_seen,
        {} if raised == "Crash" else random_runs.read_rows(folder / "metrics.jsonl"),
        {name: [[*curve.steps], [*curve]] for name, curve in result.history.items()},
        random_runs.known_warnings(caught),
        [saved, sorted(sf.checkpoint.verify(local)) if local else []],
        random_runs.read_skips(folder / "checkpoints"),
    )  # fmt: skip


def _checkpoints(run, folder):
    if run.checkpoints is None:
        return None
    temporary = None
    if run.temporary is not None:
        temporary = sf.Temporary(folder / "temporary", every=run.temporary.every)
    is_async = "crash" not in [each.cut[1] for each in run.sessions]
    return sf.Checkpoints(**vars(run.checkpoints), temporary=temporary, async_=is_async)


def outcome(exact, raised, kind, step, state, seen, part_seen, rows, history, warned, saved, skips):
    return {
        "raised": raised,
        "stop": kind,
        "step": step,
        "state": None if raised == "Crash" else state_bits(state, exact),
        "seen": seen,
        "part_seen": part_seen,
        "rows": rows,
        "history": {} if raised == "Crash" else history,
        "warnings": [] if raised == "Crash" else sorted(set(warned)),
        "saved": saved,
        "skips": [list(pair) for pair in skips],
    }


def has_same_program(run):
    """Whether the reference runs the program of `fit`; another one may round differently."""
    is_wrapped = run.has_trainer and any(call.mesh != "one" for call in run.sessions)
    return run.steps_per_call == 1 and not is_wrapped


def state_bits(state, exact):
    if exact:
        return network.bits(state)
    leaves = jax.tree.leaves(state._replace(key=jax.random.key_data(state.key)))
    return [[float(x) for x in np.ravel(leaf)] for leaf in leaves]


def differences(found, wanted, path=""):
    """List where two outcomes differ; numbers of metrics may differ by rounding."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        missing = object()
        for name in {**wanted, **found}:
            yield from differences(
                found.get(name, missing), wanted.get(name, missing), f"{path}/{name}"
            )
    elif isinstance(wanted, list | tuple) and type(found) is type(wanted):
        if len(found) != len(wanted):
            yield f"{path}: {len(found)} instead of {len(wanted)} entries: {found} {wanted}"[:2000]
        for index, pair in enumerate(zip(found, wanted, strict=False)):
            yield from differences(*pair, f"{path}/{index}")
    elif isinstance(wanted, float) and isinstance(found, float):
        if not np.isclose(found, wanted, rtol=1e-4, atol=1e-5, equal_nan=True):
            yield f"{path}: {found} instead of {wanted}"
    elif found != wanted:
        yield f"{path}: {found!r:.200} instead of {wanted!r:.200}"
