"""A release of jax that lacks a part that stepfold uses: a fallback, or an error that names it."""

import socket
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.core.processes import KeyValues
from stepfold.inspect.flops import count
from stepfold.internals import jax as internals
from stepfold.internals.jax import (
    can_run,
    compilation_cache,
    compilation_key,
    coordinator_address,
    evaluate_outputs,
    output_shardings,
    thread_contexts,
    used_inputs,
    user_frame,
    without_dead_code,
)


def lower():
    return jax.jit(lambda x: x + 1).lower(1.0)


def traced():
    """Trace a product whose result is unused, and two inputs, one of which is."""

    def function(x, y):
        _ = x @ x
        return y + 1

    return jax.make_jaxpr(function)(np.ones((2, 2)), 1.0)


# Several processes


def test_without_a_service_there_is_none():
    assert internals.coordination_service() is None
    assert not KeyValues("name")


class Service:
    key_value_set = key_value_dir_get = key_value_delete = key_value_increment = None


@pytest.fixture
def service(monkeypatch):
    jax.devices()  # the backend would use the service, and is initialized once
    monkeypatch.setattr("jax._src.distributed.global_state.client", Service())
    return Service


@pytest.mark.parametrize("name", ["global_state", *internals._SERVICE_METHODS])
def test_processes_cannot_agree_without_the_service(service, monkeypatch, name):
    if name == "global_state":
        monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
        monkeypatch.delattr("jax._src.distributed.global_state")
    else:
        monkeypatch.delattr(service, name)
    says = f"^jax: expected a release with .*{name}.*, through which processes agree, got jax .*;"
    with pytest.raises(sf.errors.ConfigError, match=says):
        KeyValues("name")


# Programs


def test_equal_programs_have_equal_keys():
    assert compilation_key(lower()) == compilation_key(lower()) is not None
    assert compilation_key(lower()) != compilation_key(jax.jit(lambda x: x + 2).lower(1.0))


@pytest.mark.parametrize(
    "name", ["compile_args", "const_args", "_device_list", "_compiler_options_kvs"]
)
def test_a_program_without_one_of_its_parts_has_no_key(name):
    parts = ["compile_args", "const_args", "_device_list", "_compiler_options_kvs"]
    known = {each: getattr(lower()._lowering, each) for each in parts}
    text = lower().as_text
    whole = types.SimpleNamespace(_lowering=types.SimpleNamespace(**known), as_text=text)
    assert compilation_key(whole) == compilation_key(lower())
    delattr(whole._lowering, name)
    assert compilation_key(whole) is None


def test_states_are_initialized_without_a_key_of_their_program(monkeypatch):
    gone = property(lambda self: self.gone, lambda self, value: None)
    monkeypatch.setattr(jax.stages.Lowered, "_lowering", gone)
    assert compilation_key(lower()) is None
    state = sf.init_state(jnp.ones(3), optax.sgd(0.1), jax.random.key(0))
    assert state.params.tolist() == [1, 1, 1]


def test_a_key_needs_the_values_of_all_settings(monkeypatch):
    monkeypatch.setattr(type(jax.config), "values", property(lambda self: self.gone))
    assert compilation_key(lower()) is None


def test_dead_code_is_dropped():
    assert len(without_dead_code(traced().jaxpr).eqns) == 1
    assert used_inputs(traced().jaxpr) == [False, True]
    assert count(traced()).dots == 0


@pytest.mark.parametrize("gone", ["the name", "its signature"])
def test_without_its_elimination_dead_code_counts(monkeypatch, gone):
    if gone == "the name":
        monkeypatch.delattr("jax.interpreters.partial_eval.dce_jaxpr")
    else:
        monkeypatch.setattr("jax.interpreters.partial_eval.dce_jaxpr", lambda jaxpr: jaxpr)
    assert len(without_dead_code(traced().jaxpr).eqns) == 2
    assert used_inputs(traced().jaxpr) == [True, True]
    assert count(traced()).dots == 16


def test_an_equation_has_the_line_of_the_user():
    (*_, last) = traced().eqns
    assert user_frame(last).file_name == __file__


@pytest.mark.parametrize("gone", ["source_info", "traceback", "frames"])
def test_without_its_record_an_equation_has_no_line(gone):
    frames = {} if gone == "frames" else {"frames": []}
    info = {} if gone == "traceback" else {"traceback": types.SimpleNamespace(**frames)}
    record = {} if gone == "source_info" else {"source_info": types.SimpleNamespace(**info)}
    equation = types.SimpleNamespace(**record)
    assert user_frame(equation) is None
    assert user_frame(equation, default=True) is None


# Devices and contexts


def test_devices_of_an_unknown_runtime_can_run():
    assert can_run(jax.devices())
    assert can_run([types.SimpleNamespace(client=types.SimpleNamespace())])
    assert can_run([types.SimpleNamespace()])
    assert not can_run(
        [types.SimpleNamespace(client=types.SimpleNamespace(runtime_type="compile_only_runtime"))]
    )


def test_a_context_that_jax_lacks_is_not_entered(monkeypatch):
    assert {"enable_x64", "default_device"} <= thread_contexts().keys()
    monkeypatch.setattr(internals, "_CONTEXTS", ("enable_x64", "no_such_context"))
    assert thread_contexts() == {"enable_x64": False}
    with sf.prefetch([np.arange(2)]) as stream:
        assert [batch.tolist() for batch in stream] == [[0, 1]]


# States that are given as functions


def test_some_outputs_are_computed_without_the_others(monkeypatch):
    jaxpr = jax.make_jaxpr(lambda: (jnp.ones(3) * 2, jnp.int32(7), jnp.zeros(2)))()
    wanted = [False, True, True]
    for _ in range(2):
        seven, zeros = evaluate_outputs(jaxpr, wanted)
        assert int(seven) == 7
        np.testing.assert_array_equal(zeros, np.zeros(2))
        monkeypatch.delattr("jax.interpreters.partial_eval.dce_jaxpr", raising=False)


def test_placements_are_found_in_equations_that_jit_and_device_put_make():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    place = lambda x: jax.device_put(x, sharding)

    def function():
        made = jax.jit(jnp.ones, static_argnums=0, out_shardings=sharding)(3)
        return made, place(jnp.ones(2)), jax.jit(place)(jnp.ones(2)), jnp.ones(2), made + 1

    expected = [sharding, sharding, sharding, None, None]
    assert output_shardings(jax.make_jaxpr(function)()) == expected


class Kept(dict):
    _path = "/nowhere"
    put = dict.__setitem__


def test_programs_are_kept_unless_jax_opens_its_cache_in_another_way(monkeypatch):
    def compile_in(cache):
        jax.clear_caches()
        before = jax.config.jax_compilation_cache_dir
        jax.config.update("jax_compilation_cache_dir", None)
        try:
            with compilation_cache(cache, 0.0):
                jax.jit(lambda x: x + 1)(1)
        finally:
            jax.config.update("jax_compilation_cache_dir", before)
        return len(cache)

    assert compile_in(Kept()) > 0
    monkeypatch.delattr("jax._src.compilation_cache.get_file_cache")
    assert compile_in(Kept()) == 0


def test_without_jaxs_address_a_process_listens_at_its_host_name(monkeypatch):
    assert coordinator_address() is None
    monkeypatch.setattr("jax.distributed.is_initialized", lambda: True)
    monkeypatch.delattr("jax._src.distributed.global_state")
    assert coordinator_address() == f"{socket.gethostname()}:0"
