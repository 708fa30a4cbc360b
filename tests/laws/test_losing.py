"""Random runs that lose devices do what the reference fold, which loses none, says."""

import functools
import math
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from tests.laws.losing import CutElastic, Losses
from tests.laws.random_runs import evaluation, first_state, parts_on
from tests.laws.test_random_runs import (
    EVERY_4,
    PARTS,
    Found,
    check,
    draw_runs,
    observed,
    one_run,
    runs,
)
from tests.small import full_but

import stepfold as sf
from stepfold.loop import run as run_module
from stepfold.loop.data import BatchFeed
from stepfold.loop.elastic import Segments
from stepfold.loop.hooks.base import HookDispatcher
from stepfold.loop.intervals import Steps
from stepfold.loop.run_directory import RunDirectory
from stepfold.loop.session import Session

pytestmark = pytest.mark.not_optimized


@st.composite
def losing_runs(draw):
    """Draw runs whose calls lose one device or two, besides what cuts them."""
    run = draw(runs().filter(lambda run: run.source.kind not in ("list", "stream")))
    run.has_trainer, run.part = False, 0
    forgets = run.checkpoints is not None and draw(st.integers(0, 3)) == 0
    if forgets:
        run.checkpoints.at_start = True  # there is one to go back to
    # Blocks of a row, so that no number of devices has one block each.
    may_be_ordered = {call.kind for call in run.sessions} == {"averages"}
    is_keeping = run.source.remainder == "keep"
    may_be_ordered &= not is_keeping and run.source.kind != "sizes"
    is_ordered = may_be_ordered and run.steps_per_call == 1 and draw(st.booleans())
    run.elastic = SimpleNamespace(
        devices=draw(st.sampled_from([2, 4])),
        axis=draw(st.sampled_from(["dp", "fsdp"])),
        is_jitted=run.steps_per_call == 1 and (is_keeping or is_ordered or draw(st.booleans())),
        is_ordered=is_ordered,
        every=draw(st.sampled_from([None, None, 2, 3])),
        forgets=forgets,
    )
    step = st.integers(1, 20)
    kinds = [st.tuples(st.just("pull"), step)]
    if run.evaluations:
        names = st.sampled_from([each.name for each in run.evaluations])
        kinds.append(st.tuples(st.just("evaluate"), names, step))
    meetings = [st.tuples(st.just("meet"), st.integers(1, 60))] * 2
    for call in run.sessions:
        # After a loss, a signal that no vote knew of takes effect after another step.
        is_signaled = call.cut[1] in ("save", "stop")
        places = kinds[:1] if is_signaled else [*kinds, *([] if forgets else meetings)]
        number = 0 if is_signaled and run.steps_per_call > 1 else 2
        call.losses = draw(st.lists(st.one_of(places), max_size=number, unique=True))
    return run


@pytest.mark.parametrize("part", PARTS)
def test_a_run_that_loses_devices_is_one_that_lost_none(part, count):
    draw_runs(count(2, 125), check, strategy=losing_runs(), part=part)


ELASTIC = SimpleNamespace(
    devices=4, axis="dp", is_jitted=False, is_ordered=False, every=None, forgets=False
)


EVERY_STEP = SimpleNamespace(name="eval", every=1, every_epochs=None, at_start=False)


def stopped_before(meeting):
    """Make a run that a hook stops at step 3; then a device dies, before all agree to stop."""
    third = SimpleNamespace(name="test", every=3, every_epochs=None, at_start=False)
    call = {"script": ("train", 3), "losses": [("meet", meeting)]}
    return one_run(elastic=ELASTIC, evaluations=[third, EVERY_STEP], log_every=1, calls=[call])


# What the random runs have found, or would find if they drew it.
FOUND = {
    "a loss in a resumed run, in which another step is a log point": one_run(
        elastic=ELASTIC,
        calls=[
            {"cut": (("pull", 4), "stop"), "length": {"steps": 8}},
            {"epochs": ("a",), "length": {"steps": 8}, "losses": [("pull", 5)]},
        ],
    ),
    "a loss after a hook stopped the run, before its evaluations": stopped_before(6),
    "a loss between two evaluations": stopped_before(8),
    "a loss in the end of a run that cannot go back again": one_run(
        source={"kind": "mix", "remainder": "drop", "change": 3, "poison": 0, "value": 200.0},
        task="averaged",
        elastic=ELASTIC,
        evaluations=[
            SimpleNamespace(name=name, every=every, every_epochs=None, at_start=name == "eval")
            for name, every in (("eval", 5), ("test", 2))
        ],
        checkpoints=SimpleNamespace(**vars(EVERY_4) | {"every": None, "best": "eval/loss"}),
        log_every=3,
        goes_back=3,
        replaces=3,
        reweights=2,
        calls=[{"hooks": ["a", "b", "c"], "kind": "collection", "losses": [("meet", 52)]}],
    ),
    "a loss after the last event, which has shown a NaN": one_run(
        elastic=ELASTIC,
        source={"poison": 0, "value": math.nan},
        log_every=4,
        calls=[{"length": {"steps": 4}, "losses": [("meet", 3)]}],
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_run_that_once_differed(name):
    check(FOUND[name])


@pytest.mark.parametrize("meeting", full_but([2, 5], range(1, 9)))
def test_a_save_that_was_requested_is_made_after_a_loss(meeting, tmp_path):
    call = {"cut": (("pull", 2), "save"), "losses": [("meet", meeting)]}
    run = one_run(elastic=ELASTIC, calls=[call], log_every=50)
    found = observed(run, run.sessions[0], tmp_path / "0", tmp_path / "1")
    assert len(found["saved"][0]) == 2  # and at the end


@pytest.mark.filterwarnings("ignore:device 3 died")
@pytest.mark.parametrize("meeting", full_but([5, 8], range(1, 10)))
def test_what_hooks_know_survives_a_loss(meeting):
    """Hooks see no event twice, so what checkpoints do not keep of them must stay too."""

    def fit(places):
        losses, seen = Losses(places), []
        step = CutElastic(functools.partial(parts_on, ELASTIC, "plain", "averages"), losses)
        best = sf.stop_early("eval/loss", patience=9, keep_state=True)
        result = sf.fit(
            step,
            jax.device_put(first_state("plain"), step.plan),
            one_run(source={"poison": 1, "value": math.nan}).source.make(),
            steps=9,
            log_every=1,
            evaluation=evaluation("plain", EVERY_STEP, lambda *_: None),
            hooks=[best, lambda event: seen.append((event.kind, event.step))],
        )
        batch = jax.tree.map(np.asarray, result.capsule.batch)
        arrays = result.capsule.step, batch, best.best_step, best.best_state.params
        return seen, arrays

    with jax.numpy_dtype_promotion("standard"):
        (seen, arrays), (its, expected) = fit([("meet", meeting)]), fit([])
    assert seen == its
    chex.assert_trees_all_close(arrays, expected, rtol=1e-4)


def repeats_only_in(function):
    """Let a method do something else while a run is repeated from a copy."""
    repeat = Segments.repeat

    def sabotaged(self, session, lost):
        with pytest.MonkeyPatch.context() as patch:
            function(patch)
            repeat(self, session, lost)

    return sabotaged


@repeats_only_in
def batch_is_skipped(patch):
    seek = BatchFeed.seek

    def late(self, position, *args, **options):
        return seek(self, position | {"step": position["step"] + 1}, *args, **options)

    patch.setattr(BatchFeed, "seek", late)


@repeats_only_in
def steps_are_not_repeated(patch):
    continue_from = Session.continue_from

    def ahead(self, restored, *args):
        continue_from(self, restored._replace(step=self.run.step), *args)

    patch.setattr(Session, "continue_from", ahead)


@repeats_only_in
def state_of_hooks_is_not_restored(patch):
    patch.setattr(HookDispatcher, "set_state", lambda self, state: None)


@repeats_only_in
def open_interval_is_lost(patch):
    patch.setattr(run_module, "intervals_from_json", lambda saved: (Steps(), ()))


def rows_are_not_dropped(self, session, losses=()):
    """Continue with the rows that the file has, and log them again."""


def copy_is_of_another_step(self, state, step):
    """Keep the first copy for good."""
    if self._copy is None:
        KEEP(self, state, step)


KEEP = Segments.keep


@pytest.mark.full
@pytest.mark.parametrize(
    ("owner", "name", "defect"),
    [
        (Segments, "repeat", batch_is_skipped),
        (Segments, "repeat", steps_are_not_repeated),
        (Segments, "repeat", state_of_hooks_is_not_restored),
        (Segments, "repeat", open_interval_is_lost),
        (RunDirectory, "continue_from", rows_are_not_dropped),
        (Segments, "keep", copy_is_of_another_step),
    ],
)
def test_a_defect_is_found_within_100_runs(monkeypatch, owner, name, defect):
    monkeypatch.setattr(owner, name, defect)

    def differs(run):
        try:
            check(run)
        except Exception as error:  # a raw error is a difference too
            raise Found from error

    with pytest.raises(Found):
        draw_runs(100, differs, [Phase.generate], losing_runs())
