"""Configuration of a checkpoint series: directory, schedule and retention."""

from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import TracebackType

from stepfold.checkpoint import steps
from stepfold.checkpoint.retention import read_best
from stepfold.checkpoint.sealed import number
from stepfold.checkpoint.series import Series
from stepfold.errors import ConfigError


@dataclass(frozen=True)
class Checkpoints:
    """Configure where checkpoints go, when they are saved, and which are kept.

    The configuration does nothing until `fit`, `open` or a `with` block opens the series.

    Attributes:
      directory: the directory of the series; None in `fit` means `run_dir/checkpoints`.
      every: steps between checkpoints.
      every_epochs: epochs between checkpoints.
      every_minutes: minutes between checkpoints.
      keep: number of latest checkpoints to keep; None keeps all.
      keep_every: keep every step that is a multiple of this number permanently.
      best: the metric that ranks checkpoints, such as `eval/loss`; the best ones are kept as well.
      mode: whether the "min" or the "max" of the metric is the best. If None, "min" where the last
        part of the metric's name contains "loss", otherwise "max".
      keep_best: number of best checkpoints to keep.
      async_: whether to write in a background thread. A save then blocks only for the copy off the
        device and for the previous save.

    >>> import jax.numpy as jnp, stepfold as sf, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with sf.Checkpoints(folder, every=10, keep=2) as series:
    ...     for step in range(1, 51):
    ...         if series.due(step):
    ...             series.save({"w": jnp.ones(2)}, step=step, metrics={"eval/loss": 1 / step})
    >>> sf.verify(folder)
    {40: [], 50: []}
    """

    directory: str | Path | None = None
    _: KW_ONLY
    every: int | None = None
    every_epochs: int | None = None
    every_minutes: float | None = None
    keep: int | None = 3
    keep_every: int | None = None
    best: str | None = None
    mode: str | None = None
    keep_best: int = 1
    async_: bool = True
    _opened: list[Series] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("every", "every_epochs", "keep", "keep_every", "keep_best"):
            value = getattr(self, name)
            optional = name != "keep_best"
            if not (optional and value is None) and (type(value) is not int or value < 1):
                raise ConfigError(f"{name}: expected an integer of at least 1, got {value!r}")
        minutes = self.every_minutes
        if minutes is not None and not (number(minutes) or 0) > 0:
            raise ConfigError(f"every_minutes: expected a number above 0, got {minutes!r}")
        if self.mode is not None and self.best is None:
            raise ConfigError(f"mode: expected best=… to go with it, got mode={self.mode!r} alone")
        read_best(self.best, self.mode)

    def open(self, directory: str | Path | None = None) -> Series:
        """Open the series for saving, and clean up after interrupted saves.

        Args:
          directory: used if the configuration has no directory.

        Raises:
          CheckpointError: if the path is not a directory, or is not writable.
        """
        place = self.directory if self.directory is not None else directory
        if place is None:
            raise ConfigError("directory: expected a path, got None; give Checkpoints('runs/a', …)")
        return Series(
            steps.read_directory(place, make=True),
            every=self.every,
            every_epochs=self.every_epochs,
            every_minutes=self.every_minutes,
            keep=self.keep,
            keep_every=self.keep_every,
            best=read_best(self.best, self.mode),
            keep_best=self.keep_best,
            background=self.async_,
        )

    def __enter__(self) -> Series:
        self._opened.append(self.open())
        return self._opened[-1]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.pop().close()
