"""A process that a hook forks can be ended like any other."""

import signal

import pytest


def forks_in_a_hook(number):
    import os
    import time

    import jax.numpy as jnp
    import numpy as np

    import stepfold as sf

    codes = []

    def fork(_):
        ready, tell = os.pipe()
        if (pid := os.fork()) == 0:
            os.write(tell, b"1")
            try:
                time.sleep(5)
            except KeyboardInterrupt:
                os._exit(130)
            os._exit(0)
        os.read(ready, 1)
        time.sleep(0.1)
        os.kill(pid, number)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def count(state, batch):
        return {"step": state["step"] + 1}, {"loss": sf.mean(batch)}

    batches = [np.zeros(2)] * 2
    result = sf.fit(count, {"step": jnp.int32(0)}, batches, hooks=fork, log_every=1)
    print(str(result.stop_reason), codes)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, -15), (signal.SIGINT, 130), (signal.SIGUSR1, -10)]
)
def test_a_signal_ends_a_child_and_not_the_run(forks, number, code):
    end = forks.run(forks_in_a_hook, int(number), timeout=30)
    assert (end.code, end.output) == (0, f"the batches ended at step 2 {[code, code]}\n"), end
