"""Readers of arguments return the value, or an error that names it."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.core.validation import (
    read_choice,
    read_integer,
    read_positive,
    spell_call,
    suggest,
    takes,
)


def test_integers_of_any_library_become_python_integers():
    assert read_integer("size", 0, minimum=0) == 0
    for value in (2, np.int64(2), np.uint8(2), np.array(2), jnp.int32(2)):
        integer = read_integer("size", value, 2)
        assert (integer, type(integer)) == (2, int)


@pytest.mark.parametrize("value", [0, -1, True, np.True_, 1.0, "2", None, np.ones(2, int)])
def test_what_is_not_an_integer_is_refused(value):
    with pytest.raises(
        sf.errors.ConfigError, match="pack: rows: expected an integer of at least 1, got"
    ):
        read_integer("pack: rows", value)


@pytest.mark.parametrize("value", [0, -0.5, math.nan, True, "3", None])
def test_what_is_not_positive_is_refused(value):
    with pytest.raises(sf.errors.ConfigError, match="rate: expected a number above 0, got "):
        read_positive("rate", value)


def test_a_choice_is_one_of_the_strings():
    assert read_choice("remainder", "drop", ["drop", "keep"]) == "drop"
    with pytest.raises(
        sf.errors.ConfigError,
        match="remainder: expected one of 'drop', 'keep', got 'dorp'; did you mean 'drop'",
    ):
        read_choice("remainder", "dorp", ["drop", "keep"])
    with pytest.raises(sf.errors.ConfigError, match="got 3"):
        read_choice("remainder", 3, ["drop", "keep"])


def of_two(state, batch):
    return state


@pytest.mark.parametrize(
    ("function", "counts"),
    [
        (of_two, [2]),
        (lambda a, b=1, *, c=2: a, [1, 2]),
        (lambda *all: all, [0, 1, 2, 3]),
        (functools.partial(of_two, 1), [1]),
        (optax.sgd(0.1).update, [2, 3]),
    ],
)
def test_what_a_function_takes_is_told(function, counts):
    assert [count for count in range(4) if takes(function, count)] == counts


def test_a_function_is_spelt_without_types():
    def loss_fn(params: dict, batch: dict | None = None, *, key: int = 3) -> float: ...

    assert spell_call(loss_fn) == "loss_fn(params, batch=None, *, key=3)"
    assert spell_call(functools.partial(of_two, 1)) == "partial(batch)"


def test_the_closest_name_is_suggested():
    assert suggest("step", ["no", "steps"]) == "did you mean 'steps'?"
    assert suggest("zzz", ["no"]) == ""
