"""A run calls the methods of a subclass where EasyDeL documents that it does."""

from pathlib import Path

import jax.numpy as jnp
import optax
import pytest
from tests.clients.rows import shows
from tests.small import full_but

import stepfold as sf
from stepfold.adapter import Trainer

from . import digits


@shows(
    "Trainer Protocol",
    "Implementation skeleton example",
    {
        "its six methods as overrides of `Trainer`": "a run calls them, `evaluate` at each "
        "evaluation"
    },
)
def test_evaluate_of_a_subclass_measures_in_a_run(tmp_path):
    steps = []

    class Own(Trainer):
        def evaluate(self, state, metric_calculator=None):
            assert self.state is state
            steps.append(int(state.step))
            return {**super().evaluate(state, metric_calculator), "eval_step": steps[-1]}

    made = digits.trainer(
        Own, max_steps=4, eval_steps=2, metric_for_best_model="step", greater_is_better=True,
        output_dir=tmp_path,
    )  # fmt: skip
    made.train()
    assert steps == [2, 4] == made.history["eval/step"]
    plain = digits.trainer(max_steps=4, eval_steps=2)
    plain.train()
    assert made.history["eval/loss"] == plain.history["eval/loss"]
    assert made.best == 4


@shows(
    "BaseTrainer",
    "Key methods",
    {
        "`train` calls `eval`": "if a subclass overrides it, and not `evaluate`; it may return a "
        "dict, or yield"
    },
)
@pytest.mark.parametrize("kind", ["dict", "numbers", "metrics"])
def test_eval_of_a_subclass_measures_in_a_run(kind):
    class Own(Trainer):
        def eval(self, state):
            return {"eval_loss": 7.0} if kind == "dict" else self.values()

        def values(self):
            for value, weight in ((1.0, 3.0), (5.0, 1.0)):
                metric = sf.mean(jnp.float32(value), jnp.float32(weight))
                yield {"eval_loss": value if kind == "numbers" else metric}

    made = digits.trainer(Own, max_steps=1)
    made.train()
    assert made.history["eval/loss"] == [{"dict": 7.0, "numbers": 3.0, "metrics": 2.0}[kind]]


def test_evaluate_of_a_subclass_needs_data_or_an_interval():
    calls = []

    class Own(Trainer):
        def evaluate(self, state, metric_calculator=None):
            calls.append(int(state.step))
            return {"loss": 0.0}

    digits.train_only(Own, max_steps=2).train()
    assert calls == []
    digits.train_only(Own, max_steps=2, eval_steps=1).train()
    assert calls == [1, 2]


def test_evaluate_of_the_object_itself_has_to_return_metrics():
    made = digits.trainer(max_steps=1)
    made.evaluate = lambda state: None
    with pytest.raises(
        sf.errors.ConfigError, match="evaluate: expected it to return metrics by name"
    ):
        made.train()


def save(self, path, state):
    """Note a call, as the `save_pretrained` of a subclass."""
    assert not state.params["kernel"].is_deleted()
    self.saved = [*getattr(self, "saved", ()), (int(state.step), path)]


class ByPath(Trainer):
    def save_pretrained(self, ckpt_path, state=None):
        save(self, ckpt_path, state)


class ByDirectory(Trainer):
    def save_pretrained(self, state, save_directory=None, **options):
        save(self, save_directory, state)


class ByKeywords(Trainer):
    def save_pretrained(self, *args, **kwargs):
        save(self, kwargs["save_directory"], kwargs["state"])


@shows(
    "BaseTrainer",
    "Key methods",
    {
        "`train` calls `save_pretrained` by `save_strategy`": "if a subclass overrides it, in "
        "addition to the checkpoints of the run"
    },
)
@pytest.mark.parametrize("kind", full_but([ByDirectory], [ByPath, ByDirectory, ByKeywords]))
def test_save_pretrained_of_a_subclass_is_called_at_each_save(kind, tmp_path):
    logged = []

    class Own(kind):
        def on_log(self, metrics, step):
            logged.append(metrics)

    made = digits.train_only(Own, output_dir=tmp_path, max_steps=5, save_steps=2)
    made.train()
    assert made.saved == [(step, str(tmp_path / "pretrained" / str(step))) for step in (2, 4, 5)]
    assert all(logged)
    unsaved = digits.train_only(kind, max_steps=1)
    unsaved.train()
    assert not hasattr(unsaved, "saved")


def test_save_pretrained_of_a_subclass_may_call_that_of_the_trainer(tmp_path):
    class Own(Trainer):
        def save_pretrained(self, ckpt_path, state=None):
            super().save_pretrained(ckpt_path, state)
            Path(ckpt_path, "tokenizer").write_text("a")

    options = {"output_dir": tmp_path, "save_steps": 1, "save_total_limit": 2}
    made = digits.train_only(Own, max_steps=4, **options)
    made.train()
    folder = tmp_path / "pretrained"
    assert sorted(path.name for path in folder.iterdir()) == ["3", "4"]
    assert {path.name for path in (folder / "4").iterdir()} >= {"4", "arguments.json", "tokenizer"}
    assert digits.bits(sf.restore(folder / "4", made.abstract_state).state) == digits.bits(
        made.state
    )
    # A run that was killed before the checkpoint of this step saves it again.
    (folder / "5" / "5").mkdir(parents=True)
    digits.train_only(Own, max_steps=5, **options).train()
    assert (folder / "5" / "tokenizer").exists()


def test_save_pretrained_that_a_run_cannot_call_is_refused(tmp_path):
    class Unknown(Trainer):
        def save_pretrained(self, where):
            """Save to a folder."""

    with pytest.raises(
        sf.errors.ConfigError, match="save_pretrained: expected the parameters ckpt_path"
    ):
        digits.train_only(Unknown, output_dir=tmp_path).train()

    class OwnManager(ByPath):
        def configure_functions(self):
            manager = sf.Checkpoints(tmp_path / "own")
            return super().configure_functions().replace(checkpoint_manager=manager)

    with pytest.raises(
        sf.errors.ConfigError, match="output_dir: expected a directory for what save_pre"
    ):
        digits.train_only(OwnManager).train()


def test_make_optimizer_of_a_subclass_is_used():
    class Own(Trainer):
        def make_optimizer(self, scheduler=None):
            return optax.sgd(0.0), optax.constant_schedule(0.5)

    made = digits.train_only(Own)
    assert float(made.scheduler(0)) == 0.5
    assert digits.bits(made.tx.init(made.state.params)) == []
