"""Write steps with orbax in the background; the only module that imports orbax.

The arrays are stored by orbax, so that its tools can read them: `params/w` of step 12 is `params.w`
under `12/state`. The manifests (`manifest.py`) are written next to the arrays and committed
together with them. A directory without a manifest, or without one of its files, is not a
checkpoint.

`AsyncCheckpointer` is used instead of `CheckpointManager`, which caches the list of steps: it keeps
offering a step that was removed, and silently refuses to save below a damaged one.

Compression is off: it costs time, and as much additional memory as the state.

orbax 1.0 replaces these classes by its v1 API. A port needs three things there:
- a `CheckpointableHandler` in place of `_Handler`: its `save` wraps that of the handler for
  pytrees, and the awaitable that it returns also writes the manifest of this process;
- `save_checkpointables_async(path, {"state": …})` in place of `AsyncCheckpointer.save`, and the
  `result()` of its response in place of `wait_until_finished`; the cause of an error is one
  `__cause__` further down;
- a place for `write_files`: after the files of all processes are merged, before the rename. v0
  calls `finalize` of the handler then; v1 has `AsyncOptions.post_finalization_callback`.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

from stepfold.checkpoint import manifest
from stepfold.checkpoint.leaves import Leaf, arrays_of, leaves_of, shards_of
from stepfold.checkpoint.manifest import StepMetadata
from stepfold.checkpoint.steps import sync
from stepfold.errors import CheckpointError

_TIMEOUT = 60.0  # seconds to wait for other writes of a save that failed


class OrbaxWriter:
    """Write steps, one at a time. A step directory is complete or absent."""

    def __init__(self) -> None:
        self._claim: Path | None = None
        self._make_checkpointer()

    def _make_checkpointer(self) -> None:
        self._handler = _Handler(use_compression=False)
        options = ocp.AsyncOptions(create_directories_asynchronously=False)
        handler = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(async_options=options),
            **{manifest.STATE: self._handler},
        )
        self._orbax = ocp.AsyncCheckpointer(handler, async_options=options)

    def begin(
        self,
        path: Path,
        state: Any,
        metadata: StepMetadata,
        before_commit: Callable[[], None] | None,
    ) -> None:
        """Copy the state off the devices and start to write it to the directory `path`."""
        arrays = arrays_of(state)
        save = _Save(
            _nest({name: array for name, array in arrays.items() if array.size}),
            arrays=arrays,
            leaves=leaves_of(state),
            metadata=metadata,
            before_commit=before_commit,
        )
        with self._converted_errors(path):
            if jax.process_index() == 0:
                # orbax would remove another run's unfinished save of the step, and mix the two.
                claim = path.with_name(f"{path.name}.saving")
                claim.mkdir(parents=True)
                self._claim = claim
            self._orbax.save(path, args=ocp.args.Composite(**{manifest.STATE: save}))

    def wait(self, path: Path) -> None:
        """Wait until the pending step is renamed to `path`, and synced to disk."""
        with self._converted_errors(path):
            self._orbax.wait_until_finished()
            if jax.process_index() > 0:
                return
            if not path.is_dir():  # orbax drops errors that it cannot log, as with a closed stderr
                raise CheckpointError("orbax reported success, but the step directory is missing")
            sync(path)
            sync(path.parent)
        self._release_claim()

    def _release_claim(self) -> None:
        if self._claim is not None:
            with suppress(FileNotFoundError):  # the whole directory was removed
                self._claim.rmdir()
            self._claim = None

    def close(self) -> None:
        """Shut down the threads."""
        self._orbax.close()

    @contextmanager
    def _converted_errors(self, path: Path) -> Iterator[None]:
        """Convert any error of orbax to a `CheckpointError`, and remove the files of the step."""
        try:
            yield
        except BaseException as error:
            # At exit, and after an interrupt, orbax's writes may never end.
            may_end = isinstance(error, Exception) and not _is_at_exit(error)
            self._handler.wait_for_writes(_TIMEOUT if may_end else 1.0)
            # A failed checkpointer may raise its error again at the next save.
            self._make_checkpointer()
            if self._claim is not None:  # without it, the files are those of another run
                _remove_unfinished(path)
            self._release_claim()
            if not isinstance(error, Exception):
                raise
            raise CheckpointError(f"{path}: not saved: {_cause(error)}") from error


@dataclass
class _Save(ocp.args.PyTreeSave):  # type: ignore[misc]
    arrays: Mapping[str, Any] = field(default_factory=dict)
    leaves: Mapping[str, Leaf] = field(default_factory=dict)
    metadata: StepMetadata = StepMetadata(0)  # noqa: RUF009  immutable
    before_commit: Callable[[], None] | None = None


class _Handler(ocp.PyTreeCheckpointHandler):  # type: ignore[misc]
    """Write the arrays with orbax, and the manifests next to them."""

    writes: Sequence[Any] = ()

    async def async_save(self, directory: Any, args: _Save) -> list[Any]:
        """Start to write, once the data is on the host, where it can no longer change."""
        # Views if the device is the host: they keep the arrays valid, even if a step donates them.
        shards = {name: shards_of(array) for name, array in args.arrays.items()}
        writes = await super().async_save(directory, args=args)

        async def write_manifest() -> None:
            if args.before_commit is not None:
                args.before_commit()
            manifest.write_leaves(Path(directory), args.metadata, args.leaves, shards)

        own = CommitFutureAwaitingContractedSignals(write_manifest(), name="manifest")
        self.writes = [*(writes or []), own]
        return self.writes

    def wait_for_writes(self, timeout: float) -> None:
        """Wait for pending writes of a failed save, so that its files can be removed."""
        for write in self.writes:
            with suppress(Exception):  # the first error was raised; orbax ignores the others
                write.result(timeout)
        self.writes = []

    def finalize(self, directory: Any) -> None:
        """Merge what the processes wrote, and record the files."""
        folder = Path(directory)  # orbax's own path type treats `[` as a pattern in `glob`
        super().finalize(folder)
        manifest.write_files(folder)


ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)(_Save)


def _nest(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Convert paths to nested dicts, the structure that orbax restores on its own."""
    nested: dict[str, Any] = {}
    for name, array in arrays.items():
        *branches, last = name.split("/")
        inner = nested
        for branch in branches:
            inner = inner.setdefault(branch, {})
        inner[last] = array
    return nested


def _remove_unfinished(path: Path) -> None:
    """Remove what orbax wrote of a step."""
    for _ in range(40):
        unfinished = list(path.parent.glob(f"{path.name}.orbax-checkpoint-tmp*"))
        if not unfinished:
            break
        for folder in unfinished:
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)  # threads of orbax may still write


def _is_at_exit(error: Exception) -> bool:
    """Whether Python refused a thread because the program has ended."""
    return "interpreter shutdown" in str(error) or "cannot schedule new futures" in str(error)


def _cause(error: Exception) -> str:
    text = str(error)
    if isinstance(error, CheckpointError):
        return text
    if isinstance(error, FileExistsError):
        return (
            "another run is saving it, or was killed then; end all but one, and open it again, or "
            f"delete {error.filename} on a file system without locks"
        )
    if _is_at_exit(error):
        return "the program ended before it was written; close the series, as a `with` block does"
    if "Too many open files" in text:
        return "too many open files; allow more of them, with ulimit -n"
    if "No space left" in text or "quota exceeded" in text:
        return "no space left on the device; make room, or keep fewer checkpoints"
    if isinstance(error, PermissionError) or "PERMISSION_DENIED" in text:
        return "no permission to write there; change it, or give another directory"
    return f"{type(error).__name__}: {text.splitlines()[0][:300] if text else ''}"
