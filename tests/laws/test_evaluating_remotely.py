"""A run that another process evaluates has the history of one that evaluates itself.

The other process is a call of `evaluate_run` at random moments of the training, from a hook. Either
side is cut at random. `tests/faults/test_evaluating.py` kills real processes.
"""

import json
import random
from types import SimpleNamespace

import jax
import pytest
from tests import small
from tests.faults.training import cut
from tests.small import full_but

import stepfold as sf
from stepfold.checkpoint.results import FOLDER

pytestmark = pytest.mark.not_optimized

STEPS = 24


class Killed(BaseException):
    """An evaluation was killed."""


class Other:
    """The other process: a hook that evaluates what is there at some events."""

    provides, can_stop = ("train/",), False

    def __init__(self, folder, chance, *, takes_all=True):
        self.folder, self.chance, self.takes_all = folder, chance, takes_all
        self.made = []  # the results, with the bits of the parameters
        self.kills = 0

    def __call__(self, event):
        if event.is_train and self.chance.random() < 0.4:
            self.evaluate()

    def evaluate(self, *, may_die=True):
        like = jax.eval_shape(small.start)
        dies_at = self.chance.choice([0, 1, None, None, None]) if may_die else None
        evaluations = [evaluation(name, self.measure(name, dies_at)) for name in ("eval", "more")]
        steps = "all" if self.takes_all else "newest"
        try:
            return sf.evaluate_run(self.folder, like, evaluations, steps=steps, follow=False)
        except Killed:
            self.kills += 1
            return None

    def measure(self, name, dies_at):
        counts = []

        def call(state):
            counts.append(name)
            if dies_at is not None and len(counts) > dies_at:
                raise Killed
            self.made.append((name, int(state.step), float(state.params["w"])))
            return numbers(state)

        return call


def numbers(state):
    batches = sf.batches(small.examples(), 4, epochs=1)
    return sf.evaluate(small.EVAL_STEP, state, batches)


def evaluation(name="eval", measure=numbers, **options):
    return sf.Evaluation(measure, name=name, **options)


def goes_back_at(step):
    """Make a hook that lets the run go back once."""
    left = [step]

    def hook(event):
        if event.is_train and [event.step] == left:
            left.clear()
            return sf.hooks.GoBack(skip=5, why="at random")
        return None

    return hook


def fit(folder, drawn, hooks=(), *, remote):
    every = {"eval": drawn.every, "more": 2 * drawn.every}
    evaluations = [
        evaluation(name, every=n, remote=remote, at_start=drawn.at_start)
        for name, n in every.items()
    ]
    checkpoints = sf.Checkpoints(
        every=drawn.save_every, keep=drawn.keep, best="eval/loss", at_start=True, async_=False
    )
    back = [goes_back_at(drawn.back)] if drawn.back else []
    return sf.fit(
        small.STEP, small.start(), small.batches(), steps=STEPS, run_dir=folder,
        checkpoints=checkpoints, evaluation=evaluations, hooks=[*back, *hooks],
        log_every=drawn.log_every,
    )  # fmt: skip


def draw(chance):
    back = chance.choice([None, 12])
    return SimpleNamespace(
        every=chance.choice([2, 3, 5]),
        save_every=chance.choice([4, 5, 7]),
        keep=chance.choice([4, None] if back else [1, 3, None]),  # a step to go back to is kept
        log_every=chance.choice([1, 2, 3]),
        at_start=chance.random() < 0.5,
        back=back,
    )


def rows(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [dict(sorted(json.loads(line).items())) for line in lines]


def curves(result):
    return {name: (curve.steps, [*curve]) for name, curve in result.history.items()}


@pytest.mark.filterwarnings("ignore:.* steps wait for")  # the other process may be late
@pytest.mark.filterwarnings("ignore:.*since no live process makes it")
@pytest.mark.parametrize("is_cut", full_but([True], [False, True]))
def test_the_history_is_that_of_a_run_which_evaluates_itself(tmp_path, is_cut, count):
    kills = cuts = 0
    for seed in range(count(1, 25)):
        chance = random.Random(2 * seed + is_cut)
        drawn, place = draw(chance), tmp_path / str(seed)
        whole = fit(place / "whole", drawn, remote=False)
        other = Other(place / "run", chance)
        if is_cut:
            with cut(chance.randrange(drawn.log_every, STEPS, drawn.log_every)) as cuts_at:
                fit(place / "run", drawn, [other, cuts_at], remote=True)
            cuts += 1
        fit(place / "run", drawn, [other], remote=True)
        other.evaluate(may_die=False)
        run = fit(place / "run", drawn, remote=True)
        assert curves(run) == curves(whole), (seed, drawn)
        assert rows(place / "run") == rows(place / "whole")
        assert run.best == whole.best
        assert len(set(other.made)) == len(other.made), "an evaluation was made twice"
        assert other.evaluate(may_die=False).metrics == {}
        kills += other.kills
    print(f"{kills} evaluations and {cuts} runs were cut")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*since no live process makes it")
def test_no_result_of_a_step_that_is_gone_counts(tmp_path):
    """The steps after the one to go back to are evaluated twice, with other numbers."""
    drawn = draw(random.Random(0))
    drawn.__dict__.update(every=2, back=13, log_every=1, keep=None, at_start=False)
    other = Other(tmp_path / "run", SimpleNamespace(random=lambda: 0, choice=lambda _: None))
    fit(tmp_path / "run", drawn, [other], remote=True)
    other.evaluate()
    run = fit(tmp_path / "run", drawn, remote=True)
    whole = fit(tmp_path / "whole", drawn, remote=False)
    assert curves(run) == curves(whole)
    twice = {step for name, step, _ in other.made if name == "eval"}
    assert len([1 for name, *_ in other.made if name == "eval"]) > len(twice)
    assert len([*(tmp_path / "run/checkpoints" / FOLDER).glob("eval-*")]) > len(twice)
