"""Eight CPU devices, strict promotion, and a fixture for each way to call a function."""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator

import hypothesis
import jax
import pytest

# A shell that starts the tests in the background has them ignore it, and so all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# What XLA makes of a program is kept while the tests run, for them and for processes they start:
# most compile small programs that others have compiled.
COMPILED = {
    "jax_compilation_cache_dir": tempfile.mkdtemp(prefix="compiled-"),
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
for name, value in COMPILED.items():
    jax.config.update(name, value)
    os.environ[name.upper()] = str(value)

# A loaded machine is slow to draw examples; that is no failure.
hypothesis.settings.register_profile(
    "law",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("law")


@pytest.fixture(params=["jit", "eager"])
def run(request: pytest.FixtureRequest) -> Callable:
    """Run a function with jit and without."""
    return jax.jit if request.param == "jit" else lambda function: function


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)


def pytest_unconfigure() -> None:
    shutil.rmtree(COMPILED["jax_compilation_cache_dir"], ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="count faults as for a release")


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """Choose how often a fault is tried: by default a few times, and with --full many."""
    return lambda few, many: many if request.config.getoption("--full") else few


@pytest.fixture
def compiles() -> Iterator[list[str]]:
    """List what XLA compiles while the test runs."""
    names: list[str] = []

    def listen(name: str, *_: object, **__: object) -> None:
        if name == "/jax/core/compile/backend_compile_duration":
            names.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)
