"""How far a run is, and whether it gets anywhere."""

import io
import json

import jax
import pytest

import stepfold as sf


class Terminal(io.StringIO):
    def isatty(self):
        return True


def train(step, loss, **more):
    return sf.Event(step, 40, {"train/loss": loss, **more}, None)


def printed(file):
    return [json.loads(line) for line in file.getvalue().splitlines()]


def shown(*events, **options):
    file = io.StringIO()
    hook = sf.progress("json", file=file, **options)
    hook.open(0, 40)
    for event in events:
        assert hook(event) is None
    hook.close()
    return printed(file)


def test_the_loss_is_a_running_average_over_about_so_many_steps():
    losses = [line["loss"] for line in shown(train(1, 1.0), train(2, 4.0), over=2)]
    assert losses == [1.0, pytest.approx((0.25 * 1 + 0.5 * 4) / 0.75)]
    (*_, last) = shown(*[train(10 * n, 1.0 if n < 3 else 7.0) for n in range(1, 30)], over=10)
    assert last["loss"] == pytest.approx(7.0, abs=1e-6)


def test_an_interval_weighs_as_its_steps_do():
    steps = shown(train(1, 5.0), *[train(1 + n, 2.0) for n in range(1, 11)])
    once = shown(train(1, 5.0), train(11, 2.0))
    assert once[-1]["loss"] == pytest.approx(steps[-1]["loss"])


def test_an_evaluation_in_an_interval_does_not_cut_it_short():
    plain = shown(train(10, 5.0), train(20, 2.0))
    between = shown(train(10, 5.0), sf.Event(19, 40, {"eval/loss": 1.0}, None), train(20, 2.0))
    assert between[-1]["loss"] == plain[-1]["loss"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_enter_the_average(bad):
    assert [line["loss"] for line in shown(train(10, 2.0), train(20, bad))] == [2.0, 2.0]
    assert "loss" not in shown(train(10, bad))[0]


def test_the_average_survives_a_resume():
    whole = sf.progress("json", file=(file := io.StringIO()))
    part = sf.progress("json", file=io.StringIO())
    for hook in (whole, part):
        hook.open(0, 40)
        hook(train(10, 2.0))
        hook(train(20, 3.0))
    whole(train(30, 5.0))
    again = sf.progress("json", file=(other := io.StringIO()))
    again.set_state(json.loads(json.dumps(part.get_state())))
    again.open(20, 40)
    again(train(30, 5.0))
    assert printed(other)[-1]["loss"] == printed(file)[-1]["loss"]


def test_the_average_of_another_metric_begins_anew_after_a_resume():
    part = sf.progress("json", file=io.StringIO())
    part.open(0, 40)
    part(train(10, 2.0))
    again = sf.progress("json", average="train/norm", file=(other := io.StringIO()))
    again.set_state(part.get_state())
    again.open(10, 40)
    again(sf.Event(20, 40, {"train/norm": 8.0}, None))
    assert printed(other)[-1]["norm"] == 8.0


def test_metrics_are_chosen_by_name_or_pattern():
    event = train(10, 2.0, **{"train/accuracy": 0.5, "eval/loss": 3.0})
    assert set(shown(event, metrics=())[0]) >= {"step", "loss"}
    assert "train/accuracy" not in shown(event, metrics=("eval/*",))[0]
    assert shown(event, metrics=("eval/*",))[0]["eval/loss"] == 3.0
    assert shown(event)[0]["train/accuracy"] == 0.5


@pytest.mark.parametrize("kind", ["tqdm", "rich"])
def test_a_bar_shows_evaluations_and_ends_at_the_last_step(kind):
    terminal = Terminal()
    hook = sf.progress(kind, file=terminal)
    hook.open(0, 40)
    hook(train(10, 2.0, **{"train/accuracy": 0.5}))
    hook(sf.Event(10, 40, {"eval/loss": 0.75}, None))
    for step in range(11, 41):  # faster than anything is drawn
        hook(train(step, 2.0))
    hook.close()
    seen = terminal.getvalue()
    assert "40/40" in seen
    assert "eval/loss" in seen
    assert "accuracy" not in seen
    assert seen.count("/40") < 20


@pytest.mark.parametrize("kind", ["tqdm", "rich"])
def test_it_is_quiet_where_there_is_no_terminal(kind, capsys):
    hook = sf.progress(kind)
    hook.open(0, 40)
    hook(train(10, 2.0))
    hook.close()
    assert capsys.readouterr() == ("", "")
    assert hook.get_state()["weight"] > 0


def test_of_several_processes_the_first_one_shows(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert shown(train(10, 2.0)) == []


def test_arguments_are_checked():
    with pytest.raises(sf.ConfigError, match="metrics: expected names or patterns, .* str 'a'"):
        sf.progress("json", metrics="a")
    with pytest.raises(sf.ConfigError, match="over: expected an integer of at least 1, got 0"):
        sf.progress("json", over=0)
    with pytest.raises(sf.ConfigError, match="progress: expected 'tqdm', 'rich' or 'json'"):
        sf.progress("bar")
