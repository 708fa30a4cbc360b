"""Iterators that are alive at a fork continue in both processes."""

import json
import sys

import pytest
from tests import small

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers of Linux")


def iterate_in_two_processes(kind):
    """Fork once some batches were read, and print what both processes read from then on."""
    import json
    import os
    import warnings

    import numpy as np

    import stepfold as sf

    warnings.simplefilter("ignore")  # jax warns of forks
    make = {
        "source": lambda: sf.batches(np.arange(400), 4, transform=lambda x: x + 1, epochs=1),
        "stream": lambda: sf.batches(lambda: range(400), 4, transform=lambda x: x + 1, epochs=1),
    }[kind.split()[0]]
    stream = sf.workers(make(), 1 if "workers" in kind else 0)
    stream = sf.prefetch(stream) if "prefetch" in kind else stream
    read = [next(stream).tolist() for _ in range(5)]
    child = os.fork()
    if "sought" in kind:
        stream.set_state(stream.get_state())
    if child:
        try:
            read += [batch.tolist() for batch in stream]
        finally:
            _, status = os.waitpid(child, 0)
        print(json.dumps([status, read == [batch.tolist() for batch in make()]]))
        stream.close()
        return
    code = 3
    try:
        rest = [batch.tolist() for batch in stream]
        code = 0 if read + rest == [batch.tolist() for batch in make()] else 4
        stream.close()
    finally:
        os._exit(code)


FORKED = [
    *("source workers", "source workers prefetch", "source prefetch", "stream workers"),
    "source workers prefetch sought",
]


@pytest.mark.parametrize("kind", small.full_but(["source workers"], FORKED))
def test_a_forked_process_continues_by_itself(forks, kind):
    end = forks.run(iterate_in_two_processes, kind)
    assert json.loads(end.output) == [0, True], end.errors


def prefetch_in_two_processes():
    import os
    import warnings

    import stepfold as sf

    warnings.simplefilter("ignore")
    stream = sf.prefetch(iter(range(9)))
    next(stream)
    if os.fork() == 0:
        code = 3
        try:
            next(stream)
        except sf.errors.DataError as error:
            code = 0 if "make the batches in that process" in str(error) else 4
        finally:
            os._exit(code)
    print(os.wait()[1], list(stream))


def test_batches_without_a_position_are_not_prefetched_in_a_forked_process(forks):
    assert forks.run(prefetch_in_two_processes).output == "0 [1, 2, 3, 4, 5, 6, 7, 8]\n"
