"""Several processes replace the state together, or not at all."""

import json

import numpy as np


def fits(start, folder):
    """Fit with a hook that scales the weights: in one go, resumed, and where only one asks."""
    import json

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import stepfold as sf

    start()
    me, tx, mesh = jax.process_index(), optax.adam(0.02), sf.make_mesh()
    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    init = lambda key: sf.init_state({"w": jnp.ones(8)}, tx, key)
    plan = sf.make_sharding(jax.eval_shape(init, jax.random.key(0)), mesh, sf.fsdp(min_size=1))
    step = sf.make_train_step(lambda p, b, key: sf.mean((b @ p["w"] - 1) ** 2), tx)

    class Scale:
        def __init__(self, replaces_state=True, only=None):
            self.replaces_state, self.only = replaces_state, only

        def __call__(self, event):
            if event.kind != "eval" or self.only not in (None, me):
                return None
            params = jax.tree.map(lambda leaf: 0.5 * leaf, event.state.params)
            return sf.Replace(event.state._replace(params=params), "halved")

    def fit(name, steps, hook):
        state = sf.init_state({"w": jnp.ones(8)}, tx, jax.random.key(0), sharding=plan)
        return sf.fit(
            step, state, sf.batches(x, 8, seed=0), steps=steps, run_dir=f"{folder}/{name}",
            checkpoints=sf.Checkpoints(every=4), hooks=hook,
            evaluation=sf.Evaluation(lambda state: {}, every=3),
        )  # fmt: skip

    shards = lambda result: [
        np.asarray(shard.data).tolist() for shard in result.state.params["w"].addressable_shards
    ]
    found = [shards(fit("whole", 12, Scale()))]
    fit("cut", 9, Scale())
    found.append(shards(fit("cut", 12, Scale())))
    for hook in (Scale(only=1), Scale(replaces_state=False)):
        try:
            fit(f"wrong-{hook.replaces_state}", 12, hook)
        except sf.StepfoldError as error:
            found.append(str(error))
    print(json.dumps(found))


def test_two_processes_replace_the_state_together(processes, tmp_path):
    for text in processes.run(fits, str(tmp_path)):
        whole, resumed, one, undeclared = json.loads(text)
        assert whole == resumed
        assert np.abs(whole).max() < 0.6
        assert "expected the same replacements in every process, got" in one
        assert "expected replaces_state = True on a hook that returns Replace" in undeclared
    notes = json.loads((tmp_path / "whole" / "run.json").read_text())["replacements"]
    assert notes == [[step, "halved"] for step in (3, 6, 9, 12)]
