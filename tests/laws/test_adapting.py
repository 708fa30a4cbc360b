"""The same run through the adapter, through `fit` and by hand: the same bits."""

import jax
import numpy as np
import pytest
from tests.adapter import digits
from tests.small import full_but

import stepfold as sf
from stepfold.adapter import Trainer, make_optimizer, make_schedule

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*donated"),
    pytest.mark.usefixtures("standard_promotion"),
]
OPTIONS = {"gradient_accumulation_steps": 4, "scheduler": "cosine", "warmup_steps": 5}
SETTINGS = {
    "one device": {},
    "bf16": {"mixed_precision": "bf16"},
    "eight devices": {"sharding_array": (2, -1, 1, 1), "total_batch_size": 32},
}


class Watched(Trainer):
    def on_step_start(self, state, step):
        return state

    def on_step_end(self, state, metrics, step):
        return state, metrics


def parts(options):
    arguments = digits.arguments(**options)
    tx = make_optimizer(arguments, make_schedule(arguments, 20))
    key = jax.random.key(arguments.seed)
    plan = None
    if "sharding_array" in options:
        mesh = sf.make_mesh(options["sharding_array"])
        shape = jax.eval_shape(lambda key: sf.init_state(digits.init, tx, key), key)
        plan = sf.make_sharding(shape, mesh)
    state = sf.init_state(digits.init, tx, key, sharding=plan)
    precision = options.get("mixed_precision", "f32")
    step = sf.make_train_step(digits.loss_fn, tx, accumulate=4, precision=precision)
    masked = {**digits.TRAIN, "mask": np.ones(200, bool)}
    batches = sf.batches(masked, arguments.total_batch_size, seed=arguments.seed)
    return step, state, batches


def through_fit(options):
    step, state, batches = parts(options)
    return sf.fit(step, state, batches, steps=20).state


def by_hand(options):
    step, state, batches = parts(options)
    step = sf.compile_step(step, state, batches.at(0))
    for _ in range(20):
        state, _ = step(state, next(batches))
    return state


@pytest.mark.full
@pytest.mark.parametrize("name", full_but(["one device"], SETTINGS))
def test_a_run_comes_to_the_same_bits_whoever_holds_it(name):
    options = OPTIONS | SETTINGS[name]
    wanted = digits.bits(by_hand(options))
    assert digits.bits(through_fit(options)) == wanted
    assert digits.bits(digits.trainer(**options).train().state) == wanted
    assert digits.bits(digits.trainer(Watched, **options).train().state) == wanted


@pytest.fixture(scope="module")
def wanted():
    with jax.numpy_dtype_promotion("standard"):
        return digits.bits(by_hand(OPTIONS))


@pytest.mark.full
def test_compiled_ahead_of_time_it_comes_to_the_same_bits(wanted):
    trainer = digits.trainer(**OPTIONS)
    assert trainer.compile_aot()
    assert digits.bits(trainer.train().state) == wanted


def test_evaluated_saved_and_shown_it_comes_to_the_same_bits(tmp_path, wanted):
    options = OPTIONS | {
        "output_dir": tmp_path,
        "report_to": ("jsonl",),
        "save_steps": 5,
        "evaluation_strategy": "steps",
        "eval_steps": 5,
        "weight_distribution_log_steps": 10,
        "track_memory": True,
    }
    assert digits.bits(digits.trainer(**options).train().state) == wanted
