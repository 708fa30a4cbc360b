"""Optimized HLO text as values: what `compiled.as_text()` prints, and how often each line runs.

Under SPMD the text is the program of one device. It is all that XLA says alike on every backend:
its own `cost_analysis` counts the body of a loop once, and knows nothing of collectives.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from stepfold.errors import ConfigError


class Type(NamedTuple):
    """One array of a result, as `bf16[8,128]` has it.

    >>> Type("bf16", (8, 128)).bytes, Type("s4", (3,)).bytes
    (2048, 2)
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Count the elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Count the bytes; tokens and other opaque things have none."""
        bits = 8 if self.dtype == "pred" else int((re.findall(r"\d+", self.dtype) or [0])[0])
        return -(-self.size * bits // 8)


class Instruction(NamedTuple):
    """One line of HLO: a tuple as the result is flattened, and attributes are left as text."""

    name: str
    op: str
    types: tuple[Type, ...]
    operands: tuple[str, ...]
    attributes: str


@dataclass(frozen=True)
class Program:
    """What one device runs: instructions by computation, and where to start.

    Attributes:
      computations: the instructions of each computation by its name.
      entry: the name of the computation that runs.
      replicas: copies of the whole program, of which jit makes one.
      partitions: devices that share the work of one copy.
    """

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str
    replicas: int = 1
    partitions: int = 1


class Run(NamedTuple):
    """An instruction with how often it runs, what it is given, and the computation it is in."""

    instruction: Instruction
    times: int
    inputs: tuple[Type, ...]
    computation: str


def parse(text: str) -> Program:
    r"""Read optimized HLO text.

    >>> program = parse(
    ...     "ENTRY %main (x: f32[4]) -> f32[4] {\n"
    ...     "  %x = f32[4]{0} parameter(0)\n"
    ...     "  ROOT %y = f32[4]{0} add(%x, %x)\n"
    ...     "}"
    ... )
    >>> [(line.op, line.operands) for line in program.computations["main"]]
    [('parameter', ()), ('add', ('x', 'x'))]
    """
    computations: dict[str, list[Instruction]] = {}
    entry, lines = None, []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            lines = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif found := _LINE.match(line):
            lines.append(_instruction(found[1], line[found.end() :]))
    if entry is None:
        raise ConfigError(
            f"hlo: expected text with an ENTRY computation, got {text[:80]!r}; "
            "pass what jax.jit(f).lower(...).compile().as_text() returns"
        )
    sizes = [re.search(rf"^HloModule.*\b{key}=(\d+)", text) for key in _COUNTS]
    replicas, partitions = (int(size[1]) if size else 1 for size in sizes)
    frozen = {name: tuple(lines) for name, lines in computations.items()}
    return Program(frozen, entry, replicas, partitions)


_COUNTS = ("replica_count", "num_partitions")
_HEAD = re.compile(r"(ENTRY )?%?([\w.-]+) (?:\(.*\) -> .*)?\{$")
_LINE = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = ")
_TYPE = re.compile(r"([a-z]\w*)\[([^\]]*)\]")
_ASIDE = re.compile(r"/\*.*?\*/|\[[^\]]*\]|\{[^}]*\}")


def _instruction(name: str, text: str) -> Instruction:
    kind, text = _close(text) if text.startswith("(") else text.split(" ", 1)
    call, attributes = _close(text)
    op, _, operands = call.strip().partition("(")
    return Instruction(name, op, types(kind), _names(op, operands[:-1]), attributes)


def types(text: str) -> tuple[Type, ...]:
    """Read every array type in a text, so that a tuple comes out flat.

    >>> types("(f32[8,64]{1,0:T(8,128)}, /*index=1*/(pred[], token[]))")
    (Type(dtype='f32', shape=(8, 64)), Type(dtype='pred', shape=()), Type(dtype='token', shape=()))
    """
    found = _TYPE.findall(text)
    return tuple(Type(dtype, tuple(map(int, re.findall(r"\d+", dims)))) for dtype, dims in found)


def _close(text: str) -> tuple[str, str]:
    """Cut a text behind the parenthesis that closes its first one."""
    depth = 0
    for found in re.finditer(r'"(?:\\.|[^"\\])*"|[()]', text):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if found[0] == ")" and depth == 0:
            return text[: found.end()], text[found.end() :]
    raise ConfigError(f"hlo: expected `type op(operands)`, got {text[:80]!r}")


def _names(op: str, text: str) -> tuple[str, ...]:
    if op in ("constant", "parameter"):  # what is in these parentheses is no operand
        return ()
    if "%" in text:
        return tuple(re.findall(r"%([\w.-]+)", text))
    return tuple(piece.split()[-1] for piece in _ASIDE.sub("", text).split(",") if piece.strip())


def walk(program: Program) -> Iterator[Run]:
    r"""Give each instruction that runs, with how often, through loops, fusions and calls.

    Of a conditional all branches count, and a loop of unknown length counts once (see
    `endless`). What a reduction applies to each pair of elements is not followed.

    >>> trips = '"known_trip_count":{"n":"5"}'
    >>> loop = "while(%x), condition=%c, body=%b, backend_config={" + trips + "}"
    >>> program = parse(
    ...     "%b (x: f32[]) -> f32[] {\n  ROOT %y = f32[] sine(%x)\n}\n"
    ...     "%c (x: f32[]) -> pred[] {\n  ROOT %z = pred[] constant(true)\n}\n"
    ...     "ENTRY %main (x: f32[]) -> f32[] {\n  ROOT %w = f32[] " + loop + "\n}"
    ... )
    >>> [(run.instruction.op, run.times) for run in walk(program)]
    [('sine', 5), ('constant', 6), ('while', 1)]
    """
    times = _times(program)
    for name, lines in program.computations.items():
        known = {line.name: line.types for line in lines}
        for line in lines if times[name] else ():
            inputs = sum((known.get(operand, ()) for operand in line.operands), ())
            yield Run(line, times[name], inputs, name)


def _times(program: Program) -> Counter[str]:
    seen: dict[str, None] = {}

    def visit(name: str) -> Iterator[str]:
        if name not in seen and name in program.computations:
            seen[name] = None
            for line in program.computations[name]:
                for called, _ in _calls(line):
                    yield from visit(called)
            yield name

    times = Counter({program.entry: 1})
    for name in reversed(list(visit(program.entry))):  # callers before what they call
        for line in program.computations[name]:
            for called, turns in _calls(line):
                times[called] += turns * times[name]
    return times


def _calls(line: Instruction) -> list[tuple[str, int]]:
    op = line.op.removesuffix("-start")
    if op not in ("fusion", "call", "while", "conditional", "async"):
        return []
    turns = trips(line) if op == "while" else 1
    return [
        (name.strip(" %"), 1 if turns is None else turns + (key == "condition"))
        for key, several, one in _CALLED.findall(line.attributes)
        for name in (several or one).split(",")
    ]


_CALLED = re.compile(
    r"\b(body|condition|calls|to_apply|true_computation|false_computation|branch_computations)="
    r"(?:\{([^}]*)\}|(%?[\w.-]+))"
)


def trips(line: Instruction) -> int | None:
    """Read how often the body of a while loop runs; None where XLA could not tell.

    >>> trips(Instruction("w", "while", (), (), 'backend_config={"known_trip_count":{"n":"5"}}'))
    5
    """
    found = re.search(r"known_trip_count\W+n\W+(\d+)", line.attributes)
    return int(found[1]) if found else None


def endless(program: Program) -> list[Instruction]:
    r"""List the loops that run an unknown number of times, of which `walk` counts one.

    >>> endless(parse("ENTRY %main () -> f32[] {\n  ROOT %x = f32[] constant(1)\n}"))
    []
    """
    loops = (run.instruction for run in walk(program) if run.instruction.op == "while")
    return [line for line in loops if trips(line) is None]


def place(line: Instruction) -> str:
    r"""Say in short where in the user's program an instruction comes from.

    >>> name = "jit(step)/while/body/closed_call/transpose(jvp(mlp))/dot_general"
    >>> place(Instruction("d", "dot", (), (), f'metadata={{op_name="{name}"}}'))
    'mlp/dot_general (backward)'
    """
    found = re.search(r'op_name="((?:\\.|[^"\\])*)"', line.attributes)
    name = re.sub(r"\\(.)", r"\1", found[1]) if found else ""
    first = re.split(r"[;:]", name)[0].replace("/(", "/")  # of what was fused, the first
    parts = [re.sub(r"[a-z_]+\(|\)", "", part) for part in first.split("/")]
    parts = parts[1:] if name.startswith("jit(") else parts
    kept = [part for part in parts if part and not _PLUMBING.fullmatch(part)]
    return "/".join(kept) + (" (backward)" if "transpose(" in name else "")


_PLUMBING = re.compile(
    r"while|body|cond|branch_\d+_fun|closed_call|eval_jaxpr|shard_map|checkpoint|"
    r"rematted_computation|custom_[jv]vp_call"
)
