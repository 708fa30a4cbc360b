"""Forcing what was written onto the disk, so that it outlasts a loss of power."""

import errno
import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk, where the system can tell.

    Neither orbax nor a rename waits for that: without it, a loss of power may leave a step of which
    the name is there and the manifest is empty, when the older steps are deleted already.
    """
    if os.name == "nt":  # which opens no folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of file systems that have no such
            raise
    finally:
        os.close(descriptor)
