"""Readers, one by one."""

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import stepfold as sf
from stepfold.adapter.arguments import readers

ODD = [None, True, -1, 0, 1.5, float("nan"), float("inf"), "x", "", (), {}, object(), len]


@pytest.mark.parametrize(
    ("read", "good", "bad"),
    [
        (readers.flag, [(True, True)], [0, 1, "yes", None]),
        (readers.integer(1), [(3, 3)], [0, -1, 1.0, True, "3", None]),
        (readers.amount, [(3, 3), (0.5, 0.5)], [0, 1.0, 0.0, -1, 1.5, True, float("nan"), "1"]),
        (
            readers.number(above=0),
            [(1, 1.0)],
            [0, -1.0, float("inf"), float("nan"), True, "1", 10**400],
        ),
        (readers.number(least=0), [(0, 0.0)], [-0.1, None]),
        (readers.text, [("a", "a")], ["", " ", 3, None]),
        (readers.one_of("no", "steps"), [("no", "no")], ["No", "step", None, 3, []]),
        (readers.several(readers.text, "names"), [(["a"], ("a",))], ["a", [""], [3], None]),
        (
            readers.dims,
            [((1, -1), (1, -1)), ([2], (2,)), ("1,-1, 2", (1, -1, 2))],
            [(), (0,), (-1, -1), (-2,), (1.0,), (True,), "a", "1,x", 3],
        ),
        (
            readers.partition,
            [(PartitionSpec(("a", "b"), None), (("a", "b"), None)), ([["a"], "b"], (("a",), "b"))],
            ["a", [3], [[]], [""], None],
        ),
        (readers.pattern, [("^a", "^a")], ["(", "", None, 3]),
        (
            readers.floating,
            [("bf16", "bfloat16"), (jnp.float16, "float16"), (jnp.dtype("float64"), "float64")],
            ["int32", jnp.int8, "float", "x", None, 3, float],
        ),
        (readers.mapping, [({"a": 1}, {"a": 1})], [[], None, {1: 2}, "a"]),
        (readers.function, [(len, len)], [None, 3, int]),
        (
            readers.duration,
            [(3, 3.0), ("1h30m", "1h30m")],
            [0, -1, "", "1x", "h", "0s", None, True],
        ),
    ],
)
def test_a_reader_takes_what_it_is_to_take_and_nothing_else(read, good, bad):
    for value, kept in good:
        assert read("field", value) == kept
        assert type(read("field", value)) is type(kept)
    for value in bad:
        with pytest.raises(sf.ConfigError, match=r"field.*: expected .*, got "):
            read("field", value)


def test_optional_takes_what_stands_for_none_by_type_too():
    read = readers.optional(readers.integer(1), none=(-1,))
    assert read("field", -1) is read("field", None) is None
    assert read("field", 2) == 2
    for value in (-1.0, -2, False):
        with pytest.raises(sf.ConfigError):
            read("field", value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("45min", 2700), ("1h30m", 5400), ("2d", 172800), ("1.5h", 5400), (7, 7)],
)
def test_seconds(text, seconds):
    assert readers.seconds("field", text) == seconds


def test_the_nearest_neighbour_of_a_word_is_named():
    with pytest.raises(sf.ConfigError, match="did you mean 'steps'"):
        readers.one_of("no", "steps")("field", "step")
    assert readers.nearest("zzz", ["no"]) == ""


def test_a_long_value_does_not_drown_the_message():
    assert len(str(readers.refuse("field", "less", "x" * 500))) < 150
