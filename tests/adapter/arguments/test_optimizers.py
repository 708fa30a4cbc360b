"""Optimizers by their names in optax."""

import re

import pytest

import stepfold as sf
from stepfold.adapter.arguments.optimizers import (
    check_options,
    find_optimizer,
    options_of,
    read_optimizer,
)


def test_a_name_that_is_none_gets_the_list_and_the_nearest():
    with pytest.raises(sf.ConfigError, match=r"expected one of acprop, .*; did you mean 'adamw'\?"):
        find_optimizer("adamww")
    with pytest.raises(sf.ConfigError, match="give the Trainer tx= for one of your own"):
        find_optimizer("qqqqqq")


@pytest.mark.parametrize("name", ["scale_by_adam", "chain", "_deprecated_dpsgd", "apply_updates"])
def test_what_is_no_optimizer_is_not_taken_for_one(name):
    with pytest.raises(sf.ConfigError, match="expected one of"):
        find_optimizer(name)


@pytest.mark.parametrize(("name", "why"), [("dpsgd", "each example"), ("schedule_free", "wraps")])
def test_what_a_name_cannot_make(name, why):
    with pytest.raises(sf.ConfigError, match=f"cannot be made by its name: .*{why}"):
        read_optimizer("optimizer", name)


def test_options_are_held_against_the_signature():
    check_options("adamw", {"b1": 0.8})
    with pytest.raises(sf.ConfigError, match=r"adamw takes b1, .*got 'beta1'"):
        check_options("adamw", {"beta1": 0.8})
    with pytest.raises(sf.ConfigError, match="the rate is of learning_rate and scheduler"):
        check_options("adamw", {"learning_rate": 0.8})


def test_options_that_have_no_default_are_asked_for(monkeypatch):
    import optax

    def needy(learning_rate, rank):
        """Take a rank."""

    monkeypatch.setattr(optax, "needy", needy, raising=False)
    with pytest.raises(sf.ConfigError, match="needy must be given rank, got none"):
        check_options("needy", {})


@pytest.mark.parametrize(
    ("name", "needs"), [("lbfgs", "linesearch"), ("sophia", "hessian_diagonal_fn")]
)
def test_what_a_step_cannot_give_is_asked_for(name, needs):
    with pytest.raises(sf.ConfigError, match=f"which a step does not give; .*{re.escape(needs)}"):
        check_options(name, {})
    check_options(name, {needs: None})


def test_options_are_given_with_their_defaults():
    assert options_of("sgd")["nesterov"] is False
    assert "learning_rate" not in options_of("sgd")
