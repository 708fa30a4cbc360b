"""Every example runs as a program of its own, and prints what its docstring promises.

By default only the quickstart does; `.ci/run` always runs all.
"""

import re
import shutil
from pathlib import Path
from pydoc_data import topics

import pytest
from tests.clients.rows import shows

from stepfold.debug import diff

GOLDEN = Path(__file__).parent / "golden"
EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
CASES = [
    pytest.param(name, marks=[pytest.mark.full] * (name != "quickstart"))
    for name in NAMES
    if name != "ray_run"  # tests/clients/test_ray.py runs it, where Ray is installed
]
# Fewer steps where they are enough for what the test checks.
ARGUMENTS = {"packing": ("40",), "sharded_transformer": ("4",)}


class Examples:
    """Run examples outside the checkout, each in a folder of its own."""

    def __init__(self, server, root):
        self._server, self._root, self._printed = server, root, {}

    def folder(self, name):
        return self._root / name

    def printed(self, name):
        """Return what the first run of an example printed."""
        if name not in self._printed:
            self._printed[name] = self.run(name, *ARGUMENTS.get(name, ()))
        return self._printed[name]

    def run(self, name, *arguments):
        self.folder(name).mkdir(exist_ok=True)
        return self._server.run([EXAMPLES / f"{name}.py", *arguments], cwd=self.folder(name))


@pytest.fixture(scope="module")
def examples(program_server, tmp_path_factory):
    return Examples(program_server, tmp_path_factory.mktemp("examples"))


def numbers(pattern, printed):
    """Find numbers in what was printed."""
    return [float(found) for found in re.findall(pattern, printed)]


@pytest.mark.parametrize("name", CASES)
def test_example_prints_what_its_page_shows(name, examples):
    """Most lines do, up to numbers and generated text, which depend on the machine."""
    shown = (EXAMPLES / "guide" / "examples" / f"{name}.txt").read_text()
    alike = lambda text: {
        " ".join(re.sub(r"-?[\d.,]+", " 0 ", x).split()) for x in text.splitlines()
    }
    same = alike(shown) & alike(examples.printed(name))
    assert len(same) >= len(alike(shown)) / 2


def test_examples_are_short_and_have_a_main_function():
    for name in NAMES:
        text = (EXAMPLES / f"{name}.py").read_text()
        assert text.count("\n") <= 120, name
        assert "\ndef main(" in text, name


def test_quickstart_learns_digits(examples):
    printed = examples.printed("quickstart")
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]
    assert losses[-1] < losses[0] / 5
    assert float(re.findall(r"test accuracy (\d+\.\d+)", printed)[-1]) > 0.95


def test_quickstart_computes_what_it_did(examples):
    """Compare it with a run that is kept; other versions of jax round differently.

    If it is changed on purpose, copy the two files of its new run to `tests/golden`.
    """
    examples.printed("quickstart")
    found = diff(GOLDEN / "quickstart", examples.folder("quickstart") / "runs/digits", rtol=1e-3)
    assert found.exit_code == 0, str(found)
    assert found.compared["rows"] == 48
    assert {"config", "arguments", "batches", "seed", "parameters"} <= {*found.equal}


@pytest.mark.full
def test_sharded_transformer_prints_its_plan(examples):
    printed = examples.printed("sharded_transformer")
    assert re.search(r"layers/up +float32\[4,128,512\] +·, fsdp, tp +128 KiB", printed)
    assert re.search(r"a step on 8 cpu devices \(fsdp 4 x tp 2\)", printed)
    assert len(numbers(r"loss (\d+\.\d+)", printed)) == 2


@pytest.mark.full
def test_sharded_transformer_learns(examples):
    losses = numbers(r"loss (\d+\.\d+)", examples.run("sharded_transformer", "16"))
    assert losses[-1] < losses[0] / 1.8


@pytest.mark.full
def test_tfds_digits_writes_reads_and_learns_without_tensorflow(examples):
    printed = examples.printed("tfds_digits")
    assert "no TensorFlow" in printed
    accuracy, count = re.search(r"test accuracy (\d\.\d+) over (\d+) digits", printed).groups()
    assert (float(accuracy) > 0.95, int(count)) == (True, 360)


@pytest.mark.full
def test_poisoned_data_is_survived(examples):
    printed = examples.printed("poisoned_data")
    assert "without going back: train/loss is nan in step 71" in printed
    assert "skipped batches [50, 53]: train/loss is " in printed
    assert "skipped batches [70, 71]: train/loss is nan" in printed
    before, after = numbers(r"test accuracy (\d\.\d+)", printed)
    assert (before < 0.2, after > 0.7) == (True, True)
    assert "the same bits as a run that knew: True" in printed


@pytest.mark.full
def test_packing_needs_fewer_rows_for_the_same_loss(examples):
    printed = examples.printed("packing")
    found = re.findall(r"(\d+) rows  loss (\d+\.\d+) over (\d+) bytes", printed)
    (rows, loss, count), (more_rows, same_loss, same_count) = found
    assert int(rows) < 0.6 * int(more_rows)
    assert float(loss) == pytest.approx(float(same_loss), rel=1e-5)
    assert int(count) == int(same_count) > 30_000
    losses = [float(loss) for loss in re.findall(r"step +\d+  loss (\d+\.\d+)", printed)]
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.full
def test_adapter_learns_and_resumes(examples):
    printed, folder = examples.printed("adapter"), examples.folder("adapter")
    accuracies = numbers(r"test accuracy (0\.\d+)", printed)
    assert accuracies[-1] > 0.8
    assert "step 88 of 88 was done before" in examples.run("adapter", "--num_train_epochs", "4")
    assert (folder / "runs/adapter/torch/model.safetensors").exists()
    assert "| eval/accuracy | 4 |" in (folder / "runs/adapter/README.md").read_text()


@pytest.mark.full
def test_subclassed_trainer_learns(examples):
    printed = examples.printed("subclass_adapter")
    assert printed.count("current learning rate") == 5
    assert float(re.search(r"test accuracy (0\.\d+)", printed)[1]) > 0.7


@pytest.mark.full
def test_own_loop_learns_to_write_and_resumes_bit_for_bit(examples):
    printed, folder = examples.printed("own_loop"), examples.folder("own_loop")
    losses = numbers(r"test loss (\d\.\d+)", printed)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 1.8
    prompt, written = re.split("--- .*\n", printed)[1:]
    words = set("".join(topics.topics.values()).split())
    assert len(prompt + written) > 240
    assert sum(word in words for word in written.split()) > len(written.split()) / 2

    shutil.rmtree(folder / "runs/own_loop/300")  # as if killed before this save
    again = examples.run("own_loop")
    assert again.startswith("resumed after step 225\n")
    assert again.split("\n")[1:] == printed.split("\n")[-again.count("\n") :]


@pytest.mark.full
def test_lora_learns_new_digits_and_keeps_the_base_frozen(examples):
    printed = examples.printed("lora")
    known, unknown, still, new = numbers(r"on \d-\d: accuracy (\d\.\d+)", printed)
    assert min(known, still, new) > 0.95
    assert unknown == 0
    assert printed.endswith("the base is unchanged, bit for bit\n")
    plain = printed.replace(",", "")
    trained = sum(numbers(r"\| lora/.* (\d+) +\|", plain))
    kept, whole = re.search(r"optimizer state: (\d+) bytes; the base's: (\d+)", plain).groups()
    assert int(kept) == 2 * 4 * trained + 4 < int(whole) / 8  # two moments and a count


@shows(
    "BaseTrainer",
    "Core concepts",
    {"SFT, DPO": "a loss function, as in `examples/lora.py` and `examples/preferences.py`"},
)
@pytest.mark.full
def test_generated_answers_are_right_and_choose_the_best_checkpoint(examples):
    printed = examples.printed("generation")
    exact, perplexity = (
        [*map(float, re.search(rf"^{name} (.*)$", printed, re.MULTILINE)[1].split())]
        for name in ("exact_match", "perplexity")
    )
    assert len(exact) == len(perplexity) == 6
    assert exact[-1] > 0.9 > exact[0]
    assert perplexity[-1] < 1.1 < perplexity[0]
    answers = re.findall(r"^(\d+)=(\d+);$", printed, re.MULTILINE)
    assert len(answers) == 3
    assert sum("".join(sorted(digits)) == answer for digits, answer in answers) >= 2
    best = (
        examples.folder("generation")
        / f"runs/generation/checkpoints/{50 * (1 + exact.index(max(exact)))}"
    )
    assert best.exists()


@pytest.mark.full
def test_preferences_are_learned_and_show_in_generated_text(examples):
    printed = examples.printed("preferences")
    accuracies, margins, capitals, distances = (
        numbers(rf"{name} (-?\d+\.\d+)", printed)
        for name in ("accuracy", "margin", "capitals", "divergence")
    )
    assert abs(margins[0]) == distances[0] == 0
    assert margins == sorted(margins)
    assert accuracies[0] < 0.6
    assert accuracies[-1] > 0.95
    assert (0.4 < capitals[0] < 0.6, capitals[-1] > 0.8) == (True, True)
    assert 0 < distances[-1] < 0.3


@pytest.mark.full
def test_a_replay_buffer_resumes_bit_for_bit(examples):
    printed = examples.printed("replay_buffer")
    assert "resumed from step 300 with the same bits: True" in printed
    assert "goes right: 7 of 7" in printed


@pytest.mark.full
def test_ensemble_beats_its_members_and_each_trains_as_if_alone(examples):
    printed = examples.printed("ensemble")
    *members, ensemble = numbers(r"test accuracy (\d\.\d+)", printed)
    assert len(set(members)) > 1
    assert ensemble > sum(members) / len(members) + 0.003 > 0.9
    (apart,) = numbers(r"differs by (\S+) at most", printed)
    assert apart < 1e-4


@pytest.mark.full
def test_actor_and_critic_learn_together(examples):
    printed = examples.printed("two_states")
    lengths = numbers(r"episode length +(\d+\.\d+)", printed)
    errors = numbers(r"critic loss +(\d+\.\d+)", printed)
    assert lengths[0] < 100
    assert min(lengths[-3:]) > 190
    assert errors[-1] < max(errors) / 5


@pytest.mark.full
def test_the_gradient_of_each_example_is_clipped_and_noised(examples):
    printed = examples.printed("per_example_gradients")
    losses, accuracies, scales = (
        numbers(rf"{name} +(\d+\.?\d*)", printed) for name in ("loss", "accuracy", "noise scale")
    )
    clipped = numbers(r"clipped +(\d+)%", printed)
    assert losses[-1] < losses[0] / 4
    assert accuracies[-1] > 0.93
    assert clipped[0] > 50 > clipped[-1] > 0
    assert scales[-1] > 2 * scales[0]


@pytest.mark.full
def test_silent_corruption_finds_the_rows_of_the_wrong_device_and_of_the_next(examples):
    printed = examples.printed("silent_corruption").splitlines()
    assert [line.partition(" is wrong: ")[0] for line in printed] == ["device None", "device 3"]
    assert [re.findall(r"corrupt 0, suspect rows (.*)", line) for line in printed] == [
        ["[]"],
        ["[3, 4]"],
    ]


def rows(printed):
    """Read the numbers in each row of a table, without its head."""
    lines = [line.replace(",", "").split() for line in printed.splitlines()[1:]]
    is_number = re.compile(r"\d+(\.\d+)?(e[+-]\d+)?").fullmatch
    return [[float(word) for word in line if is_number(word)] for line in lines]


@pytest.mark.full
def test_a_pipeline_equals_one_device_and_its_bubble_shrinks(examples):
    table = rows(examples.printed("pipeline"))
    assert [row[0] for row in table] == [1, 4, 16]
    for _, flops, ticks, _, _, error in table:
        assert flops == pytest.approx(ticks, rel=0.02)
        assert error < 1e-12


@pytest.mark.full
def test_diloco_sends_a_tenth_and_learns(examples):
    (sent, memory, accuracy), (_, less, more, worse) = rows(examples.printed("diloco"))
    assert less == pytest.approx(sent / 10, rel=0.01)
    assert memory < more < 2 * memory
    assert min(accuracy, worse) > 0.9


@pytest.mark.full
def test_muon_at_home_costs_less_and_changes_nothing(examples):
    plain, home, plain_fsdp, home_fsdp = rows(examples.printed("sharded_muon"))
    for (flops, _, _), (fewer, _, error) in ((plain, home), (plain_fsdp, home_fsdp)):
        assert fewer < flops
        assert error < 1e-5
    assert home[0] < plain[0] / 2
    assert home_fsdp[1] < plain_fsdp[1]


@pytest.mark.full
def test_under_mup_the_logits_of_wide_networks_change_as_those_of_narrow_ones(examples):
    table = rows(examples.printed("mup"))
    widths, standard, _, mup, _ = zip(*table, strict=True)
    assert widths[-1] == 8 * widths[0]
    assert standard[-1] > 5 * standard[0]
    assert mup[0] == standard[0]
    assert max(mup) < 2 * min(mup)
