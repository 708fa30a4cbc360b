import json
from collections import OrderedDict

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfold.checkpoint.sealed import DamageError, number, opened, plain, seal, unseal
from stepfold.errors import CheckpointError, ConfigError

ATOMS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
DOCUMENTS = st.recursive(
    ATOMS | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@given(DOCUMENTS)
def test_what_is_sealed_comes_back(tmp_path_factory, document):
    path = tmp_path_factory.mktemp("sealed") / "words.json"
    path.write_bytes(seal(plain(document, "extra")))
    assert opened(unseal(path)) == document


def test_what_json_has_another_word_for_becomes_plain():
    given = {"a": (1, np.float32(0.5)), "b": OrderedDict(c=np.bool_(True)), "d": np.int8(3)}
    made = plain(given, "extra")
    assert made == {"a": [1, 0.5], "b": {"c": True}, "d": 3}
    assert json.loads(json.dumps(made)) == made


def test_infinities_come_back(tmp_path):
    (tmp_path / "a").write_bytes(seal([float("inf"), float("-inf"), float("nan")]))
    more, less, none = unseal(tmp_path / "a")
    assert (more, less) == (float("inf"), float("-inf"))
    assert none != none


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": {1: "b"}}, "extra/a: expected keys of text, got 1; JSON has no others"),
        ({"a": [0, jnp.ones(2)]}, r"extra/a/1: expected what JSON can hold, got float32\[2\]; arr"),
        (np.ones(3), r"extra: expected what JSON can hold, got float64\[3\]; arrays belong into "),
        ({"f": print}, "extra/f: expected what JSON can hold, got builtin_function_or_method "),
        ({1, 2}, r"extra: expected what JSON can hold, got set \{1, 2\}; .*as text or numbers"),
    ],
)
def test_what_is_no_json_is_refused_with_its_path(value, words):
    with pytest.raises(ConfigError, match=words):
        plain(value, "extra")


def test_a_flipped_bit_is_seen(tmp_path):
    path, good = tmp_path / "words.json", seal({"step": 3, "data": [1, 2]})
    for at in range(0, 8 * len(good), 7):
        bad = bytearray(good)
        bad[at // 8] ^= 1 << at % 8
        path.write_bytes(bad)
        with pytest.raises(DamageError, match="words.json: its checksum does not fit its content"):
            unseal(path)


@pytest.mark.parametrize("length", [0, 5, -1])
def test_what_was_cut_off_is_seen(tmp_path, length):
    (tmp_path / "a").write_bytes(seal({"step": 3})[:length])
    with pytest.raises(DamageError, match="a: its checksum does not fit"):
        unseal(tmp_path / "a")


def test_what_is_missing_is_damage(tmp_path):
    with pytest.raises(DamageError, match="leaves-0.json: missing"):
        unseal(tmp_path / "leaves-0.json")
    assert issubclass(DamageError, CheckpointError)


def test_only_finite_numbers_are_numbers():
    assert [number(value) for value in (1, 0.5, -2.0)] == [1.0, 0.5, -2.0]
    others = (True, None, "1", float("nan"), float("inf"), [1])
    assert [number(value) for value in others] == [None] * len(others)
