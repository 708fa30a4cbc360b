"""`python -m stepfold rename` rewrites names of version 0.2, and nothing else."""

import ast
import builtins
import io
import json
import os
import stat
import subprocess
import sys
import tokenize

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from stepfold import __main__ as commands
from stepfold.moved import ARGUMENTS, KEYWORDS, MOVED
from stepfold.rename import rewrite


def check(source, expected, *, left=()):
    """Rewrite a program, and check what stays for its author."""
    new, notes = rewrite(source)
    assert new == expected
    assert [note.text for note in notes if not note.is_change] == [*left]
    assert rewrite(new)[0] == new


# Excerpts of examples of version 0.2.


def test_attributes():
    check(
        """
import jax

import stepfold as sf


def names_of(at):
    rules = [(at + "self_attn.q_proj.weight", "blocks/q", "transpose")]
    return sf.NameMap(rules, ignore=[at + "self_attn.rotary_emb"])  # a buffer


params = sf.load_params(folder, jax.eval_shape(start, key), names=names_of("model."))
step = sf.make_train_step(loss_fn, tx, grad=sf.ordered(plan))  # the bits of any mesh
print(sf.parameter_table(params), sf.mean, "sf.NameMap")
""",
        """
import jax

import stepfold as sf


def names_of(at):
    rules = [(at + "self_attn.q_proj.weight", "blocks/q", "transpose")]
    return sf.checkpoint.NameMap(rules, ignore=[at + "self_attn.rotary_emb"])  # a buffer


params = sf.checkpoint.load_params(folder, jax.eval_shape(start, key), names=names_of("model."))
step = sf.make_train_step(loss_fn, tx, grad=sf.sharding.ordered(plan))  # the bits of any mesh
print(sf.inspect.parameter_table(params), sf.mean, "sf.NameMap")
""",
    )


def test_calls_that_need_an_argument():
    check(
        """
import stepfold

hooks = [
    stepfold.roll_back_on_spike(window=20, deviations=50.0, skip=3),
    stepfold.roll_back_on_nonfinite(), stepfold.stop_on_nonfinite("train/loss"),
]
tracker = stepfold.trackio_writer(
    project="digits",
    name="a",  # of the run
)
more = stepfold.trackio_writer(
    **options  # from the file
    # and nothing else
)
files = [stepfold.csv_writer("a.csv",), *[stepfold.csv_writer(
    folder / "b.csv"), stepfold.jsonl_writer("c", csv="d")]]
""",
        """
import stepfold

hooks = [
    stepfold.hooks.on_spike(window=20, deviations=50.0, skip=3, action="go_back"),
    stepfold.hooks.on_nonfinite(action="go_back"), stepfold.hooks.on_nonfinite("train/loss"),
]
tracker = stepfold.writers.wandb(
    project="digits",
    name="a",  # of the run
    library="trackio",
)
more = stepfold.writers.wandb(
    **options, library="trackio"  # from the file
    # and nothing else
)
files = [stepfold.writers.jsonl("a.csv", csv=True), *[stepfold.writers.jsonl(
    folder / "b.csv", csv=True), stepfold.writers.jsonl("c", csv="d")]]
""",
    )


def test_imports_are_split():
    check(
        """
from stepfold import (  # noqa: F401
    Checkpoints,
    # stops a run
    stop_early,  # of no use to some
    check_step as check,
    fit,
    stop_on_spike as spike,
    every,
)
if True:
    from stepfold import replay, mean, ConfigError  # noqa: F401
from stepfold import verify; from stepfold import fsdp, fit
from stepfold import stop_on_corruption, weight_statistics, memory_use, throughput, BaseHook
""",
        """
from stepfold import (  # noqa: F401
    Checkpoints,
    fit,
)
from stepfold.debug import (  # noqa: F401
    check_step as check,
)
from stepfold.hooks import (  # noqa: F401
    # stops a run
    stop_early,  # of no use to some
    on_spike as spike,
    every,
)
if True:
    from stepfold import mean  # noqa: F401
    from stepfold.debug import replay  # noqa: F401
    from stepfold.errors import ConfigError  # noqa: F401
from stepfold.checkpoint import verify; from stepfold import fit; from stepfold.sharding import fsdp
from stepfold.hooks import (
    stop_on_corruption,
    weight_statistics,
    memory_use,
    throughput,
    BaseHook,
)
""",
    )


def test_names_that_were_imported():
    check(
        """
import wandb
from stepfold import console_writer, csv_writer as table, stop_on_spike, wandb_writer
from stepfold import roll_back_on_nonfinite, roll_back_on_spike, trackio_writer, jsonl_writer

hooks = [stop_on_spike(), roll_back_on_nonfinite(limit=1), roll_back_on_spike()]
writers = [console_writer(), table("a.csv"), wandb_writer(), wandb.init, jsonl_writer]
make = trackio_writer
""",
        """
import wandb
from stepfold.hooks import on_spike
from stepfold.writers import console, jsonl as table, wandb as wandb_writer
from stepfold import trackio_writer
from stepfold.hooks import on_nonfinite, on_spike
from stepfold.writers import jsonl

hooks = [on_spike(), on_nonfinite(limit=1, action="go_back"), on_spike(action="go_back")]
writers = [console(), table("a.csv", csv=True), wandb_writer(), wandb.init, jsonl]
make = trackio_writer
""",
        left=[
            'trackio_writer is now sf.writers.wandb(library="trackio"); not changed, since '
            "trackio_writer is not only called"
        ],
    )


def test_keywords():
    check(
        """
import stepfold as sf
from stepfold.hooks import on_spike
sf.stop_on_nonfinite(pattern="train/loss")
sf.skip_spikes(tx, sigma = 3, sigma_other=1)
on_spike(
    sigma=3,  # sigma
)
other(sigma=3)
""",
        """
import stepfold as sf
from stepfold.hooks import on_spike
sf.hooks.on_nonfinite(metric="train/loss")
sf.optim.skip_spikes(tx, deviations = 3, sigma_other=1)
on_spike(
    deviations=3,  # sigma
)
other(sigma=3)
""",
    )


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "import stepfold as sf\nmake = sf.csv_writer\n",
            "sf.csv_writer is now sf.writers.jsonl(csv=True); not changed, since it is not called "
            "here",
        ),
        (
            "import stepfold as sf\ndef f(sf):\n    return sf.every\n",
            "sf.every is now sf.hooks.every; not changed, since sf is something else in line 2",
        ),
        (
            "import stepfold as sf\nimport safetensors as sf\nsf.contents('a')\n",
            "sf.contents is now sf.checkpoint.contents; not changed, since sf is something else in "
            "line 2",
        ),
        ("import stepfold as sf\nsf.stop_after(3)\n", "sf.stop_after is now fit(time_limit=…)"),
        ("from stepfold import average\n", "average is now sf.checkpoint.average_checkpoints"),
        (
            "from stepfold import *\nstop_early\n",
            "`from stepfold import *` has no moved names; import them",
        ),
        (
            "from stepfold import roll_back_on_spike\n__all__ = ['roll_back_on_spike']\n",
            'roll_back_on_spike is now sf.hooks.on_spike(action="go_back"); not changed, since '
            "roll_back_on_spike is not only called",
        ),
    ],
)
def test_what_is_not_clear_is_left_with_a_note(source, says):
    check(source, source, left=[says])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (  # another module may import it from here
            "from stepfold import jsonl_writer\n__all__ = ['jsonl_writer']\n",
            "from stepfold.writers import jsonl as jsonl_writer\n__all__ = ['jsonl_writer']\n",
        ),
        (
            "from stepfold import console_writer\nconsole = console_writer()\n",
            "from stepfold.writers import console as console_writer\nconsole = console_writer()\n",
        ),
        (
            "try:\n    import stepfold as sf\nexcept ImportError:\n    sf = None\nsf.every\n",
            "try:\n    import stepfold as sf\nexcept ImportError:\n    sf = None\nsf.hooks.every\n",
        ),
        (  # the same name in two functions
            "def f():\n    from stepfold import stop_on_spike\n    stop_on_spike()\n" * 2,
            "def f():\n    from stepfold.hooks import on_spike\n    on_spike()\n" * 2,
        ),
        (
            "import stepfold as sf\nä, b = 'ö', sf . every\n",
            "import stepfold as sf\nä, b = 'ö', sf . hooks.every\n",
        ),
        (
            "import stepfold as sf\r\nsf.trackio_writer(\r\n    a=1,\r\n)\r\n",
            "import stepfold as sf\r\nsf.writers.wandb(\r\n    a=1,\r\n"
            '    library="trackio",\r\n)\r\n',
        ),
        (
            "if x: from stepfold import fit, every\n",
            "if x: from stepfold import fit; from stepfold.hooks import every\n",
        ),
    ],
)
def test_special_cases(source, expected):
    check(source, expected)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="has no tokens in an f-string")
def test_f_strings():
    check(
        'import stepfold as sf\nprint(f"{sf.latest_step(folder):>8} sf.every")\n',
        'import stepfold as sf\nprint(f"{sf.checkpoint.latest_step(folder):>8} sf.every")\n',
    )


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="has tokens in an f-string")
def test_f_strings_without_tokens():
    source = 'import stepfold as sf\nprint(f"{sf.latest_step(folder):>8}")\n'
    says = "sf.latest_step is now sf.checkpoint.latest_step; not changed, since it is in an "
    check(source, source, left=[f"{says}f-string"])


# Programs of random statements mean the same afterwards.


class Recorder:
    """What stands for stepfold: a call notes what it would call in this version."""

    def __init__(self, calls, path=""):
        self.calls, self.path = calls, path

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorder(self.calls, f"{self.path}.{name}".strip("."))

    def __call__(self, *args, **kwargs):
        renamed = KEYWORDS.get(MOVED.get(self.path, self.path), {})
        kwargs = {renamed.get(name, name): value for name, value in kwargs.items()}
        self.calls.append((*self.place, args, kwargs))
        return len(self.calls)

    @property
    def place(self):
        return MOVED.get(self.path, self.path), ARGUMENTS.get(self.path, {})


class Other:
    """An object of the user, whose attributes have the names of stepfold's."""

    def __getattr__(self, name):
        return f"other.{name}"


OTHER = Other()


def calls_of(source):
    """Run a program; return the calls of stepfold, with the arguments that an old name implies."""
    calls = []

    def load(name, *args):
        module = Recorder(calls, ".".join(name.split(".")[1:]))
        return module if name.startswith("stepfold") else None

    def use(value):
        calls.append(value.place if isinstance(value, Recorder) else value)

    exec(
        source, {"__builtins__": {**vars(builtins), "__import__": load}, "use": use, "OTHER": OTHER}
    )
    return [
        (call[0], *call[2:-1], {**call[1], **call[-1]})
        if isinstance(call, tuple) and len(call) == 4
        else call
        for call in calls
    ]


OLD = ["every", "contents", "replay", "jsonl_writer", "stop_on_spike", "console_writer", *ARGUMENTS]
USES = [
    "{x}(1, k=2)  # {x}(3)",
    "{x}({y}(), )",
    "use({x})",
    "text = '{x}()'; use(text)",
    '"""{x}\n{y}"""',
    "use([\n    {x}(i) for i in (1, 2)  # {y}\n])",
    "{x}(\n    1,\n    k={y}(\n        2\n    ),  # why\n)",
    "def f(x):\n    '''{x}'''\n    return {x}(x)\nf(3)",
    "use(f'{{{x}(1)}} {y}')",
    "{x}(**{{'k': 3}}\n    # {y}\n)",
    "{x}(*[1, 2],\n# {x}\n)",
    "def g(x, {name}=3):\n    use({name})\ng(1)",
    "def g({name}):\n    use({x})\ng(OTHER)",
    "class A:\n    {name} = OTHER\n    use({x})",
    "sf = sf if 'sf' in dir() else None",
    "{x}(sigma=3, pattern=4)",
]


@st.composite
def programs(draw):
    lines = [draw(st.sampled_from(["import stepfold as sf", "import stepfold, sys as sf"]))]
    root = "sf" if " as sf" in lines[0] and "sys" not in lines[0] else "stepfold"
    imported = {}
    for name in draw(st.lists(st.sampled_from(OLD), max_size=4, unique=True)):
        imported[name] = draw(st.sampled_from([name, name, f"own_{name}"]))
    texts = [name if name == local else f"{name} as {local}" for name, local in imported.items()]
    if texts:
        form = draw(st.sampled_from(["{}", "({})", "(\n    {},  # {}\n)"]))
        names = ", ".join(["mean", *texts])
        lines.append("from stepfold import " + form.format(names, texts[0]))
    names = [*(f"{root}.{name}" for name in OLD), *imported.values()]
    new = [MOVED[name].rpartition(".")[2] for name in imported]
    for use in draw(st.lists(st.sampled_from(USES), min_size=1, max_size=6)):
        x, y = draw(st.sampled_from(names)), draw(st.sampled_from(names))
        name = draw(st.sampled_from([root, *imported.values(), *new]))
        lines.append(use.format(x=x, y=y, name=name))
    return "\n".join(lines) + "\n"


def tokens_of(source, *kinds):
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.string for token in tokens if token.type in kinds]


def is_subsequence(short, long):
    rest = iter(long)
    return all(x in rest for x in short)


@settings(max_examples=300, deadline=None)
@given(programs())
def test_a_random_program_means_the_same(source):
    new, notes = rewrite(source)
    ast.parse(new)
    assert calls_of(new) == calls_of(source)
    assert rewrite(new)[0] == new
    assert tokens_of(new, tokenize.COMMENT) == tokens_of(source, tokenize.COMMENT)
    strings = tokens_of(source, tokenize.STRING)
    assert is_subsequence(strings, tokens_of(new, tokenize.STRING))
    if all(note.is_change for note in notes):
        roots = ("sf", "stepfold")
        nodes = [node for node in ast.walk(ast.parse(new)) if isinstance(node, ast.Attribute)]
        found = {node.attr for node in nodes if getattr(node.value, "id", "") in roots}
        assert not found & MOVED.keys()
    other = source.replace("stepfold", "optax")
    assert rewrite(other) == (other, [])


# Files


def run(*arguments):
    return commands.main(["rename", *map(str, arguments)])


OLD_SOURCE = "import stepfold as sf\n\nsf.every(3, hook)  # ü\n"
NEW_SOURCE = "import stepfold as sf\n\nsf.hooks.every(3, hook)  # ü\n"


def test_a_script_is_replaced_and_what_changed_is_printed(tmp_path, capsys):
    path, link = tmp_path / "train.py", tmp_path / "link.py"
    path.write_text(OLD_SOURCE)
    path.chmod(0o750)
    link.symlink_to(path)
    assert run("--check", link) == 1
    assert path.read_text() == OLD_SOURCE
    line = f"{link}: line 3: sf.every is now sf.hooks.every\n"
    assert capsys.readouterr().out == f"{line}1 file would change\n"
    assert run(link) == 0
    assert capsys.readouterr().out == f"{line}1 file changed\n"
    assert path.read_text() == NEW_SOURCE
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link.py", "train.py"]
    assert run("--check", path) == 0
    assert capsys.readouterr().out == "0 files would change\n"


@pytest.mark.parametrize(
    ("head", "encoding"), [("", "utf-8-sig"), ("# coding: latin-1\n", "latin-1")]
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_encodings_and_newlines_stay(head, encoding, newline, tmp_path):
    path = tmp_path / "train.py"
    path.write_bytes((head + OLD_SOURCE).replace("\n", newline).encode(encoding))
    assert run(path) == 0
    assert path.read_bytes() == (head + NEW_SOURCE).replace("\n", newline).encode(encoding)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", "x", "a.txt: expected a file that ends in .py, .ipynb or .md, got another one"),
        ("a.py", "import stepfold\nprint 'x'\n", "a.py: expected Python that parses, got Missing"),
        ("a.py", b"import stepfold\n# \xff\n", "a.py: expected a text file, got "),
        ("a.py", b"import stepfold\n\0\n", "a.py: expected Python that parses, got source code "),
        (
            "a.py",  # an argument cannot be added
            "import stepfold as sf\nsf.roll_back_on_spike(x for x in y)\n",
            "a.py: expected Python that parses, got Generator expression must be parenthesized",
        ),
        ("a.py", "import stepfold\n" + "(" * 999, "a.py: expected Python that parses, got "),
        ("a.md", b"\xff", "a.md: expected a text file, got "),
        ("a.ipynb", "{", "a.ipynb: expected JSON of a notebook, got "),
        ("a.ipynb", '{"cells": 3}', "a.ipynb: expected JSON of a notebook, got JSON of something"),
        ("a.ipynb", "[" * 99999, "a.ipynb: expected JSON of a notebook, got "),
    ],
)
def test_what_cannot_be_read_is_refused_and_left_alone(name, content, says, tmp_path, capsys):
    path, other = tmp_path / name, tmp_path / "other.py"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = path.read_bytes()
    other.write_text(OLD_SOURCE)
    assert run(path, other) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path}/{says}")
    assert path.read_bytes() == before
    assert other.read_text() == NEW_SOURCE


def test_a_directory_and_a_missing_file_are_refused(tmp_path, capsys):
    (tmp_path / "a.py").mkdir()
    assert run(tmp_path / "a.py", tmp_path / "b.py") == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("a.py: expected a text file, got a directory instead of a file; it is "
                          "left as it is")  # fmt: skip
    assert "No such file" in second


def test_a_file_that_cannot_be_written_stays(tmp_path, capsys, monkeypatch):
    path = tmp_path / "a.py"
    path.write_text(OLD_SOURCE)

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        assert run(path) == 2
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        assert run(path) == 2
    full, denied = capsys.readouterr().err.splitlines()
    assert "No space left" in full
    assert "no permission to write" in denied
    assert path.read_text() == OLD_SOURCE
    assert [each.name for each in tmp_path.iterdir()] == ["a.py"]


PAGE = """# A page about `sf.every`

```python
import stepfold as sf
hooks = [sf.roll_back_on_nonfinite()]
```
```text
sf.every
```

```python
sf.every(3, hooks[0]
```

```python
sf.every(3, hooks[0])
```
"""


def test_a_page(tmp_path, capsys):
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    assert run(path) == 0
    expected = PAGE.replace(
        "sf.roll_back_on_nonfinite()", 'sf.hooks.on_nonfinite(action="go_back")'
    ).replace("sf.every(3, hooks[0])\n", "sf.hooks.every(3, hooks[0])\n")
    assert path.read_text() == expected
    assert capsys.readouterr().out.splitlines() == [
        f'{path}: line 5: sf.roll_back_on_nonfinite is now sf.hooks.on_nonfinite(action="go_back")',
        f"{path}: line 12: not changed, since it does not parse as Python",
        f"{path}: line 16: sf.every is now sf.hooks.every",
        "1 file changed",
    ]


@pytest.mark.parametrize("style", [{"indent": 1, "ensure_ascii": False}, {"indent": 4}, {}])
def test_a_notebook(style, tmp_path, capsys):
    sources = [
        ["%%time\n", "%load_ext autoreload\n", "import stepfold as sf"],
        ["%%bash\n", "python -c 'sf.every'"],
        "!pip list\nif True:\n    %time sf.latest_step('ü')\n    sf.latest_step('ü')",
        ["sf.trackio_writer(\n", "    project='a',\n", ")\n"],
        [],
    ]
    cells = [{"cell_type": "code", "source": source, "outputs": []} for source in sources]
    cells.insert(1, {"cell_type": "markdown", "source": ["sf.every"]})
    path = tmp_path / "page.ipynb"
    path.write_text(json.dumps({"cells": cells, "nbformat": 4}, **style) + "\n")
    assert run(path) == 0
    cells[3]["source"] = sources[2].replace("    sf.latest", "    sf.checkpoint.latest")
    cells[4]["source"] = [
        *("sf.writers.wandb(\n", "    project='a',\n", '    library="trackio",\n', ")\n"),
    ]
    assert path.read_text() == json.dumps({"cells": cells, "nbformat": 4}, **style) + "\n"
    shell, first, second, count = capsys.readouterr().out.splitlines()
    assert (
        shell == f"{path}: cell of code 2, line 1: not changed, since it does not parse as Python"
    )
    assert first.startswith(f"{path}: cell of code 3, line 4: sf.latest_step is now sf.checkpoint")
    assert second.startswith(f"{path}: cell of code 4, line 1: sf.trackio_writer is now")
    assert count == "1 file changed"
    assert run("--check", path) == 0


def test_the_command_starts_without_jax():
    code = "import stepfold.rename, sys; assert not {'jax', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
