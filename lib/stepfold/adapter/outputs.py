"""What a trainer's methods give back: four records, each a pytree and plain data besides."""

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, Self

import jax

from stepfold import tree
from stepfold.adapter.arguments.names import refuse_unknown
from stepfold.adapter.plain import from_text, to_text
from stepfold.errors import ConfigError


class Output:
    """What the four have in common: they are pytrees, dicts and JSON.

    A field that holds arrays is a branch of the tree; all else, a function or a mesh, belongs to
    its structure. So `jax.tree.map` and `jax.jit` see the arrays alone.
    """

    def __init_subclass__(cls) -> None:
        jax.tree_util.register_pytree_with_keys(cls, cls._flatten, cls._unflatten)

    def _flatten(self) -> tuple[list[tuple[Any, Any]], Any]:
        held = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        inner = {name: value for name, value in held.items() if _holds_arrays(value)}
        rest = tuple((name, value) for name, value in held.items() if name not in inner)
        keys = [(jax.tree_util.GetAttrKey(name), value) for name, value in inner.items()]
        return keys, (tuple(inner), rest)

    @classmethod
    def _unflatten(cls, structure: Any, values: Iterable[Any]) -> Self:
        names, rest = structure
        return cls(**dict(zip(names, values, strict=True)), **dict(rest))

    def to_dict(self) -> dict[str, Any]:
        """Give the fields by name, as they are."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Make it of fields by name.

        Raises:
          ConfigError: if there is no such field; it says which one is nearest.
        """
        refuse_unknown(cls.__name__, data, [field.name for field in fields(cls)])  # type: ignore[arg-type]
        return cls(**data)

    def to_json(self, **options: Any) -> str:
        """Write it as JSON: arrays bit for bit, and what JSON cannot hold by its name.

        Args:
          **options: what `json.dumps` takes.
        """
        return to_text(self.to_dict(), **options)

    @classmethod
    def from_json(cls, json_str: str) -> Self:
        """Read what `to_json` wrote.

        A function or an iterator was written by its name only. In its place comes a `LeftOut`,
        which says so when it is used; `replace` puts another there.

        Raises:
          ConfigError: if it is nothing that `to_json` wrote.
        """
        return cls.from_dict(from_text(json_str))

    def replace(self, **changes: Any) -> Self:
        """Make another one with other values of some fields.

        Raises:
          ConfigError: if there is no such field.
        """
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        refuse_unknown(type(self).__name__, changes, names)
        return replace(self, **changes)  # type: ignore[type-var]


def _holds_arrays(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(map(tree.is_array, leaves))


@dataclass(frozen=True, eq=False)
class TrainerConfigureModelOutput(Output):
    """What `configure_model` gives.

    Attributes:
      model: the model, whatever it is.
      tx: the optimizer; None takes the one that is built from the arguments.
      scheduler: the learning rate as a function of the step.
      config: the model's own configuration, if it has one.
      state: the state to begin with; None has it made of the model.

    >>> import jax.numpy as jnp, optax
    >>> made = TrainerConfigureModelOutput({"w": jnp.ones(2)}, optax.sgd(0.1))
    >>> made.replace(config={"size": 2}).config, [leaf.shape for leaf in jax.tree.leaves(made)]
    ({'size': 2}, [(2,)])
    """

    model: Any
    tx: Any = None
    scheduler: Callable[..., Any] | None = None
    config: Any = None
    _: KW_ONLY
    state: Any = None


@dataclass(frozen=True, eq=False)
class TrainerConfigureDataloaderOutput(Output):
    """What `configure_dataloaders` gives.

    Attributes:
      dataloader_train: the batches to train on.
      max_training_steps: how many steps there are to be; None takes what the arguments say.
      dataloader_eval: the batches to evaluate on, that can be gone through again, or a function
        that makes them anew.
      max_evaluation_steps: how many of them at most.

    >>> TrainerConfigureDataloaderOutput(dataloader_train=[1, 2], max_training_steps=2).to_dict()
    {'dataloader_train': [1, 2], 'max_training_steps': 2, 'dataloader_eval': None, ...}
    """

    dataloader_train: Any
    max_training_steps: int | None = None
    dataloader_eval: Any = None
    max_evaluation_steps: int | None = None


@dataclass(frozen=True, eq=False, init=False)
class TrainerConfigureFunctionOutput(Output):
    """What `configure_functions` gives; the short names `train_step_fn`, `eval_step_fn` do as well.

    Attributes:
      sharded_training_step_function: `(state, batch) -> (state, metrics)`.
      mesh: the devices; None takes the mesh of the arguments.
      checkpoint_manager: where checkpoints go; None takes what the arguments say.
      sharded_evaluation_step_function: `(state, batch) -> metrics`, if there is one.

    >>> made = TrainerConfigureFunctionOutput(train_step_fn=max, eval_step_fn=min)
    >>> made.sharded_training_step_function is made.train_step_fn is max
    True
    """

    sharded_training_step_function: Any
    mesh: Any
    checkpoint_manager: Any
    sharded_evaluation_step_function: Any

    def __init__(
        self,
        sharded_training_step_function: Any = None,
        mesh: Any = None,
        checkpoint_manager: Any = None,
        sharded_evaluation_step_function: Any = None,
        *,
        train_step_fn: Any = None,
        eval_step_fn: Any = None,
    ) -> None:
        train = _one_of("train_step_fn", sharded_training_step_function, train_step_fn)
        evaluate = _one_of("eval_step_fn", sharded_evaluation_step_function, eval_step_fn)
        if train is None:
            raise ConfigError(
                "TrainerConfigureFunctionOutput: expected a step (state, batch) -> (state, "
                "metrics) as sharded_training_step_function, or train_step_fn, got None"
            )
        for name, value in (
            ("sharded_training_step_function", train),
            ("mesh", mesh),
            ("checkpoint_manager", checkpoint_manager),
            ("sharded_evaluation_step_function", evaluate),
        ):
            object.__setattr__(self, name, value)

    @property
    def train_step_fn(self) -> Any:
        """The training step, by its short name."""
        return self.sharded_training_step_function

    @property
    def eval_step_fn(self) -> Any:
        """The evaluation step, by its short name."""
        return self.sharded_evaluation_step_function


def _one_of(short: str, long_value: Any, short_value: Any) -> Any:
    if long_value is not None and short_value is not None and long_value is not short_value:
        raise ConfigError(f"{short}: it is the same field by its short name; give it once, not two")
    return short_value if long_value is None else long_value


@dataclass(frozen=True, eq=False)
class TrainerOutput(Output):
    """What `train` gives.

    Attributes:
      state: the state after the last step.
      mesh: the devices that it is on.
      last_save_file_name: the name of the last checkpoint, if one was saved.
      checkpoint_path: where it is.
      stopped: why the run ended, in words.

    >>> import jax.numpy as jnp
    >>> made = TrainerOutput({"w": jnp.arange(3.0)}, None, stopped="all 9 steps were done")
    >>> again = TrainerOutput.from_json(made.to_json())
    >>> again.state["w"].tolist(), again.stopped
    ([0.0, 1.0, 2.0], 'all 9 steps were done')
    """

    state: Any
    mesh: Any = None
    last_save_file_name: str | None = None
    checkpoint_path: str | None = None
    _: KW_ONLY
    stopped: str | None = None
