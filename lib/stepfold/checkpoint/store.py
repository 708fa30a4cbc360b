"""Write steps with orbax in the background; the only module that knows orbax.

The arrays are stored by orbax, so that its tools can read them: `params/w` of step 12 is `params.w`
under `12/state`. The manifests (`manifest.py`) are written next to the arrays and committed
together with them. A directory without a manifest, or without one of its files, is not a
checkpoint.

`AsyncCheckpointer` is used instead of `CheckpointManager`, which caches the list of steps: it keeps
offering a step that was removed, and silently refuses to save below a damaged one.

Compression is off: it costs time, and as much additional memory as the state.
"""

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
from stepfold.checkpoint.manifest import Words
from stepfold.checkpoint.syncing import sync
from stepfold.errors import CheckpointError

_NO_WORDS = Words(0)
_PATIENCE = 60.0


@dataclass
class _Save(ocp.args.PyTreeSave):  # type: ignore[misc]
    arrays: Mapping[str, Any] = field(default_factory=dict)
    leaves: Mapping[str, Leaf] = field(default_factory=dict)
    words: Words = _NO_WORDS
    before_commit: Callable[[], None] | None = None


class _Handler(ocp.PyTreeCheckpointHandler):  # type: ignore[misc]
    """Write the arrays with orbax, and the manifests next to them."""

    writing: Sequence[Any] = ()

    async def async_save(self, directory: Any, args: _Save) -> list[Any]:
        """Start to write, once the data is on the host, where it can no longer change."""
        # Views if the device is the host: they keep the arrays valid, even if a step donates them.
        shards = {name: shards_of(array) for name, array in args.arrays.items()}
        futures = await super().async_save(directory, args=args)

        async def write() -> None:
            if args.before_commit is not None:
                args.before_commit()
            manifest.write_leaves(Path(directory), args.words, args.leaves, shards)

        manifests = CommitFutureAwaitingContractedSignals(write(), name="manifest")
        self.writing = [*(futures or []), manifests]
        return self.writing

    def settle(self) -> None:
        """Wait for pending writes of a failed save, so that its files can be removed."""
        for future in self.writing:
            with suppress(Exception):  # the first error was raised; orbax ignores the others
                future.result(_PATIENCE)
        self.writing = []

    def finalize(self, directory: Any) -> None:
        """Merge what the processes wrote, and record the files."""
        folder = Path(directory)  # its `glob` takes a `[` in its own path literally
        super().finalize(folder)
        manifest.write_files(folder)


ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)(_Save)


class Store:
    """Write steps into a directory, one at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._claim: Path | None = None
        self._renew()

    def _renew(self) -> None:
        self._handler = _Handler(use_compression=False)
        options = ocp.AsyncOptions(create_directories_asynchronously=False)
        handler = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(async_options=options),
            **{manifest.STATE: self._handler},
        )
        self._orbax = ocp.AsyncCheckpointer(handler, async_options=options)

    def begin(
        self, state: Any, words: Words, before_commit: Callable[[], None] | None = None
    ) -> None:
        """Copy the state off the devices and start to write it."""
        arrays = arrays_of(state)
        stored = _nested({name: array for name, array in arrays.items() if array.size})
        save = _Save(
            stored,
            arrays=arrays,
            leaves=leaves_of(state),
            words=words,
            before_commit=before_commit,
        )
        path = self._directory / str(words.step)
        with self._telling(path):
            if jax.process_index() == 0:
                # orbax would remove another run's unfinished save of the step, and mix the two.
                claim = path.with_name(f"{path.name}.saving")
                claim.mkdir(parents=True)
                self._claim = claim
            self._orbax.save(path, args=ocp.args.Composite(**{manifest.STATE: save}))

    def wait(self, step: int) -> None:
        """Wait until the pending step is committed and synced."""
        path = self._directory / str(step)
        with self._telling(path):
            self._orbax.wait_until_finished()
        if jax.process_index() > 0:
            return
        if not path.is_dir():  # orbax drops errors that it cannot log, as with a closed stderr
            raise CheckpointError(f"{path}: not saved: it is not there, and nobody said why")
        with self._telling(path):
            sync(path)
            sync(self._directory)
        self._let_go()

    def _let_go(self) -> None:
        if self._claim is not None:
            with suppress(FileNotFoundError):  # the whole directory was removed
                self._claim.rmdir()
            self._claim = None

    def close(self) -> None:
        """Shut down the threads."""
        self._orbax.close()

    @contextmanager
    def _telling(self, path: Path) -> Iterator[None]:
        """Convert any error of orbax to a `CheckpointError` for this step."""
        try:
            yield
        except Exception as error:
            self._handler.settle()
            self._let_go()
            self._renew()  # a failed checkpointer may raise its error again at the next save
            raise CheckpointError(f"{path}: not saved: {_cause(error)}") from error


def _nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Convert paths to nested dicts, the structure that orbax restores on its own."""
    made: dict[str, Any] = {}
    for name, array in arrays.items():
        *folders, last = name.split("/")
        inner = made
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[last] = array
    return made


def _cause(error: Exception) -> str:
    text = str(error)
    if isinstance(error, FileExistsError):
        return "another run is saving it, or was killed then; end all but one, and open it anew"
    if "interpreter shutdown" in text:
        return "the program was at its end; close the series before, as a `with` block does"
    if "Too many open files" in text:
        return "too many open files; allow more of them, with ulimit -n"
    if "No space left" in text or "quota exceeded" in text:
        return "no space left on the device; make room, or keep fewer checkpoints"
    if isinstance(error, PermissionError) or "PERMISSION_DENIED" in text:
        return "no permission to write there; change it, or give another directory"
    return f"{type(error).__name__}: {text.splitlines()[0][:300] if text else ''}"
