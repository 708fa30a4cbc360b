"""Q-learning with an environment and a replay buffer on the host, resumed bit for bit.

Run it with `python examples/replay_buffer.py`; it takes a few seconds. The batches depend on the
parameters: an actor explores with the newest ones, and fills a buffer that is part of the position
in a checkpoint.
"""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stepfold as sf

CELLS, CAPACITY, DISCOUNT = 8, 512, 0.9


class Corridor:
    """Cells in a row, the last of which gives a reward and leads back to the first."""

    def __init__(self):
        self.cell = 0

    def act(self, action):
        cell = min(max(self.cell + (1 if action else -1), 0), CELLS - 1)
        is_end = cell == CELLS - 1
        self.cell = 0 if is_end else cell
        return cell, float(is_end), is_end


class Actor:
    """Batches of transitions from a buffer, to which each pull adds four."""

    def __init__(self, seed):
        self.environment, self.random = Corridor(), np.random.default_rng(seed)
        self.count, self.values = 0, np.zeros((CELLS, 2), np.float32)
        # cell, action, reward, next cell, whether that is the end
        self.buffer = np.zeros((CAPACITY, 5), np.float32)

    def __iter__(self):
        return self

    def read_state(self, state):
        """Called by `fit` with the newest state before each pull."""
        self.values = np.asarray(state.params["values"])

    def __next__(self):
        for _ in range(4):
            cell = self.environment.cell
            explores = self.random.random() < 0.3 or np.ptp(self.values[cell]) == 0
            action = self.random.integers(2) if explores else self.values[cell].argmax()
            following, reward, is_end = self.environment.act(action)
            self.buffer[self.count % CAPACITY] = cell, action, reward, following, is_end
            self.count += 1
        rows = self.buffer[self.random.integers(min(self.count, CAPACITY), size=64)]
        goals = rows[:, 2] + DISCOUNT * self.values[rows[:, 3].astype(int)].max(1) * (
            1 - rows[:, 4]
        )
        return {"cell": rows[:, 0].astype(int), "action": rows[:, 1].astype(int), "goal": goals}

    def get_state(self):
        """Return all that the next batches depend on, besides the state of the run."""
        random, cell = self.random.bit_generator.state, self.environment.cell
        return {"buffer": self.buffer, "count": self.count, "random": random, "cell": cell}

    def set_state(self, state):
        self.buffer, self.count = np.array(state["buffer"]), state["count"]
        self.random.bit_generator.state, self.environment.cell = state["random"], state["cell"]


def train(folder, steps):
    """Train up to a step, or continue up to it."""

    def loss(params, batch, key):  # noqa: ARG001
        values = params["values"][batch["cell"], batch["action"]]
        return sf.mean((values - batch["goal"]) ** 2)

    tx = optax.adam(0.03)
    state = sf.init_state({"values": jnp.zeros((CELLS, 2))}, tx, jax.random.key(0))
    return sf.fit(
        sf.make_train_step(loss, tx),
        state,
        Actor(seed=0),
        steps=steps,
        run_dir=folder,
        checkpoints=sf.Checkpoints(every=100),
        log_every=50,
    )


def main(steps=600):
    """Compare a run that is resumed half way with one that is not."""
    with tempfile.TemporaryDirectory() as folder:
        uncut = train(f"{folder}/uncut", steps)
        train(f"{folder}/cut", steps // 2)
        resumed = train(f"{folder}/cut", steps)
    values = np.asarray(uncut.state.params["values"])
    is_same = np.array_equal(values, resumed.state.params["values"])
    print(f"resumed from step {resumed.resumed} with the same bits: {is_same}")
    print(f"cells in which the actor goes right: {(values[:-1, 1] > values[:-1, 0]).sum()} of 7")


if __name__ == "__main__":
    main()
