"""Processes that agree see the same values and the same errors."""

import json

import jax
import pytest

import stepfold as sf
from stepfold.core import processes
from stepfold.core.processes import KeyValues, agreement, broadcast_from_first


class Service:
    """The part of jax's coordination service that is used, in a dict."""

    def __init__(self):
        self.values, self.counts = {}, {}

    def key_value_set(self, key, value, allow_overwrite):
        assert allow_overwrite
        self.values[key] = value

    def key_value_dir_get(self, prefix):
        return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]

    def key_value_increment(self, key, count):
        self.counts[key] = self.counts.get(key, 0) + count
        return self.counts[key]

    def key_value_delete(self, key):
        self.values.pop(key, None)


@pytest.fixture
def service(monkeypatch):
    """Be process 0 of 2."""
    service = Service()
    jax.devices()  # the backend would use the service, and is initialized once
    monkeypatch.setattr("jax._src.distributed.global_state.client", service)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    return service


def answer(service, name, *values):
    """Set what process 1 gives in its calls, one after the other."""
    for call, value in enumerate(values, 1):
        service.values[f"stepfold/{name}/{call}/1"] = json.dumps(value)


def test_one_process_agrees_with_itself():
    assert broadcast_from_first([1, 1 << 40]) == [1, 1 << 40]
    with pytest.raises(ZeroDivisionError), agreement("not divided"):
        _ = 1 / 0


def test_values_are_gathered_in_order_and_not_kept(service):
    answer(service, "name", "a", "b", "c")
    values = KeyValues("name")
    assert [values.gather(n, "a value") for n in range(3)] == [[0, "a"], [1, "b"], [2, "c"]]
    own = [key for key in service.values if key.endswith("/0")]
    assert own == ["stepfold/name/3/0"]  # the last may not have been read by all


def test_agreement_raises_the_error_of_another_process(service):
    answer(service, "agreement", "OSError: disk", "", "")
    message = "not saved: process 1 raised OSError: disk"
    with pytest.raises(sf.errors.CheckpointError, match=message), agreement("not saved"):
        pass
    with pytest.raises(KeyError, match="own"), agreement("not saved"):
        raise KeyError("own")
    assert json.loads(service.values["stepfold/agreement/2/0"]) == "KeyError: 'own'"
    with agreement("not saved"):
        pass


def test_without_an_answer_the_late_process_is_named_unless_there_is_an_own_error(
    service, monkeypatch
):
    monkeypatch.setattr(processes, "DEFAULT_TIMEOUT", 0.2)
    message = "not saved: process 1 did not respond in 0.2 s, while the others wait for an answer"
    with pytest.raises(sf.errors.PeerTimeoutError, match=message), agreement("not saved"):
        pass
    with pytest.raises(KeyError, match="own"), agreement("not saved"):
        raise KeyError("own")
