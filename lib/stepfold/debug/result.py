"""What a comparison of two runs has found, as a value, as text and as JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Cause(NamedTuple):
    """Something in which two runs differ.

    Attributes:
      kind: the section of `run.json` that differs: `"config"`, `"arguments"`, `"batches"`,
        `"versions"`, `"devices"`, `"mesh"`, `"seed"`, `"parameters"`, or `"program"`; or `"note"`,
        for what happened in one of the runs. If none of them explains a difference, what the files
        do not show is inferred: `"data"`, `"hardware"`, `"compiler"`, `"code"` or `"metric"`. Steps
        that are run again show a `"batch"`, a `"key"`, a `"program"`, or a run that has not saved
        what its program computes, a `"fault"`.
      what: a sentence for people.
      since: the step after which it may have an effect.

    >>> import stepfold as sf
    >>> print(sf.debug.Cause("config", "rate 0.1 -> 0.2"))
    config: rate 0.1 -> 0.2
    """

    kind: str
    what: str
    since: int = 0

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


class RunDiff(NamedTuple):
    """Where two runs part, and what may be the cause.

    Attributes:
      runs: the runs that were compared.
      steps: the number of steps that each has done.
      step: the first step after which the files show a difference, or None; if steps were run
        again, the first step that differs.
      equal_until: the last step before after which the states are equal, or 0.
      checkpoint: the first checkpoint that differs, or None.
      leaves: the paths of the leaves that differ in it, or after the step that was run again.
      row: the step of the first row of metrics that differs, or None.
      rows: both values of each metric that differs in that row.
      growth: relative differences of one metric by step, from the first row that differs.
      causes: what may have made them part, the most likely first.
      others: in what else they differ, without an effect on the steps that they share.
      equal: in what they do not differ.
      compared: the number of `"rows"`, of `"checkpoints"` and of `"leaves"` of a checkpoint that
        were compared, with `"last_row"` and `"last_checkpoint"`.
      missing: what could not be compared, and why.
      replays: how many steps were run again.

    >>> import stepfold as sf
    >>> empty = {"rows": 0, "checkpoints": 0, "leaves": 0, "last_row": 0, "last_checkpoint": 0}
    >>> parts = (None, 0, None, (), None, {}, {}, (), (), (), empty, ())
    >>> found = sf.debug.RunDiff(("a", "b"), (40, 40), *parts)
    >>> found.is_equal, found.exit_code
    (None, 2)
    """

    runs: tuple[str, str]
    steps: tuple[int, int]
    step: int | None
    equal_until: int
    checkpoint: int | None
    leaves: Sequence[str]
    row: int | None
    rows: Mapping[str, tuple[float, float]]
    growth: Mapping[int, float]
    causes: Sequence[Cause]
    others: Sequence[str]
    equal: Sequence[str]
    compared: Mapping[str, int]
    missing: Sequence[str]
    replays: int = 0

    @property
    def leaf(self) -> str | None:
        """The first leaf that differs."""
        return next(iter(self.leaves), None)

    @property
    def cause(self) -> Cause | None:
        """The most likely cause."""
        return next(iter(self.causes), None)

    @property
    def is_equal(self) -> bool | None:
        """Whether the runs are equal; None if they could not be compared up to their ends."""
        if self.step is not None:
            return False
        has_compared = self.compared["rows"] or self.compared["checkpoints"]
        return True if has_compared and {*self.steps} == {self.compared_until} else None

    @property
    def compared_until(self) -> int:
        """The last step that was compared."""
        return max(self.compared["last_row"], self.compared["last_checkpoint"])

    @property
    def exit_code(self) -> int:
        """The exit code of the command: 0 if they are equal, 1 if not, 2 if that is unknown."""
        return {True: 0, False: 1, None: 2}[self.is_equal]

    def as_json(self) -> dict[str, Any]:
        """Return the result as what JSON can hold, with NaN and inf as text."""
        plain = self._asdict() | {"causes": [each._asdict() for each in self.causes]}
        plain |= {name: getattr(self, name) for name in ("leaf", "is_equal")}
        parsed: dict[str, Any] = json.loads(json.dumps(plain), parse_constant=str)
        return parsed

    def __str__(self) -> str:
        lines = (f"  {name:10}{text}" for name, text in _lines(self))
        return "\n".join([_headline(self), *lines])


def _headline(diff: RunDiff) -> str:
    if diff.is_equal:
        return f"equal up to step {diff.steps[0]:,}, the last of both"
    if diff.step is None:
        ends = f"the runs end at steps {diff.steps[0]:,} and {diff.steps[1]:,}"
        return f"no difference up to step {diff.compared_until:,}, and no more to compare: {ends}"
    where = f"step {diff.step:,}"
    if diff.step > diff.equal_until + 1:
        where = f"after step {diff.equal_until:,}, at the latest in {where}"
    return f"first difference: {where} of {min(diff.steps):,}"


def _lines(diff: RunDiff) -> Iterator[tuple[str, str]]:
    count = diff.compared
    if diff.leaves:
        more = f" and {len(diff.leaves) - 1:,} more" if len(diff.leaves) > 1 else ""
        of = f"{len(diff.leaves):,} of {count['leaves']:,} leaves"
        at = diff.step if diff.equal_until + 1 == diff.step else diff.checkpoint
        yield "where", f"{diff.leaves[0]}{more}, {of} at step {at:,}"
    if diff.row is not None:
        values = [f"{n} {a} -> {b}" for n, (a, b) in [*diff.rows.items()][:3]]
        is_alone = diff.row <= diff.equal_until
        states = f"; the states are equal up to step {diff.equal_until:,}" if is_alone else ""
        yield "metrics", f"{', '.join(values)} at step {diff.row:,}{states}"
        points = [f"{step:,}: {value:.1e}" for step, value in diff.growth.items()]
        yield "grows", f"relative, at step {', '.join(points)}"
    yield from (("cause", str(cause)) for cause in diff.causes)
    if diff.others:
        yield "others", "; ".join(diff.others)
    if diff.equal:
        yield "equal", " · ".join(diff.equal)
    saved = "no checkpoint"
    if count["checkpoints"]:
        saved = f"{count['checkpoints']:,} checkpoints of {count['leaves']:,} leaves"
    yield "compared", f"{count['rows']:,} rows of metrics, {saved}"
    yield from (("missing", each) for each in diff.missing)
