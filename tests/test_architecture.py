"""The shape of the house: layers point one way, tests mirror sources, `__all__` is complete."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stepfold

ROOT = Path(__file__).parent.parent
LIB = Path(stepfold.__file__).parent
SOURCES = sorted(path.relative_to(LIB) for path in LIB.rglob("*.py"))
MODULES = [path for path in SOURCES if path.name not in ("__init__.py", "__main__.py")]

# An import may only point down this list, and never to a sibling on the same line.
LAYERS = [
    {"adapter"},
    {"loop"},
    {"inspect"},
    {"checkpoint", "data", "sharding"},
    {"core"},
    {"tree", "table"},
    {"errors"},
]
# Who alone may import what is heavy.
OWNERS = {
    "orbax": "checkpoint",
    "tensorstore": "checkpoint",
    "tensorflow_datasets": "data/sources",
    "grain": "data/sources",
    "datasets": "data/sources",
}
# A launcher tells a process which it is, and in no other way.
READS_THE_ENVIRONMENT = Path("sharding/distributed.py")
CORE_MAY_IMPORT = {"jax", "numpy", "optax", "chex", "clu"}


def imports(path):
    """List what a module imports, at its top or anywhere in it."""
    for node in ast.walk(ast.parse((LIB / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # `from stepfold import tree` imports stepfold.tree.
            names = [f"stepfold.{alias.name}" for alias in node.names]
            yield from names if node.module == "stepfold" else [node.module]


def layer_of(part):
    return next(height for height, names in enumerate(LAYERS) if part in names)


@pytest.mark.parametrize("path", [path for path in SOURCES if path != Path("__init__.py")], ids=str)
def test_imports_point_down(path):
    mine = path.parts[0].removesuffix(".py")
    for name in imports(path):
        if name.startswith("stepfold"):
            theirs = name.split(".")[1]
            assert mine == theirs or layer_of(mine) < layer_of(theirs), f"{path} imports {name}"


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_heavy_packages_have_one_owner(path):
    for name in imports(path):
        owner = OWNERS.get(name.split(".")[0])
        assert owner is None or path.as_posix().startswith(owner), f"{path} imports {name}"
        if path.parts[0] == "core":
            root = name.split(".")[0]
            allowed = CORE_MAY_IMPORT | {"stepfold"} | sys.stdlib_module_names
            assert root in allowed, f"{path} imports {name}"


def test_imports_form_no_cycle():
    graph = {
        f"stepfold.{'.'.join(path.with_suffix('').parts)}": set(imports(path)) for path in MODULES
    }
    done = set()

    def visit(name, way):
        assert name not in way, f"cycle: {[*way, name]}"
        for other in graph[name] & graph.keys() - done:
            visit(other, [*way, name])
        done.add(name)

    for name in graph:
        visit(name, [])


def test_every_module_has_its_tests_and_no_test_is_orphaned():
    """`test_x.py` is of the module `x`, and so is `test_x_subject.py`."""
    tests = ROOT / "tests"
    wanted = {path.parent / f"test_{path.name}" for path in MODULES}
    folders = {path.parts[0] for path in SOURCES if len(path.parts) > 1}
    there = {
        path.relative_to(tests)
        for path in tests.rglob("test_*.py")
        if path.relative_to(tests).parts[0] in folders
    }
    top = {path for path in wanted if len(path.parts) == 1}
    assert wanted - there - top == set()
    assert not [path for path in there - wanted if not any(map(path.match, _families(wanted)))]
    assert all((tests / path).exists() for path in top)


def _families(wanted):
    return [str(path.with_name(f"{path.stem}_*.py")) for path in wanted]


def test_no_module_is_named_after_nothing():
    vague = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
    assert not [path for path in MODULES if path.stem in vague]


def test_all_is_what_is_public_and_sorted():
    public = {name for name in vars(stepfold) if not name.startswith("_")}
    submodules = {
        path.parts[0].removesuffix(".py") for path in SOURCES if path.parts[0] != "__init__.py"
    }
    assert set(stepfold.__all__) == public - submodules
    assert stepfold.__all__ == sorted(stepfold.__all__)


def test_the_package_file_holds_no_logic():
    body = ast.parse((LIB / "__init__.py").read_text()).body
    assert all(isinstance(node, ast.Expr | ast.ImportFrom | ast.Assign) for node in body)


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_nothing_reads_the_environment_or_keeps_state(path):
    text = (LIB / path).read_text()
    forbidden = r"^\s*global |getenv"
    if path != READS_THE_ENVIRONMENT:
        forbidden += r"|os\.environ"
    assert not re.search(forbidden, text, re.MULTILINE)
    names = {ast.unparse(x) for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Attribute)}
    assert "jax.config.update" not in names  # docstrings may recommend it
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            names = node.targets if isinstance(node, ast.Assign) else [node.target]
            assert not isinstance(node.value, ast.List | ast.Set), (
                f"{path}: {ast.unparse(names[0])}"
            )


# What takes long to import, and so is imported when it is first used.
HEAVY = (
    "orbax tensorstore tensorflow_datasets tensorflow grain datasets safetensors tensorboardX "
    "wandb tqdm rich sklearn matplotlib pandas torch chex flax clu.metrics clu.parameter_overview "
    "jax.extend jax.experimental.pallas jax.experimental.compilation_cache"
)


def test_importing_does_nothing_but_import():
    code = f"""
import logging, os, signal, sys, warnings
import jax, optax
before, there = (dict(os.environ), signal.getsignal(2)), set(sys.modules)
warnings.simplefilter("error")
import stepfold, stepfold.adapter
assert (dict(os.environ), signal.getsignal(2)) == before
assert not logging.getLogger().handlers
heavy = set("{HEAVY}".split()) & (sys.modules.keys() - there)
assert not heavy, heavy
beside = [name for name in sys.modules.keys() - there if not name.startswith("stepfold")]
assert len(beside) < 20, sorted(beside)
# What the first metric imports, while a step is traced perhaps, makes no arrays either.
import clu.metrics
assert not jax._src.xla_bridge.backends_are_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_top_level_is_as_agreed():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    top = {name.split("/")[0] for name in tracked}
    assert top <= {
        *("pyproject.toml", "README.md", "lib", "tests", "examples", "benchmarks"),
        *(".ci", ".gitignore", "LICENSE", "CHANGELOG.md", "uv.lock"),
    }
