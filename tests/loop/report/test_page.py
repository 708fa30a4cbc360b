import json
import re
from html.parser import HTMLParser

import pytest

from stepfold.loop.report.page import render
from stepfold.loop.report.reading import read_run

from . import made

VOID = {"meta", "link", "input", "br"}
HOSTILE = "</script><script>alert('x')</script>\"'&<!--"


class Page(HTMLParser):
    """Read a page, and see that every tag is closed in its place."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.wrong = [], [], {}, []
        self.feed(text)
        self.close()
        assert (self.open, self.wrong) == ([], [])

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if self.open[-1:] == [tag]:
            self.open.pop()
        else:
            self.wrong.append((tag, list(self.open)))

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def page(*places, **options):
    return render([read_run(place) for place in places], **{"now": made.NOW, **options})


@pytest.fixture
def folder(tmp_path):
    return made.run(tmp_path / "run", arguments={"steps": 100})


def test_it_is_well_formed_and_says_what_there_is(folder):
    text = page(folder)
    found = Page(text)
    assert found.texts["title"] == ["run"]
    assert found.texts["h1"] == ["run"]
    assert "All 100 steps were done." in "".join(found.texts["p"])
    assert found.texts["h3"][0] == "loss"
    assert "lowest 1.5 at step 50" in found.texts["dd"]


def test_it_asks_for_nothing_outside_itself(folder):
    found, text = Page(page(folder)), page(folder)
    for _, attrs in found.tags:
        assert not {"src", "srcset", "action", "data"} & attrs.keys()
        assert attrs.get("href", "data:,") == "data:,"
    assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", text)
    (policy,) = [a["content"] for a in found.all("meta") if "default-src" in a.get("content", "")]
    assert "default-src 'none'" in policy


def test_names_stay_text_wherever_they_are(tmp_path):
    rows = {1: {f"train/{HOSTILE}": 1.0, HOSTILE: 2.0}, 2: {f"{HOSTILE}/x": 1.0}}
    leaves = [[HOSTILE, [2], HOSTILE, 2]]
    place = made.run(
        tmp_path / HOSTILE.replace("/", "|"),
        rows,
        [made.attempt(error={"type": "E", "message": HOSTILE})],
        arguments={"hooks": [HOSTILE]},
        devices={"kind": HOSTILE, "count": 1},
        parameters={"count": 2, "bytes": 8, "leaves": leaves},
        program=HOSTILE,
    )
    for text in (page(place), page(place, made.run(tmp_path / "b"))):
        found = Page(text)
        assert len(found.all("script")) == 2
        assert "alert" not in found.texts["script"][1]
        assert HOSTILE in [chart[0][0] for chart in data(text)] + found.texts["h3"]


def data(text):
    return json.loads(Page(text).texts["script"][0])


def test_the_script_has_the_points_of_each_chart_in_order(folder):
    text = page(folder)
    assert data(text)[0] == [
        ["train", 0, False, [10.0, 50.0, 100.0], [2.0, 1.0, 0.5]],
        ["eval", 1, True, [50.0, 100.0], [1.5, 1.75]],
    ]
    figures = [int(a["data-chart"]) for a in Page(text).all("figure")]
    assert figures == list(range(len(data(text))))


def test_what_is_not_finite_is_told(tmp_path):
    nan, inf = float("nan"), float("inf")
    rows = {10: {"train/loss": 1.0}, 20: {"train/loss": nan}, 30: {"train/loss": -inf}}
    text = page(made.run(tmp_path, rows))
    assert data(text)[0][0][4] == [1.0, "NaN", "-∞"]
    assert "not finite from step 20" in Page(text).texts["span"]
    rows = {10: {"train/loss": nan}}
    assert "No finite value." in Page(page(made.run(tmp_path, rows))).texts["p"]


def test_only_a_run_under_way_loads_itself_anew(tmp_path):
    heard = made.NOW.isoformat()
    place = made.run(tmp_path / "a", attempts=[made.attempt(ended=None, updated=heard)])
    refreshes = lambda text: [a for a in Page(text).all("meta") if a.get("http-equiv") == "refresh"]
    assert refreshes(page(place, every=30)) == [{"http-equiv": "refresh", "content": "30"}]
    assert refreshes(page(place)) == []
    assert refreshes(page(place, made.run(tmp_path / "b"), every=30)) == []
    assert refreshes(page(made.run(tmp_path / "a"), every=30)) == []


def test_charts_are_drawn_on_both_scales_without_a_script(folder):
    found = Page(page(folder))
    kinds = [a["class"] for a in found.all("svg") if a.get("role") == "img"]
    assert kinds.count("linear") == kinds.count("log") == len(found.all("figure"))
    assert all(a["aria-label"] for a in found.all("svg") if a.get("role") == "img")


def test_several_runs_are_told_apart_by_more_than_color(tmp_path):
    text = page(made.run(tmp_path / "a"), made.run(tmp_path / "b"))
    found = Page(text)
    assert found.all("body") == [{"class": "several"}]
    assert re.search(r"\.several \.line\.s1 \{ stroke-dasharray", text)
    assert {"a · train", "b · train"} <= set(found.texts["b"])


def test_an_empty_run_and_an_old_one_have_a_page(tmp_path):
    assert "No metrics yet." in Page(page(tmp_path)).texts["p"]
    made.metrics(tmp_path, {5: {"train/loss": 1.0}})
    assert "There is no run.json" in "".join(Page(page(tmp_path)).texts["p"])


def test_damaged_lines_are_told(folder):
    path = folder / "metrics.jsonl"
    path.write_text("{]\n" + path.read_text())
    assert "1 line of metrics.jsonl cannot be read" in page(folder)


def test_very_many_steps_make_a_small_page_with_every_spike(tmp_path):
    rows = [{"step": k, "train/loss": 9.5 if k == 33_333 else 1.0} for k in range(100_000)]
    lines = [json.dumps(row) + "\n" for row in rows]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    text = page(tmp_path)
    assert len(text) < 150_000
    ((_, _, _, steps, values),) = data(text)[0]
    assert values[steps.index(33_333.0)] == 9.5
