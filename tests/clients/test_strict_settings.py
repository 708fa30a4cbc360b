"""Runs with everything on, under the strict settings of jax and Python that some users train with.

The functions below are what a user writes. They follow the settings themselves, so that whatever
the settings forbid is in the library.
"""

import contextlib
import inspect
import io
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.processes.launch import clean_environ

import stepfold as sf
from stepfold.adapter import Trainer, TrainingArguments
from stepfold.tree import named_leaves

ROOT = Path(__file__).parent.parent.parent
LIB = Path(sf.__file__).parent.parent
RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(64, 8)).astype(np.float32),
    "y": RNG.integers(0, 4, 64).astype(np.int32),
}
TEST = {name: values[:20] for name, values in DATA.items()}

SETTINGS = {
    "rank promotion": {"jax_numpy_rank_promotion": "raise"},
    "transfer guard": {"jax_transfer_guard": "disallow"},
    "debug nans": {"jax_debug_nans": True},
    "x64": {"jax_enable_x64": True},
}
TOGETHER = {name: value for values in SETTINGS.values() for name, value in values.items()}
WITHOUT_NANS = {name: value for name, value in TOGETHER.items() if name != "jax_debug_nans"}


@contextlib.contextmanager
def using(settings):
    """Set flags of jax for all threads."""
    before = {name: jax.config.values[name] for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        # Once a thread has left such a context, as replays do, jax ignores the flag in it.
        with jax.debug_nans(settings.get("jax_debug_nans", False)):
            yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        if "jax_transfer_guard" in settings:  # which sets three others
            for kind in ("host_to_device", "device_to_device", "device_to_host"):
                jax.config.update(f"jax_transfer_guard_{kind}", None)


ALONE = {
    name: pytest.param(values, id=name, marks=pytest.mark.full) for name, values in SETTINGS.items()
}
EACH = [pytest.param(TOGETHER, id="together"), *ALONE.values()]
WITHOUT_DEBUG_NANS = [
    pytest.param(WITHOUT_NANS, id="together"),
    *(param for name, param in ALONE.items() if name != "debug nans"),
]


@pytest.fixture(params=EACH)
def strict(request):
    key = jax.random.key(0)  # jax itself makes it by an implicit transfer
    threads = set(threading.enumerate())
    with using(request.param):
        yield key
    assert not {thread for thread in threading.enumerate() if thread.is_alive()} - threads


def init(key):
    return {"w": jax.random.normal(key, (8, 4), jnp.float32), "b": jnp.zeros((1, 4), jnp.float32)}


def logits_of(params, batch):
    return batch["x"] @ params["w"] + params["b"]


def loss_fn(params, batch, key):
    logits = logits_of(params, batch)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    hit = logits.argmax(-1).astype(jnp.int32) == batch["y"]
    mask = batch.get("mask")
    return sf.mean(nll, mask), {"accuracy": sf.mean(hit, mask)}


def make_optimizer():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    tx = sf.optim.skip_spikes(sf.ema_params(sf.optim.low_precision(tx), 0.9), window=4)
    return sf.dynamic_loss_scale(tx)


def make_step(tx, **options):
    step = sf.make_train_step(loss_fn, tx, **options)
    step = sf.observe(step, norm=lambda state: optax.tree.norm(state.params))
    return sf.debug.check_step(step, every=4)


class Crash(Exception):
    """What a hook raises."""


class Once:
    """Return or raise something at the first train event of a step."""

    provides = ()

    def __init__(self, step, outcome):
        self.step, self.outcome = step, outcome
        self.goes_back = isinstance(outcome, sf.hooks.GoBack)

    def __call__(self, event):
        if not event.is_train or event.step != self.step or self.outcome is None:
            return None
        outcome, self.outcome = self.outcome, None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


@pytest.mark.full
@pytest.mark.parametrize("kind", ["f16", pytest.param("bf16", marks=pytest.mark.full)])
def test_a_run_with_everything_on(strict, tmp_path, kind):
    train_with_everything(strict, tmp_path, kind)


def train_with_everything(key, folder, kind):
    """Train until an exception, resume, go back once, and restore the last step."""
    mesh = sf.make_mesh((4, 2), ("dp", "fsdp"))
    tx = make_optimizer() if kind == "f16" else sf.ema_params(optax.adamw(1e-2), 0.9)
    plan = sf.make_sharding(jax.eval_shape(lambda key: sf.init_state(init, tx, key), key), mesh)
    step = make_step(tx, accumulate=2, precision=kind, skip_nonfinite=True)
    measure = sf.make_eval_step(loss_fn, precision=kind)
    shown = io.StringIO()

    def measure_average(state, batch):
        return measure(state._replace(params=sf.get_ema(state)), batch)

    def fit(*hooks):
        tensorboard = sf.writers.tensorboard(folder / "tensorboard")
        batches = sf.batches(DATA, 16, seed=0)
        with sf.prefetch(batches, sharding=lambda batch: sf.shard_batch(batch, mesh)) as stream:
            return sf.fit(
                step,
                sf.init_state(init, tx, key, sharding=plan),
                stream,
                steps=24,
                run_dir=folder / "run",
                checkpoints=sf.Checkpoints(
                    every=8,
                    best="eval/loss",
                    temporary=sf.Temporary(folder / "local", every=2),
                ),
                evaluation=[
                    sf.Evaluation(
                        measure_average,
                        lambda: sf.batches(TEST, 8, epochs=1, remainder="drop"),
                        every=8,
                    ),
                    sf.Evaluation(
                        jax.jit(lambda state: {"norm": optax.tree.norm(state.params)}),
                        every=8,
                        name="size",
                    ),
                ],
                hooks=[
                    sf.hooks.on_spike(window=4, deviations=1000.0),
                    sf.hooks.on_nonfinite(action="go_back"),
                    sf.hooks.stop_early("eval/loss", patience=10, keep_state=True),
                    sf.hooks.stop_on_corruption(),
                    sf.hooks.every(8, sf.hooks.weight_statistics(writer=tensorboard)),
                    sf.hooks.throughput(),
                    sf.hooks.memory_use,
                    sf.progress("json", file=shown),
                    sf.hooks.watchdog(600),
                    sf.hooks.profile(100, 1, folder / "profile"),
                    sf.log_to(
                        sf.writers.async_writer(
                            sf.writers.multi_writer(
                                tensorboard, sf.writers.jsonl(folder / "table.csv", csv=True)
                            )
                        )
                    ),
                    *hooks,
                ],
                log_every=4,
                steps_per_call=2,
            )

    with pytest.raises(Crash) as caught:
        fit(Once(12, Crash()))
    assert caught.value.result.steps == 12
    result = fit(Once(20, sf.hooks.GoBack(skip=2)))
    assert result.resumed == 18  # a temporary step
    assert (result.steps, result.stop_reason.kind) == (24, "completed")
    assert result.history["train/skipped"][-1] == 0
    assert result.history["train/corrupt"][-1] == 0
    assert result.history["eval/loss"].steps == [8, 16, 24]
    like = jax.eval_shape(lambda key: sf.init_state(init, tx, key), key)
    restored = sf.restore(folder / "run" / "checkpoints", like)
    check_same_bits(restored.state, result.state)


def check_same_bits(state, other):
    for (name, leaf), (_, wanted) in zip(named_leaves(state), named_leaves(other), strict=True):
        if name == "key":
            leaf, wanted = map(jax.random.key_data, (leaf, wanted))
        assert np.array_equal(*jax.device_get((leaf, wanted)), equal_nan=True), name


def fit_bad(step, tx, key, folder):
    """Train on batches of which the third, with the rows 32 to 47, has an infinite number."""
    bad = {**DATA, "x": DATA["x"].copy()}
    bad["x"][37, 3] = np.inf
    return sf.fit(
        step,
        sf.init_state(init, tx, key),
        sf.batches(bad, 16, epochs=1),
        run_dir=folder,
        checkpoints=sf.Checkpoints(every=1),
        log_every=1,
    )


@pytest.mark.full
@pytest.mark.parametrize("strict", WITHOUT_DEBUG_NANS, indirect=True)
def test_a_nan_is_replayed(strict, tmp_path):
    tx = optax.adamw(1e-2)
    step = sf.make_train_step(loss_fn, tx)
    result = fit_bad(step, tx, strict, tmp_path)
    assert result.stop_reason.kind == "nonfinite"
    read = sf.debug.read_capsule(result.capsule.path)
    state, batches = sf.init_state(init, tx, strict), result.capsule.batches
    for replayed in (
        sf.debug.replay(result.capsule, step),
        sf.debug.replay(read, step, state=state, batches=batches),
    ):
        assert replayed.reproduced
        assert replayed.examples == ((5,),)


@pytest.mark.full
@pytest.mark.parametrize("strict", [EACH[0], ALONE["debug nans"]], indirect=True)
def test_a_nan_under_debug_nans_ends_the_run_after_a_save(strict, tmp_path):
    tx = optax.adamw(1e-2)
    with pytest.raises(FloatingPointError) as caught:
        fit_bad(sf.make_train_step(loss_fn, tx), tx, strict, tmp_path)
    result = caught.value.result
    assert result.steps == 2
    assert "jax_debug_nans ended the run after step 2" in "".join(caught.value.__notes__)
    restored = sf.restore(tmp_path / "checkpoints", result.state)
    assert restored.step == 2
    check_same_bits(restored.state, result.state)


@pytest.mark.full
@pytest.mark.parametrize("strict", [EACH[0], ALONE["debug nans"]], indirect=True)
def test_a_skipped_nan_is_no_error_under_debug_nans(strict, tmp_path):
    tx = optax.adamw(1e-2)
    step = sf.make_train_step(loss_fn, tx, skip_nonfinite=True)
    result = fit_bad(step, tx, strict, tmp_path)
    assert result.steps == 4
    assert result.history["train/skipped"] == [0, 0, 1, 0]


def in_development_mode(folder):
    import sys
    import warnings

    import jax
    import tests.clients.test_strict_settings as strict

    assert sys.flags.dev_mode
    warnings.simplefilter("error")  # as -W error, but for the packages that are imported above
    jax.config.update("jax_num_cpu_devices", 8)
    key = jax.random.key(0)
    with strict.using(strict.TOGETHER):
        strict.train_with_everything(key, folder, "bf16")
    print("done")


@pytest.mark.full
def test_a_run_with_everything_on_in_development_mode(tmp_path):
    source = textwrap.dedent(inspect.getsource(in_development_mode))
    script = tmp_path / "script.py"
    script.write_text(
        f"from pathlib import Path\n{source}\nin_development_mode(Path({str(tmp_path)!r}))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-X", "dev", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**clean_environ(), "PYTHONPATH": os.pathsep.join(map(str, (ROOT, LIB)))},
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.splitlines()[-1] == "done"
    assert "Exception ignored" not in ended.stderr


@pytest.mark.full
def test_tools_around_a_run(strict, tmp_path):
    """Compiled and described ahead of time, evaluated, averaged, exported and loaded."""
    tx = optax.adamw(1e-2)
    state, batch = sf.init_state(init, tx, strict), next(sf.batches(DATA, 16))
    step = sf.make_train_step(loss_fn, tx)
    assert "flops" in str(sf.describe(step, state, batch)).lower()
    compiled = sf.compile_step(step, state, batch)
    for number in (1, 2):
        state, _ = compiled(state, jax.device_put(batch))
        sf.save(tmp_path, state, step=number)
    measure = sf.make_eval_step(loss_fn)
    numbers = sf.evaluate(measure, state, sf.batches(TEST, 8, epochs=1, remainder="pad"))
    assert numbers.keys() == {"loss", "accuracy"}
    like = jax.eval_shape(lambda key: sf.init_state(init, tx, key), strict)
    averaged = sf.checkpoint.average_checkpoints(tmp_path, [1, 2], like.params)
    sf.checkpoint.export_params(tmp_path / "model.safetensors", averaged)
    loaded = sf.checkpoint.load_params(tmp_path / "model.safetensors", like.params)
    check_same_bits(loaded, averaged)
    assert "mean" in sf.inspect.parameter_table(state.params, stats=True).lower()


@pytest.mark.full
def test_the_trainer(strict, tmp_path):
    arguments = TrainingArguments(
        total_batch_size=16,
        num_train_epochs=3,
        learning_rate=1e-2,
        log_steps=2,
        eval_steps=4,
        save_steps=4,
        output_dir=str(tmp_path),
        progress_bar_type="json",
        weight_distribution_log_steps=4,
    )
    trainer = Trainer(arguments, model=init, dataset_train=DATA, dataset_eval=TEST, loss_fn=loss_fn)
    output = trainer.train()
    assert int(jax.device_get(output.state.step)) == 12
    assert trainer.evaluate().keys() == {"eval_loss", "eval_accuracy"}
