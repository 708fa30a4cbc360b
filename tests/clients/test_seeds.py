"""Examples from the documentation of trainers run with their placeholders filled in."""

import abc
import inspect
import json
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.adapter.digits import TEST, TRAIN, arguments, bits, init, loss_fn, plain_loss, trainer

import stepfold as sf
from stepfold.adapter import (
    BaseTrainerProtocol,
    Trainer,
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
)


@pytest.fixture(autouse=True)
def as_a_user_would():
    with jax.numpy_dtype_promotion("standard"):
        yield


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


def test_protocol_skeleton_runs(tmp_path):
    made = MyCustomTrainer(arguments(), TRAIN, TEST)
    before = made.evaluate(made._model_state)["loss"]
    state = made.train()
    assert int(state.step) == 30
    assert made.evaluate(state)["loss"] < before
    made.save_pretrained(str(tmp_path))
    assert sf.latest_step(tmp_path) == 30


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


def test_customization_runs(capsys):
    made = trainer(CustomTrainer, scheduler="linear", eval_batch_size=32, given={"loss_fn": None})
    before = made.evaluate()["eval_loss"]
    output = made.train()
    assert int(output.state.step) == 20
    assert made.evaluate()["eval_loss"] < before
    assert capsys.readouterr().out.count("Step completed. Current LR: ") == 20


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


@pytest.mark.parametrize("names", [tuple(ABSTRACT), METHODS], ids=["reference", "guide"])
def test_a_subclass_without_a_method_cannot_be_constructed(names):
    methods = {name: lambda self, *args: None for name in names}
    methods |= dict.fromkeys({*PROPERTIES, "training_batch_size"} if "eval" in names else (), 1)
    made = type("Mine", (BaseTrainerProtocol,), methods)()
    assert isinstance(made, BaseTrainerProtocol)
    for name in ("train", "configure_model"):
        rest = {other: method for other, method in methods.items() if other != name}
        with pytest.raises(sf.ConfigError, match=f"Mine: expected the methods .* none of {name}"):
            type("Mine", (BaseTrainerProtocol,), rest)()


def test_a_method_that_only_the_protocol_has_says_so():
    mine = type("Mine", (BaseTrainerProtocol,), {name: lambda self: None for name in METHODS})()
    with pytest.raises(NotImplementedError, match="Mine.on_step_start: expected a method"):
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
    with pytest.raises(sf.ConfigError, match="model: Dense makes its parameters of an example"):
        trainer(given={"model": dense})


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


def test_the_skeleton_runs_on_the_trainer(tmp_path):
    made, plain = (kind(arguments(), TRAIN, TEST) for kind in (Skeleton, MyCustomTrainer))
    assert isinstance(made, BaseTrainerProtocol)
    state = made.train()
    assert bits(state) == bits(plain.train())
    assert made.state is state is made._model_state
    assert made.evaluate(state) == plain.evaluate(state)
    made.save_pretrained(str(tmp_path))
    assert sf.latest_step(tmp_path) == 30
    assert made.is_process_zero
    assert made.optimizer is made.tx
    with pytest.raises(AttributeError, match="has no attribute 'plan'") as caught:
        made.log_metrics({"loss": 1.0}, None, 1)
    assert "call super().__init__(arguments, …)" in caught.value.__notes__[0]


class Assigning(Trainer):
    """The configure methods of the skeleton, for `Trainer.train`."""

    def configure_model(self):
        self.scheduler = optax.linear_schedule(0.1, 0.0, 20)
        self.optimizer = optax.sgd(self.scheduler)
        return TrainerConfigureModelOutput(self.model, self.start())

    def start(self):
        return sf.init_state(init, self.optimizer, jax.random.key(3))


def test_an_optimizer_that_configure_model_assigns_is_that_of_the_run():
    made = trainer(Assigning)
    state = made.train().state
    given = {"tx": (tx := optax.sgd(optax.linear_schedule(0.1, 0.0, 20)))}
    other = trainer(given={**given, "model_state": sf.init_state(init, tx, jax.random.key(3))})
    assert bits(other.train().state) == bits(state)
    assert made.history["train/learning_rate"][-1] == pytest.approx(0.015)
    assert made.scheduler(0) == 0.1


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

    with pytest.raises(sf.ConfigError, match="tx: expected an optax transformation, got"):
        trainer(Wrong)


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


@pytest.mark.parametrize("start", ["by_itself", "given"])
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


def test_train_takes_a_checkpoint_by_position(tmp_path):
    trainer(max_steps=4, output_dir=tmp_path).train()
    made = trainer(max_steps=8)
    assert int(made.train(str(tmp_path)).step) == 8
    assert made.history["train/loss"].steps == [5, 8]
    with pytest.raises(sf.ConfigError, match="train: .*resume_from_checkpoint.*write ckpt_path=…"):
        made.train(resume_from_checkpoint=True)


class Tokenizer:
    def save_pretrained(self, folder):
        Path(folder, "vocab.txt").write_text("a b c")


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
    with pytest.raises(sf.ConfigError, match=message):
        trainer(given={"metadata": metadata})


def test_model_name_or_path_is_where_the_weights_are(tmp_path):
    first = trainer(max_steps=2)
    first.train()
    first.save_pretrained(str(tmp_path))
    made = trainer(model_name_or_path=str(tmp_path))
    assert bits(made.state.params) == bits(first.state.params)
    with pytest.raises(sf.CheckpointError, match="hub/name: .* nothing is downloaded"):
        trainer(model_name_or_path="hub/name")
