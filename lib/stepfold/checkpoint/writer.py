"""Write steps with orbax in the background; the only module that imports orbax.

The arrays are stored by orbax, so that its tools can read them: `params/w` of step 12 is `params.w`
under `12/state`. The manifests (`manifest.py`) are written next to the arrays and committed
together with them. A directory without a manifest, or without one of its files, is not a
checkpoint.

`AsyncCheckpointer` is used instead of `CheckpointManager`, which caches the list of steps: it keeps
offering a step that was removed, and silently refuses to save below a damaged one.

orbax 1.0 replaces these classes by its v1 API. A port needs a `CheckpointableHandler` whose
awaitable also writes the manifest of this process, `save_checkpointables_async`, and for
`write_files` a place before the rename, such as `AsyncOptions.post_finalization_callback`.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

from stepfold.checkpoint import manifest
from stepfold.checkpoint.claims import Claim, ClaimedError
from stepfold.checkpoint.leaves import arrays_of, leaves_of, shards_of
from stepfold.checkpoint.manifest import StepMetadata
from stepfold.checkpoint.steps import is_full, locked, sync
from stepfold.core.processes import Group, KeyValues, agreement, processes_of
from stepfold.errors import CheckpointError

_TIMEOUT = 60.0  # seconds to wait for other writes of a save that failed
# orbax measures its limit with `time.time`, so a clock that jumps would end a save. A century is
# longer than any jump; waiting for other processes has its own limit.
_NEVER = 100 * 366 * 24 * 60 * 60


class OrbaxSave:
    """A step that is being saved. Its directory is complete or absent."""

    def __init__(
        self,
        path: Path,
        state: Any,
        metadata: StepMetadata,
        before_commit: Callable[[], None] | None,
        group: Group | None = None,
    ) -> None:
        """Copy the state off the devices and start to write it to the directory `path`."""
        arrays, leaves = arrays_of(state, group), leaves_of(state)
        stored = {name: array for name, array in arrays.items() if array.size}
        if group is not None and len(group.processes) == 1:
            # Orbax asks for arrays over all processes of the job, even if one is left.
            stored = {name: np.asarray(array) for name, array in stored.items()}
        nested = ocp.tree.from_flat_dict(stored, sep="/")  # what orbax restores on its own
        # Compression costs time, and as much additional memory as the state.
        self._path, self._handler = path, _Handler(use_compression=False)
        self._peers = _Peers(group)
        options: dict[str, Any] = {
            "async_options": ocp.AsyncOptions(
                create_directories_asynchronously=False,
                timeout_secs=_NEVER,
                barrier_sync_fn=self._peers.meet,
            ),
            # orbax makes directories in a thread. If the processes are listed, they wait for each
            # other through jax's service there. Otherwise they would run a collective, which
            # belongs to the main thread.
            "multiprocessing_options": ocp.options.MultiprocessingOptions(
                active_processes=set(self._peers.processes),
                barrier_sync_key_prefix=self._peers.name,
            ),
        }
        handler = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(**options),
            **{manifest.STATE: self._handler},
        )
        self._orbax = ocp.AsyncCheckpointer(handler, **options)
        self._owns_files = False
        self._reservation = ExitStack()  # of the directory and of the number, until the end
        self._reservation.enter_context(locked(path.parent))
        with self._converted_errors():
            with agreement(f"{path}: not saved", group):
                if jax.process_index() == 0:
                    # orbax would remove another run's unfinished save of the step, and mix the two.
                    with suppress(FileExistsError):
                        path.parent.mkdir(parents=True)
                    claim = Claim(path.parent, f"{path.name}.saving", lost=lambda: None)
                    self._reservation.callback(claim.release)
                    claim.acquire()
                    self._owns_files = True
            # Views if the device is the host: they keep the arrays valid, even if a step donates
            # them.
            shards = {name: shards_of(array) for name, array in arrays.items()}

            def write_manifest(folder: Path) -> None:
                if before_commit is not None:
                    before_commit()
                manifest.write_leaves(folder, metadata, leaves, shards, group)

            save = _Save(nested, write_manifest=write_manifest)
            self._orbax.save(path, args=ocp.args.Composite(**{manifest.STATE: save}))

    def commit(self, finish: Callable[[], None] | None = None) -> None:
        """Wait until the step is renamed to its path, and synced to disk; then call `finish`.

        If the process is killed before `finish` returns, the claim stays next to the step.
        """
        with self._converted_errors():
            self._orbax.wait_until_finished()
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
            self._orbax.close()

    def abandon(self, reason: str) -> None:
        """Let `commit`, in another thread, fail soon: it may wait for a process that has died."""
        self._peers.fail(reason)

    @contextmanager
    def _converted_errors(self) -> Iterator[None]:
        """Convert any error of orbax to a `CheckpointError`, and remove the files of the step."""
        try:
            yield
        except BaseException as error:
            self._peers.fail(_cause(error) if isinstance(error, Exception) else "was interrupted")
            # At exit, and after an interrupt, orbax's writes may never end.
            may_end = isinstance(error, Exception) and not _is_at_exit(error)
            for write in self._handler.writes:  # otherwise, files may arrive after the removal
                with suppress(Exception):  # the first error was raised; orbax ignores the others
                    write.result(_TIMEOUT if may_end else 1.0)
            if self._owns_files:
                _remove_unfinished(self._path)
            self._reservation.close()
            if not isinstance(error, Exception):
                raise
            raise CheckpointError(f"{self._path}: not saved: {_cause(error)}") from error


class _Peers:
    """The processes that save a step: a failure in one of them ends the save in all.

    orbax's own barrier would let the others wait for its whole limit, without the reason.
    """

    def __init__(self, group: Group | None = None) -> None:
        self._values = KeyValues("save", group)
        self.processes = processes_of(group)
        self._are_several = bool(self._values) and len(self.processes) > 1
        self._save = self._values.count_call() if self._are_several else 0
        # Orbax numbers its own barriers in each process. After a death, the numbers may differ.
        self.name = None if group is None else f"{group.name}-save-{self._save}"

    def fail(self, cause: str) -> None:
        """Let the others know why this process does not save."""
        if self._are_several:
            self._values.set(f"{self._save}/failed/{jax.process_index()}", cause)

    def meet(self, *, key: str, timeout_ms: int) -> None:  # noqa: ARG002  orbax passes it
        """Wait for all processes, as a barrier of orbax; raise if one of them has failed."""
        if not self._are_several:
            return
        folder = f"{self._save}/met/{key.replace('/', '_')}"
        self._values.set(f"{folder}/{jax.process_index()}", True)

        def are_all_there() -> bool:
            for process, cause in self._values.get(f"{self._save}/failed").items():
                raise CheckpointError(f"process {process} did not save: {cause}")
            return bool(len(self._values.get(folder)) == len(self.processes))

        if not self._values.wait(are_all_there):
            raise CheckpointError(f"not all processes saved within {self._values.timeout} s")


class _Handler(ocp.PyTreeCheckpointHandler):  # type: ignore[misc]
    """Write the arrays with orbax, and the manifests next to them."""

    writes: Sequence[Any] = ()

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # The name that a step records. orbax's v1 API knows this handler, and warns of others. Only
        # on the instance, since orbax registers classes by the name.
        self.typestr = ocp.PyTreeCheckpointHandler.typestr

    async def async_save(self, directory: Any, args: "_Save") -> list[Any]:
        """Start to write, once the data is on the host, where it can no longer change."""
        writes = await super().async_save(directory, args=args)

        async def write_manifest() -> None:
            args.write_manifest(Path(directory))

        own = CommitFutureAwaitingContractedSignals(write_manifest(), name="manifest")
        self.writes = [*(writes or []), own]
        return self.writes

    def finalize(self, directory: Any) -> None:
        """Merge what the processes wrote, and record the files."""
        folder = Path(directory)  # orbax's own path type treats `[` as a pattern in `glob`
        super().finalize(folder)
        manifest.write_files(folder)


@ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)
@dataclass(kw_only=True)
class _Save(ocp.args.PyTreeSave):  # type: ignore[misc]
    write_manifest: Callable[[Path], None]


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
    if isinstance(error, ClaimedError):
        return f"another run is saving it, {text}; end all but one"
    if _is_at_exit(error):
        return "the program ended before it was written; close the series, as a `with` block does"
    if "Too many open files" in text:
        return "too many open files; allow more of them, with ulimit -n"
    if is_full(text):
        return "no space left on the device; make room, or keep fewer checkpoints"
    if isinstance(error, PermissionError) or "PERMISSION_DENIED" in text:
        return "no permission to write there; change it, or give another directory"
    return f"{type(error).__name__}: {text.splitlines()[0][:300] if text else ''}"
