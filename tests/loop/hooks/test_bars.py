"""How progress is drawn."""

import io
import json

import pytest

import stepfold as sf
from stepfold.loop.hooks import bars


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", ["tqdm", "rich"])
def test_a_bar_shows_step_total_rate_and_values_and_keeps_those_that_are_not_new(kind):
    terminal = Terminal()
    bar = bars.read_kind(kind)(terminal, 5, 20)
    bar.draw(10, {"loss": 0.123456, "eval/loss": 2.0}, 2.5)
    bar.draw(15, {"loss": 0.5}, 2.5)
    bar.close()
    seen = terminal.getvalue()
    for text in ("10/20", "15/20", "0.1235", "0.5", "step/s"):
        assert text in seen
    last = seen[seen.rindex("15/20") :]
    assert "eval/loss" in last


@pytest.mark.parametrize("kind", ["tqdm", "rich"])
def test_a_bar_without_a_total_counts(kind):
    terminal = Terminal()
    bar = bars.read_kind(kind)(terminal, 0, None)
    bar.draw(7, {}, None)
    bar.draw(7, {"eval/loss": 3.0}, None)
    bar.close()
    assert "7" in terminal.getvalue()
    assert "3" in terminal.getvalue()


@pytest.mark.parametrize("kind", ["tqdm", "rich"])
def test_where_there_is_no_terminal_there_is_no_bar(kind):
    file = io.StringIO()
    assert bars.read_kind(kind)(file, 0, 10) is None
    assert file.getvalue() == ""


@pytest.mark.parametrize("kind", ["tqdm", "rich"])
def test_what_is_printed_meanwhile_goes_where_stdout_leads(kind, capsys):
    bar = bars.read_kind(kind)(terminal := Terminal(), 0, 10)
    print("hello")
    bar.close()
    assert capsys.readouterr().out == "hello\n"
    assert "hello" not in terminal.getvalue()


def test_a_notebook_has_a_bar_though_it_is_no_terminal(monkeypatch):
    from tqdm import auto, notebook

    class Widget(notebook.tqdm_notebook):
        def __init__(self, **options):
            made.append(options)

        def close(self):
            made.append("closed")

    made = []
    monkeypatch.setattr(auto, "tqdm", Widget)
    bar = bars.read_kind("tqdm")(io.StringIO(), 3, 10)
    bar.close()
    assert made[0]["initial"] == 3
    assert made[1] == "closed"


def test_lines_of_json_are_json_and_hold_what_is_new():
    file = io.StringIO()
    bar = bars.read_kind("json")(file, 0, 20)
    bar.draw(10, {"loss": float("nan"), "train/loss": float("inf")}, None)
    bar.draw(15, {"loss": 0.5}, 2.0)
    first, second = [json.loads(line, parse_constant=pytest.fail) for line in lines(file)]
    assert first == {
        "step": 10,
        "total": 20,
        "steps_per_second": None,
        "seconds_left": None,
        "loss": None,
        "train/loss": None,
    }
    assert second == {
        "step": 15,
        "total": 20,
        "steps_per_second": 2.0,
        "seconds_left": 2.5,
        "loss": 0.5,
    }


def lines(file):
    return file.getvalue().splitlines()


def test_an_unknown_kind_is_refused():
    with pytest.raises(sf.ConfigError, match="expected 'tqdm', 'rich' or 'json', got 'bar'"):
        bars.read_kind("bar")


@pytest.mark.parametrize("kind", ["tqdm", "rich"])
def test_an_absent_package_names_the_command_that_installs_it(kind, monkeypatch):
    monkeypatch.setattr(bars, "find_spec", lambda name: None)
    said = rf"expected {kind}, which is not installed; .* pip install 'stepfold\[{kind}\]'"
    with pytest.raises(sf.ConfigError, match=said):
        bars.read_kind(kind)
