"""What watches a run; and a run of all the parts, without a Trainer."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stepfold as sf
from stepfold import adapter
from stepfold.adapter import TrainingArguments, hooks, monitors, plan, progress_hook, report_hook
from stepfold.adapter.parts.hooks import TrainEvery, Without

DATA = {"x": np.linspace(0, 1, 64, dtype=np.float32)}


def loss_fn(params, batch, key):
    return sf.mean((params["w"] * batch["x"] - 1) ** 2)


def run(arguments):
    """Run what the arguments say, of the parts alone."""
    numbers = plan(arguments, len(DATA["x"]), len(DATA["x"]))
    schedule = adapter.make_schedule(arguments, numbers.steps)
    tx = adapter.make_optimizer(arguments, schedule)
    params = {"w": jnp.zeros(())}
    state = sf.init_state(params, tx, jax.random.key(arguments.seed))
    loss = adapter.make_loss(arguments, loss_fn)
    precision = adapter.precision(arguments)
    step = sf.make_train_step(
        loss,
        tx,
        accumulate=numbers.accumulate,
        precision=precision,
        remat=adapter.remat(arguments),
    )
    seed = adapter.shuffle_seed(arguments)
    evaluation = sf.Evaluation(
        sf.make_eval_step(loss, precision=precision),
        lambda: sf.batches(DATA, numbers.eval_batch, epochs=1, remainder="pad"),
        every=numbers.evaluation_every,
        every_epochs=numbers.evaluation_every_epochs,
    )
    return sf.fit(
        step,
        state,
        sf.batches(DATA, numbers.train_batch, seed=seed),
        steps=numbers.steps,
        evaluation=evaluation if numbers.evaluates else (),
        checkpoints=adapter.checkpoints(arguments, numbers),
        hooks=hooks(arguments, numbers, adapter.writers(arguments)),
        log_every=numbers.log_every,
    )


def test_the_parts_make_a_run_that_goes_on_where_it_was(tmp_path, capsys):
    arguments = TrainingArguments(
        num_train_epochs=5,
        total_batch_size=16,
        gradient_accumulation_steps=2,
        optimizer="sgd",
        learning_rate=0.5,
        mixed_precision="bf16",
        evaluation_strategy="epoch",
        metric_for_best_model="loss",
        save_strategy="epoch",
        log_steps=4,
        report_steps=2,
        progress_bar_type="json",
        output_dir=str(tmp_path),
        log_grad_norms=False,
    )
    half = run(arguments.replace(max_steps=8))
    assert half.stopped == "all 8 steps were done"
    capsys.readouterr()
    result = run(arguments)
    assert (result.resumed, result.steps) == (8, 20)
    assert result.best in sf.verify(tmp_path / "checkpoints")
    written = (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in written]
    trained = [row["step"] for row in rows if "train/loss" in row]
    assert trained == [*range(2, 21, 2)]
    assert [row["step"] for row in rows if "eval/loss" in row] == [4, 8, 12, 16, 20]
    assert not any("train/grad_norm" in row for row in rows)
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in shown if "train/loss" in line] == [12, 16, 20]


def test_a_run_stops_when_there_is_no_progress_or_no_time():
    still = {"learning_rate": 1e-30, "progress_bar_type": "none", "max_steps": 200}
    result = run(TrainingArguments(eval_steps=2, early_stopping_patience=3, **still))
    assert "has not become better" in result.stopped
    assert result.steps < 20
    result = run(TrainingArguments(training_time_limit=1e-6, **still))
    assert "time limit" in result.stopped


def of(make, *rest, **fields):
    arguments = TrainingArguments(**fields)
    return make(arguments, plan(arguments), *rest)


def test_hooks_are_had_one_by_one():
    assert of(monitors) == []
    assert len(of(monitors, training_time_limit=3, track_memory=True)) == 2
    assert of(progress_hook, progress_bar_type="none") is None
    assert of(progress_hook, performance_mode=True) is None
    assert len(of(hooks, sf.console_writer())) == 2
    assert [*map(type, of(hooks, log_steps=20, report_steps=10))] == [TrainEvery]
    assert type(of(report_hook, sf.console_writer(), log_grad_norms=False)) is Without


def test_an_evaluation_is_shown_whenever_it_is_made():
    seen = []
    hook = TrainEvery(20, lambda event: seen.append((event.step, event.is_train)))
    for step in (10, 20, 30):
        for metrics in ({"train/loss": 1.0}, {"eval/loss": 1.0}):
            hook(sf.Event(step, None, metrics, None))
    assert seen == [(10, False), (20, True), (20, False), (30, False)]


def test_what_is_hidden_from_one_is_shown_to_others():
    event = sf.Event(1, None, {"train/loss": 1.0, "train/grad_norm": 2.0}, None)
    seen = []
    Without(r"grad_norm$", lambda event: seen.append([*event.metrics]))(event)
    assert (seen, len(event.metrics)) == ([["train/loss"]], 2)


@pytest.mark.parametrize("kind", ["tqdm", "rich", "json"])
def test_every_kind_of_bar_can_be_made(kind):
    assert of(progress_hook, progress_bar_type=kind) is not None
