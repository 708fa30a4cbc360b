"""Metrics in Weights & Biases."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from stepfold.errors import ConfigError
from stepfold.loop.writers.base import ConvertingWriter, Histogram, Value, require


def wandb_writer(**options: Any) -> "WandbWriter":
    """Write to a run of Weights & Biases, online or offline.

    The first write starts the run, so every process may make a writer; `close` finishes it. Calls
    of W&B take milliseconds: use `async_writer` to keep them off the loop.

    W&B holds back the values of a step until the next step or `close`, and `flush` cannot change
    that. It ignores steps of a resumed run that it already has.

    Args:
      options: arguments of `wandb.init`: `project`, `mode="offline"`, `id`, `resume`, …

    Raises:
      ConfigError: if wandb is not installed.

    >>> import stepfold as sf
    >>> writer = sf.wandb_writer(project="digits", mode="offline", id="a1", resume="allow")
    >>> writer.close()  # nothing was written, so no run was started
    """
    require("wandb", "wandb_writer", "wandb")
    return WandbWriter(options)


class WandbWriter(ConvertingWriter):
    """Write to a run of Weights & Biases; made by `wandb_writer`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._run: Any = None
        self._is_closed = False

    def _write(self, step: int, values: Mapping[str, Value]) -> None:
        run = self._get_run()
        from wandb import Histogram as WandbHistogram
        from wandb import Image

        row: dict[str, Any] = dict(values)
        for name, value in values.items():
            if isinstance(value, Histogram):
                arrays = np.array(value.counts), np.array(value.edges)
                row[name] = WandbHistogram(np_histogram=arrays)
                if value.nonfinite:
                    row[f"{name}/nonfinite"] = value.nonfinite
            elif isinstance(value, np.ndarray):
                is_gray = value.shape[-1] == 1
                row[name] = [Image(image[..., 0] if is_gray else image) for image in value]
        run.log(row, step=step)

    def _write_settings(self, settings: Mapping[str, float | str]) -> None:
        self._get_run().config.update(settings, allow_val_change=True)

    def close(self) -> None:
        self._is_closed = True
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()

    def _get_run(self) -> Any:
        if self._is_closed:
            raise ConfigError(
                "wandb_writer: expected no write after close(), which finished the run; make "
                "another writer, with id=… and resume='must' to continue this run"
            )
        if self._run is None:
            import wandb

            self._run = wandb.init(**self._options)
        return self._run
