"""Each of two processes reads its own rows ahead, while they train together."""

from . import launch


def reads_ahead(start, wrong):
    import jax
    import numpy as np

    import stepfold as sf

    start()
    mesh = sf.make_mesh()
    if wrong:
        spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
        try:
            sf.prefetch([], sharding=spread)
        except sf.ConfigError as error:
            print(error)
        return
    batches = sf.batches({"x": np.arange(40.0)}, 8, seed=0, epochs=2)
    total = jax.jit(lambda batch: (batch["x"] * np.arange(8)).sum())
    with sf.prefetch(batches, sharding=lambda batch: sf.shard_batch(batch, mesh)) as stream:
        print([float(total(batch)) for batch in stream])


def test_what_processes_read_ahead_is_one_batch():
    one, other = launch.run_processes(reads_ahead, n=2, args=(False,))
    (alone,) = launch.run_processes(reads_ahead, n=1, args=(False,))
    assert one == other == alone
    assert alone.count(",") == 9


def test_a_sharding_over_processes_is_refused_before_it_asks_the_others():
    outputs = launch.run_processes(reads_ahead, n=2, args=(True,))
    for output in outputs:
        assert output.startswith("sharding: expected one over the devices of this process, got one")
