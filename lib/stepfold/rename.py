"""`python -m stepfold rename`: rewrite names of version 0.2 in scripts, notebooks and pages.

The syntax tree finds the names, and tokens say where they are. All else stays as it is.
"""

import argparse
import ast
import io
import itertools
import json
import os
import shutil
import sys
import tempfile
import tokenize
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from stepfold.errors import ConfigError, refuse
from stepfold.json_files import has_form, open_regular
from stepfold.moved import ARGUMENTS, GONE, KEYWORDS, MOVED, spell, spell_arguments


class Note(NamedTuple):
    """A change, or an old name that is left for the reader, in a line that counts from 1."""

    line: int
    text: str
    is_change: bool = True


def run(options: argparse.Namespace) -> int:
    """Rewrite files; return 2 if one cannot be read, 1 if one would change with `--check`."""
    code = changed = 0
    for name in options.files:
        try:
            notes = rewrite_file(Path(name), check=options.check)
        except (ConfigError, OSError) as error:
            print(error, file=sys.stderr)  # noqa: T201  this is a command
            code = 2
            continue
        for where, note in notes:
            print(f"{name}: {where}: {note.text}")  # noqa: T201
        changed += any(note.is_change for _, note in notes)
    files = "file" if changed == 1 else "files"
    print(f"{changed} {files} {'would change' if options.check else 'changed'}")  # noqa: T201
    return code or int(bool(changed and options.check))


Notes = list[tuple[str, Note]]
"""Notes on a file, each with the line or the cell that it is about."""


def rewrite_file(path: Path, *, check: bool = False) -> Notes:
    """Rewrite a file; with `check`, only say what would change."""
    kinds = {".py": _rewrite_script, ".ipynb": _rewrite_notebook, ".md": _rewrite_page}
    if path.suffix not in kinds:
        refuse(path, "a file that ends in .py, .ipynb or .md", "another one")
    try:
        with open_regular(path) as file:
            content = file.read()
        encoding = "utf-8"
        if path.suffix == ".py":
            encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text = content.decode(encoding)
    except (ValueError, SyntaxError, LookupError) as error:
        refuse(path, "a text file", str(error), "it is left as it is")
    try:
        new, notes = kinds[path.suffix](text)
    except (ValueError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError) as error:
        kind = "JSON of a notebook" if path.suffix == ".ipynb" else "Python that parses"
        got = f"{error}" or type(error).__name__
        refuse(path, kind, got, "it is left as it is")
    if new != text and not check:
        _replace(path.resolve(), new.encode(encoding))
    return notes


def _replace(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    if not os.access(path, os.W_OK):
        raise PermissionError(13, "no permission to write", str(path))
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            shutil.copymode(path, file.name)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _rewrite_script(text: str) -> tuple[str, Notes]:
    new, notes = rewrite(text)
    return new, [(f"line {note.line}", note) for note in notes]


def _rewrite_page(text: str) -> tuple[str, Notes]:
    """Rewrite blocks that begin with ```python; names that one imports are known in all."""
    lines, blocks, start = _split_lines(text), list[range](), None
    for index, line in enumerate(lines):
        if start is None and line.rstrip() in ("```python", "```py"):
            start = index + 1
        elif start is not None and line.rstrip() == "```":
            blocks.append(range(start, index))
            start = None
    new, notes = _rewrite_blocks(lines, blocks)
    return new, [(f"line {note.line}", note) for note in notes]


def _rewrite_notebook(text: str) -> tuple[str, Notes]:
    """Rewrite the cells of code; names that one imports are known in all."""
    notebook = json.loads(text)
    is_source = lambda value: has_form(value, str) or has_form(value, [str])
    if not has_form(notebook, {"cells": [{"cell_type": str, "source": is_source}]}):
        raise ValueError("JSON of something else")
    cells = [each for each in notebook["cells"] if each["cell_type"] == "code"]
    lines, blocks, places = list[str](), list[range](), list[str]()
    for number, cell in enumerate(cells, 1):
        cell_lines = _split_lines("".join(cell["source"]) + "\n")
        blocks.append(range(len(lines), len(lines) + len(cell_lines)))
        lines += [*cell_lines, _NEXT_CELL]
        places += [f"cell of code {number}, line {i + 1}" for i in range(len(cell_lines) + 1)]
    new, notes = _rewrite_blocks(lines, blocks)
    for cell, changed in zip(cells, new.split(_NEXT_CELL), strict=False):
        source = changed.removesuffix("\n")
        cell["source"] = source if isinstance(cell["source"], str) else _split_lines(source)
    if any(note.is_change for note in notes):
        text = _dump_like(text, notebook)
    return text, [(places[note.line - 1], note) for note in notes]


_NEXT_CELL = "# the next cell of the notebook\n"


def _dump_like(text: str, notebook: Any) -> str:
    """Write JSON with the indentation and the escapes of a text."""
    end = "\n" if text.endswith("\n") else ""
    styles = [
        {"indent": indent, "ensure_ascii": is_ascii}
        for indent in (1, 2, 4, None)
        for is_ascii in (False, True)
    ]
    before = json.loads(text)
    for style in styles:
        if json.dumps(before, **style) + end == text:  # type: ignore[arg-type]
            return json.dumps(notebook, **style) + end  # type: ignore[arg-type]
    return json.dumps(notebook, indent=1, ensure_ascii=False) + end


def _split_lines(text: str) -> list[str]:
    """Split at the ends of lines that Python knows, and keep them."""
    return list(io.StringIO(text, newline=""))


_HIDDEN = "#stepfold: hidden line "


def _rewrite_blocks(lines: Sequence[str], blocks: Iterable[range]) -> tuple[str, list[Note]]:
    """Rewrite blocks of code among other lines, which are comments meanwhile."""
    code, unread = [_hide(index) for index in range(len(lines))], list[Note]()
    for block in blocks:
        shown = [lines[index] for index in block]
        # Lines such as `%timeit` and `!ls` of a notebook are no Python.
        hidden = [
            f"{line[: len(line) - len(line.lstrip())]}pass {_hide(index)}"
            if line.lstrip().startswith(("%", "!", "?"))
            else line
            for index, line in zip(block, shown, strict=True)
        ]
        for attempt in (shown, hidden):
            try:
                ast.parse("".join(attempt))
            except (SyntaxError, ValueError):
                continue
            code[block.start : block.stop] = attempt
            break
        else:
            if any(f"sf.{name}" in line for line in shown for name in MOVED):
                text = "not changed, since it does not parse as Python"
                unread.append(Note(block.start + 1, text, False))
    new, notes = rewrite("".join(code))
    shown_again = [
        lines[int(line.rpartition(_HIDDEN)[2])]
        if line.strip().removeprefix("pass ").startswith(_HIDDEN)
        else line
        for line in _split_lines(new)
    ]
    return "".join(shown_again), sorted([*notes, *unread])


def _hide(index: int) -> str:
    return f"{_HIDDEN}{index}\n"


def rewrite(source: str) -> tuple[str, list[Note]]:
    r"""Rewrite the names of stepfold 0.2 in a program; return the new one and notes.

    >>> source = "import stepfold as sf\nhook = sf.roll_back_on_nonfinite(skip=2)  # a NaN\n"
    >>> new, notes = rewrite(source)
    >>> print(new.splitlines()[1])
    hook = sf.hooks.on_nonfinite(skip=2, action="go_back")  # a NaN
    >>> notes[0].text
    'sf.roll_back_on_nonfinite is now sf.hooks.on_nonfinite(action="go_back")'
    """
    return _Script(source).rewrite() if "stepfold" in source else (source, [])


class _Script:
    """A program with its tokens, and with the edits of it so far."""

    def __init__(self, source: str) -> None:
        self.source, self.tree = source, ast.parse(source)
        self.lines = _split_lines(source)
        self.starts = [0, *itertools.accumulate(map(len, self.lines))]
        read_line = iter([*self.lines, ""]).__next__
        self.tokens = list(tokenize.generate_tokens(read_line))
        self.indices = {each.end: i for i, each in enumerate(self.tokens) if each.string.strip()}
        self.edits = set[tuple[int, int, str]]()
        self.notes: list[Note] = []
        self.bindings = dict[str, dict[str | None, int]]()
        self._read_bindings()

    def rewrite(self) -> tuple[str, list[Note]]:
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and _stepfold_path(node.module or "") == "":
                self._rewrite_import(node)
            elif isinstance(node, ast.Attribute):
                self._rewrite_attribute(node)
            elif isinstance(node, ast.Call):
                self._rewrite_keywords(node)
        new = self.source
        for start, stop, text in sorted(self.edits, reverse=True):
            new = new[:start] + text + new[stop:]
        ast.parse(new)
        return new, sorted({*self.notes})

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def calls(self) -> dict[int, ast.Call]:
        """Calls by the `id` of what they call."""
        return {id(node.func): node for node in self.nodes if isinstance(node, ast.Call)}

    @cached_property
    def texts(self) -> set[str]:
        """The strings, among which may be names, as in `__all__`."""
        constants = (each for each in self.nodes if isinstance(each, ast.Constant))
        return {each.value for each in constants if isinstance(each.value, str)}

    # Names

    def _read_bindings(self) -> None:
        """Find what each name means: paths in stepfold, "" for itself, or None for all else."""
        absent = {  # as in `except ImportError: sf = None`
            id(target)
            for node in self.nodes
            if isinstance(node, ast.Assign) and getattr(node.value, "value", "") is None
            for target in node.targets
        }
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    self._bind(name, _stepfold_path(alias.name if alias.asname else name), node)
            elif isinstance(node, ast.ImportFrom):
                prefix = None if node.level else _stepfold_path(node.module or "")
                for alias in node.names:
                    path = None if prefix is None else f"{prefix}.{alias.name}".lstrip(".")
                    self._bind(alias.asname or alias.name, path, node)
            elif isinstance(node, ast.Name):
                if isinstance(node.ctx, ast.Store) and id(node) not in absent:
                    self._bind(node.id, None, node)
            elif not isinstance(node, ast.alias):
                for field in ("name", "arg", "rest"):  # of functions, parameters, patterns, …
                    value = getattr(node, field, None)
                    if isinstance(value, str) and not isinstance(node, ast.keyword):
                        self._bind(value, None, node)

    def _bind(self, name: str, path: str | None, node: Any) -> None:
        self.bindings.setdefault(name, {}).setdefault(path, getattr(node, "lineno", 1))

    def _path(self, node: ast.AST) -> str | None:
        """Return the path in stepfold of an expression, "" for itself, None for all else."""
        if isinstance(node, ast.Name):
            return next((x for x in self.bindings.get(node.id, {}) if x is not None), None)
        if not isinstance(node, ast.Attribute):
            return None
        before = self._path(node.value)
        return None if before is None else f"{before}.{node.attr}".lstrip(".")

    def _other_meaning(self, name: str) -> str:
        """Say where a name means something else too; "" if nowhere."""
        if len(meanings := self.bindings[name]) == 1:
            return ""
        line = meanings.get(None, max(meanings.values()))
        return f"not changed, since {name} is something else in line {line}"

    # Uses

    def _rewrite_attribute(self, node: ast.Attribute) -> None:
        """Rewrite `sf.old`."""
        path = self._path(node)
        if path is None or (path not in MOVED and path not in GONE):
            return
        name = ast.unparse(node)
        root = name.removesuffix(path)
        if path in GONE:
            self._note(node, f"{name} {GONE[path]}", False)
            return
        problem = self._other_meaning(root.removesuffix("."))
        if not problem and path in ARGUMENTS and id(node) not in self.calls:
            problem = "not changed, since it is not called here"
        if not problem and self._is_in_text(node):
            problem = "not changed, since it is in an f-string"
        text = f"{name} is now {root}{spell(path)}"
        self._note(node, f"{text}; {problem}" if problem else text, not problem)
        if not problem:
            self._rewrite_name(node, path, MOVED[path])

    def _rewrite_name(self, node: ast.Attribute | ast.Name, old: str, new: str) -> None:
        """Replace the last token of a name, and add the arguments that a call needs."""
        end = self._end(node)
        self._edit(self.tokens[self.indices[end]].start, end, new)
        if old in ARGUMENTS:
            self._add_arguments(self.calls[id(node)], spell_arguments(old))

    def _add_arguments(self, call: ast.Call, text: str) -> None:
        close = self.indices[self._end(call)]
        skipped = (tokenize.NL, tokenize.COMMENT)
        last = next(x for x in reversed(self.tokens[:close]) if x.type not in skipped)
        arguments: list[Any] = [*call.args, *call.keywords]
        if last.string == "," and last.end[0] < self.tokens[close].start[0]:
            line = self.lines[max(each.lineno for each in arguments) - 1]
            indent = line[: len(line) - len(line.lstrip())]
            ending = line[len(line.rstrip("\r\n")) :]
            column = len(self.lines[last.end[0] - 1].rstrip("\r\n"))
            position = last.end[0], column
            text = f"{ending}{indent}{text},"
        else:
            position = last.end
            before = " " if last.string == "," else ", " if arguments else ""
            text = f"{before}{text}"
        self._edit(position, position, text)

    def _rewrite_keywords(self, call: ast.Call) -> None:
        path = self._path(call.func)
        keywords = {} if path is None else KEYWORDS.get(MOVED.get(path, path), {})
        for keyword in call.keywords:
            if keyword.arg in keywords and not self._is_in_text(keyword):
                start = self._position(keyword.lineno, keyword.col_offset)
                end = start[0], start[1] + len(keyword.arg)
                new = keywords[keyword.arg]
                text = f"{ast.unparse(call.func)}({keyword.arg}=…) is now {new}=…"
                self._note(keyword, text, True)
                self._edit(start, end, new)

    # Imports

    def _rewrite_import(self, node: ast.ImportFrom) -> None:
        """Split `from stepfold import …` into imports from the modules where the names are."""
        if node.level:
            return
        imports = [(alias, *self._import_of(node, alias)) for alias in node.names]
        if all(module == "stepfold" for _, module, _ in imports):
            return
        for alias, module, text in imports:
            if module != "stepfold":
                self._note(alias, f"{alias.name} is now in {module}, as {text.split()[0]}", True)
        start, end = self._position(node.lineno, node.col_offset), self._end(node)
        comments, head = self._comments(node)
        groups = dict[str, dict[str, list[str]]]()  # comments by name, by module
        for index, (_, module, text) in enumerate(imports):
            groups.setdefault(module, {}).setdefault(text, []).extend(comments[index])
        indent = self.lines[start[0] - 1][: start[1]]
        after = self.tokens[self.indices[end] + 1]
        is_alone = not indent.strip() and after.string != ";"
        width = max(88, *(len(self.lines[row - 1].rstrip()) for row in range(start[0], end[0] + 1)))
        statements = []
        for module, names in sorted(groups.items()):
            line = f"from {module} import {', '.join(names)}"
            is_long = is_alone and len(indent) + len(line) > width
            if is_long or head or any(names.values()):
                inner = "".join(_import_line(name, found, indent) for name, found in names.items())
                line = f"from {module} import ({head}\n{inner}{indent})"
            statements.append(line)
        if after.type == tokenize.COMMENT and "noqa" in after.string:
            statements[:-1] = [f"{line}  {after.string}" for line in statements[:-1]]
        text = (f"\n{indent}" if is_alone else "; ").join(statements)
        ending = self.lines[0][len(self.lines[0].rstrip("\r\n")) :]
        self._edit(start, end, text.replace("\n", ending or "\n"))

    def _import_of(self, node: ast.ImportFrom, alias: ast.alias) -> tuple[str, str]:
        """Return the module and the text of an import, and edit the uses of its name."""
        old, local = alias.name, alias.asname or alias.name
        here = "stepfold", old if alias.asname is None else f"{old} as {alias.asname}"
        if old == "*":
            self._note(node, "`from stepfold import *` has no moved names; import them", False)
        if old in GONE:
            self._note(alias, f"{old} {GONE[old]}", False)
        if old not in MOVED:
            return here
        module, _, new = MOVED[old].rpartition(".")
        module = f"stepfold.{module}"
        uses = [x for x in self.nodes if isinstance(x, ast.Name) and x.id == local]
        uses = [x for x in uses if isinstance(x.ctx, ast.Load)]
        is_clear = not self._other_meaning(local) and local not in self.texts
        is_clear = is_clear and not any(map(self._is_in_text, uses))
        if old in ARGUMENTS and not (is_clear and all(id(use) in self.calls for use in uses)):
            text = f"{old} is now sf.{spell(old)}; not changed, since {local} is not only called"
            self._note(alias, text, False)
            return here
        is_free = self.bindings.get(new, {}).keys() <= {MOVED[old]} and not any(
            isinstance(x, ast.Name) and x.id == new for x in self.nodes if new not in self.bindings
        )
        is_renamed = new != old and alias.asname is None and is_clear and is_free
        if is_renamed or old in ARGUMENTS:
            for use in uses:
                self._note(use, f"{local} is now {spell(old).rpartition('.')[2]}", True)
                self._rewrite_name(use, old, new if is_renamed else local)
        if is_renamed or local == new:
            return module, new
        return module, f"{new} as {local}"

    def _comments(self, node: ast.ImportFrom) -> tuple[list[list[str]], str]:
        """Return the comments in an import: those of each name, and that of the first line."""
        start, end = self._position(node.lineno, node.col_offset), self._end(node)
        positions = [self._position(x.lineno, x.col_offset) for x in node.names]
        found: list[list[str]] = [[] for _ in positions]
        head = ""
        for token in self.tokens:
            if token.type == tokenize.COMMENT and start < token.start < end:
                before = [i for i, position in enumerate(positions) if position < token.start]
                if not before and token.start[0] == start[0]:
                    head = f"  {token.string}"
                elif before and positions[before[-1]][0] == token.start[0]:
                    found[before[-1]].append(f"  {token.string}")
                else:  # in its own line, before a name
                    found[min(len(before), len(found) - 1)].append(token.string)
        return found, head

    # Positions

    def _position(self, line: int, column: int) -> tuple[int, int]:
        """Return the position of a token from one of the syntax tree, which counts bytes."""
        return line, len(self.lines[line - 1].encode()[:column].decode())

    def _end(self, node: Any) -> tuple[int, int]:
        return self._position(node.end_lineno, node.end_col_offset)

    @cached_property
    def _text_ids(self) -> set[int]:
        if sys.version_info >= (3, 12):  # which has tokens of what is in an f-string
            return set()
        texts = (node for node in self.nodes if isinstance(node, ast.JoinedStr))
        return {id(inner) for node in texts for inner in ast.walk(node)}

    def _is_in_text(self, node: ast.AST) -> bool:
        """Whether a node is in an f-string without tokens."""
        return id(node) in self._text_ids

    def _edit(self, start: tuple[int, int], end: tuple[int, int], text: str) -> None:
        first, stop = (self.starts[line - 1] + column for line, column in (start, end))
        self.edits.add((first, stop, text))

    def _note(self, node: Any, text: str, is_change: bool) -> None:
        self.notes.append(Note(node.lineno, text, is_change))


def _stepfold_path(module: str) -> str | None:
    """Return the path in stepfold of a module, "" for itself, None for others."""
    root, _, rest = module.partition(".")
    return rest if root == "stepfold" else None


def _import_line(name: str, comments: Sequence[str], indent: str) -> str:
    """Return the line of a name in parentheses, with its comments."""
    own = [f"{indent}    {text}\n" for text in comments if not text.startswith(" ")]
    return "".join(own) + f"{indent}    {name},{''.join(x for x in comments if x[0] == ' ')}\n"
