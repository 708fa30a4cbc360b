"""A plausible misuse of a public name works as meant, warns or raises; none is wrong in silence.

A misuse is one that a careful reader of a name or a default could commit: a mode, an axis, a dtype,
a unit, a remainder, a schedule or a seed that means something else than it seems to.
"""

import types
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from tests.small import EVAL_STEP, STEP, batches, examples, start

import stepfold as sf
from stepfold.adapter import Trainer, TrainingArguments

pytestmark = pytest.mark.not_optimized
TX = optax.sgd(0.1)


def state_of(params, tx=TX):
    return sf.init_state(params, tx, jax.random.key(0))


# The mask of a batch


def squares(params, batch):
    return ((params["w"] - batch["x"]) ** 2).sum(-1).astype(jnp.float32)


def in_a_scan(params, batch, key):
    def add(sums, row):
        value, weight = row
        return (sums[0] + weight * value, sums[1] + weight), None

    rows = squares(params, batch), batch["mask"].astype(jnp.float32)
    (total, weight), _ = jax.lax.scan(add, (jnp.float32(0), jnp.float32(0)), rows)
    return total / weight


MASK_IS_READ = {
    "in the mean": lambda p, b, k: sf.mean(squares(p, b), b["mask"]),
    "in weights": lambda p, b, k: sf.mean(squares(p, b), 2.0 * b["mask"].astype(jnp.float32)),
    "by a model": lambda p, b, k: jnp.where(b["mask"], squares(p, b), 0.0).sum(),
    "in one term": lambda p, b, k: {"a": sf.mean(squares(p, b), b["mask"]), "b": p["w"] ** 2},
    "in a scan": in_a_scan,
    "in a checkpoint": jax.checkpoint(
        lambda p, b, k: jnp.vdot(squares(p, b), b["mask"].astype("f"))
    ),
    "in jit": jax.jit(lambda p, b, k: sf.mean(squares(p, b), b["mask"]).compute()),
}
MASK_IS_IGNORED = {
    "it is not read": lambda p, b, k: sf.mean(squares(p, b)),
    "a metric reads it": lambda p, b, k: (sf.mean(squares(p, b)), {"n": sf.mean(b["mask"])}),
    "its shape is read": lambda p, b, k: squares(p, b).sum() / b["mask"].size,
    "jit takes it": jax.jit(lambda p, b, k: squares(p, b).mean()),
}
BATCH = {"x": np.ones((4, 2), np.float32), "mask": np.arange(4) < 3}


@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "remat": True}, {"precision": "bf16"}])
def test_a_loss_that_ignores_the_mask_of_its_batch_is_warned_of_once(options, recwarn):
    for loss_fn in MASK_IS_IGNORED.values():
        step = sf.make_train_step(loss_fn, TX, **options)
        state = state_of({"w": jnp.ones(())})
        with pytest.warns(UserWarning, match=r"sf.mean.values, batch.* remainder=.drop.") as caught:
            jax.eval_shape(step, state, BATCH)
        assert len(caught) == 1
        jax.eval_shape(step, state, {name: leaf[:2] for name, leaf in BATCH.items()})
    for loss_fn in MASK_IS_READ.values():
        jax.eval_shape(sf.make_train_step(loss_fn, TX, **options), state, BATCH)
    assert not recwarn


def test_an_evaluation_that_ignores_the_mask_is_warned_of():
    data, state = {"x": np.ones((10, 2))}, state_of({"w": jnp.ones(())})
    padded = lambda: sf.batches(data, 4, epochs=1, remainder="pad")
    with pytest.warns(UserWarning, match="expected a loss that depends on batch"):
        sf.evaluate(sf.make_eval_step(MASK_IS_IGNORED["a metric reads it"]), state, padded())
    sf.evaluate(sf.make_eval_step(MASK_IS_READ["in the mean"]), state, padded())


def test_metrics_that_ignore_the_mask_of_rows_are_warned_of_once(recwarn):
    def loss_fn(params, batch, key):
        error, mask = squares(params, batch), batch["mask"]
        metrics = {"counts padding": sf.mean(error), "masked": sf.mean(error, mask)}
        return sf.mean(error, mask), metrics | {"of no data": sf.mean(params["w"])}

    state = state_of({"w": jnp.ones(())})
    for step in (sf.make_train_step(loss_fn, TX, accumulate=2), sf.make_eval_step(loss_fn)):
        with pytest.warns(UserWarning, match="means that count .* counts padding; ") as caught:
            jax.eval_shape(step, state, BATCH)
        assert len(caught) == 1
        jax.eval_shape(step, state, {name: leaf[:2] for name, leaf in BATCH.items()})
    assert not recwarn


def test_the_mean_of_rows_may_ignore_a_mask_of_tokens(recwarn):
    def loss_fn(params, batch, key):
        error = (params["w"] - batch["x"]) ** 2
        return sf.mean(error, batch["mask"]), {"length": sf.mean(batch["x"].sum(-1))}

    step = sf.make_train_step(loss_fn, TX)
    jax.eval_shape(step, state_of({"w": jnp.ones(())}), {**BATCH, "mask": np.ones((4, 2))})
    assert not recwarn


def test_looking_at_the_mask_changes_no_program():
    state = state_of({"w": jnp.ones(())})
    loss_fn = MASK_IS_READ["in a scan"]
    step = sf.make_train_step(loss_fn, TX, accumulate=2)
    first, second = (jax.jit(lambda *args: step(*args)).lower(state, BATCH) for _ in range(2))
    assert first.as_text() == second.as_text()  # only the first looked


# Names of mesh axes


def test_data_is_an_axis_of_batches_and_an_axis_that_nothing_uses_is_warned_of():
    def plan_on(dims, names, rules=()):
        mesh = sf.make_mesh(dims, names, devices=jax.devices()[:4])
        return mesh, sf.make_sharding(state_of({"w": jnp.ones((64, 64))}), mesh, list(rules))

    mesh, plan = plan_on((2, 2), ("data", "fsdp"))
    rows = sf.shard_batch(np.zeros((8, 2)), mesh)
    assert rows.sharding.shard_shape(rows.shape) == (2, 2)
    assert plan.params["w"].spec == P("fsdp")
    with pytest.warns(UserWarning, match="got {'model': 2}, which no rule and no batch uses"):
        plan_on((2, 2), ("data", "model"))
    plan_on((2, 2), ("data", "model"), [("w$", P("model"))])
    plan_on((2, 2), ("dp", "sp"))  # of activations


def test_a_compiled_step_shows_which_axes_are_used():
    mesh = sf.make_mesh((2, 2), ("batch", "model"), devices=jax.devices()[:4])
    state = state_of({"w": jnp.ones(())})
    plan = sf.make_sharding(state, mesh)  # the batch may use either
    batch = sf.shard_batch(np.ones((4, 4), np.float32), mesh, axes="batch")
    loss = lambda p, b, k: sf.mean(p["w"] * b)
    constrained = lambda p, b, k: loss(p, jax.lax.with_sharding_constraint(b, across), k)
    across = jax.sharding.NamedSharding(mesh, P("batch", "model"))
    with pytest.warns(UserWarning, match="{'model': 2}, which no rule and no batch uses"):
        sf.compile_step(sf.make_train_step(loss, TX), state, batch, sharding=plan)
    sf.compile_step(sf.make_train_step(constrained, TX), state, batch, sharding=plan)


# Dtypes


def test_counts_of_booleans_do_not_wrap_around_when_they_are_merged():
    hits = sf.mean(jnp.ones((), bool), jnp.ones(()))
    hits = hits.replace(total=hits.total * 2.0**30, count=hits.count * 2.0**30)
    metric = sf.mean(jnp.ones(3, bool))
    for _ in range(4):
        metric = jax.jit(lambda a, b: a.merge(b))(metric, hits)
    assert metric.compute() == 1.0
    assert metric.count == 2.0**32


def test_targets_and_weights_are_not_rounded_to_the_dtype_of_the_model():
    target = np.full((2, 1), 100.7, np.float32)
    batch = {"x": np.ones((2, 3), np.float32), "time": np.full(2, 999.0, np.float32)}
    batch |= {"y": target, "loss_weights": target / 1000}

    def loss_fn(params, batch, key):
        predicted = (batch["x"] @ params["w"]).astype(jnp.float32)
        assert batch["x"].dtype == params["w"].dtype == jnp.bfloat16
        error = batch["y"] - predicted
        return sf.mean(error, batch["loss_weights"]), {"time": sf.mean(batch["time"])}

    evaluate = sf.make_eval_step(loss_fn, precision="bf16")
    metrics = jax.jit(evaluate)(state_of({"w": jnp.zeros((3, 1))}), batch)
    assert metrics["loss"].compute() == pytest.approx(100.7)
    assert metrics["time"].compute() == 999.0


def test_float_labels_are_refused_with_advice():
    loss = optax.softmax_cross_entropy_with_integer_labels
    step = sf.make_train_step(lambda p, b, k: sf.mean(loss(b["x"] * p["w"], b["y"])), TX)
    batch = {"x": np.ones((2, 3), np.float32), "y": np.zeros(2, np.float32)}
    with pytest.raises(TypeError, match=r"labels of classes are integers: cast them, as"):
        jax.eval_shape(step, state_of({"w": jnp.ones(())}), batch)


# States


@pytest.mark.parametrize(
    "use",
    [
        lambda state: sf.make_train_step(lambda p, b, k: sf.mean(p["w"]), TX)(state, None),
        lambda state: sf.make_eval_step(lambda p, b, k: sf.mean(p["w"]))(state, None),
        lambda state: sf.init_state(state.params, TX, jax.random.key(0)),
        lambda state: sf.sharding.place(state, jax.sharding.SingleDeviceSharding(jax.devices()[1])),
        lambda state: sf.checkpoint.export_params("not-written.safetensors", state.params),
    ],
)
def test_a_state_that_was_donated_is_named_when_it_is_used_again(use):
    state = state_of({"w": jnp.ones(2)})
    jax.jit(lambda state: state, donate_argnums=0)(state)
    with pytest.raises(
        sf.errors.ConfigError, match="the arrays were donated to an earlier call and are"
    ):
        use(state)


def test_the_type_hints_of_a_state_can_be_read():
    assert typing.get_type_hints(sf.TrainState)["step"] is jax.Array
    assert typing.get_type_hints(sf.init_state)["return"] is sf.TrainState


# Data


def test_one_rule_for_the_dtypes_of_batches():
    examples = [{"n": 1, "x": 0.5, "a": np.float64(2), "row": [1, 2]}] * 2
    batch = next(sf.batches(examples, 2))
    others = [
        sf.collate(examples, length=2),
        next(sf.batches(sf.mix([(examples, 1)]), 2)),
        next(sf.batches(iter(examples), 2)),
    ]
    for other in others:
        assert {name: other[name].dtype for name in batch} == {
            name: array.dtype for name, array in batch.items()
        }
    rows = [{"row": each["row"]} for each in examples]
    assert next(sf.pack(rows, length=2))["row"].dtype == batch["row"].dtype == np.int64
    with jax.enable_x64(True):
        assert sf.collate([[2**40]], length=1)["tokens"].tolist() == [[2**40]]


def test_integers_that_jax_wraps_around():
    says = "id: expected integers that fit int32, which jax reads them as, got 1099511627776"
    with pytest.warns(UserWarning, match=f"batch/{says}, which it wraps around"):
        next(sf.batches({"id": np.array([0, 2**40])}, 2))
    with pytest.raises(
        sf.errors.DataError, match=f"example 1, {says}; make them smaller, or floats"
    ):
        sf.collate([{"id": [0]}, {"id": [2**40]}], length=1)
    with pytest.raises(
        sf.errors.ConfigError, match="pad: expected a value of int32 for id, got 109951162"
    ):
        sf.collate([{"id": [0]}], length=2, pad=2**40)


def test_examples_that_drop_leaves_out_of_every_epoch():
    says = "remainder: by default, 'drop' leaves the last 2 of 10 examples out of every epoch; give"
    with pytest.warns(UserWarning, match=says):
        sf.batches(np.arange(10), 4, epochs=1)
    sf.batches(np.arange(10), 4, epochs=1, remainder="drop")
    sf.batches(np.arange(10), 4, epochs=1, seed=0)
    sf.batches(np.arange(8), 4, epochs=1)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ({"key": jax.random.split(jax.random.key(0), 2)}, "source/key"),
        ([{"key": jax.random.key(0)}] * 2, "key"),
    ],
)
def test_keys_as_examples(source, name):
    advice = "give jax.random.key_data"
    with pytest.raises(
        sf.errors.DataError, match=rf"^{name}: expected numbers, .* got key<fry>.*{advice}"
    ):
        next(sf.batches(source, 2))


def test_masked_values_do_not_count_as_data():
    masked = np.ma.masked_array([1, 2], [False, True])
    for make in (lambda rows: next(sf.batches(rows, 1)), lambda rows: sf.collate(rows, length=2)):
        with pytest.raises(
            sf.errors.DataError, match="expected an array, got a masked array of numpy; g"
        ):
            make([{"x": masked}])


def test_columns_of_pandas_are_not_examples():
    class Series(list):
        iloc = None

    with pytest.raises(
        sf.errors.DataError, match="source: .*; give a dict of its columns, each as np.as"
    ):
        sf.batches(Series([1, 2]), 1)


def test_a_weight_that_rounding_would_change():
    with pytest.raises(
        sf.errors.ConfigError, match="a weight at 1 of at least 5e-08 .* got 1e-12 of it"
    ):
        sf.mix([([1], 1), ([2], 1e-12)])
    assert sf.mix([([1], 1), ([2], 1e-6)]).fingerprint["weights"] == [1_000_000, 1]


@pytest.mark.parametrize(
    "context",
    [
        lambda: jax.default_device(jax.devices()[-1]),
        lambda: jax.enable_x64(True),
        lambda: jax.set_mesh(jax.make_mesh((1,), ("data",))),
        lambda: jax.numpy_dtype_promotion("strict"),
    ],
    ids=["device", "x64", "mesh", "promotion"],
)
def test_prefetched_batches_are_made_in_the_contexts_of_the_loop(context):
    def make():
        promotes = jax.config.jax_numpy_dtype_promotion.value
        yield jnp.arange(2.0), jax.sharding.get_mesh().axis_names, promotes

    with context():
        array, *settings = next(sf.prefetch(make()))
        expected, *own = next(make())
    assert (array.devices(), array.dtype, settings) == (expected.devices(), expected.dtype, own)


def test_contexts_entered_after_the_first_prefetched_batch():
    with sf.prefetch([np.ones(2)] * 4, sharding=jax.device_put) as stream:
        next(stream)
        with (
            jax.default_device(jax.devices()[-1]),
            pytest.warns(
                UserWarning, match="contexts .* changed since: default_device was None and"
            ),
        ):
            next(stream)


# Checkpoints


def save_losses(folder, **options):
    """Save steps 1 to 3 with losses 3, 1 and 2; return the series."""
    with sf.Checkpoints(folder, **options) as series:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
            series.save(
                {"w": jnp.full(2, step)}, step=step, metrics={"loss": loss, "fluency": loss}
            )
    return series


@pytest.mark.parametrize(("name", "best"), [("perplexity", 2), ("eval/wer", 2), ("bleu", 1)])
def test_the_best_step_is_that_of_the_metric_s_own_direction(tmp_path, name, best):
    with sf.Checkpoints(tmp_path, keep=1, best=name) as series:
        for step, value in ((1, 3.0), (2, 1.0), (3, 2.0)):
            series.save({"w": jnp.ones(2)}, step=step, metrics={name: value})
    assert series.best_step() == best
    assert sf.restore(tmp_path, {"w": jnp.ones(2)}, step="best").step == best


def test_a_metric_with_an_uncertain_direction_needs_a_mode(tmp_path):
    for make in (
        lambda **mode: sf.Checkpoints(tmp_path, best="fluency", **mode),
        lambda **mode: sf.hooks.stop_early("fluency", patience=1, **mode),
    ):
        with pytest.raises(
            sf.errors.ConfigError, match="mode='min' if lower is better, mode='max' if"
        ):
            make()
        make(mode="max")
    save_losses(tmp_path)
    like = {"w": jnp.zeros(2, int)}
    with pytest.raises(sf.errors.ConfigError, match=r"give best=\('fluency', 'min'\) or"):
        sf.restore(tmp_path, like, step="best", best="fluency")
    assert sf.restore(tmp_path, like, step="best", best=("fluency", "max")).step == 1


def test_the_best_is_restored_only_by_that_step(tmp_path):
    save_losses(tmp_path)
    with pytest.raises(sf.errors.ConfigError, match="best: expected step='best' to go with it"):
        sf.restore(tmp_path, {"w": jnp.zeros(2, int)}, best="loss")  # not the newest


def test_a_ranking_by_a_metric_that_is_never_saved_warns(tmp_path):
    with pytest.warns(
        RuntimeWarning,
        match="no step is ranked, since none was saved with the metric 'eval/loss' of",
    ):
        save_losses(tmp_path, best="eval/loss")


def test_a_schedule_of_epochs_without_epochs_warns(tmp_path):
    with (
        pytest.warns(
            RuntimeWarning, match="nothing was saved, since due was called without an epoch"
        ),
        sf.Checkpoints(tmp_path, every_epochs=1) as series,
    ):
        assert not any(series.due(step) for step in range(1, 20))


@pytest.mark.parametrize(
    "options", [{"keep_best": 3}, {"keep": None, "keep_every": 10}, {"mode": "max"}]
)
def test_options_of_retention_without_effect_are_refused(options):
    with pytest.raises(sf.errors.ConfigError, match="to go with it"):
        sf.Checkpoints("x", **options)


def test_reading_a_series_that_is_still_being_copied_leaves_it_as_it_is(tmp_path):
    for step in (1, 2):
        sf.save(tmp_path, {"w": np.full(2, step)}, step=step)
    file = tmp_path / "2/state/files.json"
    content = file.read_bytes()
    file.unlink()
    with pytest.warns(RuntimeWarning, match="step 2 is damaged, and an older one is taken"):
        sf.restore(tmp_path, {"w": np.zeros(2, int)})
    file.write_bytes(content)
    assert sf.restore(tmp_path, {"w": np.zeros(2, int)}).step == 2


def test_a_path_and_its_url_name_one_series(tmp_path):
    sf.save(tmp_path / "a", {"w": np.ones(2)}, step=1)
    assert sf.checkpoint.latest_step(f"file://{tmp_path}/a") == 1
    sf.save(f"file://{tmp_path}/b", {"w": np.ones(2)}, step=1)  # as a bucket has it
    assert sf.checkpoint.latest_step(tmp_path / "b") == 1


def test_a_cast_to_a_narrower_range_warns(tmp_path):
    sf.save(tmp_path, {"w": np.array([1.0, 1e6], np.float32)}, step=1)
    with pytest.warns(RuntimeWarning, match="w: 1 of 2 values are beyond the range of float16"):
        sf.restore(tmp_path, {"w": np.zeros(2, np.float16)}, cast=True)


def test_saving_in_a_traced_function_is_refused(tmp_path):
    with pytest.raises(
        sf.errors.ConfigError, match="w: expected an array, got a tracer; save outside"
    ):
        jax.eval_shape(lambda x: sf.save(tmp_path, {"w": x}, step=1), jnp.ones(2))


# The loop


def fit(**options):
    given = options.pop("batches", None) or batches()
    return sf.fit(STEP, start(), given, **{"steps": 6, **options})


LOSSES = {2: 1.0, 4: 2.0, 6: 3.0}
MEASURE = sf.Evaluation(lambda state: {"loss": LOSSES[int(state.step)]}, every=2)


def test_the_best_step_is_saved_though_the_schedule_has_no_save_there(tmp_path):
    plan = sf.Checkpoints(tmp_path, every=3, keep=1, best="eval/loss")
    assert fit(evaluation=MEASURE, checkpoints=plan).best == 2
    assert sf.restore(tmp_path, start(), step="best").step == 2


def test_a_best_metric_that_is_measured_only_at_the_end_ranks_the_last_step(tmp_path):
    plan = sf.Checkpoints(tmp_path, every=3, best="eval/loss")
    own = sf.Evaluation(lambda state: {"loss": 1.0})
    assert (
        fit(batches=batches(epochs=1, size=4), evaluation=own, checkpoints=plan, steps=3).best == 3
    )


def test_another_model_in_a_used_directory_is_sent_to_another_directory(tmp_path):
    plan = {"run_dir": tmp_path, "checkpoints": sf.Checkpoints(every=3)}
    fit(**plan)
    other = jax.tree.map(lambda leaf: leaf, start())._replace(params={"v": np.ones((), np.float32)})
    with pytest.raises(
        sf.errors.TreeMismatchError, match="to train another model, give another directo"
    ):
        sf.fit(STEP, other, batches(), steps=9, **plan)


def test_an_evaluation_hook_of_a_kind_that_there_is_not_is_refused():
    with pytest.raises(
        sf.errors.ConfigError, match="every: kind: expected one of train, eval, got 'evl"
    ):
        fit(evaluation=MEASURE, hooks=sf.hooks.every(2, print, kind="evl"))


def test_a_writer_to_the_file_that_fit_writes_is_refused(tmp_path):
    hook = sf.log_to(sf.writers.jsonl(tmp_path / "metrics.jsonl"))
    with pytest.raises(
        sf.errors.ConfigError, match="expected writers to other files than those that fit"
    ):
        fit(run_dir=tmp_path, hooks=hook)


def test_a_thinned_writer_has_the_last_interval_of_batches_of_unknown_number():
    rows = []

    class Rows(sf.writers.Writer):
        def write_scalars(self, step, scalars):
            rows.append(step)

    given = (batch for batch in [*batches(epochs=2)])
    fit(batches=given, steps=None, log_every=1, hooks=sf.log_to(Rows(), every=5))
    assert rows == [5, 8]


def test_a_metric_of_some_batches_is_the_mean_over_those():
    def measure(state, batch):
        names = ("loss", "odd") if batch["x"][0] > 1 else ("loss",)
        return {name: sf.mean(batch["x"]) for name in names}

    with jax.disable_jit():
        found = sf.evaluate(measure, start(), [{"x": np.float32([x])} for x in (0, 2, 4)])
    assert found == {"loss": 2.0, "odd": 3.0}


def test_an_evaluation_does_not_depend_on_how_batches_are_padded():
    whole = sf.evaluate(EVAL_STEP, start(), [examples(10)])
    ragged = sf.evaluate(
        EVAL_STEP, start(), sf.batches(examples(10), 4, epochs=1, remainder="keep")
    )
    assert whole == pytest.approx(ragged)


# The trainer

DATA = {"x": np.ones((16, 3), np.float32), "y": np.arange(16, dtype=np.float32)}


def error_fn(params, batch, key):
    return sf.mean((batch["x"] @ params["w"] - batch["y"]) ** 2, batch["mask"])


def trainer(kind=Trainer, given=None, **fields):
    fields = {"max_steps": 4, "total_batch_size": 4, "progress_bar_type": "none", **fields}
    usual = {"model": {"w": jnp.ones(3)}, "dataset_train": DATA, "loss_fn": error_fn}
    arguments = TrainingArguments(**fields)
    return kind(arguments, devices=jax.devices()[:1], **{**usual, **(given or {})})


TRAINING = types.SimpleNamespace(max_grad_norm=1.0)
BATCHES = [{"x": np.ones((8, 3)), "y": np.ones(8)} for _ in range(4)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"config": types.SimpleNamespace(training=TRAINING)}, "config: .* got training.max_grad"),
        ({"config": {"training.max_grad_norm": 1.0}}, "config: .* got training.max_grad_norm"),
        ({"config": TrainingArguments()}, "config: expected the configuration of the model"),
        ({"dataset_train": sf.batches(DATA, 8)}, "expected a dataset of single examples, got batc"),
        (
            {"dataset_eval": sf.prefetch(sf.batches(DATA, 8, epochs=1))},
            "expected a dataset of single examples, got batches: Prefetch",
        ),
        (
            {"dataset_eval": sf.workers(sf.batches(DATA, 8, epochs=1), 2)},
            "expected a dataset of single examples, got batches: Workers",
        ),
    ],
)
def test_arguments_of_a_trainer_that_would_be_ignored(given, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        trainer(given=given)


def test_a_list_of_batches_as_a_dataset():
    with pytest.warns(UserWarning, match="each item looks like a batch of 8 examples"):
        trainer(given={"dataset_train": BATCHES})


@pytest.mark.parametrize(
    "example",
    [
        {"tokens": np.ones(9), "labels": np.ones(9)},
        {"image": np.ones((8, 8, 3)), "mask": np.ones((8, 8))},
        {"x": np.ones(3), "y": 1.0},
        {"x": np.ones((1, 3)), "y": np.ones(1)},
        {"image": np.ones((8, 8))},
    ],
    ids=lambda example: "-".join(example),
)
def test_examples_that_are_no_batches(example, recwarn):
    trainer(given={"dataset_train": [example] * 4})
    assert not recwarn.list


def test_the_collator_of_a_dataset_is_used():
    class Rows(list):
        def data_collator(self, examples):
            return {"y": np.float32([example["y"] for example in examples]), "collated": 1}

    data = Rows({name: values[i] for name, values in DATA.items()} for i in range(16))
    given = {"dataset_train": data, "dataset_eval": [*data]}
    made = trainer(given=given)
    assert next(made.dataloader_train)["collated"] == 1
    assert next(iter(made.dataloader_eval))["collated"] == 1
    with pytest.raises(
        sf.errors.ConfigError, match="max_length: expected None with a data_collator"
    ):
        trainer(given=given, max_length=8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"resume_from_checkpoint": True}, "resume_from_checkpoint=True and output_dir=None"),
        (
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4},
            "write total_batch_size, the examples of an update over all microbatches",
        ),
        ({"batch_size": 8, "gradient_accumulation_steps": 4}, "batch_size: expected total_batch_s"),
        ({"dtype": "float8_e4m3fn"}, "dtype: expected a floating dtype"),
        ({"warmup_ratio": 0.1}, "warmup_ratio: .*write warmup_steps, this part of all steps"),
        ({"warmup_steps": 0.1}, "warmup_steps: expected an integer"),
        ({"adam_beta2": 0.9}, "adam_beta2: .*write extra_optimizer_kwargs"),
    ],
    ids=lambda case: "-".join(case) if isinstance(case, dict) else "",
)
def test_fields_of_arguments_that_would_mean_something_else(fields, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        TrainingArguments(**fields)


def test_a_resume_without_a_checkpoint(tmp_path):
    made = trainer(output_dir=tmp_path, resume_from_checkpoint=True, max_steps=1)
    with pytest.warns(UserWarning, match="has no checkpoint, so the run starts from the beginning"):
        made.train()


@pytest.mark.parametrize(
    ("fields", "given", "message"),
    [
        ({"eval_steps": 2}, {}, "eval_steps: expected data and a step to evaluate with, got none"),
        ({"evaluation_strategy": "epoch"}, {}, "evaluation_strategy: expected data and a step"),
        (
            {"early_stopping_patience": 2},
            {"dataset_eval": DATA},
            "early_stopping_patience: expected eval/loss to be measured during the run",
        ),
        (
            {"metric_for_best_model": "loss", "save_steps": 1},
            {"dataset_eval": DATA},
            "metric_for_best_model: expected eval/loss to be measured during the run",
        ),
        (
            {"metric_for_best_model": "train.loss", "output_dir": None},
            {},
            "metric_for_best_model: expected checkpoints of which the best is kept",
        ),
    ],
    ids=["eval_steps", "epoch", "patience", "best", "unkept"],
)
def test_evaluations_that_would_not_happen_in_time(fields, given, message, tmp_path):
    with pytest.raises(sf.errors.ConfigError, match=message):
        trainer(given=given, **{"output_dir": tmp_path, **fields}).train()


def test_rules_beside_a_replicated_state():
    with pytest.raises(
        sf.errors.ConfigError, match="rules: expected None with auto_shard_states=False"
    ):
        trainer(given={"rules": [("", jax.P())]}, auto_shard_states=False)


@pytest.mark.parametrize("field", ["shuffle_seed_train", "step_start_point"])
def test_a_stream_has_its_own_order_and_start(field):
    def stream():
        return ({name: values[i] for name, values in DATA.items()} for i in range(16))

    with pytest.raises(sf.errors.ConfigError, match=f"{field}: expected no value with a stream"):
        trainer(given={"dataset_train": stream}, **{field: 2})


def test_no_term_of_the_loss_begins_with_aux():
    terms = lambda params, batch, key: dict.fromkeys(("ce", "router_aux"), params["w"].sum())
    with pytest.raises(sf.errors.ConfigError, match="aux_loss_enabled: .* got ce, router_aux"):
        trainer(given={"loss_fn": terms}, aux_loss_enabled=False).train()


def test_a_method_that_another_trainer_calls():
    class Own(Trainer):
        def compute_loss(self, model, inputs):
            """Return a loss, as in Hugging Face's trainer."""

    with pytest.warns(UserWarning, match="Own.compute_loss: a run calls no method of this name"):
        trainer(Own)

    class CallsIt(Own):
        def configure_functions(self):
            return super().configure_functions()

    trainer(CallsIt)
