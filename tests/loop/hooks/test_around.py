"""A hook around another passes on what is not about events."""

import pytest

import stepfold as sf
from stepfold.loop.hooks.around import Around


class Recorder:
    def __init__(self):
        self.seen = []

    def __call__(self, event):
        self.seen.append(event.step)

    def open(self, step, total):
        self.seen.append(("open", step, total))

    def close(self):
        self.seen.append("close")

    def get_state(self):
        return {"seen": list(self.seen)}

    def set_state(self, state):
        self.seen = state["seen"]


def test_all_that_fit_calls_goes_through():
    inner = Recorder()
    hook = Around("around", inner)
    hook.open(3, 10)
    hook.close()
    assert inner.seen == [("open", 3, 10), "close"]
    other = Recorder()
    Around("around", other).set_state(hook.get_state())
    assert other.seen == inner.seen


def test_what_was_kept_for_a_hook_of_another_kind_is_left_aside():
    before, now = Around("around", Recorder()), Around("around", sf.stop_early("a", patience=1))
    now.set_state(before.get_state())


def test_a_plain_function_has_nothing_to_be_told():
    hook = Around("around", lambda event: None)
    hook.open(0, None)
    hook.set_state(hook.get_state())
    hook.close()


@pytest.mark.parametrize("wrong", [None, 10, Recorder])
def test_what_is_no_hook_is_refused(wrong):
    with pytest.raises(sf.ConfigError, match=r"around: expected a hook, \(event\) -> …, got "):
        Around("around", wrong)


def test_a_hook_that_is_called_after_epochs_is_refused():
    with pytest.raises(sf.ConfigError, match="expected a hook that is shown events, got callback "):
        Around("around", sf.callback(print))
