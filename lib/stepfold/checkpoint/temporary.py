"""A second directory for frequent saves, such as a RAM disk, and how a series finds its part."""

import hashlib
import os
import re
import secrets
import statistics
import time
from collections import deque
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax

from stepfold.checkpoint.manifest import read_fields
from stepfold.checkpoint.steps import read_directory
from stepfold.checkpoint.store import PermanentStore, Store, local_path
from stepfold.checkpoint.tier import TierStore, open_tier
from stepfold.core.processes import agreement, broadcast_from_first
from stepfold.core.validation import read_integer, read_positive
from stepfold.errors import CheckpointError, refuse, warn
from stepfold.internals import texts

# An identity of the series, next to its steps. A directory that is deleted and made again has the
# same name, but another identity.
_IDENTITY = "series.json"


_SHARE = 0.01  # of the time of the loop that continuous saves may take
_LOOK_SECONDS = 1.0  # between two looks at the clock, since processes may have to agree on it
_RECENT = 9  # intervals and saves that count


@dataclass(frozen=True)
class Temporary:
    """A second directory for frequent saves, such as a RAM disk or a local SSD.

    Give it as `Checkpoints(temporary=Temporary(…))`. A permanent save, one in the directory of the
    series, deletes the temporary steps up to its own. Saves by request, at a signal, and at the end
    are permanent; `best`, `keep_best` and `keep_every` act on permanent steps alone. A resume takes
    the newest good step of either.

    Each series has a folder in the directory, so that runs can share the directory. It is named by
    the real path or URL of the series and by an identity, which is stored in `series.json` next to
    the permanent steps. Temporary steps belong to one series; a new series at the same path ignores
    them. A temporary save that fails, as on a full disk, causes a warning.

    With several processes, each host may have its own directory, or all share one. Each host writes
    the slices of the state that it holds. `replicas` more hosts get a copy, over the network, so
    that as many may be lost with their directories. No process waits for another in a save. A
    resume may have other hosts and more or fewer processes: each of them asks the others for what
    it lacks. If too much is lost or damaged, the next older step is taken, of either kind.

    A directory needs room for `keep` + 2 steps. Each is the share of the state that its host holds,
    and the replicas of other hosts.

    Attributes:
      directory: the directory, which is not a URL.
      every: steps between temporary saves; or "continuous": a save begins as soon as the previous
        one has ended, but waits so that the loop loses at most 1 % of its time. `fit` checks that
        where it checks minutes.
      every_minutes: minutes since the last save of either kind, checked as in `Checkpoints`.
      keep: number of latest temporary steps to keep.
      replicas: number of additional hosts that get a copy of each slice of the state. With one
        host, or one directory for all, it has no effect.

    >>> import jax.numpy as jnp, stepfold as sf, tempfile
    >>> folder, local = tempfile.mkdtemp(), tempfile.mkdtemp()
    >>> checkpoints = sf.Checkpoints(folder, every=10, temporary=sf.Temporary(local, every=2))
    >>> with checkpoints as series:
    ...     for step in range(1, 14):
    ...         if series.due(step):
    ...             series.save({"w": jnp.full(2, step)}, step=step)
    >>> restored = series.restore({"w": jnp.zeros(2, int)})
    >>> series.steps(), sf.checkpoint.latest_step(folder), restored.step
    ([10, 12], 10, 12)
    """

    directory: str | os.PathLike[str]
    _: KW_ONLY
    every: int | Literal["continuous"] | None = None
    every_minutes: float | None = None
    keep: int = 1
    replicas: int = 1
    every_epochs: ClassVar[None] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", read_directory(self.directory))
        if isinstance(self.every, str) and self.every != "continuous":
            refuse("every", "a number of steps, or 'continuous'", repr(self.every))
        if self.every not in (None, "continuous"):
            object.__setattr__(self, "every", read_integer("every", self.every))
        if self.every_minutes is not None:
            read_positive("every_minutes", self.every_minutes)
        object.__setattr__(self, "keep", read_integer("keep", self.keep))
        object.__setattr__(self, "replicas", read_integer("replicas", self.replicas, minimum=0))
        if self.every is None and self.every_minutes is None:
            refuse("temporary", "every=… or every_minutes=…", "neither")

    def folder_of(self, series: Store, identity: str) -> Path:
        """Return the folder of a series."""
        # Links are resolved, since they may change, and a directory may have several names.
        path = local_path(series.location)
        name = series.location if path is None else os.path.realpath(path)
        digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
        return read_directory(self.directory) / f"series-{digest}-{identity}"


def find_temporary(temporary: Temporary, series: Store) -> TierStore | None:
    """Open the temporary steps of a series to read them; None if it never had any."""
    identity = _read_identity(series)
    return None if identity is None else TierStore(temporary.folder_of(series, identity))


def open_temporary(temporary: Temporary, series: PermanentStore) -> TierStore | None:
    """Open the store of temporary steps, or return None if the disk is full; collective."""
    identity: str | None = None
    is_new = False
    with agreement(f"{series.location}: not opened"):
        if jax.process_index() == 0:
            identity = _read_identity(series)
            is_new = identity is None
            if identity is None:
                identity = secrets.token_hex(4)
                series.write_note(_IDENTITY, {"id": identity})
    agreed: list[Any] = broadcast_from_first([identity, is_new])
    folder = temporary.folder_of(series, agreed[0])
    if agreed[1]:
        _warn_of_others(temporary, series)
    try:
        return open_tier(folder, keep=temporary.keep, replicas=temporary.replicas)
    except CheckpointError as error:
        if not texts.DISK_FULL.search(str(error)):
            raise
        warn(
            f"{folder}: the run continues without temporary saves: {error}",
            RuntimeWarning,
        )
        return None


def _read_identity(series: Store) -> str | None:
    identity = (read_fields(series, _IDENTITY) or {}).get("id")
    is_valid = isinstance(identity, str) and re.fullmatch("[0-9a-f]{8}", identity)
    return identity if is_valid else None


def _warn_of_others(temporary: Temporary, series: Store) -> None:
    """Warn if earlier series at the same path have left temporary steps."""
    pattern = temporary.folder_of(series, "*")
    for folder in sorted(pattern.parent.glob(pattern.name)):
        if TierStore(folder).steps():
            warn(
                f"{folder}: temporary steps of an earlier series in {series.location}, which "
                "was deleted or moved, are not continued; delete them, or move it back",
                RuntimeWarning,
            )


class ContinuousSaves:
    """Decide at which steps to save, by the time that earlier saves have cost the loop.

    A save blocks the loop for a while, and slows down the steps while it is written. Both show in
    the interval between two looks at the clock: it takes longer than the same number of steps
    without a save.

    >>> saves = ContinuousSaves()
    >>> saves.is_due(1, is_saving=False)  # nothing is known yet
    False
    """

    def __init__(self) -> None:
        self.next_step = 0  # of the next look, and of the first save that may be due
        self._look: tuple[int, float] | None = None  # the step and the time of the last one
        self._paces: deque[float] = deque(maxlen=_RECENT)  # seconds for a step without a save
        self._losses: deque[float] = deque(maxlen=_RECENT)  # seconds for a save
        self._blocked = self._slower = 0.0  # seconds for the last save so far
        self._has_save = False  # since the last look
        self._began: float | None = None  # when the last save began

    def is_due(self, step: int, *, is_saving: bool) -> bool:
        """Look at the clock; return whether a save is due after a step."""
        now = time.monotonic()
        if self._look is not None and step > self._look[0]:
            self._measure(step - self._look[0], now - self._look[1], is_saving)
        self._look, self._has_save = (step, now), is_saving
        pace = statistics.median(self._paces) if self._paces else 0.0
        self.next_step = step + max(1, round(_LOOK_SECONDS / pace) if pace else 1)
        if not pace or is_saving:
            return False
        loss = statistics.median(self._losses) if self._losses else 0.0
        return self._began is None or now - self._began >= loss / _SHARE

    def begin(self, seconds: float) -> None:
        """Record the start of a save, and for how long it blocked the loop."""
        self._has_save, self._blocked, self._slower = True, seconds, 0.0
        self._began = time.monotonic() - seconds

    def _measure(self, steps: int, seconds: float, is_saving: bool) -> None:
        if not self._has_save:
            self._paces.append(seconds / steps)
            return
        if self._paces:
            self._slower += seconds - steps * statistics.median(self._paces)
        if not is_saving:
            self._losses.append(max(self._blocked, self._slower))
