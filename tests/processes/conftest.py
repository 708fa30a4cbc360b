"""Ways to start several processes."""

from collections.abc import Iterator

import jax
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
    # With jax 0.10, a process has hung once after its peer had printed all results. A deadlock of a
    # worker hangs again.
    attempts = 1 if jax.__version_info__ >= (0, 11) else 2
    with launch.Session(attempts) as session:
        yield session
