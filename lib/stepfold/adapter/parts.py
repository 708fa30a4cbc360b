"""The parts of a trainer: its arguments, and what it makes from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Self

import jax
import optax
from jax.sharding import Mesh

from stepfold.adapter.arguments import TrainingArguments
from stepfold.adapter.hooks import CompilationTracker, Watcher
from stepfold.adapter.loading import TrainingLoader
from stepfold.adapter.sizes import Sizes
from stepfold.adapter.steps import Step, as_eval_step, as_train_step
from stepfold.checkpoint.checkpoints import Checkpoints
from stepfold.checkpoint.names import NameMap
from stepfold.core.state import TrainState
from stepfold.hooks.performance import memory_use
from stepfold.loop.evaluate import Evaluation
from stepfold.loop.hook import AnyHook
from stepfold.sharding.plan import make_sharding


class RunPart:
    """An attribute of a trainer that is one of its parts; assigning it replaces the record.

    Args:
      field: the field of the record; by default it has the name of the attribute.
      change: a function `(record, value) -> record`, if other fields follow from this one.
    """

    def __init__(
        self,
        field: str | None = None,
        change: Callable[["RunParts", Any], "RunParts"] | None = None,
    ) -> None:
        self._field, self._change = field, change

    def __set_name__(self, owner: type, name: str) -> None:
        self._field = self._field or name

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        if trainer is None:
            return self
        # A subclass may assign and read it before the record is made, or without one.
        record = vars(trainer).get("_parts") or SimpleNamespace(**vars(trainer))
        return getattr(record, str(self._field))

    def __set__(self, trainer: Any, value: Any) -> None:
        record = vars(trainer).get("_parts")
        if record is None:
            vars(trainer)[str(self._field)] = value
        elif self._change is not None:
            trainer._parts = self._change(record, value)
        else:
            trainer._parts = replace(record, **{str(self._field): value})


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """Everything that a run consists of. Changing a part makes a new record."""

    # Arguments of the trainer.
    arguments: TrainingArguments
    model: Any = None
    config: Any = None
    initial: Any = None  # the state or the parameters to start with
    dataset_train: Any = None
    dataset_eval: Any = None
    data_collator: Callable[..., Any] | None = None
    finetune: bool = True
    loss_fn: Callable[..., Any] | None = None
    eval_loss_fn: Callable[..., Any] | None = None
    stateful: bool = False
    names: NameMap | None = None
    tx_argument: optax.GradientTransformation | None = None
    scheduler_argument: optax.Schedule | None = None
    evaluations: Sequence[Evaluation] = ()
    hooks: Sequence[AnyHook] = ()
    callbacks: Sequence[Callable[..., Any]] = ()
    watchers: Sequence[Watcher] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    # Made from `TrainingArguments`.
    sizes: Sizes
    mesh: Mesh
    rules: Any
    logs_path: Any = None  # absolute, since the working directory may change
    pruning_module: Any = None
    memory_monitor: Any = memory_use
    dtype: Any = None
    param_dtype: Any = None
    train_tracker: CompilationTracker = field(default_factory=CompilationTracker)
    evalu_tracker: CompilationTracker = field(default_factory=CompilationTracker)

    # Returned by the configure methods.
    dataloader_train: Any = None
    dataloader_eval: Any = None
    max_training_steps: int | None = None
    max_evaluation_steps: int | None = None
    data_offset: int = 0  # the data position minus the step of the state
    tx: optax.GradientTransformation | None = None
    scheduler: optax.Schedule | None = None
    state_type: type[TrainState] | None = None  # with `apply_gradients`, for steps of a subclass
    own_state: Any = None  # made here, so it need not be copied
    state_shape: Any = None
    own_step: Step | None = None  # made here, so it skips a NaN or inf
    train_step: Step | None = None
    eval_step: Step | None = None
    fit_step: Any = None  # the training step with metrics, for `fit`
    metrics_step: Any = None  # the evaluation step with metrics, jitted
    eval_jaxpr: Any = None  # of that step, once it is compiled ahead of time
    checkpoint_manager: Checkpoints | None = None

    @property
    def sharded_mesh(self) -> Mesh | None:
        """The mesh, or None if it is jax's default device alone, which needs no shardings."""
        is_default = self.mesh.size == 1 and self.mesh.devices.flat[0] == jax.local_devices()[0]
        return None if is_default else self.mesh

    @property
    def state_shardings(self) -> Any:
        """The sharding of each leaf of the state."""
        return make_sharding(self.state_shape, self.mesh, self.rules)

    @property
    def state_partition_spec(self) -> Any:
        """The partition spec of each leaf of the state."""
        return jax.tree.map(lambda sharding: sharding.spec, self.state_shardings)

    @property
    def abstract_state(self) -> Any:
        """The shapes and dtypes of the state, with shardings if it needs some."""
        if self.sharded_mesh is None:
            return self.state_shape
        make = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.tree.map(make, self.state_shape, self.state_shardings)

    def shardings_of(self, state: Any) -> Any:
        """Return the shardings of a state, or None if it needs none."""
        return make_sharding(state, self.mesh, self.rules) if self.sharded_mesh else None

    def bind(self, state: Any) -> Any:
        """Give a `TrainState` the method `apply_gradients` if steps of a subclass may call it."""
        is_plain = type(state) is TrainState and self.state_type is not None
        return self.state_type(*state) if is_plain else state  # type: ignore[misc]

    def with_state(self, state: Any) -> Self:
        """Describe another state."""
        return replace(self, state_shape=jax.eval_shape(lambda: state))

    def with_train_step(self, step: Step) -> Self:
        """Replace the training step.

        A jitted step stays jitted with batches of a subclass, which may have several sizes.
        """
        fit_step, loader = as_train_step(step), self.dataloader_train
        if hasattr(step, "lower") and not isinstance(loader, TrainingLoader | None):
            fit_step = jax.jit(fit_step, donate_argnums=0)
        return replace(self, train_step=step, fit_step=fit_step)

    def with_eval_step(self, step: Step | None) -> Self:
        """Replace the evaluation step."""
        metrics_step = None if step is None else jax.jit(as_eval_step(step))
        return replace(self, eval_step=step, metrics_step=metrics_step, eval_jaxpr=None)
