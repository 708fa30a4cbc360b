"""A restart is ready early: imports, the state, the checkpoint, the program and the first step.

Each import and each restart has a process of its own, in turns. A restart resumes a decoder of 12
layers, and ends with its first step. By hand, it initializes the state, restores it by orbax and
jits a step that returns metrics of clu. All times are CPU times.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import show

IMPORTS = {
    "jax, optax": "import jax, optax",
    "stepfold": "from stepfold import *",
    "stepfold.adapter": "import stepfold.adapter",
    "jax, optax, clu": "import jax, optax, clu.metrics",
}
# The way to restart, and whether the programs of an earlier start are there to be loaded.
RESTARTS = {
    "by hand": ("hand", False),
    "by hand, jax's cache": ("hand", True),
    "fit, arrays, no cache": ("arrays", False),
    "fit, a function, cold": ("function", False),
    "fit, a function, warm": ("function", True),
}
PARTS = ("imports", "state", "restore", "compile", "first step")


def python(*arguments, **environment):
    """Run Python in a process of its own; return its CPU seconds and its output."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Bytecode is cached, as usual.
    own = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    own.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, *arguments]
    output = subprocess.run(
        command, check=True, env=own | environment, stdout=subprocess.PIPE, text=True
    ).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, output


def measure(names, rounds):
    """Measure each import in turns."""
    order = random.Random(0)
    python("-c", IMPORTS[names[-1]])
    turns = [
        {name: python("-c", IMPORTS[name])[0] for name in order.sample(names, len(names))}
        for _ in range(rounds)
    ]
    return [
        {
            "import": name,
            "CPU s": statistics.median(turn[name] for turn in turns),
            "over the first": statistics.median(turn[name] / turn["jax, optax"] for turn in turns),
        }
        for name in names
    ]


def measure_restarts(rounds, layers=12):
    """Measure each restart in turns."""
    order, turns = random.Random(0), []
    with tempfile.TemporaryDirectory() as folder:
        for way in ("hand", "arrays", "function"):  # leaves a checkpoint, and warm caches
            restart(way, folder, layers, is_warm=True)
        for _ in range(rounds):
            names = order.sample([*RESTARTS], len(RESTARTS))
            turns.append({name: _restart(name, folder, layers) for name in names})
    rows = []
    for name in RESTARTS:
        parts = {
            part: statistics.median(turn[name][part] for turn in turns) for part in (*PARTS, "all")
        }
        ratio = statistics.median(turn[name]["all"] / turn["by hand"]["all"] for turn in turns)
        rows.append({"restart": name, **parts, "over by hand": ratio})
    return rows


def _restart(name, folder, layers):
    way, is_warm = RESTARTS[name]
    return restart(way, folder, layers, is_warm=is_warm)


def restart(way, folder, layers, *, is_warm):
    """Restart in a process of its own; return the CPU seconds of its parts."""
    environment = {}
    if way == "hand" and is_warm:
        environment["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/cache"
    settings = json.dumps({"way": way, "folder": folder, "layers": layers, "is_warm": is_warm})
    _, output = python(__file__, "--restart", settings, **environment)
    return json.loads(output.splitlines()[-1])


class Clock:
    """The CPU seconds of this process, by part."""

    def __init__(self):
        self.seconds, self._before = dict.fromkeys(PARTS, 0.0), 0.0

    def end(self, part):
        """Count what came since the last part."""
        now = time.process_time()
        self.seconds[part] += now - self._before
        self._before = now


def run_restart(settings):
    """Restart in this process, and print the CPU seconds of its parts."""
    clock = Clock()
    run = restart_by_hand if settings["way"] == "hand" else restart_by_fit
    run(clock, **settings)
    print(json.dumps({**clock.seconds, "all": sum(clock.seconds.values())}))


def restart_by_hand(clock, folder, layers, **_):
    """Restore by orbax, and train a step."""
    import clu.metrics
    import flax.struct
    import jax
    import optax
    import orbax.checkpoint as ocp

    clock.end("imports")
    init, loss_of, tx, tokens = decoder(layers)

    @flax.struct.dataclass
    class State:
        step: jax.Array
        params: dict
        opt_state: tuple

    def make():
        params = init(jax.random.key(0))
        return State(jax.numpy.zeros((), jax.numpy.int32), params, tx.init(params))

    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda p: loss_of(p, batch).mean())(state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        loss = clu.metrics.Average.from_model_output(loss)
        return State(state.step + 1, params, opt_state), {"loss": loss}

    state = jax.block_until_ready(jax.jit(make)())
    clock.end("state")
    with ocp.CheckpointManager(f"{folder}/orbax") as manager:
        if (last := manager.latest_step()) is not None:
            state = manager.restore(last, args=ocp.args.StandardRestore(state))
            jax.block_until_ready(state)
        clock.end("restore")
        compiled = jax.jit(step, donate_argnums=0).lower(state, tokens).compile()
        clock.end("compile")
        state, metrics = compiled(state, tokens)
        float(metrics["loss"].compute())
        jax.block_until_ready(state)
        clock.end("first step")
        if last is None:
            manager.save(1, args=ocp.args.StandardSave(state))


def restart_by_fit(clock, way, folder, layers, is_warm):
    """Resume by `fit`, and train a step."""
    import jax
    import numpy as np

    import stepfold as sf

    clock.end("imports")
    init, loss_of, tx, tokens = decoder(layers)
    run_dir, has_cache = Path(folder, way), way == "function"
    if not is_warm:
        for path in (run_dir / "compiled").glob("*"):  # they are written again
            path.unlink()

    def loss_fn(params, batch, key):  # noqa: ARG001
        if clock.seconds["compile"] == 0 and clock.seconds["state"]:
            clock.end("restore")  # the step is traced
        return sf.mean(loss_of(params, batch))

    def make():
        return sf.init_state(init, tx, jax.random.key(0))

    def end_compile(event, *_, **options):
        if event.endswith("backend_compile_duration") and "step_once" in options["fun_name"]:
            clock.end("compile")

    def stop(event):
        clock.end("first step")
        return "measured" if event.step > 1 else None

    jax.monitoring.register_event_duration_secs_listener(end_compile)
    state = make if way == "function" else jax.block_until_ready(make())
    clock.end("state")
    sf.fit(
        sf.make_train_step(loss_fn, tx),
        state,
        sf.batches(np.repeat(tokens, 50, 0), len(tokens), seed=0),
        more_steps=1,
        run_dir=sf.RunDirectory(run_dir, compilation_cache=has_cache),
        checkpoints=sf.Checkpoints(every=1000),
        hooks=[stop, sf.progress("none")],
        log_every=1,
    )


def decoder(layers, width=256, vocabulary=512, length=64):
    """Return the initializer and loss of a decoder with scanned layers, an optimizer, a batch."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    def init(key):
        keys = jax.random.split(key, 5)
        normal = lambda key, *shape: 0.02 * jax.random.normal(key, shape)
        return {
            "embed": normal(keys[0], vocabulary, width),
            "layers": {
                "qkv": normal(keys[1], layers, width, 3, 8, width // 8),
                "out": normal(keys[2], layers, 8, width // 8, width),
                "up": normal(keys[3], layers, width, 4 * width),
                "down": normal(keys[4], layers, 4 * width, width),
                "scales": jnp.ones((layers, 2, width)),
            },
        }

    def normalize(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale

    def loss_of(params, tokens):
        mask = jnp.tril(jnp.ones((length, length), bool))

        def layer(x, w):
            heads = normalize(x, w["scales"][0])
            q, k, v = jnp.einsum("btd,dnhe->nbhte", heads, w["qkv"])
            scores = jnp.einsum("bhte,bhse->bhts", q, k) / 6
            weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1)
            x = x + jnp.einsum("bhts,bhse,hed->btd", weights, v, w["out"])
            return x + jax.nn.gelu(normalize(x, w["scales"][1]) @ w["up"]) @ w["down"], None

        x, _ = jax.lax.scan(layer, params["embed"][tokens[:, :-1]], params["layers"])
        logits = x @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean(-1)

    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 100, 1000)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    tokens = np.random.default_rng(0).integers(0, vocabulary, (2, length + 1)).astype(np.int32)
    return init, loss_of, tx, tokens


def judge(rows):
    """Return the claims about the rows, of imports and of restarts."""
    imports = [row for row in rows if "import" in row]
    restarts = [row for row in rows if "restart" in row]
    claims = [
        (f"CPU time of import {row['import']}, over jax and optax", row["over the first"], 1.2)
        for row in imports
        if row["import"].startswith("stepfold")
    ]
    ratios = {row["restart"]: row["over by hand"] for row in restarts}
    name = "fit, a function, warm"
    if name in ratios:
        claims.append((f"CPU time to the first step: {name}, over by hand", ratios[name], 0.5))
    return claims


def main(argv=None):
    """Measure, print the tables and claims, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round of two imports")
    parser.add_argument("--restart", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.restart:
        return run_restart(arguments.restart)
    names, quick = list(IMPORTS), arguments.quick
    rows = measure(names[:2], 1) if quick else measure(names, 15)
    restarts = [] if quick else measure_restarts(5)
    if restarts:
        show(restarts, [])
    show(rows, judge([*rows, *restarts]))
    return [*rows, *restarts]


if __name__ == "__main__":
    main()
