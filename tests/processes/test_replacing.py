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


def mixes(start, folder):
    """Fit with a hook that changes the weights of a mixture: in one go, resumed, and by one."""
    import json

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import stepfold as sf

    start()
    me, tx, mesh = jax.process_index(), optax.sgd(0.1), sf.make_mesh()
    init = lambda key: sf.init_state({"w": jnp.ones(8)}, tx, key)
    plan = sf.make_sharding(jax.eval_shape(init, jax.random.key(0)), mesh)
    step = sf.make_train_step(lambda p, b, key: sf.mean(p["w"].sum() * b), tx)
    parts = {"a": (np.arange(64, dtype=np.float32), 1), "b": (-np.arange(64, dtype=np.float32), 1)}
    changes = {4: {"a": 1, "b": 3}, 8: {"a": 1, "b": 0}}

    class Change:
        replaces_state = True

        def __init__(self, only=None):
            self.only = only

        def __call__(self, event):
            if event.is_train and event.step in changes and self.only in (None, me):
                return sf.Reweight(changes[event.step], "time for it")

    def fit(name, steps, hook, prefetch):
        batches = sf.batches(sf.mix(parts), 8)
        batches = sf.prefetch(batches) if prefetch else batches
        state = sf.init_state({"w": jnp.ones(8)}, tx, jax.random.key(0), sharding=plan)
        result = sf.fit(
            step, state, batches, steps=steps, run_dir=f"{folder}/{name}", log_every=4,
            checkpoints=sf.Checkpoints(every=5), hooks=hook,
        )  # fmt: skip
        return weights(result), batches.get_state()

    def plain(first, second):
        """Run with the changes as stages, from these batches on."""
        stages = [(8 * first, changes[4]), (8 * second, changes[8])]
        state = sf.init_state({"w": jnp.ones(8)}, tx, jax.random.key(0), sharding=plan)
        return weights(sf.fit(step, state, sf.batches(sf.mix(parts, stages=stages), 8), steps=12))

    weights = lambda result: np.asarray(result.state.params["w"].addressable_data(0)).tolist()
    found = [fit("whole", 12, Change(), False)]
    fit("cut", 7, Change(), True)
    found.append(fit("cut", 12, Change(), True))
    # Metrics are read at the save of step 5, and 2 steps after step 8.
    found.append([plain(5, 10), plain(4, 8)])
    try:
        fit("wrong", 12, Change(only=1), False)
    except sf.StepfoldError as error:
        found.append(str(error))
    print(json.dumps(found))


def test_two_processes_change_the_weights_of_a_mixture_together(processes, tmp_path):
    for text in processes.run(mixes, str(tmp_path)):
        (whole, position), (resumed, later), (expected, earlier), one = json.loads(text)
        assert whole == resumed == expected != earlier
        assert position == later
        assert position["weights"] == [[40, ["1", "3"]], [80, ["1", "0"]]]
        assert "expected the same replacements in every process, got" in one
