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
    read_function,
    read_instance,
    read_integer,
    read_positive,
    refuse_unknown,
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
    with pytest.raises(sf.ConfigError, match="pack: rows: expected an integer of at least 1, got"):
        read_integer("pack: rows", value)


@pytest.mark.parametrize("value", [0, -0.5, math.nan, True, "3", None])
def test_what_is_not_positive_is_refused(value):
    with pytest.raises(sf.ConfigError, match="rate: expected a number above 0, got "):
        read_positive("rate", value)


def test_zero_may_be_allowed():
    assert read_positive("limit", 0, allow_zero=True) == 0
    with pytest.raises(sf.ConfigError, match="limit: expected seconds, a number of at least 0"):
        read_positive("limit", -1, allow_zero=True, unit="seconds")


def test_a_choice_is_one_of_the_strings():
    assert read_choice("remainder", "drop", ["drop", "keep"]) == "drop"
    with pytest.raises(
        sf.ConfigError,
        match="remainder: expected one of 'drop', 'keep', got 'dorp'; did you mean 'drop'",
    ):
        read_choice("remainder", "dorp", ["drop", "keep"])
    with pytest.raises(sf.ConfigError, match="got 3"):
        read_choice("remainder", 3, ["drop", "keep"])


def test_an_instance_has_one_of_the_types():
    assert read_instance("n", 3, (int, str), "an int or a str") == 3
    with pytest.raises(sf.DataError, match="n: expected an int, got str 'a'; convert it"):
        read_instance("n", "a", int, "an int", "convert it", kind=sf.DataError)


def test_a_function_can_be_called():
    assert read_function("f", len) is len
    with pytest.raises(sf.ConfigError, match="f: expected a function of a batch, got int 3; call"):
        read_function("f", 3, "a function of a batch", "call it")


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


def test_what_cannot_be_looked_at_is_let_pass():
    assert takes(max, 7)


def test_a_function_is_spelt_without_types():
    def loss_fn(params: dict, batch: dict | None = None, *, key: int = 3) -> float: ...

    assert spell_call(loss_fn) == "loss_fn(params, batch=None, *, key=3)"
    assert spell_call(functools.partial(of_two, 1)) == "partial(batch)"


def test_unknown_names_are_refused():
    with pytest.raises(sf.ConfigError, match="Trainer: there is no 'xyz'; there are alpha, beta"):
        refuse_unknown("Trainer", ["xyz"], ["alpha", "beta"])
    refuse_unknown("Trainer", ["beta"], ["alpha", "beta"])


def test_the_closest_name_is_suggested():
    assert suggest("step", ["no", "steps"]) == "did you mean 'steps'?"
    assert suggest("zzz", ["no"]) == ""
