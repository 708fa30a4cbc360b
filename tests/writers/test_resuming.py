"""A run that fails at any step, and is resumed, leaves the rows of one that was not interrupted."""

import csv
import functools
import itertools
import json
import tempfile
from pathlib import Path

import jax
import pytest
from tests.adapter import digits
from tests.adapter import test_hezar as hezar
from tests.adapter import test_qurious as qurious
from tests.runs.runs import Cut
from tests.small import STEP, batches, full_but, start
from tests.writers import test_tensorboard as tensorboard

import stepfold as sf
import stepfold.adapter
from stepfold.adapter import TrainerConfigureDataloaderOutput

pytestmark = pytest.mark.not_optimized
LOG, STEPS = 4, 16


class FailingBatches:
    """Batches that raise once before each of some steps."""

    def __init__(self, inner, cuts):
        self._inner, self._cuts = inner, cuts

    def __iter__(self):
        return self

    def __next__(self):
        if self._cuts[:1] == [self._inner.get_state()["step"]]:
            del self._cuts[0]
            raise Cut
        return next(self._inner)

    def __getattr__(self, name):
        return getattr(self._inner, name)


class FailingHook(sf.hooks.BaseHook):
    """A hook that raises once at each of some steps, after the writers were called."""

    def __init__(self, cuts):
        self._cuts = cuts

    def __call__(self, event):
        if self._cuts[:1] == [event.step]:
            del self._cuts[0]
            raise Cut


def read_jsonl(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{name: x for name, x in row.items() if name != "hparams"} for row in rows]
    return [row for row in rows if row.keys() > {"step"}]


def read_csv(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file, strict=True))


def read_events(folder):
    return sorted(row for row in tensorboard.shown(folder) if not row[1].startswith("_hparams_"))


WRITERS = {
    "jsonl": (lambda folder: sf.writers.jsonl(folder / "metrics.jsonl"), read_jsonl),
    "csv": (lambda folder: sf.writers.jsonl(folder / "metrics.csv", csv=True), read_csv),
    "tensorboard": (sf.writers.tensorboard, read_events),
}


def fit(
    folder, writer="jsonl", cuts=(), *, config=True, place="data", hooks=(), run_dir=None, **options
):
    """Run, or resume, and return the rows that the writer has written; `cuts` get fewer."""
    make, read = WRITERS[writer]
    failing = [FailingHook(cuts)] if place == "hook" else []
    hooks = [sf.log_to(make(folder)), *failing, sf.progress("none"), *hooks]
    options = {"steps": STEPS, "log_every": LOG, **options}
    plan = sf.Checkpoints(folder / "checkpoints", every=50)
    sf.fit(
        *(STEP, start(), FailingBatches(batches(), cuts if place == "data" else [])),
        run_dir=sf.RunDirectory(run_dir, config={"rate": 0.1} if config else None),
        hooks=hooks,
        **{"checkpoints": plan, **options},
    )
    return read(folder)


@functools.cache
def whole(writer):
    with tempfile.TemporaryDirectory() as folder:
        return fit(Path(folder), writer)


PLACES = {
    "data": [[step, step + 1, step + LOG] for step in range(LOG - 1, 2 * LOG + 2)],
    "hook": [[LOG], [2 * LOG], [STEPS]],
}


@pytest.mark.parametrize(
    ("place", "cuts", "writer", "config"),
    full_but(
        [("data", [5, 6, 9], "jsonl", True), ("hook", [4], "csv", True)],
        [
            (place, cuts, *rest)
            for place in PLACES
            for cuts in PLACES[place]
            for rest in itertools.product(WRITERS, [True, False])
        ],
    ),
)
def test_rows_of_fit(place, cuts, writer, config, tmp_path):
    cuts = [*cuts]
    for _ in cuts[:]:
        with pytest.raises(Cut):
            fit(tmp_path, writer, cuts, config=config, place=place)
    assert cuts == []
    assert fit(tmp_path, writer, config=config) == whole(writer)


def test_a_file_with_a_row_of_the_step_of_the_checkpoint_can_be_continued(tmp_path):
    with pytest.raises(Cut):
        fit(tmp_path, cuts=[LOG + 1])
    with (tmp_path / "metrics.jsonl").open("a") as file:  # as an earlier stepfold wrote it
        file.write('{"step": 5, "hparams": {"rate": 0.1}}\n')
    assert fit(tmp_path) == whole("jsonl")


def test_rows_after_a_stop_within_an_interval_are_not_kept(tmp_path):
    """The end of a run logs the open interval, which a longer one logs as a whole."""
    rows = fit(tmp_path, steps=LOG + 2)
    assert [row["step"] for row in rows] == [LOG, LOG + 2]
    with pytest.raises(Cut):
        fit(tmp_path, cuts=[LOG + 3])
    stop = lambda event: "enough" if event.step == 2 * LOG else None
    rows = fit(tmp_path, hooks=[stop], log_every=LOG)
    assert rows[-1]["step"] > 2 * LOG
    assert [row["step"] for row in fit(tmp_path)] == [LOG, LOG + 2, 2 * LOG, 3 * LOG, STEPS]


@pytest.mark.filterwarnings("ignore:.*the run ends without:RuntimeWarning")  # nobody evaluates more
def test_a_late_result_of_an_evaluation_may_come_before_a_row_that_waits(tmp_path):
    item = sf.Evaluation(lambda state: {"one": 1.0}, every=LOG, name="other", remote=True)
    options = {"evaluation": item, "log_every": 6}
    options["checkpoints"] = sf.Checkpoints(tmp_path / "checkpoints", every=50)
    with pytest.raises(Cut):
        fit(tmp_path, cuts=[7], config=False, **options)
    sf.evaluate_run(tmp_path / "checkpoints", jax.eval_shape(start), item, follow=False)
    rows = fit(tmp_path, config=False, **options)
    assert {"step": LOG, "other/one": 1.0} in rows
    assert [row["step"] for row in rows] == [LOG, 6, 12, STEPS]


@pytest.mark.parametrize("writer", ["jsonl", "csv"])
def test_a_new_run_keeps_the_rows_of_an_older_one(writer, tmp_path):
    """They are moved aside, as those of `run_dir` are."""
    first = fit(tmp_path, writer, checkpoints=None)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("metrics.*")}
    assert before
    says = "log_to: this run starts at step 0, but .*; its files are now in .*previous-1"
    with pytest.warns(UserWarning, match=says) as caught:
        assert fit(tmp_path, writer, steps=LOG, checkpoints=None) == first[:1]
    assert len(caught) == 1
    moved = {path.name: path.read_bytes() for path in (tmp_path / "previous-1").glob("metrics.*")}
    assert moved == before


def test_files_of_writers_in_the_directory_of_a_run_are_moved_with_it(tmp_path):
    hook = sf.log_to(sf.writers.jsonl(tmp_path / "own"))
    options = {"run_dir": tmp_path, "hooks": hook, "log_every": LOG}
    sf.fit(STEP, start(), batches(), steps=STEPS, **options)
    with pytest.warns(UserWarning, match="run_dir: this run starts at step 0, but") as caught:
        sf.fit(STEP, start(), batches(), steps=LOG, **options)
    assert len(caught) == 1
    assert {"own", "metrics.jsonl", "run.json"} <= {p.name for p in tmp_path.glob("previous-1/*")}


def test_a_run_that_continues_by_hand_keeps_its_rows(tmp_path):
    writer, options = sf.writers.jsonl(tmp_path / "metrics"), {"log_every": LOG}
    hook = sf.log_to(writer)
    result = sf.fit(STEP, start(), batches(), steps=LOG, hooks=hook, **options)
    sf.fit(STEP, result.state, batches(start=LOG), steps=STEPS, hooks=hook, **options)
    rows = [json.loads(line)["step"] for line in (tmp_path / "metrics").read_text().splitlines()]
    assert rows == [*range(LOG, STEPS + 1, LOG)]
    with pytest.warns(UserWarning, match="log_to: this run starts at step 0, but"):
        sf.fit(STEP, start(), batches(), steps=LOG, hooks=hook, **options)
    assert (tmp_path / "previous-1" / "metrics").read_text().count("\n") == len(rows)


# Trainers


class OwnTrainer(sf.adapter.Trainer):
    """A trainer whose batches fail."""

    cuts = ()

    def configure_dataloaders(self):
        data = sf.batches(digits.TRAIN, 20, seed=0, remainder="pad")
        return TrainerConfigureDataloaderOutput(FailingBatches(data, self.cuts), STEPS, None, None)


class OwnHezarTrainer(hezar.Trainer):
    def create_train_dataloader(self, dataset):
        return FailingBatches(super().create_train_dataloader(dataset), self.cuts)


def run_trainer(folder, cuts):
    kind = type("Own", (OwnTrainer,), {"cuts": cuts})
    reports = ("jsonl", "csv", "tensorboard")
    options = {"log_steps": LOG, "max_steps": STEPS, "report_to": reports}
    trainer = digits.train_only(kind, output_dir=folder, **options)
    trainer.train()
    trainer.finish()
    return [read(folder / "logs") for read in (read_jsonl, read_csv)] + [
        read_events(folder / "logs" / "tensorboard")
    ]


def run_hezar(folder, cuts):
    kind = type("Own", (OwnHezarTrainer,), {"cuts": cuts})
    options = {"log_steps": LOG, "max_steps": STEPS, "num_dataloader_workers": 0}
    has_checkpoint = (folder / "checkpoints").exists()
    options["resume_from_checkpoint"] = has_checkpoint or None
    hezar.train_only(kind, output_dir=str(folder), **options).train()
    logs = next(path.parent for path in folder.rglob("metrics.csv"))
    return [read_csv(logs), read_events(next(logs.rglob("events*")).parent)]


def run_qurious(folder, cuts):
    data = FailingBatches(qurious.dicts(digits.TRAIN), cuts)
    return qurious.made().train(data, STEPS // 4, save_dir=folder)


@pytest.mark.parametrize(
    ("run", "step"),
    full_but(
        [(run_hezar, LOG + 1)],
        itertools.product([run_trainer, run_hezar, run_qurious], range(LOG - 1, LOG + 4)),
    ),
)
def test_rows_of_trainers(run, step, tmp_path):
    cuts, expected = [step, step + 1], run(tmp_path / "whole", [])
    for _ in cuts[:]:
        with pytest.raises(Cut):
            run(tmp_path / "cut", cuts)
    assert cuts == []
    assert run(tmp_path / "cut", cuts) == expected
