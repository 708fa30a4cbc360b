"""Subclass the trainer: change batches, write both steps, and run a hook after each step.

Run it with `python examples/subclass_adapter.py`. Everything that the subclass does not override
stays: schedules, evaluations, checkpoints, the mesh.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from stepfold.adapter import Trainer, TrainerConfigureFunctionOutput, TrainingArguments


class CustomTrainer(Trainer):
    """Train on binarized images of digits, with steps written by hand."""

    def create_collect_function(self, *_args, **_kwargs):
        """Binarize the images of a batch."""

        def collect_fn(batch):
            return {**batch, "images": (batch["images"] > 8).astype(np.float32)}

        return collect_fn

    def configure_functions(self, *_args, **_kwargs):
        """Return both steps; their metrics may be plain numbers."""

        def loss_of(params, batch):
            logits = batch["images"] @ params["kernel"] + params["bias"]
            nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
            return nll.mean(), (logits.argmax(-1) == batch["labels"]).mean()

        def train_step(state, batch):
            (loss, accuracy), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params, batch)
            updates, opt_state = self.tx.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            new_state = state._replace(step=state.step + 1, params=params, opt_state=opt_state)
            return new_state, {"loss": loss, "accuracy": accuracy}

        def eval_step(state, batch):
            loss, accuracy = loss_of(state.params, batch)
            return {"eval_loss": loss, "eval_accuracy": accuracy}

        return TrainerConfigureFunctionOutput(
            train_step_fn=jax.jit(train_step), eval_step_fn=jax.jit(eval_step)
        )

    def on_step_end(self, state, metrics, *args, **kwargs):
        """Print the learning rate every 20 steps."""
        if self.scheduler is not None and state.step % 20 == 0:
            current_lr = self.scheduler(state.step)
            print(f"step {state.step} completed  current learning rate {current_lr:.5f}")
        return super().on_step_end(state, metrics, *args, **kwargs)


def main(steps=100):
    """Train for a few epochs."""
    digits = load_digits()
    data = {"images": digits.data, "labels": np.int32(digits.target)}
    train = {name: values[:1500] for name, values in data.items()}
    test = {name: values[1500:] for name, values in data.items()}
    arguments = TrainingArguments(
        max_steps=steps,
        total_batch_size=64,
        learning_rate=1e-2,
        scheduler="linear",
        evaluation_strategy="steps",
        eval_steps=50,
    )
    trainer = CustomTrainer(
        arguments,
        model_state={"kernel": jnp.zeros((64, 10)), "bias": jnp.zeros(10)},
        dataset_train=train,
        dataset_eval=test,
    )
    output = trainer.train()
    parameters = trainer.count_model_parameters(output.state.params)
    print(f"{output.stopped}; {parameters} parameters")
    print(f"test accuracy {trainer.evaluate(output.state)['eval_accuracy']:.4f}")


if __name__ == "__main__":
    main()
