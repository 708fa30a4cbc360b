"""Cut a stack of layers into pipeline stages (GPipe), next to FSDP and tensor parallelism.

Run it with `python examples/pipeline.py`; it takes some seconds on two cores. The pipeline is a
function in an ordinary loss function, so accumulation, remat and `describe` work as usual. Its
`jax.shard_map` is manual over "pp" only; the compiler partitions the other axes. In each tick, each
stage applies its layers to one microbatch and sends the result to the next stage. A batch of n
microbatches takes n + stages - 1 ticks, and in stages - 1 of them, the bubble, a stage is idle.

There are three traps. An idle stage still computes, and its results are discarded. If its input is
zero, the gradient is NaN, since zero times the infinite slope of a norm at zero is NaN; so the
carry starts with real rows. Without a constraint on the activations, the compiler may shard them
along the wrong axis, and "fsdp" then sends activations instead of weights. And FSDP gathers the
weights in every tick, so that more microbatches send more.
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import stepfold as sf

LAYERS, WIDTH, HIDDEN, BATCH, STEPS = 8, 64, 256, 256, 4
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
AXES, ROWS = ("dp", "fsdp", "pp", "tp"), ("dp", "fsdp")
RULES = [
    ("up$", P("pp", "fsdp", "tp")),  # the leading axis is that of the layers
    ("down$", P("pp", "tp", "fsdp")),
    ("(embed|head)$", P("fsdp")),
]


def pipeline(layer, weights, x, *, mesh, microbatches):
    """Apply layers, stacked along a leading axis and sharded over "pp", to the rows of `x`."""
    stages, n = mesh.shape["pp"], microbatches
    # Microbatch i has the rows i, i + n, …, so that the rows stay on their devices.
    micro = x.reshape(-1, n, *x.shape[1:]).swapaxes(0, 1)

    def on_stage(weights, micro):
        is_first = lax.axis_index("pp") == 0

        def tick(received, t):
            x = jnp.where(is_first, micro[jnp.minimum(t, n - 1)], received)
            x = lax.with_sharding_constraint(x, P(ROWS))
            x = sequential(layer, weights, x)
            return lax.ppermute(x, "pp", [(i, i + 1) for i in range(stages - 1)]), x

        start = lax.pcast(micro[0], "pp", to="varying")  # real rows, never zeros
        _, outputs = lax.scan(tick, start, jnp.arange(n + stages - 1))
        return outputs[None, stages - 1 :]

    over_stages = jax.shard_map(
        on_stage, mesh=mesh, in_specs=(P("pp"), P()), out_specs=P("pp"), axis_names={"pp"}
    )
    return over_stages(weights, micro)[-1].swapaxes(0, 1).reshape(x.shape)  # of the last stage


def sequential(layer, weights, x):
    """Apply stacked layers one after the other."""
    return lax.scan(lambda x, w: (jax.checkpoint(layer)(w, x), None), x, weights)[0]


def init(key):
    """Initialize residual layers between an embedding and a head, in the default dtype."""
    keys = iter(jax.random.split(key, 4))
    normal = lambda *shape: jax.random.normal(next(keys), shape) / shape[-2] ** 0.5
    layers = {"up": normal(LAYERS, WIDTH, HIDDEN), "down": normal(LAYERS, HIDDEN, WIDTH)}
    return {"layers": layers, "embed": normal(64, WIDTH), "head": normal(WIDTH, 10)}


def layer(w, x):
    """Apply an MLP to normalized activations, with a residual connection."""
    normalized = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))
    return x + jax.nn.gelu(normalized @ w["up"]) @ w["down"]


def train(params, mesh, apply=sequential, batch=BATCH, **options):
    """Train a few steps on digits; return the parameters and the report of a step."""

    def loss_fn(params, batch, _key):
        x = apply(layer, params["layers"], batch["image"] @ params["embed"])
        nll = optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], batch["label"])
        return sf.mean(nll)

    data = {"image": load_digits().data / 16, "label": load_digits().target}
    batches = sf.batches(data, batch, seed=0)
    make_state = partial(sf.init_state, params, TX, jax.random.key(0))
    state = make_state(sharding=sf.make_sharding(jax.eval_shape(make_state), mesh, RULES))
    step = sf.compile_step(sf.make_train_step(loss_fn, TX, **options), state, batches.at(0))
    for i in range(STEPS):
        state, _ = step(state, sf.shard_batch(batches.at(i), mesh))
        jax.block_until_ready(state)  # virtual devices share few threads
    return jax.device_get(state.params), sf.describe(step, state, batches.at(0))


def main():
    """Compare pipelines over eight devices with the same layers on one device."""
    if jax.config.jax_num_cpu_devices < 8:
        jax.config.update("jax_num_cpu_devices", 8)  # has an effect only on CPU
    with jax.enable_x64(True):
        params = jax.device_get(jax.jit(init)(jax.random.key(0)))
        one = sf.make_mesh((1, 1, 1, 1), AXES, devices=jax.devices()[:1])
        expected, alone = train(params, one)
        mesh = sf.make_mesh((1, 2, 2, 2), AXES)
        print("microbatches  FLOPs  ticks / n  temporaries        sent  differs by")
        for n in (1, 4, 16):
            got, report = train(params, mesh, partial(pipeline, mesh=mesh, microbatches=n))
            flops = report.flops.dots * report.devices / alone.flops.dots
            ticks = f"{(n + mesh.shape['pp'] - 1) / n:9.3f}  {report.memory.temporaries:11,}"
            errors = jax.tree.map(lambda x, y: abs(x - y).max(), got, expected)
            row = f"{n:12}  {flops:5.3f}  {ticks}  {report.moved:10,}"
            print(f"{row}  {max(jax.tree.leaves(errors)):10.1e}")


if __name__ == "__main__":
    main()
