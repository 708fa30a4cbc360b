"""A plausible misuse of a public function works as meant, warns, or is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stepfold as sf

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
    with pytest.raises(sf.DataError, match=f"example 1, {says}; make them smaller, or floats"):
        sf.collate([{"id": [0]}, {"id": [2**40]}], length=1)
    with pytest.raises(
        sf.ConfigError, match="pad: expected a value of int32 for id, got 109951162"
    ):
        sf.collate([{"id": [0]}], length=2, pad=2**40)


def test_examples_that_drop_leaves_out_of_every_epoch():
    says = "remainder: expected a choice for the last 2 of 10 examples, got none, and 'drop' leaves"
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
        sf.DataError, match=rf"^{name}: expected numbers, .* got key<fry>.*{advice}"
    ):
        next(sf.batches(source, 2))


def test_masked_values_do_not_count_as_data():
    masked = np.ma.masked_array([1, 2], [False, True])
    for make in (lambda rows: next(sf.batches(rows, 1)), lambda rows: sf.collate(rows, length=2)):
        with pytest.raises(sf.DataError, match="expected an array, got a masked array of numpy; g"):
            make([{"x": masked}])


def test_columns_of_pandas_are_not_examples():
    class Series(list):
        iloc = None

    with pytest.raises(sf.DataError, match="source: .*; give a dict of its columns, each as np.as"):
        sf.batches(Series([1, 2]), 1)


def test_a_weight_that_rounding_would_change():
    with pytest.raises(sf.ConfigError, match="a weight at 1 of at least 5e-08 .* got 1e-12 of it"):
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
                UserWarning, match="contexts .* got others: default_device was None and is"
            ),
        ):
            next(stream)
