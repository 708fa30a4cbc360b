"""Every page of the guide runs as a program, and prints what it shows; the site has no gaps."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stepfold
from stepfold import adapter

from .forks import PRELOAD, ForkServer

GUIDE = Path(__file__).parent.parent / "examples" / "guide"
SPEC = importlib.util.spec_from_file_location("pages", GUIDE / "pages.py")
pages = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(pages)

PAGES = [str(page.relative_to(GUIDE)) for page in pages.all_pages()]
# Those that run by default. The others run with --full, and `.ci/run` always runs all.
DEFAULT = {"index.md", "tutorials/first-run.md"}


@pytest.fixture(scope="module")
def server():
    with ForkServer(PRELOAD + ", sklearn.datasets, matplotlib.pyplot") as server:
        yield server


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.full] * (page not in DEFAULT)) for page in PAGES]
)
def test_page_runs_and_prints_what_it_shows(page, server, tmp_path):
    server.run([GUIDE / "pages.py", str(GUIDE / page)], cwd=tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_page_shows_the_pictures_that_it_draws(page):
    text = (GUIDE / page).read_text()
    for name in re.findall(r'savefig\("([\w-]+)\.svg"\)', text):
        assert f"pictures/{name}-light.svg)" in text
        assert (GUIDE / "pictures" / f"{name}-light.svg").exists()
        assert (GUIDE / "pictures" / f"{name}-dark.svg").exists()


def test_a_page_that_prints_something_else_fails(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n")
    done = subprocess.run(
        [sys.executable, GUIDE / "pages.py", page], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "page.md:2: expected\n3\ngot\n2\n" in done.stderr


def test_reference_has_every_public_name_once():
    documented = []
    for page in sorted((GUIDE / "reference").glob("*.md")):
        text = page.read_text()
        (module,) = re.findall(r"^\.\. currentmodule:: ([\w.]+)$", text, re.MULTILINE) or [""]
        names = re.findall(
            r"^\.\. auto(?:class|function|exception|data):: ([\w.]+)$", text, re.MULTILINE
        )
        documented += [f"{module}.{name}" for name in names]
    public = {f"stepfold.{name}" for name in stepfold.__all__}
    public |= {f"stepfold.adapter.{name}" for name in adapter.__all__}
    public |= {f"stepfold.adapter.qurious.{name}" for name in ("Model", "Trainer")}
    names = "Trainer", "TrainerConfig", "MetricConfig", "MetricsHandler"
    public |= {f"stepfold.adapter.hezar.{name}" for name in names}
    assert public <= {*documented}
    assert len(documented) == len({*documented})


# What a browser requests by itself from another host. A plain link is not.
REQUEST = r"""<(?:script|img|iframe|source)\b[^>]*\bsrc(?:set)?="(?:https?:)?//|"""
REQUEST += r"""<link\b(?=[^>]*stylesheet|[^>]*icon|[^>]*preload)[^>]*href="(?:https?:)?//|"""
REQUEST += r"""@import|url\(["']?(?:https?:)?//"""


@pytest.mark.parametrize(
    "text",
    [
        '<script async src="https://host/a.js">',
        '<img alt="" src="//host/a.png">',
        '<link rel="stylesheet" href="https://host/a.css">',
        '<link href="https://host/a.css" rel="stylesheet">',
        "a { src: url('https://host/a.woff') }",
    ],
)
def test_a_request_of_another_host_is_found(text):
    assert re.search(REQUEST, text)


@pytest.fixture(scope="module")
def site(request, tmp_path_factory):
    """Build the site, in which a warning is an error, unless `--site` names one."""
    if (built := request.config.getoption("--site")) is not None:
        return Path(built)
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "--fail-on-warning", "--keep-going"]
    subprocess.run([*command, GUIDE, out], check=True)
    return out


@pytest.mark.full
def test_a_page_requests_nothing_from_other_hosts(site):
    files = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(files) > 50
    assert [file for file in files if re.search(REQUEST, file.read_text())] == []


@pytest.mark.full
def test_links_within_the_site_lead_somewhere(site):
    anchors = {}
    for page in site.rglob("*.html"):
        anchors[page] = set(re.findall(r'\bid="([^"]+)"', page.read_text()))
    broken = []
    for page in anchors:
        for link in re.findall(r'<a [^>]*href="([^":]*)"', page.read_text()):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors.get(target, {anchor})):
                broken.append((str(page.relative_to(site)), link))
    assert broken == []
