import math

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepfold as sf
from stepfold.checkpoint import steps
from stepfold.checkpoint.retention import expendable, metrics_in, order_by, ranked, read_best
from stepfold.errors import CheckpointError, ConfigError

NUMBERS = st.floats() | st.none()
SERIES = st.dictionaries(st.integers(0, 40), st.dictionaries(st.just("loss"), NUMBERS), max_size=9)


@pytest.mark.parametrize(
    ("best", "mode", "wanted"),
    [
        (None, None, None),
        ("eval/loss", None, ("eval/loss", "min")),
        ("val_loss", None, ("val_loss", "min")),
        ("eval/Loss", None, ("eval/Loss", "min")),
        ("lossless/bleu", None, ("lossless/bleu", "max")),
        ("accuracy", None, ("accuracy", "max")),
        ("loss", "max", ("loss", "max")),
        ("accuracy", "min", ("accuracy", "min")),
    ],
)
def test_a_loss_is_better_when_less(best, mode, wanted):
    assert read_best(best, mode) == wanted


@pytest.mark.parametrize(
    ("best", "mode", "words"),
    [
        (3, None, "best: expected the name of a metric, got 3"),
        ("", None, "best: expected the name of a metric, got ''"),
        ("loss", "least", "mode: expected 'min' or 'max', got 'least'"),
    ],
)
def test_what_is_no_metric_or_mode_is_refused(best, mode, words):
    with pytest.raises(ConfigError, match=words):
        read_best(best, mode)


def test_equals_are_as_old_as_they_are():
    metrics = {3: {"a": 1.0}, 1: {"a": 2.0}, 2: {"a": 2.0}, 4: {"a": 1.0}}
    assert order_by(("a", "max"), metrics) == [1, 2, 3, 4]
    assert order_by(("a", "min"), metrics) == [3, 4, 1, 2]


def test_what_is_no_finite_number_is_never_best():
    values = [math.nan, math.inf, -math.inf, None, "1", True, 5.0]
    metrics = {step: {"a": value} for step, value in enumerate(values)} | {9: {}}
    assert order_by(("a", "max"), metrics) == order_by(("a", "min"), metrics) == [6]


@given(SERIES, st.integers(1, 4), st.none() | st.integers(1, 5), st.booleans(), st.integers(1, 3))
def test_the_last_the_nth_and_the_best_are_kept(metrics, keep, keep_every, by_best, keep_best):
    best = ("loss", "min") if by_best else None
    gone = expendable(metrics, keep=keep, keep_every=keep_every, best=best, keep_best=keep_best)
    kept = set(metrics) - set(gone)
    last = sorted(metrics)[-keep:]
    finite = {
        step: m["loss"] for step, m in metrics.items() if math.isfinite(m.get("loss") or math.nan)
    } | {step: 0.0 for step, m in metrics.items() if m.get("loss") == 0}
    firsts = sorted(finite, key=lambda step: (finite[step], step))[:keep_best] if by_best else []
    nth = [step for step in metrics if keep_every and step % keep_every == 0]
    assert gone == sorted(gone)
    assert kept == {*last, *firsts, *nth}


def test_all_are_kept_if_asked():
    assert expendable({1: {}, 2: {}}, keep=None) == []


def save(folder, step, metrics=None, **options):
    with sf.Checkpoints(folder, keep=None, **options) as series:
        series.save({"w": jnp.ones(2)}, step=step, metrics=metrics)


def test_metrics_are_read_of_what_is_whole(tmp_path):
    save(tmp_path, 1, {"loss": 3.0})
    save(tmp_path, 2)
    save(tmp_path, 3, {"loss": math.nan})
    save(tmp_path, 4, {"loss": 1.0})
    (tmp_path / "4" / "state" / "_METADATA").unlink()
    found = metrics_in(tmp_path)
    assert (found[1], found[2]) == ({"loss": 3.0}, {})
    assert math.isnan(found[3]["loss"])
    assert list(found) == [1, 2, 3]


def test_a_step_that_goes_meanwhile_is_not_read(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(steps, "steps_in", lambda directory: [1, 2])
    assert metrics_in(tmp_path) == {1: {}}
    assert ranked(tmp_path, "loss") == [2]


def test_the_newest_tells_which_metric_is_best(tmp_path):
    assert ranked(tmp_path, None) == []
    save(tmp_path, 1, {"loss": 2.0, "bleu": 5.0}, best="bleu")
    save(tmp_path, 2, {"loss": 1.0, "bleu": 4.0}, best="loss")
    assert ranked(tmp_path, None) == [2, 1]
    assert ranked(tmp_path, "bleu") == ranked(tmp_path, ("loss", "max")) == [1, 2]


def test_without_a_metric_none_is_best(tmp_path):
    save(tmp_path, 1, {"loss": 2.0})
    with pytest.raises(CheckpointError, match="expected to know which metric is best, but none wa"):
        ranked(tmp_path, None)
    save(tmp_path, 2, {"bleu": math.nan})
    words = (
        "expected a step with a finite number as the metric 'bleu', got none; save with metrics="
    )
    with pytest.raises(CheckpointError, match=words):
        ranked(tmp_path, "bleu")
