"""Draw mutants of the library: copies of a module that differ in one token.

A mutant differs in a comparison, a number, an arithmetic or boolean operator, a `not`, or a dropped
statement. Messages, docstrings, annotations, imports and `__repr__` are never mutated.

>>> [mutant.change for mutant in mutants_of("m.py", b"if not x < 3: y = -x", seed=0)]
['not removed', '< to <=', '< to >=', '3 to 4', '- to +']
"""

import ast
import collections
import dataclasses
import hashlib
import itertools
import re

SWAPS = {
    "<": ("<=", ">="), "<=": ("<", ">"), ">": (">=", "<="), ">=": (">", "<"), "==": ("!=",),
    "!=": ("==",), "is": ("is not",), "is not": ("is",), "in": ("not in",), "not in": ("in",),
    "and": ("or",), "or": ("and",), "+": ("-",), "-": ("+",), "*": ("/",), "/": ("*",),
    "//": ("*",), "%": ("*",), "**": ("*",), "<<": (">>",), ">>": ("<<",), "&": ("|",), "|": ("&",),
}  # fmt: skip
OPERATOR = re.compile(rb"not\s+in|is\s+not|and|or|is|in|//|\*\*|<<|>>|[<>=!]=|[-+*/%&|<>]")
MESSAGE = re.compile(r"((warnings|logging|_?logger)\.\w+|refuse)$")  # it shows its arguments


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one module.

    Mutants are drawn in the order of their keys. A key does not depend on what else the module
    contains, so that a seed draws the same mutants after changes elsewhere.
    """

    key: str
    path: str  # of the module, relative to lib/stepfold
    line: int
    change: str  # such as "< to <="
    source: str  # the line before the change
    edit: tuple[int, int, bytes]  # what to replace in the file: from, to, by
    statement: tuple[int, int]  # its first and last line

    def apply(self, source):
        start, end, new = self.edit
        return source[:start] + new + source[end:]

    def changes_meaning(self, source):
        try:
            mutated = ast.parse(self.apply(source))
        except SyntaxError:
            return False
        return ast.dump(mutated) != ast.dump(ast.parse(source))


def draw(lib, seed, number, only=""):
    """Draw mutants of the modules whose path starts with `only`, and count those there are."""
    files = {path.relative_to(lib).as_posix(): path for path in lib.rglob("*.py")}
    sources = {path: file.read_bytes() for path, file in files.items() if path.startswith(only)}
    found = [mutant for path in sources for mutant in mutants_of(path, sources[path], seed)]
    found.sort(key=lambda mutant: mutant.key)
    valid = (mutant for mutant in found if mutant.changes_meaning(sources[mutant.path]))
    return list(itertools.islice(valid, number)), len(found)


def mutants_of(path, source, seed):
    lines = source.split(b"\n")
    starts = list(itertools.accumulate((len(line) + 1 for line in lines), initial=0))
    seen, occurrences = collections.Counter(), []
    for line in lines:
        occurrences.append(seen[line.strip()])
        seen[line.strip()] += 1

    def span(node):
        first, last = starts[node.lineno - 1], starts[node.end_lineno - 1]
        return first + node.col_offset, last + node.end_col_offset

    for node, statement in walk(ast.parse(source)):
        for start, end, new, change in edits(node, source, span):
            row = source.count(b"\n", 0, start)
            text = lines[row].strip().decode()
            column = start - starts[row] - (len(lines[row]) - len(lines[row].lstrip()))
            parts = (seed, path, text, occurrences[row], column, change)
            key = hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()[:16]
            yield Mutant(key, path, row + 1, change, text, (start, end, new), statement)


def walk(node, statement=(1, 1)):
    """Yield the nodes that may be mutated, with the lines of the statement around each."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.JoinedStr):
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.FunctionDef) and node.name == "__repr__":
        return
    if isinstance(node, ast.stmt):
        body = getattr(node, "body", None)
        statement = (node.lineno, max(node.lineno, body[0].lineno - 1) if body else node.end_lineno)
    yield node, statement
    shows = isinstance(node, ast.Call) and MESSAGE.match(ast.unparse(node.func))
    if isinstance(node, ast.Raise) or shows:
        return
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "type_params"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child, statement)


def edits(node, source, span):
    """Yield the changes of a node: from, to, by, and what to call it."""
    start, end = span(node) if hasattr(node, "lineno") else (0, 0)
    conditions = []
    match node:
        case ast.Compare():
            yield from swaps([node.left, *node.comparators], source, span)
        case ast.BoolOp():
            yield from swaps(node.values, source, span)
            conditions = node.values
        case ast.BinOp():
            yield from swaps([node.left, node.right], source, span)
        case ast.AugAssign():
            yield from swaps([node.target, node.value], source, span)
        case ast.UnaryOp(op=ast.Not()):
            yield start, start + 3, b"", "not removed"
        case ast.UnaryOp(op=ast.USub()):
            yield start, start + 1, b"+", "- to +"
        case ast.Constant(value=bool() | int() | float()):
            new = other_constant(node.value)
            yield start, end, repr(new).encode(), f"{node.value!r} to {new!r}"
        case ast.If() | ast.While() | ast.IfExp():
            conditions = [node.test]
        case ast.comprehension():
            conditions = node.ifs
    for condition in conditions:  # a comparison has its own opposite
        if isinstance(condition, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
            yield span(condition)[0], span(condition)[0], b"not ", "not added"
    if is_droppable(node):
        yield start, end, b"pass", "dropped"


def swaps(operands, source, span):
    """Yield the changes of the operators between operands."""
    for left, right in itertools.pairwise(operands):
        start, end = span(left)[1], span(right)[0]
        gap = re.sub(rb"#.*", lambda comment: b" " * len(comment[0]), source[start:end])
        match = OPERATOR.search(gap)
        old = b" ".join(match[0].split()).decode() if match else ""
        for new in SWAPS.get(old, ()):
            yield start + match.start(), start + match.end(), new.encode(), f"{old} to {new}"


def other_constant(value):
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value * 2 or 1.0


def is_droppable(node):
    match node:
        case ast.Expr(value=ast.Call()) | ast.Return(value=None):
            return True
        case ast.Raise() | ast.AugAssign() | ast.Delete() | ast.Continue() | ast.Break():
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
    return False
