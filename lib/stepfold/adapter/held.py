"""What a trainer holds, by all the names that it is asked for by, and where its state is."""

import sys
from typing import Any

import jax

from stepfold.adapter.arguments.training import TrainingArguments
from stepfold.adapter.parts.devices import sharding_rules
from stepfold.adapter.parts.writers import writes_everywhere
from stepfold.adapter.planning import Plan
from stepfold.loop.hooks.stop import stop_early
from stepfold.sharding.plan import make_sharding


class Held:
    """Answer for what is held; what EasyDeL's abstract class has as properties are such here."""

    arguments: TrainingArguments
    plan: Plan
    model_state: Any
    rules: Any
    tx: Any
    sharded_training_step_function: Any
    sharded_evaluation_step_function: Any
    measuring_step: Any  # the same, whose numbers are metrics
    asked: str | None = None  # by what another state was asked for than the run's, since it ended
    progress_bar: Any = None
    checkpoint_path: str | None = None
    stopped: str | None = None
    best: int | None = None
    epochs_done = 0
    early_stopping: stop_early | None = None

    @property
    def model(self) -> Any:
        """The model, whatever it is."""
        return self._model

    @model.setter
    def model(self, model: Any) -> None:
        self._model = model

    @property
    def mesh(self) -> Any:
        """The devices, arranged."""
        return self._mesh

    @mesh.setter
    def mesh(self, mesh: Any) -> None:
        self._mesh = mesh

    @property
    def state(self) -> Any:
        """The state, which is `model_state`."""
        return self.model_state

    @state.setter
    def state(self, state: Any) -> None:
        self.model_state, self.asked = state, "state"

    _model_state = state

    @property
    def optimizer(self) -> Any:
        """The optimizer, which is `tx`."""
        return self.tx

    @property
    def train_step_fn(self) -> Any:
        """The training step, which is `sharded_training_step_function`."""
        return self.sharded_training_step_function

    @property
    def eval_step_fn(self) -> Any:
        """The evaluation step, which is `sharded_evaluation_step_function`."""
        return self.sharded_evaluation_step_function

    @property
    def training_batch_size(self) -> int:
        """The examples of a step, over all devices and microbatches."""
        return self.plan.train_batch

    @property
    def evaluation_batch_size(self) -> int:
        """The examples of a batch of the evaluation."""
        return self.plan.eval_batch

    @property
    def is_process_zero(self) -> bool:
        """Whether this is the first process."""
        return jax.process_index() == 0

    @property
    def is_enable(self) -> bool:
        """Whether this process writes."""
        return self.is_process_zero or writes_everywhere(self.arguments)

    @property
    def wandb_runtime(self) -> Any:
        """The run of Weights & Biases, once it has begun."""
        return getattr(sys.modules.get("wandb"), "run", None) if self.arguments.use_wandb else None

    def hold(self, state: Any) -> None:
        """Take a state for the trainer's own, and tell its shapes and places."""
        self.model_state = state
        self.state_shape = jax.eval_shape(lambda: state)
        self.state_shardings = make_sharding(self.state_shape, self.mesh, self._rules)
        self.state_named_sharding = self.state_shardings
        self.state_partition_spec = jax.tree.map(lambda place: place.spec, self.state_shardings)

    def _shardings_of(self, state: Any) -> Any:
        """Plan where a state goes; on one device it stays as it is."""
        return make_sharding(state, self.mesh, self._rules) if self._large_mesh else None

    @property
    def _rules(self) -> Any:
        return sharding_rules(self.arguments) if self.rules is None else self.rules

    @property
    def _large_mesh(self) -> Any:
        return self.mesh if self.mesh.size > 1 else None
