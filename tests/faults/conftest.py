"""One server that forks, for all that is to be killed."""

import pytest

from .forks import Forks


@pytest.fixture(scope="session")
def forks():
    with Forks() as made:
        yield made
