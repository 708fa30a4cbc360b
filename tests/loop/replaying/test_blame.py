import jax.numpy as jnp
import numpy as np
import pytest

from stepfold.loop.replaying.blame import name_inputs, name_line, name_rows

X = {"x": np.float32([1, 0, 3, 0])}


def zero(batch):
    return lambda rows: bool((batch["x"][list(rows)] == 0).any())


def test_guilty_rows_are_named_with_what_is_in_them():
    assert name_rows(X, zero(X)) == (((1,), (3,)), ["row 1: x=0.0", "row 3: x=0.0"])


def test_of_many_the_first_are_shown():
    batch = {"x": np.float32([0] * 9 + [1])}
    examples, said = name_rows(batch, zero(batch))
    assert (len(examples), len(said)) == (9, 4)


def test_where_all_rows_are_guilty_they_are_hardly_to_blame():
    batch = {"x": np.zeros(40, np.float32)}
    examples, said = name_rows(batch, zero(batch))
    assert len(examples) == 16
    assert said[0].startswith("more than 16 of 40 rows make it go wrong: look at what they share")
    batch = {"x": np.zeros(3, np.float32)}
    assert name_rows(batch, zero(batch))[1][0].startswith("3 of 3 rows make it go wrong")


def test_one_row_alone_is_named():
    batch = {"x": np.zeros(1, np.float32)}
    assert name_rows(batch, zero(batch)) == (((0,),), ["row 0: x=0.0"])


def test_without_rows_it_says_so():
    examples, said = name_rows({"x": np.zeros(3), "y": np.zeros(4)}, lambda rows: True)
    assert examples == ()
    assert said[0].startswith("examples: cannot be told apart: batch: expected one leading axis")


@pytest.mark.parametrize(
    ("guilty", "named"), [((), ["batch/x", "batch/y"]), ({1}, ["batch/x"]), ({0}, [])]
)
def test_what_is_not_finite_in_guilty_rows_is_named(guilty, named):
    batch = {"x": np.float32([1, np.inf]), "y": jnp.array([1, 1, np.nan]), "n": np.arange(2)}
    assert [line.split()[0] for line in name_inputs(batch, guilty)] == named
    assert all(line.endswith(" is not finite as it came") for line in name_inputs(batch, guilty))


def test_a_number_that_all_rows_share_is_named():
    assert name_inputs(np.float32(np.nan), {3}) == ["batch is not finite as it came"]


def test_the_line_is_named():
    found, said = name_line(lambda state, batch: jnp.log(state * batch["x"]), 1.0, X, None)
    assert found[0].startswith("log made inf at ")
    assert said == []


def test_a_step_that_cannot_be_traced_is_said_to_be_so():
    def step(state, batch):
        return float(batch["x"].sum())

    found, said = name_line(step, 1.0, X, None)
    assert found == []
    assert said[0].startswith("where: the step cannot be gone through by operations: ")


def test_where_nothing_makes_it_it_says_so():
    found, said = name_line(lambda state, batch: state * batch["x"], np.nan, X, None)
    assert (found, said[0].startswith("where: operation by operation, none made")) == ([], True)
