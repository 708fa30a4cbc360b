import jax.numpy as jnp
import numpy as np
import pytest

from stepfold.loop.writers import values


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (0.1, 0.1),
        (2**70, 2**70),
        (True, 1),
        (np.float64(0.1), 0.1),
        (np.float16(0.5), 0.5),
        (np.int64(2**62), 2**62),
        (np.bool_(True), 1),
        (np.array([3.0]), 3.0),
        (jnp.float32(0.1), float(np.float32(0.1))),
        (jnp.bfloat16(1.5), 1.5),
        (jnp.array([[7]]), 7),
        (jnp.array(True), 1),
    ],
    ids=str,
)
def test_numbers_become_pythons(value, plain):
    (got,) = values.numbers({"x": value}).values()
    assert got == plain
    assert type(got) is type(plain)


@pytest.mark.parametrize("value", ["0.5", None, 1j, np.ones(2), jnp.ones((2, 1)), [1.0], object()])
def test_what_is_no_number_is_named(value):
    with pytest.raises(TypeError, match="eval/loss: expected one real number, got"):
        values.numbers({"eval/loss": value})


def test_a_message_spells_the_value():
    with pytest.raises(TypeError, match=r"loss: expected one real number, got float32\[2,1\]"):
        values.numbers({"loss": jnp.ones((2, 1))})
    with pytest.raises(TypeError, match=r"scalars: expected names of text, got int 3"):
        values.numbers({3: 1.0})
    with pytest.raises(TypeError, match=r"note: expected text, got int 3"):
        values.texts({"note": 3})


@pytest.mark.parametrize("step", [-1, 1.0, "3", None])
def test_a_step_is_an_integer_from_0_on(step):
    with pytest.raises(ValueError, match="step: expected an integer of at least 0, got"):
        values.number_of_step(step)


def test_steps_of_other_libraries():
    assert [values.number_of_step(step) for step in (np.int32(3), jnp.int32(4))] == [3, 4]


def test_a_histogram_is_numpys():
    array = np.random.default_rng(0).normal(size=(20, 30)).astype(np.float32)
    found = values.histograms({"w": array}, {"w": 7})["w"]
    counts, edges = np.histogram(array.astype(np.float64), 7)
    assert found.counts == counts.tolist()
    assert found.edges == edges.tolist()
    assert np.isclose(found.total, array.sum())
    assert np.isclose(found.squares, (array**2).sum())


def test_a_histogram_has_thirty_buckets_where_nothing_is_said():
    arrays = {"w": jnp.arange(100.0, dtype=jnp.bfloat16), "v": np.arange(100)}
    found = values.histograms(arrays, {"v": 5})
    assert [len(one.counts) for one in found.values()] == [30, 5]


@pytest.mark.parametrize(
    ("array", "counts", "edges", "nonfinite"),
    [
        (np.full(3, 2.0), [3], [1.5, 2.5], 0),
        (np.array([np.nan, np.inf]), [0], [-0.5, 0.5], 2),
        (np.zeros(0), [0], [-0.5, 0.5], 0),
        (np.array([np.nan, 0.0, 1.0]), [1, 1], [0.0, 0.5, 1.0], 1),
    ],
)
def test_a_histogram_of_what_has_no_width(array, counts, edges, nonfinite):
    found = values.histograms({"w": array}, {"w": 2})["w"]
    assert found[:3] == (counts, edges, nonfinite)


def test_a_histogram_is_of_real_numbers():
    with pytest.raises(TypeError, match="w: expected an array of real numbers, got str 'ab'"):
        values.histograms({"w": "ab"}, None)
    with pytest.raises(TypeError, match=r"w: expected an array of real numbers, got complex128"):
        values.histograms({"w": np.ones(2, complex)}, None)


def test_images_become_bytes():
    floats = np.array([[[-1.0], [0.0]], [[0.5], [2.0]]])
    found = values.pixels({"a": floats, "b": np.full((3, 4, 5, 3), 7, np.uint8)})
    assert found["a"].tolist() == [[[[0], [0]], [[128], [255]]]]
    assert found["b"].shape == (3, 4, 5, 3)
    assert values.pixels({"a": np.full((1, 1, 1), np.nan)})["a"].item() == 0


@pytest.mark.parametrize(
    "image", [np.zeros((4, 4)), np.zeros((4, 4, 2)), np.zeros((4, 4, 3), int), np.zeros((0, 4, 1))]
)
def test_what_is_no_image_is_named(image):
    with pytest.raises(ValueError, match=r"a: expected images \[H, W, C\] or .*, got \w+64"):
        values.pixels({"a": image})
