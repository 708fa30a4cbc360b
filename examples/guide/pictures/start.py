"""Draw the run of the README, which is killed and started again, for the start page."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt

README = Path(__file__).parents[3] / "README.md"
KILLED = 170


def kill(event):
    """Kill this process, as a machine that is taken away would."""
    if event.step == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    setup, fit, _ = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)
    names = {}
    exec(setup, names)
    if sys.argv[1:] == ["kill"]:
        exec(fit.replace("hooks=[", "hooks=[kill, "), names | {"kill": kill})
    subprocess.run([sys.executable, __file__, "kill"], check=False)
    exec(fit, names)
    result = names["result"]

    plt.rcParams.update({"figure.figsize": (4.4, 2.8), "font.size": 11})
    figure, axes = plt.subplots()
    axes.axvline(KILLED, color="#57606a", linestyle=":", linewidth=1)
    axes.annotate("killed, started again", (KILLED + 4, 1.9), fontsize=10)
    for name, label in {"train/loss": "training, with noise", "eval/loss": "test"}.items():
        curve = result.history[name]
        axes.plot(curve.steps, curve, "o-" if name == "eval/loss" else "-", label=label, ms=4)
    accuracy = result.history["eval/accuracy"][-1]
    axes.annotate(f"test accuracy {accuracy:.1%}", (195, 0.068), fontsize=10)
    axes.set(
        xlabel="step",
        ylabel="loss",
        yscale="log",
        ylim=(0.055, 2.6),
        yticks=[0.1, 1],
        yticklabels=["0.1", "1"],
    )
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0.86))
    figure.savefig("start.svg")
    print(result.resumed, accuracy)
