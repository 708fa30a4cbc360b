"""Draw the small pictures of the list of recipes, from what stepfold and optax compute."""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import stepfold as sf

BLUE, ORANGE, GREEN = "#0969da", "#bc4c00", "#1a7f37"


def rows_of(batches, count=9):
    """Return the examples of the first batches, one batch a row."""
    iterator = iter(batches)
    return np.stack([next(iterator)["i"] for _ in range(count)])


def draw_data(axes):
    """Show the order of the examples in each batch, by color."""
    source = {"i": np.arange(216)}
    axes.imshow(rows_of(sf.batches(source, 24, seed=0)), cmap="Blues", aspect="auto")


def draw_corpus(axes):
    """Show the documents that fill the rows of a batch."""
    rng = np.random.default_rng(0)
    documents = [{"tokens": np.arange(size)} for size in rng.integers(3, 16, 99)]
    batch = sf.batches(sf.pack(documents, length=40), 8)
    axes.imshow(next(iter(batch))["segment_ids"], cmap="Blues", aspect="auto")


def draw_largest_model(axes):
    """Show the state and the peak memory of models of several widths, and a limit."""
    tx, widths = optax.adam(1e-3), (64, 128, 192, 256, 320)
    step = sf.make_train_step(lambda w, x, _key: sf.mean((jnp.tanh(x @ w) @ w) ** 2), tx)
    for number, width in enumerate(widths):
        state = jax.eval_shape(
            lambda width=width: sf.init_state(jnp.ones((width, width)), tx, jax.random.key(0))
        )
        batch = jax.ShapeDtypeStruct((256, width), jnp.float32)
        memory = sf.describe(step, state, batch).memory
        axes.bar(number, memory.peak, color=BLUE, alpha=0.4)
        axes.bar(number, memory.state, color=BLUE)
        if number == len(widths) - 2:
            axes.axhline(1.1 * memory.peak, color=ORANGE, linestyle="--")


def draw_optimization(axes):
    """Show a schedule."""
    rate = optax.warmup_cosine_decay_schedule(0, 1, 20, 100)
    axes.plot(jax.vmap(rate)(jnp.arange(101)), color=BLUE)


def losses(rate, steps=60, batch=8):
    """Train a line, and return the losses of all steps."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(512, 4)).astype("float32")
    y = x @ np.float32([1, -1, 2, 0.5]) + rng.normal(size=512).astype("float32")
    tx = optax.sgd(rate)
    loss_fn = lambda params, batch, _key: sf.mean((batch["x"] @ params - batch["y"]) ** 2)
    state = sf.init_state(jnp.zeros(4), tx, jax.random.key(0))
    batches = sf.batches({"x": x, "y": y}, batch, seed=1)
    step = sf.make_train_step(loss_fn, tx)
    return sf.fit(step, state, batches, steps=steps, log_every=1).history["train/loss"]


def draw_metrics(axes):
    """Show a loss and its moving mean."""
    values = np.array(losses(0.03))
    axes.plot(values, color=BLUE, alpha=0.4)
    axes.plot(np.arange(4, len(values)), np.convolve(values, np.ones(5) / 5, "valid"), color=BLUE)


def draw_experiments(axes):
    """Show the runs of a sweep."""
    for rate in (0.003, 0.01, 0.03, 0.1):
        axes.plot(losses(rate, batch=128), alpha=0.9)


def draw_best_of_a_sweep(axes):
    """Show the runs of a sweep, the best in color."""
    for rate in (0.003, 0.01, 0.03):
        axes.plot(losses(rate, batch=128), color="#57606a", alpha=0.4)
    best = losses(0.1, batch=128)
    axes.plot(best, color=GREEN)
    axes.plot(int(np.argmin(best)), min(best), "o", color=GREEN)


def draw_ema(axes):
    """Show parameters and their average."""
    rng = np.random.default_rng(1)
    values = 1 - np.exp(-np.arange(80) / 15) + 0.12 * rng.normal(size=80)
    average = [values[0]]
    for value in values[1:]:
        average.append(0.9 * average[-1] + 0.1 * value)
    axes.plot(values, color=BLUE, alpha=0.4)
    axes.plot(average, color=BLUE)


def draw_failures(axes):
    """Show a spike, and the loss of a run that goes back before it."""
    values = np.array(losses(0.03, batch=64))
    spiked = np.where(np.arange(60) >= 35, values + 4 * np.exp(-(np.arange(60) - 35) / 4), values)
    axes.plot(spiked, color=ORANGE)
    axes.plot(values, color=BLUE)


def draw_grid(axes, spec):
    """Show which of eight devices has which part of a matrix."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = jax.sharding.NamedSharding(mesh, jax.P(*spec))
    owner = np.zeros((8, 16))
    for device, index in sharding.devices_indices_map(owner.shape).items():
        owner[index] = device.id
    axes.imshow(owner, cmap="Blues", aspect="auto", vmin=-2)


def draw_weights(axes):
    """Show a matrix of weights."""
    kernel = jax.nn.initializers.orthogonal()(jax.random.key(0), (10, 20))
    axes.imshow(kernel, cmap="RdBu", aspect="auto")


def draw_clusters(axes):
    """Show the rows that each of four processes reads of each batch."""
    shards = [
        rows_of(sf.batches({"i": np.arange(216)}, 24, seed=0, process_index=i, process_count=4))
        for i in range(4)
    ]
    image = np.concatenate([np.full_like(rows, i) for i, rows in enumerate(shards)], axis=1)
    axes.imshow(image, cmap="Blues", aspect="auto", vmin=-2)


def draw_classifiers(axes):
    """Show smoothed labels."""
    labels = jax.nn.one_hot(jnp.arange(8), 8)
    axes.imshow(optax.smooth_labels(labels, 0.3), cmap="Blues", aspect="auto", vmin=0, vmax=1)


def draw_seq2seq(axes):
    """Show an attention that reverses a sequence."""
    axes.imshow(np.eye(8)[::-1] + 0.1, cmap="Blues", aspect="auto", vmin=0)


def draw_meta_learning(axes):
    """Show tasks: sines of several amplitudes and phases."""
    x = np.linspace(-3, 3, 80)
    for amplitude, phase in ((1, 0), (0.6, 1), (1.4, 2.2), (0.9, 4)):
        axes.plot(x, amplitude * np.sin(x + phase))


def draw_using(axes):
    """Show the probabilities of a prediction."""
    axes.bar(range(10), jax.nn.softmax(jnp.array([0, 1, 0, 2, 0, 1, 0, 4.0, 1, 2])), color=BLUE)


def draw_nnx(axes):
    """Show a layer with dropout."""
    kept = jax.random.bernoulli(jax.random.key(3), 0.7, (6, 14))
    axes.imshow(kept, cmap="Blues", aspect="auto", vmin=-0.3, vmax=1.2)


def draw_extending(axes):
    """Show the convergence of a power iteration, a custom step."""
    vector, matrix = jnp.array([0.2, 1.0]), jnp.array([[2.0, 0.6], [0.6, 1.0]])
    exact, errors = abs(jnp.linalg.eigh(matrix)[1][:, 1]), []
    for _ in range(9):
        vector = matrix @ vector / jnp.linalg.norm(matrix @ vector)
        errors.append(float(jnp.linalg.norm(vector - exact)))
    axes.semilogy(errors, "o-", color=BLUE)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    DRAWN = {name[5:]: draw for name, draw in globals().items() if name.startswith("draw_")}
    DRAWN.pop("grid")
    DRAWN["devices"] = lambda axes: draw_grid(axes, ("a", "b"))
    for name, draw in DRAWN.items():
        figure, axes = plt.subplots(figsize=(2.4, 1.2))
        draw(axes)
        axes.set(xticks=[], yticks=[])
        axes.minorticks_off()
        figure.savefig(f"recipe-{name.replace('_', '-')}.svg")
        plt.close(figure)
