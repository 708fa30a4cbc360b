"""`fit` reads the evaluations that another process makes of its checkpoints."""

import json
import signal
import threading
import time
import warnings
from dataclasses import replace

import jax
import pytest
from tests import small

import stepfold as sf
from stepfold.checkpoint import claims
from stepfold.checkpoint.claims import Lease
from stepfold.checkpoint.results import FOLDER, LEASES
from stepfold.checkpoint.store import DirectoryStore, open_store
from stepfold.errors import CheckpointError
from stepfold.runs import remote

STEPS = 12
pytestmark = pytest.mark.filterwarnings("ignore:.*since no live process makes it")


def evaluation(**options):
    return sf.Evaluation(lambda state: {"step": float(state.step)}, **options)


def fit(folder, hooks=(), **options):
    options = {
        "steps": STEPS,
        "checkpoints": sf.Checkpoints(every=4, keep=1, async_=False),
        "evaluation": evaluation(every=2, remote=True),
        "log_every": 1,
    } | options
    return sf.fit(
        small.STEP, small.start(), small.batches(), run_dir=folder, hooks=hooks, **options
    )


def evaluate(folder, **options):
    state = small.start()
    like = jax.eval_shape(lambda: state)
    options = {"steps": "all", "follow": False} | options
    return sf.evaluate_run(folder, like, evaluation(), **options)


class At:
    """A hook that evaluates at some log points, and keeps the late events."""

    can_stop = False

    def __init__(self, folder, moments, **options):
        self.folder, self.moments, self.options = folder, moments, options
        self.late, self.saved, self.found = [], {}, []

    def __call__(self, event):
        if event.is_late:
            self.late.append((event.step, int(event.state.step), event.metrics["eval/step"]))
        if event.is_train:
            self.saved[event.step] = sf.Checkpoints(self.folder / "checkpoints").steps()
            if event.step in self.moments:
                self.found.append(evaluate(self.folder, **self.options))


def test_hooks_see_each_result_once_in_order_at_the_next_event(tmp_path):
    hook = At(tmp_path, [7, 11])
    run = fit(tmp_path, hook)
    # Log points are read one step later.
    assert hook.late == [(2, 8, 2.0), (4, 8, 4.0), (6, 8, 6.0), (8, 12, 8.0), (10, 12, 10.0)]
    assert run.history["eval/step"] == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert run.history["eval/step"].steps == [2, 4, 6, 8, 10]


def test_due_steps_are_saved_and_kept_until_their_result_is_read(tmp_path):
    hook = At(tmp_path, [7])
    fit(tmp_path, hook)
    assert hook.saved[7] == [2, 4, 6]
    assert hook.saved[9] == [8]  # the results of the others were read at step 8
    assert sf.Checkpoints(tmp_path / "checkpoints").steps()[-3:] == [8, 10, 12]


def test_a_run_without_the_evaluation_lets_the_steps_go(tmp_path):
    series = sf.Checkpoints(tmp_path / "checkpoints")
    fit(tmp_path, steps=4)
    assert series.steps() == [2, 4]
    fit(tmp_path, evaluation=())
    assert series.steps() == [12]


def test_steps_are_let_go_at_the_end_once_their_results_are_read(tmp_path):
    series = sf.Checkpoints(tmp_path / "checkpoints")
    fit(tmp_path, At(tmp_path, [11]))  # whose results are read after the last save
    assert series.steps() == [12]
    fit(tmp_path, steps=20)
    assert series.steps() == [12, 14, 16, 18, 20]
    evaluate(tmp_path)
    fit(tmp_path, steps=20)
    assert series.steps() == [20]


def test_a_damaged_result_is_warned_of_and_read_once_it_is_made_again(tmp_path):
    def hook(event):
        if event.is_train and event.step in (5, 9):
            evaluate(tmp_path)
        if event.is_train and event.step == 5:
            (path,) = (tmp_path / "checkpoints" / FOLDER).glob("eval-4-*")
            path.write_text("damaged")

    with pytest.warns(RuntimeWarning, match="eval-4-.*: the result of the evaluation is"):
        run = fit(tmp_path, hook)
    assert run.history["eval/step"].steps == [2, 4, 6, 8]
    evaluate(tmp_path)
    assert fit(tmp_path).history["eval/step"].steps == [2, 4, 6, 8, 10, 12]


def test_the_newest_result_lets_the_older_steps_go(tmp_path):
    hook = At(tmp_path, [7], steps="newest")
    run = fit(tmp_path, hook)
    assert hook.found == [({6: {"eval/step": 6.0}}, [2, 4])]
    assert run.history["eval/step"].steps == [6]
    assert 2 not in hook.saved[9]


def test_the_end_waits_for_a_live_process(tmp_path):
    found = []
    follow = lambda: found.append(evaluate(tmp_path, follow=True, timeout=60))
    other = threading.Thread(target=follow)
    other.start()
    run = fit(tmp_path, lambda event: time.sleep(0.2 * (event.step == 3)))
    other.join()
    assert run.history["eval/step"].steps == [2, 4, 6, 8, 10, 12]
    assert list(found[0].metrics) == [2, 4, 6, 8, 10, 12]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "eval/step" in row] == [2, 4, 6, 8, 10, 12]


def test_a_signal_ends_the_wait_for_a_live_process(tmp_path):
    """The run is complete on disk by then."""
    lease = Lease(open_store(tmp_path / "checkpoints", save=True), LEASES)
    lease.hold({"names": ["eval"], "steps": []})
    timer = threading.Timer(1.0, signal.raise_signal, (signal.SIGTERM,))
    try:
        with pytest.raises(SystemExit) as caught:
            fit(tmp_path, lambda event: timer.start() if event.step == STEPS else None)
        timer.join()
    finally:
        lease.release()
    assert caught.value.result.steps == STEPS
    with pytest.warns(UserWarning, match="nothing was trained"):
        assert fit(tmp_path).stop_reason.kind == "already_completed"


def test_a_result_after_the_end_is_read_by_the_next_call(tmp_path):
    run = fit(tmp_path)
    assert "eval/step" not in run.history
    evaluate(tmp_path)
    run = fit(tmp_path)
    assert (run.stop_reason.kind, run.history["eval/step"].steps) == (
        "completed", [2, 4, 6, 8, 10, 12]
    )  # fmt: skip
    with pytest.warns(UserWarning, match="nothing was trained"):
        assert fit(tmp_path).stop_reason.kind == "already_completed"


def test_late_results_can_stop_a_run(tmp_path):
    hook = At(tmp_path, range(STEPS))
    stop = sf.hooks.stop_early("eval/step", patience=2, mode="min")
    run = fit(tmp_path, [hook, stop])
    assert (run.stop_reason.kind, run.steps) == ("early_stop", 8)  # 4 and 6 are not below 2
    state = run.hooks["stop_early eval/step"]
    assert (state["best"], state["best_step"]) == (2.0, 2)
    assert list(evaluate(tmp_path).metrics) == [8]  # the last evaluation of a run that stops


def test_the_best_state_of_a_late_result_is_refused(tmp_path):
    stop = sf.hooks.stop_early("eval/step", patience=2, mode="max", keep_state=True)
    with pytest.raises(
        sf.errors.ConfigError, match="keep_state: expected an evaluation in this process"
    ):
        fit(tmp_path, [At(tmp_path, [3]), stop])


def test_other_writers_get_late_numbers_at_the_step_of_their_arrival(tmp_path):
    writer = sf.writers.jsonl(tmp_path / "other.jsonl")
    fit(tmp_path / "run", [At(tmp_path / "run", [7]), sf.log_to(writer)])
    rows = [json.loads(line) for line in (tmp_path / "other.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "eval/step" in row] == [8]


def test_it_needs_checkpoints(tmp_path):
    with pytest.raises(
        sf.errors.ConfigError,
        match=r"eval: remote=True: expected checkpoints=… to evaluate, got none",
    ):
        fit(tmp_path, checkpoints=None)


def test_a_new_run_ignores_the_results_of_the_one_before(tmp_path):
    """Its checkpoints were deleted; the states are the same, but the evaluation may differ."""
    fit(tmp_path, At(tmp_path, [7]))
    for step in sf.Checkpoints(tmp_path / "checkpoints").steps():
        DirectoryStore(tmp_path / "checkpoints").delete(step)
    with pytest.warns(UserWarning, match="its files are now in"):
        assert "eval/step" not in fit(tmp_path).history


def test_a_directory_that_cannot_be_read_does_not_end_the_run(tmp_path, monkeypatch):
    def fails(store):
        raise CheckpointError("no answer")

    monkeypatch.setattr("stepfold.runs.remote.find_results", fails)
    with pytest.warns(RuntimeWarning, match="no answer; the run continues, and looks for"):
        assert fit(tmp_path).steps == STEPS


def test_many_steps_that_wait_cause_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr("stepfold.runs.remote._MANY", 3)
    with pytest.warns(RuntimeWarning, match="4 steps wait for eval since step 2, and are kept"):
        fit(tmp_path)


def test_an_evaluation_at_the_start_and_by_epoch(tmp_path):
    item = evaluation(every_epochs=2, at_start=True, remote=True)
    fit(tmp_path, evaluation=item)
    assert list(evaluate(tmp_path).metrics) == [0, 8, 12]


def test_looking_for_results_takes_a_small_share_of_the_time(tmp_path, monkeypatch):
    looks = []

    def find(store):
        looks.append(time.sleep(0.02))
        return []

    monkeypatch.setattr("stepfold.runs.remote.find_results", find)
    item = evaluation(every=10, remote=True)
    fit(tmp_path, evaluation=item, steps=40, checkpoints=sf.Checkpoints())
    assert 4 <= len(looks) < 15  # of 40 log points


def test_a_name_that_the_run_does_not_await_causes_a_warning(tmp_path):
    fit(tmp_path)
    start = small.start()
    item = sf.Evaluation(lambda state: {"step": 0.0}, name="val")
    words = "evaluations: expected names that the run awaits, eval, got val; such numbers rank"
    with pytest.warns(RuntimeWarning, match=words) as caught:
        sf.evaluate_run(tmp_path, start, item, steps="all", follow=False)
    assert [each.filename for each in caught] == [__file__]


def test_restoring_the_best_step_says_which_evaluations_are_missing(tmp_path):
    fit(tmp_path, steps=4, checkpoints=sf.Checkpoints(best="eval/step", mode="min", async_=False))
    words = (
        "the remote evaluations of steps 2, 4 are missing: make them with sf.evaluate_run, or "
        "give the step"
    )
    with pytest.raises(CheckpointError, match=words):
        sf.restore(tmp_path, small.start(), step="best")
    evaluate(tmp_path)
    assert sf.restore(tmp_path, small.start(), step="best").step == 2


@pytest.mark.parametrize("value", [True, False])
def test_the_argument_of_version_0_2_works_with_a_warning(value):
    with pytest.warns(DeprecationWarning, match="elsewhere=… is now remote=…") as caught:
        old = evaluation(every=2, elsewhere=value)
    assert caught[0].filename == __file__
    assert old.remote is value
    assert replace(old, every=4).remote is value


def test_no_warning_comes_if_the_ranking_metric_is_remote(tmp_path):
    checkpoints = sf.Checkpoints(best="eval/step", mode="min", async_=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*since no live process makes it")
        fit(tmp_path, checkpoints=checkpoints)
    evaluate(tmp_path)
    assert checkpoints.open(tmp_path / "checkpoints").best_step() == 2


@pytest.mark.full
def test_a_result_counts_after_its_checkpoint_was_deleted_and_the_run_went_back(tmp_path):
    """The checkpoint that the run goes back to is older than the look for the result."""
    hook, left = At(tmp_path, [7]), [9]

    def goes_back(event):
        if event.is_train and [event.step] == left:
            left.clear()
            assert sf.Checkpoints(tmp_path / "checkpoints").steps()[:2] == [4, 6]
            return sf.hooks.GoBack(skip=(5, 6))
        return None

    item = evaluation(every=1, remote=True)
    checkpoints = sf.Checkpoints(every=4, keep=2, async_=False)
    run = fit(tmp_path, [hook, goes_back], evaluation=item, checkpoints=checkpoints)
    late = [step for step, *_ in hook.late]
    assert (run.resumed, late) == (4, [1, 2, 3, 4, 5, 6, 1, 2, 3, 5, 6])  # 4 is not late then
    assert run.history["eval/step"].steps == [1, 2, 3, 4, 5, 6]


def test_a_run_without_an_evaluator_says_so_at_its_end(tmp_path):
    says = r"ends without eval of steps 2, 4, 6, 8, 10, 12, since no live process .*evaluate_run"
    with pytest.warns(RuntimeWarning, match=says):
        fit(tmp_path)
    evaluate(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(fit(tmp_path).history["eval/step"]) == 6


def test_the_end_does_not_wait_for_a_process_that_is_frozen(tmp_path, monkeypatch):
    """Its lease is that of a live process, which has no heartbeat."""
    monkeypatch.setattr(claims, "_STALE", 1.0)
    monkeypatch.setattr(remote, "_QUIET_SECONDS", 0.2)
    store = open_store(tmp_path / "checkpoints", save=True)
    lease = Lease(store, LEASES)
    monkeypatch.setattr(lease, "_beat", lambda: None)
    lease._thread = threading.Thread(target=lease._beat)
    lease.hold({"names": ["eval"], "steps": []})
    start = time.monotonic()
    with (
        pytest.warns(RuntimeWarning, match="the run is done, and waits for eval of steps 2, "),
        pytest.warns(RuntimeWarning, match="the run ends without eval of steps 2, "),
    ):
        fit(tmp_path)
    assert time.monotonic() - start < 60
    assert store.list_notes(LEASES)  # it may wake up
