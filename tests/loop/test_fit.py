import itertools
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.checkpoint.series import Series

TX = optax.sgd(0.1)
DATA = {"x": np.arange(24, dtype=np.float32)}


def step(state, batch):
    return {"n": state["n"] + 1}, {"at": sf.mean(batch["x"])}


JITTED = jax.jit(step)


def number():
    return {"n": jnp.int32(0)}


def batches(**options):
    return sf.batches(DATA, 4, **{"seed": 0, **options})


def fit(given=None, **options):
    options = {"steps": None if "epochs" in options else 20, **options}
    return sf.fit(JITTED, number(), batches() if given is None else given, **options)


def saves(folder, **options):
    return {"run_dir": folder, "checkpoints": sf.Checkpoints(every=7, keep=None), **options}


# When it ends


def test_it_does_so_many_steps():
    result = fit(steps=13)
    assert (result.steps, result.stopped) == (13, "all 13 steps were done")
    assert (int(result.state["n"]), result.best, result.resumed) == (13, None, None)
    assert result.history["train/at"].steps == [10, 13]


def test_without_a_number_it_goes_through_all_batches():
    assert fit(batches(epochs=2), steps=None).stopped == "the batches ended at step 12"
    assert fit([next(batches())] * 5, steps=None).stopped == "the batches ended at step 5"


def test_batches_may_end_early():
    result = fit(batches(epochs=2), steps=50)
    assert (result.steps, result.stopped) == (12, "the batches ended at step 12")
    assert result.history["train/at"].steps == [10, 12]


def test_it_takes_no_batch_that_it_does_not_use():
    pulled = []
    given = (pulled.append(i) or {"x": np.ones(4, np.float32)} for i in itertools.count())
    fit(given, steps=7)
    assert len(pulled) == 7


def test_it_goes_through_the_data_so_many_times():
    result = fit(epochs=3)
    assert (result.steps, result.stopped) == (18, "all 18 steps were done")


def test_it_goes_through_a_list_so_many_times():
    result = fit([next(batches())] * 4, epochs=3)
    assert (result.steps, result.stopped) == (12, "all 12 steps were done")


def test_things_are_done_every_epoch(tmp_path):
    own = sf.Evaluation(lambda state: {"n": state["n"]}, every_epochs=2)
    plan = sf.Checkpoints(tmp_path, every_epochs=1, keep=None)
    result = fit([next(batches())] * 5, epochs=5, evaluation=own, checkpoints=plan)
    assert result.history["eval/n"] == [10, 20, 25]
    assert sorted(sf.verify(tmp_path)) == [5, 10, 15, 20, 25]


def test_things_are_done_every_epoch_of_batches_of_ones_own(tmp_path):
    own = sf.Evaluation(lambda state: {"n": state["n"]}, every_epochs=2)
    plan = sf.Checkpoints(tmp_path, every_epochs=1, keep=None)
    result = fit(steps=20, evaluation=own, checkpoints=plan)
    assert result.history["eval/n"] == [12, 20]
    assert sorted(sf.verify(tmp_path)) == [6, 12, 18, 20]


def test_a_time_limit_ends_it():
    def slow():
        for batch in batches():
            time.sleep(0.05)
            yield batch

    result = fit(slow(), steps=1000, log_every=1, time_limit=0.3)
    assert result.stopped.startswith("the time limit of 0.3 s was reached at step")
    assert 1 <= result.steps <= 10


@pytest.mark.parametrize("given", [[], iter([]), (x for x in ())])
def test_no_batch_at_all_is_refused_and_leaves_nothing_behind(given, tmp_path):
    with pytest.raises(sf.DataError, match="batches: expected at least one, got none"):
        fit(given, **saves(tmp_path))
    assert sf.latest_step(tmp_path / "checkpoints") is None


def test_it_begins_at_the_step_of_the_state():
    state = sf.init_state({"w": jnp.ones(())}, TX, jax.random.key(0))
    train = sf.make_train_step(lambda p, b, key: sf.mean(p["w"] * b["x"]), TX)
    first = sf.fit(train, state, batches(), steps=7)
    rest = sf.fit(train, first.state, batches(start=7), steps=20)
    assert (rest.steps, rest.history["train/loss"].steps) == (20, [10, 20])
    again = sf.fit(train, rest.state, batches(), steps=20)
    assert again.stopped == "step 20 of 20 was done before"


# Going on


def test_a_run_that_is_over_says_so_and_takes_no_batch(tmp_path):
    first = fit(**saves(tmp_path))
    again = fit((pytest.fail("pulled") for _ in "x"), **saves(tmp_path))
    assert again.stopped == "step 20 of 20 was done before"
    assert (again.steps, again.resumed, again.history) == (20, 20, first.history)
    assert int(again.state["n"]) == 20


def test_a_run_over_all_batches_that_is_over_says_so(tmp_path):
    first = fit(batches(epochs=2), steps=None, **saves(tmp_path))
    again = fit(batches(epochs=2), steps=None, **saves(tmp_path))
    assert (again.steps, again.resumed, again.history) == (12, 12, first.history)
    assert "step 12" in again.stopped


def test_a_run_over_so_many_epochs_that_is_over_says_so(tmp_path):
    first = fit(epochs=2, **saves(tmp_path))
    again = fit(epochs=2, **saves(tmp_path))
    assert again.stopped == "step 12 of 12 was done before"
    assert again.history == first.history


def test_a_run_that_is_over_goes_on_where_it_is_to_be_longer(tmp_path):
    fit(**saves(tmp_path))
    longer = fit(steps=30, **saves(tmp_path))
    assert (longer.resumed, longer.steps, int(longer.state["n"])) == (20, 30, 30)
    assert longer.history["train/at"].steps == [10, 20, 30]
    whole = fit(steps=30)
    assert longer.history["train/at"] == whole.history["train/at"]


def test_fewer_steps_than_were_done_says_so(tmp_path):
    fit(**saves(tmp_path))
    result = fit(steps=10, **saves(tmp_path))
    assert (result.steps, result.stopped) == (20, "step 20 of 10 was done before")


def test_data_that_cannot_be_resumed_is_refused_in_words(tmp_path):
    fit([next(batches())] * 20, steps=10, **saves(tmp_path))
    words = "batches: expected some that can be resumed at step 10, got list.*, which have no get_s"
    with pytest.raises(sf.DataError, match=words) as caught:
        fit([next(batches())] * 20, **saves(tmp_path))
    assert "begin anew in another directory" in str(caught.value)
    assert sorted(sf.verify(tmp_path / "checkpoints")) == [7, 10]


def test_other_data_is_refused_in_words(tmp_path):
    fit(steps=10, **saves(tmp_path))
    with pytest.raises(sf.DataError, match="got others: seed was 0 and is 1"):
        fit(batches(seed=1), **saves(tmp_path))


def test_another_state_is_refused_with_its_paths(tmp_path):
    fit(steps=10, **saves(tmp_path))
    with pytest.raises(sf.TreeMismatchError, match="differs at 2 paths"):
        sf.fit(JITTED, {"m": jnp.int32(0)}, batches(), steps=20, **saves(tmp_path))


def test_to_begin_anew_where_there_are_checkpoints_is_refused_before_the_first_step(tmp_path):
    fit(steps=10, **saves(tmp_path))
    given = (pytest.fail("pulled") for _ in "x")
    with pytest.raises(sf.ConfigError, match="resume=False: .* steps? 7"):
        fit(given, resume=False, **saves(tmp_path))


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    fit(steps=18, **saves(tmp_path))
    files = [path for path in (tmp_path / "checkpoints" / "18").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match="step 18 is damaged"):
        result = fit(**saves(tmp_path))
    assert (result.resumed, int(result.state["n"])) == (14, 20)


def test_checkpoints_of_a_loop_of_ones_own_can_be_gone_on_with(tmp_path):
    given, state = batches(), number()
    for batch in itertools.islice(given, 5):
        state, _ = JITTED(state, batch)
    sf.save(tmp_path / "checkpoints", state, step=5, data=given, extra=["my own"])
    result = fit(**saves(tmp_path))
    assert (result.resumed, int(result.state["n"])) == (5, 20)


def test_it_says_the_best_step(tmp_path):
    values = iter([3.0, 1.0, 2.0])
    own = sf.Evaluation(lambda state: {"loss": next(values)}, every=7)
    plan = sf.Checkpoints(every=7, keep=1, best="eval/loss")
    result = fit(evaluation=own, run_dir=tmp_path, checkpoints=plan)
    assert result.best == 14
    assert sorted(sf.verify(tmp_path / "checkpoints")) == [14, 20]


# What an exception has with it


def leaves_by(error):
    def leave(_):
        raise error

    return leave


@pytest.mark.parametrize("error", [OSError("no"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_whatever_a_hook_ends_a_run_with_has_the_result(error, tmp_path):
    with pytest.raises(type(error)) as caught:
        fit(hooks=leaves_by(error), **saves(tmp_path))
    found = caught.value.result
    assert (found.steps, int(found.state["n"])) == (14, 14)
    assert found.stopped == f"{type(error).__name__}: {error}"
    assert sf.latest_step(tmp_path / "checkpoints") == 14


def test_what_goes_wrong_after_the_last_step_has_the_result():
    class Hook:
        def __call__(self, event):
            pass

        def close(self):
            raise OSError("full")

    with pytest.raises(OSError, match="full") as caught:
        fit(hooks=Hook())
    assert int(caught.value.result.state["n"]) == 20


def test_what_a_second_signal_waits_for_is_said(tmp_path, capfd, monkeypatch):
    written, finish = threading.Event(), Series._finish

    def interrupt_twice(event):
        threading.Timer(0.3, written.set).start()
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    slow = lambda self, step: (written.wait(60), finish(self, step))
    monkeypatch.setattr(Series, "_finish", slow)
    with pytest.raises(KeyboardInterrupt):
        fit(hooks=sf.every(10, interrupt_twice), **saves(tmp_path))
    said = "waiting for the checkpoint of step 7, which is being written\n"
    assert said in capfd.readouterr().err
    assert sf.verify(tmp_path / "checkpoints") == {7: []}


# Where things go


def test_a_run_dir_that_cannot_be_made_is_refused_before_anything_is_done(tmp_path):
    (tmp_path / "file").write_text("")
    given = (pytest.fail("pulled") for _ in "x")
    with pytest.raises(sf.CheckpointError, match="expected a directory to save in, but it cannot"):
        fit(given, **saves(tmp_path / "file" / "run"))


def test_metrics_that_a_hook_writes_are_not_written_twice(tmp_path):
    class Writes:
        writes_metrics = True

        def __call__(self, event):
            (tmp_path / "metrics.jsonl").write_text(f'{{"step": {event.step}, "own": 1.0}}\n')

    fit(run_dir=tmp_path, steps=1, hooks=[Writes()])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["metrics.jsonl", "report.html", "run.json"]
    assert '"own"' in (tmp_path / "report.html").read_text()


def test_checkpoints_without_a_place_are_refused():
    with pytest.raises(sf.ConfigError, match="expected to know where they go; give run_dir"):
        fit(checkpoints=sf.Checkpoints(every=7))


def test_checkpoints_may_say_where_they_go(tmp_path):
    plan = sf.Checkpoints(tmp_path / "other", every=7)
    fit(run_dir=tmp_path / "run", checkpoints=plan)
    assert sorted(sf.verify(tmp_path / "other")) == [7, 14, 20]
    assert not (tmp_path / "run" / "checkpoints").exists()


# What goes in


def made():
    params = {"w": jnp.ones(4)}
    state = sf.init_state(params, TX, jax.random.key(0))
    train = sf.make_train_step(lambda p, b, key: sf.mean(p["w"] * b["x"]), TX)
    return params, state, train


def test_what_the_state_was_made_of_is_left_as_it_is():
    params, state, train = made()
    sf.fit(train, state, batches(), steps=3)
    assert params["w"].tolist() == [1.0] * 4


def test_a_state_that_was_given_is_gone_and_says_so():
    _, state, train = made()
    sf.fit(train, state, batches(), steps=3)
    words = "step.*: the arrays were donated to an earlier call and are gone; go on with the state"
    with pytest.raises(sf.ConfigError, match=words):
        sf.fit(train, state, batches(), steps=3)


def test_a_step_that_is_ready_cannot_be_scanned_and_says_so():
    words = "steps_per_call=4: expected a step that is neither jitted nor compiled"
    with pytest.raises(sf.ConfigError, match=words):
        fit(steps_per_call=4)


def test_a_step_that_is_jitted_may_be_asked_for_one_step_in_a_call():
    assert fit(steps_per_call=1).steps == 20


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 0}, "steps: expected an integer of at least 1, got 0"),
        ({"steps": 2.5}, "steps: expected an integer of at least 1, got 2.5"),
        ({"steps": True}, "steps: expected an integer of at least 1, got True"),
        ({"epochs": 0}, "epochs: expected an integer of at least 1, got 0"),
        ({"steps": 3, "epochs": 2}, "steps, epochs: expected one of them, got 3 and 2"),
        ({"log_every": 0}, "log_every: expected an integer of at least 1, got 0"),
        ({"steps_per_call": 0}, "steps_per_call: expected an integer of at least 1, got 0"),
        ({"hooks": [3]}, "hooks: expected functions of an event, got int 3"),
        ({"evaluation": [3]}, r"evaluation: expected sf.Evaluation\(…\), got int 3"),
        (
            {"evaluation": [sf.Evaluation(lambda s: {})] * 2},
            r"evaluation: expected a name of its own for each, other than train, got \['eval', 'ev",
        ),
        (
            {"evaluation": sf.Evaluation(lambda s: {}, name="train")},
            "evaluation: expected a name of its own for each, other than train, got",
        ),
        (
            {"evaluation": sf.Evaluation(lambda s: {}, every_epochs=1)},
            "every_epochs: expected batches that know how many steps an epoch has, got generator",
        ),
        (
            {"checkpoints": sf.Checkpoints("here", every_epochs=1)},
            "every_epochs: expected batches that know how many steps an epoch has, got generator",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_done(options, words):
    given = (pytest.fail("pulled") for _ in "x")
    with pytest.raises(sf.ConfigError, match=words):
        sf.fit(JITTED, number(), given, **{"steps": None if "epochs" in options else 9, **options})


def test_a_step_that_is_none_is_refused():
    with pytest.raises(sf.ConfigError, match=r"step: expected a step \(state, batch\)"):
        sf.fit(None, number(), batches(), steps=3)


def test_batches_that_are_none_are_refused():
    with pytest.raises(
        sf.ConfigError, match="batches: expected an iterable of batches, got NoneType"
    ):
        sf.fit(JITTED, number(), None, steps=3)


# What it keeps of a step that went wrong


def spoilt():
    data = np.arange(24, dtype=np.float32)
    data[9] = np.nan
    return sf.batches({"x": data}, 4)


def learn(**options):
    learning = sf.make_train_step(lambda p, b, key: sf.mean(p["w"] * b["x"]), TX)
    state = sf.init_state({"w": jnp.ones(())}, TX, jax.random.key(0))
    return sf.fit(learning, state, spoilt(), steps=20, **options)


def test_a_loss_that_is_no_number_leaves_a_capsule(tmp_path):
    result = learn(run_dir=tmp_path)
    assert result.stopped.startswith("train/loss is nan in step 3 at step ")
    assert result.stopped.endswith(f"; see {tmp_path / 'capsules' / '3'}")
    assert sf.read_capsule(result.capsule.path).metrics.keys() == result.capsule.metrics.keys()


def test_without_a_folder_it_is_on_the_result():
    result = learn()
    assert (result.capsule.step, result.capsule.path) == (3, None)
    assert "see" not in result.stopped


def test_a_disk_that_does_not_take_it_does_not_cost_the_result(tmp_path):
    (tmp_path / "capsules").write_text("in the way")
    with pytest.warns(RuntimeWarning, match="the capsule of step 3 cannot be written") as caught:
        result = learn(run_dir=tmp_path)
    assert (result.capsule.step, result.capsule.path) == (3, None)
    assert caught[0].filename == __file__
