"""How much memory a run takes."""

import jax
import numpy as np

import stepfold as sf

EVENT = sf.Event(10, None, {}, None)


def test_the_memory_of_the_host_is_what_the_process_holds():
    before = sf.memory_use(EVENT)["memory/host"]
    more = np.ones(2**27, np.int8)  # an eighth of a GiB
    assert sf.memory_use(EVENT)["memory/host"] - before > 0.12
    assert more[0] == 1


def test_of_devices_the_fullest_counts(monkeypatch):
    class Device:
        def __init__(self, use, peak):
            self._stats = {"bytes_in_use": use * 2**30, "peak_bytes_in_use": peak * 2**30}

        def memory_stats(self):
            return self._stats

    monkeypatch.setattr(jax, "local_devices", lambda: [Device(1, 4), Device(2, 3)])
    found = sf.memory_use(EVENT)
    assert (found["memory/device"], found["memory/device_peak"]) == (2.0, 4.0)


def test_a_device_that_does_not_tell_is_left_out():
    assert set(sf.memory_use(EVENT)) == {"memory/host"}
