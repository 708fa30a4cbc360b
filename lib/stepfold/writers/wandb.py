"""Metrics in Weights & Biases, and in trackio, which has the same functions."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Literal

import numpy as np

from stepfold.errors import ConfigError, refuse
from stepfold.tree import describe_value
from stepfold.writers.base import ConvertingWriter, Histogram, Value, Writer, require


def wandb(*, library: Literal["wandb", "trackio"] = "wandb", **options: Any) -> Writer:
    """Write to a run of Weights & Biases, or of trackio, which has the same functions.

    The first write calls `wandb.init(**options)` or `trackio.init(**options)`, so every process may
    make a writer; `close` finishes the run.

    W&B writes online or offline. Its calls take milliseconds: use `async_writer` to keep them off
    the loop. It holds back the values of a step until the next step or `close`, and `flush` cannot
    change that. It ignores steps of a resumed run that it already has.

    trackio keeps its data on this machine. Without `space_id` and `server_url` it needs no network:
    it writes a SQLite database in the folder `TRACKIO_DIR` of the environment, by default
    ```~/.cache/huggingface/trackio```. `trackio show` shows it. A thread of trackio writes at short
    intervals, and `flush` does not wait for it. Several images are called `name/0`, `name/1`, ….
    Steps that a resumed run repeats are there twice.

    >>> import stepfold as sf
    >>> writer = sf.writers.wandb(project="digits", mode="offline", id="a1", resume="allow")
    >>> writer.close()  # nothing was written, so no run was started
    >>> writer = sf.writers.wandb(library="trackio", project="digits", name="a1", resume="allow")
    >>> writer.close()
    """
    if library not in ("wandb", "trackio"):
        refuse("library", "'wandb' or 'trackio'", describe_value(library))
    require(library, library, library)
    return (WandbWriter if library == "wandb" else TrackioWriter)(options)


class _RunWriter(ConvertingWriter):
    """Base of the writers to a run that `init` of a package starts at the first write."""

    _package: str

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._run: Any = None
        self._is_closed = False

    def _write(self, step: int, values: Mapping[str, Value]) -> None:
        run, package = self._get_run(), import_module(self._package)
        row: dict[str, Any] = dict(values)
        for name, value in values.items():
            if isinstance(value, Histogram):
                counts_and_edges = np.array(value.counts), np.array(value.edges)
                row[name] = package.Histogram(np_histogram=counts_and_edges)
                if value.nonfinite:
                    row[f"{name}/nonfinite"] = value.nonfinite
            elif isinstance(value, np.ndarray):
                is_gray = value.shape[-1] == 1
                images = [package.Image(image[..., 0] if is_gray else image) for image in value]
                del row[name]
                row |= self._image_values(name, images)
        run.log(row, step=step)

    def _image_values(self, name: str, images: list[Any]) -> dict[str, Any]:
        return {name: images}

    def _write_settings(self, settings: Mapping[str, float | str]) -> None:
        self._get_run().config.update(settings)

    def close(self) -> None:
        run, self._run, self._is_closed = self._run, None, True
        if run is not None:
            run.finish()

    def _get_run(self) -> Any:
        if self._is_closed:
            identity = "id" if self._package == "wandb" else "name"
            raise ConfigError(
                f"{self._package}: write after close(), which finished the run; make another "
                f"writer, with {identity}=… and resume='must' to continue this run"
            )
        if self._run is None:
            self._run = import_module(self._package).init(**self._options)  # takes long
        return self._run


class WandbWriter(_RunWriter):
    """The writer of `wandb`."""

    _package = "wandb"

    def _write_settings(self, settings: Mapping[str, float | str]) -> None:
        self._get_run().config.update(settings, allow_val_change=True)


class TrackioWriter(_RunWriter):
    """The writer of `wandb` for trackio."""

    _package = "trackio"

    def _image_values(self, name: str, images: list[Any]) -> dict[str, Any]:
        if len(images) == 1:
            return {name: images[0]}
        return {f"{name}/{number}": image for number, image in enumerate(images)}
