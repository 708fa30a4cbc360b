"""Change one token of the library at a time, and list the changes that no test notices.

    python tests/mutants.py --seed 0 --sample 150 --out /tmp/mutants.jsonl

For each mutant that `mutations.py` draws, run the test files that mirror its module, the laws that
use the module, the other files of the folder and those tests elsewhere that run the mutated
statement, and print what survives. `--root` tests another checkout: a seed draws the same mutants
there. No checkout is changed, since the mutants are made in a copy.

Of these files, one counts if it runs the mutated statement or starts Python processes. A run
without mutants finds this out, and has to pass. The tests that run the statement come first, and a
mutant ends with the first failure, or with a timeout if its tests take far longer than usual. With
`--out`, an interrupted run continues; after a change of the tests, name another file. Needs Python
3.12 and Linux.
"""

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import fcntl
import functools
import importlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
import warnings
import zlib
from pathlib import Path

import pytest
from forks import DIE_WITH_PARENT
from mutations import draw

# Imported before the tests are forked. None of them initializes a backend of jax.
PRELOAD = "jax.numpy numpy optax chex clu.metrics orbax.checkpoint tensorstore hypothesis xdist"
# Laws that reach all modules behind the functions that they call.
RANDOM_RUNS = ("test_random_runs.py",)
# Tests of programs that use eight devices: such a program may hang if it is read from a cache.
HANGING = ("test_docs.py", "test_examples.py", "test_guide.py")
BUDGET = 400  # seconds of tests for a mutant: of CPU time, or a quarter of the time on the clock
NOT_RUN = {"starts_processes": False, "covers": {}, "seconds": {}}


class Tests:
    """Find the test files of each module."""

    def __init__(self, root):
        self.lib, self.tests = root / "lib/stepfold", root / "tests"
        self.public = {}
        for package in ("__init__.py", "adapter/__init__.py"):
            for node in ast.parse((self.lib / package).read_text()).body:
                if isinstance(node, ast.ImportFrom):
                    self.public |= {alias.name: self.module(node.module) for alias in node.names}

    def of(self, path):
        """List the files that mirror a module, laws that use it, its folder's, and all others."""
        module, folder = self.lib / path, self.tests / Path(path).parent
        name = f"test_{module.stem.strip('_')}"
        others = {f"test_{other.stem}" for other in module.parent.glob("*.py")} - {name}
        mirror = {folder / f"{name}.py", *folder.glob(f"{name}_*.py")}
        mirror = {file for file in mirror if file.exists() and file.stem not in others}
        if not mirror:
            users = {file for file in folder.glob("test_*.py") if path in self.uses(file)}
            mirror = {*self.tests.rglob(f"{name}.py"), *users}
        laws = {file for file in self.tests.glob("laws/test_*.py") if path in self.uses(file)}
        rest = {*folder.glob("test_*.py")} - mirror
        far = {*self.tests.rglob("test_*.py")} - mirror - laws - rest
        far = {file for file in far if file.name not in HANGING}
        return sorted(mirror), sorted(laws - mirror), sorted(rest), sorted(far)

    @functools.cache  # noqa: B019
    def uses(self, file):
        """Return the modules that a file or its helpers import, or use a public name of."""
        used = set()
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Attribute(value=ast.Name(id="sf"), attr=name):
                    used.add(self.public.get(name))
                case ast.ImportFrom(module=module, names=names, level=level):
                    parent = file.parent if level else self.tests.parent
                    folder = parent.joinpath(*(module or "").split("."))
                    for name in (alias.name for alias in names):
                        if module in ("stepfold", "stepfold.adapter"):
                            used.add(self.public.get(name))
                        used |= {self.module(module), self.module(f"{module}.{name}")}
                        helpers = {folder.with_suffix(".py"), folder / f"{name}.py"}
                        used |= set().union(*map(self.uses, filter(Path.is_file, helpers)))
        if file.name in RANDOM_RUNS:
            todo = used - {None}
            while todo:
                todo = set().union(*(self.uses(self.lib / path) for path in todo)) - used
                used |= todo
        return frozenset(used - {None})

    def module(self, name):
        """Return the path of a module of stepfold, or None."""
        package, _, rest = (name or "").partition(".")
        path = rest.replace(".", "/") + ".py"
        return path if package == "stepfold" and (self.lib / path).is_file() else None


class Recorder:
    """A pytest plugin that notes which tests run the statements of mutants."""

    def __init__(self, mutants, lib, path):
        self.path, self.test, self.starts_processes = path, "", False
        self.covers, self.seconds = collections.defaultdict(dict), collections.Counter()
        self.keys = collections.defaultdict(list)
        for mutant in mutants:
            for line in range(mutant.statement[0], mutant.statement[1] + 1):
                self.keys[f"{lib}/stepfold/{mutant.path}", line].append(mutant.key)
        self.tool = sys.monitoring.COVERAGE_ID
        sys.monitoring.use_tool_id(self.tool, "mutants")
        sys.monitoring.register_callback(self.tool, sys.monitoring.events.LINE, self.see_line)
        sys.monitoring.set_events(self.tool, sys.monitoring.events.LINE)
        sys.addaudithook(self.see_event)

    def see_line(self, code, line):
        for key in self.keys.get((code.co_filename, line), ()):
            self.covers[key][self.test] = None
        return sys.monitoring.DISABLE  # until the next test

    def see_event(self, event, arguments):
        is_python = event == "subprocess.Popen" and sys.executable in str(arguments)
        self.starts_processes |= is_python or event in ("os.fork", "os.exec", "os.posix_spawn")

    def pytest_runtest_logstart(self, nodeid):
        self.test = nodeid
        sys.monitoring.restart_events()

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self):
        names = ("starts_processes", "covers", "seconds")
        self.path.write_text(json.dumps({name: getattr(self, name) for name in names}))


class Order:
    """A pytest plugin that runs some tests first, from cheap to costly."""

    def __init__(self, seconds):
        self.seconds = seconds

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items.sort(key=lambda item: self.seconds.get(item.nodeid, float("inf")))


class Runner:
    """Run tests against a copy of the library, in forked processes."""

    def __init__(self, root, mutants, work):
        self.root, self.mutants, self.work = root, mutants, work
        self.sample = zlib.crc32(" ".join(mutant.key for mutant in mutants).encode())
        tests = Tests(root)
        self.files = {path: tests.of(path) for path in {mutant.path for mutant in mutants}}

    def try_mutant(self, mutant):
        """Run the tests of a mutant until one fails, and return the line of the results."""
        lib = self.copy_lib("mutant")
        target = lib / "stepfold" / mutant.path
        target.write_bytes(mutant.apply(target.read_bytes()))
        modified = int(mutant.key[:7], 16)  # another for each mutant, since bytecode is kept by it
        os.utime(target, (modified, modified))
        verdict, by, spent, ran = "survived", "", 0.0, 0
        for file, usual, is_near in self.files_for(mutant):
            covering = usual["covers"].get(mutant.key, ())
            seconds = {test: usual["seconds"].get(test, 0.0) for test in covering}
            tests = [file] if is_near else sorted({*covering} - {""})
            limit = 30 + 5 * usual["cpu"]
            for _ in range(2):
                left = min(limit, BUDGET - spent)
                code, cpu, by = self.run(tests, lib, lambda: Order(seconds), left)
                spent, ran = spent + cpu, ran + 1
                if code in (0, None) or by in seconds:
                    break  # a test that does not run the statement may fail by chance, once
            if code is None and cpu < limit:
                verdict = "unfinished"
            elif code != 0:
                verdict, by = "timeout" if code is None else "killed", by or file.name
            if code != 0:
                break
        line = {name: getattr(mutant, name) for name in ("key", "path", "line", "change", "source")}
        return line | {"verdict": verdict, "by": by, "cpu": round(spent, 1), "ran": ran}

    def files_for(self, mutant):
        """Yield the files that count, the cheap ones first, with what their run was like."""
        groups = self.files[mutant.path]
        for group in groups:
            is_near = group is not groups[-1]
            found = [(file, self.run_unmutated(file)) for file in group]
            for file, usual in sorted(found, key=lambda pair: pair[1]["cpu"]):
                covering = usual["covers"].get(mutant.key, ())
                # An empty name stands for what a file runs before its tests, such as an import.
                counts = covering or usual["starts_processes"] if is_near else {*covering} - {""}
                if counts:
                    yield file, usual, is_near

    def run_unmutated(self, file):
        """Run a file once; return its time and which of its tests run the statements of mutants."""
        name = file.relative_to(self.root).as_posix().replace("/", "-")
        path = self.work / f"{name}-{self.sample}.json"
        with Path(f"{path}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                lib, record = self.copy_lib("lib"), path.with_suffix(".record")
                make_plugin = functools.partial(Recorder, self.mutants, lib, record)
                for _ in range(2):  # a loaded machine may fail a test
                    code, cpu, by = self.run([file], lib, make_plugin, BUDGET)
                    if code == 0:
                        break
                found = json.loads(record.read_text()) if code == 0 else NOT_RUN | {"failed": by}
                path.write_text(json.dumps(found | {"cpu": cpu}))
        return json.loads(path.read_text())

    def copy_lib(self, name):
        """Copy lib/ for this process, or set its copy right."""
        lib, ignore = self.work / f"{name}-{os.getpid()}", shutil.ignore_patterns("__pycache__")
        return shutil.copytree(self.root / "lib", lib, ignore=ignore, dirs_exist_ok=True)

    def run(self, tests, lib, make_plugin, limit):
        """Run files or tests; return the exit code (None after the limit), time and failed test."""
        scratch, log = self.work / f"tmp-{os.getpid()}", self.work / f"log-{os.getpid()}"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        process = os.fork()
        if process == 0:
            code = 70
            try:
                code = self.run_pytest(tests, str(lib), make_plugin, scratch, log)
            except BaseException:
                traceback.print_exc()
                raise
            finally:
                sys.stdout.flush()
                os._exit(code)
        code, cpu = wait(process, limit)
        failed = re.search(
            r"^(?:FAILED|ERROR) (\S.*?)(?: - |$)", log.read_text(errors="replace"), re.M
        )
        return code, cpu, failed[1] if failed else ""

    def run_pytest(self, tests, lib, make_plugin, scratch, log):
        os.setsid()
        die_with_parent()
        sys.modules["__main__"] = types.ModuleType(
            "__main__"
        )  # else tests that spawn run this file
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # tests/conftest.py leaves the compilation cache as it is in the processes of xdist.
        os.environ |= {
            "PYTHONPATH": lib, "TMPDIR": str(scratch), "PYTEST_XDIST_WORKER": "mutants",
            "PYTHONPYCACHEPREFIX": sys.pycache_prefix,
        }  # fmt: skip
        tempfile.tempdir = None
        sys.path[:] = [lib, *sys.path[1:]]  # without the folder of this script
        os.chdir(self.root)
        found = importlib.util.find_spec("stepfold").origin
        assert found.startswith(lib), f"the tests would import {found}"
        options = ["-x", "-q", "-n0", "-pno:cacheprovider", "--assert=plain", "--color=no"]
        arguments = [*options, f"--basetemp={scratch}/pytest", *map(str, tests)]
        return int(pytest.main(arguments, plugins=[make_plugin()]))


def die_with_parent():
    exec(DIE_WITH_PARENT.format(signal=9))


def wait(process, limit):
    """Wait for a process, and kill it after the limit; return its exit code and its time."""
    started, ticks = time.monotonic(), os.sysconf("SC_CLK_TCK")
    while True:
        ended, status, usage = os.wait4(process, os.WNOHANG)
        if ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)  # what the tests have left
            return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        # user and system time, of the process and of its children that have ended
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:15]
        spent = max(sum(map(int, fields)) / ticks, (time.monotonic() - started) / 4)
        if spent > limit:
            os.killpg(process, signal.SIGKILL)
            os.wait4(process, 0)
            return None, spent
        time.sleep(0.05)


def preload(work):
    """Import the heavy packages, and let all processes share bytecode and compiled programs."""
    import jax

    sys.pycache_prefix = f"{work}/bytecode"
    settings = {
        "jax_compilation_cache_dir": f"{work}/compiled",
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)
    for name in PRELOAD.split():
        importlib.import_module(name)
    # The threads of numpy are idle, and jax starts its own after the fork.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)


def describe(result):
    return f"lib/stepfold/{result['path']}:{result['line']}: {result['change']}"


def summarize(results):
    """Write a table of folders, and the survivors of each."""
    folders = collections.defaultdict(list)
    for result in sorted(results, key=lambda result: (result["path"], result["line"])):
        folders[result["path"].split("/")[0].removesuffix(".py")].append(result)
    lines = [f"{'folder':12}{'mutants':>9}{'killed':>9}{'timeout':>9}{'survived':>10}{'share':>8}"]
    for folder, group in (*folders.items(), ("all", results)):
        count = collections.Counter(result["verdict"] for result in group)
        dead = count["killed"] + count["timeout"]
        numbers = f"{len(group):9}{count['killed']:9}{count['timeout']:9}{len(group) - dead:10}"
        lines.append(f"{folder:12}{numbers}{dead / max(1, len(group)):8.0%}")
    for folder, group in folders.items():
        lines.append(f"\nsurvivors in {folder}")
        for result in group:
            if result["verdict"] in ("survived", "unfinished"):
                note = "" if result["ran"] else ", which no test runs"
                note += f", not all tests in {BUDGET} s" * (result["verdict"] == "unfinished")
                lines += [f"  {describe(result)}{note}", f"      {result['source']}"]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=150, help="number of mutants")
    parser.add_argument("--only", default="", help="folder or module of lib/stepfold")
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, help="file of results, a line of JSON for each mutant")
    parser.add_argument("--list", action="store_true", help="print the sample, and run nothing")
    options = parser.parse_args()
    root = options.root.resolve()
    mutants, candidates = draw(root / "lib/stepfold", options.seed, options.sample, options.only)
    print(f"{len(mutants)} of {candidates} mutants, seed {options.seed}", flush=True)
    if options.list:
        print("\n".join(f"{describe(vars(mutant))}\n    {mutant.source}" for mutant in mutants))
        return
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-")))
        results, out = {}, None
        if options.out:
            out = stack.enter_context(options.out.open("a+"))
            out.seek(0)
            results = {result["key"]: result for result in map(json.loads, out)}
            work = Path(f"{options.out.resolve()}.work")
            work.mkdir(exist_ok=True)
        preload(work)
        todo = [mutant for mutant in mutants if mutant.key not in results]
        runner, fork = Runner(root, mutants, work), multiprocessing.get_context("fork")
        pool = concurrent.futures.ProcessPoolExecutor(options.jobs, fork, die_with_parent)
        stack.callback(pool.shutdown, cancel_futures=True)
        runs = [pool.submit(runner.try_mutant, mutant) for mutant in todo]
        for run in concurrent.futures.as_completed(runs):
            result = run.result()
            results[result["key"]] = result
            by = result["by"] and f" by {result['by']}"
            print(
                f"{result['verdict']:9}{result['cpu']:5.0f} s  {describe(result)}{by}", flush=True
            )
            if out:
                print(json.dumps(result), file=out, flush=True)
        for path in work.glob("*.json"):
            if failed := json.loads(path.read_text()).get("failed"):
                print(f"left out: {path.stem}, which fails without a mutant: {failed}")
    print(summarize([results[mutant.key] for mutant in mutants]))


if __name__ == "__main__":
    main()
