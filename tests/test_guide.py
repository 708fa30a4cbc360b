"""Every page of the guide runs as a program, and prints what it shows; the site has no gaps."""

import importlib.util
import io
import itertools
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import stepfold
from stepfold import moved

GUIDE = Path(__file__).parent.parent / "examples" / "guide"


def load(name):
    spec = importlib.util.spec_from_file_location(name, GUIDE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pages, generated = load("pages"), load("generated")

PAGES = [str(page.relative_to(GUIDE)) for page in pages.all_pages()]


@pytest.mark.full  # `.ci/run` always runs all
@pytest.mark.parametrize("page", PAGES)
def test_page_runs_and_prints_what_it_shows(page, program_server, tmp_path):
    program_server.run([GUIDE / "pages.py", str(GUIDE / page)], cwd=tmp_path)


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


def test_the_set_up_at_the_end_runs_first(tmp_path):
    page = tmp_path / "page.md"
    answer = "```python\nprint(x + 1)\n```\n```text\n2\n```\n"
    page.write_text(f"{answer}\n## Set-up\n\n<details>\n\n```python\nx = 1\n```\n\n</details>\n")
    assert [block.code for block in pages.read_blocks(page)] == ["x = 1\n", "print(x + 1)\n"]
    assert list(pages.run_page(page)) == []


RAISES = r"refuse|warn|DamageError|(Config|Loss|Sharding|Checkpoint|Data|TreeMismatch|Retrace)Error"


def strings_of_messages(source):
    """Return the longest literal part of each string in the calls that raise or warn."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    depth, start, parts = 0, None, {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    for before, token in itertools.pairwise(tokens):
        if token.string == "(" and token.type == tokenize.OP:
            depth += 1
            if start is None and re.fullmatch(RAISES, before.string):
                start = depth
        elif token.string == ")" and token.type == tokenize.OP:
            start = None if start == depth else start
            depth -= 1
        elif start is not None and token.type in parts:
            text = re.sub(r"\{[^{}]*\}", "{", token.string)  # before Python 3.12, values are inside
            pieces = re.split(r"""[{}"]|\\n|'$|^f?'""", text)
            yield " ".join(max(pieces, key=len).split())


def test_messages_has_the_text_of_every_error_and_warning():
    """Found by another way: from tokens instead of the syntax tree."""
    (root,) = map(Path, stepfold.__path__)
    messages = [m.text for folder in generated.TOPICS for m in generated.messages(folder)]
    listed = " ".join(" ".join(messages).split())
    missing = {
        text
        for path in root.rglob("*.py")
        for text in strings_of_messages(path.read_text())
        if len(re.findall(r"[a-z]{2,}", text)) > 2 and text not in listed
    }
    assert missing == set()
    assert len({*messages}) > 600


def test_each_page_of_messages_is_listed_and_not_empty():
    index = (GUIDE / "troubleshooting" / "index.md").read_text()
    listed = re.search(r"```{toctree}\n:maxdepth: 1\n(.*?)\n```", index, re.DOTALL)[1]
    assert listed.split() == [*generated.TOPICS]
    assert all(generated.messages(folder) for folder in generated.TOPICS)


def test_a_message_has_the_values_of_names(tmp_path, monkeypatch):
    monkeypatch.setattr(stepfold, "__path__", [str(tmp_path)])
    source = """
    def check(n, what):
        advice = "not this"
        advice = "give one"
        if n:
            advice = "give two"
        refuse(f"n={n}", f"a {what}", repr(n), advice, kind=DataError)
    """
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "one.py").write_text(source.replace("\n    ", "\n"))
    assert {*generated.messages("data")} == {
        ("DataError", "n=…: expected a …, got …; give one"),
        ("DataError", "n=…: expected a …, got …; give two"),
    }


def test_a_notebook_has_the_code_of_its_page():
    for name in generated.NOTEBOOKS:
        page = GUIDE / f"{name}.md"
        install, *cells = generated.notebook(page.read_text(), "%pip")["cells"]
        assert install["source"] == ["%pip"]
        code = ["".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code"]
        assert code == [block.code for block in pages.read_blocks(page)]


@pytest.mark.full
@pytest.mark.parametrize("name", generated.NOTEBOOKS)
def test_a_notebook_runs(name, tmp_path):
    packages = generated.NOTEBOOKS[name]
    install = generated.INSTALL.format(repository="none", packages=packages)
    page = (GUIDE / f"{name}.md").read_text()
    path = tmp_path / "notebook.ipynb"
    path.write_text(json.dumps(generated.notebook(page, install)))
    execute = "from nbclient.cli import main; main()"
    command = [sys.executable, "-c", execute, "--inplace", path.name]
    subprocess.run(command, cwd=tmp_path, check=True)
    cells = json.loads(path.read_text())["cells"]
    shown = [output for cell in cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", ()) for output in shown)


# Names of `stepfold.adapter` that it does not import, since few programs use them.
TRAINERS = (
    *(f"stepfold.adapter.qurious.{name}" for name in ("Model", "Trainer")),
    *("stepfold.adapter.hezar.Trainer", "stepfold.adapter.hezar.TrainerConfig"),
    *("stepfold.adapter.hezar.MetricConfig", "stepfold.adapter.hezar.MetricsHandler"),
)


def test_reference_has_every_public_name_once():
    documented = []
    for page in sorted((GUIDE / "reference").glob("*.md")):
        directive = r"^\.\. (currentmodule|auto(?:class|function|exception|data)):: ([\w.]+)$"
        for kind, name in re.findall(directive, page.read_text(), re.MULTILINE):
            if kind == "currentmodule":
                module = name
            else:
                documented.append(f"{module}.{name}")
    assert sorted(documented) == sorted({*generated.public_names().values(), *TRAINERS})


def test_the_reference_begins_with_the_names_of_stepfold():
    text = (GUIDE / "reference" / "index.md").read_text()
    table = text.partition("The rest is in modules")[0]
    assert sorted(re.findall(r"`sf\.(\w+)`", table)) == stepfold.__all__
    for module in stepfold._PUBLIC:
        assert f"[`sf.{module}`](" in text


def test_the_table_of_moved_names_has_what_the_warnings_say():
    table = generated.moved_names()
    assert "| `sf.stop_early` | `sf.hooks.stop_early` |" in table
    listed = re.findall(r"^\| `sf\.(\w+)` \|", table, re.MULTILINE)
    assert listed == sorted([*moved.MOVED, *moved.GONE], key=str.lower)
    for name, place in moved.MOVED.items():
        assert re.search(rf"^\| `sf\.{name}` \| `sf\.{place}\b", table, re.MULTILINE)


def links_of(page):
    """Return the pages that the text of a page links to, without its table of contents."""
    targets = re.findall(r"\]\(([^)#\s]+\.md)(?:#[^)]*)?\)", page.read_text())
    return {(page.parent / target).resolve() for target in targets} - {page.resolve()}


def test_every_page_is_linked_from_the_text_of_another():
    written = {f"examples/{path.stem}" for path in GUIDE.parent.glob("*.py")}
    written |= {f"troubleshooting/{folder}" for folder in generated.TOPICS}
    links = {page.resolve(): links_of(page) for page in GUIDE.rglob("*.md")}
    names = {page: page.relative_to(GUIDE.resolve()).with_suffix("").as_posix() for page in links}
    unlinked = {names[page] for page in links} - written - {"index"}
    unlinked -= {names.get(target) for targets in links.values() for target in targets}
    assert unlinked == set()
    for folder in ("tutorials", "recipes", "ideas", "coming-from", "reference"):
        index = GUIDE / folder / "index.md"
        assert links[index.resolve()] >= {
            page.resolve() for page in GUIDE.glob(f"{folder}/[!i]*.md")
        }


FEATURES = {
    "files": "recipes/corpus.md",
    "workers": "recipes/data.md",
    "pack": "recipes/data.md",
    "evaluate_run": "recipes/metrics.md",
    "predict": "recipes/using.md",
    "fit": "recipes/clusters.md",  # its compilation cache
    "Report": "recipes/largest-model.md",
    "choose_remat": "recipes/devices.md",
    "replay": "recipes/failures.md",
}


@pytest.mark.parametrize("name", FEATURES)
def test_the_reference_links_to_the_guide_of_a_feature(name):
    entry = re.compile(rf"^\.\. auto(?:class|function):: {name}$", re.MULTILINE)
    (reference,) = (p for p in GUIDE.glob("reference/*.md") if entry.search(p.read_text()))
    page = GUIDE / FEATURES[name]
    assert page.resolve() in links_of(reference)
    assert re.search(rf"\b(sf\.)?{name}\b", page.read_text())


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


@pytest.mark.full
def test_pages_are_small(site):
    sizes = {page: page.stat().st_size for page in site.rglob("*.html")}
    assert {page.name: size for page, size in sizes.items() if size > 300_000} == {}


@pytest.mark.full
@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("inference", "recipes/using"),
        ("perplexity", "recipes/seq2seq"),
        ("generation", "examples/generation"),
        ("seq2seq", "recipes/seq2seq"),
        ("GAN", "recipes/gan"),
        ("MAML", "recipes/meta-learning"),
        ("smoothing", "recipes/classifiers"),
        ("NNX", "recipes/nnx"),
        ("EMA", "recipes/ema"),
        ("sweep", "recipes/best-of-a-sweep"),
        ("Colab", "installation"),
        ("offline", "installation"),
        ("Lightning", "why"),
        ("donation", "glossary"),
        ("divisor", "troubleshooting/core"),
    ],
)
def test_search_finds(word, page, site):
    from sphinx.search.en import SearchEnglish

    index = (site / "searchindex.js").read_text()
    index = json.loads(index.removeprefix("Search.setIndex(").removesuffix(")"))
    stem = SearchEnglish({}).stem(word.lower())
    found = [index[kind].get(stem, []) for kind in ("terms", "titleterms")]
    numbers = [number for one in found for number in (one if isinstance(one, list) else [one])]
    assert page in [index["docnames"][number] for number in numbers]


@pytest.mark.full
def test_examples_are_links(site):
    """Wherever a page names one."""
    named = 0
    for page in site.rglob("*.html"):
        text = re.sub(r"<pre.*?</pre>", "", page.read_text(), flags=re.DOTALL)
        literal = r'(.{200})<code[^>]*><span class="pre">examples/(\w+)\.py</span></code>'
        for match in re.finditer(literal, text, re.DOTALL):
            own = page == site / "examples" / f"{match[2]}.html"
            assert own or f'{match[2]}.html"' in match[1], (page.name, match[2])
            named += not own
    assert named > 20
