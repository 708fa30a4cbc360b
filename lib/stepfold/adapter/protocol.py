"""EasyDeL's trainer protocol, as a runtime-checkable `Protocol`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from stepfold.adapter.validation import Truncation


@runtime_checkable
class BaseTrainerProtocol(Protocol):
    """Members of a trainer, which `Trainer` describes; `isinstance` checks that all are there.

    A subclass may define only the members that it needs.

    >>> isinstance(object(), BaseTrainerProtocol)
    False
    """

    arguments: Any
    checkpoint_manager: Any
    checkpoint_path: Any
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

    @property
    def training_batch_size(self) -> int: ...
    @property
    def evaluation_batch_size(self) -> int: ...
    @property
    def is_process_zero(self) -> bool: ...
    @property
    def is_enable(self) -> bool: ...
    def initialize_trainer_utils(self) -> None: ...
    def configure_model(self) -> Any: ...
    def configure_dataloaders(self) -> Any: ...
    def configure_functions(self) -> Any: ...
    def create_collect_function(
        self, max_sequence_length: int, truncation_mode: Truncation
    ) -> Callable[[Any], Any]: ...
    def create_grain_collect_function(
        self, max_sequence_length: int, truncation_mode: Truncation
    ) -> Callable[[Any], Any]: ...
    def create_tfds_collect_function(
        self, max_sequence_length: int, truncation_mode: Truncation
    ) -> Callable[[Any], Any]: ...
    def create_progress_bar(self, total: int, desc: str = "", disabled: bool = False) -> Any: ...
    def train(self) -> Any: ...
    def eval(self, model_state: Any) -> Iterator[dict[str, float]]: ...
    def evaluate(self, state: Any = None, metric_calculator: Any = None) -> dict[str, float]: ...
    def start_training_hook(self) -> None: ...
    def start_evaluation_hook(self) -> None: ...
    def on_step_start(self, state: Any, step: int) -> Any: ...
    def on_step_end(self, state: Any, metrics: Any, step: int) -> tuple[Any, Any]: ...
    def apply_training_hooks(self, metrics: Any) -> Any: ...
    def log_metrics(
        self,
        metrics: Mapping[str, float],
        pbar: Any,
        step: int,
        mode: str = "train",
        *,
        update_progress: bool = True,
        log_to_backends: bool = True,
        force_report: bool = False,
    ) -> None: ...
    def log_watchers(self, state: Any, step: int) -> Any: ...
    def log_weight_distribution(self, state: Any, step: int) -> Any: ...
    def compile_aot(self) -> bool: ...
    def calculate_number_total_flops(self, params: Any, is_training: bool = True) -> Any: ...
    @staticmethod
    def count_model_parameters(prm: Any) -> int: ...
    def specs_to_name_sharding(self, tree: Any, mesh: Any = None) -> Any: ...
    def save_pretrained(self, state: Any, save_directory: str | None = None) -> Any: ...
    def save_information(self, output_path: Any) -> None: ...
    def finish(self) -> None: ...
