"""Ways to start several processes."""

import json
from collections.abc import Callable, Iterator

import pytest

from . import elastic, launch


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


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict]:
    """Return what an elastic run of one process leads to, by its options."""
    known: dict[str, dict] = {}

    def run(**options: object) -> dict:
        options.pop("elastic", None)  # it does not change the result
        options["uses"] = sorted({*options.get("uses", ())} - {"fsdp"})
        key = json.dumps(options)
        if key not in known:
            folder = str(tmp_path_factory.mktemp("undisturbed"))
            (output,) = launch.run_processes(elastic.runs, 1, args=(folder, [], options))
            known[key] = json.loads(output)
        return known[key]

    return run
