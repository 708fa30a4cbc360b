"""Write a step with orbax in the background, and read those of others; alone imports orbax.

It uses the v0 API, which orbax 1.0 replaces by its v1 API. A release that lacks a part of it is
refused when this module is imported, that is before anything is saved. A port needs a
`CheckpointableHandler` whose awaitable also writes the files of this process, then
`save_checkpointables_async`, and a place before the rename for `finish`, such as
`AsyncOptions.post_finalization_callback`.

`AsyncCheckpointer` is used instead of `CheckpointManager`, which caches the list of steps: it keeps
offering a step that was removed, and silently refuses to save below a damaged one.
"""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from stepfold.errors import refuse
from stepfold.internals.texts import ORBAX_UNFINISHED

_USED = (
    *("AsyncCheckpointer", "AsyncOptions", "CompositeCheckpointHandler", "CompositeOptions"),
    *("PyTreeCheckpointHandler", "args.Composite", "args.PyTreeSave", "args.PyTreeRestore"),
    *("Checkpointer", "RestoreArgs", "ArrayRestoreArgs", "PLACEHOLDER"),
    *("args.register_with_handler", "options.MultiprocessingOptions", "tree.from_flat_dict"),
)
for _name in _USED:
    try:
        attrgetter(_name)(ocp)
    except AttributeError:
        _version = f"version {getattr(ocp, '__version__', 'unknown')}"
        refuse("orbax-checkpoint", f"a release with {_name}", _version, "install >=0.12,<1")

# orbax measures its limit with `time.time`, so a clock that jumps would end a save. A century is
# longer than any jump; waiting for other processes has its own limit.
_NEVER = 100 * 366 * 24 * 60 * 60

_ARRAY_METADATA = "array_metadatas"  # a folder of orbax, in that of the item

HOST = object()


class StepWriter:
    """Write one step, as an item of this name in its folder.

    Attributes:
      writes: the writes in progress; `result(timeout)` waits for one.
    """

    def __init__(self, item: str, barrier: Callable[..., None]) -> None:
        """Prepare for all processes, which wait in a barrier."""
        self._item, self._barrier = item, barrier
        # Compression costs time, and as much additional memory as the state.
        self._handler = _Handler(use_compression=False)
        options: dict[str, Any] = {
            "async_options": ocp.AsyncOptions(
                create_directories_asynchronously=False,
                timeout_secs=_NEVER,
                barrier_sync_fn=barrier,
            ),
            # orbax has its own barriers around the making of directories, which wait for 300 s and
            # do not see that a process has failed. It leaves them out for a single process, so each
            # says that it is alone, and they wait in `_Handler` instead. orbax takes the barrier
            # above for the commit in any case. Process 0 still makes the directories.
            "multiprocessing_options": ocp.options.MultiprocessingOptions(
                active_processes={jax.process_index()}
            ),
        }
        handler = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(**options), **{item: self._handler}
        )
        self._checkpointer = ocp.AsyncCheckpointer(handler, **options)

    @property
    def writes(self) -> Sequence[Any]:
        return self._handler.writes

    def save(
        self,
        path: Path,
        arrays: Mapping[str, Any],
        write: Callable[[Path], None],
        finish: Callable[[Path], None],
    ) -> None:
        """Start to write arrays by path once they are on the host.

        `write` writes other files of this process into the folder of the item. `finish` is called
        with it on one process when all have written, before the step gets its name.
        """
        nested = ocp.tree.from_flat_dict({**arrays}, sep="/")  # what orbax restores on its own
        barrier = partial(self._barrier, key="the directory is made", timeout_ms=0)
        arguments = _Save(nested, barrier=barrier, write=write, finish=finish)
        self._checkpointer.save(path, args=ocp.args.Composite(**{self._item: arguments}))

    def wait(self) -> None:
        """Wait until the step has its name; raise the error of a write."""
        self._checkpointer.wait_until_finished()

    def close(self) -> None:
        """Release the threads."""
        self._checkpointer.close()


class _Handler(ocp.PyTreeCheckpointHandler):  # type: ignore[misc]
    """Write the arrays with orbax, and other files next to them."""

    writes: Sequence[Any] = ()
    _finish: Callable[[Path], None]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # The name that a step records. orbax's v1 API knows this handler, and warns of others. Only
        # on the instance, since orbax registers classes by the name. Without it, v1 warns.
        if name := getattr(ocp.PyTreeCheckpointHandler, "typestr", None):
            self.typestr = name

    async def async_save(self, directory: Any, args: "_Save") -> list[Any]:
        """Start to write, once the data is on the host, where it can no longer change."""
        if jax.process_index() == 0 < jax.process_count() - 1:
            # The others wait for this folder for ten minutes, even if process 0 fails before that.
            Path(directory, _ARRAY_METADATA).mkdir(exist_ok=True)
        args.barrier()  # process 0 has made the directory
        writes = await super().async_save(directory, args=args)
        self._finish = args.finish
        thread = ThreadPoolExecutor(1, "stepfold-save")
        self.writes = [*(writes or []), thread.submit(args.write, Path(directory))]
        thread.shutdown(wait=False)
        return self.writes

    def finalize(self, directory: Any) -> None:
        """Merge what the processes wrote, and finish."""
        folder = Path(directory)  # orbax's own path type treats `[` as a pattern in `glob`
        super().finalize(folder)
        self._finish(folder)


@ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)
@dataclass(kw_only=True)
class _Save(ocp.args.PyTreeSave):  # type: ignore[misc]
    barrier: Callable[[], None]
    write: Callable[[Path], None]
    finish: Callable[[Path], None]


def remove_unfinished(path: Path) -> None:
    """Remove what orbax wrote of a step."""
    for _ in range(40):
        unfinished = list(path.parent.glob(f"{path.name}.{ORBAX_UNFINISHED}*"))
        if not unfinished:
            break
        for folder in unfinished:
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)  # threads of orbax may still write


def describe_tree(folder: Path) -> Any:
    """Return the tree that orbax saved in a folder, with the shape and dtype of each array."""
    described: Any = ocp.PyTreeCheckpointHandler().metadata(folder)
    return getattr(described, "tree", described)


def read_tree(folder: Path, described: Any, shardings: Sequence[Any]) -> list[Any]:
    """Read the arrays of a tree, in the order of its leaves, without checksums.

    For each there is a sharding, `HOST` for a numpy array, or None not to read it.
    """
    form: Any = jax.tree.structure(described)
    arguments = [
        ocp.RestoreArgs(restore_type=np.ndarray)
        if sharding is HOST or sharding is None
        else ocp.ArrayRestoreArgs(sharding=sharding)
        for sharding in shardings
    ]
    wanted = [
        ocp.PLACEHOLDER if sharding is None else array
        for array, sharding in zip(form.flatten_up_to(described), shardings, strict=True)
    ]
    how = ocp.args.PyTreeRestore(form.unflatten(wanted), restore_args=form.unflatten(arguments))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        restored: list[Any] = form.flatten_up_to(checkpointer.restore(folder, args=how))
    return restored
