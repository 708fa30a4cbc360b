"""The checksums of checkpoints, read without jax and without arrays, from a disk or a bucket.

JSON of manifests and notes is preceded by a line with its own checksum.
"""

import json
import re
import zlib
from typing import Any

_START = b"stepfold crc32 "
_STEP = re.compile(r"(0|[1-9]\d*)(\.commit|/state/leaves-0\.json)")


def add_checksum(text: bytes) -> bytes:
    """Precede a text by a line with its checksum."""
    return _START + f"{zlib.crc32(text):08x}\n".encode() + text


def without_checksum(content: bytes) -> bytes | None:
    """Return the text behind a line with its checksum; None if it was changed."""
    text = content.partition(b"\n")[2]
    return text if content == add_checksum(text) else None


class Checksums:
    """The checksums of a series of checkpoints, at a URL such as file:///a/folder."""

    def __init__(self, location: str) -> None:
        from stepfold.object_storage import Bucket  # lazy: imports tensorstore

        self.location, self._bucket = location, Bucket(location)
        names = [name for digit in "0123456789" for name in self._bucket.list_names(digit)]
        self._names = {int(each[1]): each[0] for each in map(_STEP.fullmatch, names) if each}
        self.steps = sorted(self._names)

    def read(self, step: int) -> dict[str, dict[Any, Any]]:
        """Return the form of each leaf, and the checksums of its shards by their regions.

        A damaged step raises ValueError, or what JSON of another form does.
        """
        first = self._decode(self._names[step])
        if "manifests" in first:  # the commit of a save to object storage
            names = [f"{first['folder']}{i}.json" for i in range(len(first["manifests"]))]
            processes = [*map(self._decode, names)]
        else:
            others = range(1, first["processes"])
            processes = [first, *(self._decode(f"{step}/state/leaves-{i}.json") for i in others)]
        leaves: dict[str, dict[Any, Any]] = {
            name: {"form": form} for name, form in processes[0]["leaves"].items()
        }
        for process in processes:
            for name, region, checksum in process["shards"]:
                leaves[name][tuple(map(tuple, region))] = checksum
        return leaves

    def _decode(self, name: str) -> Any:
        if (content := self._bucket.read(name)) is None:
            raise ValueError(f"{name} is missing")
        if (text := without_checksum(content)) is None:
            raise ValueError(f"{name} is damaged")
        return json.loads(text)
