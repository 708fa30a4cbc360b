"""A fixture that runs functions in processes of their own."""

import pytest
from tests.faults.forks import Forks


@pytest.fixture(scope="session")
def forks():
    with Forks() as forks:
        yield forks
