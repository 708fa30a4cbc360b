"""The checksums of checkpoints, read without jax and without arrays, from a disk or a bucket.

JSON of manifests and notes is preceded by a line with its own checksum.
"""

import json
import os
import re
import stat
import zlib
from pathlib import Path
from typing import Any

from stepfold.core.validation import is_url

_START = b"stepfold crc32 "
_STEP = re.compile(r"(0|[1-9]\d*)(\.commit|(?:/state/leaves-0\.json)?)")


def add_checksum(text: bytes) -> bytes:
    """Precede a text by a line with its checksum."""
    return _START + f"{zlib.crc32(text):08x}\n".encode() + text


def without_checksum(content: bytes) -> bytes | None:
    """Return the text behind a line with its checksum; None if it was changed."""
    text = content.partition(b"\n")[2]
    return text if content == add_checksum(text) else None


class Files:
    """Files below a directory or a URL."""

    def __init__(self, location: str) -> None:
        self.location, self._bucket = location, None
        if is_url(location):
            from stepfold.object_storage import Bucket  # lazy: imports tensorstore

            self._bucket = Bucket(location)

    def read(self, name: str) -> bytes | None:
        """Read a file; None if it is missing."""
        if self._bucket is not None:
            return self._bucket.read(name)
        path = Path(self.location, name)
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # a pipe may block
                raise ValueError(f"{path} is not a file")
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def names(self) -> list[str]:
        """List the names that begin with a digit, and others if it costs nothing."""
        if self._bucket is not None:
            return [name for digit in "0123456789" for name in self._bucket.list_names(digit)]
        return os.listdir(self.location) if os.path.isdir(self.location) else []


class Checksums:
    """The checksums of a series of checkpoints."""

    def __init__(self, files: Files) -> None:
        self.location, self._files = files.location, files
        found = filter(None, map(_STEP.fullmatch, files.names()))
        self._names = {
            int(each[1]): each[1] + (each[2] or "/state/leaves-0.json") for each in found
        }
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
        if (content := self._files.read(name)) is None:
            raise ValueError(f"{name} is missing")
        if (text := without_checksum(content)) is None:
            raise ValueError(f"{name} is damaged")
        return json.loads(text)
