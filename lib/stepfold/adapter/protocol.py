"""What code that is handed a trainer may ask of it: EasyDeL's protocol, as a `Protocol`."""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from stepfold.adapter.arguments.data import Truncation
from stepfold.adapter.outputs import (
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
    TrainerOutput,
)


@runtime_checkable
class BaseTrainerProtocol(Protocol):
    """Be shaped like a trainer; `isinstance` tells whether an object is, whatever its class.

    A class may inherit from it, to say what it is, and write the members that it needs.

    >>> isinstance(object(), BaseTrainerProtocol)
    False
    """

    arguments: Any
    checkpoint_manager: Any
    checkpoint_path: str | os.PathLike[str] | None
    config: Any
    data_collator: Callable[..., Any] | None
    dataloader_eval: Any
    dataloader_train: Any
    dataset_eval: Any
    dataset_train: Any
    dtype: Any
    evalu_tracker: Any
    finetune: bool
    max_evaluation_steps: int | None
    max_training_steps: int
    memory_monitor: Any
    mesh: Any
    model: Any
    model_state: Any
    param_dtype: Any
    pruning_module: Any
    scheduler: Any
    sharded_evaluation_step_function: Any
    sharded_training_step_function: Any
    state: Any
    state_named_sharding: Any
    state_partition_spec: Any
    state_shape: Any
    state_shardings: Any
    timer: Any
    train_tracker: Any
    tx: Any
    wandb_runtime: Any

    def train(self) -> TrainerOutput:
        """Do the whole run."""
        ...

    def eval(self, model_state: Any) -> Iterator[dict[str, float]]:
        """Give the metrics of each batch of the evaluation data."""
        ...

    def evaluate(self, state: Any = None, metric_calculator: Any = None) -> dict[str, float]:
        """Give the metrics of all of the evaluation data."""
        ...

    def configure_model(self) -> TrainerConfigureModelOutput:
        """Give the model, the optimizer and the schedule."""
        ...

    def configure_dataloaders(self) -> TrainerConfigureDataloaderOutput:
        """Give the batches, and how many steps there are."""
        ...

    def configure_functions(self) -> TrainerConfigureFunctionOutput:
        """Give the steps, and what they run on."""
        ...

    def create_collect_function(
        self, max_sequence_length: int, truncation_mode: Truncation
    ) -> Callable[[Any], Any]:
        """Make the function that makes a batch of examples."""
        ...

    def create_grain_collect_function(
        self, max_sequence_length: int, truncation_mode: Truncation
    ) -> Callable[[Any], Any]:
        """Make the function that makes a batch of what grain gives."""
        ...

    def create_tfds_collect_function(
        self, max_sequence_length: int, truncation_mode: Truncation
    ) -> Callable[[Any], Any]:
        """Make the function that makes a batch of what tensorflow_datasets gives."""
        ...

    def create_progress_bar(self, total: int, desc: str = "", disabled: bool = False) -> Any:
        """Make a bar."""
        ...

    def log_metrics(
        self, metrics: Mapping[str, float], pbar: Any, step: int, mode: str = "train"
    ) -> None:
        """Show metrics, and write them."""
        ...

    def log_weight_distribution(self, state: Any, step: int) -> Any:
        """Write how the weights are distributed."""
        ...

    def apply_training_hooks(self, metrics: Any) -> Any:
        """End the run where it must not go on."""
        ...

    def on_step_start(self, state: Any, step: int) -> Any:
        """Be called before each step."""
        ...

    def on_step_end(self, state: Any, metrics: Any, step: int) -> tuple[Any, Any]:
        """Be called after each step."""
        ...

    def start_training_hook(self) -> None:
        """Be called before the first step."""
        ...

    def start_evaluation_hook(self) -> None:
        """Be called before each evaluation."""
        ...

    def compile_aot(self) -> bool:
        """Compile the steps before they run."""
        ...

    def calculate_number_total_flops(self, params: Any, is_training: bool = True) -> Any:
        """Count the operations of a step."""
        ...

    @staticmethod
    def count_model_parameters(prm: Any) -> int:
        """Count parameters."""
        ...

    def save_pretrained(self, state: Any, save_directory: str | None = None) -> Any:
        """Save a state, and what it takes to go on from it."""
        ...

    def save_information(self, output_path: str | os.PathLike[str]) -> None:
        """Write a card of the run."""
        ...

    def specs_to_name_sharding(self, tree: Any, mesh: Any = None) -> Any:
        """Make shardings of partition specs."""
        ...

    @property
    def training_batch_size(self) -> int:
        """The examples of a training batch."""
        ...

    @property
    def evaluation_batch_size(self) -> int:
        """The examples of an evaluation batch."""
        ...

    @property
    def is_process_zero(self) -> bool:
        """Whether this is the first process."""
        ...

    @property
    def is_enable(self) -> bool:
        """Whether this process shows and writes."""
        ...

    def initialize_trainer_utils(self) -> None:
        """Make all that a run needs."""
        ...

    def finish(self) -> None:
        """Let go of all that a run held."""
        ...
