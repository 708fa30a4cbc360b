"""What several of these files use."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def public_path() -> Iterator[Path]:
    """Return a new directory that any user may enter.

    Only the owner may enter `tmp_path`, and each start of pytest restores that.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)
