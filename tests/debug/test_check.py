"""What `check_step` refuses, and the dtypes whose bits it compares. Its laws are in tests/laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.small import full_but, ones

import stepfold as sf
from stepfold import tree
from stepfold.core.metrics import DifferentLeaves
from stepfold.debug.check import _hash


def step(state, batch):
    return {**state, "step": state["step"] + 1}, {}


STATE = {"step": jax.device_put(np.int32(0)), "w": ones(2)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": None}, "check_step: expected a step .state, batch. -> …, got NoneType None"),
        ({"step": step, "every": 0}, "every: expected an integer of at least 1, got 0"),
        ({"step": step, "every": 2.0}, "every: expected an integer of at least 1, got 2.0"),
    ],
)
def test_arguments_are_checked_when_it_is_built(arguments, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        sf.debug.check_step(**arguments)


@pytest.mark.parametrize(
    "state", [{"w": ones(2)}, (ones(2),), {"step": jax.device_put(np.arange(2))}, {"step": ones()}]
)
def test_a_state_without_a_step_is_refused(state):
    with pytest.raises(
        sf.errors.ConfigError, match="state.step: expected the integer step of one state"
    ):
        jax.eval_shape(sf.debug.check_step(step), state, None)


def test_a_metric_of_the_same_name_is_refused():
    taken = lambda state, batch: (step(state, batch)[0], {"corrupt": sf.mean(1.0)})
    with pytest.raises(
        sf.errors.ConfigError, match="the step has a metric 'corrupt' already; rename it"
    ):
        jax.eval_shape(sf.debug.check_step(taken), STATE, None)


def test_a_step_that_changes_the_form_of_its_state_is_refused():
    changes = lambda state, batch: ({**state, "w": jnp.ones(3)}, {})
    with pytest.raises(
        sf.errors.TreeMismatchError, match=r"state/w: expected float32\[2\], got float32"
    ):
        jax.eval_shape(sf.debug.check_step(changes), STATE, None)


def test_a_hand_made_state_and_a_weak_result_are_taken():
    weak = lambda state, batch: ({"step": state["step"] + 1, "rate": 0.5 * state["rate"]}, {})
    state, metrics = jax.jit(sf.debug.check_step(weak))({"step": 0, "rate": 1.0}, None)
    assert (int(state["step"]), float(state["rate"])) == (1, 0.5)
    assert metrics["corrupt"].paths(state) == []


def test_leaves_beyond_one_word_of_bits_are_named():
    many = lambda state, batch: ({name: leaf + 1 for name, leaf in state.items()}, {})
    state = {"step": 0} | {f"w{i:02}": np.float32(i) for i in range(69)}
    after, metrics = jax.jit(sf.debug.check_step(many))(state, None)
    assert metrics["corrupt"].paths(after) == []
    words = DifferentLeaves.from_mask(np.arange(70) % 33 == 1).words
    assert tree.marked_paths(after, words) == ["w00", "w33", "w66"]


@pytest.mark.parametrize(
    "dtype",
    full_but(
        ["bool", "int4", "float8_e5m2", "bfloat16", "complex64"],
        [
            *("bool", "int4", "int8", "uint16", "int32"),
            *("float8_e5m2", "float16", "bfloat16", "complex64"),
        ],
    ),
)
def test_every_dtype_has_a_hash_that_any_element_changes(dtype):
    zeros = np.zeros((3, 4), jnp.dtype(dtype))
    hashes = {int(_hash(jnp.asarray(zeros)))}
    for i in range(zeros.size):
        changed = zeros.copy()
        changed.flat[i] = 1
        hashes.add(int(_hash(jnp.asarray(changed))))
    assert len(hashes) == 1 + zeros.size


def test_wide_and_empty_leaves_and_keys_have_hashes():
    hash_of = jax.jit(_hash)
    with jax.enable_x64(True):
        for dtype in ("int64", "float64", "complex128"):
            low = np.zeros(2, dtype)
            low.view(np.uint8)[0] = 1
            assert hash_of(np.zeros(2, dtype)) != hash_of(low)
    assert hash_of(jax.random.key(0)) != hash_of(jax.random.key(1))
    assert hash_of(np.zeros((0, 3), np.float32)) == 0
