"""Give what is measured to a writer."""

from typing import Any

import jax

from stepfold import tree
from stepfold.errors import ConfigError
from stepfold.loop.event import Event
from stepfold.loop.writers.protocol import resume


class log_to:  # noqa: N801  it is called as the functions beside it are
    """Write metrics, with a writer of stepfold's, of clu's, or of one's own.

    When the run begins or goes on at a step, a writer that has a method `resume(step)` is told, so
    that it drops what an earlier run wrote of later steps: each step is there once. At the end the
    writer is flushed and closed. Of several processes the first one writes.

    >>> import stepfold as sf
    >>> class Printer:
    ...     def write_scalars(self, step, scalars):
    ...         print(step, scalars)
    >>> hook = sf.log_to(Printer(), every=20)
    >>> for step in (10, 20, 30):
    ...     hook(sf.Event(step, None, {"train/loss": step / 10}, None))
    20 {'train/loss': 2.0}
    >>> hook(sf.Event(30, None, {"eval/loss": 2.5}, None))
    30 {'eval/loss': 2.5}
    """

    def __init__(self, writer: Any, every: int | None = None, *, everywhere: bool = False) -> None:
        """Say to what, and how often.

        Args:
          writer: any object with a method `write_scalars(step, numbers by name)`; `flush()`,
            `close()` and `resume(step)` are called if it has them.
          every: write train metrics only at the first event at or after each multiple of so many
            steps, and of the last step. Evaluations are all written.
          everywhere: whether every process writes, each with a writer of its own.

        Raises:
          ConfigError: if an argument is not as described.
        """
        if not callable(getattr(writer, "write_scalars", None)) or isinstance(writer, type):
            raise ConfigError(
                "log_to: expected a writer, with write_scalars(step, metrics), got "
                f"{tree.spell(writer)}; sf.jsonl_writer(path) is one"
            )
        if every is not None and (type(every) is not int or every < 1):
            raise ConfigError(f"log_to: every: expected an integer of at least 1, got {every!r}")
        self._writer, self._every, self._everywhere = writer, every, everywhere
        self._seen, self._told = 0, False

    def open(self, step: int, _: int | None) -> None:
        """Tell the writer from which step on it will hear."""
        if not self._told and self._every:
            self._seen = step // self._every
        if self._is_writer():
            resume(self._writer, step)

    def __call__(self, event: Event) -> None:
        """Write the metrics of an event, if they are due."""
        if self._is_due(event) and self._is_writer():
            self._writer.write_scalars(event.step, event.metrics)

    def _is_writer(self) -> bool:
        return self._everywhere or jax.process_index() == 0

    def _is_due(self, event: Event) -> bool:
        if self._every is None or not event.is_train:
            return True
        multiple, before = event.step // self._every, self._seen
        self._seen = multiple
        return multiple > before or event.step == event.total

    def close(self) -> None:
        """See that all is written, and let go of the writer."""
        if not self._is_writer():
            return
        try:
            if hasattr(self._writer, "flush"):
                self._writer.flush()
        finally:
            if hasattr(self._writer, "close"):
                self._writer.close()

    def get_state(self) -> dict[str, Any]:
        """Give what a resumed run has to know."""
        return {"multiple": self._seen, "every": self._every}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there; with another number of steps, from where the run goes on."""
        if state.get("every", self._every) == self._every:
            self._seen, self._told = state["multiple"], True
