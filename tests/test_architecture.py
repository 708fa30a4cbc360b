"""Layers, imports, internals of other packages, where tests live, and what an import does."""

import ast
import functools
import importlib
import itertools
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import stepfold

ROOT = Path(__file__).parent.parent
LIB = Path(stepfold.__file__).parent
SOURCES = sorted(path.relative_to(LIB) for path in LIB.rglob("*.py"))
MODULES = [path for path in SOURCES if path.name not in ("__init__.py", "__main__.py")]
NAMES = {f"stepfold.{'.'.join(path.with_suffix('').parts)}": path for path in MODULES}

# An import may only point down this list, and never to a sibling on the same line.
LAYERS = [
    {"adapter", "testing"},
    {"debug"},
    {"runs"},
    {"cluster"},
    {"hooks"},
    {"writers"},
    {"loop"},
    {"inspect"},
    {"optim"},
    {"checkpoint", "data", "sharding"},
    {"object_storage"},
    {"core"},
    {"internals"},
    {"rename"},
    {"moved"},
    {"errors"},
    {"tree", "table", "lazy", "json_files"},
]
# The module or package that alone may import a heavy package.
OWNERS = {
    "orbax": "internals/orbax.py",
    "tensorstore": ("checkpoint/", "object_storage.py"),
    "safetensors": "checkpoint/",
    "tensorflow_datasets": ("data/tfds.py", "internals/datasets.py"),
    "grain": "adapter/loading.py",
    "datasets": "data/sources.py",
    "pyarrow": "data/file_formats.py",
    "array_record": "data/file_formats.py",
    "cloudpickle": ("data/shared_memory.py", "testing.py"),
    "tensorboardX": "writers/",
    "trackio": "writers/",
    "wandb": "writers/",
    "tqdm": "hooks/",
    "rich": "hooks/",
}
CORE_MAY_IMPORT = {"stepfold", "jax", "numpy", "optax", "chex", "clu"}
# The only modules that use the environment: a launcher sets a process's rank in it, libtpu reads
# its options from it, and the processes of workers and of the launcher get a changed copy.
USE_THE_ENVIRONMENT = {
    Path("cluster/distributed.py"),
    Path("sharding/topology.py"),
    Path("data/worker_pool.py"),
    Path("cluster/launcher.py"),
}
# Tests of more than one package.
CROSS_PACKAGE_TESTS = {"laws", "faults", "clients", "processes"}


@functools.cache
def parse(path):
    return ast.parse((LIB / path).read_text())


@functools.cache
def imports(path, *, types=True):
    """List what a module imports, at its top or inside functions; `types` adds TYPE_CHECKING."""
    nodes = [
        node
        for node in parse(path).body
        if types or not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    names = []
    for node in itertools.chain.from_iterable(map(ast.walk, nodes)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # `from stepfold import tree` imports stepfold.tree.
            submodules = [f"stepfold.{alias.name}" for alias in node.names]
            names += submodules if node.module == "stepfold" else [node.module]
    return names


def layer_of(part):
    return next(height for height, names in enumerate(LAYERS) if part in names)


def test_imports_point_down():
    for path in SOURCES:
        if path in (Path("__init__.py"), Path("__main__.py"), Path("loop/__main__.py")):
            continue
        package = path.parts[0].removesuffix(".py")
        for name in imports(path):
            if name.startswith("stepfold"):
                imported = name.split(".")[1]
                below = layer_of(package) < layer_of(imported)
                assert package == imported or below, f"{path} imports {name}"


def test_the_guide_lists_the_layers_from_top_to_bottom():
    text = (ROOT / "examples" / "guide" / "contributing.md").read_text()
    section = text.partition("## The rooms")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| (`[\w`, ]+) \|", section, re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    heights = [layer_of(name) for name in listed]
    assert heights == sorted(heights)
    assert sorted(listed) == sorted(itertools.chain.from_iterable(LAYERS))


def test_the_guide_for_contributors_names_files_that_exist():
    text = (ROOT / "examples" / "guide" / "contributing.md").read_text()
    paths = re.findall(r"`((?:\w+/)+\w+\.py)`", text)
    assert len(paths) > 20
    assert [path for path in paths if not ((LIB / path).exists() or (ROOT / path).exists())] == []


def test_heavy_packages_have_one_owner():
    for path in SOURCES:
        for name in imports(path):
            root = name.split(".")[0]
            owner = OWNERS.get(root, "")
            assert path.as_posix().startswith(owner), f"{path} imports {name}"
            if path.parts[0] == "core":
                allowed = CORE_MAY_IMPORT | sys.stdlib_module_names
                assert root in allowed, f"{path} imports {name}"


def test_orbax_is_behind_one_module():
    users = [path for path in SOURCES if any(name.startswith("orbax") for name in imports(path))]
    assert len(users) == 1, users


# Public by their names, but a release may change them without notice.
UNSTABLE_MODULES = ("jax.interpreters", "jax.lib", "jaxlib", "orbax.checkpoint.future")
UNSTABLE_NAMES = {
    *("dce_jaxpr", "source_info", "runtime_type", "get_live_nodes", "typestr"),
    *("compile_args", "config_states", "read_only_builder", "DatasetNotFoundError", "ex_iterable"),
}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def own_names():
    """Collect the private names that stepfold defines: functions, classes and attributes."""
    names = {"_replace", "_asdict", "_fields", "_make"}  # of every NamedTuple
    for path in SOURCES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def foreign_names(path, own):
    """List private and unstable parts of other packages that a module uses."""
    found = []
    for name in imports(path):
        parts = name.split(".")
        is_own = parts[0] == "stepfold"
        if not is_own and (any(map(is_private, parts)) or name.startswith(UNSTABLE_MODULES)):
            found.append(name)
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom) and not node.module.startswith("stepfold"):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            names = [getattr(node.args[1], "value", "")]
        else:
            continue
        names = [name for name in names if isinstance(name, str)]
        found += [name for name in names if is_private(name) and name not in own]
        found += [name for name in names if name in UNSTABLE_NAMES]
    return found


def test_internals_of_other_packages_are_in_one_place():
    own = own_names()
    found = {path: foreign_names(path, own) for path in SOURCES}
    assert [path for path in SOURCES if path.parts[0] != "internals" and found[path]] == []
    used = {*itertools.chain.from_iterable(found.values())}
    assert {"jax._src.distributed", "_lowering", "dce_jaxpr", "_ex_iterable"} <= used


def test_errors_of_others_are_recognized_in_one_place():
    for path in SOURCES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Compare):
                compared = isinstance(node.left, ast.Constant) and node.comparators[0]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                is_search = ast.unparse(node.func.value) == "re" and len(node.args) > 1
                compared = node.args[1] if is_search else node.func.value
            else:
                continue
            text = ast.unparse(compared) if isinstance(compared, ast.AST) else ""
            is_test = not isinstance(node, ast.Call) or node.func.attr in (
                *("search", "match", "fullmatch", "findall", "startswith", "endswith"),
            )
            assert not (text == "str(error)" and is_test), f"{path}: {ast.unparse(node)}"


def test_all_warnings_point_to_the_user():
    shows = {"warnings.warn", "warnings.warn_explicit"}
    calls = {
        path: {
            ast.unparse(node.func) for node in ast.walk(parse(path)) if isinstance(node, ast.Call)
        }
        for path in SOURCES
    }
    # Batches show the warnings of their processes again, at the lines of the user there.
    assert {path for path in SOURCES if calls[path] & shows} == {
        Path("errors.py"),
        Path("data/workers.py"),
    }


def module_graph(*, types=False):
    """Map each module to the modules that it imports when it runs; `types` adds TYPE_CHECKING."""
    return {name: imported_modules(path, types=types) for name, path in NAMES.items()}


def imported_modules(path, *, types):
    # `from stepfold.adapter import run` imports stepfold.adapter.run.
    submodules = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    return {*imports(path, types=types), *submodules} & NAMES.keys()


def test_imports_form_no_cycle():
    check_no_cycle(module_graph())


@pytest.mark.parametrize(
    "package",
    [
        *("adapter", "checkpoint", "cluster", "core", "data", "debug", "hooks", "inspect", "loop"),
        *("optim", "runs", "sharding", "writers"),
    ],
)
def test_imports_form_no_cycle_even_for_types(package):
    graph = module_graph(types=True)
    names = [name for name in graph if name.startswith(f"stepfold.{package}.")]
    assert len(names) >= 4
    check_no_cycle({name: graph[name] & {*names} for name in names})


def test_the_fold_knows_no_files_signals_threads_or_processes():
    names = imports(Path("loop/fold.py"))
    assert not {name.split(".")[0] for name in names} & {"os", "pathlib", "signal", "threading"}
    tree = parse(Path("loop/fold.py"))
    (fold,) = (node for node in tree.body if getattr(node, "name", None) == "fold")
    assert fold.end_lineno - fold.lineno < 40


def test_only_the_trainer_knows_its_class():
    others = [
        path
        for path in SOURCES
        if path.parts[0] == "adapter" and path.name not in ("trainer.py", "__init__.py")
    ]
    for path in others:
        assert "stepfold.adapter.trainer" not in imported_modules(path, types=True)
        words = {getattr(node, "id", getattr(node, "value", 0)) for node in ast.walk(parse(path))}
        assert "Trainer" not in words, f"{path} names Trainer"  # a name, or one in quotes


def check_no_cycle(graph):
    done = set()

    def visit(name, chain):
        assert name not in chain, f"cycle: {[*chain, name]}"
        for imported in graph[name] - done:
            visit(imported, [*chain, name])
        done.add(name)

    for name in graph:
        visit(name, [])


def test_every_module_at_the_top_is_an_attribute():
    names = {path.parts[0].removesuffix(".py") for path in MODULES}
    assert all(getattr(stepfold, name).__name__ == f"stepfold.{name}" for name in names)
    assert {*stepfold._SUBMODULES} == names


def test_every_package_has_its_tests():
    tests = ROOT / "tests"
    packages = {path.parent for path in MODULES} - {Path()}
    for package in packages:
        assert list((tests / package).glob("test_*.py")), f"no tests in tests/{package}"
    for path in MODULES:
        if len(path.parts) == 1:
            assert (tests / f"test_{path.name}").exists(), f"no tests of {path}"
    folders = {path.relative_to(tests).parent for path in tests.rglob("test_*.py")}
    assert folders - packages - {Path()} == set(map(Path, CROSS_PACKAGE_TESTS))


def test_classes_have_different_names():
    places = defaultdict(list)
    for path in SOURCES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path)
    # All but those of the adapters, each of which has the name that its library documents.
    assert {name: paths for name, paths in places.items() if len(paths) > 1}.keys() == {"Trainer"}


def test_no_vague_module_names():
    vague = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
    assert not [path for path in MODULES if path.stem in vague]


def test_the_docstring_of_a_folder_names_files_that_exist():
    named = 0
    for path in SOURCES:
        if path.name == "__init__.py":
            docstring = ast.get_docstring(parse(path)) or ""
            files = re.findall(r"`(\w+\.(?:py|html))`", docstring)
            assert [name for name in files if not (LIB / path.parent / name).exists()] == [], path
            named += len(files)
    assert named > 20


# Phrases that read as translated, and words of which plainer ones exist.
AVOIDED = (
    "belong into|belongs into|also if|as it came|give as many|as many to each|with which a run|"
    "anew|nobody|makes do|so many|is well|let go|ever so|on its own account"
)


def test_prose_is_idiomatic():
    found = [
        f"{path}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in enumerate((LIB / path).read_text().splitlines(), 1)
        if re.search(rf"\b({AVOIDED})\b", line, re.IGNORECASE)
    ]
    assert not found


def test_a_small_module_is_public_or_has_several_importers():
    importers = defaultdict(set)
    for name, imported in module_graph().items():
        for module in imported:
            importers[module].add(name)
    small = {
        path.as_posix()
        for name, path in NAMES.items()
        if (LIB / path).read_text().count("\n") < 70
        and len(importers[name]) == 1
        and name not in imports(Path("__init__.py"))
    }
    assert not small


LAZY = [
    path
    for path in SOURCES
    if path.name == "__init__.py" and "typing" in imports(path)  # for TYPE_CHECKING
]


@pytest.mark.parametrize("path", LAZY, ids=str)
def test_all_lists_the_public_names_in_order(path):
    package = importlib.import_module(".".join(["stepfold", *path.parent.parts]))
    (block,) = (node for node in parse(path).body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    typed = {alias.name: node.module for node in block.body for alias in node.names}
    assert package.__all__ == sorted(typed)
    for name, module in typed.items():
        assert getattr(package, name) is getattr(importlib.import_module(module), name)


def test_the_package_file_has_no_logic():
    *body, names, renamed = parse(Path("__init__.py")).body
    assert [names.name, renamed.name] == ["__dir__", "__getattr__"]
    plain = ast.Expr | ast.ImportFrom | ast.Assign | ast.If
    assert all(isinstance(node, plain) for node in body)


def test_a_name_is_imported_on_first_use():
    """So a command of the launcher starts in milliseconds, and its processes hold little."""
    code = """
import sys
import stepfold.__main__
others = sorted(name for name in sys.modules if name.partition(".")[0] in ("jax", "numpy"))
own = {name for name in sys.modules if name.startswith("stepfold.")}
assert not others, others
assert own == {f"stepfold.{name}" for name in ("__main__", "cluster", "cluster.launcher", "lazy")}
import stepfold as sf
assert "fit" in dir(sf) and "fit" not in vars(sf)
assert sf.tree.__name__ == "stepfold.tree"
assert sf.fit is vars(sf)["fit"]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# Whether processes survive the death of another is a setting of jax's that it reads as it starts.
STARTS_JAX = Path("internals/jax.py")


def test_nothing_reads_the_environment_or_keeps_state():
    for path in MODULES:
        forbidden = r"^\s*global |getenv"
        if path not in USE_THE_ENVIRONMENT:
            forbidden += r"|os\.environ"
        assert not re.search(forbidden, (LIB / path).read_text(), re.MULTILINE), path
        names = {ast.unparse(x) for x in ast.walk(parse(path)) if isinstance(x, ast.Attribute)}
        if path != STARTS_JAX:
            assert "jax.config.update" not in names, path  # docstrings may recommend it
        for node in parse(path).body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                mutable = isinstance(node.value, ast.List | ast.Set)
                assert not mutable, f"{path}: {ast.unparse(node)}"


# Packages that take long to import are imported on first use.
HEAVY = (
    "orbax tensorstore tensorflow_datasets tensorflow grain datasets safetensors tensorboardX "
    "wandb trackio cloudpickle tqdm rich sklearn matplotlib pandas torch flax clu.metrics "
    "clu.parameter_overview "
    "jax.extend jax.experimental.pallas jax.experimental.compilation_cache"
)


def test_import_has_no_side_effects():
    code = f"""
import logging, os, signal, sys, warnings
import jax, optax, chex
before, loaded = (dict(os.environ), signal.getsignal(2)), set(sys.modules)
warnings.simplefilter("error")
import stepfold.adapter
from stepfold import *
assert (dict(os.environ), signal.getsignal(2)) == before
assert not logging.getLogger().handlers
heavy = set("{HEAVY}".split()) & (sys.modules.keys() - loaded)
assert not heavy, heavy
others = [name for name in sys.modules.keys() - loaded if not name.startswith("stepfold")]
assert len(others) < 20, sorted(others)
# The first metric may be made while a step is traced, so its import must not create arrays.
import clu.metrics
assert not jax._src.xla_bridge.backends_are_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_top_level_has_only_known_entries():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    top = {name.split("/")[0] for name in tracked}
    assert top <= {
        *("pyproject.toml", "README.md", "lib", "tests", "examples", "benchmarks"),
        *(".ci", ".gitignore", "LICENSE", "CHANGELOG.md", "uv.lock"),
    }
