"""Examples from the documentation of trainers run with their placeholders filled in."""

import abc
import collections
import dataclasses
import inspect
import itertools
import json
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.adapter.digits import TEST, TRAIN, arguments, bits, init, loss_fn, plain_loss, trainer
from tests.clients.rows import shows
from tests.small import full_but

import stepfold as sf
from stepfold.adapter import (
    BaseTrainerProtocol,
    StopTraining,
    Trainer,
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
    TrainerOutput,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")


class MyCustomTrainer(BaseTrainerProtocol):
    """The skeleton of EasyDeL's "Trainer Protocol Documentation"."""

    def __init__(self, arguments, dataset_train, dataset_eval=None, **kwargs):
        self.arguments = arguments
        self.dataset_train = dataset_train
        self.dataset_eval = dataset_eval
        self.dtype = getattr(jnp, arguments.dtype) if arguments.dtype else jnp.float32
        self.param_dtype = (
            getattr(jnp, arguments.param_dtype) if arguments.param_dtype else jnp.float32
        )
        self.model = None
        self._model_state = None
        self.optimizer = None
        self.scheduler = None
        model_output = self.configure_model()
        self.model = model_output.model
        self._model_state = model_output.state
        dataloader_output = self.configure_dataloaders()
        self.dataloader_train = dataloader_output.dataloader_train
        self.dataloader_eval = dataloader_output.dataloader_eval
        function_output = self.configure_functions()
        self.train_step_fn = function_output.train_step_fn
        self.eval_step_fn = function_output.eval_step_fn

    def configure_model(self):
        self.optimizer = optax.adam(self.arguments.learning_rate)
        state = sf.init_state(init, self.optimizer, jax.random.key(0))
        return TrainerConfigureModelOutput(model=init, state=state)

    def configure_dataloaders(self):
        train_loader = sf.batches(self.dataset_train, 20, seed=0, epochs=3, remainder="pad")
        eval_loader = list(sf.batches(self.dataset_eval, 20, epochs=1, remainder="pad"))
        return TrainerConfigureDataloaderOutput(
            dataloader_train=train_loader, dataloader_eval=eval_loader
        )

    def configure_functions(self):
        train_fn = jax.jit(sf.make_train_step(loss_fn, self.optimizer))
        eval_fn = jax.jit(sf.make_eval_step(loss_fn))
        return TrainerConfigureFunctionOutput(train_step_fn=train_fn, eval_step_fn=eval_fn)

    def train(self, model_parameters=None, state=None):
        current_state = state or self._model_state
        for batch in self.dataloader_train:
            current_state, _ = self.train_step_fn(current_state, batch)
        self._model_state = current_state
        return self._model_state

    def evaluate(self, state, metric_calculator=None):
        return sf.evaluate(self.eval_step_fn, state, self.dataloader_eval)

    def save_pretrained(self, ckpt_path, state=None):
        sf.save(ckpt_path, state or self._model_state)


@shows(
    "Trainer Protocol", "Required methods: configuration", {"the same three by keyword": "the same"}
)
@shows(
    "Trainer Protocol",
    "Implementation skeleton example",
    {"its methods filled in": "it trains, evaluates, saves and restores"},
)
def test_protocol_skeleton_runs(tmp_path):
    made = MyCustomTrainer(arguments(), TRAIN, TEST)
    before = made.evaluate(made._model_state)["loss"]
    state = made.train()
    assert int(state.step) == 30
    assert made.evaluate(state)["loss"] < before
    made.save_pretrained(str(tmp_path))
    assert sf.checkpoint.latest_step(tmp_path) == 30


class CustomTrainer(Trainer):
    """The example of EasyDeL's "BaseTrainer Documentation"; what is filled in is marked so."""

    def create_collect_function(self, *args, **kwargs):
        def collect_fn(batch):
            return batch

        return collect_fn

    def configure_functions(self, *args, **kwargs):
        def train_step(state, batch):
            loss, grads = jax.value_and_grad(plain_loss)(state.params, batch, None)  # filled in
            metrics = {"loss": loss}
            updates, opt_state = self.tx.update(grads, state.opt_state, state.params)  # filled in
            params = optax.apply_updates(state.params, updates)  # filled in
            new_state = state._replace(step=state.step + 1, params=params, opt_state=opt_state)
            return new_state, metrics

        def eval_step(state, batch):
            loss = plain_loss(state.params, batch, None)  # filled in
            return {"eval_loss": loss}

        return TrainerConfigureFunctionOutput(
            train_step_fn=jax.jit(train_step), eval_step_fn=jax.jit(eval_step)
        )

    def on_step_end(self, state, metrics, *args, **kwargs):
        if hasattr(self, "scheduler") and self.scheduler is not None:
            current_lr = self.scheduler(state.step)
            print(f"Step completed. Current LR: {current_lr}")
        super().on_step_end(state, metrics, *args, **kwargs)


@shows("BaseTrainer", "Core concepts", {"`BaseTrainer`": "`Trainer`"})
@shows("BaseTrainer", "Configuration example", {"`trainer.train()`": "the same"})
@shows(
    "BaseTrainer",
    "Customization",
    {
        "override `configure_functions`": "the same",
        "`self.scheduler(state.step)` in a hook": "the same",
        "`super().on_step_end(…)` without `return`": "changes nothing",
    },
)
def test_customization_runs(capsys):
    made = trainer(CustomTrainer, scheduler="linear", eval_batch_size=32, given={"loss_fn": None})
    before = made.evaluate()["eval_loss"]
    output = made.train()
    assert int(output.state.step) == 20
    assert made.evaluate()["eval_loss"] < before
    assert capsys.readouterr().out.count("Step completed. Current LR: ") == 20


@shows(
    "BaseTrainer",
    "Customization",
    {"`CustomTrainer` as printed": "with `Trainer` in place of `BaseTrainer`"},
)
def test_customization_runs_with_its_placeholders():
    class Placeholders(CustomTrainer):
        def configure_functions(self, *args, **kwargs):
            def train_step(state, batch):
                loss = jnp.mean(batch.get("labels", 0.0))
                return state, {"loss": loss}

            def eval_step(state, batch):
                return {"eval_loss": jnp.mean(batch.get("labels", 0.0))}

            return TrainerConfigureFunctionOutput(
                train_step_fn=jax.jit(train_step), eval_step_fn=jax.jit(eval_step)
            )

    made = trainer(Placeholders, max_steps=3, given={"loss_fn": None})
    assert made.train().stopped == "all 3 steps were done"
    assert made.evaluate() == {"eval_loss": 0.0}


# The abstract members of EasyDeL's own class, by the documentation of its API
ABSTRACT = {
    "apply_training_hooks": "(metrics)",
    "calculate_number_total_flops": "(params, is_training=True)",
    "compile_aot": "()",
    "configure_dataloaders": "()",
    "configure_functions": "()",
    "configure_model": "()",
    "count_model_parameters": "(prm)",
    "create_collect_function": "(max_sequence_length, truncation_mode)",
    "create_grain_collect_function": "(max_sequence_length, truncation_mode)",
    "create_progress_bar": "(total, desc='', disabled=False)",
    "create_tfds_collect_function": "(max_sequence_length, truncation_mode)",
    "eval": "(model_state)",
    "finish": "()",
    "initialize_trainer_utils": "()",
    "log_metrics": "(metrics, pbar, step, mode='train')",
    "log_weight_distribution": "(state, step)",
    "on_step_end": "(state, metrics, step)",
    "on_step_start": "(state, step)",
    "save_information": "(output_path)",
    "save_pretrained": "(state, save_directory=None, gather_fns=None, to_torch=False, "
    "easystate_to_huggingface_model_kwargs=None, torch_save_pretrained_kwargs=None)",
    "specs_to_name_sharding": "(tree, mesh=None)",
    "start_evaluation_hook": "()",
    "start_training_hook": "()",
    "train": "()",
}
PROPERTIES = ("evaluation_batch_size", "is_enable", "is_process_zero", "mesh", "model")


@pytest.mark.parametrize("name", ABSTRACT)
def test_abstract_methods_bind_the_documented_calls(name):
    documented = eval(f"lambda {ABSTRACT[name][1:-1]}: None")
    parameters = inspect.signature(documented).parameters
    ours = inspect.signature(getattr(Trainer, name))
    given = () if name == "count_model_parameters" else (None,)
    ours.bind(*given, *parameters)
    ours.bind(*given, **dict.fromkeys(parameters))
    required = [p.name for p in parameters.values() if p.default is p.empty]
    ours.bind(*given, **dict.fromkeys(required))


def test_mixes_with_an_abstract_class_of_the_same_members():
    members = {name: abc.abstractmethod(lambda self: None) for name in ABSTRACT}
    members |= {
        name: property(abc.abstractmethod(lambda self: None))
        for name in (*PROPERTIES, "training_batch_size")
    }
    abstract = abc.ABCMeta("BaseTrainerProtocol", (), members)
    with pytest.raises(TypeError, match="abstract"):
        abstract()
    mixed = type("Mixed", (Trainer, abstract), {})
    made = trainer(mixed, max_steps=2)
    assert isinstance(made, abstract)
    assert int(made.train().state.step) == 2


ATTRIBUTES = (
    *("arguments", "checkpoint_manager", "checkpoint_path", "config", "data_collator"),
    *("dataloader_eval", "dataloader_train", "dataset_eval", "dataset_train", "dtype"),
    *("evalu_tracker", "finetune", "max_evaluation_steps", "max_training_steps", "memory_monitor"),
    *("model_state", "param_dtype", "pruning_module", "scheduler", "state", "state_named_sharding"),
    *("sharded_evaluation_step_function", "sharded_training_step_function", "state_partition_spec"),
    *("state_shape", "state_shardings", "timer", "train_tracker", "training_batch_size", "tx"),
    "wandb_runtime",
)
# Those that EasyDeL's "Trainer Protocol Documentation" requires.
METHODS = (
    *("train", "evaluate", "save_pretrained"),
    *("configure_functions", "configure_model", "configure_dataloaders"),
)
PROPERTIES_OF_GUIDE = (
    *("arguments", "dataset_train", "dataset_eval", "model", "_model_state", "dtype"),
    *("param_dtype", "scheduler", "optimizer"),
)


@shows(
    "Trainer Protocol",
    "Introduction",
    {
        "a protocol as the contract of trainers": "`BaseTrainerProtocol`; `isinstance` accepts "
        "any object with all members of this guide, or all of the reference"
    },
)
@shows(
    "Trainer Protocol",
    "Required properties",
    {
        "all nine belong to the protocol": "an object without one of them is no "
        "`BaseTrainerProtocol`"
    },
)
@shows(
    "API reference",
    "Methods and properties",
    {"an object with these members and no others": "is a `BaseTrainerProtocol`"},
)
@pytest.mark.parametrize(
    "members",
    [(*ABSTRACT, *PROPERTIES, *ATTRIBUTES), (*METHODS, *PROPERTIES_OF_GUIDE)],
    ids=["reference", "guide"],
)
def test_an_object_with_exactly_the_members_of_a_document_is_a_trainer(members):
    made = types.SimpleNamespace(**dict.fromkeys(members, print))
    assert isinstance(made, BaseTrainerProtocol)
    for name in members:
        others = dict.fromkeys({*members} - {name}, print)
        assert not isinstance(types.SimpleNamespace(**others), BaseTrainerProtocol)


@shows(
    "Trainer Protocol",
    "Introduction",
    {
        "a blueprint of required members": "a subclass that lacks methods cannot be constructed; "
        "the error lists them"
    },
)
@shows(
    "API reference",
    "Methods and properties",
    {"abstract methods must be implemented": "those of this reference, or those of the guide"},
)
@pytest.mark.parametrize("names", [tuple(ABSTRACT), METHODS], ids=["reference", "guide"])
def test_a_subclass_without_a_method_cannot_be_constructed(names):
    methods = {name: lambda self, *args: None for name in names}
    methods |= dict.fromkeys({*PROPERTIES, "training_batch_size"} if "eval" in names else (), 1)
    made = type("Mine", (BaseTrainerProtocol,), methods)()
    assert isinstance(made, BaseTrainerProtocol)
    for name in ("train", "configure_model"):
        rest = {other: method for other, method in methods.items() if other != name}
        with pytest.raises(sf.errors.ConfigError, match=f"Mine lacks methods of a trainer: {name}"):
            type("Mine", (BaseTrainerProtocol,), rest)()


def test_a_method_that_only_the_protocol_has_says_so():
    mine = type("Mine", (BaseTrainerProtocol,), {name: lambda self: None for name in METHODS})()
    with pytest.raises(
        NotImplementedError, match="Mine.on_step_start is not implemented; define it"
    ):
        mine.on_step_start(None, 1)


def test_a_trainer_is_one_by_name_and_by_members():
    made = trainer(max_steps=1)
    assert isinstance(made, BaseTrainerProtocol)
    assert isinstance(
        trainer(type("Both", (Trainer, BaseTrainerProtocol), {}), max_steps=1), Trainer
    )


@pytest.mark.full
def test_models_of_other_libraries_train():
    import equinox as eqx
    from flax import linen, nnx

    x = TRAIN["image"][:20]
    nll = lambda logits, batch: sf.mean(
        optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]), batch["mask"]
    )
    dense = linen.Dense(10)
    of_linen = (
        dense,
        dense.init(jax.random.key(0), x),
        lambda p, b, k: nll(dense.apply(p, b["image"]), b),
    )

    linear = eqx.nn.Linear(64, 10, key=jax.random.key(0))
    params, static = eqx.partition(linear, eqx.is_array)
    of_equinox = (
        linear,
        params,
        lambda p, b, k: nll(jax.vmap(eqx.combine(p, static))(b["image"]), b),
    )

    module = nnx.Linear(64, 10, rngs=nnx.Rngs(0))
    graph, variables = nnx.split(module)
    of_nnx = (
        module,
        variables,
        lambda p, b, k: nll(nnx.merge(graph, p, copy=True)(b["image"]), b),
    )
    for model, start, loss in (of_linen, of_equinox, of_nnx):
        given = {"model": model, "model_state": start, "loss_fn": loss}
        made = trainer(given=given, max_steps=10)
        made.train()
        assert made.model is model
        assert made.history["train/loss"][-1] < made.history["train/loss"][0]
    with pytest.raises(
        sf.errors.ConfigError, match="model: Dense makes its parameters of an example"
    ):
        trainer(given={"model": dense})


@shows(
    "BaseTrainer",
    "Customization",
    {
        "a `TrainState` of flax as `model_state`": "with your own steps; the step made of "
        "`loss_fn` takes its `params`"
    },
)
def test_state_of_another_library_runs_with_its_own_steps():
    from flax.training.train_state import TrainState

    class Flax(Trainer):
        def configure_functions(self):
            def train_step(state, batch):
                loss, grads = jax.value_and_grad(plain_loss)(state.params, batch, None)
                return state.apply_gradients(grads=grads), {"loss": loss}

            return TrainerConfigureFunctionOutput(train_step_fn=train_step)

    start = TrainState.create(
        apply_fn=None, params=init(jax.random.key(0)), tx=optax.adam(np.float32(1e-2))
    )
    made = trainer(Flax, given={"model_state": start, "dataset_eval": None})
    output = made.train()
    assert int(output.state.step) == 20
    assert made.history["train/loss"][-1] < made.history["train/loss"][0]
    assert not start.params["kernel"].is_deleted()
    assert int(trainer(given={"model_state": start.params}, max_steps=1).train().step) == 1
    with pytest.raises(
        sf.errors.ConfigError,
        match="model_state: expected a TrainState .*, got flax.*; give its params, or override con",
    ):
        trainer(given={"model_state": start})


# What EasyDeL's "Trainer Protocol Documentation" does with a trainer of the library


class Skeleton(Trainer):
    """The same skeleton on `Trainer`: its `__init__` is that of the text, without `super()`."""

    __init__ = MyCustomTrainer.__init__
    configure_model = MyCustomTrainer.configure_model
    configure_dataloaders = MyCustomTrainer.configure_dataloaders
    configure_functions = MyCustomTrainer.configure_functions
    train = MyCustomTrainer.train
    evaluate = MyCustomTrainer.evaluate
    save_pretrained = MyCustomTrainer.save_pretrained


@shows(
    "Trainer Protocol",
    "Implementation skeleton example",
    {
        "its `__init__`, on `Trainer`": "runs without `super().__init__()`; `train`, `evaluate` "
        "and `save_pretrained` of `Trainer` then make the other parts",
        "its `train`, `evaluate` and `save_pretrained`, on `Trainer`": "the same",
    },
)
def test_the_skeleton_runs_on_the_trainer(tmp_path):
    made, plain = (kind(arguments(), TRAIN, TEST) for kind in (Skeleton, MyCustomTrainer))
    assert isinstance(made, BaseTrainerProtocol)
    state = made.train()
    assert bits(state) == bits(plain.train())
    assert made.state is state is made._model_state
    assert made.evaluate(state) == plain.evaluate(state)
    made.save_pretrained(str(tmp_path))
    assert sf.checkpoint.latest_step(tmp_path) == 30
    assert made.is_process_zero
    assert made.optimizer is made.tx
    with pytest.raises(AttributeError, match="has no attribute 'sizes'") as caught:
        made.log_metrics({"loss": 1.0}, None, 1)
    assert "call super().__init__(arguments, …)" in caught.value.__notes__[0]


class Inheriting(Skeleton):
    """The skeleton with the `__init__` of the text, and the methods of `Trainer` for the rest."""

    train, evaluate = Trainer.train, Trainer.evaluate
    save_pretrained = Trainer.save_pretrained


def test_the_methods_of_the_trainer_complete_a_skeleton_that_never_called_its_init(tmp_path):
    made, plain = (kind(arguments(), TRAIN, TEST) for kind in (Inheriting, Skeleton))
    output, state = made.train(), plain.state
    for batch in itertools.islice(plain.dataloader_train, 20):
        state, _ = plain.train_step_fn(state, batch)
    assert bits(output.state) == bits(made.state) == bits(state)
    loss = plain.evaluate(state)["loss"]
    assert made.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-6)
    assert made.history["train/loss"][-1] < made.history["train/loss"][0]
    other = Inheriting(arguments(), TRAIN, TEST)
    other.state = state  # in place of that of `configure_model`
    assert other.evaluate()["eval_loss"] == made.evaluate()["eval_loss"]
    path = Inheriting(arguments(), TRAIN, TEST).save_pretrained(str(tmp_path))
    assert sf.checkpoint.latest_step(tmp_path) == int(path.name) == 0


class Assigning(Trainer):
    """The configure methods of the skeleton, for `Trainer.train`."""

    def configure_model(self):
        self.scheduler = optax.linear_schedule(0.1, 0.0, 20)
        self.optimizer = optax.sgd(self.scheduler)
        return TrainerConfigureModelOutput(self.model, self.start())

    def start(self):
        return sf.init_state(init, self.optimizer, jax.random.key(3))


@shows(
    "Trainer Protocol",
    "Required properties",
    {"`optimizer`": "another name of `tx`; `configure_model` may assign it"},
)
@shows(
    "Trainer Protocol",
    "Implementation skeleton example",
    {"`self.optimizer = …`, `self.scheduler = …` in `configure_model`": "the same"},
)
def test_an_optimizer_that_configure_model_assigns_is_that_of_the_run():
    made = trainer(Assigning)
    state = made.train().state
    given = {"tx": (tx := optax.sgd(optax.linear_schedule(0.1, 0.0, 20)))}
    other = trainer(given={**given, "model_state": sf.init_state(init, tx, jax.random.key(3))})
    assert bits(other.train().state) == bits(state)
    assert made.history["train/learning_rate"][-1] == pytest.approx(0.015)
    assert made.scheduler(0) == 0.1


@pytest.mark.full
@shows(
    "Trainer Protocol",
    "Required properties",
    {"`scheduler`": "an optax schedule; `configure_model` may assign it"},
)
def test_a_schedule_that_configure_model_assigns_makes_the_optimizer():
    class Scheduled(Trainer):
        def configure_model(self):
            self.scheduler = optax.linear_schedule(0.1, 0.0, 20)
            return TrainerConfigureModelOutput(self.model)

    made = trainer(Scheduled, learning_rate=5e-5)
    made.train()
    assert made.history["train/learning_rate"][-1] == pytest.approx(0.015)


def test_an_assigned_optimizer_has_to_be_one():
    class Wrong(Assigning):
        def configure_model(self):
            output = super().configure_model()
            self.optimizer = output.state.opt_state
            return output

    with pytest.raises(sf.errors.ConfigError, match="tx: expected an optax transformation, got"):
        trainer(Wrong)


@shows(
    "Trainer Protocol",
    "Required methods: train",
    {
        "returns the state": "a `TrainerOutput`: `(state,) = trainer.train()`, and it has "
        "`params`, `step` and `opt_state` of the state"
    },
)
@shows(
    "Trainer Protocol",
    "Required methods: configuration",
    {
        "`configure_functions` returns a named tuple": "a dataclass that unpacks: `train_step_fn, "
        "eval_step_fn = …`"
    },
)
def test_the_outputs_are_the_named_tuples_of_the_text():
    made = trainer(given={"dataset_eval": None})
    model, state = made.configure_model()
    assert model is init
    assert isinstance(state, sf.TrainState)
    train_step_fn, eval_step_fn = made.configure_functions()
    assert callable(train_step_fn)
    assert callable(eval_step_fn)
    dataloader_train, dataloader_eval = made.configure_dataloaders()
    assert dataloader_eval is None
    assert made.configure_dataloaders()[0] is not dataloader_train
    (trained,) = output = made.train()
    assert (output.params, output.step, output.opt_state) == (
        trained.params, trained.step, trained.opt_state,
    )  # fmt: skip


@shows(
    "BaseTrainer",
    "Core concepts",
    {
        "`EasyDeLState`, a `TrainState` of flax": "`sf.TrainState`, without `tx` and `apply_fn`; "
        "your own steps get one with `apply_gradients` and `replace`"
    },
)
@shows("BaseTrainer", "Customization", {"`state.apply_gradients(grads=grads)`": "the same"})
@pytest.mark.parametrize("start", full_but(["by_itself"], ["by_itself", "given"]))
def test_steps_may_call_apply_gradients_of_the_state(start):
    class Applies(Trainer):
        def configure_functions(self):
            def train_step(state, batch):
                loss, grads = jax.value_and_grad(plain_loss)(state.params, batch, None)
                new_state = state.apply_gradients(grads=grads)
                return new_state.replace(model_state=()), {"loss": loss}

            return TrainerConfigureFunctionOutput(jax.jit(train_step), None)

    tx = optax.adam(1e-2)
    given = {"model_state": sf.init_state(init, tx, jax.random.key(0)), "tx": tx}
    made = trainer(Applies, {} if start == "by_itself" else given)
    plain = trainer(given={} if start == "by_itself" else given)
    state, other = made.train().state, plain.train().state
    assert int(state.step) == 20
    for ours, theirs in zip(*map(jax.tree.leaves, (state.params, other.params)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    made.state = other  # of the other class
    made.train(more_steps=1)
    assert int(made.state.step) == 21


@shows(
    "Trainer Protocol",
    "Introduction",
    {
        "trainers are interchangeable": "a function of a trainer takes a `Trainer` and your own "
        "class alike"
    },
)
def test_one_function_uses_trainers_of_either_kind(tmp_path):
    def use(trainer):
        state = trainer.train()
        assert int(state.step) >= 20
        trainer.save_pretrained(str(tmp_path / type(trainer).__name__), state)
        return trainer.evaluate(state), state.params

    for made in (MyCustomTrainer(arguments(), TRAIN, TEST), trainer()):
        metrics, params = use(made)
        assert jnp.isfinite(params["kernel"]).all()
        assert np.isfinite([*metrics.values()]).all()


@shows("BaseTrainer", "Key methods", {'`train("path")`': "the same"})
def test_train_takes_a_checkpoint_by_position(tmp_path):
    trainer(max_steps=4, output_dir=tmp_path).train()
    made = trainer(max_steps=8)
    assert int(made.train(str(tmp_path)).step) == 8
    assert made.history["train/loss"].steps == [5, 8]
    with pytest.raises(
        sf.errors.ConfigError, match="train: .*resume_from_checkpoint.*write ckpt_path=…"
    ):
        made.train(resume_from_checkpoint=True)


class Tokenizer:
    def save_pretrained(self, folder):
        Path(folder, "vocab.txt").write_text("a b c")


@shows(
    "Trainer Protocol",
    "Required methods: save_pretrained",
    {"metadata such as a tokenizer": '`Trainer(metadata={"tokenizer": tokenizer})`'},
)
@shows(
    "BaseTrainer",
    "Core concepts",
    {"automatic saving of the arguments": "`output_dir/arguments.json`"},
)
@shows(
    "API reference", "Methods and properties", {"`save_directory=None`": "`output_dir/pretrained`"}
)
def test_the_tokenizer_and_the_arguments_are_next_to_the_checkpoints(tmp_path):
    given = {"config": {"layers": 2}, "metadata": {"tokenizer": Tokenizer(), "labels": ["a", "b"]}}
    run, copy, weights = tmp_path / "run", tmp_path / "copy", tmp_path / "weights"
    made = trainer(given=given, max_steps=2, output_dir=run, model_name="m")
    made.train()
    made.save_pretrained(str(copy))
    pytest.importorskip("safetensors")
    assert made.save_model(weights) == weights
    for folder in (run, copy, weights):
        assert (folder / "vocab.txt").read_text() == "a b c"
        assert json.loads((folder / "labels.json").read_text()) == ["a", "b"]
        assert json.loads((folder / "config.json").read_text()) == {"layers": 2}
    for folder in (run, copy):
        assert type(made.arguments).from_json(folder / "arguments.json") == made.arguments
    assert made.save_pretrained(made.state).parent == run / "pretrained"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (["a"], "metadata: expected objects by name, got"),
        ({"a/b": 1}, "metadata: expected names of files without a suffix, got 'a/b'"),
        ({"arguments": {}}, "metadata: expected names of files without a suffix, got 'arguments'"),
        ({"x": object()}, r"metadata\['x'\]: expected an object with save_pretrained, or a value"),
    ],
)
def test_metadata_that_cannot_be_written_are_refused(metadata, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        trainer(given={"metadata": metadata})


@shows(
    "Trainer Protocol",
    "Required methods: train",
    {
        "`arguments.model_name_or_path`": "a path to a checkpoint or safetensors; nothing is "
        "downloaded"
    },
)
@shows(
    "BaseTrainer",
    "Key methods",
    {
        "`configure_model` loads a pretrained model by the arguments": "its weights, from the "
        "path `model_name_or_path`; the model is `model=`"
    },
)
def test_model_name_or_path_is_where_the_weights_are(tmp_path):
    first = trainer(max_steps=2)
    first.train()
    first.save_pretrained(str(tmp_path))
    made = trainer(model_name_or_path=str(tmp_path))
    assert bits(made.state.params) == bits(first.state.params)
    with pytest.raises(sf.errors.CheckpointError, match="hub/name: .* nothing is downloaded"):
        trainer(model_name_or_path="hub/name")


@shows(
    "Trainer Protocol",
    "Required methods: configuration",
    {
        "`TrainerConfigureFunctionOutput(train_step_fn, eval_step_fn)` by position": "the same",
        "`TrainerConfigureModelOutput(model, state)` by position": "the same",
        "`TrainerConfigureDataloaderOutput(dataloader_train, dataloader_eval)` by position": "the "
        "same",
    },
)
def test_outputs_by_position_in_the_order_of_either_document():
    state, tx, schedule = (
        sf.init_state(init, optax.sgd(0.1), jax.random.key(0)),
        optax.sgd(0.1),
        len,
    )
    assert TrainerConfigureModelOutput(init, state).to_dict().items() >= {"state": state}.items()
    mapping = {"step": 0}  # which has a method `update`, as an optimizer has
    assert TrainerConfigureModelOutput(init, mapping).state is mapping
    of_model = TrainerConfigureModelOutput(init, tx, schedule, {"layers": 1})
    assert (of_model.tx, of_model.scheduler, of_model.config) == (tx, len, {"layers": 1})
    loaders = TrainerConfigureDataloaderOutput([1], [2])
    assert (loaders.dataloader_train, loaders.dataloader_eval) == ([1], [2])
    loaders = TrainerConfigureDataloaderOutput([1], 5, [2], 3)
    assert (loaders.max_training_steps, loaders.dataloader_eval) == (5, [2])
    steps = TrainerConfigureFunctionOutput(max, min)
    assert (steps.train_step_fn, steps.eval_step_fn, steps.mesh) == (max, min, None)
    steps = TrainerConfigureFunctionOutput(max, sf.make_mesh(), None, min)
    assert (steps.eval_step_fn, steps.mesh) == (min, sf.make_mesh())


@shows(
    "Trainer Protocol",
    "Implementation skeleton example",
    {
        "the class as printed, with abstract methods": "only a subclass that defines them can be "
        "constructed"
    },
)
def test_the_skeleton_as_printed_is_abstract():
    class Printed(MyCustomTrainer):
        configure_model = abc.abstractmethod(MyCustomTrainer.configure_model)
        train = abc.abstractmethod(MyCustomTrainer.train)

    with pytest.raises(TypeError, match="abstract"):
        Printed(arguments(), TRAIN, TEST)


@pytest.mark.full
@shows(
    "Trainer Protocol",
    "Required methods: train",
    {"loads data by dataloaders": "`dataloader_train`, of `configure_dataloaders`"},
)
def test_batches_of_a_list_are_those_of_the_run():
    batches = [{name: values[i : i + 20] for name, values in TRAIN.items()} for i in (0, 20, 40)]

    class Own(Trainer):
        def configure_dataloaders(self):
            return TrainerConfigureDataloaderOutput(batches, None)

    class Default(Own):
        def configure_dataloaders(self):
            return Trainer.configure_dataloaders(self)

    own, default = (
        trainer(kind, {"loss_fn": plain_loss}, max_steps=3, shuffle_train_dataset=False)
        for kind in (Own, Default)
    )
    assert bits(own.train().state) == bits(default.train().state)


@shows(
    "Trainer Protocol",
    "Required properties",
    {
        "`dtype`": "of `arguments.dtype`, float32 by default",
        "`param_dtype`": "of `arguments.param_dtype`, float32 by default",
    },
)
def test_dtypes_are_those_of_the_arguments():
    made = trainer(dtype="bfloat16", param_dtype="float16", max_steps=1)
    assert (made.dtype, made.param_dtype) == (jnp.bfloat16, jnp.float16)
    assert made.state.params["kernel"].dtype == jnp.float16


@shows(
    "Trainer Protocol",
    "Best practices for implementation",
    {"failures of the data": "raised after a save of the steps before"},
)
def test_a_failure_of_the_data_is_raised_after_a_save(tmp_path):
    class Broken:
        def __len__(self):
            return 200

        def __getitem__(self, index):
            if index == 130:
                raise OSError("broken")
            return {name: values[index] for name, values in TRAIN.items()}

    made = trainer(
        given={"dataset_train": Broken(), "dataset_eval": None},
        shuffle_train_dataset=False,
        output_dir=tmp_path,
    )
    with pytest.raises(OSError, match="broken"):
        made.train()
    assert int(made.state.step) == sf.checkpoint.latest_step(tmp_path / "checkpoints") == 6


@pytest.mark.full
@shows(
    "Trainer Protocol",
    "Best practices for implementation",
    {
        "steps with `pmap` or `shmap`": "`jax.shard_map` in your step, over `self.mesh`; without "
        "it, XLA shards the step"
    },
)
def test_a_step_of_a_subclass_may_be_a_shard_map():
    P = jax.sharding.PartitionSpec

    class Mapped(Trainer):
        def configure_functions(self):
            def train_step(state, batch):
                loss, grads = jax.value_and_grad(plain_loss)(state.params, batch, None)
                grads = jax.lax.pmean(grads, ("dp", "fsdp"))
                loss = jax.lax.pmean(loss, ("dp", "fsdp"))
                return state.apply_gradients(grads=grads), {"loss": loss}

            axes = {"in_specs": (P(), P(("dp", "fsdp"))), "out_specs": P(), "check_vma": False}
            mapped = jax.shard_map(train_step, mesh=self.mesh, **axes)
            return TrainerConfigureFunctionOutput(jax.jit(mapped), None)

    changes = {"total_batch_size": 40, "sharding_array": (1, -1, 1, 1), "max_steps": 5}
    given = {"dataset_eval": None}
    mapped = trainer(Mapped, given, auto_shard_states=False, **changes)
    mapped.train()
    assert len(mapped.state.params["kernel"].sharding.device_set) == jax.device_count()
    del changes["sharding_array"]
    plain = trainer(given=given, **changes)
    for ours, theirs in zip(
        *map(jax.tree.leaves, (mapped.state.params, plain.train().params)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@shows(
    "API reference",
    "Constructor",
    {
        "`model` is a class": "any object, if `model_state` has the parameters; without it, a "
        "function of a key, such as `lambda key: Net().init(key, example)`"
    },
)
def test_a_class_as_the_model_needs_a_state():
    class Net:
        """A model that is only named."""

    params = init(jax.random.key(0))
    assert trainer(given={"model": Net, "model_state": params}).model is Net
    message = r"model: expected a function .*, got the class Net; give the init function of an inst"
    with pytest.raises(sf.errors.ConfigError, match=message):
        trainer(given={"model": Net})


@shows(
    "API reference",
    "Methods and properties",
    {
        "`LossMetrics` objects": "a step and `apply_training_hooks` may return one; it gets "
        "numbers by name"
    },
)
def test_a_step_may_return_an_object_of_metrics():
    seen = []

    class Own(Trainer):
        def configure_functions(self):
            def train_step(state, batch):
                return state, Losses(jnp.float32(1.0), jnp.float32(2.0))

            return TrainerConfigureFunctionOutput(jax.jit(train_step), None)

        def apply_training_hooks(self, metrics):
            seen.append(dict(metrics))
            return super().apply_training_hooks(metrics)

    trainer(Own, {"dataset_eval": None}, max_steps=5).train()
    assert seen == [{"train/loss": 1.0, "train/accuracy": 2.0}]


@pytest.mark.parametrize("kind", ["dataclass", "named tuple"])
def test_apply_training_hooks_may_return_an_object_of_metrics(kind):
    Named = collections.namedtuple("Named", ["loss", "accuracy"])
    make, logged = {"dataclass": Losses, "named tuple": Named}[kind], []

    class Own(Trainer):
        def apply_training_hooks(self, metrics):
            return super().apply_training_hooks(make(metrics["train/loss"], None))

        def on_log(self, metrics, step):
            logged.append({*metrics})

    made = trainer(Own, {"dataset_eval": None}, max_steps=5)
    made.train()
    assert logged == [{"loss"}]
    with pytest.raises(StopTraining, match="loss is nan"):
        made.apply_training_hooks({"train/loss": np.nan})


def test_apply_training_hooks_that_returns_a_number_is_refused():
    Own = type("Own", (Trainer,), {"apply_training_hooks": lambda self, metrics: 1.0})
    with pytest.raises(
        sf.errors.ConfigError, match="apply_training_hooks: expected metrics by name"
    ):
        trainer(Own, {"dataset_eval": None}, max_steps=5).train()


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Losses:
    """Metrics of a step, as EasyDeL's `LossMetrics`."""

    loss: jax.Array
    accuracy: jax.Array


@shows(
    "API reference",
    "Methods and properties",
    {
        "tf.data without `use_grain`": "batches of NumPy arrays; a `tf.data.Dataset` is read as a "
        "stream"
    },
)
def test_a_pipeline_of_tf_data_is_a_stream():
    class Pipeline:
        """What a `tf.data.Dataset` is read by; the real one is in `test_tensorflow.py`."""

        def __iter__(self):
            return self.as_numpy_iterator()

        def as_numpy_iterator(self):
            return ({name: values[i] for name, values in TRAIN.items()} for i in range(200))

    made = trainer(given={"dataset_train": Pipeline(), "dataset_eval": None}, max_steps=12)
    assert int(made.train().step) == 12
    assert next(made.dataloader_train)["label"].tolist() == TRAIN["label"][40:60].tolist()


@shows(
    "API reference",
    "Methods and properties",
    {"progress without a terminal": "a bar becomes lines of text"},
)
def test_a_bar_in_a_pipe_is_lines_of_text(capsys):
    trainer(given={"dataset_eval": None}, max_steps=5, progress_bar_type="tqdm").train()
    assert "step 5" in capsys.readouterr().err


@shows(
    "API reference",
    "Attributes",
    {"`wandb_runtime`": "the run of W&B during `train`, None before and after"},
)
@pytest.mark.full
def test_the_run_of_wandb_is_known_while_it_is_open(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    runs = []

    class Own(Trainer):
        def on_log(self, metrics, step):
            self.writer.flush()
            runs.append(self.wandb_runtime)

    made = trainer(Own, {"dataset_eval": None}, output_dir=tmp_path, use_wandb=True)
    before = made.wandb_runtime
    made.train()
    assert runs[-1].offline
    assert before is made.wandb_runtime is None


OUTPUTS = [
    TrainerConfigureDataloaderOutput(
        dataloader_train=iter([1]),
        max_training_steps=9,
        dataloader_eval=[2],
        max_evaluation_steps=1,
    ),
    TrainerConfigureFunctionOutput(
        sharded_training_step_function=max,
        mesh=sf.make_mesh((1,), ("dp",), devices=jax.devices()[:1]),
        checkpoint_manager=None,
        sharded_evaluation_step_function=min,
    ),
    TrainerConfigureModelOutput(model=len, tx=optax.sgd(0.1), scheduler=abs, config={"size": 2}),
    TrainerOutput(state=None, mesh=None, last_save_file_name="9", checkpoint_path="runs/a/9"),
]


@shows(
    "API reference",
    "TrainerConfigureDataloaderOutput",
    {
        "fields by keyword": "the same",
        "`from_dict`": "the same",
        "`from_json`": "loaders come back as placeholders, to be replaced",
        "`replace`": "the same",
        "`to_dict`": "the same",
        "`to_json`": "loaders by name, numbers as they are",
        "a pytree": "the same; arrays are its leaves",
    },
)
@shows(
    "API reference",
    "TrainerConfigureFunctionOutput",
    {
        "fields by keyword": "the same",
        "`from_dict`": "the same",
        "`from_json`": "steps come back as placeholders, the mesh as it was",
        "`replace`": "the same",
        "`to_dict`": "the same",
        "`to_json`": "steps by name, the mesh by its devices",
        "a pytree": "the same; arrays are its leaves",
    },
)
@shows(
    "API reference",
    "TrainerConfigureModelOutput",
    {
        "fields by keyword": "the same",
        "`from_dict`": "the same",
        "`from_json`": "functions and optimizers come back as placeholders, the rest as it was",
        "`replace`": "the same",
        "`to_dict`": "the same",
        "a pytree": "the same; arrays are its leaves",
    },
)
@shows(
    "API reference",
    "TrainerOutput",
    {
        "fields by keyword": "the same",
        "`from_dict`": "the same",
        "`replace`": "the same",
        "`to_dict`": "the same",
        "a pytree": "the same; arrays are its leaves",
    },
)
@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: type(output).__name__)
def test_outputs_of_the_reference(output):
    kind = type(output)
    assert kind.from_dict(output.to_dict()).to_dict() == output.to_dict()
    (first, *_, last) = output.to_dict()
    changed = output.replace(**{first: jnp.ones(2)})
    assert [leaf.shape for leaf in jax.tree.leaves(changed)] == [(2,)]
    assert jax.tree.map(lambda leaf: 2 * leaf, changed).to_dict()[first].tolist() == [2.0, 2.0]
    assert changed.to_dict()[last] == output.to_dict()[last]
    again = kind.from_json(output.to_json())
    assert again.to_json() == output.to_json()
    for name, value in output.to_dict().items():
        if value is None or isinstance(value, int | str | dict | list | jax.sharding.Mesh):
            is_state = (kind, name) == (TrainerOutput, "state")
            assert is_state or getattr(again, name) == value
        else:
            assert "stores only its name" in getattr(again, name).advice
