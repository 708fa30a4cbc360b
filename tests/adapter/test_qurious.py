"""The trainer that qurious documents: its methods, what subclasses override, and refusals."""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.adapter.digits import TEST, TRAIN, init
from tests.clients.rows import shows
from tests.small import full_but, ones

import stepfold as sf
from stepfold.adapter.qurious import Model, Trainer

pytestmark = pytest.mark.usefixtures("standard_promotion")


def apply(params, image):
    return image @ params["kernel"] + params["bias"]


nll = optax.softmax_cross_entropy_with_integer_labels
MODEL = Model(apply, init(jax.random.key(0)))
TX = optax.adam(1e-2)


def made(kind=Trainer, **changes):
    return kind(**{"model": MODEL, "optimizer": TX, "loss_fn": nll} | changes)


def pairs(data=TRAIN, size=60):
    x, y = data["image"], data["label"]
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


BATCHES, EVALUATION = pairs(), pairs(TEST, 30)
BATCH = BATCHES[0]


def dicts(data, **options):
    data = {"inputs": data["image"], "targets": data["label"]}
    return sf.batches(data, 60, remainder="pad", **options)


def plain_loss(params, data):
    return float(nll(apply(params, data["image"]), data["label"]).mean())


def equal(state, other):
    return jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), state, other))


# Steps, epochs, evaluations


@shows(
    "qurious",
    "Constructor",
    {"`loss_fn(outputs, targets)`": "the same; optax's functions as they are"},
)
@shows(
    "qurious",
    "Methods",
    {
        "`train_step(batch)`": "the same, with `loss`; `apply_gradients(grads)` and `tx` are for "
        "gradients of your own"
    },
)
def test_a_step_returns_its_loss_and_changes_the_model():
    trainer = made()
    before = plain_loss(MODEL.params, {"image": BATCH[0], "label": BATCH[1]})
    assert trainer.train_step(BATCH)["loss"] == pytest.approx(before, rel=1e-6)
    assert trainer.eval_step(BATCH)["loss"] < before
    assert int(trainer.state.step) == 1
    assert trainer.model(BATCH[0]).shape == (60, 10)
    assert plain_loss(MODEL.params, TEST) > 0  # the arrays of the model are not donated


@shows(
    "qurious",
    "Key features",
    {
        "one step, one epoch, several epochs": "`train_step`, `train_epoch`, `train`, with the "
        "same bits"
    },
)
def test_a_run_has_the_bits_of_fit_and_of_single_steps():
    def loss_fn(params, batch, key):
        return sf.mean(nll(apply(params, batch[0]), batch[1]))

    state = sf.init_state(MODEL.params, TX, jax.random.key(0))
    result = sf.fit(jax.jit(sf.make_train_step(loss_fn, TX)), state, BATCHES, epochs=3)
    trainer, single, by_epoch = made(), made(), made()
    trainer.train(BATCHES, 3)
    for batch in BATCHES * 3:
        single.train_step(batch)
    for epoch in range(3):
        by_epoch.train_epoch(BATCHES, None, epoch)
    assert equal(trainer.state.params, result.state.params)
    assert equal(trainer.state.params, single.state.params)
    assert equal(trainer.state.params, by_epoch.state.params)


@pytest.mark.full
@shows(
    "qurious",
    "Best practices, common issues, contributing",
    {
        "out of memory: accumulation, mixed precision": "`sf.make_train_step(accumulate=, "
        "precision=)` and `sf.fit`"
    },
)
def test_accumulation_and_precision_are_those_of_a_step_for_fit():
    def loss_fn(params, batch, key):
        return sf.mean(nll(apply(params, batch[0]), batch[1]))

    trainer = made()
    trainer.train(BATCHES[:3], 1)
    options = {"accumulate": 4, "precision": "bf16"}
    step = jax.jit(sf.make_train_step(loss_fn, TX, **options))
    state = sf.init_state(MODEL.params, TX, jax.random.key(0))
    result = sf.fit(step, state, BATCHES[:3], epochs=1)
    for leaf, other in zip(
        *map(jax.tree.leaves, (trainer.model.params, result.state.params)), strict=True
    ):
        np.testing.assert_allclose(leaf, other, atol=5e-3)
    assert not equal(trainer.state.params, result.state.params)


@shows(
    "qurious",
    "Methods",
    {"returned history": "the same: a dict of lists with a value for each epoch"},
)
def test_metrics_of_an_epoch_are_means_over_its_examples():
    losses = []

    class Records(Trainer):
        def train_step(self, batch):
            metrics = super().train_step(batch)
            losses.append((metrics["loss"], len(batch[1])))
            return metrics

    history = made(Records).train(BATCHES, 2)
    assert [size for _, size in losses] == [60, 60, 60, 20] * 2
    for epoch, mean in enumerate(history["train_loss"]):
        values, sizes = zip(*losses[4 * epoch : 4 * epoch + 4], strict=True)
        assert mean == pytest.approx(np.average(values, weights=sizes), rel=1e-6)
    assert made().train(BATCHES, 2)["train_loss"] == pytest.approx(history["train_loss"], rel=1e-6)


@shows(
    "qurious",
    "Methods",
    {
        "`train_epoch(train_dataloader, eval_dataloader, epoch)`": "the same, with `train_loss` "
        "and `eval_loss`; overriding it is refused, since a run is one fold over all epochs"
    },
)
def test_an_epoch_and_its_evaluation():
    trainer, other = made(), made()
    first = trainer.train_epoch(BATCHES, EVALUATION)
    second = trainer.train_epoch(BATCHES, EVALUATION, epoch=1)
    history = other.train(BATCHES, 2, EVALUATION)
    for name in ("train_loss", "eval_loss"):
        assert [first[name], second[name]] == history[name]
    assert equal(trainer.state.params, other.state.params)
    kind = type("Own", (Trainer,), {"train_epoch": lambda self, *args: {}})
    with pytest.raises(
        sf.errors.ConfigError, match="train_epoch: expected the method of the class"
    ):
        made(kind)


@shows("qurious", "Methods", {"`evaluate(dataloader)`": "the same, exact over all examples"})
@pytest.mark.parametrize("size", [7, 30, 100])
def test_an_evaluation_is_exact_over_the_whole_set(size):
    exact = pytest.approx(plain_loss(MODEL.params, TEST), rel=1e-6)
    mean_loss = lambda outputs, targets: nll(outputs, targets).mean()
    assert made().evaluate(pairs(TEST, size)) == {"loss": exact}
    assert made(loss_fn=mean_loss).evaluate(pairs(TEST, size)) == {"loss": exact}
    assert made().evaluate(dicts(TEST, epochs=1)) == {"loss": exact}


def test_padding_has_no_weight():
    trainer, ragged = made(), made()
    rows = dict(TRAIN)
    padded = list(dicts(rows, epochs=1))
    assert [int(batch["mask"].sum()) for batch in padded] == [60, 60, 60, 20]
    history, wanted = trainer.train(padded, 2), ragged.train(BATCHES, 2)
    np.testing.assert_allclose(history["train_loss"], wanted["train_loss"], rtol=1e-6)
    for leaf, other in zip(*map(jax.tree.leaves, (trainer.model, ragged.model)), strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-5)


@pytest.mark.full
def test_metrics_of_the_loss_function_are_exact_too():
    def loss_fn(outputs, targets):
        return nll(outputs, targets), {"accuracy": outputs.argmax(-1) == targets}

    trainer = made(loss_fn=loss_fn)
    history = trainer.train(BATCHES, 1, dicts(TEST, epochs=1))
    hits = apply(trainer.model.params, TEST["image"]).argmax(-1) == TEST["label"]
    assert history["eval_accuracy"] == [pytest.approx(float(hits.mean()))]
    assert 0 < history["train_accuracy"][0] < 1


def test_a_mean_that_counts_padding_is_refused():
    trainer = made(loss_fn=lambda outputs, targets: nll(outputs, targets).mean())
    with pytest.raises(
        sf.errors.ConfigError, match="loss_fn: expected values of examples, or sf.mean"
    ):
        trainer.evaluate(dicts(TEST, epochs=1))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "loss: expected a number, got NoneType None"),
        ((ones(60), 1.0), "metrics"),
        ((ones(60), {}, {}), "loss_fn: expected the loss or"),
    ],
)
def test_what_a_loss_function_returns_is_checked(returned, message):
    with pytest.raises(sf.errors.LossError, match=message):
        made(loss_fn=lambda outputs, targets: returned).eval_step(BATCH)


@shows(
    "qurious",
    "Key features",
    {"any loss function": "any function of outputs and targets; it may return several terms"},
)
@shows("qurious", "Methods", {"`eval_step(batch)`": "the same, with `loss` and other metrics"})
def test_a_loss_may_have_terms():
    terms = lambda outputs, targets: {"a": sf.mean(nll(outputs, targets)), "b": outputs.sum() * 0}
    metrics = made(loss_fn=terms).eval_step(BATCH)
    assert metrics["loss"] == pytest.approx(made().eval_step(BATCH)["loss"])
    assert metrics["b"] == 0.0


# Models


@pytest.mark.full
@shows(
    "qurious", "Key features", {"architectures of Hugging Face and your own": "any callable pytree"}
)
def test_an_equinox_module_is_a_model():
    import equinox as eqx

    class Classifier(eqx.Module):
        mlp: eqx.nn.MLP
        classes: jax.Array

        def __call__(self, x):
            return jax.vmap(self.mlp)(x)[:, self.classes]

    mlp = eqx.nn.MLP(64, 10, 16, 1, key=jax.random.key(0))
    trainer = made(model=Classifier(mlp, jnp.arange(10)))
    history = trainer.train(BATCHES, 3)
    assert history["train_loss"][-1] < history["train_loss"][0]
    assert isinstance(trainer.model, Classifier)
    assert trainer.model.mlp.activation is mlp.activation
    assert not equal(trainer.model.mlp.layers[0].weight, mlp.layers[0].weight)


@pytest.mark.full
@shows(
    "qurious",
    "Constructor",
    {"`model`": "a module of JAX with its parameters: [`Model(apply, params)`](#the-model)"},
)
def test_a_linen_module_is_a_model():
    from flax import linen

    module = linen.Dense(10)
    model = Model(module.apply, module.init(jax.random.key(0), BATCH[0]))
    history = made(model=model).train(BATCHES, 2)
    assert history["train_loss"][1] < history["train_loss"][0]


@pytest.mark.full
def test_an_nnx_module_is_split_as_its_refusal_says():
    from flax import nnx

    module = nnx.Linear(64, 10, rngs=nnx.Rngs(0))
    with pytest.raises(
        sf.errors.ConfigError, match="model: expected .*, got Linear; split it, as graph, params"
    ):
        made(model=module)
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    model = Model(lambda params, *x: nnx.merge(graph, params, rest, copy=True)(*x), params)
    history = made(model=model).train(BATCHES, 2)
    assert history["train_loss"][1] < history["train_loss"][0]


def test_batch_statistics_are_not_parameters():
    variables = {"params": MODEL.params, "batch_stats": {"mean": jnp.zeros(10)}}
    with pytest.raises(
        sf.errors.ConfigError, match="model: expected parameters alone, got params and b"
    ):
        made(model=Model(apply, variables))


def test_switching_modes_does_nothing():
    assert MODEL.eval() is MODEL.train() is MODEL


# What subclasses override


@shows("qurious", "Methods", {"`_compute_loss(outputs, targets)`": "the same, traced"})
@shows(
    "qurious",
    "Best practices, common issues, contributing",
    {
        "extending by overrides of `_prepare_batch`, `_forward_pass`, `_compute_loss`": "the same, "
        "traced once for each shape of a batch"
    },
)
def test_protected_methods_are_composed_and_traced_once_for_each_shape():
    calls = []

    class Own(Trainer):
        def _prepare_batch(self, batch):
            calls.append("prepare")
            inputs, targets = super()._prepare_batch(batch)
            return inputs / 2, targets

        def _forward_pass(self, inputs):
            calls.append("forward")
            return 2 * self.model(inputs)

        def _compute_loss(self, outputs, targets):
            calls.append("loss")
            return 3 * super()._compute_loss(outputs, targets)

    trainer = made(Own)
    params = jax.tree.map(jnp.copy, trainer.model.params)
    wanted = 3 * float(nll(2 * apply(params, BATCH[0] / 2), BATCH[1]).mean())
    assert trainer.train_step(BATCH)["loss"] == pytest.approx(wanted, rel=1e-6)
    assert not equal(trainer.model.params, params)
    traced = len(calls)
    assert calls[:3] == ["prepare", "forward", "loss"]
    trainer.train([BATCH] * 3, 2)
    assert len(calls) == traced
    trainer.eval_step(BATCH)
    assert calls[traced:] == ["prepare", "forward", "loss"]
    outputs = trainer._forward_pass(trainer._prepare_batch(BATCH)[0])  # by hand
    np.testing.assert_allclose(outputs, 2 * trainer.model(BATCH[0] / 2), rtol=1e-6)


@shows(
    "qurious",
    "Methods",
    {"`_forward_pass(inputs)`": "the same, traced, so that what it assigns to `self` is lost"},
)
def test_what_they_assign_while_they_are_traced_is_lost():
    class Counts(Trainer):
        count = 0

        def _forward_pass(self, inputs):
            self.count += 1
            return super()._forward_pass(inputs)

    trainer = made(Counts)
    trainer.train_step(BATCH)
    assert trainer.count == 0


def test_a_training_step_has_a_key_and_an_evaluation_none():
    class Dropout(Trainer):
        def _forward_pass(self, inputs):
            if self.key is not None:
                inputs = inputs * jax.random.bernoulli(self.key, 0.5, inputs.shape)
            return self.model(inputs)

    trainer = made(Dropout, optimizer=optax.sgd(0.0))
    losses = {trainer.train_step(BATCH)["loss"] for _ in range(3)}
    assert len(losses) == 3
    assert trainer.eval_step(BATCH) == made().eval_step(BATCH)
    assert trainer.key is None


@shows(
    "qurious",
    "Key features",
    {"easy to subclass": "a run calls the methods of [subclasses](#subclasses)"},
)
def test_a_run_calls_train_step():
    steps = []

    class Own(Trainer):
        def train_step(self, batch):
            steps.append(int(self.state.step))
            return {**super().train_step(batch), "rows": len(batch[1])}

    trainer, plain = made(Own), made()
    history = trainer.train(BATCHES, 2)
    plain.train(BATCHES, 2)
    assert steps == [*range(8)]
    assert history["train_rows"] == [pytest.approx((3 * 60 * 60 + 20 * 20) / 200)] * 2
    assert equal(trainer.state.params, plain.state.params)


@shows(
    "qurious",
    "Methods",
    {"`eval_dataloader`": "any iterable of batches, or an `sf.batches(…, epochs=1)`"},
)
@shows(
    "qurious",
    "Best practices, common issues, contributing",
    {"metrics by a subclass with `eval_step`": "the same, weighted by the examples of each batch"},
)
def test_metrics_of_eval_step_are_weighted_by_their_examples():
    class Accuracy(Trainer):
        def eval_step(self, batch):
            inputs, targets = self._prepare_batch(batch)
            outputs = self._forward_pass(inputs)
            rows = np.asarray(batch["mask"]) if isinstance(batch, dict) else np.ones(len(inputs))
            hits = np.asarray(outputs.argmax(-1) == targets)
            return {"accuracy": np.average(hits, weights=rows)}

    for evaluation in (EVALUATION, dicts(TEST, epochs=1)):
        trainer = made(Accuracy)
        history = trainer.train(BATCHES, 2, evaluation, best_model_metric="eval_accuracy")
        hits = apply(trainer.model.params, TEST["image"]).argmax(-1) == TEST["label"]
        assert history["eval_accuracy"][1] == pytest.approx(float(hits.mean()))
        assert len(history["eval_accuracy"]) == 2


def test_a_run_calls_evaluate_with_the_state_of_its_epoch():
    seen = []

    class Own(Trainer):
        def evaluate(self, dataloader):
            seen.append((int(self.state.step), dataloader))
            return {"eval_score": len(seen)}

    history = made(Own).train(BATCHES, 2, EVALUATION, best_model_metric=None)
    assert seen == [(4, EVALUATION), (8, EVALUATION)]
    assert history["eval_score"] == [1.0, 2.0]


@shows(
    "qurious",
    "Methods",
    {
        "`_save_checkpoint(path, epoch, metric_value)`": "the same; a run calls that of a subclass "
        "in addition to its own saves"
    },
)
def test_a_run_calls_save_checkpoint(tmp_path):
    saved = []

    class Own(Trainer):
        def _save_checkpoint(self, path, epoch, metric_value=None):
            saved.append((path, epoch, metric_value, int(self.state.step)))
            super()._save_checkpoint(path, epoch, metric_value)

    trainer = made(Own)
    losses = trainer.train(BATCHES, 4, EVALUATION, save_dir=tmp_path, save_freq=2)["eval_loss"]
    assert losses == sorted(losses, reverse=True)
    names = "best_model", "checkpoint_epoch_2", "checkpoint_epoch_4"
    best, second, last = (str(tmp_path / name) for name in names)
    assert saved == [
        (best, 0, losses[0], 4),
        (second, 1, losses[1], 8),
        (best, 1, losses[1], 8),
        (best, 2, losses[2], 12),
        (last, 3, losses[3], 16),
        (best, 3, losses[3], 16),
    ]
    loaded = made().load_checkpoint(second)
    assert (loaded["step"], loaded["extra"]) == (8, {"epoch": 1, "metric_value": losses[1]})
    assert made().load_checkpoint(best)["step"] == 16
    assert made().load_checkpoint(tmp_path)["step"] == 16  # that of the run


def test_an_epoch_without_a_number_is_never_the_best(tmp_path):
    losses, saved = iter([float("nan"), 2.0, float("nan"), 1.0, 3.0]), []

    class Own(Trainer):
        def evaluate(self, dataloader):
            return {"loss": next(losses)}

        def _save_checkpoint(self, path, epoch, metric_value=None):
            saved.append((path, epoch))

    made(Own).train(BATCHES, 5, EVALUATION, save_dir=tmp_path, save_freq=9)
    assert saved == [(str(tmp_path / "best_model"), epoch) for epoch in (1, 3)]


def test_saving_a_step_twice_is_a_no_op(tmp_path):
    trainer = made()
    trainer._save_checkpoint(tmp_path, 0, 0.5)
    trainer._save_checkpoint(tmp_path, 0, 0.25)
    assert trainer.load_checkpoint(tmp_path)["extra"]["metric_value"] == 0.5


# Batches


@shows(
    "qurious",
    "Methods",
    {
        "`_prepare_batch(batch)`": "the same; by default a pair, a dict of `inputs` and `targets`, "
        "or the keyword arguments of the model with `labels`"
    },
)
def test_default_inputs_and_targets():
    trainer = made()
    batch = {"ids": 1, "labels": 2, "mask": 3}
    assert trainer._prepare_batch([4, 5]) == (4, 5)
    assert trainer._prepare_batch({"inputs": 1, "targets": 2, "mask": 3}) == (1, 2)
    assert trainer._prepare_batch(batch) == ({"ids": 1}, 2)
    assert made(loss_fn=None)._prepare_batch(batch) == ({"ids": 1, "labels": 2}, 2)
    with pytest.raises(sf.errors.DataError, match="batch: expected a pair .*, got tuple"):
        trainer._prepare_batch((1, 2, 3))


@pytest.mark.parametrize(
    "wrap", [lambda loss: {"loss": loss}, lambda x: types.SimpleNamespace(loss=x)]
)
def test_the_loss_of_the_outputs(wrap):
    model = Model(
        lambda params, x, labels: wrap(nll(apply(params, x), labels).mean()), MODEL.params
    )
    batch = {"x": BATCH[0], "labels": BATCH[1]}
    assert made(model=model, loss_fn=None).eval_step(batch) == made().eval_step(BATCH)


def test_outputs_without_a_loss_need_a_function():
    with pytest.raises(
        sf.errors.ConfigError, match="loss_fn: expected a function .* without a loss"
    ):
        made(loss_fn=None).eval_step(BATCH)


class Iterable:
    """Batches without a length, which change in number from one epoch to the next if asked to."""

    def __init__(self, *lengths):
        self.lengths, self.iterated = itertools.cycle(lengths), 0

    def __iter__(self):
        self.iterated += 1
        return iter(BATCHES[: next(self.lengths)])


@shows(
    "qurious",
    "Methods",
    {
        "`train`: `train_dataloader`": "any iterable of batches, iterated in each epoch, or an "
        "`sf.batches(…)`"
    },
)
def test_an_iterable_without_a_length_is_counted_once():
    batches, trainer, other = Iterable(3), made(), made()
    assert trainer.train(batches, 2) == other.train(BATCHES[:3], 2)
    assert batches.iterated == 3
    exact = pytest.approx(made().train(BATCHES, 1)["train_loss"], rel=1e-6)
    assert made().train(dicts(TRAIN), 1)["train_loss"] == exact


@pytest.mark.parametrize(("lengths", "got"), [((3, 3, 2), "2"), ((2, 3), "more")])
def test_an_epoch_of_another_length_is_refused(lengths, got):
    with pytest.raises(sf.errors.DataError, match=f"train_dataloader: expected .* got {got};"):
        made().train(Iterable(*lengths), 3)


@shows(
    "qurious",
    "Best practices, common issues, contributing",
    {
        "slow: workers, larger batches": "`sf.prefetch(sf.batches(…))` as the loader, or "
        "`sf.workers(sf.batches(…), 2)`"
    },
)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda batches: batches,
        sf.prefetch,
        pytest.param(lambda batches: sf.workers(batches, 2), marks=pytest.mark.full),
    ],
)
def test_batches_of_stepfold_continue_with_the_next_epoch(wrap):
    trainer, batches = made(), wrap(dicts(TRAIN, seed=0))
    trainer.train(batches, 2)
    trainer.train(batches, 1)
    other = made()
    other.train(dicts(TRAIN, seed=0), 3)
    assert equal(trainer.state.params, other.state.params)


# Resuming, best, early stopping


@shows(
    "qurious",
    "Best practices, common issues, contributing",
    {"checkpoints": "`save_dir`; a run that fails resumes from it with the same bits"},
)
@pytest.mark.parametrize(
    "batches",
    [pytest.param(lambda: BATCHES, marks=pytest.mark.full), lambda: dicts(TRAIN, seed=0)],
)
@pytest.mark.parametrize("fails_at", full_but([4], [2, 4, 7]))
def test_a_run_that_fails_resumes_with_the_same_bits(tmp_path, batches, fails_at):
    class Fails(Trainer):
        def train_step(self, batch):
            if int(self.state.step) == fails_at:
                raise RuntimeError("mine")
            return super().train_step(batch)

    class Same(Trainer):
        def train_step(self, batch):
            return super().train_step(batch)

    with pytest.raises(RuntimeError, match="mine"):
        made(Fails).train(batches(), 3, EVALUATION, tmp_path)
    assert sf.checkpoint.latest_step(tmp_path) == fails_at
    trainer, whole = made(Same), made(Same)
    history = trainer.train(batches(), 3, EVALUATION, tmp_path)
    assert history == whole.train(batches(), 3, EVALUATION)
    assert equal(trainer.state, whole.state)
    assert trainer.result.resumed == fails_at


@shows(
    "qurious",
    "Best practices, common issues, contributing",
    {
        "callbacks for logging": "the same; after an exception in one, the trainer has the state "
        "of that epoch"
    },
)
def test_an_exception_in_a_callback_leaves_the_state_of_its_epoch():
    def fail(trainer, epoch, metrics):
        if epoch == 1:
            raise RuntimeError("mine")

    trainer = made()
    with pytest.raises(RuntimeError, match="mine"):
        trainer.train(BATCHES, 3, callbacks=[fail])
    assert int(trainer.state.step) == 8
    trainer.train(BATCHES, 1)
    assert int(trainer.state.step) == 12


@shows("qurious", "Methods", {"`callbacks`": "the same; they see the state of their epoch"})
def test_callbacks_see_the_model_of_their_epoch():
    seen = []

    def callback(trainer, epoch, metrics):
        seen.append((epoch, int(trainer.state.step), metrics))
        assert trainer.evaluate(EVALUATION) == {"loss": metrics["eval_loss"]}

    history = made().train(BATCHES, 3, EVALUATION, callbacks=[callback])
    assert [(epoch, step) for epoch, step, _ in seen] == [(0, 4), (1, 8), (2, 12)]
    assert [metrics["train_loss"] for *_, metrics in seen] == history["train_loss"]


def worse_and_worse(count):
    """Make a trainer whose evaluation gets worse after `count` epochs."""
    losses = iter([*range(10, 10 - count, -1), *range(20, 40)])
    evaluate = lambda self, dataloader: {"loss": next(losses)}
    return made(type("Own", (Trainer,), {"evaluate": evaluate}))


@shows("qurious", "Methods", {"`early_stopping_patience`": "the same"})
@shows(
    "qurious",
    "Best practices, common issues, contributing",
    {"early stopping": "`early_stopping_patience`"},
)
def test_early_stopping_and_the_best_epoch(tmp_path):
    trainer = worse_and_worse(2)
    history = trainer.train(
        BATCHES, 9, EVALUATION, tmp_path, save_freq=4, early_stopping_patience=3
    )
    assert history["eval_loss"] == [10.0, 9.0, 20.0, 21.0, 22.0]
    assert trainer.result.stop_reason.kind == "early_stop"
    assert trainer.result.best == 8
    assert sorted(sf.checkpoint.verify(tmp_path)) == [
        4,
        8,
        16,
        20,
    ]  # the best so far, the interval, the end
    assert made().load_checkpoint(tmp_path / "8")["step"] == 8


@shows(
    "qurious",
    "Methods",
    {
        "`save_dir`": "the same; a checkpoint is a folder, named by its step",
        "`save_freq`": "the same; all of them are kept",
    },
)
def test_checkpoints_are_folders_named_by_their_steps(tmp_path):
    made().train(BATCHES, 6, save_dir=tmp_path, save_freq=2)
    assert sorted(sf.checkpoint.verify(tmp_path)) == [8, 16, 24]
    assert all((tmp_path / name).is_dir() for name in ("8", "16", "24"))


@pytest.mark.full
@shows(
    "qurious",
    "Methods",
    {
        '`best_model_metric="eval_loss"`': "the same, of `train_…` too; its name has to say which "
        "value is better"
    },
)
def test_a_train_metric_may_stop_too():
    trainer = made(optimizer=optax.sgd(0.0))
    trainer.train(BATCHES, 9, best_model_metric="train_loss", early_stopping_patience=2)
    assert trainer.result.stop_reason.kind == "early_stop"
    with pytest.raises(sf.errors.ConfigError, match="best_model_metric: expected a name that says"):
        trainer.train(BATCHES, 9, best_model_metric="train_score")


@pytest.mark.full
@shows(
    "qurious",
    "Best practices, common issues, contributing",
    {
        "NaN": "ends the run with a warning that names the step; `trainer.result.capsule` is for "
        "`sf.debug.replay`"
    },
)
def test_a_nan_ends_the_run_with_a_warning():
    trainer = made(optimizer=optax.sgd(float("nan")))
    with pytest.warns(UserWarning, match="train: train/loss is (nan|inf) in step .* ended the run"):
        history = trainer.train(BATCHES, 5)
    assert len(history.get("train_loss", [])) < 5
    assert isinstance(trainer.result.capsule, sf.debug.Capsule)


@shows(
    "qurious",
    "Methods",
    {
        "`load_checkpoint(path, load_optimizer, load_scheduler)`": "the same, of `save_dir` or one "
        "step"
    },
)
def test_loading_parts_of_a_checkpoint(tmp_path):
    scheduler = optax.exponential_decay(1.0, 1, 0.5)
    trainer = made(scheduler=scheduler)
    trainer.train(BATCHES, 1, save_dir=tmp_path)
    for optimizer, schedule in itertools.product([True, False], repeat=2):
        other = made(scheduler=scheduler)
        loaded = other.load_checkpoint(tmp_path, load_optimizer=optimizer, load_scheduler=schedule)
        assert loaded["state"] is other.state
        assert equal(other.state.params, trainer.state.params)
        adam, factor = other.state.opt_state
        assert int(factor.count) == 4 * schedule
        assert int(adam[0].count) == int(other.state.step) == 4 * optimizer
    assert made(scheduler=scheduler).load_checkpoint(tmp_path / "4")["step"] == 4


def test_a_trainer_that_has_another_state_does_not_resume(tmp_path):
    made().train(BATCHES, 2, save_dir=tmp_path)
    other = made()
    other.load_checkpoint(tmp_path, load_optimizer=False)
    with pytest.raises(
        sf.errors.ConfigError, match="save_dir: expected a directory without checkpoints"
    ):
        other.train(BATCHES, 3, save_dir=tmp_path)


@pytest.mark.full
@shows("qurious", "Methods", {"`num_epochs`": "the same; a second call does as many more"})
def test_the_epochs_of_a_run_count_from_the_state_of_the_trainer(tmp_path):
    trainer = made()
    trainer.train(BATCHES, 2, save_dir=tmp_path)
    assert len(trainer.train(BATCHES, 1, save_dir=tmp_path)["train_loss"]) == 3
    loaded, new, whole = made(), made(), made()
    loaded.load_checkpoint(tmp_path)
    loaded.train(BATCHES, 2, save_dir=tmp_path)
    assert int(loaded.state.step) == 20
    new.train(BATCHES, 6, save_dir=tmp_path)
    whole.train(BATCHES, 6)
    assert equal(new.state, whole.state)


# Settings

NESTED = {"training": {"max_grad_norm": 0.1, "weight_decay": 0.5}}


class Config:
    class training:
        max_grad_norm, weight_decay, scheduler_step_per_batch = 0.1, 0.5, None


@shows(
    "qurious",
    "Constructor",
    {"`config`": "the same: a mapping, an object or a class, nested or with dots in the names"},
)
@shows(
    "qurious",
    "Configuration options",
    {
        "`training.weight_decay`": "added to the gradients, as by `torch.optim.Adam`; for AdamW, "
        "`optax.adamw(weight_decay=)`",
        "`training.max_grad_norm`": "clips the norm of all gradients",
    },
)
@pytest.mark.parametrize(
    "config",
    [
        NESTED,
        {f"training.{name}": value for name, value in NESTED["training"].items()},
        types.SimpleNamespace(training=types.SimpleNamespace(**NESTED["training"])),
        Config,
    ],
)
def test_settings_of_the_optimizer(config):
    trainer = made(config=config, optimizer=optax.sgd(1.0))
    chain = optax.chain(
        optax.clip_by_global_norm(0.1), optax.add_decayed_weights(0.5), optax.sgd(1.0)
    )
    other = made(optimizer=chain)
    trainer.train(BATCHES, 1)
    other.train(BATCHES, 1)
    assert equal(trainer.state, other.state)
    assert trainer.config is config


@pytest.mark.full
@shows(
    "qurious",
    "Constructor",
    {
        "`scheduler`": "a function of a count that returns a factor of the updates, as in "
        "`LambdaLR`; or leave it out, and give optax the schedule"
    },
)
def test_a_schedule_of_optax_is_a_scheduler_or_part_of_the_optimizer():
    schedule = optax.linear_schedule(1.0, 0.0, 8)
    scaled = made(optimizer=optax.sgd(0.5), scheduler=schedule)
    own = made(optimizer=optax.sgd(lambda count: 0.5 * schedule(count)))
    for trainer in (scaled, own):
        trainer.train(BATCHES, 2)
    for leaf, other in zip(*map(jax.tree.leaves, (scaled.model, own.model)), strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-6)


@shows(
    "qurious",
    "Configuration options",
    {"`training.scheduler_step_per_batch`": "True by default; False counts epochs"},
)
@pytest.mark.parametrize(
    ("by_step", "factors"), [(True, [1, 2, 3, 4]), (None, [1, 2, 3, 4]), (False, [1, 1, 2, 2])]
)
def test_a_scheduler_counts_steps_or_epochs(by_step, factors):
    model = Model(lambda params, x: params["w"] * x, {"w": jnp.zeros(())})
    config = {"training.scheduler_step_per_batch": by_step}
    trainer = Trainer(
        model,
        optax.sgd(1.0),
        lambda outputs, targets: -outputs,
        config,
        scheduler=lambda count: 1.0 + count,
    )
    batch = np.ones(3, np.float32), np.ones(3, np.float32)
    seen = []
    trainer.train([batch] * 2, 2, callbacks=[lambda t, *_: seen.append(float(t.model.params["w"]))])
    assert seen == [sum(factors[:2]), sum(factors)]


@shows("qurious", "Key features", {"device detection": "jax's; `trainer.device`"})
@shows(
    "qurious", "Constructor", {"`device`": "None, or one of `jax.devices()`; others are refused"}
)
@shows(
    "qurious",
    "Best practices, common issues, contributing",
    {"device placement by `_prepare_batch`": "by jax"},
)
def test_a_device_holds_the_state():
    device = jax.devices()[-1]
    trainer = made(device=device)
    trainer.train_step(BATCH)
    assert {leaf.device for leaf in jax.tree.leaves(trainer.state)} == {device}
    assert trainer.device == device
    assert made().device == jax.devices()[0]
    with pytest.raises(
        sf.errors.ConfigError, match="device: expected a device of jax, got str 'cuda:0'"
    ):
        made(device="cuda:0")


# Refusals


def torch_object(name):
    """Make an object of a class that torch seems to have."""
    return type(name, (), {"__module__": "torch.nn", "__call__": lambda self, *x: None})()


@shows(
    "qurious", "Constructor", {"`optimizer`": "an optax transformation; one of torch is refused"}
)
def test_objects_of_torch_are_refused_with_what_to_give():
    for argument, name in [
        ("model", "Linear"),
        ("optimizer", "Adam"),
        ("loss_fn", "MSELoss"),
        ("scheduler", "StepLR"),
    ]:
        message = f"^{argument}: expected one for JAX, got torch's {name}; (give|write)"
        with pytest.raises(sf.errors.ConfigError, match=message):
            made(**{argument: torch_object(name)})


@shows(
    "qurious",
    "Key features",
    {
        "configuration object": "`config`; settings other than [the three](#configuration-options) "
        "have no effect, and are warned of"
    },
)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": apply}, "model: .* pytree, .*, got function; give Model"),
        ({"model": MODEL.params}, "model: expected a callable pytree"),
        ({"optimizer": 0.1}, "optimizer: expected an optax transformation, got float 0.1; such"),
        ({"optimizer": optax.adam}, "optimizer: expected an optax transformation"),
        ({"loss_fn": "mse"}, r"loss_fn: expected a function \(outputs, targets\), or None"),
        (
            {"loss_fn": lambda params, batch, key: 0.0},
            r"loss_fn: expected a function \(outputs, targets\), got <lambda>\(params, b",
        ),
        ({"device": "cuda"}, r"device: expected a device of jax, got str 'cuda'; give one of jax"),
        ({"scheduler": 0.1}, "scheduler: expected a function of a count"),
        ({"config": 1}, r"config: expected an object or a mapping with training"),
        ({"config": {"training.weight_deca": 1}}, "did you mean 'training.weight_decay'"),
        ({"config": {"training.weight_decay": -1}}, "training.weight_decay: expected a number of"),
        ({"config": {"training.max_grad_norm": 0}}, "training.max_grad_norm: expected a number ab"),
        (
            {"config": {"training.scheduler_step_per_batch": "no"}},
            "training.scheduler_step_per_batch: expected True or False",
        ),
    ],
)
def test_arguments_of_the_trainer_are_refused(changes, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        made(**changes)


def test_settings_that_the_trainer_does_not_use_are_warned_of():
    config = {"training": {"epochs": 3, "weight_decay": 0.5}, "model": {"width": 8}, "seed": 0}
    expected = "config: expected training.weight_decay, .* does not use: model.width, seed, train"
    with pytest.warns(UserWarning, match=expected):
        trainer = made(config=config, optimizer=optax.sgd(1.0))
    other = made(config={"training.weight_decay": 0.5}, optimizer=optax.sgd(1.0))
    for each in (trainer, other):
        each.train_step(BATCH)
    assert equal(trainer.state, other.state)


@pytest.mark.parametrize(
    "scheduler",
    [
        optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100),
        optax.linear_schedule(3e-4, 0.0, 1000),
        optax.constant_schedule(0.1),
        lambda count: 1e-2,
    ],
)
def test_a_scheduler_that_looks_like_a_rate_is_warned_of(scheduler):
    message = (
        r"scheduler: expected a factor of the updates, .* which look like a learning rate; give"
    )
    with pytest.warns(UserWarning, match=message):
        made(scheduler=scheduler)


@pytest.mark.parametrize(
    "scheduler",
    [
        optax.warmup_cosine_decay_schedule(0.0, 1.0, 10, 100),
        optax.linear_schedule(1.0, 0.0, 3),
        optax.linear_schedule(0.0, 1.0, 100_000),
        lambda count: 0.95**count,
    ],
)
def test_a_scheduler_that_is_a_factor_is_not_warned_of(scheduler):
    made(scheduler=scheduler)  # warnings are errors


# Gradients of one's own


@pytest.mark.full
def test_a_train_step_with_its_own_gradients_updates_by_all_of_the_optimizer():
    class Own(Trainer):
        def train_step(self, batch):
            loss = lambda params: nll(apply(params, batch[0]), batch[1]).mean()
            value, grads = jax.value_and_grad(loss)(self.state.params)
            self.apply_gradients(grads)
            return {"loss": float(value)}

    settings = {
        "optimizer": optax.sgd(1.0, momentum=0.9),
        "config": {"training.max_grad_norm": 0.1, "training.weight_decay": 0.5},
        "scheduler": optax.linear_schedule(1.0, 0.0, 8),
    }
    own, usual = made(Own, **settings), made(**settings)
    histories = [trainer.train(BATCHES, 2)["train_loss"] for trainer in (own, usual)]
    assert histories[0] == pytest.approx(histories[1], rel=1e-5)
    assert int(own.state.step) == int(usual.state.step) == 2 * len(BATCHES)
    for leaf, other in zip(*map(jax.tree.leaves, (own.state, usual.state)), strict=True):
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-6)
    updates, _ = own.tx.update(own.state.params, own.state.opt_state, own.state.params)
    assert jax.tree.structure(updates) == jax.tree.structure(own.state.params)
    with pytest.raises(
        sf.errors.TreeMismatchError, match="apply_gradients: expected gradients in the for"
    ):
        own.apply_gradients({})


def test_a_linen_module_alone_is_refused_with_what_to_write():
    from flax import linen

    with pytest.raises(
        sf.errors.ConfigError, match=r"give Model\(model.apply, model.init\(key, example"
    ):
        made(model=linen.Dense(10))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_epochs": 0}, "num_epochs: expected an integer of at least 1"),
        ({"save_freq": 0}, "save_freq: expected an integer of at least 1"),
        ({"early_stopping_patience": 0}, "early_stopping_patience: expected an integer of at le"),
        ({"callbacks": [1]}, r"callbacks\[0\]: expected a function"),
        ({"train_dataloader": iter(BATCHES)}, "train_dataloader: expected batches that start ag"),
        ({"train_dataloader": dicts(TRAIN, epochs=1)}, "train_dataloader: expected .* without ep"),
        ({"train_dataloader": []}, "train_dataloader: expected at least one batch, got none"),
        ({"train_dataloader": BATCH[0]}, "train_dataloader: expected an iterable of batches"),
        ({"eval_dataloader": 1}, "eval_dataloader: expected an iterable of batches, got int 1"),
        ({"eval_dataloader": iter(EVALUATION)}, "eval_dataloader: expected batches that end, and"),
        ({"eval_dataloader": dicts(TEST)}, "eval_dataloader: expected batches that end"),
        ({"best_model_metric": "loss"}, "best_model_metric: expected a name that begins with"),
        ({"best_model_metric": "eval_score"}, "best_model_metric: expected a name that says"),
        (
            {"best_model_metric": None, "early_stopping_patience": 1},
            "best_model_metric: expected a metric for early_stopping_patience, got None",
        ),
        (
            {"eval_dataloader": None, "best_model_metric": "eval_accuracy"},
            "best_model_metric: expected eval_dataloader, to measure eval_accuracy, got none",
        ),
        (
            {"eval_dataloader": None, "early_stopping_patience": 1},
            "best_model_metric: expected eval_dataloader, to measure eval_loss",
        ),
    ],
)
def test_arguments_of_a_run_are_refused(changes, message):
    usual = {"train_dataloader": BATCHES, "num_epochs": 1, "eval_dataloader": EVALUATION}
    with pytest.raises((sf.errors.ConfigError, sf.errors.DataError), match=message):
        made().train(**usual | changes)


def test_epochs_of_different_lengths_have_no_schedule():
    config = {"training.scheduler_step_per_batch": False}
    trainer = made(config=config, scheduler=optax.constant_schedule(1.0))
    sizes = sf.batches({"inputs": TRAIN["image"], "targets": TRAIN["label"]}, [(0, 50), (4, 40)])
    with pytest.raises(
        sf.errors.ConfigError, match="training.scheduler_step_per_batch: expected True"
    ):
        trainer.train(sizes, 2)


def test_what_overrides_return_is_checked():
    kind = type("Own", (Trainer,), {"evaluate": lambda self, dataloader: 1.0})
    with pytest.raises(
        sf.errors.ConfigError, match="evaluate: expected it to return metrics by name"
    ):
        made(kind).train(BATCHES, 1, EVALUATION)
    kind = type("Own", (Trainer,), {"eval_step": lambda self, batch: None})
    with pytest.raises(sf.errors.ConfigError, match="eval_step: expected metrics by name"):
        made(kind).evaluate(EVALUATION)
    kind = type("Own", (Trainer,), {"eval_step": lambda self, batch: {}})
    with pytest.raises(
        sf.errors.DataError, match="evaluate: expected at least one batch, got none"
    ):
        made(kind).evaluate([])
    for each in (Trainer, kind):
        with pytest.raises(
            sf.errors.ConfigError, match="dataloader: expected an iterable of batches"
        ):
            made(each).evaluate(BATCH[0])
