import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stepfold as sf
from stepfold.core.donated import check_there


def test_what_was_donated_is_refused_by_its_path():
    state = {"a": np.ones(2), "b": {"c": jnp.ones(2)}}
    jax.jit(lambda x: x + 1, donate_argnums=0)(state["b"]["c"])
    message = (
        "b/c, …: the arrays were donated to an earlier call and are gone; go on with the state"
    )
    with pytest.raises(sf.ConfigError, match=message):
        check_there(state)


def test_what_is_there_or_is_traced_is_let_pass():
    state = {"a": np.ones(2), "b": jnp.ones(2)}
    check_there(state)
    jax.eval_shape(check_there, state)
