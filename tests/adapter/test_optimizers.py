"""Schedules and optimizers by name: those of optax, with the transformations around them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.clients.rows import shows

import stepfold as sf
from stepfold.adapter.arguments import TrainingArguments
from stepfold.adapter.from_arguments import make_optimizer, make_schedule, optimizer_of
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


REFUSED = [
    (parse_scheduler, "cosin", "one of none, constant, .* got 'cosin'; did you mean 'cosine'"),
    (parse_scheduler, "qqqq", "got 'qqqq'; give custom_scheduler="),
    *((parse_scheduler, name, f"got {name!r}") for name in ("warm_up_warmup_cosine", "warmup_")),
    (find_optimizer, "adamww", "one of acprop, .*, got 'adamww'; did you mean 'adamw'"),
    (find_optimizer, "qqqqqq", "got 'qqqqqq'; give tx=… for another optimizer"),
    *((find_optimizer, name, "optimizer: expected one of") for name in ("scale_by_adam", "chain")),
    (find_optimizer, "dpsgd", "built by name, got 'dpsgd'; .*each example"),
    (find_optimizer, "schedule_free", "built by name, got 'schedule_free'; .*wraps"),
]


@pytest.mark.parametrize(("find", "name", "message"), REFUSED)
def test_other_names_are_refused(find, name, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        find(name)


SMOOTH = {"linesearch": optax.scale_by_backtracking_linesearch(5)}
REFUSED_OPTIONS = [
    ("linear", {"power": 1.0}, "scheduler_kwargs: .* got 'power'; linear takes none$"),
    ("polynomial", {"cycles": 1.0}, "got 'cycles'; polynomial takes power$"),
    ("polynomial", {"powr": 1.0}, "takes power; did you mean 'power'"),
    *(
        ("polynomial", {"power": value}, r"scheduler_kwargs\['power'\]: expected a number above 0")
        for value in (0, -1.0, "2", None, True)
    ),
    ("adamw", {"beta1": 0.8}, "extra_optimizer_kwargs: .* got 'beta1'; adamw takes b1, "),
    ("adamw", {"weigt_decay": 0.8}, "got 'weigt_decay'; .* did you mean 'weight_decay'"),
    ("adamw", {"learning_rate": 0.8}, "set the rate with learning_rate and scheduler"),
    ("lbfgs", {}, "expected linesearch=None for lbfgs, got {}; .* which a train step does"),
    ("lbfgs", SMOOTH, "expected linesearch=None for lbfgs, got {'linesear"),
    ("sophia", {}, "expected hessian_diagonal_fn=… for sophia, got {}"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED_OPTIONS)
def test_other_options_are_refused(name, options, message):
    check = check_scheduler_options if name in SCHEDULES else check_optimizer_options
    with pytest.raises(sf.errors.ConfigError, match=message):
        check(name, options)


def test_options_of_the_signature_are_accepted():
    check_scheduler_options("warmup_wsd", {"decay": 0.5})
    check_optimizer_options("lbfgs", {"linesearch": None})


def test_options_without_a_default_are_required(monkeypatch):
    def needy(learning_rate, rank):
        """Take a rank."""

    monkeypatch.setattr(optax, "needy", needy, raising=False)
    with pytest.raises(
        sf.errors.ConfigError,
        match="extra_optimizer_kwargs: expected rank, which needy requires, got no",
    ):
        check_optimizer_options("needy", {})
    check_optimizer_options("needy", {"rank": 2})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("wsd", {"decay": 1.5}, r"\['decay'\]: expected at most 1, got 1.5"),
        ("cosine_restarts", {"cycles": 101}, r"\['cycles'\]: .* integer from 1 to 100, got 101"),
        ("cosine_restarts", {"cycles": 0}, r"\['cycles'\]: .* integer from 1 to 100, got 0"),
    ],
)
def test_options_out_of_range_are_refused(name, options, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        SCHEDULES[name](0.1, 0.0, 100, **options)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_endless_if_it_ignores_the_number_of_steps(name):
    short, long = (SCHEDULES[name](0.1, 0.01, steps) for steps in (10, 1000))
    with jax.numpy_dtype_promotion("standard"):
        same = all(float(short(step)) == float(long(step)) for step in range(12))
    assert same == (name in ENDLESS)


# Freezing

PARAMS = {"embed": {"w": jnp.array([-0.0, 1.0])}, "head": jnp.array([1.0, 2.0])}


def one_step(tx):
    state = sf.init_state(PARAMS, tx, jax.random.key(0))
    loss_fn = lambda params, batch, key: (params["embed"]["w"] * 100 + params["head"]).sum()
    return state, jax.jit(sf.make_train_step(loss_fn, tx))(state, None)[0]


def test_frozen_parameters_keep_every_bit():
    _, new = one_step(freeze(optax.adamw(0.1, weight_decay=0.5), "^embed/"))
    assert np.signbit(new.params["embed"]["w"]).tolist() == [True, False]
    np.testing.assert_array_equal(new.params["embed"]["w"], PARAMS["embed"]["w"])
    assert (new.params["head"] != PARAMS["head"]).all()


def test_frozen_parameters_do_not_count_in_the_global_norm():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    _, new = one_step(freeze(tx, "embed"))
    np.testing.assert_allclose(new.params["head"], PARAMS["head"] - 0.5**0.5, rtol=1e-6)


@pytest.mark.parametrize(("pattern", "matched"), [("zzz", "none"), ("", "all")])
def test_a_pattern_matches_some_parameters_but_not_all(pattern, matched):
    tx = freeze(optax.sgd(0.1), pattern)
    with pytest.raises(
        sf.errors.ConfigError,
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
    state = sf.TrainState(jnp.int32(0), PARAMS, tx.init(PARAMS), (), None)
    paths = schedule_paths(state.opt_state)
    assert paths
    assert set(paths) <= {name for name, _ in sf.tree.named_leaves(state)}
    moved = state._replace(opt_state=with_schedule_at(state.opt_state, 6))
    assert jax.tree.structure(moved) == jax.tree.structure(state)
    assert float(learning_rate_of(SCHEDULE)(moved)) == 0.5


MOVED = ["lion", "sm3", "schedule_free_sgd", "dadapt_adamw", "madgrad", "momo", "momo_adam"]


@pytest.mark.parametrize(
    "name",
    [
        *("sgd", "prodigy"),
        *(pytest.param(name, marks=pytest.mark.full) for name in MOVED),
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


# The schedule


def schedule_of(steps=110, **fields):
    return make_schedule(TrainingArguments(learning_rate=0.1, **fields), steps)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "constant"])
def test_every_schedule_warms_up_to_its_peak_and_falls(name):
    schedule = schedule_of(scheduler=name, warmup_steps=10, learning_rate_end=0.001)
    assert [float(schedule(step)) for step in (0, 5, 10)] == pytest.approx([0.0, 0.05, 0.1])
    values = [float(schedule(step)) for step in range(10, 111)]
    assert min(values) >= 0.001 - 1e-6
    assert max(values) <= 0.1 + 1e-6
    if name != "inverse_sqrt":
        assert values[-1] == pytest.approx(0.001)


def test_a_constant_schedule_needs_no_length():
    assert float(schedule_of(None)(7)) == pytest.approx(0.1)
    warmup = schedule_of(None, scheduler="warmup_constant", warmup_steps=10)
    assert float(warmup(5)) == pytest.approx(0.05)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("polynomial", {"power": 1.0}),
        ("cosine", {"exponent": 2.0}),
        ("inverse_sqrt", {"timescale": 10}),
        ("wsd", {"decay": 0.5}),
        ("cosine_restarts", {"cycles": 2}),
    ],
)
def test_scheduler_options_reach_the_schedule(name, options):
    default = schedule_of(scheduler=name)
    changed = schedule_of(scheduler=name, scheduler_kwargs=options)
    assert any(float(default(step)) != float(changed(step)) for step in range(110))


def test_a_custom_scheduler_is_a_schedule_or_makes_one():
    for custom in (
        optax.constant_schedule(0.3),
        lambda steps: optax.linear_schedule(0.3, 0, steps),
    ):
        schedule = make_schedule(TrainingArguments(custom_scheduler=custom), 10)
        assert float(schedule(0)) == pytest.approx(0.3)
    assert float(schedule(10)) == 0.0


def test_a_schedule_that_depends_on_an_unknown_length_is_refused():
    with pytest.raises(
        sf.errors.ConfigError,
        match=r"scheduler: .* number of steps is unknown, got 'linear'; .* max_steps",
    ):
        schedule_of(None, scheduler="linear")
    arguments = TrainingArguments(custom_scheduler=lambda n: optax.linear_schedule(1, 0, n))
    with pytest.raises(
        sf.errors.ConfigError, match="custom_scheduler: .* number of steps is unknown, .* max_steps"
    ):
        make_schedule(arguments, None)
    endless = TrainingArguments(custom_scheduler=optax.constant_schedule(0.3))
    assert float(make_schedule(endless, None)(0)) == pytest.approx(0.3)


def test_a_warmup_has_to_end():
    with pytest.raises(
        sf.errors.ConfigError,
        match="warmup_steps: expected fewer than the 10 steps of the run, got 10",
    ):
        schedule_of(10, warmup_steps=10)


# The optimizer

MATRICES = jax.device_put(
    {
        "embed": np.arange(12, dtype=np.float32).reshape(3, 4) / 7,
        "w": np.full((4, 4), 1 / 3, np.float32),
    }
)
REQUIRED = {
    "galore": {"rank": 2},
    "lbfgs": {"linesearch": None},
    "noisy_sgd": {"key": 0},
    "sophia": {"hessian_diagonal_fn": optax.trace(0.9)},
}


def params_after(tx, steps=3):
    """Train for some steps on a quadratic loss."""

    def loss_fn(params, batch, key):
        return sum(((leaf - 1.5) ** 2).sum() for leaf in jax.tree.leaves(params))

    state = sf.init_state(MATRICES, tx, jax.random.key(0))
    step = jax.jit(sf.make_train_step(loss_fn, tx))
    for _ in range(steps):
        state, _ = step(state, None)
    return state.params


def pairs(left, right):
    return zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)


def optimizer(steps=100, **fields):
    arguments = TrainingArguments(**fields)
    return make_optimizer(arguments, make_schedule(arguments, steps))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated")  # by optax
def test_every_optimizer_of_optax_trains_with_a_schedule():
    before = MATRICES["embed"]
    optimizers = {
        name: as_optimizer(
            optimizer(
                optimizer=name,
                extra_optimizer_kwargs=REQUIRED.get(name, {}),
                learning_rate=0.1,
                scheduler="linear",
            )
        )
        for name in optimizer_names()
    }

    @jax.jit  # one program for all of them compiles several times faster than one for each
    def train():
        trained = {}
        for name, tx in optimizers.items():
            state, params = tx.init(before), before
            for _ in range(2):
                updates, state = tx.update(2 * (params - 1.5), state, params, value=jnp.array(3.0))
                params = optax.apply_updates(params, updates)
            trained[name] = params
        return trained

    trained = train()
    assert len(trained) > 40
    assert [name for name, params in trained.items() if not np.isfinite(params).all()] == []
    assert [name for name, params in trained.items() if (params == before).all()] == []


def test_the_chain_is_as_written_by_hand():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 100, 0.01)
    by_hand = optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(schedule, b1=0.8, weight_decay=0.1)
    )
    tx = optimizer(
        learning_rate=0.1,
        learning_rate_end=0.01,
        scheduler="cosine",
        warmup_steps=10,
        clip_grad=0.5,
        weight_decay=0.1,
        extra_optimizer_kwargs={"b1": 0.8},
    )
    for ours, theirs in pairs(params_after(tx), params_after(by_hand)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_weight_decay_is_added_to_the_gradient_if_the_optimizer_has_none():
    tx = optimizer(optimizer="sgd", learning_rate=0.1, weight_decay=0.5)
    by_hand = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1))
    for ours, theirs in pairs(params_after(tx), params_after(by_hand)):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "options"),
    [("adam", {}), ("sgd", {"momentum": 0.9}), ("adafactor", {"momentum": 0.9})],
)
def test_the_dtype_of_the_first_moment(name, options):
    tx = optimizer(optimizer=name, tx_mu_dtype="bf16", extra_optimizer_kwargs=options)
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(tx.init(MATRICES))}
    assert "bfloat16" in dtypes


def test_float16_has_a_loss_scale_around_the_chain():
    tx = optimizer(mixed_precision="fp16", frozen_parameters="embed")
    state = sf.init_state(MATRICES, tx, jax.random.key(0))
    assert float(state.opt_state.scale) == 2.0**15
    assert not hasattr(optimizer(mixed_precision="bf16").init(MATRICES), "scale")


# An optimizer or a schedule in place of those of the arguments


def test_a_custom_optimizer_is_returned_as_it_is():
    tx = optax.sgd(0.1)
    assert optimizer_of(TrainingArguments(), 10, tx) == (tx, None)
    schedule = optax.constant_schedule(0.1)
    assert optimizer_of(TrainingArguments(), 10, tx, schedule) == (tx, schedule)


def test_a_custom_schedule_is_that_of_the_optimizer_of_the_arguments():
    halving = optax.linear_schedule(1.0, 0.5, 1)
    tx, schedule = optimizer_of(TrainingArguments(optimizer="sgd"), 10, None, halving)
    params = jnp.ones(())
    updates, _ = tx.update(params, tx.init(params), params)
    assert (schedule, float(updates)) == (halving, -1.0)


@pytest.mark.parametrize(
    "fields", [{"learning_rate": 1.0}, {"clip_grad": 1.0}, {"optimizer": "lion"}]
)
def test_fields_without_an_effect_are_refused(fields):
    (name,) = fields
    with pytest.raises(
        sf.errors.ConfigError,
        match=f"^tx: expected arguments that do not set .* got {name}=.*; leave out",
    ):
        optimizer_of(TrainingArguments(**fields), 10, optax.sgd(0.1))
    schedule = optax.constant_schedule(0.1)
    with pytest.raises(
        sf.errors.ConfigError, match="^scheduler: .* do not set .* got learning_rate=1.0;"
    ):
        optimizer_of(TrainingArguments(learning_rate=1.0), 10, None, schedule)


@shows(
    "API reference", "Methods and properties", {"`pruning_module` wraps the optimizer": "the same"}
)
def test_pruning_wraps_a_custom_optimizer_too():
    arguments = TrainingArguments(pruning_module=lambda tx: optax.chain(tx, optax.scale(0.0)))
    tx, _ = optimizer_of(arguments, 10, optax.sgd(0.1))
    updates, _ = tx.update(jnp.ones(()), tx.init(jnp.ones(())))
    assert float(updates) == 0.0
