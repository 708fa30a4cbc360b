import functools

import optax
import pytest

from stepfold.core.signatures import spell_call, takes


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
