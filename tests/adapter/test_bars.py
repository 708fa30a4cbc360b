import io
import json

import pytest

import stepfold as sf
from stepfold.adapter.bars import NullProgressBar, ProgressBar


def lines(file):
    return [json.loads(line) for line in file.getvalue().splitlines()]


def test_it_goes_on_by_steps_and_shows_what_was_said():
    file = io.StringIO()
    bar = ProgressBar("json", 20, file=file)
    bar.set_postfix({"train/loss": 4.0}, accuracy=0.5)
    bar.update(5)
    bar.update()
    bar.close()
    bar.close()
    assert [line["step"] for line in lines(file)] == [5, 6]
    assert lines(file)[0]["accuracy"] == 0.5
    assert "accuracy" not in lines(file)[1]


def test_a_running_average_goes_on_where_it_was():
    first, second = (ProgressBar("json", 20, file=io.StringIO()) for _ in range(2))
    first.set_postfix({"train/loss": 4.0})
    first.update(5)
    second.set_state(first.get_state())
    second.open(5)
    assert second.get_state() == first.get_state()


def test_reset_begins_anew():
    file = io.StringIO()
    bar = ProgressBar("json", None, file=file)
    bar.update(5)
    bar.reset()
    bar.update(2)
    assert [line["step"] for line in lines(file)] == [5, 2]


def test_a_kind_that_is_none_is_refused():
    with pytest.raises(sf.ConfigError, match="progress: expected 'tqdm', 'rich' or 'json', got"):
        ProgressBar("none", 1)


def test_one_that_shows_nothing_is_called_as_another_is(capsys):
    bar = NullProgressBar()
    bar.open(0)
    bar.set_postfix(loss=1.0)
    bar.update()
    bar.reset()
    bar.close()
    assert capsys.readouterr() == ("", "")
