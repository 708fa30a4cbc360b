"""Each way to start several processes."""

import pytest

from . import launch


@pytest.fixture(params=launch.LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> str:
    """Run a test under each launcher there is."""
    if request.param == "mpirun" and launch.find_mpirun() is None:
        pytest.skip(launch.NO_MPIRUN)
    return request.param
