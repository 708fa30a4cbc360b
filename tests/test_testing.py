"""The checks of `stepfold.testing` pass what is right, and name what is wrong."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.small import full_but

import stepfold as sf
from stepfold import testing
from stepfold.errors import ConfigError

pytestmark = pytest.mark.usefixtures("standard_promotion")
KEY = jax.random.key(0)
PARAMS = {"w": jnp.linspace(-1.0, 1.0, 4), "b": jnp.array(0.3)}
RANDOM = np.random.default_rng(0)
BATCH = {
    "x": RANDOM.normal(size=(8, 6, 4)).astype(np.float32),
    "tokens": np.arange(6)[None] < np.array([6, 1, 2, 6, 3, 5, 1, 4])[:, None],
    "mask": np.array([1, 1, 1, 1, 1, 1, 1, 0], bool),
}


def errors(params, batch):
    return jnp.tanh(batch["x"] @ params["w"] + params["b"]) ** 2


def good_loss(params, batch, key):
    where = batch["tokens"] & batch["mask"][:, None]
    return sf.mean(errors(params, batch), where), {"largest": sf.mean(errors(params, batch), where)}


def mean_of_means(params, batch, key):
    """Average the tokens of each row, and then all rows of the batch, as a scalar."""
    where = batch["tokens"] & batch["mask"][:, None]
    return jnp.sum(errors(params, batch) * where) / jnp.sum(where)


def ignores_the_mask(params, batch, key):
    return sf.mean(errors(params, batch), batch["tokens"])


def one_key(params, batch, key):
    kept = jax.random.bernoulli(jax.random.key(7), 0.5, batch["x"].shape)
    return sf.mean(errors(params, {"x": batch["x"] * kept}), batch["mask"][:, None])


def draws_from_numpy(params, batch, key):
    return good_loss(params, batch, key)[0].replace(
        total=good_loss(params, batch, key)[0].total + np.random.default_rng().normal()
    )


def metric_ignores_the_mask(params, batch, key):
    loss, _ = good_loss(params, batch, key)
    return loss, {"error": sf.mean(errors(params, batch))}


def stops_the_gradient(params, batch, key):
    where = batch["tokens"] & batch["mask"][:, None]
    stopped = {**params, "b": jax.lax.stop_gradient(params["b"])}
    return sf.mean(errors(stopped, batch), where)


def divides_by_zero(params, batch, key):
    where = batch["tokens"] & batch["mask"][:, None]
    return sf.mean(errors(params, batch) / (batch["x"][..., 0] != 0), where)


def depends_on_its_place(params, batch, key):
    places = jnp.arange(len(batch["x"]))[:, None]
    return sf.mean(errors(params, batch) * places, batch["tokens"] & batch["mask"][:, None])


def overflows_in_bf16(params, batch, key):
    where = batch["tokens"] & batch["mask"][:, None]
    big = batch["x"] @ params["w"] * 1e3
    return sf.mean((big + params["w"][0] - big) ** 2 + 1e-3, where)


def dropout(params, batch, key):
    kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return good_loss(params, {**batch, "x": batch["x"] * kept}, key)


ALL = ["deterministic", "finite", "order", "split", "padding", "slope", "bf16"]


def test_a_good_loss_keeps_all_laws():
    assert testing.check_loss(good_loss, PARAMS, BATCH) == ALL


def test_a_plain_mean_of_rows_keeps_all_laws_without_a_mask():
    loss = lambda params, batch, key: jnp.mean(errors(params, batch))
    assert testing.check_loss(loss, PARAMS, {"x": BATCH["x"]}) == [
        name for name in ALL if name != "padding"
    ]


MISTAKES = [
    (mean_of_means, "split: ", "return sf.mean"),
    (ignores_the_mask, "padding: ", "give the mask to each mean"),
    (stops_the_gradient, "slope: ", "stop_gradient"),
    (overflows_in_bf16, "bf16: ", "in float32"),
    (metric_ignores_the_mask, "padding: ", "give the mask to each mean"),
    (one_key, "order: ", "from the key alone"),
    (draws_from_numpy, "deterministic: ", "not from numpy"),
    (depends_on_its_place, "order: ", "depend on its place"),
]


@pytest.mark.parametrize(("loss", "law", "advice"), full_but(MISTAKES[:2], MISTAKES))
def test_a_mistake_is_named_with_its_law(loss, law, advice):
    with pytest.raises(testing.LawError, match="not hold") as error:
        testing.check_loss(loss, PARAMS, BATCH)
    (line,) = [line for line in str(error.value).splitlines() if line.strip().startswith(law)]
    assert advice in line


def test_rows_that_show_it_are_named():
    """Only rows with different numbers of tokens have another mean than that of their means."""
    with pytest.raises(testing.LawError, match=r"split: .*, see rows \d, \d;"):
        testing.check_loss(mean_of_means, PARAMS, BATCH)


def test_rows_that_make_nan_are_named():
    batch = {**BATCH, "x": BATCH["x"].copy()}
    batch["x"][3, 2] = 0
    with pytest.raises(testing.LawError, match="finite: .* see rows 3;"):
        testing.check_loss(divides_by_zero, PARAMS, batch)


def test_a_random_loss_is_checked_for_what_it_can_keep():
    assert testing.check_loss(dropout, PARAMS, BATCH) == ["deterministic", "finite", "bf16"]


def test_a_model_state_is_passed_on():
    def loss(params, batch, key, count):
        return sf.mean(errors(params, batch)), {}, count + 1

    laws = testing.check_loss(loss, PARAMS, BATCH, stateful=True, model_state=jnp.array(0))
    assert laws == ["deterministic", "finite", "bf16"]


def test_a_batch_without_rows_is_refused():
    with pytest.raises(ConfigError, match="batch: expected arrays of one number of rows"):
        testing.check_loss(good_loss, PARAMS, {"x": np.ones(())})


DATA = [{"x": np.full(3, row, np.float32)} for row in range(20)]


@pytest.mark.parametrize("options", [{"epochs": 1}, {"remainder": "pad", "epochs": 2}, {}])
def test_batches_keep_all_laws(options):
    make = lambda: sf.batches(DATA, 4, seed=0, **options)
    assert testing.check_batches(make) == ["again", "form", "resume", "source"]


def test_batches_of_workers_are_the_same():
    make = lambda: sf.batches(DATA, 4, seed=0)
    assert testing.check_batches(make, workers=1)[-1] == "workers"


class Careless:
    """Batches with a position that does not decide the next batch."""

    def __init__(self, forgets=False, grows=False):
        self.count, self.drawn, self.forgets, self.grows = 0, 0, forgets, grows

    def __iter__(self):
        return self

    def __next__(self):
        self.count += 1
        self.drawn += 1
        return np.full(2 + self.grows * (self.count == 5), self.drawn, np.float32)

    def get_state(self):
        return {"count": self.count, "drawn": self.drawn}

    def set_state(self, state):
        self.count = state["count"]
        self.drawn = 0 if self.forgets else state["drawn"]


def test_a_generator_that_is_used_twice_is_named():
    generator = (np.full(2, number) for number in itertools.count())
    with pytest.raises(testing.LawError, match="again: the array .* in batch 0; make a new source"):
        testing.check_batches(lambda: generator)


def test_a_position_that_forgets_is_named():
    with pytest.raises(testing.LawError, match="resume: ") as error:
        testing.check_batches(lambda: Careless(forgets=True))
    assert "let get_state hold all that decides" in str(error.value)


def test_another_shape_is_named():
    with pytest.raises(testing.LawError, match=r"form: batch 4: .*float32\[3\]"):
        testing.check_batches(lambda: Careless(grows=True))


def test_a_transform_in_place_is_named():
    source = np.arange(20, dtype=np.float32).reshape(20, 1)

    class Source:
        def __len__(self):
            return len(source)

        def __getitem__(self, index):
            source[index] *= 2
            return {"x": source[index].copy()}

    with pytest.raises(testing.LawError, match="source: ") as error:
        testing.check_batches(lambda: sf.batches(Source(), 4, seed=0))
    assert "write into" in str(error.value)


def linear_step():
    loss = lambda params, batch, key: sf.mean((batch @ params - 1) ** 2)
    return sf.make_train_step(loss, optax.adam(1e-2))


def linear_state():
    return sf.init_state(jnp.linspace(0, 1, 16), optax.adam(1e-2), KEY)


def test_layouts_give_the_same_to_rounding():
    batch = RANDOM.normal(size=(16, 16)).astype(np.float32)
    meshes = [sf.make_mesh(), sf.make_mesh((-1,), ("data",))]
    assert len(testing.check_layouts(linear_step(), linear_state(), batch, meshes)) == 2


@pytest.mark.full
def test_a_step_that_depends_on_the_mesh_is_named():
    def step(state, batch):
        devices = len(batch.sharding.device_set) if hasattr(batch, "sharding") else 1
        return linear_step()(state, batch * devices)

    batch = RANDOM.normal(size=(16, 16)).astype(np.float32)
    mesh = sf.make_mesh((2, 4), ("data", "fsdp"))
    with pytest.raises(testing.LawError, match="mesh .* of one device"), jax.disable_jit():
        testing.check_layouts(step, linear_state(), batch, [mesh])


def test_bits_are_asked_for_without_rtol():
    batch = RANDOM.normal(size=(64, 16)).astype(np.float32)
    mesh = sf.make_mesh((-1,), ("data",))
    with pytest.raises(testing.LawError, match="of one device"):
        testing.check_layouts(linear_step(), linear_state(), batch, [mesh], rtol=None)


def make_run(careless=False):
    """Return a call of `fit` that can be sent to another process, with the data that it uses."""
    rows = RANDOM.normal(size=(64, 4)).astype(np.float32)

    def run(directory):
        import os

        import jax
        import jax.numpy as jnp
        import numpy as np
        import optax

        import stepfold as sf

        data = rows
        if careless:
            data = np.random.default_rng(os.getpid()).normal(size=rows.shape).astype(np.float32)
        tx = optax.adam(1e-2)
        step = sf.make_train_step(lambda params, x, key: sf.mean((x @ params - 1) ** 2), tx)

        def pause(event):
            import time

            time.sleep(0.05)  # so that a kill is in time

        sf.fit(
            step,
            sf.init_state(jnp.ones(4), tx, jax.random.key(0)),
            sf.batches(data, 8, seed=0),
            steps=60,
            run_dir=directory,
            checkpoints=sf.Checkpoints(every=20, keep=None),
            hooks=[pause, sf.progress("none")],
        )

    return run


@pytest.mark.parametrize("careless", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_run_is_cut_and_compared(careless):
    run = make_run(careless)
    if careless:
        with pytest.raises(
            testing.LawError, match="(?s)^check_resume: the run that was cut .*contents of"
        ):
            testing.check_resume(run, cuts=1)
    else:
        testing.check_resume(run, cuts=2)


def test_a_run_that_fails_without_a_cut_is_shown():
    def run(directory):
        raise ValueError("of the user")

    with pytest.raises(ConfigError, match="(?s)^run: its process ended with code 1:.*of the user"):
        testing.check_resume(run)


def test_a_run_that_takes_too_long_is_ended():
    def run(directory):
        import time

        time.sleep(60)

    with pytest.raises(ConfigError, match="^timeout: the run did not end in time; give it more"):
        testing.check_resume(run, timeout=0.5)
