"""Draw when host, save thread and device work during thirty steps of a run."""

import queue
import tempfile
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import stepfold as sf

BLUE, ORANGE, GREEN, PURPLE, _ = plt.rcParams["axes.prop_cycle"].by_key()["color"]
LANES = ("host: dispatch", "host: hooks", "host: evaluate", "host: save", "save thread", "device")
COLORS = (BLUE, PURPLE, GREEN, ORANGE, ORANGE, BLUE)
SHOWN = (65, 97)  # steps; the evaluation and the save after step 40 compile their programs

spans: dict[str, list[tuple[float, float, int]]] = {lane: [] for lane in LANES}
dispatched: queue.SimpleQueue = queue.SimpleQueue()


class Recorded:
    """A jitted step that records when it is dispatched, and passes its results to a thread."""

    def __init__(self, step):
        """Wrap a step."""
        self.step, self.lower = step, step.lower

    def __call__(self, state, batch):
        """Dispatch the step."""
        start = time.perf_counter()
        state, metrics = self.step(state, batch)
        end = time.perf_counter()
        spans["host: dispatch"].append((start, end, len(spans["host: dispatch"]) + 1))
        dispatched.put((start, metrics))
        return state, metrics


def watch_device():
    """Record when each step is done."""
    before = 0.0
    for number in range(1, 10**6):
        start, metrics = dispatched.get()
        jax.block_until_ready(metrics)
        done = time.perf_counter()
        spans["device"].append((max(start, before), done, number))
        before = done


def watch_saves(folder):
    """Record when the steps of a series are complete."""
    seen = set()
    while True:
        for path in folder.glob("[0-9]*"):
            if path.name.isdigit() and path not in seen:
                seen.add(path)
                starts = [end for _, end, step in spans["host: save"] if step == int(path.name)]
                start = starts[0] if starts else time.perf_counter()
                spans["save thread"].append((start, time.perf_counter(), int(path.name)))
        time.sleep(0.001)


def recorded(lane, function, number):
    """Wrap a function to record when it runs."""

    def call(*args, **options):
        start = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            spans[lane].append((start, time.perf_counter(), number(*args, **options)))

    return call


def init(key):
    """Initialize layers of 256 units."""
    return {"w": jax.random.normal(key, (4, 256, 256)) / 16}


def loss_fn(params, batch, key):
    """Return a mean square."""
    del key
    x, _ = jax.lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), batch["x"], params["w"])
    return sf.mean(jnp.square(x))


def hook(event):
    """Take the time of a hook that writes to a slow disk."""
    del event
    time.sleep(0.01)


def draw():
    """Draw the spans of the steps shown."""
    device = {number: (start, end) for start, end, number in spans["device"]}
    (origin, _), (_, stop) = (device[step] for step in SHOWN)
    figure, axes = plt.subplots(figsize=(7.6, 3.2))
    for row, (lane, color) in enumerate(zip(LANES, COLORS, strict=True)):
        for start, end, number in spans[lane]:
            if start < origin or start > stop:
                continue
            left, width = 1e3 * (start - origin), 1e3 * (end - start)
            pale = lane == "device" and number % 2
            axes.barh(row, max(width, 0.3), left=left, color=color, alpha=0.45 if pale else 1)
            if lane == "host: hooks" or (lane == "device" and number % 10 == 0):
                axes.text(left + width / 2, row + 0.45, number, ha="center", va="top", size=8)
    axes.set(xlabel="ms", yticks=range(len(LANES)), yticklabels=LANES)
    axes.set_xlim(0, 1e3 * (stop - origin))
    axes.set_ylim(len(LANES) - 0.2, -0.6)
    figure.savefig("timeline.svg")


def main():
    """Train, record and draw."""
    tx = optax.sgd(1e-3)
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(4096, 256)).astype(np.float32)}
    step = Recorded(jax.jit(sf.make_train_step(loss_fn, tx)))
    eval_step = jax.jit(sf.make_eval_step(loss_fn))
    test = lambda: sf.batches(data, 512, epochs=1)
    evaluate = lambda state: sf.evaluate(eval_step, state, test())
    evaluation = sf.Evaluation(recorded("host: evaluate", evaluate, lambda _: 0), every=40)
    with tempfile.TemporaryDirectory() as folder:
        threading.Thread(target=watch_device, daemon=True).start()
        threading.Thread(target=watch_saves, args=(Path(folder),), daemon=True).start()
        save = sf.checkpoint.Series.save
        sf.checkpoint.Series.save = recorded("host: save", save, lambda *_, step, **__: step)
        sf.fit(
            step,
            sf.init_state(init, tx, jax.random.key(0)),
            sf.batches(data, 256, seed=0),
            steps=100,
            hooks=recorded("host: hooks", hook, lambda event: event.step),
            evaluation=evaluation,
            checkpoints=sf.Checkpoints(folder, every=40),
        )
    draw()


if __name__ == "__main__":
    main()
