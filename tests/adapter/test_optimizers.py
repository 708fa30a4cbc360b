"""Schedules and optimizers by name, freezing, and the step counts of schedules."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.adapter.optimizers import (
    ENDLESS,
    SCHEDULES,
    build_optimizer,
    check_optimizer_options,
    check_scheduler_options,
    find_optimizer,
    freeze,
    learning_rate_of,
    optimizer_names,
    optimizer_options,
    parse_scheduler,
    schedule_paths,
    with_schedule_at,
)
from stepfold.core.optimizer import as_optimizer

SCHEDULE = optax.linear_schedule(1.0, 0.0, 10)

# Schedules


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("none", ("constant", False)),
        ("linear", ("linear", False)),
        ("warm_up_linear", ("linear", True)),
        ("warmup_cosine", ("cosine", True)),
        ("warmup_none", ("constant", True)),
        ("constant_with_warmup", ("constant", True)),
        ("cosine_with_restarts", ("cosine_restarts", False)),
        ("warmup_cosine_with_restarts", ("cosine_restarts", True)),
        ("warmup_stable_decay", ("wsd", False)),
    ],
)
def test_scheduler_names(name, parsed):
    assert parse_scheduler(name) == parsed


def test_unknown_schedulers_are_refused():
    with pytest.raises(
        sf.ConfigError,
        match=r"scheduler: expected one of none, constant, .* got 'cosin'; did you mean 'cosine'\?",
    ):
        parse_scheduler("cosin")
    with pytest.raises(sf.ConfigError, match="got 'qqqq'; give custom_scheduler="):
        parse_scheduler("qqqq")


@pytest.mark.parametrize("name", ["constant_with_warmupcosine", "warm_up_warmup_cosine", "warmup_"])
def test_a_warmup_prefix_is_stripped_once(name):
    with pytest.raises(sf.ConfigError, match=f"got {name!r}"):
        parse_scheduler(name)


def test_scheduler_options_are_those_of_the_schedule():
    check_scheduler_options("polynomial", {"power": 1.0})
    check_scheduler_options("warmup_wsd", {"decay": 0.5})
    with pytest.raises(
        sf.ConfigError, match="scheduler_kwargs: .* got 'power'; linear takes none$"
    ):
        check_scheduler_options("linear", {"power": 1.0})
    with pytest.raises(sf.ConfigError, match="got 'cycles'; polynomial takes power$"):
        check_scheduler_options("polynomial", {"cycles": 1.0})
    with pytest.raises(sf.ConfigError, match=r"takes power; did you mean 'power'\?"):
        check_scheduler_options("polynomial", {"powr": 1.0})


@pytest.mark.parametrize("value", [0, -1.0, "2", None, True])
def test_scheduler_options_are_positive_numbers(value):
    with pytest.raises(
        sf.ConfigError, match=r"scheduler_kwargs\['power'\]: expected a number above 0, got"
    ):
        check_scheduler_options("polynomial", {"power": value})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("wsd", {"decay": 1.5}, r"\['decay'\]: expected at most 1, got 1.5"),
        ("cosine_restarts", {"cycles": 101}, r"\['cycles'\]: .* integer from 1 to 100, got 101"),
        ("cosine_restarts", {"cycles": 2.5}, r"\['cycles'\]: .* integer from 1 to 100, got 2.5"),
    ],
)
def test_scheduler_options_out_of_range_are_refused(name, options, message):
    with pytest.raises(sf.ConfigError, match=message):
        SCHEDULES[name](0.1, 0.0, 100, **options)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_endless_if_it_ignores_the_number_of_steps(name):
    short, long = (SCHEDULES[name](0.1, 0.01, steps) for steps in (10, 1000))
    with jax.numpy_dtype_promotion("standard"):
        same = all(float(short(step)) == float(long(step)) for step in range(12))
    assert same == (name in ENDLESS)


# Optimizers


def test_unknown_optimizers_are_refused():
    with pytest.raises(
        sf.ConfigError, match=r"expected one of acprop, .*, got 'adamww'; did you mean 'adamw'\?"
    ):
        find_optimizer("adamww")
    with pytest.raises(sf.ConfigError, match="got 'qqqqqq'; give tx=… for another optimizer"):
        find_optimizer("qqqqqq")


@pytest.mark.parametrize("name", ["scale_by_adam", "chain", "_deprecated_dpsgd", "apply_updates"])
def test_other_functions_of_optax_are_not_optimizers(name):
    with pytest.raises(sf.ConfigError, match="optimizer: expected one of"):
        find_optimizer(name)


@pytest.mark.parametrize(("name", "why"), [("dpsgd", "each example"), ("schedule_free", "wraps")])
def test_optimizers_that_a_name_cannot_build(name, why):
    with pytest.raises(sf.ConfigError, match=f"optimizer: .* built by name, got '{name}'; .*{why}"):
        find_optimizer(name)


def test_the_optimizers_of_optax_and_contrib_are_listed():
    names = {*optimizer_names()}
    assert {"adamw", "sgd", "adafactor", "lion", "polyak_sgd", "sm3", "fromage"} <= names
    assert {"muon", "prodigy", "sophia", "schedule_free_adamw"} <= names
    assert not {"scale_by_adam", "chain", "schedule_free"} & names


def test_looking_names_up_raises_no_deprecation_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer_names()


def test_optimizer_options_are_checked_against_the_signature():
    check_optimizer_options("adamw", {"b1": 0.8})
    with pytest.raises(
        sf.ConfigError, match=r"extra_optimizer_kwargs: .* got 'beta1'; adamw takes b1, "
    ):
        check_optimizer_options("adamw", {"beta1": 0.8})
    with pytest.raises(sf.ConfigError, match=r"got 'weigt_decay'; .* did you mean 'weight_decay'"):
        check_optimizer_options("adamw", {"weigt_decay": 0.8})
    with pytest.raises(sf.ConfigError, match="set the rate with learning_rate and scheduler"):
        check_optimizer_options("adamw", {"learning_rate": 0.8})


def test_options_without_a_default_are_required(monkeypatch):
    def needy(learning_rate, rank):
        """Take a rank."""

    monkeypatch.setattr(optax, "needy", needy, raising=False)
    with pytest.raises(
        sf.ConfigError, match="extra_optimizer_kwargs: expected rank, which needy requires, got no"
    ):
        check_optimizer_options("needy", {})
    check_optimizer_options("needy", {"rank": 2})


@pytest.mark.parametrize(
    ("name", "option"), [("lbfgs", "linesearch"), ("sophia", "hessian_diagonal_fn")]
)
def test_optimizers_that_call_the_loss_function_need_an_option(name, option):
    with pytest.raises(
        sf.ConfigError,
        match=rf"expected {re.escape(option)}=.* for {name}, got {{}}; .* which a train step does",
    ):
        check_optimizer_options(name, {})
    check_optimizer_options(name, {option: None})


def test_a_line_search_of_ones_own_calls_the_loss_function_too():
    with pytest.raises(sf.ConfigError, match="expected linesearch=None for lbfgs, got {'linesear"):
        check_optimizer_options("lbfgs", {"linesearch": optax.scale_by_backtracking_linesearch(5)})


def test_optimizer_options_come_with_their_defaults():
    assert optimizer_options("sgd")["nesterov"] is False
    assert "learning_rate" not in optimizer_options("sgd")


# Freezing

PARAMS = {"embed": {"w": jnp.array([-0.0, 1.0])}, "head": jnp.array([1.0, 2.0])}


def one_step(tx):
    state = sf.init_state(PARAMS, tx, jax.random.key(0))
    loss_fn = lambda params, batch, key: (params["embed"]["w"] * 100 + params["head"]).sum()
    return state, sf.make_train_step(loss_fn, tx)(state, None)[0]


def test_frozen_parameters_keep_every_bit():
    _, new = one_step(freeze(optax.adamw(0.1, weight_decay=0.5), "^embed/"))
    assert np.signbit(new.params["embed"]["w"]).tolist() == [True, False]
    np.testing.assert_array_equal(new.params["embed"]["w"], PARAMS["embed"]["w"])
    assert (new.params["head"] != PARAMS["head"]).all()


def test_frozen_parameters_have_no_state():
    state, _ = one_step(freeze(optax.adam(0.1), "embed"))
    shapes = [leaf.shape for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert shapes == [(2,), (2,)]  # two moments of the head


def test_frozen_parameters_do_not_count_in_the_global_norm():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    _, new = one_step(freeze(tx, "embed"))
    np.testing.assert_allclose(new.params["head"], PARAMS["head"] - 0.5**0.5, rtol=1e-6)


def test_a_frozen_optimizer_gets_the_loss():
    _, new = one_step(freeze(optax.polyak_sgd(), "embed"))
    assert (new.params["head"] != PARAMS["head"]).all()


@pytest.mark.parametrize(("pattern", "matched"), [("zzz", "none"), ("", "all")])
def test_a_pattern_matches_some_parameters_but_not_all(pattern, matched):
    tx = freeze(optax.sgd(0.1), pattern)
    with pytest.raises(
        sf.ConfigError,
        match=f"frozen_parameters: .* got '{pattern}', which matches {matched} of embed/w, head;",
    ):
        tx.init(PARAMS)


# The step counts of schedules


@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(SCHEDULE),
        optax.chain(optax.clip(1.0), optax.sgd(SCHEDULE)),
        optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE),
        sf.dynamic_loss_scale(optax.lion(SCHEDULE)),
        freeze(optax.sgd(SCHEDULE), "embed"),
    ],
)
def test_schedules_are_found_and_moved(tx):
    state = sf.init_state(PARAMS, tx, jax.random.key(0))
    paths = schedule_paths(state.opt_state)
    assert paths
    assert set(paths) <= {name for name, _ in sf.tree.named_leaves(state)}
    moved = state._replace(opt_state=with_schedule_at(state.opt_state, 6))
    assert jax.tree.structure(moved) == jax.tree.structure(state)
    assert float(learning_rate_of(SCHEDULE)(moved)) == 0.5


@pytest.mark.parametrize(
    "name",
    [
        *("sgd", "lion", "sm3", "schedule_free_sgd"),
        *("dadapt_adamw", "madgrad", "momo", "momo_adam", "prodigy"),
    ],
)
def test_a_moved_optimizer_updates_at_the_rate_of_its_step(name):
    """Also where an optimizer of optax counts the steps of its schedule itself."""
    low_at_6 = lambda step: jnp.where(step == 6, 1e-3, 1.0)
    tx = as_optimizer(build_optimizer(name, low_at_6, {}))
    params = jnp.ones(2)
    start = tx.init(params)
    assert schedule_paths(start)
    sizes = {}
    for step in (5, 6):
        moved = with_schedule_at(start, step)
        updates, _ = tx.update(params, moved, params, value=jnp.array(1.0))
        sizes[step] = float(abs(updates).max())
    assert 0 < sizes[6] < 0.1 * sizes[5]


def test_without_a_schedule_the_step_of_the_state_counts():
    state = sf.init_state(PARAMS, optax.sgd(0.1), jax.random.key(0))
    assert schedule_paths(state.opt_state) == []
    rate = learning_rate_of(SCHEDULE)(state._replace(step=jnp.int32(3)))
    assert float(rate) == pytest.approx(0.8)


def test_the_count_of_adam_itself_stays():
    moved = with_schedule_at(optax.adam(SCHEDULE).init(PARAMS), 6)
    assert int(moved[0].count) == 0
