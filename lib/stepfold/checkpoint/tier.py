"""The store of temporary steps: files in a directory of each host, such as a RAM disk.

Each process writes one file for a save, with the slices that it has to write, and waits for no
other. A file is complete or absent, and a save is complete once its files cover every leaf. On a
restore, each process reads what its devices need from its own directory, or asks the others for it.

    host.json                       the identity of the directory, which tells hosts apart
    120-18f3c9a2….7-3.slices        step 120, the seventh save of one start, from process 3
    120-18f3c9a2….7-3.copy          the slices that process 3 has sent to this host
    120-18f3c9a2….7-0.later         metrics and `extra` that were added after the save

A slice is a region of a leaf that one or more processes hold. The first `1 + replicas` hosts that
hold it write it. If fewer hold it, the first sends it to the next hosts. Slices of two saves never
mix, even if both are of step 120: a name has the start of the run and the number of the save.

Saves need no agreement, but deletions do: the processes note which saves they have completed, and
delete what is older than the newest that all have.
"""

import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from stepfold.checkpoint import manifest, tier_file
from stepfold.checkpoint.host_buffers import HostBuffers
from stepfold.checkpoint.leaves import Region, arrays_of, leaves_of, region
from stepfold.checkpoint.manifest import DamageError, Manifest, StepMetadata
from stepfold.checkpoint.steps import converted_errors, locked, names_in, read_directory, sync
from stepfold.checkpoint.tier_file import (
    Location,
    MissingError,
    Save,
    Table,
    TierFile,
    file_name,
    good_files,
    merge,
)
from stepfold.checkpoint.transport import Address, Connection, Server, send_request
from stepfold.core.processes import KeyValues, agreement, broadcast_from_first
from stepfold.errors import CheckpointError, refuse, warn
from stepfold.internals import texts

if TYPE_CHECKING:
    from stepfold.checkpoint.arrays import ArrayReader

HOST = "host.json"
_PART = ".part"  # the suffix of a file that is being written
_NOTED = 16  # saves whose outcome a process notes


class TierStore:
    """Temporary steps in the directories of all hosts; its methods are those of every store.

    Methods that read or delete ask the other processes, each of which answers in a thread, so that
    no other process has to call anything. Without `connect`, it sees its own directory alone.

    Attributes:
      location: the directory on this host.
      keep: number of latest steps to keep.
    """

    def __init__(self, directory: Path, *, keep: int = 1, replicas: int = 0) -> None:
        self.directory, self.keep = directory, keep
        self.location = str(directory)
        self._replicas, self._number = replicas, 0
        self._process = jax.process_index()
        self._life = f"{time.time_ns():016x}{secrets.token_hex(4)}"  # identifies a start of the run
        self.hosts = [[self._process]]  # the processes that share each directory
        self._addresses: Sequence[Address] = ()
        self._server: Server | None = None
        self._values: KeyValues | None = None
        self._noted: dict[str, list[int]] = {"saved": [], "failed": []}
        self._regions: dict[Any, Any] = {}  # of shardings and shapes
        self._unreachable: set[int] = set()  # hosts that the user was warned of

    # The processes

    def connect(self) -> None:
        """Let processes read and save together; all of them call this."""
        count = jax.process_count()
        if count == 1:
            return
        with agreement(f"{self.location}: not opened"):
            self._server = Server(self._answer)
        self._values = KeyValues("temporary")
        self._life = broadcast_from_first([self._life])[0]
        host = (tier_file.read_host(self.directory / HOST) or {}).get("id", f"{self._process}")
        own = [host, self._replicas, self.keep, *self._server.address]
        gathered = self._values.gather(own, "the address")
        for name, position in (("replicas", 1), ("keep", 2)):
            if len(values := {each[position] for each in gathered}) > 1:
                got = " and ".join(map(str, sorted(values)))
                refuse(name, "the same number in all processes", got, kind=CheckpointError)
        hosts: dict[str, list[int]] = {}
        for process, (host, *_) in enumerate(gathered):
            hosts.setdefault(host, []).append(process)
        self.hosts = [*hosts.values()]
        self._addresses = [Address(*each[3:]) for each in gathered]

    def close(self) -> None:
        """Close the store; the other processes may read from it for a while."""
        if self._server is not None:
            self._server.close()

    @property
    def _own_host(self) -> int:
        return next(i for i, host in enumerate(self.hosts) if self._process in host)

    def _request_from_hosts(self, what: str, argument: Any) -> Iterator[tuple[int, Any]]:
        """Yield a process and its answer for each host; warn of those that do not answer."""
        for host in self.hosts:
            process = host[0]  # speaks for all processes of the host
            if self._process in host:
                yield self._process, self._reply(what, argument)
                continue
            try:
                yield process, send_request(self._addresses[process], [what, argument])[0]
            except CheckpointError as error:
                if process not in self._unreachable:
                    self._unreachable.add(process)
                    warn(
                        f"{self.location}: the temporary steps of process {process} are left out: "
                        f"{error}",
                        RuntimeWarning,
                    )

    def _answer(self, request: Any, connection: Connection) -> tuple[Any, Sequence[memoryview]]:
        """Answer a request of another process, in a thread."""
        what, argument = request
        if what == "read":
            name, offset, size = argument
            return None, [tier_file.read(self._path(name), offset, size).data]
        if what == "store":
            name, size = argument
            self._receive(name, size, connection)
            return None, []
        return self._reply(what, argument), []

    def _reply(self, what: str, argument: Any) -> Any:
        if what == "tables":
            return self._read_tables(*argument)
        if what == "delete":
            first, last = argument
            return self._remove(lambda file: first <= file.save.step <= last)
        if what == "set aside":
            return self._set_aside(argument)
        if what == "prune":
            return self._prune_own(*argument)
        raise CheckpointError(f"{self.location}: no such request: {what!r:.80}")

    def _path(self, name: str) -> Path:
        if TierFile.parse(name) is None:
            raise CheckpointError(f"{self.location}: no such file: {name!r:.80}")
        return self.directory / name

    # Reading

    def steps(self) -> list[int]:
        """List the steps that are complete or damaged, in order.

        A step of which files are missing does not count: its save may not have ended.
        """
        return [step for step, outcome in self._find() if not isinstance(outcome, MissingError)]

    def has_step(self, step: int) -> bool:
        """Return whether a step is complete or damaged."""
        return step in self.steps()

    def incomplete(self) -> dict[int, str]:
        """Return the steps of which files are missing, and what they lack."""
        return {
            step: f"{outcome}"
            for step, outcome in self._find()
            if isinstance(outcome, MissingError)
        }

    def newest_good(self) -> int | None:
        """Return the newest step whose values are as saved; each host reads its own files."""
        outcomes = self._find(verifies=True)
        good = (step for step, each in reversed(outcomes) if isinstance(each, Manifest))
        return next(good, None)

    def path_of(self, step: int) -> str:
        """Return the name of a step, for messages."""
        return f"{self.directory / str(step)}"

    def other_names(self) -> list[str]:
        """List the names of damaged files, and of what killed processes left behind."""
        names = [name for name in names_in(self.directory) if name != HOST]
        good = {file.name for file in good_files(names)}
        return sorted(name for name in names if name not in good)

    def saved_at(self, step: int) -> float:
        """Return the time of a save, in seconds since the epoch."""
        times = []
        for file in self._own_files(step):
            with suppress(OSError):
                times.append(self._path(file.name).stat().st_mtime)
        if not times:
            raise CheckpointError(f"{self.path_of(step)}: cannot be read: it is on another host")
        return max(times)

    def read_metadata(self, step: int) -> StepMetadata:
        """Return the metadata of a complete step; raise like `read_manifest`."""
        return self.read_manifest(step).metadata

    def read_manifest(self, step: int) -> Manifest:
        """Merge the tables of the newest complete save of a step, without reading arrays.

        Raises `DamageError` if there is none.
        """
        for _, outcome in self._find(step):
            if isinstance(outcome, Manifest):
                return outcome
            raise outcome
        raise MissingError(f"{self.path_of(step)}: missing")

    def _find(
        self, step: int | None = None, *, verifies: bool = False
    ) -> list[tuple[int, Manifest | DamageError]]:
        """Return the manifest of each step, or of one step, or its error; in order of the steps."""
        tables, problems = dict[int, list[Table]](), dict[int, list[DamageError]]()
        for process, answer in self._request_from_hosts("tables", [step, verifies]):
            for name, content, problem in answer:
                if (file := TierFile.parse(name)) is None:
                    continue
                if content is None:
                    problems.setdefault(file.save.step, []).append(DamageError(problem))
                else:
                    of_step = tables.setdefault(file.save.step, [])
                    of_step.append(Table(file, process, content))
        by_step = []
        for number in sorted({*tables, *problems}):
            outcomes: list[Manifest | DamageError] = [*problems.get(number, [])]
            for save in sorted({table.file.save for table in tables.get(number, [])}):
                try:
                    with manifest.checked_form(self.path_of(number)):
                        of_save = [table for table in tables[number] if table.file.save == save]
                        outcomes.append(merge(of_save, self.path_of(number), self._process))
                except DamageError as error:
                    outcomes.append(error)
            # The newest complete save, or else a file that is damaged.
            outcomes.sort(key=lambda each: isinstance(each, MissingError))
            complete = [each for each in outcomes if isinstance(each, Manifest)]
            by_step.append((number, complete[-1] if complete else outcomes[0]))
        return by_step

    def _read_tables(self, step: int | None, verifies: bool) -> list[Any]:
        """Return the name and the table, or the problem, of each file of a step on this host.

        With `verifies`, a table has only the slices whose values are those that were saved.
        """
        tables = []
        for file in self._own_files(step):
            try:
                table = tier_file.read_table(self._path(file.name))
                if verifies:
                    tier_file.drop_damaged(self._path(file.name), table)
                tables.append([file.name, table, ""])
            except DamageError as error:
                tables.append([file.name, None, f"{error}"])
        return tables

    def open_arrays(self, step: int, contents: Manifest) -> "ArrayReader":
        """Return a reader of the arrays of a step."""
        from stepfold.checkpoint.arrays import TierReader  # lazy: imports tensorstore

        return TierReader(self.fetch, self.path_of(step), contents)

    def fetch(self, location: Location, size: int) -> np.ndarray:
        """Read bytes from a file on any host."""
        if location.process == self._process:
            return tier_file.read(self._path(location.name), location.offset, size)
        request = ["read", [location.name, location.offset, size]]
        received = send_request(self._addresses[location.process], request)[1]
        if received.size != size:
            raise DamageError(f"{location.name}: it is shorter than when it was saved")
        return received

    def read_note(self, name: str) -> Any:  # noqa: ARG002
        """Return None: temporary steps have no notes."""
        return None

    def list_notes(self, folder: str) -> list[str]:  # noqa: ARG002
        """List nothing: temporary steps have no notes."""
        return []

    def delete_note(self, name: str) -> None:
        """Do nothing: temporary steps have no notes."""

    def _own_files(self, step: int | None = None) -> list[TierFile]:
        """List the good files in the directory of this host, or those of a step."""
        files = good_files(names_in(self.directory))
        return [file for file in files if step is None or file.save.step == step]

    # Saving

    def begin(
        self,
        state: Any,
        metadata: StepMetadata,
        before_commit: Callable[[], None] | None = None,
        buffers: HostBuffers | None = None,
    ) -> "TierSave":
        """Copy the slices that this process writes off the devices, without waiting for others."""
        self._number += 1
        save = Save(metadata.step, self._life, self._number)
        try:
            with _converted(self.path_of(metadata.step)):
                return TierSave(self, save, state, metadata, before_commit, buffers)
        except BaseException:
            self.end_save(save, is_saved=False)
            raise

    def assign(self, state: Any) -> "Assignment":
        """Return which slices this process writes, and which it sends to which processes."""
        arrays, wanted, crc = arrays_of(state), 1 + self._replicas, 0
        count, own = len(self.hosts), self._own_host
        host_of = {process: i for i, host in enumerate(self.hosts) for process in host}
        assigned = Assignment({}, {}, 0)
        for number, (name, array) in enumerate(arrays.items()):
            holders, held = self._holders(array)
            crc = zlib.crc32(repr((name, sorted(holders.items()))).encode(), crc)
            for part, processes in holders.items():
                if not all(start < stop for start, stop in part):
                    continue
                by_host: dict[int, list[int]] = {}
                for process in processes:
                    by_host.setdefault(host_of[process], []).append(process)
                hosts = sorted(by_host)
                hosts = hosts[number % len(hosts) :] + hosts[: number % len(hosts)]
                if own not in hosts[:wanted]:
                    continue
                if by_host[own][number % len(by_host[own])] != self._process:
                    continue  # another process of this host writes it
                assigned.slices[name, part] = held[part]
                if own == hosts[0]:
                    others = [(own + i) % count for i in range(1, count)]
                    lacking = [host for host in others if host not in by_host]
                    for host in lacking[: max(0, wanted - len(hosts))]:
                        assigned.copies.setdefault(host, set()).add((name, part))
        for i in range(1, min(wanted, count)):  # those also need the data position
            assigned.copies.setdefault((own + i) % count, set())
        return assigned._replace(crc=crc)

    def _holders(self, array: Any) -> tuple[dict[Region, list[int]], dict[Region, Any]]:
        """Return which processes hold each region of an array, and the regions held here."""
        if not isinstance(array, jax.Array):  # numpy arrays are those of process 0
            full = region((), array.shape)
            return {full: [0]}, {full: array}
        key = array.sharding, array.shape
        if key not in self._regions:
            processes_of: dict[Region, set[int]] = {}
            device: Any
            for device, index in array.sharding.devices_indices_map(array.shape).items():
                part = region(index or (), array.shape)
                processes_of.setdefault(part, set()).add(device.process_index)
            holders = {part: sorted(processes) for part, processes in processes_of.items()}
            parts = [region(shard.index, array.shape) for shard in array.addressable_shards]
            self._regions[key] = holders, parts
        holders, parts = self._regions[key]
        shards = [shard.data for shard in array.addressable_shards]
        return holders, dict(zip(parts, shards, strict=True))

    def target_on(self, host: int) -> int:
        """Return the process on another host to which this one sends copies."""
        processes = self.hosts[host]
        return processes[self._process % len(processes)]

    def write(self, name: str, pieces: Iterable[memoryview]) -> None:
        """Write a file durably, so that it is complete or absent."""
        path = self._path(name)
        part = path.with_name(f"{name}{_PART}")
        with locked(self.directory):
            try:
                with part.open("wb") as file:
                    for piece in pieces:
                        file.write(piece)
                sync(part)
                part.replace(path)
            except BaseException:
                with suppress(OSError):
                    part.unlink()
                raise

    def send(self, process: int, name: str, pieces: Sequence[memoryview]) -> None:
        """Let a process on another host write a file."""
        size = sum(piece.nbytes for piece in pieces)
        send_request(self._addresses[process], ["store", [name, size]], pieces)

    def _receive(self, name: str, size: int, connection: Connection) -> None:
        """Write a file with the bytes that another process sends, if all of them arrive."""
        buffer = np.empty(min(size, 1 << 20), np.uint8)

        def pieces() -> Iterator[memoryview]:
            rest = size
            while rest:
                piece = buffer[: min(rest, buffer.size)]
                connection.fill(piece)
                yield piece.data
                rest -= piece.size

        self.write(name, pieces())

    def end_save(self, save: Save, *, is_saved: bool, assignment: int = 0) -> None:
        """Note the end of a save, and delete what is no longer needed."""
        self._noted["saved" if is_saved else "failed"].append(save.number)
        recent = {name: numbers[-_NOTED:] for name, numbers in self._noted.items()}
        self._noted = recent
        notes: list[Any] = [{**recent, "assignment": assignment}]
        if self._values is not None:
            self._values.set(f"{self._life}/{self._process}", notes[0])
            notes = [*self._values.get(self._life).values()]
        failed = sorted({number for each in notes for number in each["failed"]})
        if len(notes) < max(1, len(self._addresses)):
            return
        common = set.intersection(*({*each["saved"]} for each in notes))
        kept = sorted(common.difference(failed))[-self.keep :]
        if save.number in kept:  # this process is the last one to save it
            for _ in self._request_from_hosts("prune", [self._life, kept, failed]):
                pass
        else:
            self._prune_own(self._life, [], failed)
        assignments = {each["assignment"] for each in notes if each["assignment"]}
        if len(assignments) > 1:
            raise CheckpointError(
                f"{self.path_of(save.step)}: not saved, since the processes shard the state "
                "differently; place it by the same plan in all of them"
            )

    def add_metadata(self, step: int, metrics: Mapping[str, Any], extra: Any) -> None:
        """Add metrics to a step, and replace its `extra`; they are on this host alone."""
        known = self.read_manifest(step)
        metrics = {**(known.metadata.metrics or {}), **metrics}
        content, arrays = manifest.later_content(metrics, extra, number=1)
        name = file_name(known.location.save, self._process, "later")
        with converted_errors(self.directory / name, "cannot be written"):
            self.write(name, tier_file.pieces(content, arrays))

    # Removing

    def delete(self, step: int) -> None:
        """Delete a step on all hosts."""
        self.delete_range(step, step)

    def delete_range(self, first: int, last: float) -> None:
        """Delete all steps from a first to a last one on all hosts, complete or not."""
        for _ in self._request_from_hosts("delete", [first, last]):
            pass

    def set_aside(self, step: int) -> str | None:
        """Rename the files of a damaged step; the next complete save deletes them."""
        renamed = [
            name for _, names in self._request_from_hosts("set aside", step) for name in names
        ]
        return renamed[0] if renamed else None

    def clean(self, finish: Callable[[int], None] | None = None) -> None:  # noqa: ARG002
        """Delete unfinished files, unless a process saves into the directory.

        If this host alone holds complete steps, older ones are deleted too, since a kill may have
        prevented that.
        """
        with locked(self.directory, alone=True) as held:
            unfinished = [name for name in names_in(self.directory) if name.endswith(_PART)]
            for name in unfinished if held else []:
                with suppress(OSError):
                    (self.directory / name).unlink()
        alone = TierStore(self.directory)
        complete = list[Save]()
        for step in reversed(alone.steps()):
            with suppress(CheckpointError):
                location = alone.read_manifest(step).location
                complete.append(location.save)
                if len(complete) == location.keep:
                    self._remove(lambda file: file.save < complete[-1])
                    break

    def _prune_own(self, life: str, kept: Sequence[int], failed: Sequence[int]) -> None:
        """Delete what is older than the saves to keep, or failed, or of another start."""

        def is_expendable(file: TierFile) -> bool:
            number = file.save.number
            if file.save.life != life:
                return bool(kept)
            return number in failed or (bool(kept) and number < min(kept))

        self._remove(is_expendable)

    def _remove(self, is_expendable: Callable[[TierFile], bool]) -> None:
        for file in filter(None, map(TierFile.parse, names_in(self.directory))):
            if is_expendable(file):
                self._remove_file(self.directory / file.name)

    def _remove_file(self, path: Path) -> None:
        with converted_errors(path, "cannot be deleted"):
            path.unlink(missing_ok=True)

    def _set_aside(self, step: int) -> list[str]:
        renamed = []
        for file in self._own_files(step):
            with suppress(OSError):
                new = f"{file.name}.damaged"
                self._path(file.name).rename(self.directory / new)
                renamed.append(new)
        return renamed


class Assignment(NamedTuple):
    """Which slices a process saves, and where.

    Attributes:
      slices: the slices that it writes, as arrays on a device or of numpy.
      copies: for each other host, the slices that it sends there. The data position goes with them.
      crc: a checksum of who holds which slice, which is the same in all processes.
    """

    slices: dict[tuple[str, Region], Any]
    copies: dict[int, set[tuple[str, Region]]]
    crc: int


class TierSave:
    """A save of one process, which is complete or absent."""

    def __init__(
        self,
        store: TierStore,
        save: Save,
        state: Any,
        metadata: StepMetadata,
        before_commit: Callable[[], None] | None,
        buffers: HostBuffers | None,
    ) -> None:
        self._store, self._save, self._metadata = store, save, metadata
        self._before_commit, self._leaves = before_commit, leaves_of(state)
        assigned = store.assign(state)
        for array in assigned.slices.values():  # all copies at once, then wait for each
            if isinstance(array, jax.Array):
                array.copy_to_host_async()
        copies = {} if buffers is None else buffers.copy(assigned.slices)
        self._assignment = assigned._replace(slices={})  # whose views would prevent a donation
        # On CPU without buffers, zero-copy views.
        self._slices = {
            key: next(iter(copies[key].slices.values())) if key in copies else np.asarray(array)
            for key, array in assigned.slices.items()
        }

    def commit(self, finish: Callable[[], None] | None = None) -> None:
        """Write the file, and send the copies to other hosts; this is called in a thread."""
        is_saved = False
        with _converted(self._store.path_of(self._save.step)):
            try:
                self._write()
                is_saved = True
            finally:
                self._slices = {}
                self._store.end_save(self._save, is_saved=is_saved, assignment=self._assignment.crc)
        if finish is not None:
            finish()

    def _write(self) -> None:
        store, process, save = self._store, jax.process_index(), self._save
        by_name: dict[str, dict[Region, np.ndarray]] = {}
        for (name, part), array in self._slices.items():
            by_name.setdefault(name, {})[part] = array
        content, arrays = manifest.process_manifest(self._metadata, self._leaves, by_name)
        content |= {"leaves": self._leaves, "keep": store.keep, "plan": self._assignment.crc}
        slices = [array for parts in by_name.values() for array in parts.values()]
        if self._before_commit is not None:
            self._before_commit()
        store.write(
            file_name(save, process, "slices"), tier_file.pieces(content, [*slices, *arrays])
        )
        for host, sent in self._assignment.copies.items():
            rows = [
                (row, array)
                for row, array in zip(content["shards"], slices, strict=True)
                if (row[0], row[1]) in sent
            ]
            content_of_copy = content | {"shards": [row for row, _ in rows]}
            pieces = [*tier_file.pieces(content_of_copy, [*(array for _, array in rows), *arrays])]
            store.send(store.target_on(host), file_name(save, process, "copy"), pieces)


@contextmanager
def _converted(path: str) -> Iterator[None]:
    """Convert the errors of a save."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        reason = getattr(error, "strerror", None) or f"{error}"
        if texts.DISK_FULL.search(str(error)):
            reason = "no space left on the device; make room"
        raise CheckpointError(f"{path}: not saved: {reason}") from error


def open_tier(directory: Path, *, keep: int, replicas: int) -> TierStore:
    """Open the store to save in; all processes call this.

    Raises:
      CheckpointError: if the directory of a host cannot be made, or is not writable.
    """
    with agreement(f"{directory}: not opened"):
        folder = read_directory(directory, make=True)
        with converted_errors(folder, "cannot be written"):
            tier_file.write_host(folder / HOST, {"id": secrets.token_hex(8)})
    store = TierStore(folder, keep=keep, replicas=replicas)
    store.connect()
    return store
