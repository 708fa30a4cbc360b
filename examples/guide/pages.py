"""Run the pages of the guide, and draw their pictures.

    python examples/guide/pages.py PAGE.md              runs a page in the current folder
    python examples/guide/pages.py --pictures [NAME…]   draws all pictures again, or those of pages
    python examples/guide/pages.py --examples [NAME…]   records what the examples print

A picture is drawn by a page, or by a script in `pictures/` if its code would not help a reader.

A page is one program. What a block does depends on its language:

- `python` runs. A block whose first line is `# name.py` is written to this file instead.
- `sh` runs by bash, in the folder of the program.
- `text`, right after one of them, is what it prints. `...` stands for anything, as in doctest.
- Blocks below the heading "Set-up" at the end of a page run first.
- All others, such as `console` and `yaml`, are only shown.

A page draws a picture by `savefig("name.svg")` of matplotlib, and shows `pictures/name-light.svg`.
On a dark page, the site shows `pictures/name-dark.svg` in its place. A script may also make
`name-light.png` and `name-dark.png`, such as screenshots, which are kept as they are.
"""

import contextlib
import doctest
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

GUIDE = Path(__file__).parent
# A light picture in the colors of the site, of which each has one for dark pages.
STYLE = {
    "figure.figsize": "6.4, 3.2",
    "figure.constrained_layout.use": "True",
    "font.family": "sans-serif",
    "font.size": "10",
    "axes.spines.top": "False",
    "axes.spines.right": "False",
    "axes.edgecolor": "57606a",
    "axes.labelcolor": "24292f",
    "axes.titlecolor": "24292f",
    "text.color": "24292f",
    "xtick.color": "57606a",
    "ytick.color": "57606a",
    "legend.frameon": "False",
    "axes.prop_cycle": "cycler('color', ['0969da', 'bc4c00', '1a7f37', '8250df', 'cf222e'])",
    "savefig.transparent": "True",
    "svg.hashsalt": "stepfold",
    "svg.fonttype": "none",  # text is drawn in the font of the reader
}
DARK = {
    "#24292f": "#e6edf3",
    "#57606a": "#9198a1",
    "#0969da": "#58a6ff",
    "#bc4c00": "#f0883e",
    "#1a7f37": "#3fb950",
    "#8250df": "#bc8cff",
    "#cf222e": "#ff7b72",
}


class Block(NamedTuple):
    """A block of code that runs, the number of its first line, and what it prints, if shown."""

    language: str
    code: str
    line: int
    output: str | None


def all_pages() -> list[Path]:
    """Return the pages with code that runs."""
    return sorted(page for page in GUIDE.rglob("*.md") if read_blocks(page))


def read_blocks(page: Path) -> list[Block]:
    """Return the blocks of a page that run, in their order."""
    text = page.read_text()
    fence = r"^```(\w+)\n(.*?)^```$"
    blocks, end, runs = [], 0, False
    for match in re.finditer(fence, text, re.MULTILINE | re.DOTALL):
        language, code = match.groups()
        if language in ("python", "sh"):
            blocks.append(Block(language, code, text[: match.start()].count("\n") + 2, None))
        elif language == "text" and runs and not text[end : match.start()].strip():
            blocks[-1] = blocks[-1]._replace(output=code)
        end, runs = match.end(), language in ("python", "sh")
    before, set_up, _ = text.partition("\n## Set-up\n")
    if set_up:
        blocks.sort(key=lambda block: block.line < before.count("\n"))
    return blocks


def run_page(page: Path) -> Iterator[str]:
    """Run a page in the current folder; return a description of each output that differs."""
    checker, names = doctest.OutputChecker(), {"__name__": "__main__"}
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for block in read_blocks(page):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            _run_block(block, page, names)
        print(printed.getvalue(), end="", flush=True)
        if block.output is None or checker.check_output(block.output, printed.getvalue(), flags):
            continue
        yield f"{page}:{block.line}: expected\n{block.output}got\n{printed.getvalue()}"


def _run_block(block: Block, page: Path, names: dict[str, object]) -> None:
    if block.language == "sh":
        command = ["bash", "-euo", "pipefail", "-c", block.code]
        # `python` is the one that runs this page, also if its environment is not activated.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        ended = subprocess.run(
            command, check=True, env=os.environ | {"PATH": path}, stdout=subprocess.PIPE, text=True
        )
        print(ended.stdout, end="")
    elif file := re.match(r"# ([\w/]+\.py)\n", block.code):
        Path(file[1]).write_text(block.code)
    else:
        # Blank lines in front make a traceback point at the lines of the page.
        code = "\n" * (block.line - 1) + block.code
        exec(compile(code, str(page), "exec", dont_inherit=True), names)


def record_examples(names: Sequence[str]) -> None:
    """Run examples in empty folders, and keep what they print for their pages."""
    for path in sorted(GUIDE.parent.glob("*.py")):
        if names and path.name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, path]
            ended = subprocess.run(
                command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
            )
            printed = ended.stdout.replace(f"{Path(folder).resolve()}/", "")
        (GUIDE / "examples" / f"{path.stem}.txt").write_text(printed)


def draw_pictures(names: Sequence[str]) -> None:
    """Run pages and scripts that draw, in empty folders, and keep the pictures, light and dark."""
    drawing = [page for page in all_pages() if "savefig(" in page.read_text()]
    drawing += sorted((GUIDE / "pictures").glob("*.py"))
    for path in drawing:
        if names and path.name not in names:
            continue
        command = [path] if path.suffix == ".py" else [__file__, path]
        with tempfile.TemporaryDirectory() as folder:
            style = "".join(f"{name}: {value}\n" for name, value in STYLE.items())
            Path(folder, "matplotlibrc").write_text(style)
            subprocess.run([sys.executable, *map(str, command)], cwd=folder, check=True)
            for picture in Path(folder).glob("*.svg"):
                _keep(picture)
            for picture in Path(folder).glob("*.png"):  # light and dark ones
                shutil.copy(picture, GUIDE / "pictures")


def _keep(picture: Path) -> None:
    svg = re.sub(r" *<metadata>.*?</metadata>\n", "", picture.read_text(), flags=re.DOTALL)
    svg = "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"
    (GUIDE / "pictures" / f"{picture.stem}-light.svg").write_text(svg)
    dark = re.sub("|".join(DARK), lambda match: DARK[match[0]], svg)
    (GUIDE / "pictures" / f"{picture.stem}-dark.svg").write_text(dark)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--pictures"]:
        draw_pictures(sys.argv[2:])
    elif sys.argv[1:2] == ["--examples"]:
        record_examples(sys.argv[2:])
    elif len(sys.argv) == 2:
        page = Path(sys.argv[1]).resolve()
        sys.path[0] = ""  # as in an interactive session, so that a page can import what it wrote
        sys.exit("\n".join(run_page(page)) or 0)
    else:
        sys.exit(__doc__)
