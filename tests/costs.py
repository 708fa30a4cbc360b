"""Measure what tests cost in units that do not depend on how busy the machine is, and bound them.

`pytest` without arguments is what a newcomer runs first, so it has to stay cheap: it fails if it
costs more than `BOUNDS`. A test that does not fit is made cheaper, or runs with `--full` only.
"""

import os
import resource
import sys
from collections.abc import Iterator
from typing import NamedTuple

import jax
import pytest

# Not os.posix_spawn, by which `subprocess.Popen` starts processes since Python 3.13.
START_PROCESSES = ("os.fork", "subprocess.Popen", "tests.fork")
COMPILE = "/jax/core/compile/backend_compile_duration"


class Cost(NamedTuple):
    """CPU seconds, programs compiled in this process, and processes started.

    The CPU seconds are those of this process and of the processes that it has waited for.
    """

    cpu: float = 0.0
    compiled: int = 0
    processes: int = 0

    def __sub__(self, other: "Cost") -> "Cost":
        return Cost(*(mine - its for mine, its in zip(self, other, strict=True)))


# Programs and processes are the same on every machine. CPU seconds are not: a machine that is slow,
# or that others use, takes twice as many. So their bound only catches what is far too slow.
BOUNDS = Cost(cpu=1_800, compiled=4_800, processes=92)


class Costs:
    """A pytest plugin that measures each test, writes a summary, and holds `BOUNDS`."""

    def __init__(self, config: pytest.Config) -> None:
        self._compiled = self._processes = 0
        self._is_bounded = is_default_run(config)
        self._tests: dict[str, Cost] = {}
        self._workers: list[Cost] = []
        jax.monitoring.register_event_duration_secs_listener(self._see_duration)
        sys.addaudithook(self._see_event)

    def _see_duration(self, name: str, *_: object, **__: object) -> None:
        self._compiled += name == COMPILE

    def _see_event(self, event: str, _: object) -> None:
        self._processes += event in START_PROCESSES

    def spent(self) -> Cost:
        """Return what this process has cost so far."""
        return Cost(cpu_seconds(), self._compiled, self._processes)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        item.stash[BEFORE] = self.spent()
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        # A property of the test reaches the process that writes the summary.
        item.user_properties.append(("cost", tuple(self.spent() - item.stash[BEFORE])))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        costs = [value for name, value in report.user_properties if name == "cost"]
        if report.when == "teardown" and costs:
            self._tests[report.nodeid] = Cost(*costs[-1])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cost"] = tuple(self.spent())
        yield
        if self.problems():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object, error: object) -> None:
        if "cost" in getattr(node, "workeroutput", {}):
            self._workers.append(Cost(*node.workeroutput["cost"]))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total = self.total()
        write = terminalreporter.write_line
        if len(self._tests) > 10:
            write("the ten slowest tests, in CPU seconds:")
            slowest = sorted(self._tests.items(), key=lambda item: -item[1].cpu)[:10]
            for name, cost in slowest:
                write(f"{cost.cpu:6.1f}  {name}  ({cost.compiled} compiled)")
        write(
            f"cost: {total.cpu:.0f} s of CPU, {total.compiled} programs compiled, "
            f"{total.processes} processes started"
        )
        for problem in self.problems():
            write(problem, red=True)

    def total(self) -> Cost:
        """Return the cost of the run; the workers and all their children have ended by then."""
        costs = self._workers or [self.spent()]
        compiled = sum(cost.compiled for cost in costs)
        return Cost(cpu_seconds(), compiled, sum(cost.processes for cost in costs))

    def problems(self) -> list[str]:
        """Say which bounds the run has broken, if it is the one that they hold for."""
        return [
            f"cost: expected at most {bound} {name}, got {spent:.0f}; make the slowest tests "
            "cheaper, or mark them `full`"
            for name, spent, bound in zip(Cost._fields, self.total(), BOUNDS, strict=True)
            if self._is_bounded and spent > bound
        ]


BEFORE = pytest.StashKey[Cost]()


def is_default_run(config: pytest.Config) -> bool:
    """Whether this is `pytest` without a choice of tests, in the process that starts workers."""
    options = config.option
    chosen = options.keyword or options.markexpr or options.full or options.share
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    return config.args_source is config.ArgsSource.TESTPATHS and not chosen and not is_worker


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
