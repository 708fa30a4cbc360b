"""Weights & Biases."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from stepfold.errors import ConfigError
from stepfold.loop.writers import values
from stepfold.loop.writers.protocol import require


def wandb_writer(**options: Any) -> "WandbWriter":
    """Write to a run of Weights & Biases, online or offline.

    The run is begun with the first write, so that every process may make a writer, and is finished
    by `close`. A call of W&B's takes milliseconds: an `async_writer` around this one spares them
    the loop.

    W&B holds a step back until the next one comes, or `close`. What it has is kept: steps of a
    resumed run that are there already are not taken again.

    Args:
      options: those of `wandb.init`: `project`, `mode="offline"`, `id` and `resume`, …

    Raises:
      ConfigError: if wandb is not installed.

    >>> import stepfold as sf
    >>> writer = sf.wandb_writer(project="digits", mode="offline", id="a1", resume="allow")
    >>> writer.close()  # nothing was written, and no run begun
    """
    require("wandb", "wandb_writer", "wandb")
    return WandbWriter(options)


class WandbWriter:
    """Write to a run of Weights & Biases; `wandb_writer` makes it."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._run: Any = None
        self._closed = False

    def _begun(self) -> Any:
        if self._closed:
            raise ConfigError(
                "wandb_writer: expected no write after close(), which finished the run; make "
                "another writer, with id=… and resume='must' to go on with this run"
            )
        if self._run is None:
            # Imported when first used: it takes longer than all else together.
            import wandb

            self._run = wandb.init(**self._options)
        return self._run

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Write numbers."""
        self._begun().log(values.numbers(scalars), step=values.number_of_step(step))

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Write texts."""
        self._begun().log(values.texts(texts), step=values.number_of_step(step))

    def write_histograms(
        self,
        step: int,
        arrays: Mapping[str, Any],
        num_buckets: Mapping[str, int] | None = None,
    ) -> None:
        """Write how the elements of arrays are distributed."""
        run, found = self._begun(), values.histograms(arrays, num_buckets)
        from wandb import Histogram

        kept: dict[str, Any] = {
            name: Histogram(np_histogram=(np.array(one.counts), np.array(one.edges)))
            for name, one in found.items()
        }
        for name, one in found.items():
            if one.nonfinite:
                kept[f"{name}/nonfinite"] = one.nonfinite
        run.log(kept, step=values.number_of_step(step))

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        """Write images."""
        run, found = self._begun(), values.pixels(images)
        from wandb import Image

        kept = {name: [Image(_plain(one)) for one in batch] for name, batch in found.items()}
        run.log(kept, step=values.number_of_step(step))

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Write what the run was begun with, into the run's `config`."""
        self._begun().config.update(values.settings(hparams), allow_val_change=True)

    def flush(self) -> None:
        """Do nothing: W&B writes in a process of its own, when it sees fit."""

    def close(self) -> None:
        """Finish the run, if one was begun; W&B's own process puts the last of it on the disk."""
        self._closed = True
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()


def _plain(pixels: Any) -> Any:
    return pixels[..., 0] if pixels.shape[-1] == 1 else pixels
