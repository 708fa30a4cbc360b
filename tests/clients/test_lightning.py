"""What the page on Lightning says is compared with Lightning."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf

torch = pytest.importorskip("torch")
lightning = pytest.importorskip("lightning")
from lightning.pytorch import callbacks  # noqa: E402
from tests.clients.torch_net import (  # noqa: E402
    TEST,
    TRAIN,
    Rows,
    difference,
    logits_of,
    loss_fn,
    make_net,
    params_of,
)

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
SGD = lambda net: torch.optim.SGD(net.parameters(), lr=0.5)


class Classifier(lightning.LightningModule):
    def __init__(self, optimizer=SGD, schedule=None):
        super().__init__()
        self.net, self.optimizer, self.schedule = make_net(), optimizer, schedule
        self.losses, self.seen, self.evaluated = [], [], []

    def score(self, batch):
        logits = self.net(batch["image"])
        loss = torch.nn.functional.cross_entropy(logits, batch["labels"])
        return loss, (logits.argmax(-1) == batch["labels"]).float().mean()

    def training_step(self, batch, index):
        loss, _ = self.score(batch)
        self.losses.append(float(loss))
        self.seen.append(batch["labels"].tolist())
        return loss

    def validation_step(self, batch, index):
        loss, accuracy = self.score(batch)
        self.log_dict({"val_loss": loss, "val_accuracy": accuracy})

    def on_validation_epoch_end(self):
        loss = float(self.trainer.callback_metrics["val_loss"])
        self.evaluated.append((self.global_step, loss))

    def predict_step(self, batch, index):
        return self.net(batch["image"])

    def configure_optimizers(self):
        optimizer = self.optimizer(self)
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer)}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make_trainer(**options):
    saves = any(isinstance(c, callbacks.ModelCheckpoint) for c in options.get("callbacks", ()))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"accelerator": "cpu", "enable_checkpointing": saves, "max_epochs": 3}
    return lightning.Trainer(**quiet | options)


def theirs(module, batch_size=100, *, shuffle=False, path=None, **options):
    trainer = make_trainer(**options)
    train = torch.utils.data.DataLoader(Rows(TRAIN), batch_size, shuffle=shuffle)
    trainer.fit(module, train, torch.utils.data.DataLoader(Rows(TEST), 128), ckpt_path=path)
    return trainer


def test_batches():
    return sf.batches(TEST, 128, epochs=1, remainder="pad")


test_batches.__test__ = False


def ours(tx, batch_size=100, *, accumulate=1, every=None, epochs=3, hooks=(), ema=False, **options):
    every = {"every_epochs": 1} if every is None else {"every": every}
    return sf.fit(
        sf.make_train_step(loss_fn, tx, accumulate=accumulate),
        sf.init_state(params_of(make_net()), tx, jax.random.key(0)),
        sf.batches(TRAIN, batch_size, remainder="pad"),
        epochs=epochs,
        log_every=1,
        evaluation=sf.Evaluation(sf.make_eval_step(loss_fn), test_batches, ema=ema, **every),
        hooks=[sf.progress("none"), *hooks],
        **options,
    )


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def by_epoch(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)


ROWS = {
    "AdamW": (optax.adamw(1e-2, weight_decay=0.01), {"optimizer": adamw}, {}),
    "gradient_clip_val": (
        optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5)),
        {},
        {"gradient_clip_val": 0.1},
    ),
    "gradient_clip_algorithm": (
        optax.chain(optax.clip(0.01), optax.sgd(0.5)),
        {},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "a scheduler counts epochs": (
        optax.sgd(lambda step: 0.25 * (1 + jnp.cos(jnp.pi * (step // 15) / 3))),
        {"schedule": by_epoch},
        {},
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_losses_weights_and_evaluations_are_equal(row):
    tx, module, options = ROWS[row]
    module = Classifier(**module)
    trainer, result = theirs(module, **options), ours(tx)
    assert trainer.global_step == result.steps == 45
    np.testing.assert_allclose(result.history["train/loss"], module.losses, atol=1e-4)
    assert difference(module, result.state.params) < 1e-3
    steps, losses = zip(*module.evaluated[1:], strict=True)  # the first is the sanity check
    assert [*steps] == result.history["eval/loss"].steps == [15, 30, 45]
    np.testing.assert_allclose(result.history["eval/loss"], losses, atol=1e-4)


def test_accumulation_is_equal_only_for_batches_of_one_size():
    even, uneven = Classifier(), Classifier()
    theirs(even, 100, accumulate_grad_batches=3)
    result = ours(optax.sgd(0.5), 300, accumulate=3)
    assert difference(even, result.state.params) < 1e-4
    # The last of twelve batches has 92 examples, which it divides by 92 and again by 4.
    trainer = theirs(uneven, 128, accumulate_grad_batches=4)
    result = ours(optax.sgd(0.5), 512, accumulate=4)
    assert trainer.global_step == result.steps == 9
    assert difference(uneven, result.state.params) > 1e-3


def test_an_incomplete_accumulation_is_a_smaller_update():
    """Of 15 batches, four are accumulated three times, and then three, also divided by four."""
    module, rate = Classifier(), lambda step: 0.5 * jnp.where(step % 4 == 3, 3 / 4, 1)
    trainer = theirs(module, 100, accumulate_grad_batches=4)
    result = ours(optax.sgd(rate), 400, accumulate=4)
    assert trainer.global_step == result.steps == 12
    assert difference(module, result.state.params) < 1e-4


def test_val_check_interval_counts_batches_and_every_counts_updates():
    module = Classifier()
    options = {"val_check_interval": 6, "num_sanity_val_steps": 0}
    theirs(module, accumulate_grad_batches=3, max_epochs=1, **options)
    assert [step for step, _ in module.evaluated] == [2, 4]
    result = ours(optax.sgd(0.5), 300, accumulate=3, every=2, epochs=1)
    assert result.history["eval/loss"].steps == [2, 4, 5]


def test_early_stopping_and_the_best_checkpoints():
    module = Classifier(lambda net: torch.optim.SGD(net.parameters(), lr=2.5))
    saves = callbacks.ModelCheckpoint("theirs", monitor="val_loss", save_top_k=2, filename="{step}")
    stop = callbacks.EarlyStopping("val_loss", patience=2)
    trainer = theirs(module, max_epochs=40, callbacks=[saves, stop])
    early = sf.hooks.stop_early("eval/loss", patience=2)
    checkpoints = sf.Checkpoints(every_epochs=1, keep=1, best="eval/loss", keep_best=2)
    result = ours(optax.sgd(2.5), epochs=40, hooks=[early], run_dir="ours", checkpoints=checkpoints)
    losses = [loss for _, loss in module.evaluated[1:]]
    assert trainer.global_step == 15 * ends(losses)
    assert result.steps == 15 * ends([*result.history["eval/loss"]])
    assert saves.best_model_path.endswith(f"step={15 * (1 + int(np.argmin(losses)))}.ckpt")
    best_step = result.hooks["stop_early eval/loss"]["best_step"]
    assert result.best == best_step == result.steps - 30


def ends(losses):
    """Return the epoch after which two in a row were not better than the best."""
    for epoch in range(3, len(losses) + 1):
        if min(losses[epoch - 2 : epoch]) >= min(losses[: epoch - 2]):
            return epoch
    raise AssertionError(losses)


def test_saves_that_do_not_meet_an_evaluation():
    """Lightning ranks them by the previous evaluation; stepfold does not rank them."""
    module = Classifier()
    name = "{step}-{val_loss:.3f}"
    options = {"monitor": "val_loss", "save_top_k": -1, "every_n_train_steps": 10, "filename": name}
    saves = callbacks.ModelCheckpoint("theirs", **options)
    theirs(module, callbacks=[saves])
    value = {step: f"{loss:.3f}" for step, loss in module.evaluated}
    ranked = {path.rsplit("/")[-1] for path in saves.best_k_models}
    # The save of step 30 comes before the evaluation of step 30.
    expected = {20: value[15], 30: value[15], 40: value[30]}
    assert ranked == {f"step={step}-val_loss={loss}.ckpt" for step, loss in expected.items()}
    ours(optax.sgd(0.5), run_dir="ours", checkpoints=sf.Checkpoints(every=10, keep=None))
    found = {
        step: sf.checkpoint.contents("ours", step=step).metrics for step in (10, 20, 30, 40, 45)
    }
    assert [step for step, metrics in found.items() if "eval/loss" in metrics] == [30, 45]


def test_a_resume_repeats_the_order_of_the_first_epoch():
    def train(epochs, path=None, saves=()):
        lightning.seed_everything(0)
        module = Classifier()
        theirs(module, shuffle=True, max_epochs=epochs, path=path, callbacks=list(saves))
        return module

    whole = train(4)
    train(2, saves=[callbacks.ModelCheckpoint("saved", save_last=True)])
    resumed = train(4, path="saved/last.ckpt")
    assert resumed.seen[0] == whole.seen[0] != whole.seen[30]
    assert difference(resumed, params_of(whole)) > 1e-3


def test_a_resume_within_an_epoch_reads_its_first_batches_again():
    class Cut(callbacks.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 12:
                raise OSError

    saves = callbacks.ModelCheckpoint("saved", every_n_train_steps=10, save_last=True)
    with pytest.raises(OSError):
        theirs(Classifier(), callbacks=[saves, Cut()])
    module = Classifier()
    trainer = theirs(module, path="saved/last.ckpt")
    assert trainer.global_step == 45
    assert len(module.seen) == 35
    assert module.seen[0] == TRAIN["labels"][:100].tolist()  # and not the eleventh batch


def test_a_nan_does_not_end_a_run():
    module = Classifier(lambda net: torch.optim.SGD(net.parameters(), lr=1e30))
    assert theirs(module, max_epochs=1).global_step == 15
    assert np.isnan(module.losses[-1])
    result = ours(optax.sgd(1e30))
    assert result.stop_reason.kind == "nonfinite"


def test_lightning_evaluates_the_average_of_weights():
    module = Classifier()
    theirs(module, callbacks=[callbacks.EMAWeightAveraging(decay=0.9)])
    # Its average starts with the weights after the first step.
    decay = lambda count: jnp.where(count == 0, 0.0, 0.9)
    result = ours(sf.ema_params(optax.sgd(0.5), decay), ema=True)
    losses = [loss for _, loss in module.evaluated[1:]]
    np.testing.assert_allclose(result.history["eval/loss"], losses, atol=1e-4)
    assert difference(module, sf.get_ema(result.state)) < 1e-4


def test_predict_and_validate():
    module, trainer = Classifier(), make_trainer()
    loader = torch.utils.data.DataLoader(Rows(TEST), 128)
    outputs = torch.cat(trainer.predict(module, loader)).numpy()
    state = sf.init_state(params_of(module), optax.sgd(0.5), jax.random.key(0))
    found = sf.predict(lambda s, batch: logits_of(s.params, batch["image"]), state, test_batches())
    np.testing.assert_allclose(found, outputs, atol=1e-5)
    (values,) = trainer.validate(module, loader, verbose=False)
    metrics = sf.evaluate(sf.make_eval_step(loss_fn), state, test_batches())
    assert metrics["loss"] == pytest.approx(values["val_loss"], rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(values["val_accuracy"], rel=1e-5)


def test_steps_and_limits():
    module = Classifier()
    trainer = theirs(module, max_epochs=-1, max_steps=7, accumulate_grad_batches=2)
    assert (trainer.global_step, len(module.seen)) == (7, 14)
    module = Classifier()
    theirs(module, limit_train_batches=4)
    assert len(module.seen) == 12
    assert module.seen[:4] * 3 == module.seen
    assert theirs(Classifier(), path="last", max_epochs=1).global_step == 15  # without a file
