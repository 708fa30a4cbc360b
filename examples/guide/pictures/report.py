"""Take pictures of the report of a run that is killed and restarted, by Chromium."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import stepfold as sf

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
RUN = Path("runs/digits")
SIZE = "1200,824"  # down to the first row of charts


def init(key):
    """Make the parameters of a network with one hidden layer."""
    keys = jax.random.split(key)
    return {
        "hidden": jax.random.normal(keys[0], (64, 128)) / 8,
        "out": jax.random.normal(keys[1], (128, 10)) / 128**0.5,
    }


def loss_fn(params, batch, key):
    """Return the loss, with noise on the pixels, and the accuracy."""
    image = batch["image"] + 0.3 * jax.random.normal(key, batch["image"].shape)
    logits = jax.nn.relu(image @ params["hidden"]) @ params["out"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    hit = (logits.argmax(-1) == batch["label"]).astype(jnp.float32)
    return sf.mean(loss), {"accuracy": sf.mean(hit)}


def kill(event):
    """Kill this process after step 3,700, as a machine that is taken away would."""
    if event.step == 3700:
        os.kill(os.getpid(), signal.SIGKILL)


def train(hooks=()):
    """Train on the digits, or resume."""
    digits = load_digits()
    data = {"image": digits.data.astype("float32") / 16, "label": digits.target}
    test = {name: values[1500:] for name, values in data.items()}
    tx = optax.adam(optax.cosine_decay_schedule(1e-3, 6000))
    sf.fit(
        sf.make_train_step(loss_fn, tx),
        sf.init_state(init, tx, jax.random.key(0)),
        sf.batches({name: values[:1500] for name, values in data.items()}, 128, seed=0),
        steps=6000,
        log_every=25,
        run_dir=RUN,
        evaluation=sf.Evaluation(
            sf.make_eval_step(loss_fn), lambda: sf.batches(test, 99, epochs=1), every=250
        ),
        checkpoints=sf.Checkpoints(every=500, keep=2, best="eval/accuracy"),
        hooks=[sf.hooks.throughput(), *hooks],
    )


def main():
    """Train in two processes, of which the first is killed, and take the pictures."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"{__file__}: expected one of {', '.join(BROWSERS)}, got none; install Chromium")
    killed = subprocess.run([sys.executable, __file__, "train"], check=False).returncode
    if killed != -signal.SIGKILL:
        sys.exit(f"{__file__}: expected the first process to be killed, got exit status {killed}")
    train()
    page = (RUN / "report.html").resolve().as_uri()
    options = ["--headless", "--hide-scrollbars", f"--window-size={SIZE}"]
    if os.geteuid() == 0:  # where Chromium's sandbox does not work
        options.append("--no-sandbox")
    for number, scheme in enumerate(("dark", "light")):
        style = f"--blink-settings=preferredColorScheme={number}"
        picture = f"--screenshot={Path(f'report-{scheme}.png').resolve()}"
        command = [browser, *options, style, picture, page]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    if sys.argv[1:] == ["train"]:
        train([kill])
    else:
        main()
