"""The loss contract: what `mean` computes, and how each breach is refused."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clu import metrics as clu_metrics
from clu.metrics import Average
from tests.small import ones

import stepfold as sf
from stepfold.core.loss import checked, share_of, total_of

KEY = jax.random.wrap_key_data(np.zeros(2, np.uint32))

# mean


def test_mean_keeps_total_and_weight_apart(run):
    average = run(sf.mean)(jnp.array([1.0, 2.0, 4.0]), jnp.array([1.0, 0.5, 0.0]))
    assert (average.total, average.count) == (2.0, 1.5)
    average = run(sf.mean)(jnp.array([1.0, 2.0]), jnp.array([3.0, -1.0]))  # any weights
    assert (average.total, average.count) == (1.0, 2.0)
    assert jnp.isnan(sf.mean(jnp.ones(2), jnp.array([1.0, jnp.nan])).total)


def test_mean_without_a_mask_weighs_each_value_alike(run):
    average = run(sf.mean)(jnp.ones((2, 3)))
    assert (average.total, average.count) == (6.0, 6.0)
    assert sf.mean(2.5).compute() == 2.5


@pytest.mark.parametrize("mask", [[True, False, True], [[True], [False], [True]]])
def test_a_mask_covers_the_leading_axes_and_is_repeated_along_axes_of_one(run, mask):
    average = run(sf.mean)(jnp.arange(6.0).reshape(3, 2), jnp.array(mask))
    assert (average.total, average.count) == (0 + 1 + 4 + 5, 4)


@pytest.mark.parametrize("where", [None, [True, False, True], [1, 0, 1]])
def test_booleans_are_counted(where):
    where = None if where is None else jnp.array(where)
    average = sf.mean(jnp.array([True, True, False]), where)
    assert average.total.dtype == average.count.dtype == jnp.float32
    assert average.compute() == np.float32(2 / 3 if where is None else 1 / 2)


def test_a_batch_of_more_booleans_than_float32_counts_one_by_one_is_counted():
    many = jax.jit(lambda start: sf.mean(start + jnp.arange(2**24 + 64) >= 0))(0)
    assert many.total == many.count == 2**24 + 64


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_sums_are_float32_at_least(dtype):
    average = sf.mean(jnp.ones(4096, dtype), jnp.ones(4096, dtype))
    assert average.total.dtype == average.count.dtype == jnp.float32
    assert average.total == 4096


def test_weights_count_in_full_however_narrow_the_values():
    exact = sf.mean(jnp.ones(2, jnp.bfloat16), jnp.array([1.0, 1 + 2**-12]))
    assert exact.total == exact.count == 2 + 2**-12


def test_sums_of_float64_stay_float64():
    with jax.enable_x64(True):
        assert sf.mean(np.ones(3)).total.dtype == jnp.float64
        assert sf.mean(np.ones(3), np.ones(3, np.float32)).count.dtype == jnp.float64


@pytest.mark.parametrize(
    ("values", "where", "message"),
    [
        (ones((2, 3)), ones(3), r"got float32\[3\] for values float32\[2,3\]"),
        (
            ones(3),
            ones((3, 1)),
            r"leading axes, got float32\[3,1\] for values float32\[3\]",
        ),
        (ones(3, np.complex64), None, r"expected real numbers as values, got complex64\[3\]"),
        (ones(3), ones(3, np.complex64), r"expected real numbers as where, got complex64\[3\]"),
        (KEY, None, r"expected real numbers as values, got key<fry>"),
    ],
)
def test_what_has_no_mean_is_refused(values, where, message):
    with pytest.raises(sf.errors.LossError, match=message):
        sf.mean(values, where)


# terms and their sum


def test_terms_add_up_each_with_its_own_denominator(run):
    terms = {
        "a": Average(total=jnp.float32(6), count=jnp.float32(3)),
        "b": Average(total=jnp.float32(1), count=jnp.float32(4)),
        "none": Average(total=jnp.float32(0), count=jnp.float32(0)),
    }
    assert run(total_of)(terms) == 2.25


def test_terms_of_different_precision_add_up():
    with jax.enable_x64(True):
        terms = {"a": sf.mean(np.float64(1.0)), "b": sf.mean(np.float32(2.0))}
        assert total_of(terms).dtype == jnp.float64


def test_shares_without_any_weight_have_the_gradients_of_the_whole():
    def terms(p):
        return {"a": Average(total=jnp.ones(()), count=p)}

    assert jax.grad(lambda p: total_of(terms(p)))(0.0) == 0
    assert jax.grad(lambda p: share_of(terms(p), terms(0.0)))(0.0) == 0


def test_a_name_of_two_labels_is_refused_since_one_of_their_means_would_be_lost():
    labels, message = jnp.arange(2), "mean_by: expected a different name for each label, got web, w"
    with pytest.raises(sf.errors.LossError, match=message):
        sf.mean_by(jnp.ones(2), labels, ["web", "web"])
    assert len(sf.mean_by(jnp.ones(2), labels, ["web", "code"])) == 2


# the contract


def call(loss_fn, *, stateful=False, model_state=None):
    args = (jnp.ones(2), jnp.ones((4, 2)), jax.random.key(0))
    return checked(loss_fn, stateful=stateful)(*args, *([model_state] if stateful else []))


@pytest.mark.parametrize(
    "loss",
    [
        lambda p: p.sum(),
        lambda p: 2.0,
        lambda p: sf.mean(p),
        lambda p: {"loss": p.sum()},
        lambda p: {"a": sf.mean(p), "b": p.sum()},
        lambda p: Average(total=p.sum(), count=jnp.int32(2)),
        lambda p: p.sum().astype(jnp.bfloat16),
        lambda p: Average(total=p.sum(), count=jnp.bfloat16(2)),
        lambda p: Average(total=p.sum(), count=True),
    ],
)
def test_every_form_of_a_loss_is_read_as_float32_terms(loss):
    terms, metrics = jax.jit(lambda: call(lambda p, b, k: loss(p)))()
    assert metrics == {}
    for term in terms.values():
        assert isinstance(term, Average)
        assert term.total.dtype == term.count.dtype == jnp.float32
        assert not term.total.weak_type


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (ones(3), r"loss: expected a scalar, got float32\[3\]; return sf.mean"),
        (ones((), np.int32), r"loss: expected a floating number, got int32\[\]"),
        (3, r"loss: expected a floating number, got int32\[\]"),
        (ones((), np.complex64), r"loss: expected a floating number, got complex64\[\]"),
        (None, r"loss: expected a number, got NoneType None"),
        (np.array("x"), r"loss: expected a number, got <U1"),
        (jax.ShapeDtypeStruct((), jnp.float32), r"loss: expected a number, got float32\[\]"),
        (Average(total=ones(), count=None), r"loss.count: expected a real scalar, got NoneT"),
        ("0.5", r"loss: expected a number, got str '0.5'"),
        ([ones()], r"loss: expected a number, got list"),
        ({}, r"loss: expected at least one term, got an empty dict"),
        ({1: ones()}, r"loss: expected the terms' names as strings, got \[1\]"),
        ({"nll": ones(3)}, r"loss/nll: expected a scalar, got float32\[3\]"),
        ({"nll": {"a": ones()}}, r"loss/nll: expected a number, got dict"),
        (Average(total=ones(2), count=ones()), r"loss.total: expected a scalar"),
        (Average(total=ones(), count=ones(2)), r"loss.count: expected a real scalar"),
        (Average(total=ones(), count=ones((), np.complex64)), r"loss.count: .*got complex64"),
        (Average(total=ones(), count=KEY), r"loss.count: .*got key<fry>"),
        ((ones(), {}, ()), r"a tuple of 3; a loss that returns model_state needs stateful=T"),
        ((ones(),), r"expected the loss or \(loss, metrics\), got a tuple of 1"),
        ((ones(), [1]), r"metrics: .* got list .*; return \(loss, metrics\) in"),
        (
            (ones(), {"acc": ones(3)}),
            r"metrics/acc: expected a number or a clu.*got float32\[3\]; wrap values as sf.mean",
        ),
        ((ones(), {"acc": "high"}), r"metrics/acc: expected a number or .*got str 'high'"),
        ((ones(), {"z": 1j}), r"metrics/z: expected a number or .*got complex 1j"),
        (
            (ones(), {"key": KEY}),
            r"metrics/key: expected a number or .*key",
        ),
        (
            (ones(), {0: Average(total=ones(), count=ones())}),
            r"metrics: expected names as strings, got 0",
        ),
    ],
)
def test_a_loss_that_breaks_the_contract_is_refused_while_traced(returned, message):
    with pytest.raises(sf.errors.LossError, match=message):
        jax.jit(lambda: call(lambda p, b, k: returned))()


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"n": ones(2)}, r"model_state/m: missing, expected int32\[\]\nReturn every leaf"),
        (
            {"n": ones(3), "m": 0},
            r"model_state/n: expected float32\[2\], got float32\[3\]\nA state keeps its shapes",
        ),
        (
            {"n": ones(2, jnp.bfloat16), "m": ones((), np.int32)},
            r"model_state/n: expected float32\[2\], got bfloat16\[2\]\nCast each leaf",
        ),
        ({"n": ones(2), "m": 0, "x": 1.0}, r"model_state/x: unexpected float 1.0"),
        (None, r"model_state/n: missing"),
    ],
)
def test_a_model_state_that_changes_its_form_is_refused(new, message):
    old = {"n": jnp.zeros(2), "m": jnp.zeros((), int)}
    loss_fn = lambda p, b, k, s: (p.sum(), {}, new)
    with pytest.raises(sf.errors.LossError, match=message):
        jax.jit(lambda: call(loss_fn, stateful=True, model_state=old))()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (jnp.ones(()), r"expected \(loss, metrics, model_state\), got float32\[\]"),
        ((jnp.ones(()), {}), r"expected \(loss, metrics, model_state\), got a tuple of 2"),
    ],
)
def test_a_stateful_loss_returns_three_things(returned, message):
    with pytest.raises(sf.errors.LossError, match=message):
        jax.jit(lambda: call(lambda p, b, k, s: returned, stateful=True, model_state=()))()


@pytest.mark.parametrize(
    ("loss_fn", "stateful", "message"),
    [
        (
            lambda params, batch: 0.0,
            False,
            r"expected loss_fn\(params, batch, key\), got <lambda>\(params, batch\)$",
        ),
        (
            lambda p, b, k, s: 0.0,
            False,
            r"got <lambda>\(p, b, k, s\); give stateful=True, for a model state",
        ),
        (
            lambda p, b, k: 0.0,
            True,
            r"key, model_state\), got <lambda>\(p, b, k\); leave out stateful=True",
        ),
        (0.5, False, r"expected a function loss_fn\(params, batch, key\), got float 0.5"),
    ],
)
def test_a_function_of_other_arguments_is_refused_when_built(loss_fn, stateful, message):
    with pytest.raises(sf.errors.LossError, match=message):
        checked(loss_fn, stateful=stateful)


def test_a_built_in_without_a_signature_is_let_through():
    assert callable(checked(max))


def test_a_metric_that_is_no_pytree_is_refused():
    class Bare(clu_metrics.Metric):
        pass

    message = "metrics/m: expected a metric that is a pytree, got Bare .*flax.struct.dataclass"
    with pytest.raises(sf.errors.LossError, match=message):
        jax.jit(lambda: call(lambda p, b, k: (p.sum(), {"m": Bare()})))()


def test_an_axis_name_that_is_not_mapped_is_refused_with_the_error_of_jax_as_its_cause():
    twice = checked(checked(lambda params, batch, key: jax.lax.psum(params.sum(), "rows")))
    with pytest.raises(sf.errors.LossError, match="got axis 'rows', which is not mapped") as raised:
        twice(jnp.ones(2), None, jax.random.key(0))
    assert isinstance(raised.value.__cause__, NameError)
    mapped = jax.vmap(twice, in_axes=(0, None, None), axis_name="rows")
    terms, _ = mapped(jnp.ones((3, 2)), None, jax.random.key(0))
    assert terms["loss"].total.tolist() == [6.0] * 3
    with pytest.raises(NameError, match="another_name"):
        checked(lambda params, batch, key: another_name)(jnp.ones(2), None, None)  # noqa: F821


def test_the_members_of_a_collection_are_metrics():
    kinds = clu_metrics.Collection.create(m=clu_metrics.Average.from_output("values"))
    collection = kinds.single_from_model_output(values=jnp.arange(3.0))
    _, metrics = call(lambda p, b, k: (p.sum(), collection))
    assert metrics == {"m": collection.m}


@pytest.mark.parametrize("value", [0.5, np.float16(0.5), np.array(0.5), jnp.array(0.5)])
def test_a_number_is_a_metric_of_weight_one(value):
    _, metrics = call(lambda p, b, k: (p.sum(), {"rate": value}))
    assert isinstance(metrics["rate"], Average)
    rate, want = metrics["rate"], sf.mean(value)
    chex.assert_trees_all_equal((rate.total, rate.count), (want.total, want.count))


@pytest.mark.parametrize("value", [True, 3, jax.device_put(np.int32(3))])
def test_a_count_and_a_flag_are_metrics_too(value):
    _, metrics = call(lambda p, b, k: (p.sum(), {"count": value}))
    assert float(metrics["count"].total) == float(value)
    assert int(metrics["count"].count) == 1


def test_numbers_as_metrics_are_averaged_over_microbatches():
    def loss_fn(params, batch, key):
        return sf.mean(params * batch), {"rate": 0.25, "largest": batch.max()}

    batch = jnp.arange(8.0)
    for n in (1, 2, 4):
        grad_fn = jax.jit(sf.make_grad(loss_fn, accumulate=n))
        _, _, metrics, _ = grad_fn(jnp.ones(()), batch, jax.random.key(0), ())
        assert metrics["rate"].compute() == 0.25
        # microbatch i has the examples i, i + n, …, of which the last is the largest
        assert metrics["largest"].compute() == sum(range(8 - n, 8)) / n
        assert metrics["largest"].count == n


def test_a_collection_with_a_loss_of_its_own_is_reported_next_to_that_of_the_step():
    fields = {"loss": "nll", "seen": "nll"}
    kinds = clu_metrics.Collection.create(
        **{name: clu_metrics.Average.from_output(output) for name, output in fields.items()}
    )

    def loss_fn(params, batch, key):
        nll = params * batch
        return nll.sum(), kinds.single_from_model_output(nll=nll)

    tx, batch = optax.sgd(0.1), jnp.arange(4.0)
    state = sf.init_state(jnp.array(2.0), tx, jax.random.key(0))
    trained = sf.make_train_step(loss_fn, tx, accumulate=2)(state, batch)[1]
    metrics = sf.make_eval_step(loss_fn)(state, batch)
    for name in ("metrics/loss", "seen"):
        assert int(trained[name].total) == int(metrics[name].total) == 12
        assert int(trained[name].count) == int(metrics[name].count) == 4
    assert metrics["loss"].compute() == 12.0
    with pytest.raises(
        sf.errors.LossError, match="metrics/loss: the name is taken; the step itself"
    ):
        sf.make_eval_step(lambda p, b, k: (p, {"loss": 1.0}))(state, None)


@pytest.mark.parametrize(
    ("loss_fn", "kind", "said"),
    [
        (lambda p, b: b["mask"], KeyError, r"called with batch/x float32\[2\]; .* add a mask"),
        (lambda p, b: b["image"], KeyError, r"(?m)loss_fn was called with batch/x float32\[2\]$"),
        (lambda p, b: p @ b["x"][:1], TypeError, r"(?m)was called with batch/x float32\[2\]$"),
        (lambda p, b: 0.5 * sf.mean(p), TypeError, "sf.mean gives a total and a weight, to be div"),
        (lambda p, b: sf.mean(p) + sf.mean(p), TypeError, 'return several as {"a": sf.mean'),
        (lambda p, b: float(p.sum()), TypeError, "it is traced, and .* keep to jax.numpy, return"),
        (lambda p, b: np.sum(np.asarray(p)), TypeError, "it is traced, and its arrays have no val"),
        (lambda p, b: 1.0 if p[0] > 0 else 0.0, TypeError, "choose by jnp.where instead of if"),
    ],
)
def test_what_a_loss_function_raises_says_what_it_was_given(loss_fn, kind, said):
    twice = checked(checked(lambda params, batch, key: loss_fn(params, batch)))
    with pytest.raises(kind, match=said) as raised:
        jax.eval_shape(twice, jnp.ones(2), {"x": jnp.ones(2)}, jax.random.key(0))
    assert sum("loss_fn" in note for note in raised.value.__notes__) == 1


def test_of_many_leaves_the_first_are_named_and_errors_of_stepfold_are_left_alone():
    loss_fn = checked(lambda params, batch, key: batch["x"])
    with pytest.raises(TypeError, match=r"batch/0 int 0, .*, batch/7 int 7, …$"):
        loss_fn(jnp.ones(2), list(range(10)), jax.random.key(0))
    with pytest.raises(sf.errors.LossError) as raised:
        call(lambda p, b, key: sf.mean(p, b))
    assert not hasattr(raised.value, "__notes__")
