"""Configure jax, the processes of the run and its slow proofs, and define shared fixtures."""

import functools
import gc
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import jax
import pytest
from tests import s3
from tests.costs import Costs
from tests.forks import PRELOAD, Forks, ForkServer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

TESTS = Path(__file__).parent
SLOW = ("test_examples.py", "test_guide.py", "test_benchmarks.py")
LONG = ("test_random_runs.py", "test_kills.py", "test_evaluating_remotely.py")

# A process that a shell starts in the background ignores SIGINT, and so do its children.
signal.signal(signal.SIGINT, signal.default_int_handler)

# XLA aborts if a collective waits longer than this for a virtual device, by default 40 s, which a
# loaded machine may need.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_collective_call_terminate_timeout_seconds=600")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Most tests compile small programs that other tests have compiled before. One compilation cache for
# the run serves all of its processes: the first process makes it and removes it at the end.
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if not IS_WORKER:  # in a worker, jax reads these settings from the environment
    CACHE = {
        "jax_compilation_cache_dir": tempfile.mkdtemp(prefix="compiled-"),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in CACHE.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)

# Without most optimizations XLA compiles in half the time. The tests in these folders, and files
# marked so, do not depend on it. All others, as the examples and most laws, see what users run.
NOT_OPTIMIZED = ("adapter", "checkpoint", "clients", "core", "data", "faults", "loop", "processes")

# Drawing examples slowly on a loaded machine is no failure.
for profile, max_examples in (("default", 6), ("full", 50)):
    hypothesis.settings.register_profile(
        profile,
        deadline=None,
        derandomize=True,
        max_examples=max_examples,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("default")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Use up to four workers for folders and several files, and none for a file and single tests.

    One more than the cores, since tests of processes and of timeouts mostly wait.
    """
    paths = {Path(arg.partition("::")[0]) for arg in config.args}
    return min(4, (os.cpu_count() or 1) + 1) if len(paths) > 1 or paths.pop().is_dir() else 0


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling:
    return FilesBySetting(config, log)


class FilesBySetting(LoadFileScheduling):
    """Give a worker only files of one optimization setting, since a change clears jax's caches.

    With `--full`, single tests take minutes. Then the tests of a long file are divided among the
    workers, and a worker whose setting is done changes it.
    """

    def __init__(self, config: pytest.Config, log: object) -> None:
        super().__init__(config, log)
        self._is_full = config.option.full
        self._settings: dict[WorkerController, bool] = {}

    def _split_scope(self, nodeid: str) -> str:
        path = super()._split_scope(nodeid)
        return nodeid if self._is_full and path.endswith(LONG) else path

    def _assign_work_unit(self, node: WorkerController) -> None:
        tests: Counter[bool] = Counter()
        settings = {
            name: is_not_optimized(TESTS.parent / name.partition("::")[0])
            for name in self.workqueue
        }
        for name, unit in self.workqueue.items():
            tests[settings[name]] += len(unit)
        workers = Counter(
            self._settings[other]
            for other in self.nodes
            if other in self._settings and not other.shutting_down
        )
        setting = self._settings.get(node)
        if setting not in tests:
            # The setting without a worker, or else with the most tests for each.
            setting = max(
                tests, key=lambda one: (not workers[one], tests[one] / (workers[one] + 1))
            )
            if node in self._settings and workers[setting] and not self._is_full:
                node.shutdown()  # others run what is left
                return
            self._settings[node] = setting
        of_setting = (name for name in self.workqueue if settings[name] == setting)
        self.workqueue.move_to_end(next(of_setting), last=False)
        super()._assign_work_unit(node)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run all slow proofs, as for a release")
    parser.addoption(
        "--share",
        metavar="I/N",
        type=read_share,
        help="run one of N parts of what --full adds, without the examples and pages",
    )
    parser.addoption("--site", help="the folder of the guide's site, if it is built already")


def read_share(text: str) -> tuple[int, int]:
    """Read "3/8". Any whole number will do for 3, such as a number of commits."""
    number, parts = map(int, text.split("/"))
    return number % parts, parts


def pytest_configure(config: pytest.Config) -> None:
    config.option.full |= config.option.share is not None
    if config.option.full:
        hypothesis.settings.load_profile("full")
    config.pluginmanager.register(Costs(config))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the tests of a share, and run the slowest files first.

    Then the workers end at about the same time.
    """
    if config.option.share is not None:
        chosen = [item for item in items if is_in_share(item, *config.option.share)]
        config.hook.pytest_deselected(items=[item for item in items if item not in {*chosen}])
        items[:] = chosen
    items.sort(key=lambda item: item.path.parent.name != "processes")
    items.sort(key=lambda item: item.path.name not in (*SLOW, *LONG))


def is_in_share(item: pytest.Item, number: int, parts: int) -> bool:
    """Whether a test does more with `--full`, and belongs to a part of these tests.

    The draws of random runs have parts of their own, which take equally long.
    """
    is_longer = "count" in getattr(item, "fixturenames", ()) or hasattr(item.obj, "hypothesis")
    always_runs = item.path.name in ("test_examples.py", "test_guide.py")
    if always_runs or not (is_longer or item.get_closest_marker("full")):
        return False
    part = item.callspec.params.get("part") if hasattr(item, "callspec") else None
    return (zlib.crc32(item.nodeid.encode()) if part is None else part) % parts == number


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import without looking for garbage, then leave what was imported out of the search.

    Searching takes a quarter of collection. Tracing allocates so much that searching all modules
    again and again takes 7 % of a run.

    Compiling the tests takes most of the first collection, so one worker does it for all.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    compiled = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", ""), "tests-are-compiled")
    waits = worker.startswith("gw") and worker != "gw0" and are_tests_uncompiled()
    deadline = time.monotonic() + 60
    while waits and not compiled.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    gc.disable()
    try:
        return (yield)
    finally:
        if worker == "gw0":
            compiled.touch()
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)
        gc.enable()


def are_tests_uncompiled() -> bool:
    """Whether Python stores what it compiles, and has not stored it yet."""
    cached = Path(importlib.util.cache_from_source(str(TESTS / "test_tree.py")))
    return not sys.dont_write_bytecode and not any(cached.parent.glob("test_tree.*pytest*"))


@functools.cache
def is_not_optimized(path: Path) -> bool:
    """Read the setting of a file without importing it, as the scheduler must."""
    is_in_folder = path.relative_to(TESTS).parts[0] in NOT_OPTIMIZED
    return is_in_folder or "pytest.mark.not_optimized" in path.read_text()


@pytest.fixture(autouse=True, scope="module")
def optimizations(request: pytest.FixtureRequest) -> None:
    """Compile without most optimizations where tests do not depend on them."""
    disables = is_not_optimized(request.node.path)
    if jax.config.read("jax_disable_most_optimizations") != disables:
        jax.clear_caches()  # functions that modules share keep what was compiled before
    jax.config.update("jax_disable_most_optimizations", disables)


@pytest.fixture(params=["jit", "eager"])
def run(request: pytest.FixtureRequest) -> Callable:
    """Run a function with and without jit."""
    return jax.jit if request.param == "jit" else lambda function: function


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """Promote dtypes as jax does by default; other tests are strict."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)


def pytest_unconfigure() -> None:
    if not IS_WORKER:
        shutil.rmtree(CACHE["jax_compilation_cache_dir"], ignore_errors=True)


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """Choose the repetitions of a proof: a few by default, and many with --full."""

    def choose(few: int, many: int) -> int:
        if request.config.getoption("--full"):
            return many
        # A property of the test reaches the process that writes the summary.
        request.node.user_properties.append(("repetitions", (few, many)))
        return few

    return choose


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("full") and not item.config.getoption("--full"):
        pytest.skip("slow proof, runs with --full")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write a line for each group of tests that did not run in full."""
    groups: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        groups[reason] = groups.get(reason, 0) + 1
    for reason, skipped in sorted(groups.items()):
        terminalreporter.write_line(f"left out: {skipped} skipped: {reason}")
    repetitions: dict[str, list[int]] = {}
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties if report.when == "call" else ():
            if name == "repetitions":
                total = repetitions.setdefault(report.nodeid.partition("::")[0], [0, 0])
                total[:] = [total[0] + value[0], total[1] + value[1]]
    for path, (few, many) in sorted(repetitions.items()):
        terminalreporter.write_line(f"left out: {path} repeats {few} times, {many} with --full")


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


@pytest.fixture(scope="module")
def server() -> Iterator[s3.Server]:
    """Use a server of S3 that all tests of this process share, with its credentials."""
    with pytest.MonkeyPatch.context() as patch:
        s3.use_credentials(patch)
        yield s3.shared_server()


@pytest.fixture(scope="session")
def program_server(request: pytest.FixtureRequest) -> Iterator[ForkServer]:
    """Run examples and pages of the guide as programs."""
    drawing = ", matplotlib.pyplot" if request.config.getoption("--full") else ""
    with ForkServer(f"{PRELOAD}import sklearn.datasets{drawing}") as server:
        yield server


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Run functions in processes of their own, which may be killed."""
    with Forks() as forks:
        yield forks
