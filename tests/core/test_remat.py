import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import stepfold as sf
from stepfold.core.remat import rematerialized


def loss_fn(params, batch, key):
    hidden = batch
    for layer in params:
        hidden = jnp.sin(jnp.sin(hidden @ layer))
    return sf.mean(hidden), {"first": sf.mean(hidden[0])}


PARAMS, BATCH = [jnp.ones((8, 8)) / 8] * 3, jnp.ones((6, 8))
NO_BATCH = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


@pytest.mark.parametrize("remat", [True, "nothing_saveable", "dots_saveable", NO_BATCH])
@pytest.mark.parametrize("n", [1, 3])
def test_rematerialization_changes_no_number(key, remat, n):
    got, want = (
        jax.jit(sf.value_and_grad(loss, accumulate=n))(PARAMS, BATCH, key, ())
        for loss in (rematerialized(loss_fn, remat), loss_fn)
    )
    chex.assert_trees_all_close(got, want, rtol=1e-5)


@pytest.mark.parametrize(
    ("remat", "again"),
    [(None, False), (False, False), ("everything_saveable", False), (True, True)],
)
def test_what_is_not_kept_is_computed_again(key, remat, again):
    grad_fn = sf.value_and_grad(rematerialized(loss_fn, remat))
    computed = str(jax.make_jaxpr(grad_fn)(PARAMS, BATCH, key, ())).count(" = sin")
    assert (computed > 2 * len(PARAMS)) == again


def test_what_makes_a_policy_is_not_one():
    with pytest.raises(sf.ConfigError, match="remat: .*save_only_these.*did you mean to call it"):
        rematerialized(loss_fn, jax.checkpoint_policies.save_only_these_names)
    rematerialized(loss_fn, jax.checkpoint_policies.save_only_these_names("hidden"))


@pytest.mark.parametrize("remat", ["dots", 3, "save_only_these_names"])
def test_an_unknown_policy_is_refused_when_built(remat):
    with pytest.raises(
        sf.ConfigError, match="remat: expected None, True, a policy .*dots_saveable"
    ):
        sf.make_train_step(loss_fn, optax.sgd(0.1), remat=remat)
