import signal

import pytest

import stepfold as sf
from stepfold.loop.history import History
from stepfold.loop.result import leave
from stepfold.loop.signals import Signals


def result():
    return sf.FitResult(None, 3, History(), "it was asked to", None, None)


def test_a_run_that_nobody_stopped_is_not_left():
    leave(Signals(), result())


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [(signal.SIGINT, KeyboardInterrupt, "it was asked to"), (signal.SIGTERM, SystemExit, "143")],
)
def test_a_process_that_was_asked_to_stop_ends_as_such_with_the_result(number, kind, said):
    signals, given = Signals(), result()
    signals.got = number
    with pytest.raises(kind, match=said) as error:
        leave(signals, given)
    assert error.value.result is given
