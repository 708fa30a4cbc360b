"""Ways to start several processes."""

from collections.abc import Iterator

import pytest

from . import launch


@pytest.fixture(params=["explicit", pytest.param("mpirun", marks=pytest.mark.full)])
def launcher(request: pytest.FixtureRequest) -> str:
    """Run a test under each launcher there is."""
    if request.param == "mpirun" and launch.find_mpirun() is None:
        pytest.skip(launch.NO_MPIRUN)
    return request.param


@pytest.fixture(scope="session")
def processes() -> Iterator[launch.Session]:
    """Run workers in the same two processes."""
    with launch.Session() as session:
        yield session
