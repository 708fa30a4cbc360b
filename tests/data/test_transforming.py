"""Functions of an example, and what they draw."""

from functools import partial

import numpy as np
import pytest

import stepfold as sf
from stepfold.data.transforming import read_transform


def draw(example, rng):
    return rng.integers(1 << 60)


@pytest.mark.parametrize(
    ("function", "draws"),
    [
        (lambda example: example, False),
        (lambda example, scale=2: example, False),
        (lambda *args: args[0], False),
        (partial(lambda scale, example: example, 2), False),
        (np.float32, False),
        (abs, False),
        (draw, True),
        (partial(lambda scale, example, rng: rng, 2), True),
    ],
)
def test_a_generator_is_given_to_what_has_two_arguments(function, draws):
    transform = read_transform(function, 0)
    assert (transform.seed is not None) is draws
    assert len(transform([1, 2], [0, 1], 0)) == 2


def test_what_is_drawn_follows_from_seed_epoch_and_index_alone():
    transform = read_transform(draw, 3)
    together = transform([None] * 4, [5, 6, 7, 2**40], 1)
    for index, drawn in zip([5, 6, 7, 2**40], together, strict=True):
        assert transform([None], [index], 1) == [drawn]
    others = [
        *transform([None] * 4, [5, 6, 7, 2**40], 2),
        *read_transform(draw, 4)([None] * 4, [5, 6, 7, 2**40], 1),
    ]
    assert len({*together, *others}) == 12


def test_what_is_drawn_is_even_over_examples():
    drawn = read_transform(lambda example, rng: rng.normal(), 0)([None] * 4000, range(4000), 0)
    assert abs(np.mean(drawn)) < 0.06
    assert abs(np.var(drawn) - 1) < 0.08
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.06


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (3, "transform: expected a function, got int 3"),
        (draw, "expected a seed for the random generator .* got seed=None; give seed=…"),
        (lambda a, b, c: a, "of an example and a random generator, got function .* of 3 arguments"),
    ],
)
def test_what_is_no_transform_is_refused(function, says):
    with pytest.raises(sf.ConfigError, match=says):
        read_transform(function, None)


def test_no_function_is_no_transform():
    assert read_transform(None, 0) is None


def test_a_transform_that_returns_nothing_is_refused():
    with pytest.raises(sf.DataError, match="expected an example, got None for index 7 of the sou"):
        read_transform(lambda example: None, None)([1], [7], 0)


@pytest.mark.parametrize("function", [lambda x: 1 // x, lambda x, rng: 1 // x])
def test_an_error_names_the_example(function):
    with pytest.raises(ZeroDivisionError) as caught:
        read_transform(function, 0)([2, 0], [7, 8], 0)
    assert caught.value.__notes__ == [
        "transforming index 8 of the source, row 1 of those asked for"
    ]
