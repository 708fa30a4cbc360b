"""The calls that EasyDeL documents, under the strict settings of mypy, which checks this file."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tests.clients.rows import shows

import stepfold as sf
from stepfold.adapter import (
    BaseTrainerProtocol,
    Trainer,
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
    TrainerOutput,
    TrainingArguments,
)

DATA = {"x": np.ones((16, 3), np.float32)}


def init(key: jax.Array) -> dict[str, jax.Array]:
    return {"w": jax.random.normal(key, (3,))}


def loss_fn(params: dict[str, jax.Array], batch: dict[str, jax.Array], key: jax.Array) -> Any:
    return sf.mean((batch["x"] @ params["w"]) ** 2, batch["mask"])


def make_trainer(**changes: Any) -> Trainer:
    fields = {"max_steps": 2, "total_batch_size": 8, "progress_bar_type": "none", **changes}
    arguments = TrainingArguments(**fields)
    devices = jax.devices()[:1]
    return Trainer(arguments, None, init, DATA, DATA, None, True, loss_fn=loss_fn, devices=devices)


@shows(
    "Trainer Protocol",
    "Introduction",
    {
        "type hints of the protocol": "mypy accepts the calls on a `Trainer`, and a class of "
        "your own with these signatures; `# type: ignore` is needed for aliases of fields, for the "
        "construction of such a class, and for an override on `Trainer` of `save_pretrained` or "
        "`train`, of which each document has another signature"
    },
)
def test_calls_of_the_guides(tmp_path: Path) -> None:
    trainer = make_trainer()
    state: sf.TrainState = trainer.state
    output: TrainerOutput = trainer.train(model_parameters=None, state=state)
    (state,) = output
    metrics: dict[str, float] = trainer.evaluate(state, metric_calculator=None)
    assert metrics["eval_loss"] >= 0
    trainer.save_pretrained(str(tmp_path), state)
    trainer.save_pretrained(ckpt_path=str(tmp_path / "again"), state=None)
    steps: TrainerConfigureFunctionOutput = trainer.configure_functions()
    loaders: TrainerConfigureDataloaderOutput = trainer.configure_dataloaders()
    model: TrainerConfigureModelOutput = trainer.configure_model()
    train_step_fn, eval_step_fn = steps
    TrainerConfigureFunctionOutput(train_step_fn, eval_step_fn)
    TrainerConfigureFunctionOutput(train_step_fn=train_step_fn, eval_step_fn=eval_step_fn)
    TrainerConfigureDataloaderOutput(loaders.dataloader_train, loaders.dataloader_eval)
    TrainerConfigureModelOutput(model=model.model, state=model.state)
    arguments: TrainingArguments = trainer.arguments
    assert (trainer.dataset_train, trainer.dataset_eval, trainer.model) == (DATA, DATA, init)
    assert trainer._model_state is trainer.state
    assert (trainer.dtype, trainer.param_dtype) == (jnp.float32, jnp.float32)
    scheduler: Callable[..., Any] | None = trainer.scheduler
    optimizer: optax.GradientTransformation | None = trainer.optimizer
    assert callable(scheduler)
    assert optimizer is trainer.tx
    collect: Callable[..., Any] = trainer.create_collect_function()
    assert collect([{"x": [1]}])["x"].shape == (1, 1)
    assert arguments.output_dir is None
    assert int(make_trainer(max_steps=3).train(str(tmp_path)).step) == 3
    assert int(make_trainer(max_steps=3).train(ckpt_path=str(tmp_path)).step) == 3


class CustomTrainer(Trainer):
    """The overrides that the guide shows."""

    def create_collect_function(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return super().create_collect_function(*args, **kwargs)

    def configure_functions(self, *args: Any, **kwargs: Any) -> TrainerConfigureFunctionOutput:
        return super().configure_functions(*args, **kwargs)

    def on_step_start(self, state: sf.TrainState, step: int) -> sf.TrainState:
        return state

    def on_step_end(self, state: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
        return super().on_step_end(state, metrics, *args, **kwargs)

    def on_log(self, metrics: Any, step: int) -> None:
        assert step > 0

    def eval(self, model_state: sf.TrainState) -> Iterator[dict[str, float]]:
        return super().eval(model_state)


class OfProtocol(Trainer):
    """Overrides with the signatures of the guide to the protocol."""

    def train(  # type: ignore[override]
        self, model_parameters: Any = None, state: sf.TrainState | None = None
    ) -> sf.TrainState:
        trained: sf.TrainState = super().train(model_parameters, state).state
        return trained

    def save_pretrained(  # type: ignore[override]
        self, ckpt_path: str, state: sf.TrainState | None = None
    ) -> None:
        super().save_pretrained(ckpt_path, state)


def test_a_subclass_has_the_signatures_of_the_guide(tmp_path: Path) -> None:
    arguments = TrainingArguments(max_steps=2, total_batch_size=8, progress_bar_type="none")
    devices = jax.devices()[:1]
    trainer = OfProtocol(arguments, None, init, DATA, loss_fn=loss_fn, devices=devices)
    state: sf.TrainState = trainer.train()
    trainer.save_pretrained(ckpt_path=str(tmp_path), state=state)
    assert sf.checkpoint.latest_step(tmp_path) == int(state.step) == 2


class OfReference(Trainer):
    """Overrides with the signatures of the reference."""

    def apply_training_hooks(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        return super().apply_training_hooks(metrics)

    def on_step_start(self, state: sf.TrainState, step: int) -> sf.TrainState:
        return state

    def on_step_end(
        self, state: sf.TrainState, metrics: dict[str, Any], step: int
    ) -> tuple[sf.TrainState, dict[str, Any]]:
        return state, metrics

    def start_training_hook(self) -> None:
        assert self.arguments is not None

    def start_evaluation_hook(self) -> None:
        assert self.arguments is not None


class OfGuide(BaseTrainerProtocol):
    """The skeleton."""

    def __init__(self, arguments: TrainingArguments) -> None:
        self.arguments = arguments
        self.optimizer: optax.GradientTransformation | None = None

    def configure_model(self) -> TrainerConfigureModelOutput:
        return TrainerConfigureModelOutput(init, None)

    def configure_dataloaders(self) -> TrainerConfigureDataloaderOutput:
        return TrainerConfigureDataloaderOutput([], None)

    def configure_functions(self) -> TrainerConfigureFunctionOutput:
        return TrainerConfigureFunctionOutput(max, min)

    def train(
        self, model_parameters: Any = None, state: sf.TrainState | None = None
    ) -> sf.TrainState | None:
        return state

    def evaluate(
        self, state: sf.TrainState, metric_calculator: Callable[..., Any] | None = None
    ) -> dict[str, float]:
        return {"eval_loss": float(state.step)}

    def save_pretrained(self, ckpt_path: str, state: sf.TrainState | None = None) -> None:
        sf.save(ckpt_path, state)


def test_a_class_of_the_guide_is_a_trainer() -> None:
    # mypy takes the members of the reference for abstract too.
    trainer: BaseTrainerProtocol = OfGuide(TrainingArguments())  # type: ignore[abstract]
    assert trainer.train() is None
    assert trainer.arguments.output_dir is None


def test_the_configuration_example() -> None:
    arguments = TrainingArguments(  # type: ignore[call-arg]  # an alias
        model_name="MyFineTunedModel",
        num_train_epochs=3,
        learning_rate=2e-5,
        total_batch_size=32,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=1,
        weight_decay=0.01,
        max_steps=-1,
        gradient_checkpointing="nothing_saveable",
        sharding_array=(1, -1, 1, 1),
        use_fast_kernels=True,
        logging_steps=10,
        save_steps=100,
        save_total_limit=2,
        evaluation_strategy="steps",
        eval_steps=100,
        output_dir="runs/my_model_run",
    )
    assert arguments.log_steps == 10


def test_calls_of_the_reference(tmp_path: Path) -> None:
    trainer = make_trainer()
    compiled: bool = trainer.compile_aot()
    assert compiled
    params = trainer.state.params
    assert trainer.calculate_number_total_flops(params, is_training=False) > 0
    assert trainer.count_model_parameters(params) == 3
    for create in (
        trainer.create_collect_function,
        trainer.create_grain_collect_function,
        trainer.create_tfds_collect_function,
    ):
        assert create(3, "keep_start")([{"x": [1]}])["x"].shape == (1, 3)
    bar = trainer.create_progress_bar(10, desc="train", disabled=True)
    trainer.log_metrics({"loss": 1.0}, bar, 1, mode="eval")
    trainer.start_training_hook()
    trainer.start_evaluation_hook()
    assert trainer.on_step_start(trainer.state, 1) is trainer.state
    state, metrics = trainer.on_step_end(trainer.state, {"loss": 1.0}, 1)
    assert trainer.apply_training_hooks(metrics) == metrics
    for numbers in trainer.eval(state):
        assert numbers["eval_loss"] >= 0
    trainer.log_weight_distribution(state, 1)
    sharding = trainer.specs_to_name_sharding({"w": jax.P()}, mesh=trainer.mesh)
    assert sharding["w"].mesh == trainer.mesh
    sizes: tuple[int, int] = trainer.training_batch_size, trainer.evaluation_batch_size
    assert sizes == (8, 8)
    flags: tuple[bool, bool] = trainer.is_enable, trainer.is_process_zero
    assert all(flags)
    output: TrainerOutput = trainer.train()
    trainer.save_information(str(tmp_path / "card.md"))
    trainer.save_pretrained(output.state, save_directory=str(tmp_path), gather_fns=None)
    trainer.initialize_trainer_utils()
    trainer.finish()
    path: str | None = trainer.checkpoint_path
    assert path is None
    again: TrainerOutput = TrainerOutput.from_dict(output.to_dict())
    assert again.replace(checkpoint_path="a/2").to_json()
    assert TrainerOutput(output.state, output.mesh, "2", "a/2").last_save_file_name == "2"
