"""Runs of a trainer that go back to a checkpoint, or continue after a stop."""

import json

import jax
import numpy as np
import pytest

import stepfold as sf
from stepfold.adapter import Trainer, TrainerConfigureDataloaderOutput
from stepfold.hooks.objects import BaseHook

from . import digits


class BackOnce(BaseHook):
    """Go back once at a step, without the batches of the last two steps."""

    can_stop = goes_back = True

    def __init__(self, at=10):
        self._at, self._is_done = at, False

    def __call__(self, event):
        if event.is_train and event.step == self._at and not self._is_done:
            self._is_done = True
            return sf.hooks.GoBack(skip=2, why="a spike")
        return None


def options(folder, **changes):
    changes = {"save_steps": 4, "max_steps": 20, **changes}
    return {"output_dir": folder, "given": {"hooks": [BackOnce()], **changes.pop("given", {})}} | (
        changes
    )


@pytest.mark.full
def test_methods_around_a_step_get_its_number_after_the_run_has_gone_back(tmp_path):
    starts, ends = [], []

    class Hooked(Trainer):
        def on_step_start(self, state, step):
            starts.append((step, int(state.step)))

        def on_step_end(self, state, metrics, step):
            ends.append((step, int(state.step)))

    digits.train_only(Hooked, **options(tmp_path)).train()
    assert [step for step, _ in starts] == [*range(10), *range(8, 20)]
    assert all(step == of_state for step, of_state in [*starts, *ends])


@pytest.mark.full
def test_the_bar_of_an_attempt_is_closed_before_the_next_opens(tmp_path):
    calls = []

    class Bar:
        step = 0

        def set_postfix(self, values): ...

        def update(self, n):
            self.step += n

        def open(self, step):
            calls.append(("open", step))

        def close(self):
            calls.append("close")

    class Own(Trainer):
        def create_progress_bar(self, total, desc="", disabled=False):
            return Bar()

    digits.train_only(Own, **options(tmp_path)).train()
    assert calls == [("open", 0), "close", ("open", 8), "close"]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["arrays", pytest.param("grain", marks=pytest.mark.full)])
def test_epochs_end_earlier_once_batches_are_skipped(tmp_path, kind):
    epochs = []
    callback = lambda trainer, epoch, metrics: epochs.append((epoch, int(trainer.state.step)))
    given = {"hooks": [BackOnce(5)], "callbacks": [callback]}
    changes = {"use_grain": True} if kind == "grain" else {}
    trainer = digits.train_only(
        **options(tmp_path, max_steps=26, save_steps=2, given=given, **changes)
    )
    trainer.train()
    assert epochs == [(0, 8), (1, 18)]
    assert trainer.epochs_done == 2
    plain = digits.train_only(**changes, max_steps=26)
    skipping = plain.dataloader_train.without([(3, 5)])
    assert [skipping.epoch_ends.end(epoch) for epoch in (1, 2)] == [8, 18]
    assert len(trainer.epoch_history["train_loss"]) == 3


@pytest.mark.full
@pytest.mark.parametrize("is_own", [False, True])
def test_the_position_of_save_pretrained_leaves_out_what_the_run_has_skipped(tmp_path, is_own):
    class Own(Trainer):
        def configure_dataloaders(self):
            data = {**digits.TRAIN, "mask": np.ones(200, bool)}
            return TrainerConfigureDataloaderOutput(sf.batches(data, 20, seed=42), self.sizes.steps)

    kind = Own if is_own else Trainer
    trainer = digits.train_only(kind, **options(tmp_path / "run"))
    trainer.train()
    path = trainer.save_pretrained(tmp_path / "saved")
    position = sf.restore(path.parent, trainer.abstract_state).data
    assert position["skipped"] == [[8, 10]]
    wanted = sf.restore(tmp_path / "run" / "checkpoints", trainer.abstract_state)
    assert position == wanted.data
    more = trainer.train(more_steps=4).state
    other = digits.train_only(kind, max_steps=24)
    with pytest.raises(sf.errors.DataError, match="skip"):
        other.train(ckpt_path=path)
    other.dataloader_train = other.dataloader_train.without([(8, 10)])
    assert digits.bits(other.train(ckpt_path=path).state) == digits.bits(more)


@pytest.mark.full
def test_the_row_of_an_open_interval_goes_when_a_stopped_run_continues(tmp_path):
    stop = lambda event: "enough" if event.is_train and event.step == 20 else None
    fields = {"output_dir": tmp_path, "report_to": ("jsonl",), "max_steps": 60, "log_steps": 20}
    fields |= {"total_batch_size": 5}  # 40 batches in an epoch
    stopped = digits.train_only(**fields, given={"hooks": [stop]})
    stopped.train()
    rows = lambda: [json.loads(line) for line in lines.read_text().splitlines()]
    lines = tmp_path / "logs" / "metrics.jsonl"
    assert [row["step"] for row in rows()] == [20, 30]
    digits.train_only(**fields).train()
    assert [row["step"] for row in rows()] == [20, 40, 60]


# Batches of a subclass


class Ahead(Trainer):
    """A trainer whose batches start later in the data than its state."""

    def configure_dataloaders(self):
        data = {**digits.TRAIN, "mask": np.ones(200, bool)}
        return TrainerConfigureDataloaderOutput(sf.batches(data, 20, seed=0, start=3), 20)


@pytest.mark.full
def test_batches_of_a_subclass_may_start_later_in_the_data(tmp_path):
    trainer = digits.train_only(Ahead)
    trainer.train()
    assert trainer.dataloader_train.get_state()["step"] == 23
    path = trainer.save_pretrained(tmp_path)
    assert sf.restore(path.parent, trainer.abstract_state).data["step"] == 23
    again = digits.train_only(Ahead)
    again.train(state=trainer.state, more_steps=1)
    assert again.dataloader_train.get_state()["step"] == 24


@pytest.mark.full
def test_batches_of_a_subclass_may_have_several_sizes_for_a_jitted_step():
    class Own(Trainer):
        def configure_dataloaders(self):
            loader = sf.batches({**digits.TRAIN, "mask": np.ones(200, bool)}, 64, remainder="keep")
            return TrainerConfigureDataloaderOutput(loader, 8)

        def configure_functions(self):
            output = super().configure_functions()
            step = output.train_step_fn

            def mine(state, batch):
                return step(state, batch)

            return output.replace(sharded_training_step_function=jax.jit(mine))

    trainer = digits.train_only(Own)
    assert int(trainer.train().state.step) == 8
    assert int(trainer.train(more_steps=4).state.step) == 12
    assert trainer.train_tracker.compilations == 2
