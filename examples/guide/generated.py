"""Write the pages and notebooks of the guide that are made from other files.

- A page for each example: its docstring, what it prints, and its source.
- Pages of all messages of errors and warnings, read from the sources of stepfold.
- The table of names that have moved since version 0.2.
- Notebooks of some tutorials. `INSTALL` is their first cell.

The build of the site writes them; git ignores them.
"""

import ast
import itertools
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import stepfold
from stepfold import errors, moved

GUIDE = Path(__file__).parent
EXAMPLES = GUIDE.parent
NOTEBOOKS = {
    "tutorials/first-run": "scikit-learn matplotlib",
    "tutorials/language-model": "matplotlib",
    "tutorials/reinforcement-learning": "matplotlib",
}
INSTALL = """\
import importlib.util

if importlib.util.find_spec("stepfold") is None:
    %pip install --quiet "stepfold @ git+{repository}" {packages}"""
# The folders of stepfold, and what their messages are about.
TOPICS = {
    "core": ("Loss, step and metrics", "../reference/steps.md"),
    "optim": ("Averages, spikes and low precision", "../reference/optim.md"),
    "data": ("Data and batches", "../reference/data.md"),
    "sharding": ("Devices and shardings", "../reference/sharding.md"),
    "checkpoint": ("Checkpoints and weights", "../reference/checkpoint.md"),
    "loop": ("The loop, events and evaluations", "../reference/runs.md"),
    "runs": ("fit, the files of a run, and predictions", "../reference/runs.md"),
    "hooks": ("Hooks", "../reference/hooks.md"),
    "writers": ("Writers of metrics", "../reference/writers.md"),
    "cluster": ("Several processes", "../reference/sharding.md"),
    "inspect": ("Descriptions of compiled steps", "../reference/inspect.md"),
    "debug": ("A step that went wrong, and runs that differ", "../reference/debug.md"),
    "adapter": ("The trainer object and its arguments", "../reference/adapter.md"),
}


def public_names() -> dict[str, str]:
    """Map each public name, such as "sf.hooks.Stop", to where the reference has it."""
    names = {f"sf.{name}": f"stepfold.{name}" for name in stepfold.__all__}
    # Some are in `stepfold` too, and `ordered_norm` is in both `optim` and `sharding`.
    places = {id(getattr(stepfold, name)): f"stepfold.{name}" for name in stepfold.__all__}
    for folder in stepfold._PUBLIC:
        module = getattr(stepfold, folder)
        for name in module.__all__:
            place = places.setdefault(id(getattr(module, name)), f"stepfold.{folder}.{name}")
            names[f"sf.{folder}.{name}"] = place
    return names


def moved_names() -> str:
    """Return a table of the names of version 0.2, and what their warnings say."""
    rows = {name: text.removeprefix("is now ") for name, text in moved.GONE.items()}
    for name in moved.MOVED:
        with warnings.catch_warnings(record=True, action="always") as caught:
            moved.find_moved(name)
        rows[name] = f"`{re.search(' is now (.*); `', str(caught[0].message))[1]}`"
    lines = [f"| `sf.{name}` | {rows[name]} |" for name in sorted(rows, key=str.lower)]
    return "\n".join(["| in 0.2 | now |", "| --- | --- |", *lines]) + "\n"


class Message(NamedTuple):
    """The text of an error or a warning, with `…` for what is known only when it is raised."""

    kind: str
    text: str


def write_all(repository: str) -> None:
    """Write all pages and notebooks."""
    for path in sorted(EXAMPLES.glob("*.py")):
        _write(GUIDE / "examples" / f"{path.stem}.md", example_page(path))
    for folder, (title, reference) in TOPICS.items():
        page = messages_page(title, reference, messages(folder))
        _write(GUIDE / "troubleshooting" / f"{folder}.md", page)
    _write(GUIDE / "coming-from" / "moved-names.txt", moved_names())
    for name, packages in NOTEBOOKS.items():
        page = (GUIDE / f"{name}.md").read_text()
        cells = notebook(page, INSTALL.format(repository=repository, packages=packages))
        _write(GUIDE / f"{name}.ipynb", json.dumps(cells, indent=1))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text() != text:  # an unchanged page is not built again
        path.write_text(text)


def example_page(path: Path) -> str:
    """Return the page of an example."""
    module = ast.parse(path.read_text())
    title, _, rest = ast.get_docstring(module).partition("\n\n")
    start = next(node.lineno for node in module.body[1:])
    page = [f"# {' '.join(title.split()).rstrip('.')}", f"`examples/{path.name}`", rest]
    if (GUIDE / "pictures" / f"example-{path.stem}-light.svg").exists():
        alt = f"A chart of the numbers that {path.name} prints, which are listed below."
        page += [f"![{alt}](../pictures/example-{path.stem}-light.svg)"]
    printed = GUIDE / "examples" / f"{path.stem}.txt"
    page += ["## What it prints", f"```{{literalinclude}} {printed.name}\n:language: text\n```"]
    include = f"```{{literalinclude}} ../../{path.name}\n:language: python\n:lines: {start}-\n```"
    page += ["## The program", include]
    return "\n\n".join(page) + "\n"


def messages_page(title: str, reference: str, found: list[Message]) -> str:
    """Return the page of the messages of one folder, by the argument that they begin with."""
    page = [
        f"# Messages: {title}",
        f"`…` stands for what depends on the call. The [reference]({reference}) has the arguments.",
    ]
    of_argument = lambda message: message.text.partition(":")[0]
    for argument, group in itertools.groupby(sorted(found, key=of_argument), of_argument):
        lines = sorted({f"- {_literal(text)} ({kind})" for kind, text in group})
        page += [f"**{_escape(argument)}**", "\n".join(lines)]
    return "\n\n".join(page) + "\n"


def _literal(text: str) -> str:
    text = " ".join(text.split())
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _escape(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>])", r"\\\1", " ".join(text.split()))


def messages(folder: str) -> list[Message]:
    """Return the messages of all errors and warnings in the sources of a folder of stepfold."""
    (root,) = map(Path, stepfold.__path__)
    paths = [*root.joinpath(folder).rglob("*.py")]
    if folder == "core":
        paths += [*root.glob("*.py"), *root.joinpath("internals").rglob("*.py")]
    found = []
    for path in sorted(paths):
        for scope, call in _calls(ast.parse(path.read_text()).body, []):
            found += _messages_of(call, scope)
    return found


Scope = list[list[ast.stmt]]  # the statements before a place, block by block, the innermost last


def _calls(body: list[ast.stmt], scope: Scope) -> Iterator[tuple[Scope, ast.Call]]:
    """Return all calls in a block, each with its scope."""
    for number, statement in enumerate(body):
        # A function may use what its module assigns after it.
        inner = [*scope, body[:number] if scope else body]
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.ExceptHandler | ast.match_case):
                yield from _calls(child.body, inner)
            elif not isinstance(child, ast.stmt):
                yield from ((inner, node) for node in ast.walk(child) if isinstance(node, ast.Call))
        for name in ("body", "orelse", "finalbody"):
            yield from _calls(getattr(statement, name, []), inner)


def _messages_of(call: ast.Call, scope: Scope) -> list[Message]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if name == "refuse":
        names = ["argument", "expected", "got", "advice"]
        given = dict(zip(names, call.args, strict=False)) | keywords
        argument, expected, got = (_texts(given[name], scope) for name in names[:3])
        advice = _texts(given["advice"], scope) if "advice" in given else [""]
        kinds = _texts(keywords["kind"], scope) if "kind" in keywords else ["ConfigError"]
        if kinds == ["…"]:
            kinds = [getattr(keywords["kind"], "id", "")]
        kind = kinds[0]
        if not hasattr(errors, kind):  # a subclass that is not public
            kind = "StepfoldError" if kind.startswith("_") else "CheckpointError"
        if isinstance(given["got"], ast.Name | ast.IfExp):
            # A short value is not worth a line.
            got = [text for text in got if text.count(" ") > 4] or ["…"]
        parts = itertools.product(argument, expected, got, advice)
        return [
            Message(kind, f"{argument}: expected {expected}, got {got}{advice and '; '}{advice}")
            for argument, expected, got, advice in parts
        ]
    kind = {"warn": "warning", "DamageError": "CheckpointError"}.get(name, name)
    if call.args and (kind == "warning" or name in _ERRORS):
        texts = _texts(call.args[0], scope)
        return [Message(kind, text) for text in texts if len(re.findall(r"[a-z]{2,}", text)) > 1]
    return []


_ERRORS = {*errors.__all__, "DamageError"}


def _texts(node: ast.AST, scope: Scope) -> list[str]:
    """Return the strings that an expression may be, with `…` for values."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=values):
            parts = [_texts(value, scope) for value in values]
            return ["".join(part) for part in itertools.islice(itertools.product(*parts), 8)]
        case ast.FormattedValue(value=ast.Name() as value):
            texts = _texts(value, scope)
            return texts if len(texts) <= 3 and all(text[:1].isalnum() for text in texts) else ["…"]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            both = itertools.product(_texts(left, scope), _texts(right, scope))
            return [a + b for a, b in itertools.islice(both, 8)]
        case ast.BinOp(left=left, op=ast.Mult()):  # "text" * condition
            return [*_texts(left, scope), ""]
        case ast.IfExp(body=body, orelse=orelse):
            return [*_texts(body, scope), *_texts(orelse, scope)]
        case ast.BoolOp(values=values):
            return [text for value in values for text in _texts(value, scope) if text != "…"]
        case ast.Call(func=ast.Attribute(attr="join"), args=[ast.List(elts=lines)]):
            parts = [_texts(line, scope) for line in lines]
            return [" ".join(part) for part in itertools.islice(itertools.product(*parts), 8)]
        case ast.Name(id=name):
            return _assigned(name, scope) or ["…"]
        case _:
            return ["…"]


def _assigned(name: str, scope: Scope) -> list[str]:
    """Return the strings that a name may have: of its last assignment, and of branches after it."""
    for depth in range(len(scope), 0, -1):
        block, found = scope[depth - 1], []
        for number in range(len(block) - 1, -1, -1):
            if isinstance(block[number], ast.FunctionDef | ast.ClassDef):
                continue
            before = [*scope[: depth - 1], block[:number]]
            for node in ast.walk(block[number]):
                for target, value in _assignments(node):
                    if isinstance(target, ast.Name) and target.id == name:
                        found += [text for text in _texts(value, before) if text != "…"]
            if found and isinstance(block[number], ast.Assign):
                break
        if found:
            return list(dict.fromkeys(found))
    return []


def _assignments(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            yield from zip(targets, values, strict=False)
        case ast.Assign(targets=targets, value=value):
            yield from ((target, value) for target in targets)
        case ast.NamedExpr(target=target, value=value):
            yield target, value


def notebook(page: str, install: str) -> dict[str, Any]:
    """Return a page as a notebook; what a block prints is left out, since the cell prints it."""
    cells = [_cell("code", install)]
    fence = r"^```(\w+)\n(.*?)^```\n"
    end, after_code = 0, False
    for block in re.finditer(fence, page, re.MULTILINE | re.DOTALL):
        language, code = block.groups()
        text = page[end : block.start()]
        cells += _text_cells(text)
        is_output = language == "text" and after_code and not text.strip()
        if language == "python":
            cells.append(_cell("code", code.rstrip()))
        elif not is_output:
            cells.append(_cell("markdown", block[0].rstrip()))
        end, after_code = block.end(), language == "python"
    cells += _text_cells(page[end:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _text_cells(text: str) -> list[dict[str, Any]]:
    text = re.sub(r"!\[[^]]*\]\([^)]*\)", "", text)  # the cell draws the picture
    text = re.sub(r"\[([^]]*)\]\((?!http)[^)]*\)", r"\1", text).strip()
    return [_cell("markdown", text)] if text else []


def _cell(kind: str, text: str) -> dict[str, Any]:
    code = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True), **code}


if __name__ == "__main__":
    write_all("<repository URL>")
