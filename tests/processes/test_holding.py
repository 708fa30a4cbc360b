"""A trainer on several processes equals one on one process, and the first writes the files."""

import json

import pytest

from . import launch


def trains(start, folder):
    """Train, evaluate over an uneven rest, and save."""
    import json

    import jax
    import jax.numpy as jnp
    import numpy as np

    import stepfold as sf
    from stepfold.adapter import Trainer, TrainingArguments

    start()
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(96, 8)).astype(np.float32)}

    def loss_fn(params, batch, key):
        return sf.mean((jnp.tanh(batch["x"] @ params["w"]) ** 2).mean(-1), batch["mask"])

    trainer = Trainer(
        TrainingArguments(
            output_dir=folder,
            max_steps=12,
            save_steps=6,
            total_batch_size=16,
            eval_batch_size=24,
            learning_rate=1e-2,
            log_steps=4,
            progress_bar_type="none",
            report_to=("jsonl",),
        ),
        model=lambda key: {"w": jax.random.normal(key, (8, 1024))},
        dataset_train=data,
        dataset_eval={"x": data["x"][:50]},
        loss_fn=loss_fn,
    )
    output = trainer.train()
    found = {
        "stopped": output.stopped,
        "saved": output.last_save_file_name,
        "spread": len(output.state.params["w"].sharding.device_set),
        "history": {name: [curve.steps, list(curve)] for name, curve in trainer.history.items()},
        "evaluated": trainer.evaluate()["eval_loss"],
    }
    print(json.dumps(found))


def test_two_processes_train_as_one(processes, tmp_path):
    alone = json.loads(launch.run_alone(trains, str(tmp_path / "one")))
    for text in processes.run(trains, str(tmp_path / "two")):
        seen = json.loads(text)
        assert seen["stopped"] == "all 12 steps were done"
        assert (seen["saved"], seen["spread"]) == ("12", 4)
        assert seen["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-4)
        for name, (steps, values) in alone["history"].items():
            assert seen["history"][name][0] == steps
            assert seen["history"][name][1] == pytest.approx(values, rel=1e-4)
    written = (tmp_path / "two" / "logs" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in written] == [4, 6, 8, 12]  # 6 ends an epoch
