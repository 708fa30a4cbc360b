"""Metrics in Weights & Biases."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from stepfold.errors import refuse
from stepfold.loop.writers.base import ConvertingWriter, Histogram, Value, require


class wandb_writer(ConvertingWriter):  # noqa: N801
    """Write to a run of Weights & Biases, online or offline.

    The first write calls `wandb.init(**options)`, so every process may make a writer; `close`
    finishes the run. Calls of W&B take milliseconds: use `async_writer` to keep them off the loop.

    W&B holds back the values of a step until the next step or `close`, and `flush` cannot change
    that. It ignores steps of a resumed run that it already has.

    >>> import stepfold as sf
    >>> writer = sf.wandb_writer(project="digits", mode="offline", id="a1", resume="allow")
    >>> writer.close()  # nothing was written, so no run was started
    """

    def __init__(self, **options: Any) -> None:
        require("wandb", "wandb_writer", "wandb")
        self._options = options
        self._run: Any = None
        self._is_closed = False

    def _write(self, step: int, values: Mapping[str, Value]) -> None:
        run = self._get_run()
        import wandb

        row: dict[str, Any] = dict(values)
        for name, value in values.items():
            if isinstance(value, Histogram):
                counts_and_edges = np.array(value.counts), np.array(value.edges)
                row[name] = wandb.Histogram(np_histogram=counts_and_edges)
                if value.nonfinite:
                    row[f"{name}/nonfinite"] = value.nonfinite
            elif isinstance(value, np.ndarray):
                is_gray = value.shape[-1] == 1
                row[name] = [wandb.Image(image[..., 0] if is_gray else image) for image in value]
        run.log(row, step=step)

    def _write_settings(self, settings: Mapping[str, float | str]) -> None:
        self._get_run().config.update(settings, allow_val_change=True)

    def close(self) -> None:
        run, self._run, self._is_closed = self._run, None, True
        if run is not None:
            run.finish()

    def _get_run(self) -> Any:
        if self._is_closed:
            expected = "no write after close(), which finished the run"
            advice = "make another writer, with id=… and resume='must' to continue this run"
            refuse("wandb_writer", expected, "one", advice)
        if self._run is None:
            import wandb

            self._run = wandb.init(**self._options)
        return self._run
