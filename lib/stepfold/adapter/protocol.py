"""EasyDeL's trainer protocol: the members of a trainer, as two of its documents list them.

The guide "Trainer Protocol" requires few members. The reference of the API requires many, but
neither `evaluate` nor `log_watchers`. A trainer has to have all members of one of them.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from stepfold.adapter.fields import Truncation
from stepfold.errors import ConfigError

_Class = TypeVar("_Class", bound=type)


class _Protocol(type(Protocol)):  # type: ignore[misc]
    """Let `isinstance` accept an object with the members of either document."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if cls is not BaseTrainerProtocol:
            return bool(super().__instancecheck__(instance))
        if type.__instancecheck__(cls, instance):
            return True
        missing = object()
        return any(
            all(inspect.getattr_static(instance, name, missing) is not missing for name in members)
            for members in (_OF_GUIDE, _OF_REFERENCE)
        )


# Properties of the reference that a subclass need not define.
_OPTIONAL = frozenset(
    (
        *("checkpoint_path", "state_named_sharding", "state_partition_spec", "state_shardings"),
        "wandb_runtime",
    )
)


def _abstract(protocol: _Class) -> _Class:
    """Make the methods and properties of a protocol raise an error with their names."""
    for name, member in list(vars(protocol).items()):
        if name.startswith("_") or name in _OPTIONAL:
            continue
        is_property = isinstance(member, property)
        method = _missing_method(member.fget if is_property else member)
        setattr(protocol, name, property(method) if is_property else method)
    return protocol


def _missing_method(method: Any) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *_: Any, **__: Any) -> Any:
        name = f"{type(self).__name__}.{method.__name__}"
        raise NotImplementedError(
            f"{name} is not implemented; define it, since BaseTrainerProtocol only names it"
        )

    return call


@_abstract
class BaseTrainerProtocol(Protocol, metaclass=_Protocol):
    """Members of a trainer, which `Trainer` describes.

    A subclass has to define the methods of the guide or those of the reference; without one of
    them it cannot be constructed. `isinstance` accepts any object with all members of either.

    Raises:
      ConfigError: if a subclass lacks methods, with a list of them.

    >>> isinstance(object(), BaseTrainerProtocol)
    False
    >>> class Forgetful(BaseTrainerProtocol):
    ...     def train(self, model_parameters=None, state=None): ...
    ...     def evaluate(self, state, metric_calculator=None): ...
    ...     def save_pretrained(self, ckpt_path, state=None): ...
    >>> Forgetful()
    Traceback (most recent call last):
    ...
    stepfold.errors.ConfigError: Forgetful lacks methods of a trainer: config...
    """

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """Check that a subclass has all methods."""
        missing = min(
            (_missing(cls, _METHODS & each) for each in (_OF_GUIDE, _OF_REFERENCE)), key=len
        )
        if missing:
            raise ConfigError(
                f"{cls.__name__} lacks methods of a trainer: {', '.join(missing)}; define them"
            )
        return super().__new__(cls)

    arguments: Any
    checkpoint_manager: Any
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
    state_shape: Any
    timer: Any
    train_tracker: Any
    tx: Any
    optimizer: Any
    _model_state: Any

    @property
    def checkpoint_path(self) -> str | None: ...
    @property
    def state_named_sharding(self) -> Any: ...
    @property
    def state_partition_spec(self) -> Any: ...
    @property
    def state_shardings(self) -> Any: ...
    @property
    def wandb_runtime(self) -> Any: ...
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
    def create_progress_bar(
        self, total: int | None, desc: str = "", disabled: bool = False
    ) -> Any: ...
    def train(self) -> Any: ...
    def eval(self, model_state: Any) -> Iterator[dict[str, float]]: ...
    def evaluate(self, state: Any, metric_calculator: Any = None) -> dict[str, float]: ...
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
    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any: ...
    def save_information(self, output_path: Any) -> None: ...
    def finish(self) -> None: ...


_MEMBERS = frozenset(name for name in vars(BaseTrainerProtocol) if not name.startswith("_"))
_METHODS = _MEMBERS - _OPTIONAL  # and properties
_OF_REFERENCE = _MEMBERS.union(BaseTrainerProtocol.__annotations__).difference(
    ("_model_state", "evaluate", "log_watchers", "optimizer")
)
_OF_GUIDE = frozenset(
    (
        *("train", "evaluate", "save_pretrained"),
        *("configure_model", "configure_dataloaders", "configure_functions"),
        *("arguments", "dataset_train", "dataset_eval", "dtype", "param_dtype"),
        *("model", "_model_state", "optimizer", "scheduler"),
    )
)


def _missing(cls: type, names: frozenset[str]) -> list[str]:
    """List the members that a class has from the protocol alone."""
    of_protocol = vars(BaseTrainerProtocol)
    own = {name: inspect.getattr_static(cls, name, None) for name in names}
    return sorted(name for name in names if own[name] is of_protocol[name])
