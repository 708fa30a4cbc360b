"""Outputs of the trainer's methods: frozen dataclasses that are pytrees and convert to JSON."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from numbers import Integral
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from stepfold import tree
from stepfold.checkpoint.restore import restore
from stepfold.core.validation import refuse_unknown
from stepfold.errors import ConfigError, refuse


@dataclass(frozen=True, eq=False)
class Output:
    """Base class of the four outputs.

    A field whose leaves are all arrays is a child of the pytree; any other field, such as a
    function or a mesh, is part of its structure.

    EasyDeL's guide "Trainer Protocol" and the reference of its API list the fields in different
    orders. Positional arguments may be in either order, if the type of the second value tells
    which. Unpacking and indexing follow the order of the guide.
    """

    _guide: ClassVar[tuple[str, ...]] = ()  # the fields in the guide

    def __init_subclass__(cls) -> None:
        jax.tree_util.register_pytree_with_keys(cls, cls._flatten, cls._unflatten)

    def __iter__(self) -> Iterator[Any]:
        return iter([getattr(self, name) for name in self._guide])

    def __getitem__(self, index: int) -> Any:
        return [*self][index]

    def _flatten(self) -> tuple[list[tuple[Any, Any]], Any]:
        leaves = {name: _leaves(value) for name, value in self.to_dict().items()}
        names = [name for name in leaves if leaves[name] and all(map(tree.is_array, leaves[name]))]
        children = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names]
        rest = tuple((name, getattr(self, name)) for name in leaves if name not in names)
        return children, (tuple(names), rest)

    @classmethod
    def _unflatten(cls, structure: Any, children: Iterable[Any]) -> Self:
        names, rest = structure
        return cls(**dict(zip(names, children, strict=True)), **dict(rest))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, unchanged."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Create an output from fields by name."""
        refuse_unknown(cls.__name__, data, [field.name for field in fields(cls)])
        return cls(**data)

    def to_json(self, **options: Any) -> str:
        """Return the fields as JSON, functions, iterators and optimizers by name only.

        The options are those of `json.dumps`. Fields with arrays are a ConfigError.
        """
        data = {name: _encode(name, value) for name, value in self.to_dict().items()}
        return json.dumps(data, **options)

    @classmethod
    def from_json(cls, json_str: str) -> Self:
        """Read the text of `to_json`, with an `Unserializable` for each value stored by name."""
        try:
            data = dict(_decode(json.loads(json_str)))
        except (ValueError, TypeError, RecursionError) as error:
            got = f"{json_str!r:.60}"
            refuse("from_json", "the text of to_json", got, "give it unchanged", cause=error)
        return cls.from_dict(data)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        return self.from_dict(self.to_dict() | changes)


def _leaves(value: Any) -> list[Any]:
    # jax deprecates iterators as leaves, unless `is_leaf` accepts them.
    return jax.tree.leaves(value, is_leaf=lambda node: isinstance(node, Iterator))


@dataclass(frozen=True, eq=False)
class TrainerConfigureModelOutput(Output):
    """Output of `configure_model`.

    Attributes:
      model: the model, any object.
      tx: the optimizer; None builds it from the arguments.
      scheduler: the learning rate as a function of the step.
      config: the configuration of the model.
      state: the initial state; None initializes it from the model.

    >>> import jax.numpy as jnp, optax
    >>> output = TrainerConfigureModelOutput({"w": jnp.ones(2)}, optax.sgd(0.1))
    >>> output.replace(config={"size": 2}).config, [leaf.shape for leaf in jax.tree.leaves(output)]
    ({'size': 2}, [(2,)])
    """

    model: Any
    tx: Any = None
    scheduler: Callable[..., Any] | None = None
    config: Any = None
    _: KW_ONLY
    state: Any = None

    _guide: ClassVar[tuple[str, ...]] = ("model", "state")

    def __post_init__(self) -> None:
        is_optimizer = hasattr(self.tx, "init") and hasattr(self.tx, "update")
        is_known = is_optimizer or self.tx is None or isinstance(self.tx, Unserializable)
        if self.state is None and not is_known:
            _move(self, "tx", "state")


@dataclass(frozen=True, eq=False)
class TrainerConfigureDataloaderOutput(Output):
    """Output of `configure_dataloaders`.

    Attributes:
      dataloader_train: the batches to train on.
      max_training_steps: the number of steps; None takes it from the arguments.
      dataloader_eval: the batches to evaluate on: an iterable that starts again each time, or a
        function that returns an iterable.
      max_evaluation_steps: the maximum number of batches of an evaluation.

    >>> TrainerConfigureDataloaderOutput(dataloader_train=[1, 2], max_training_steps=2).to_dict()
    {'dataloader_train': [1, 2], 'max_training_steps': 2, 'dataloader_eval': None, ...}
    """

    dataloader_train: Any
    max_training_steps: Any = None
    dataloader_eval: Any = None
    max_evaluation_steps: int | None = None

    _guide: ClassVar[tuple[str, ...]] = ("dataloader_train", "dataloader_eval")

    def __post_init__(self) -> None:
        steps = self.max_training_steps
        is_count = steps is None or isinstance(steps, Integral | Unserializable)
        if self.dataloader_eval is None and not is_count:
            _move(self, "max_training_steps", "dataloader_eval")


@dataclass(frozen=True, eq=False, init=False)
class TrainerConfigureFunctionOutput(Output):
    """Output of `configure_functions`; `train_step_fn` and `eval_step_fn` are short names.

    Attributes:
      sharded_training_step_function: `(state, batch) -> (state, metrics)`.
      mesh: the devices; None takes the mesh of the arguments.
      checkpoint_manager: the checkpoints; None builds them from the arguments.
      sharded_evaluation_step_function: `(state, batch) -> metrics`, or None.

    >>> output = TrainerConfigureFunctionOutput(train_step_fn=max, eval_step_fn=min)
    >>> output.sharded_training_step_function is output.train_step_fn is max
    True
    """

    sharded_training_step_function: Any
    mesh: Any
    checkpoint_manager: Any
    sharded_evaluation_step_function: Any

    _guide: ClassVar[tuple[str, ...]] = ("train_step_fn", "eval_step_fn")

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
        is_step = callable(mesh) and not isinstance(mesh, Mesh | Unserializable)
        if is_step and sharded_evaluation_step_function is None:
            mesh, sharded_evaluation_step_function = None, mesh
        train = _either("train_step_fn", train_step_fn, sharded_training_step_function)
        evaluate = _either("eval_step_fn", eval_step_fn, sharded_evaluation_step_function)
        if train is None:
            expected = "a step (state, batch) -> (state, metrics)"
            name = "sharded_training_step_function"
            refuse(name, expected, "None", "give it, or train_step_fn")
        vars(self).update(  # since the class is frozen
            sharded_training_step_function=train,
            mesh=mesh,
            checkpoint_manager=checkpoint_manager,
            sharded_evaluation_step_function=evaluate,
        )

    train_step_fn = property(attrgetter("sharded_training_step_function"))
    eval_step_fn = property(attrgetter("sharded_evaluation_step_function"))


def _move(output: Output, old: str, new: str) -> None:
    """Move a value that was given by position to the field that its type is for."""
    vars(output).update({new: getattr(output, old), old: None})  # since the class is frozen


def _either(short_name: str, short_value: Any, value: Any) -> Any:
    if short_value is not None and value is not None and short_value is not value:
        expected = f"the same step as by its long name, {tree.describe_value(value)}"
        refuse(short_name, expected, tree.describe_value(short_value), "give one of them")
    return short_value if value is None else value


@dataclass(frozen=True, eq=False)
class TrainerOutput(Output):
    """Output of `train`. In its JSON, `checkpoint_path` stands for the state.

    Attributes:
      state: the state after the last step.
      mesh: the devices of the state.
      last_save_file_name: the name of the last checkpoint.
      checkpoint_path: the folder of the last checkpoint, `<directory>/<step>`.
      stopped: why the run ended.
      step, params, opt_state: those of the state.

    >>> import jax.numpy as jnp, stepfold as sf, tempfile
    >>> folder, state = tempfile.mkdtemp(), {"w": jnp.arange(3.0)}
    >>> sf.save(folder, state, step=9)
    >>> text = TrainerOutput(state, checkpoint_path=f"{folder}/9").to_json()
    >>> TrainerOutput.from_json(text, like=state).state["w"].tolist()
    [0.0, 1.0, 2.0]
    """

    state: Any
    mesh: Any = None
    last_save_file_name: str | None = None
    checkpoint_path: str | None = None
    _: KW_ONLY
    stopped: str | None = None

    _guide: ClassVar[tuple[str, ...]] = ("state",)

    # Of the state, for code that expects `train` to return it.
    step = property(attrgetter("state.step"))
    params = property(attrgetter("state.params"))
    opt_state = property(attrgetter("state.opt_state"))

    def to_json(self, **options: Any) -> str:
        """Return the fields as JSON, with the checkpoint's path in place of the state.

        If the state holds arrays, `checkpoint_path` has to be a checkpoint of its step.
        """
        has_arrays = any(map(tree.is_array, _leaves(self.state)))
        if self.checkpoint_path is None and not has_arrays:
            return super().to_json(**options)
        directory, step = self._directory_and_step()
        saved = getattr(self.state, "step", step)
        if tree.is_data(saved) and int(saved) != step:
            expected = f"the checkpoint of the state, of step {int(saved)}"
            advice = "save the state with save_pretrained or sf.save"
            refuse("checkpoint_path", expected, repr(self.checkpoint_path), advice)
        advice = (
            f"it is in the checkpoint {self.checkpoint_path}; load it with TrainerOutput."
            f"from_json(text, like), or sf.restore({directory!r}, like, step={step})"
        )
        output = self.replace(state=Unserializable("state", advice))
        return super(TrainerOutput, output).to_json(**options)

    @classmethod
    def from_json(cls, json_str: str, like: Any = None) -> Self:
        """Read the text of `to_json`, and restore the state as `sf.restore` does with `like`.

        Without `like`, the state is an `Unserializable`.
        """
        output = super().from_json(json_str)
        if like is None:
            return output
        directory, step = output._directory_and_step()
        return output.replace(state=restore(directory, like, step=step).state)

    def _directory_and_step(self) -> tuple[str, int]:
        directory, step = os.path.split(self.checkpoint_path or "")  # a path or a URL
        if not step.isdecimal():
            expected = "'<directory>/<step>', since JSON does not hold the arrays of the state"
            how = "save_pretrained or sf.save, and give replace(checkpoint_path=…)"
            got = repr(self.checkpoint_path)
            refuse("checkpoint_path", expected, got, f"save the state with {how}")
        return directory or ".", int(step)


@dataclass(frozen=True)
class Unserializable:
    """Placeholder for a value that JSON does not hold; any use of it raises a ConfigError."""

    description: str
    advice: str = field(
        default="JSON stores only its name; create it again, and give it with replace(…)",
        repr=False,
    )

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(f"{self.description}: {self.advice}")

    __iter__ = __next__ = __getitem__ = __call__

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python's own protocols, such as copy and pickle
            raise AttributeError(name)
        raise _UnserializableAttributeError(f"{self.description}: {self.advice}")


class _UnserializableAttributeError(ConfigError, AttributeError):
    """Also an AttributeError, so that `hasattr` returns False."""


def _encode(name: str, value: Any) -> Any:
    """Encode a field's value for JSON; the key "stepfold" marks types that JSON lacks."""
    match value:
        case None | bool() | int() | str():
            return value
        case np.integer():
            return int(value)
        case float() | np.floating():
            number = float(value)
            return number if math.isfinite(number) else {"stepfold": "float", "value": repr(number)}
        case Path():
            return str(value)
        case list():
            return [_encode(name, item) for item in value]
        case tuple() if type(value) is tuple:
            return {"stepfold": "tuple", "items": _encode(name, list(value))}
        case Mapping() if "stepfold" not in value and all(isinstance(key, str) for key in value):
            return {key: _encode(name, item) for key, item in value.items()}
        case Mapping():
            return {"stepfold": "dict", "items": _encode(name, [[*item] for item in value.items()])}
        case Mesh(devices=devices, axis_names=axis_names):
            ids = [device.id for device in devices.flat]
            names, shape = list(axis_names), list(devices.shape)
            return {"stepfold": "mesh", "names": names, "shape": shape, "ids": ids}
        case Unserializable():
            return {"stepfold": "unserializable", **vars(value)}
    for array in filter(tree.is_array, _leaves(value)):
        expected = "a value without arrays, which JSON does not hold"
        advice = f"save arrays with sf.save, and give replace({name}=None)"
        refuse(name, expected, tree.describe_value(array), advice)
    description = f"{type(value).__name__} {getattr(value, '__qualname__', '')}".strip()
    return _encode(name, Unserializable(description))


def _decode(value: Any) -> Any:
    match value:
        case list():
            return [_decode(item) for item in value]
        case {"stepfold": "float", "value": number}:
            return float(number)
        case {"stepfold": "tuple", "items": items}:
            return tuple(_decode(items))
        case {"stepfold": "dict", "items": items}:
            return dict(_decode(items))
        case {"stepfold": "mesh", "names": names, "shape": shape, "ids": ids}:
            devices = {device.id: device for device in jax.devices()}
            if not devices.keys() >= set(ids):
                return Unserializable(f"mesh of {len(ids)} devices, of which {len(devices)} exist")
            grid = np.array([devices[index] for index in ids]).reshape(shape)
            return Mesh(grid, tuple(names), axis_types=(AxisType.Auto,) * grid.ndim)
        case {"stepfold": "unserializable", "description": description, "advice": advice}:
            return Unserializable(description, advice)
        case {"stepfold": kind}:
            refuse("stepfold", "a known kind", repr(kind), kind=ValueError)
        case dict():
            return {key: _decode(item) for key, item in value.items()}
    return value
