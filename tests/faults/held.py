"""A run that a trainer holds on eight devices, which kills itself at a step, and is run again."""

import hashlib
import os
import signal
import sys

import jax

jax.config.update("jax_num_cpu_devices", 8)

from tests.adapter import digits  # noqa: E402  the devices come first

from stepfold.adapter import Trainer  # noqa: E402


class Killed(Trainer):
    """Die at a log point, as if the power were cut."""

    at = 0

    def on_log(self, metrics, step):
        if step == self.at and "train/loss" in metrics:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder, at):
    Killed.at = int(at)
    trainer = digits.trainer(
        Killed,
        output_dir=folder,
        max_steps=24,
        total_batch_size=32,
        log_steps=2,
        sharding_array=(1, -1, 2, 1),
        gradient_accumulation_steps=4,
        mixed_precision="bf16",
        evaluation_strategy="steps",
        eval_steps=6,
        save_steps=4,
        save_total_limit=2,
        scheduler="cosine",
    )
    output = trainer.train()
    numbers = b"".join(digits.bits(output.state))
    curves = {name: (curve.steps, list(curve)) for name, curve in trainer.history.items()}
    print(hashlib.sha256(numbers).hexdigest(), hashlib.sha256(repr(curves).encode()).hexdigest())
    print(output.stopped, len(output.state.params["kernel"].sharding.device_set))


if __name__ == "__main__":
    main(*sys.argv[1:])
