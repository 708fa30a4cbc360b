"""Metrics go to a writer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf


class Memory:
    """A writer that keeps rows by step, as a file would, and refuses to go back."""

    def __init__(self):
        self.rows, self.calls = {}, []

    def write_scalars(self, step, scalars):
        assert step >= max(self.rows, default=0)
        self.rows.setdefault(step, {}).update(scalars)

    def resume(self, step):
        self.calls.append(("resume", step))
        self.rows = {at: row for at, row in self.rows.items() if at <= step}

    def flush(self):
        self.calls.append("flush")

    def close(self):
        self.calls.append("close")


def train(step, total=None):
    return sf.Event(step, total, {"train/loss": float(step)}, None)


def evaluation(step):
    return sf.Event(step, None, {"eval/loss": float(step)}, None)


def test_every_event_is_written_and_the_writer_closed():
    writer = Memory()
    hook = sf.log_to(writer)
    hook.open(0, None)
    for event in (train(10), train(20), evaluation(20)):
        assert hook(event) is None
    hook.close()
    assert writer.rows == {
        10: {"train/loss": 10.0},
        20: {"train/loss": 20.0, "eval/loss": 20.0},
    }
    assert writer.calls == [("resume", 0), "flush", "close"]


def test_every_thins_out_train_metrics_and_neither_evaluations_nor_the_last_step():
    writer = Memory()
    hook = sf.log_to(writer, every=25)
    for step in range(10, 80, 10):
        hook(train(step, total=70))
        hook(evaluation(step))
    assert [step for step, row in writer.rows.items() if "train/loss" in row] == [30, 50, 70]
    assert [step for step, row in writer.rows.items() if "eval/loss" in row] == [*range(10, 80, 10)]


def test_after_a_resume_with_another_every_it_is_as_thin_as_that():
    hook = sf.log_to(Memory(), every=10)
    hook(train(1000))
    again = sf.log_to(writer := Memory(), every=100)
    again.set_state(hook.get_state())
    again.open(1000, None)
    for step in (1100, 1150, 1200):
        again(train(step))
    assert list(writer.rows) == [1100, 1200]


def test_it_is_as_thin_after_a_resume():
    hook = sf.log_to(Memory(), every=100)
    hook(train(90))
    again = sf.log_to(writer := Memory(), every=100)
    again.set_state(hook.get_state())
    again.open(105, None)
    for step in (100, 110, 120):
        again(train(step))
    assert list(writer.rows) == [100]
    later = sf.log_to(other := Memory(), every=100)
    later.open(250, None)
    for step in (260, 300):
        later(train(step))
    assert list(other.rows) == [300]


def run(tmp_path, writer, steps=40):
    tx = optax.sgd(0.1)
    state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    step = sf.make_train_step(lambda p, b, key: sf.mean((p["w"] - b["x"]) ** 2), tx)
    batches = sf.batches({"x": np.arange(8, dtype=np.float32)}, 4, seed=0)
    sf.fit(
        *(step, state, batches),
        steps=steps,
        checkpoints=sf.Checkpoints(tmp_path, every=15),
        evaluation=sf.Evaluation(lambda state: {"w": state.params["w"]}, every=5),
        log_every=4,
        hooks=[sf.log_to(writer)],
    )


def test_a_run_that_was_cut_off_and_resumed_writes_what_an_uninterrupted_one_does(tmp_path):
    whole, pieces = Memory(), Memory()
    run(tmp_path / "whole", whole)
    run(tmp_path / "cut", pieces, steps=23)
    pieces.write_scalars(28, {"train/loss": -1.0})  # after the save, before a kill
    run(tmp_path / "cut", pieces)
    assert ("resume", 23) in pieces.calls
    del pieces.rows[23]  # the first run ended here: its last interval and evaluation are shown,
    del pieces.rows[24], whole.rows[24]  # and what is left of the interval after the resume
    assert pieces.rows == whole.rows


def test_a_file_of_an_earlier_run_is_begun_anew(tmp_path):
    writer = Memory()
    run(tmp_path / "first", writer)
    run(tmp_path / "second", writer, steps=20)
    assert max(writer.rows) == 20


def test_any_object_with_the_one_method_will_do():
    class Least:
        def write_scalars(self, step, scalars):
            seen.append(step)

    seen = []
    hook = sf.log_to(Least())
    hook.open(0, None)
    hook(train(10))
    hook.close()
    assert seen == [10]


def test_a_writer_is_closed_though_it_cannot_be_flushed():
    class Full(Memory):
        def flush(self):
            raise OSError("no space left")

    writer = Full()
    with pytest.raises(OSError, match="no space left"):
        sf.log_to(writer).close()
    assert writer.calls == ["close"]


@pytest.mark.parametrize(("everywhere", "rows"), [(False, []), (True, [10])])
def test_of_several_processes_the_first_writes_or_all(monkeypatch, everywhere, rows):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    writer = Memory()
    hook = sf.log_to(writer, everywhere=everywhere)
    hook.open(0, None)
    hook(train(10))
    hook.close()
    assert list(writer.rows) == rows
    assert bool(writer.calls) is everywhere


@pytest.mark.parametrize("wrong", [print, "metrics.csv", Memory])
def test_what_is_no_writer_is_refused(wrong):
    said = r"log_to: expected a writer, with write_scalars\(step, .* sf.jsonl_writer\(path\) is one"
    with pytest.raises(sf.ConfigError, match=said):
        sf.log_to(wrong)


def test_how_often_is_a_count():
    with pytest.raises(sf.ConfigError, match="every: expected an integer of at least 1, got 0"):
        sf.log_to(Memory(), every=0)
