"""Private and undocumented parts of jax, and what happens in a release that lacks one.

This is the list to check for a new release of jax. `tests/internals/test_jax.py` removes each name.
The texts of jax's errors are in `texts.py`. Also without a promise of jax are the parameters of
the primitives that `inspect/flops.py` counts, and the HLO that `inspect/collectives.py` parses.
"""

import hashlib
import socket
import sysconfig
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jax
from jax.sharding import Mesh

from stepfold.errors import refuse


def _refuse_release(name: str, use: str) -> NoReturn:
    expected, got = f"a release with {name}, {use}", f"jax {jax.__version__}"
    refuse("jax", expected, got, "install an earlier jax, or a later stepfold")


# Several processes


def coordination_service() -> Any:
    """Return the client of the service that started the processes; None without one.

    Through it, processes exchange small values in any thread. The public functions of
    `multihost_utils` are collectives, which all processes have to enter in order and in time.
    Without it, several processes cannot agree, so that their first exchange raises.
    """
    use = "through which processes agree"
    try:
        from jax._src.distributed import global_state

        client: Any = global_state.client
    except (ImportError, AttributeError):
        if not jax.distributed.is_initialized():
            return None
        _refuse_release("jax._src.distributed.global_state", use)
    if client is None:
        return None
    for name in _SERVICE_METHODS:
        if not hasattr(client, name):
            _refuse_release(f"the method {name} of its coordination service", use)
    return client


_SERVICE_METHODS = ("key_value_set", "key_value_dir_get", "key_value_delete", "key_value_increment")


def coordinator_address() -> str | None:
    """Return the host and port of the service that started the processes; None without one.

    Without it, a process listens for the others at the address that its host name has.
    """
    if not jax.distributed.is_initialized():
        return None
    try:
        from jax._src.distributed import global_state

        address: str | None = global_state.coordinator_address
    except (ImportError, AttributeError):
        address = None
    return address or f"{socket.gethostname()}:0"


# Programs


def compilation_key(lowered: jax.stages.Lowered) -> Hashable | None:
    """Return all that determines the executable; None if it is unknown, or calls Python.

    The text has every operation and constant, but not the devices. What jax passes to the compiler
    besides it is private. Without it, `init_state` compiles equal programs again.
    """
    try:
        lowering: Any = lowered._lowering
        args = {**lowering.compile_args}
        if args["host_callbacks"] or args["keepalive"] or lowering.const_args:
            return None
        del args["all_args_info"], args["shape_poly_state"]  # names, and a new object each time
        text = lowered.as_text()
        if "callback" in text:
            return None
        settings: Any = jax.config
        key = (
            hashlib.sha256(text.encode()).digest(),
            tuple(lowering._device_list),
            lowering._compiler_options_kvs,
            _hashable(args),
            _hashable(settings.values),
        )
        hash(key)
    except (AttributeError, KeyError, TypeError):
        return None
    return key


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((name, _hashable(item)) for name, item in value.items())
    if isinstance(value, set):
        return frozenset(value)
    return tuple(value) if isinstance(value, list) else value


class ProgramCache(Protocol):
    """What jax asks of a compilation cache."""

    _path: Path  # the directory, for jax's log

    def get(self, key: str) -> bytes | None:
        """Return the program of a key, or None."""

    def put(self, key: str, value: bytes) -> None:
        """Keep a program."""


@contextmanager
def compilation_cache(cache: ProgramCache | None, min_seconds: float) -> Iterator[None]:
    """Keep the programs that a block compiles in a cache; a no-op if jax has one already.

    Programs that compile in less time are not kept, unless the user has changed jax's threshold.

    jax's own cache checks no entry, and its function that opens one is private. Without it, no
    program is kept, and a restart compiles.
    """
    settings: Any = jax.config
    is_off = not settings.jax_enable_compilation_cache
    if cache is None or is_off or settings.jax_compilation_cache_dir:
        yield
        return
    from jax._src import compilation_cache as internals  # lazy: rarely used

    opens = getattr(internals, "get_file_cache", None)
    if opens is None:
        yield
        return
    directory = str(cache._path)
    changed: dict[str, Any] = {"jax_compilation_cache_dir": directory}
    if settings.jax_persistent_cache_min_compile_time_secs == _JAX_MIN_SECONDS:
        changed["jax_persistent_cache_min_compile_time_secs"] = min_seconds
    before = {name: getattr(settings, name) for name in changed}
    try:
        internals.reset_cache()  # jax opens it once
        internals.get_file_cache = lambda path: (cache, path)  # type: ignore[assignment,return-value]
        for name, value in changed.items():
            jax.config.update(name, value)
        yield
    finally:
        internals.get_file_cache = opens
        for name, value in before.items():
            jax.config.update(name, value)
        internals.reset_cache()


_JAX_MIN_SECONDS = 1.0


@contextmanager
def watch_compilations(note: Callable[..., None]) -> Iterator[None]:
    """Call `note(seconds, was_loaded=…)` for each program that a block compiles or loads.

    The names of jax's events are not documented. If one changes, the report of a run lacks them.
    """
    hit = threading.local()

    def on_event(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            hit.is_last = True

    def on_duration(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            was_loaded, hit.is_last = getattr(hit, "is_last", False), False
            note(duration_secs, was_loaded=was_loaded)

    jax.monitoring.register_event_listener(on_event)
    jax.monitoring.register_event_duration_secs_listener(on_duration)
    try:
        yield
    finally:
        with suppress(ValueError, AssertionError):  # another library has cleared all listeners
            jax.monitoring.unregister_event_listener(on_event)
            jax.monitoring.unregister_event_duration_listener(on_duration)


def without_dead_code(jaxpr: Any) -> Any:
    """Return a jaxpr without the equations that its outputs do not need, with the same inputs.

    Without it, `describe` counts products whose results are unused, and a replay may name an
    operation that does not matter.
    """
    return _eliminate_dead_code(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def used_inputs(jaxpr: Any, wanted: Sequence[bool] | None = None) -> list[bool]:
    """Return which inputs the outputs of a jaxpr, or the wanted ones, depend on.

    Without it, all: `make_train_step` does not warn of a mask that the loss ignores.
    """
    used = [True] * len(jaxpr.outvars) if wanted is None else [*wanted]
    return [*_eliminate_dead_code(jaxpr, used)[1]]


def unchecked_axes() -> tuple[str, ...]:
    """Return the axes of several devices of a `shard_map` around with `check_vma=False`.

    Without jax's attribute for what varies over axes, none: there is no warning of local gradients.
    """
    axes = _manual_axes()
    return axes if axes and _varying(jax.lax.axis_index(axes)) == set() else ()


def sum_over_shards(weight: jax.Array, batch: Any, value: jax.Array) -> jax.Array:
    """Sum a weight of a batch over the axes of a `shard_map` around that shard the batch.

    Axes over which the value varies are left out, since it is one of each shard. Without
    `check_vma`, which is not known, and it is summed over all axes.
    """
    axes = _manual_axes()
    if axes and not unchecked_axes():
        sharded = {axis for leaf in jax.tree.leaves(batch) for axis in _varying(leaf) or ()}
        axes = tuple(axis for axis in axes if axis in sharded - (_varying(value) or set()))
    return jax.lax.psum(weight, axes) if axes else weight


def _manual_axes() -> tuple[str, ...]:
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in mesh.manual_axes if mesh.shape[axis] > 1)


def _varying(value: Any) -> set[str] | None:
    """Return the axes of a `shard_map` over which a value varies; None if jax does not say."""
    kind = getattr(jax.typeof(value), "manual_axis_type", None)
    return None if kind is None else {*kind.varying}


_COLLECTIVES = ("psum", "pmin", "pmax", "all_gather", "reduce_scatter", "all_to_all", "ppermute")


def has_collective(jaxpr: Any, depends: Sequence[bool] | None = None) -> bool:
    """Whether a jaxpr exchanges values that depend on its inputs, or on those marked.

    The gradient of a `pmean` sums a constant over the devices, which does not count.
    """
    marks = [True] * len(jaxpr.invars) if depends is None else depends
    varying = {var for var, is_marked in zip(jaxpr.invars, marks, strict=True) if is_marked}
    for equation in jaxpr.eqns:
        marks = [not hasattr(var, "val") and var in varying for var in equation.invars]
        if not any(marks):
            continue
        if equation.primitive.name.startswith(_COLLECTIVES):
            return True
        for inner in _inner_jaxprs(equation.params):
            is_call = len(inner.invars) == len(marks)
            if has_collective(inner, marks if is_call else None):
                return True
        varying.update(equation.outvars)
    return False


def _inner_jaxprs(params: Mapping[str, Any]) -> Iterator[Any]:
    is_jaxpr: Any = lambda node: hasattr(node, "eqns") or hasattr(node, "jaxpr")
    for node in jax.tree.leaves([*params.values()], is_leaf=is_jaxpr):
        if is_jaxpr(node):
            yield getattr(node, "jaxpr", node)


def evaluate_outputs(closed_jaxpr: Any, wanted: Sequence[bool]) -> list[Any]:
    """Compute some outputs of a jaxpr without inputs, and only what they depend on.

    Without jax's function that finds that out, all of it is computed.
    """
    jaxpr, _ = _eliminate_dead_code(closed_jaxpr.jaxpr, [*wanted])
    outputs = jax.core.eval_jaxpr(jaxpr, closed_jaxpr.consts)
    if len(outputs) == len(wanted):
        return [output for output, is_one in zip(outputs, wanted, strict=True) if is_one]
    return list(outputs)


def _eliminate_dead_code(jaxpr: Any, used: list[bool], **options: Any) -> tuple[Any, Any]:
    try:
        from jax.interpreters import partial_eval

        return partial_eval.dce_jaxpr(jaxpr, used, **options)
    except (ImportError, AttributeError, TypeError):
        return jaxpr, [True] * len(jaxpr.invars)


def output_shardings(closed_jaxpr: Any) -> list[Any]:
    """Return where the outputs of a jaxpr are placed, as far as its equations say; others are None.

    The parameters of jax's primitives are not documented. If one changes, `fit` refuses a state on
    a mesh that is given as a function.
    """
    jaxpr = closed_jaxpr.jaxpr
    origins = {
        id(output): (equation, index)
        for equation in jaxpr.eqns
        for index, output in enumerate(equation.outvars)
    }

    def find(output: Any) -> Any:
        equation, index = origins.get(id(output), (None, 0))
        if equation is None:
            return None
        params = equation.params
        if (inner := params.get("jaxpr")) is not None and hasattr(inner, "jaxpr"):
            sharding = (params.get("out_shardings") or [None] * len(equation.outvars))[index]
            is_known = isinstance(sharding, jax.sharding.Sharding)
            return sharding if is_known else output_shardings(inner)[index]
        sharding = params.get("sharding", (params.get("devices") or [None] * (index + 1))[index])
        if isinstance(sharding, jax.Device):
            return jax.sharding.SingleDeviceSharding(sharding)
        return sharding if isinstance(sharding, jax.sharding.Sharding) else None

    return [find(output) for output in jaxpr.outvars]


def user_frame(equation: Any, *, default: bool = False) -> Any:
    """Return the innermost frame of the user's code that made an equation, or None.

    With `default`, it is the innermost outside of jax if the user has none. It has a `file_name`,
    `line_num` and `function_name`. Without jax's record of it, reports do not name lines.
    """
    traceback = getattr(getattr(equation, "source_info", None), "traceback", None)
    frames = [*getattr(traceback, "frames", ())]
    own = (frame for frame in frames if not frame.file_name.startswith(_LIBRARIES))
    others = (frame for frame in frames if not frame.file_name.startswith(_JAX))
    innermost = next(others, frames[0] if frames else None)
    return next(own, innermost if default else None)


_JAX = f"{Path(jax.__file__).parent}/"
_PATHS = sysconfig.get_paths()
_LIBRARIES = (
    *{f"{_PATHS[key]}/" for key in ("purelib", "platlib", "stdlib")},
    f"{Path(__file__).parents[1]}/",
)


# Devices and contexts


def can_run(devices: Iterable[Any]) -> bool:
    """Whether the devices hold arrays and run programs, as those of `devices_of` do not.

    Without jax's name of the runtime, all do, and jax raises where an array is placed on one.
    """
    client = getattr(next(iter(devices)), "client", None)
    return getattr(client, "runtime_type", None) != "compile_only_runtime"


def thread_contexts() -> dict[str, Any]:
    """Return the values of jax's contexts in this thread, by name, for `enter_contexts`.

    Only the private `jax._src.config.config_states` has all of them, so they are listed by name.
    One that a release lacks is left out: the thread that `prefetch` starts then has its default.
    """
    names = [name for name in _CONTEXTS if hasattr(jax, name)]
    read = {name: getattr(jax.config, f"jax_{name}", _MISSING) for name in names}
    return {name: value for name, value in read.items() if value is not _MISSING}


@contextmanager
def enter_contexts(values: Mapping[str, Any], mesh: Mesh) -> Iterator[None]:
    """Enter jax's contexts with the values that they have in another thread."""
    with ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(getattr(jax, name)(value))
        stack.enter_context(jax.set_mesh(mesh))
        yield


_MISSING = object()
# Left out are `thread_guard`, which is meant for one thread, and what no public call reads: the
# contexts of `make_user_context`, `compute_on` and `set_xla_metadata`, and the deprecated
# `with mesh:`. A function that places batches and depends on these has to enter them itself.
_CONTEXTS = (
    *("enable_x64", "default_device", "default_matmul_precision", "allow_f16_reductions"),
    *("numpy_dtype_promotion", "numpy_rank_promotion", "auto_pcast", "softmax_custom_jvp"),
    *("default_prng_impl", "enable_custom_prng", "legacy_prng_key", "threefry_partitionable"),
    *("debug_nans", "debug_infs", "debug_key_reuse", "disable_jit", "no_tracing", "no_execution"),
    *("transfer_guard_host_to_device", "transfer_guard_device_to_host"),
    *("transfer_guard_device_to_device", "array_garbage_collection_guard"),
    *("enable_checks", "check_tracer_leaks", "explain_cache_misses", "log_compiles"),
    "remove_size_one_mesh_axis_from_type",
)
