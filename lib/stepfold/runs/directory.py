"""`RunDirectory`: what concerns the files of a run, as an argument of `fit`."""

import os
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypedDict

from stepfold.core.validation import absolute_path, check_flags, is_url, read_positive
from stepfold.errors import ConfigError, refuse, warn
from stepfold.tree import describe_value


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a run, and what `fit` writes there: `fit(run_dir=RunDirectory(…))`.

    It gets `metrics.jsonl` and `metrics.csv`, `run.json` (arguments, versions, how the run ended),
    `report.html`, checkpoints unless they have a directory, and the capsule of a step that went
    wrong. A resumed run appends. Files of an earlier run that is not resumed are moved to
    `previous-1` and so on, with a warning. One run at a time may use it.

    Attributes:
      path: the directory. None writes no files, for a `config` that only writers get.
      upload: a URL in object storage, such as `s3://bucket/run`, to which metrics, `run.json` and
        the report are copied at each checkpoint and at the end. A run that resumes on another host
        gets them from there.
      config: the hyper-parameters of the run, a mapping or a dataclass, possibly nested, of values
        that JSON can hold. They are written to `run.json`, shown and compared in the report, and
        passed to the writers of `log_to`, such as W&B. A resume warns of changes.
      compilation_cache: whether jax's compilation cache is kept in `compiled` in the directory
        during the run, at most 1 GiB, so that a restart loads its programs. A cache that the user
        configured, by `jax_compilation_cache_dir`, is used in its place. Off for virtual devices.
        Whoever may write there can run code.

    Raises:
      ConfigError: if an argument is not as described.

    >>> import stepfold as sf
    >>> sf.RunDirectory("runs/a", config={"rate": 0.1}).config["rate"]
    0.1
    """

    path: str | os.PathLike[str] | None = None
    _: KW_ONLY
    upload: str | None = None
    config: Any = None
    compilation_cache: bool = True

    def __post_init__(self) -> None:
        if self.path is not None:
            absolute_path("path", self.path)
        if self.upload is not None:
            if not is_url(self.upload):
                advice = "give the path alone to keep the files of a run on a file system"
                got = describe_value(self.upload)
                refuse("upload", "a URL such as 's3://bucket/run'", got, advice)
            if self.path is None:
                advice = "write sf.RunDirectory('runs/a', upload=…)"
                refuse("upload", "the path of a directory to copy", "none", advice)
        if self.config is not None:
            from stepfold.runs.info import read_config  # lazy: a plain run has none

            read_config(self.config)
        check_flags(compilation_cache=self.compilation_cache)


class Moved(TypedDict, total=False):
    """Arguments of `fit` in version 0.2, which are arguments of others now."""

    upload: str | None
    config: Any
    compilation_cache: bool
    patience: float | None


def read_run_directory(run_dir: Any, moved: Moved) -> RunDirectory:
    """Return the directory of a run, of a path or of arguments of version 0.2; warn of these."""
    if unknown := [name for name in moved if name not in Moved.__annotations__]:
        raise TypeError(f"fit() got an unexpected keyword argument {unknown[0]!r}")
    if run_dir is not None and not isinstance(run_dir, RunDirectory):
        absolute_path("run_dir", run_dir)
    if "patience" in moved:
        if moved["patience"] is not None:
            read_positive("patience", moved["patience"], unit="seconds")
        warn(
            "patience: moved from fit to start_distributed; write sf.start_distributed(patience=…)",
            DeprecationWarning,
        )
    options: dict[str, Any] = {**moved}
    options.pop("patience", None)
    if isinstance(run_dir, RunDirectory):
        if options:
            names = ", ".join(options)
            raise ConfigError(
                f"{names}: moved from fit to RunDirectory; give them to the RunDirectory"
            )
        return run_dir
    directory = RunDirectory(run_dir, **options)
    if options:
        path = [] if run_dir is None else [repr(os.fspath(run_dir))]
        new = ", ".join([*path, *(f"{name}=…" for name in options)])
        warn(
            f"{', '.join(options)}: moved from fit to RunDirectory; write "
            f"run_dir=sf.RunDirectory({new})",
            DeprecationWarning,
        )
    return directory
