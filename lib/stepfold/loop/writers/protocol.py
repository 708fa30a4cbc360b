"""What a writer of metrics is: clu's method names, so that clu's writers are writers too."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Protocol

from stepfold import tree
from stepfold.errors import ConfigError

_METHODS = (
    *("write_scalars", "write_texts", "write_histograms", "write_images", "write_hparams"),
    *("flush", "close"),
)


class Writer(Protocol):
    """Keep what a run tells of itself; any `MetricWriter` of clu's is one.

    Steps never go back: several calls may be of one step, and then they belong together. If a
    metric is written twice for a step, the later value counts.

    A writer may have a method `resume(step)` besides, which is called before the first write of a
    run that goes on from a step: what an earlier run wrote of later steps is to be dropped, since
    it will be written again. All of stepfold's that keep files have it.

    >>> import stepfold as sf, tempfile
    >>> writer: sf.Writer = sf.multi_writer(
    ...     sf.console_writer(), sf.jsonl_writer(tempfile.mkdtemp() + "/metrics.jsonl")
    ... )
    >>> writer.write_scalars(10, {"train/loss": 0.5})
          10  train/loss 0.5
    >>> writer.close()
    """

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Write numbers: Python's, numpy's or jax's."""

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Write texts."""

    def write_histograms(
        self,
        step: int,
        arrays: Mapping[str, Any],
        num_buckets: Mapping[str, int] | None = None,
    ) -> None:
        """Write how the elements of arrays are distributed."""

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        """Write images, [H, W, C] or [N, H, W, C]: bytes, or floats from 0 to 1."""

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Write what the run was begun with."""

    def flush(self) -> None:
        """Return when all is written that was given."""

    def close(self) -> None:
        """Flush, and let go of files and threads."""


def read_writer(name: str, value: Any) -> Writer:
    """Read an argument that is to be a writer.

    Raises:
      ConfigError: if it is none, with what it lacks.
    """
    lacking = [method for method in _METHODS if not callable(getattr(value, method, None))]
    if lacking or isinstance(value, type):
        raise ConfigError(
            f"{name}: expected a writer, as csv_writer(path) gives one, got {tree.spell(value)}"
            + (f", which has no {', '.join(lacking)}" if lacking else ", a class; call it")
        )
    writer: Writer = value
    return writer


def resume(writer: Writer, step: int) -> None:
    """Tell a writer that the run goes on from a step, if it is one that wants to know."""
    tell = getattr(writer, "resume", None)
    if tell is not None:
        tell(step)


def require(package: str, name: str, extra: str) -> None:
    """See that an optional package is there, and leave it to its first use to import it.

    Raises:
      ConfigError: if it is not, with the command that installs it.
    """
    if find_spec(package) is None:
        raise ConfigError(
            f"{name}: expected {package}, which is not installed; "
            f"install it with pip install 'stepfold[{extra}]'"
        )
