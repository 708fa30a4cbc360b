import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf

TX = optax.sgd(0.1)


def loss(params, batch, key):
    return sf.mean(params["w"] * jnp.log(batch["x"]))


STEP = sf.make_train_step(loss, TX)


def start():
    return sf.init_state({"w": jnp.ones(())}, TX, jax.random.key(0))


def good(count=3):
    return [{"x": np.linspace(1, 2, 8, dtype=np.float32) + i} for i in range(count)]


def with_rows(*rows, value=0.0):
    batch = good(1)[0]
    batch["x"][list(rows)] = value
    return batch


def run(batches, step=STEP, state=None, **options):
    return sf.fit(step, start() if state is None else state, batches, **options).capsule


def test_it_tells_a_person_what_happened():
    found = sf.replay(run([*good(), with_rows(2)]), STEP, state=start())
    first, examples, where, leaves, row = str(found).splitlines()
    assert first == "step 4: reproduced; not finite: train/grad_norm, train/loss"
    assert (examples, leaves, row) == ("examples: row 2", "leaves: params/w", "row 2: x=0.0")
    assert where.startswith("where: log made inf at ")
    assert where.endswith("(loss)")


def test_many_leaves_are_counted():
    found = sf.Replay(1, False, {}, (), 1, ((1, 4),), tuple("abcdefghij"), "", ("and so on",))
    assert str(found).splitlines() == [
        "step 1: not reproduced; not finite: nothing",
        "examples: rows 1, 4, only together",
        "leaves: a, b, c, d, e, f, g, h, and 2 more",
        "and so on",
    ]


def test_rows_that_are_bad_only_together_are_told():
    def pairs(params, batch, key):
        return sf.mean(params["w"] / (6 - jnp.abs(batch["x"]).max() - batch["x"].min()))

    step = sf.make_train_step(pairs, TX)
    x = np.float32([0, 0, 4, 0, 0, 0, 0, 0]), np.float32([2, 3.5, 4, *[3.5] * 5])
    found = sf.replay(run([{"x": x[0]}, {"x": x[1]}], step), step, state=start())
    assert found.examples == ((0, 2),)


def test_where_every_row_does_it_they_are_not_to_blame():
    found = sf.replay(run([with_rows(*range(8))]), STEP, state=start())
    assert len(found.examples) == 8
    assert found.said[0].startswith("8 of 8 rows make it go wrong: look at what they share")


def test_of_many_rows_the_first_are_told():
    batch = {"x": np.zeros(64, np.float32)}
    found = sf.replay(run([batch]), STEP, state=start())
    assert found.examples == tuple((row,) for row in range(16))
    assert found.said[0].startswith("more than 16 of 64 rows")


def test_without_rows_it_says_why():
    def odd(params, batch, key):
        return sf.mean(params["w"] * jnp.log(batch["x"])), {"y": sf.mean(batch["y"])}

    step = sf.make_train_step(odd, TX)
    capsule = run([{"x": np.zeros(4, np.float32), "y": np.zeros(3, np.float32)}], step)
    found = sf.replay(capsule, step, state=start())
    assert found.examples == ()
    assert found.said[0].startswith("examples: cannot be told apart: batch: expected one leading")
    assert found.where.startswith("log made inf")


def test_what_the_batch_holds_is_told():
    found = sf.replay(run([*good(), with_rows(5, value=np.nan)]), STEP, state=start())
    assert found.examples == ((5,),)
    assert found.where == "batch/x is not finite as it came"


def test_another_step_does_not_reproduce_it():
    other = sf.make_train_step(lambda p, b, key: sf.mean(p["w"] * b["x"]), TX)
    found = sf.replay(run([*good(), with_rows(2)]), other, state=start())
    assert not found.reproduced
    assert (found.examples, found.where, found.leaves) == ((), "", ())
    assert any(line.startswith("train/loss was -inf, and is ") for line in found.said)


def test_a_step_without_the_metric_is_refused():
    def bare(state, batch):
        return state, {"other": sf.mean(batch["x"])}

    capsule = run([with_rows(2)])
    with pytest.raises(sf.ConfigError, match="whose metrics have loss, got one with other"):
        sf.replay(capsule, bare, state=start())


@pytest.mark.parametrize("donate", [(), (0,)])
def test_a_jitted_step_works_as_well(donate):
    step = jax.jit(STEP, donate_argnums=donate)
    found = sf.replay(run([*good(), with_rows(2)], step), step, state=start())
    assert (found.reproduced, found.examples) == (True, ((2,),))
    assert found.where.startswith("log made inf")


def test_a_compiled_step_works_as_well():
    step = sf.compile_step(STEP, start(), good(1)[0])
    found = sf.replay(run([*good(), with_rows(2)], step), step, state=start())
    assert (found.reproduced, found.examples) == (True, ((2,),))
    assert found.where.startswith("log made inf")


def test_a_replay_takes_nothing_from_what_it_is_given(tmp_path):
    batches = sf.batches({"x": np.concatenate([b["x"] for b in [*good(), with_rows(2)]])}, 8)
    capsule = run(batches, steps=4)
    at, state = batches.get_state(), start()
    for _ in range(2):
        assert sf.replay(capsule, STEP, state=state).reproduced
    assert batches.get_state() == at


def test_several_processes_are_refused(monkeypatch):
    capsule = run([with_rows(2)])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(sf.ConfigError, match="replay: expected one process, got 2"):
        sf.replay(capsule, STEP, state=start())
