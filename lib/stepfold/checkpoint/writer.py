"""Write steps with orbax in the background, and the manifests that verify them.

The arrays are stored by orbax, so that its tools can read them: `params/w` of step 12 is `params.w`
under `12/state`. The manifests (`manifest.py`) are written next to the arrays and committed
together with them. A directory without a manifest, or without one of its files, is not a
checkpoint.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import jax

from stepfold.checkpoint import manifest
from stepfold.checkpoint.claims import Claim, ClaimedError
from stepfold.checkpoint.host_buffers import HostBuffers, as_arrays
from stepfold.checkpoint.leaves import arrays_of, leaves_of, shards_of
from stepfold.checkpoint.manifest import StepMetadata
from stepfold.checkpoint.steps import locked, sync
from stepfold.core.processes import KeyValues, agreement
from stepfold.errors import CheckpointError
from stepfold.internals import texts
from stepfold.internals.orbax import StepWriter, remove_unfinished

_TIMEOUT = 60.0  # seconds to wait for other writes of a save that failed


class OrbaxSave:
    """A step that is being saved. Its directory is complete or absent."""

    def __init__(
        self,
        path: Path,
        state: Any,
        metadata: StepMetadata,
        before_commit: Callable[[], None] | None,
        buffers: HostBuffers | None = None,
    ) -> None:
        """Copy the state off the devices and start to write it to the directory `path`."""
        arrays, leaves = arrays_of(state), leaves_of(state)
        copies = {} if buffers is None else buffers.copy(arrays)
        arrays = {name: array for name, array in arrays.items() if name not in copies}
        self._path, self._peers = path, _Peers()
        self._writer = StepWriter(manifest.STATE, self._peers.barrier)
        self._owns_files = False
        self._reservation = ExitStack()  # of the directory and of the number, until the end
        self._reservation.enter_context(locked(path.parent))
        with self._converted_errors():
            with agreement(f"{path}: not saved"):
                if jax.process_index() == 0:
                    # orbax would remove another run's unfinished save of the step, and mix the two.
                    with suppress(FileExistsError):
                        path.parent.mkdir(parents=True)
                    claim = Claim(path.parent, f"{path.name}.saving", lost=lambda: None)
                    self._reservation.callback(claim.release)
                    claim.acquire()
                    self._owns_files = True

            # On CPU without buffers, zero-copy views.
            shards = {
                name: copies[name].recorded() if name in copies else shards_of(arrays[name])
                for name in leaves
            }

            def write_manifest(folder: Path) -> None:
                if before_commit is not None:
                    before_commit()
                manifest.write_leaves(folder, metadata, leaves, shards)

            def start() -> None:
                all_arrays = {**arrays, **as_arrays(copies)}
                stored = {name: all_arrays[name] for name in leaves if all_arrays[name].size}
                self._writer.save(path, stored, write_manifest, manifest.write_files)

            # orbax takes a while before it writes. If all arrays are copies, `commit` starts it, in
            # the thread.
            self._start: Callable[[], None] | None = start
            if any(isinstance(array, jax.Array) for array in arrays.values()):
                self._start_once()

    def commit(self, finish: Callable[[], None] | None = None) -> None:
        """Wait until the step is durable, and call `finish`. Readers do not see it before.

        It is renamed to its path, and synced to disk. On failure, its files are removed. If a kill
        prevents `finish`, the claim stays next to the step, and the next `clean` calls it.
        """
        with self._converted_errors():
            self._start_once()
            self._writer.wait()
            self._peers.end()
            if jax.process_index() == 0:
                # orbax drops errors that it cannot log, as with a closed stderr.
                if not self._path.is_dir():
                    raise CheckpointError(
                        "orbax reported success, but the step directory is missing"
                    )
                sync(self._path)
                sync(self._path.parent)
        try:
            if finish is not None:
                finish()
        finally:
            self._reservation.close()
            self._writer.close()

    def _start_once(self) -> None:
        start, self._start = self._start, None
        if start is not None:
            start()

    @contextmanager
    def _converted_errors(self) -> Iterator[None]:
        """Convert any error of orbax to a `CheckpointError`, and remove the files of the step."""
        try:
            yield
        except BaseException as error:
            self._peers.fail(_cause(error) if isinstance(error, Exception) else "was interrupted")
            # At exit, and after an interrupt, orbax's writes may never end.
            may_end = isinstance(error, Exception) and not _is_at_exit(error)
            for write in self._writer.writes:  # otherwise, files may arrive after the removal
                with suppress(Exception):  # the first error was raised; orbax ignores the others
                    write.result(_TIMEOUT if may_end else 1.0)
            self._peers.end()
            if self._owns_files:
                # A write whose folder is removed fails with another error, or waits for the folder.
                self._peers.wait_for_ends(None if may_end else 1.0)
                remove_unfinished(self._path)
            self._reservation.close()
            if not isinstance(error, Exception):
                raise
            raise CheckpointError(f"{self._path}: not saved: {_cause(error)}") from error


class _Peers:
    """The processes that save a step: a failure in one of them ends the save in all.

    orbax's own barriers would let the others wait for their whole limits, without the reason.
    """

    def __init__(self) -> None:
        self._values = KeyValues("save")
        self._are_several = bool(self._values) and jax.process_count() > 1
        self._save = self._values.count_call() if self._are_several else 0

    def fail(self, cause: str) -> None:
        """Let the others know why this process does not save."""
        if self._are_several:
            self._values.set(f"{self._save}/failed/{jax.process_index()}", cause)

    def end(self) -> None:
        """Let the others know that this process writes nothing more."""
        if self._are_several:
            self._values.set(f"{self._save}/ended/{jax.process_index()}", True)

    def wait_for_ends(self, timeout: float | None) -> None:
        """Wait until no process writes any more, or for some seconds."""
        if self._are_several:
            processes, folder = jax.process_count(), f"{self._save}/ended"
            self._values.wait(lambda: len(self._values.get(folder)) == processes, timeout)

    def barrier(self, *, key: str, timeout_ms: int) -> None:  # noqa: ARG002  orbax passes it
        """Wait for all processes, as a barrier of orbax; raise if one of them has failed."""
        if not self._are_several:
            return
        folder = f"{self._save}/barrier/{key.replace('/', '_')}"
        self._values.set(f"{folder}/{jax.process_index()}", True)

        def are_all_there() -> bool:
            for process, cause in self._values.get(f"{self._save}/failed").items():
                raise CheckpointError(f"process {process} did not save: {cause}")
            return bool(len(self._values.get(folder)) == jax.process_count())

        if not self._values.wait(are_all_there):
            raise CheckpointError(f"not all processes saved within {self._values.timeout} s")


def _is_at_exit(error: Exception) -> bool:
    """Whether Python refused a thread because the program has ended."""
    return texts.AT_EXIT.search(str(error)) is not None


def _cause(error: Exception) -> str:
    text = str(error)
    if isinstance(error, CheckpointError):
        return text
    if isinstance(error, ClaimedError):
        return f"another run is saving it, {text}; end all but one"
    if _is_at_exit(error):
        return "the program ended before it was written; close the series, as a `with` block does"
    if texts.MANY_OPEN_FILES.search(text):
        return "too many open files; allow more of them, with ulimit -n"
    if texts.DISK_FULL.search(text):
        return "no space left on the device; make room, or keep fewer checkpoints"
    if isinstance(error, PermissionError) or texts.PERMISSION_DENIED.search(text):
        return "no permission to write there; change it, or give another directory"
    return f"{type(error).__name__}: {text.splitlines()[0][:300] if text else ''}"
