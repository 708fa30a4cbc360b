"""Sync files and directories to disk, so that they survive a power loss."""

import errno
import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on disk, where the system supports it.

    Neither orbax nor a rename waits for that. Without it, a power loss may leave a step with a name
    but an empty manifest, after the older steps were deleted.
    """
    if os.name == "nt":  # Windows cannot open directories
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # unsupported by the file system
            raise
    finally:
        os.close(descriptor)
