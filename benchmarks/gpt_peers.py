"""The model of `gpt` in the layers and loops of other libraries, as in their documentation.

Each function takes the weights, the batches, the steps between logs, and `log`: a function of the
mean loss since its last call that returns whether to stop.
"""

from functools import partial

import jax
from gpt import ADAMW, BATCH, HEADS, LAYERS, LENGTH, RATE, WIDTH


def flax_and_clu(weights, batches, every, log):
    """Train as in the tutorials of flax: a `TrainState`, and metrics merged after each step."""
    import flax.linen as nn
    import flax.struct
    import optax
    from clu import metrics as clu
    from flax.training.train_state import TrainState

    norm = partial(nn.LayerNorm, epsilon=1e-6, use_bias=False)
    dense = partial(nn.Dense, use_bias=False)

    @flax.struct.dataclass
    class Metrics(clu.Collection):
        loss: clu.Average.from_output("loss")

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            qkv = dense(3 * WIDTH, name="qkv")(norm(name="norm_in")(x))
            q, k, v = jax.numpy.split(qkv.reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
            heads = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            x = x + dense(WIDTH, name="proj")(heads.reshape(x.shape))
            up = dense(4 * WIDTH, name="up")(norm(name="norm_mid")(x))
            return x + dense(WIDTH, name="down")(nn.gelu(up))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(256, WIDTH, name="embed")(tokens)
            x = x + nn.Embed(LENGTH, WIDTH, name="place")(jax.numpy.arange(LENGTH))
            for number in range(LAYERS):
                x = Layer(name=f"layer{number}")(x)
            return dense(256, name="out")(norm(name="norm")(x))

    leaf = {"embed": "embedding", "place": "embedding"}

    def named(tree):
        kind = lambda name: leaf.get(name, "scale" if "norm" in name else "kernel")
        return {name: {kind(name): x} for name, x in tree.items() if name != "layers"}

    params = named(weights)
    params |= {f"layer{i}": named(layer) for i, layer in enumerate(weights["layers"])}
    params = jax.tree.map(jax.numpy.asarray, params)

    @jax.jit
    def train_step(state, metrics, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        metrics = metrics.merge(Metrics.single_from_model_output(loss=loss))
        return state.apply_gradients(grads=grads), metrics

    tx = optax.adamw(RATE, **ADAMW)
    state = TrainState.create(apply_fn=Model().apply, params=params, tx=tx)
    metrics = Metrics.empty()
    for number, batch in enumerate(batches, 1):
        state, metrics = train_step(state, metrics, batch)
        if number % every == 0:
            if log(float(metrics.compute()["loss"])):
                return
            metrics = Metrics.empty()


def keras_on_jax(weights, batches, every, log):
    """Train with `fit` of Keras, with one epoch per log."""
    import keras
    from keras import layers, ops

    norm = partial(layers.LayerNormalization, epsilon=1e-6, center=False)
    dense = partial(layers.Dense, use_bias=False)

    class Attention(layers.Layer):
        def call(self, qkv):
            shape = ops.shape(qkv)
            q, k, v = ops.split(ops.reshape(qkv, (-1, shape[1], 3 * HEADS, WIDTH // HEADS)), 3, 2)
            heads = ops.dot_product_attention(q, k, v, is_causal=True)
            return ops.reshape(heads, (-1, shape[1], WIDTH))

        def compute_output_shape(self, shape):
            return (*shape[:-1], WIDTH)

    class Place(layers.Layer):
        def build(self, _):
            self.table = self.add_weight((LENGTH, WIDTH), name="table")

        def call(self, x):
            return x + self.table

    tokens = keras.Input((LENGTH,), dtype="int32")
    x = Place()(layers.Embedding(256, WIDTH)(tokens))
    for _ in range(LAYERS):
        x = x + dense(WIDTH)(Attention()(dense(3 * WIDTH)(norm()(x))))
        x = x + dense(WIDTH)(layers.Activation(gelu)(dense(4 * WIDTH)(norm()(x))))
    model = keras.Model(tokens, dense(256)(norm()(x)))
    order = ("norm_in", "qkv", "proj", "norm_mid", "up", "down")
    inner = [layer[name] for layer in weights["layers"] for name in order]
    model.set_weights([weights["embed"], weights["place"], *inner, weights["norm"], weights["out"]])
    b1, b2, eps, decay = ADAMW.values()
    model.compile(
        keras.optimizers.AdamW(RATE, decay, b1, b2, eps),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=True,
    )

    class Log(keras.callbacks.Callback):
        def on_epoch_end(self, _, logs=None):
            self.model.stop_training = log(float(logs["loss"]))

    batches = list(batches)
    pairs = ((batch["x"], batch["y"]) for batch in batches)
    model.fit(
        pairs,
        steps_per_epoch=every,
        epochs=len(batches) // every,
        verbose=0,
        callbacks=[Log()],
    )


def gelu(x):
    """Use the approximation that the others use."""
    import keras

    return keras.ops.gelu(x, approximate=True)


def torch_loop(weights, batches, every, log, *, compiled=False):
    """Train as in the tutorials of torch, with its fused AdamW."""
    import torch
    import torch.nn.functional as F  # noqa: N812  the usual name
    from torch import nn

    dense = partial(nn.Linear, bias=False)
    norm = partial(nn.LayerNorm, WIDTH, eps=1e-6, bias=False)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.proj = dense(WIDTH, 3 * WIDTH), dense(WIDTH, WIDTH)
            self.up, self.down = dense(WIDTH, 4 * WIDTH), dense(4 * WIDTH, WIDTH)
            self.norm_in, self.norm_mid = norm(), norm()

        def forward(self, x):
            split = (BATCH, LENGTH, 3 * HEADS, WIDTH // HEADS)
            qkv = self.qkv(self.norm_in(x)).view(split).transpose(1, 2)
            heads = F.scaled_dot_product_attention(*qkv.split(HEADS, 1), is_causal=True)
            x = x + self.proj(heads.transpose(1, 2).reshape(x.shape))
            up = self.up(self.norm_mid(x))
            return x + self.down(F.gelu(up, approximate="tanh"))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
            self.norm, self.out = norm(), dense(WIDTH, 256)

        def forward(self, tokens):
            x = self.embed(tokens) + self.place.weight
            for layer in self.layers:
                x = layer(x)
            return self.out(self.norm(x))

    def fill(module, named):
        for name, x in named.items():
            if name == "layers":
                for layer, inner in zip(module.layers, x, strict=True):
                    fill(layer, inner)
            else:
                inner = getattr(module, name)
                x = x.T if isinstance(inner, nn.Linear) else x
                inner.weight.data.copy_(torch.tensor(x))

    model = Model()
    fill(model, weights)
    b1, b2, eps, decay = ADAMW.values()
    optimizer = torch.optim.AdamW(
        model.parameters(), RATE, (b1, b2), eps, weight_decay=decay, fused=True
    )
    run = torch.compile(model) if compiled else model
    total = 0.0
    for number, batch in enumerate(batches, 1):
        logits = run(torch.from_numpy(batch["x"]))
        loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch["y"]).long().flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if number % every == 0:
            if log(float(total) / every):
                return
            total = 0.0
