"""A fixture that runs functions in processes of their own, which may be killed."""

import pytest

from .forks import Forks


@pytest.fixture(scope="session")
def forks():
    with Forks() as forks:
        yield forks
