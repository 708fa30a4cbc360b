"""A hook that is only to warn."""

import pytest

import stepfold as sf


def test_a_reason_becomes_a_warning():
    hook = sf.only_warn(sf.stop_after(0))
    with pytest.warns(UserWarning, match="step 7: the time limit of 0 s was reached"):
        assert hook(sf.Event(7, None, {}, None)) is None


def test_numbers_and_silence_pass():
    event = sf.Event(7, None, {}, None)
    assert sf.only_warn(lambda event: {"a": 1})(event) == {"a": 1}
    assert sf.only_warn(lambda event: None)(event) is None


def test_what_is_no_hook_is_refused():
    with pytest.raises(sf.ConfigError, match="only_warn: expected a hook, .* got str 'stop'"):
        sf.only_warn("stop")
