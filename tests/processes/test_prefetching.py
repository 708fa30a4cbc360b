"""Each of two processes prefetches its own rows while they train together."""

from . import launch


def prefetches(start, wrong):
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


def test_prefetched_rows_of_processes_form_one_batch(processes):
    one, other = processes.run(prefetches, False)
    alone = launch.run_alone(prefetches, False)
    assert one == other == alone
    assert alone.count(",") == 9


def prefetches_new_rows(start):
    """Use each batch in a collective while the thread shards the next, of a new number of rows."""
    import time

    import jax
    import numpy as np

    import stepfold as sf

    start()
    mesh = sf.make_mesh()

    def batches():
        for count in range(1, 13):
            time.sleep(0.01 * (count % 3) * jax.process_index())
            yield np.full((2 * count, 200), count, np.float32)

    total = jax.jit(lambda batch: batch.sum() / 200)
    with sf.prefetch(batches(), sharding=lambda rows: sf.shard_batch(rows, mesh), size=4) as stream:
        sums = [total(batch) for batch in stream]
    print([int(value) for value in sums] == [4 * count**2 for count in range(1, 13)])


def test_new_numbers_of_rows_in_the_thread_need_no_collective(processes):
    assert processes.run(prefetches_new_rows, timeout=40) == ["True\n"] * 2


def test_sharding_over_processes_is_refused_without_communication(processes):
    for output in processes.run(prefetches, True):
        assert output.startswith("sharding: expected one over the devices of this process, got one")
