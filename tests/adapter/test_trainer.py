"""A trainer: what it makes, what a subclass may override, and what it returns."""

import io

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from flax.core import freeze
from jax.sharding import PartitionSpec
from tests.clients.rows import shows
from tests.small import ones

import stepfold as sf
from stepfold.adapter import (
    StopTraining,
    Trainer,
    TrainerConfigureModelOutput,
)
from stepfold.adapter.hooks import NullProgressBar, ProgressBar

from . import digits

pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_a_second_train_continues_where_the_first_ended():
    made = digits.train_only(max_steps=10)
    made.train()
    with pytest.warns(UserWarning, match="nothing was trained: step 10 of 10 was done before"):
        assert made.train().stopped == "step 10 of 10 was done before"


def test_without_do_train_nothing_is_trained():
    made = digits.train_only(do_train=False)
    assert made.train().stopped == "do_train is False"
    assert int(made.state.step) == 0


def test_missing_parts_are_named():
    with pytest.raises(
        sf.errors.ConfigError, match="dataset_train: expected data to train on, got None"
    ):
        digits.trainer(given={"dataset_train": None}).train()
    with pytest.raises(
        sf.errors.ConfigError, match="dataset_eval: expected data to evaluate on, got Non"
    ):
        digits.trainer(given={"dataset_eval": None}).evaluate()
    with pytest.raises(
        sf.errors.ConfigError, match="best_state needs metric_for_best_model and output"
    ):
        _ = digits.trainer().best_state
    on_train = {"early_stopping_patience": 1, "metric_for_best_model": "train.loss"}
    with pytest.raises(
        sf.errors.ConfigError, match="early_stopping_patience with a metric of an evaluat"
    ):
        _ = digits.trainer(**on_train).best_state

    class OneStep(Trainer):
        def configure_functions(self):
            return super().configure_functions().replace(sharded_evaluation_step_function=None)

    with pytest.raises(
        sf.errors.ConfigError, match=r"eval_step_fn: expected a step \(state, batch\)"
    ):
        digits.trainer(OneStep).evaluate()


@shows(
    "API reference",
    "Methods and properties",
    {
        "`log_weight_distribution`": "by path, once at each multiple of "
        "`weight_distribution_log_steps`"
    },
)
def test_weight_distributions_are_measured_once_at_a_step_with_an_evaluation(tmp_path, monkeypatch):
    steps = []
    note = lambda self, state, step: steps.append(step)
    monkeypatch.setattr(sf.adapter.Trainer, "log_weight_distribution", note)
    options = {"log_steps": 5, "evaluation_strategy": "steps", "eval_steps": 5}
    digits.trainer(output_dir=tmp_path, weight_distribution_log_steps=5, **options).train()
    assert steps == sorted(set(steps)) != []


def test_performance_mode_shows_and_writes_nothing(tmp_path, capfd):
    made = digits.train_only(output_dir=tmp_path, performance_mode=True)
    made.train()
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "logs").exists()


def test_there_is_a_state_after_an_exception_without_checkpoints():
    class Broken(Trainer):
        def on_step_end(self, state, metrics, step):
            if step == 13:
                raise ValueError("broken")

    made = digits.train_only(Broken, max_steps=20, log_steps=5)
    with pytest.raises(ValueError, match="broken"):
        made.train()
    assert int(made.state.step) == 13
    assert not made.state.params["kernel"].is_deleted()  # which was donated to no step


@pytest.mark.full
def test_there_is_a_state_after_an_exit_before_the_restore(tmp_path):
    """For example, after a second Ctrl-C before a checkpoint was restored."""
    digits.train_only(output_dir=tmp_path, max_steps=5).train()

    class Impatient:
        def open(self, step, total):
            raise KeyboardInterrupt

        def __call__(self, event):
            """Ignore events."""

    made = digits.train_only(output_dir=tmp_path, max_steps=10, given={"hooks": [Impatient()]})
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert int(made.state.step) == 5
    made.hooks.clear()
    assert made.train().stopped == "all 10 steps were done"


# What a subclass may override


@shows(
    "API reference", "Attributes", {"`config`": "what was given, or what `configure_model` returns"}
)
def test_the_optimizer_of_a_subclass_is_used():
    class Still(Trainer):
        def configure_model(self):
            return TrainerConfigureModelOutput(self.model, optax.sgd(0.0), None, {"layers": 1})

    made = digits.train_only(Still)
    before = digits.bits(made.state.params)
    assert digits.bits(made.train().state.params) == before
    assert made.config == {"layers": 1}
    assert made.optimizer is made.tx


@shows(
    "Trainer Protocol",
    "Best practices for implementation",
    {"immutable states": "a state that you pass is copied, never donated"},
)
def test_the_state_of_a_subclass_is_copied():
    mine = sf.init_state(digits.init, optax.sgd(0.1), jax.random.key(5))

    class Given(Trainer):
        def configure_model(self):
            return TrainerConfigureModelOutput(self.model, optax.sgd(0.1), state=mine)

    made = digits.train_only(Given)
    assert digits.bits(made.state) == digits.bits(mine)
    made.train()
    assert not mine.params["kernel"].is_deleted()


@shows("API reference", "Constructor", {"`finetune`": "False draws new parameters"})
def test_without_finetune_parameters_are_drawn():
    given = {"model_state": digits.init(jax.random.key(9))}
    tuned, fresh = (digits.train_only(given={**given, "finetune": yes}) for yes in (True, False))
    assert digits.bits(tuned.state.params) == digits.bits(given["model_state"])
    assert digits.bits(fresh.state) == digits.bits(digits.train_only().state)


@shows("API reference", "Attributes", {"`state_shardings`": "the sharding of each leaf"})
def test_the_state_is_sharded_by_rules():
    made = digits.train_only(
        sharding_array=(1, -1, 2, 1),
        total_batch_size=16,
        given={"rules": [("kernel", PartitionSpec("fsdp", "tp"))]},
    )
    assert made.state.params["kernel"].sharding == made.state_shardings.params["kernel"]
    assert made.state_partition_spec.params["kernel"] == PartitionSpec("fsdp", "tp")
    whole = digits.train_only(
        sharding_array=(1, -1, 1, 1), auto_shard_states=False, total_batch_size=16
    )
    assert whole.state.params["kernel"].sharding.is_fully_replicated


def test_a_state_starts_at_step_start_point():
    made = digits.train_only(step_start_point=5, scheduler="linear")
    assert int(made.state.step) == 5
    made.train()
    assert int(made.state.step) == 20
    assert made.history["train/learning_rate"][-1] == pytest.approx(1.5e-3, rel=1e-3)


def rows():
    return iter([{name: values[i] for name, values in digits.TRAIN.items()} for i in range(60)])


def test_a_stream_is_iterated_once_for_each_epoch():
    """The number of steps is unknown, so nothing else would end the run."""
    made = digits.train_only(given={"dataset_train": rows}, num_train_epochs=2)
    assert made.train().stopped == "the batches ended at step 6"


@shows(
    "API reference",
    "Methods and properties",
    {
        "`apply_training_hooks` returns modified metrics": "they are logged; `trainer.history` "
        "keeps those of the step"
    },
)
def test_metrics_of_apply_training_hooks_are_logged(tmp_path):
    class Changed(Trainer):
        def apply_training_hooks(self, metrics):
            return {**metrics, "train/added": 1.0}

    made = digits.train_only(Changed, output_dir=tmp_path, report_to=("csv",), max_steps=5)
    made.train()
    assert "train/added" not in made.history
    head, row = (tmp_path / "logs" / "metrics.csv").read_text().splitlines()
    assert dict(zip(head.split(","), row.split(","), strict=True))["train/added"] == "1.0"


@shows(
    "Trainer Protocol",
    "Required methods: train",
    {"manages the state": "`trainer.state`, at all times that of the run"},
)
def test_the_state_of_the_trainer_is_that_of_the_run():
    steps = []

    class Looks(Trainer):
        def on_log(self, metrics, step):
            steps.append((step, int(self.state.step)))
            assert float(self.state.params["bias"].sum()) is not None

    digits.trainer(Looks, max_steps=10).train()
    assert [step for step, _ in steps] == [5, 10, 10]
    assert all(step <= of_state <= step + 5 for step, of_state in steps)  # the next log point


def test_epochs_are_counted():
    made = digits.train_only(num_train_epochs=2)
    assert made.epochs_done == 0
    made.train()
    assert made.epochs_done == 2
    made.train(more_steps=1)
    assert made.epochs_done == 2


@shows(
    "Trainer Protocol",
    "Required methods: train",
    {"logs metrics and reports progress": "the same, by `log_metrics` and a bar"},
)
def test_the_bar_of_a_subclass_is_shown():
    class Bar:
        step, closed = 0, False

        def set_postfix(self, values):
            self.values = values

        def update(self, n):
            self.step += n

        def close(self):
            self.closed = True

    bar = Bar()

    class Own(Trainer):
        def create_progress_bar(self, total, desc="", disabled=False):
            assert (total, desc, disabled) == (20, "model", False)
            return bar

    digits.trainer(Own).train()
    assert (bar.step, bar.closed) == (20, True)
    assert "eval/loss" in bar.values


def test_an_exception_of_a_method_reaches_the_caller():
    class Fails(Trainer):
        def log_metrics(self, metrics, pbar, step, mode="train"):
            raise sf.errors.DataError("cut here")

    made = digits.train_only(Fails)
    with pytest.raises(sf.errors.DataError, match="cut here"):
        made.train()
    assert made.stopped == "DataError: cut here"


# Methods


@pytest.fixture(scope="module")
def made():
    return digits.trainer(progress_bar_type="json", training_time_limit="1h")


def test_by_default_the_hooks_do_nothing(made):
    assert made.on_step_start("state", 1) == "state"
    assert made.on_step_end("state", {}, 1) == ("state", {})
    assert made.on_log({}, 1) is made.start_training_hook() is made.start_evaluation_hook() is None


def test_the_kind_of_bar(made):
    assert isinstance(made.create_progress_bar(10), ProgressBar)
    for silent in ({"performance_mode": True}, {"progress_bar_type": "none"}):
        assert isinstance(digits.train_only(**silent).create_progress_bar(10), NullProgressBar)
    assert isinstance(made.create_progress_bar(10, disabled=True), NullProgressBar)


@shows(
    "API reference",
    "Methods and properties",
    {
        "`apply_training_hooks` ends a run at a NaN": "the same",
        "`apply_training_hooks` ends a run at the time limit": "the same",
    },
)
def test_a_nan_or_inf_and_the_time_limit_end_a_run(made):
    with made.timer("train"):
        assert made.apply_training_hooks({"train/loss": 1.0}) == {"train/loss": 1.0}
    assert made.apply_training_hooks({"eval/loss": np.nan}) == {
        "eval/loss": pytest.approx(np.nan, nan_ok=True)
    }
    for value in (np.nan, np.inf):
        with pytest.raises(StopTraining, match=f"train/loss is {value}"):
            made.apply_training_hooks({"train/loss": value})
    late = digits.trainer(training_time_limit=1e-6)
    with pytest.raises(StopTraining, match="the time limit"), late.timer("train"):
        late.apply_training_hooks({"train/loss": 1.0})


class Lines:
    """A writer that keeps what is written."""

    def __init__(self):
        self.lines = []

    def write_scalars(self, step, scalars):
        self.lines.append((step, dict(scalars)))


class Bar:
    step = 0

    def __init__(self):
        self.shown = []

    def set_postfix(self, values):
        self.shown.append((self.step, dict(values)))

    def update(self, n=1):
        self.step += n


@pytest.fixture(scope="module")
def logging():
    return digits.train_only(log_steps=5, report_steps=10, max_steps=23)


@pytest.fixture
def trainer(logging):
    """A trainer with a writer that keeps its lines, to log metrics by hand."""
    logging.writer = Lines()
    return logging


@shows(
    "API reference",
    "Methods and properties",
    {
        "`log_metrics` filters `mlperf` and `grad_norm`": "`mlperf` always, `grad_norm` from the "
        "bar; `log_grad_norms=False` does not write it"
    },
)
def test_names_get_the_prefix_of_the_mode_once(trainer):
    metrics = {"loss": 1, "train/loss": 2, "eval/loss": 3, "a/mlperf": 4, "train/grad_norm": 5}
    bar = Bar()
    trainer.log_metrics(metrics, bar, 5, "eval")
    assert "train/grad_norm" not in bar.shown[0][1]
    written = {"eval/loss": 3.0, "train/loss": 2.0, "train/grad_norm": 5.0}
    assert trainer.writer.lines == [(5, written)]


@shows(
    "API reference",
    "Methods and properties",
    {"`log_metrics` every `log_steps` and `report_steps`": "the same"},
)
def test_train_metrics_are_shown_and_written_at_their_intervals_and_at_the_end(trainer):
    bar = Bar()
    for step in (5, 10, 12, 23):
        trainer.log_metrics({"loss": float(step)}, bar, step)
    trainer.log_metrics({"loss": 0.0}, bar, 12, "eval")
    assert [values["train/loss"] for _, values in bar.shown[:-1]] == [5, 10, 12, 23]
    assert bar.shown[-1][1] == {"eval/loss": 0.0}
    assert [step for step, _ in trainer.writer.lines] == [10, 23, 12]


def test_the_flags_of_log_metrics(trainer):
    bar = Bar()
    trainer.log_metrics({"loss": 1.0}, bar, 10, update_progress=False)
    assert (bar.shown, len(trainer.writer.lines)) == ([], 1)
    trainer.log_metrics({"loss": 1.0}, bar, 10, log_to_backends=False)
    assert (len(bar.shown), len(trainer.writer.lines)) == (1, 1)
    trainer.log_metrics({"loss": 1.0}, bar, 5)
    assert len(trainer.writer.lines) == 1
    trainer.log_metrics({"loss": 1.0}, bar, 5, force_report=True)
    assert trainer.writer.lines[1:] == [(5, {"train/loss": 1.0})]
    trainer.log_metrics({"loss": 1.0}, bar, 5, log_to_backends=False, force_report=True)
    assert len(trainer.writer.lines) == 2


def test_log_metrics_sees_the_numbers_of_hooks(tmp_path):
    hook = lambda event: {"mine/step": event.step} if event.is_train else None
    options = {"output_dir": tmp_path, "report_to": ("csv",), "max_steps": 5}
    digits.train_only(**options, given={"hooks": [hook]}).train()
    head, row = (tmp_path / "logs" / "metrics.csv").read_text().splitlines()
    assert float(dict(zip(head.split(","), row.split(","), strict=True))["mine/step"]) == 5


@shows(
    "Trainer Protocol",
    "Best practices for implementation",
    {"cleanup of resources": "writers are closed, also after an exception"},
)
def test_an_exception_before_the_first_step_closes_the_writers(tmp_path):
    class Broken(Trainer):
        def start_training_hook(self):
            raise OSError("no data")

    trainer = digits.train_only(Broken, output_dir=tmp_path, report_to=("jsonl",))
    with pytest.raises(OSError, match="no data"):
        trainer.train()
    assert (trainer.writer, trainer.stopped) == (None, "OSError: no data")


def test_an_evaluation_on_other_data_has_at_most_so_many_batches():
    trainer = digits.trainer(max_evaluation_steps=2)
    first = {name: values[:40] for name, values in digits.TRAIN.items()}
    assert trainer.evaluate(dataset=digits.TRAIN) == trainer.evaluate(dataset=first)
    other = lambda numbers: {"train_loss": trainer.evaluate(digits.TRAIN)["eval_loss"]}
    assert trainer.evaluate(metric_calculator=other).keys() >= {"eval_loss", "train_loss"}


def test_without_data_there_is_nothing_to_compile():
    assert not digits.train_only(given={"dataset_train": None}).compile_aot()


def test_log_metrics_takes_a_bar_of_tqdm(trainer):
    from tqdm import tqdm

    with tqdm(total=10, file=io.StringIO()) as bar:
        trainer.log_metrics({"train/loss": 1.0}, bar, 4)
        trainer.log_metrics({"train/loss": 1.0}, bar, 6)
        assert bar.n == 6


@pytest.mark.full
def test_flops_of_a_compiled_step_are_those_on_all_devices():
    trainer = digits.trainer(sharding_array=(1, -1, 1, 1), total_batch_size=16)
    assert trainer.compile_aot()
    assert trainer.calculate_number_total_flops({}, is_training=False) == 2 * 16 * 64 * 10


@shows(
    "API reference",
    "Methods and properties",
    {"`count_model_parameters`, also of a `FrozenDict`": "the same"},
)
@pytest.mark.parametrize(
    ("params", "count"),
    [
        ({"w": np.ones((2, 3)), "b": ones()}, 7),
        (freeze({"w": ones((2, 3))}), 6),
        (eqx.nn.Linear(2, 3, key=jax.random.key(0)), 9),
        ((ones(2), jax.random.wrap_key_data(np.zeros(2, np.uint32)), "name", None), 2),
        ({"w": ones((3, 2)), "b": jax.ShapeDtypeStruct((2,), "f4"), "f": max}, 8),
        ({}, 0),
    ],
)
def test_parameters_of_any_tree_are_counted(params, count):
    assert Trainer.count_model_parameters(params) == count


@shows("Trainer Protocol", "Required properties", {"`_model_state`": "another name of `state`"})
@shows(
    "API reference",
    "Attributes",
    {
        "`model_state`": "another name of `state`",
        "`sharded_evaluation_step_function`": "the same; `eval_step_fn` is short for it",
        "`sharded_training_step_function`": "the same; `train_step_fn` is short for it",
    },
)
def test_aliases(made):
    assert made.state is made._model_state is made.model_state
    assert made.optimizer is made.tx
    assert made.train_step_fn is made.sharded_training_step_function
    assert made.eval_step_fn is made.sharded_evaluation_step_function


def test_the_former_name_of_sizes_warns_of_the_new_one(made):
    with pytest.warns(DeprecationWarning, match="Trainer.plan is now Trainer.sizes") as caught:
        assert made.plan is made.sizes
    assert caught[0].filename == __file__


def test_the_former_name_of_not_loaded_is_refused_with_the_new_one(made):
    assert made.not_loaded == {}
    assert not hasattr(made, "left")
    with pytest.raises(AttributeError, match="Trainer.left is now Trainer.not_loaded"):
        _ = made.left


def test_a_trainer_assigns_few_attributes(made):
    assert len(vars(made)) <= 25, vars(made).keys()


def test_a_part_can_be_replaced_between_runs():
    trainer = digits.train_only(max_steps=5)
    trainer.train()
    seen = []
    trainer.hooks = [lambda event: seen.append(event.step)]
    trainer.dataloader_train = digits.train_only(seed=7).dataloader_train
    trainer.train(more_steps=5)
    assert seen == [10]


def test_a_subclass_may_assign_a_part_before_its_arguments_are_read():
    class Early(Trainer):
        def __init__(self, *args, **kwargs):
            self.config, self.mesh = {"layers": 1}, None  # which the arguments replace
            super().__init__(*args, **kwargs, config={**self.config, "width": 2})

    trainer = digits.train_only(Early)
    assert trainer.config == {"layers": 1, "width": 2}
    assert trainer.mesh.size == 1


@shows(
    "API reference",
    "Methods and properties",
    {
        "`is_enable`": "whether this process writes metrics",
        "`is_process_zero`": "the same",
    },
)
def test_which_processes_write(made, monkeypatch):
    assert (made.is_process_zero, made.is_enable) == (True, True)
    everywhere = digits.train_only(log_all_workers=True)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert (made.is_process_zero, made.is_enable) == (False, False)
    assert everywhere.is_enable


class Own(Trainer):
    def create_collect_function(self):
        return lambda batch: {"seen": sorted(batch)}


def collected(kind=Trainer, examples=(), given=None, **changes):
    """Make a batch of the examples as a trainer does; None if it stacks them itself."""
    trainer = digits.trainer(kind, given={"dataset_eval": None, **(given or {})}, **changes)
    collect = trainer._collect_of(None)
    return None if collect is None else collect(list(examples))


@shows("BaseTrainer", "Customization", {"override `create_collect_function`": "the same"})
@shows("API reference", "Attributes", {"`data_collator`": "the same"})
def test_which_function_makes_batches():
    rows = [{"x": 1, "y": 2}, {"x": 3, "y": 4}]
    assert collected() is None
    assert collected(examples=[{"ids": [1, 2]}], max_length=64)["ids"].shape == (1, 64)
    assert collected(examples=rows, given={"data_collator": len}) == 2
    assert collected(Own, rows) == {"seen": ["x", "y"]}
    collator = lambda examples: {"mine": examples}
    assert collected(Own, rows, given={"data_collator": collator}) == {"seen": ["mine"]}


def test_an_error_of_a_function_for_columns_says_that_it_gets_them():
    class Rows(Trainer):
        def create_collect_function(self):
            return lambda examples: {"x": np.stack([example["x"] for example in examples])}

    with pytest.raises(TypeError) as error:
        collected(Rows, [{"x": 1, "y": 2}])
    assert error.value.__notes__ == [
        "the function that create_collect_function returns gets a dict of columns ['x', 'y'], not "
        "a list of examples"
    ]
    assert "x" in collected(Rows, [1], given={"data_collator": lambda rows: [{"x": rows}]})


def test_a_method_for_all_kinds_of_data_comes_before_the_default_of_one():
    assert collected(Own, [{"x": 1}], use_grain=True) == {"seen": ["x"]}

    class Grain(Own):
        def create_grain_collect_function(self, max_sequence_length, truncation_mode):
            return lambda batch: (max_sequence_length, truncation_mode)

    assert collected(Grain, [{"x": 1}], use_grain=True) == (None, "keep_end")
    assert collected(Grain, [{"x": 1}]) == {"seen": ["x"]}


@shows(
    "API reference", "Constructor", {"`**deprecated_kwargs`": "refused, with what to write instead"}
)
def test_arguments_of_other_trainers_are_refused_at_once_with_what_to_write():
    with pytest.raises(sf.errors.ConfigError) as error:
        Trainer(digits.arguments(), train_dataset=[1], compute_metrics=print, hoks=())
    for advice in ("write dataset_train=", "metrics from the loss function", "mean 'hooks'"):
        assert advice in str(error.value)


def test_each_attribute_says_what_it_is():
    for name, member in vars(Trainer).items():
        if isinstance(member, property):
            assert member.__doc__, name
            assert "callable object" not in member.__doc__, name  # that of `attrgetter`


def test_predictions_of_any_data_are_in_order_and_without_padding(tmp_path):
    made = digits.trainer(max_steps=2, eval_batch_size=32)  # of 100 examples
    made.train()
    top = lambda params, batch: {"top": digits.logits_of(params, batch).argmax(-1)}
    predicted = made.predict(digits.TEST, top)["top"]
    np.testing.assert_array_equal(predicted, top(made.state.params, digits.TEST)["top"])
    accuracy = (predicted == digits.TEST["label"]).mean()
    assert made.evaluate()["eval_accuracy"] == pytest.approx(accuracy)
    (file,) = made.predict({"image": digits.TEST["image"][:5]}, top, to=tmp_path / "out")
    np.testing.assert_array_equal(np.load(file)["top"], predicted[:5])
    with pytest.raises(
        sf.errors.ConfigError, match="function: expected a function .params, batch. -> ou"
    ):
        made.predict(digits.TEST)
    plain = digits.trainer(max_steps=1, given={"dataset_eval": None, "devices": jax.devices()[:2]})
    np.testing.assert_array_equal(
        plain.predict(digits.TEST, top)["top"], top(plain.state.params, digits.TEST)["top"]
    )
