import json
import math

from stepfold.checkpoint.sealed import opened, plain
from stepfold.loop.history import Curve, History


def test_a_curve_is_a_list_of_values_that_knows_their_steps():
    curve = Curve()
    curve.add(5, 0.5)
    curve.add(10, 0.25)
    assert curve == [0.5, 0.25]
    assert curve.steps == [5, 10]
    assert min(curve) == curve[-1]


def test_a_step_never_appears_twice():
    curve = Curve()
    for step in (5, 10, 10, 7, 15):
        curve.add(step, float(step))
    assert curve == curve.steps == [5, 10, 15]


def test_each_metric_has_its_own_steps():
    history = History()
    history.add(5, {"train/loss": 1})
    history.add(6, {"eval/loss": 2})
    history.add(10, {"train/loss": 3})
    assert history == {"train/loss": [1.0, 3.0], "eval/loss": [2.0]}
    assert history["train/loss"].steps == [5, 10]
    assert type(history["train/loss"][0]) is float


def test_it_comes_back_from_json_as_it_was():
    history, other = History(), History()
    values = [0.1, math.nan, math.inf, -0.0, 1e-320]
    for step, value in enumerate(values):
        history.add(step, {"a": value})
    other.add(0, {"gone": 1.0})
    other.set_state(opened(json.loads(json.dumps(plain(history.get_state(), "history")))))
    assert list(other) == ["a"]
    assert list(map(repr, other["a"])) == list(map(repr, values))
    assert other["a"].steps == list(range(5))
    other.add(5, {"a": 1.0})
    assert len(other["a"]) == 6
    assert len(history["a"]) == 5


def test_what_was_given_for_saving_does_not_change_later():
    history = History()
    history.add(1, {"a": 1.0})
    state, other = history.get_state(), History()
    history.add(2, {"a": 2.0})
    other.set_state(state)
    assert other == {"a": [1.0]}


def test_it_is_kept_in_the_order_of_names_and_in_little_room():
    history, other = History(), History()
    for step in range(1000):
        history.add(step, {"b": step / 3, "a": step / 7})
        if step % 2:
            history.add(step, {"c": step / 9})
    kept = history.get_state()
    other.set_state(kept)
    assert list(other) == ["b", "a", "c"]
    assert other == history
    assert other["c"].steps == history["c"].steps == list(range(1, 1000, 2))
    assert sum(len(steps) for steps, _ in kept[1:]) == 8 * 1500  # of a and b once
