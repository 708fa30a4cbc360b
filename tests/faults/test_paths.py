"""Any spelling of a path leads to the directory that it means, and none makes a step damaged."""

import functools
import os
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore
from tests.adapter import digits

import stepfold as sf
from stepfold.__main__ import main as look_at_runs
from stepfold.adapter import TrainingArguments
from stepfold.checkpoint.__main__ import main as look_at_checkpoints
from stepfold.core.validation import absolute_path

from . import training

TX = optax.sgd(0.1)
LOSS = sf.make_train_step(
    lambda params, batch, key: sf.mean((params["w"] * jnp.log(batch["x"])) ** 2), TX
)
STEP = jax.jit(LOSS, donate_argnums=0)


@functools.cache
def initial():
    return sf.init_state({"w": jnp.ones(2)}, TX, jax.random.key(0))


def start():
    return jax.tree.map(jnp.copy, initial())


def batches(bad=()):
    x = np.random.default_rng(0).uniform(1, 2, size=(32, 2)).astype(np.float32)
    x[bad, :] = 0.0
    return sf.batches({"x": x}, 4, seed=0)


def fit(steps, *, step=STEP, data=None, **options):
    options = {"checkpoints": sf.Checkpoints(every=2, keep=None), "log_every": 2, **options}
    data = batches() if data is None else data
    return sf.fit(step, start(), data, steps=steps, **options)


@pytest.fixture
def top(tmp_path, monkeypatch):
    """Work in `top/work`, at home in `top/home`, with a link from `top/link` to `top/far/deep`."""
    for name in ("work", "home", "far/deep"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "deep", target_is_directory=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield tmp_path


class Location:
    """A path of another library."""

    def __init__(self, path):
        self._path = path

    def __fspath__(self):
        return self._path


def full(*values):
    return pytest.param(*values, marks=pytest.mark.full)


# A spelling, and the directory that it means below `top`.
SPELLINGS = {
    "above": ("../runs/a", "runs/a"),
    "down and up": ("x/../../runs/b/../a/.", "runs/a"),
    "absolute": ("{top}/work/../runs/a", "runs/a"),
    "a link": ("{top}/link/a", "link/a"),
    "above a link": ("../link/../a", "far/a"),
    "below a link": ("../link/b/../a", "link/a"),
    "home": ("~/a", "home/a"),
    "above home": ("~/../a", "a"),
    "slashes": ("..//runs///a//", "runs/a"),
    "slashes first": ("/{top}/runs/a", "runs/a"),
    "here": (".", "work"),
    "spaces": (" my runs/ a ", "work/ my runs/ a "),
    "letters": ("läufe/日本 🚀", "work/läufe/日本 🚀"),
    "of a URL": ("a%20b/50%#?*[x]{{y}}&=;:,'\"", "work/a%20b/50%#?*[x]{y}&=;:,'\""),
    "tildes": ("a~/~/~b", "work/a~/~/~b"),
    "dots": ("a..b/.../..c", "work/a..b/.../..c"),
    "a dash": ("-a", "work/-a"),
    "a line": ("a\nb\t", "work/a\nb\t"),
    "a long name": ("n" * 255, "work/" + "n" * 255),
}
SOME = ["above", "above a link", "home", "of a URL"]
ALL = [pytest.param(name, marks=() if name in SOME else pytest.mark.full) for name in SPELLINGS]


def spelled(top, name):
    text, real = SPELLINGS[name]
    return text.format(top=top), top / real


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", [str, Path, Location])
@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_means_one_directory(top, name, kind):
    text, real = spelled(top, name)
    assert absolute_path("directory", kind(text)) == real
    assert sf.Checkpoints(kind(text)).directory == real


@pytest.mark.parametrize("name", ALL)
def test_what_is_saved_is_read(top, name, capsys):
    text, real = spelled(top, name)
    for step in (1, 2):
        sf.save(text, {"w": np.full(3, float(step))}, step=step, metrics={"loss": step})
    assert names(real) == ["1", "2"]
    like = {"w": np.zeros(3)}
    for path in (text, real):
        assert sf.checkpoint.verify(path) == {1: [], 2: []}
        assert sf.restore(path, like).state["w"].tolist() == [2, 2, 2]
        assert sf.restore(path, like, step="best", best="loss").step == 1
        assert sf.checkpoint.latest_step(path) == sf.checkpoint.contents(path).step == 2
        assert sf.checkpoint.average_checkpoints(path, [1, 2], like, part="")["w"].tolist() == [
            1.5,
            1.5,
            1.5,
        ]
        series = sf.Checkpoints(path, best="loss")
        assert (series.steps(), series.best_step(), series.restore(like).step) == ([1, 2], 1, 2)
    for command in (["ls"], ["show"], ["verify"], ["diff", "1", "2"]):
        verb, *numbers = command
        assert look_at_checkpoints([verb, "--", text, *numbers]) == 0
    assert "1: good\n2: good\n" in capsys.readouterr().out
    assert names(real) == ["1", "2"]
    assert names(top) == sorted({"work", "home", "far", "link", *real.relative_to(top).parts[:1]})


@pytest.mark.parametrize("name", ["above a link", *map(full, SOME[::2])])
def test_a_run_resumes(top, name):
    text, real = spelled(top, name)
    found = [fit(steps, run_dir=text) for steps in (2, 5, 8)]
    assert [result.resumed for result in found] == [None, 2, 5]
    whole = fit(8, checkpoints=None)
    assert np.array_equal(found[-1].state.params["w"], whole.state.params["w"])
    assert sf.checkpoint.verify(real / "checkpoints") == {2: [], 4: [], 5: [], 6: [], 8: []}
    assert look_at_runs(["report", text, "--out", f"{text}/page.html"]) == 0
    rest = ["checkpoints", "metrics.csv", "metrics.jsonl", "page.html", "report.html", "run.json"]
    assert names(real) == rest


def test_the_working_directory_may_change_at_any_time(top, tmp_path):
    checkpoints = sf.Checkpoints("../runs/b", every=2)
    local = sf.Temporary("local", every=1)
    series = sf.Checkpoints("runs/c", every=2, temporary=local)
    writers = {
        "jsonl": sf.writers.jsonl("log.jsonl", csv="log.csv"),
        "csv": sf.writers.jsonl("~/table.csv", csv=True),
        "tensorboard": sf.writers.tensorboard("../board"),
    }
    hook = lambda event: os.chdir("/")
    os.chdir(top / "far")
    assert fit(4, run_dir="x", checkpoints=checkpoints, hooks=hook).resumed is None
    assert Path.cwd() == Path("/")
    assert fit(6, checkpoints=checkpoints).resumed == 4
    with series as opened:
        for step in (1, 2, 3):
            os.chdir(top / ("far" if step == 2 else "home"))
            assert opened.due(step)
            opened.save({"w": np.ones(2)}, step=step)
    for writer in writers.values():
        writer.write_scalars(1, {"loss": 0.5})
        writer.close()
    assert sf.checkpoint.verify(top / "runs" / "b") == {2: [], 4: [], 6: []}
    assert sf.checkpoint.verify(top / "work" / "runs" / "c") == {2: []}
    assert names(top / "work") == ["local", "log.csv", "log.jsonl", "runs"]
    assert names(top / "home") == ["table.csv", "table.csv.jsonl"]
    assert names(top / "far") == ["deep", "x"]
    assert len(names(top / "board")) == 1


def test_a_working_directory_that_was_deleted(top):
    gone = top / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    words = "directory: expected an absolute path, since the working directory was deleted, got 'a'"
    with pytest.raises(sf.errors.ConfigError, match=words):
        sf.Checkpoints("a")
    sf.save(top / "a", {"w": np.ones(2)}, step=1)
    assert sf.checkpoint.verify(top / "a") == {1: []}


def test_a_capsule_is_replayed(top):
    bad = batches(bad=sf.batches(np.arange(32), 4, seed=0).at(4)[2])  # a row of step 5
    capsule = fit(8, data=bad, run_dir="../runs/a").capsule
    assert capsule.path == top / "runs" / "a" / "capsules" / "5"
    path = Location("~/../runs/a//capsules/../capsules/5/")
    assert sf.debug.read_capsule(path).checkpoint == (top / "runs" / "a" / "checkpoints", 4)
    assert sf.debug.replay(path, LOSS, state=initial(), batches=bad).examples == ((2,),)


PLACES = {  # of the run, and of its checkpoints
    "inside": ("runs/a", None),
    "inside, given": ("runs/a", "runs/a/ckpt"),
    "inside, given by a link": ("runs/a", "alias/a/ckpt"),
    "inside, of a run given by a link": ("alias/a", "runs/a/ckpt"),
    "beside": ("runs/a", "runs/kept/a"),
}


@pytest.mark.parametrize("place", ["inside", *map(full, [*PLACES][1:])])
def test_a_capsule_is_replayed_after_all_was_moved(top, place):
    run_dir, directory = PLACES[place]
    (top / "here" / "runs").mkdir(parents=True)
    (top / "here" / "alias").symlink_to("runs")
    (row,) = sf.batches(np.arange(32), 4, seed=0).at(4)[:1]
    data = lambda: batches([row])
    checkpoints = sf.Checkpoints(directory and top / "here" / directory, every=2, keep=None)
    options = {"run_dir": top / "here" / run_dir, "checkpoints": checkpoints}
    capsule = fit(8, data=data(), **options).capsule
    assert (capsule.step, capsule.checkpoint.step) == (5, 4)
    (top / "here").rename(top / "there")
    (top / "here").mkdir()  # with nothing in it
    path = top / "there" / run_dir / "capsules" / "5"
    (top / "bad").symlink_to(path)
    for name in (path, top / "bad"):
        replayed = sf.debug.replay(name, LOSS, state=start(), batches=data())
        assert (replayed.step, replayed.reproduced) == (5, True)


@pytest.mark.parametrize(
    ("run_dir", "local"),
    [("../link/../a", "~/local"), full("../runs/a", "../local"), full("../link/a", "../link")],
)
def test_a_run_resumes_from_a_temporary_step(top, run_dir, local):
    def checkpoints():
        return sf.Checkpoints(every=4, temporary=sf.Temporary(local, every=1))

    with training.cut(7) as hook:
        fit(20, hooks=hook, log_every=1, run_dir=run_dir, checkpoints=checkpoints())
    newest = max(checkpoints().open(Path(run_dir) / "checkpoints").steps())
    assert newest > 4
    resolved = Path(run_dir).resolve()
    assert fit(8, run_dir=resolved, checkpoints=checkpoints()).resumed == newest
    assert not any(sf.checkpoint.verify(resolved / "checkpoints").values())


def test_a_link_that_moves_on_takes_no_temporary_steps_along(top):
    link = top / "current"
    for number in (1, 2):
        (top / f"run-{number}").mkdir()
        link.unlink(missing_ok=True)
        link.symlink_to(top / f"run-{number}")
        with sf.Checkpoints(link, every=9, temporary=sf.Temporary("../local", every=1)) as series:
            assert series.latest_step() is None
            assert series.due(number)
            series.save({"w": np.ones(2)}, step=number)


@pytest.mark.full
def test_a_trainer_resumes(top):
    make = lambda steps, **options: digits.train_only(
        output_dir="../runs/a", max_steps=steps, save_steps=2, report_to=("jsonl",), **options
    )
    make(4).train()
    trainer = make(6)
    os.chdir(top / "far")
    output = trainer.train()
    assert (trainer.result.resumed, output.last_save_file_name) == (4, "6")
    os.chdir(top / "work")
    assert names(top) == ["far", "home", "link", "runs", "work"]
    assert names(top / "far") == ["deep"]
    assert not any(sf.checkpoint.verify("../runs/a/checkpoints").values())
    assert make(8, resume_from_checkpoint="../runs/b/../a/checkpoints/6").train().stopped
    assert trainer.save_pretrained("../saved") == top / "saved" / "6"
    assert make(9).load_checkpoint("../saved/x/../6")["step"] == 6
    trainer.save_pretrained("~/torch", to_torch=True)
    assert names(top / "home" / "torch") == ["model.safetensors"]
    trainer.save_information("../cards/a.md")
    assert (top / "cards" / "a.md").is_file()


@pytest.mark.parametrize("name", ALL)
def test_parameters_are_exported_and_loaded(top, name):
    text, real = spelled(top, name)
    for path in (text, f"{text}/one.safetensors"):
        sf.checkpoint.export_params(path, {"w": np.ones(3)})
        assert sf.checkpoint.load_params(path, {"w": np.zeros(3)})["w"].tolist() == [1, 1, 1]
    assert names(real) == ["model.safetensors", "one.safetensors"]


# URLs


@pytest.mark.parametrize(
    ("url", "real"),
    [
        ("file://{top}/work/../runs/./a//", "runs/a"),
        full("file://{top}/link/../a", "far/a"),
        full("file://{top}/a%20b/50%25%23%3F*[x]", "a b/50%#?*[x]"),
        full("file://{top}/läufe/日本 🚀", "läufe/日本 🚀"),
    ],
)
def test_a_run_resumes_from_a_url(top, url, real):
    url = url.format(top=top)
    for steps, resumed in ((2, None), (4, 2), (6, 4)):
        run_dir = sf.RunDirectory("x", upload=url)
        found = fit(steps, run_dir=run_dir, checkpoints=sf.Checkpoints(url, every=2))
        assert found.resumed == resumed
    assert {"2.commit", "4.commit", "6.commit", "metrics.jsonl"} <= {*names(top / real)}
    assert sf.checkpoint.verify(url) == {2: [], 4: [], 6: []}
    assert sf.restore(url, start()).step == 6
    assert sf.checkpoint.average_checkpoints(url, [2, 4], start().params)["w"].shape == (2,)
    assert look_at_checkpoints(["verify", url]) == 0
    assert names(top / "work") == ["x"]


@pytest.mark.parametrize(
    "url", ["file://runs/a", "file://../a", "file://~/a", "file:///~/a", "file://./a"]
)
def test_a_url_that_is_relative_is_refused(top, url):
    for use in (sf.Checkpoints(url).open, lambda: sf.checkpoint.verify(url)):
        with pytest.raises(
            sf.errors.ConfigError, match=r"^directory: expected a URL such .* \(file:///"
        ):
            use()
    with pytest.raises(sf.errors.ConfigError, match=r"file:///a/folder"):
        fit(2, run_dir=sf.RunDirectory("x", upload=url))
    assert names(top / "work") in ([], ["x"])
    assert not Path("/~").exists()


@pytest.mark.parametrize("url", ["s3://bucket/a/../b", "gs://bucket/./a", "s3://bucket/.."])
def test_a_key_that_a_server_takes_for_another_is_refused(url):
    with pytest.raises(
        sf.errors.ConfigError, match=r"^directory: expected a URL without '\.' and '\.\.'"
    ):
        sf.checkpoint.verify(url)


# What is refused

USES = {
    "fit": lambda path: fit(2, run_dir=path),
    "Checkpoints": lambda path: sf.Checkpoints(path).open(),
    "Temporary": lambda path: sf.Temporary(path, every=1),
    "save": lambda path: sf.save(path, {"w": np.ones(2)}, step=1),
    "restore": lambda path: sf.restore(path, {"w": np.ones(2)}),
    "verify": sf.checkpoint.verify,
    "latest_step": sf.checkpoint.latest_step,
    "average": lambda path: sf.checkpoint.average_checkpoints(path, [1]),
    "read_capsule": sf.debug.read_capsule,
    "jsonl": sf.writers.jsonl,
    "csv": lambda path: sf.writers.jsonl(path, csv=True),
    "tensorboard": sf.writers.tensorboard,
    "profile": lambda path: sf.hooks.profile(1, 1, path),
    "export_params": lambda path: sf.checkpoint.export_params(path, {"w": np.ones(2)}),
    "load_params": lambda path: sf.checkpoint.load_params(path, {"w": np.ones(2)}),
    "arguments": lambda path: TrainingArguments(max_steps=1).to_json(path),
    "output_dir": lambda path: digits.train_only(output_dir=path).train(),
}


NO_PATHS = {"": "got .*", "a\0b": "got .*", "~nobody-here/a": "'~nobody-here/a.*; give the"}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("path", NO_PATHS)
def test_what_is_no_path_or_the_home_of_nobody_is_refused(top, use, path):
    with pytest.raises(sf.errors.ConfigError, match=rf"^\w+: expected .*{NO_PATHS[path]}"):
        USES[use](path)
    assert names(top / "work") == []


@pytest.mark.parametrize("use", [use for use in USES if use != "arguments"])
@pytest.mark.parametrize("path", ["n" * 300, "n/" * 3000])
def test_a_path_that_is_too_long_is_refused(top, use, path):
    words = "(expected|File name too long).*; (give|check)"
    with pytest.raises((sf.errors.ConfigError, sf.errors.CheckpointError), match=words):
        USES[use](path)
    assert names(top / "work") == []


@pytest.mark.parametrize("name", ["a\\b", "a.__lock", "a.__lock/b", os.fsdecode(b"a\xff")])
@pytest.mark.parametrize("use", ["fit", "Checkpoints", "Temporary", "save", "restore", "verify"])
def test_a_name_that_tensorstore_refuses_is_refused(top, use, name):
    argument = "run_dir" if use == "fit" else "directory"
    words = f"{argument}: expected a path without a backslash, .* got .*; rename it"
    with pytest.raises(sf.errors.ConfigError, match=words):
        USES[use](name)
    assert names(top / "work") == []


def uses_as_nobody(closed):
    """Use paths in a directory that only root may enter."""
    import safetensors.numpy  # noqa: F401, since only root may be able to read the environment
    import tensorboardX  # noqa: F401

    jax.config.update("jax_enable_compilation_cache", False)  # it is root's
    os.setgid(65534)
    os.setuid(65534)
    os.chdir("/")
    for use in (
        lambda path: sf.save(path, {"w": np.ones(2)}, step=1),
        lambda path: sf.restore(path, {"w": np.ones(2)}),
        sf.checkpoint.verify,
        sf.writers.jsonl,
        sf.writers.tensorboard,
        lambda path: sf.hooks.profile(1, 1, path),
        sf.debug.read_capsule,
        lambda path: sf.checkpoint.load_params(path, {"w": np.ones(2)}),
    ):
        for path in (f"{closed}/a", f"{closed}/../{os.path.basename(closed)}/b/../a"):
            try:
                use(path)
            except (sf.errors.CheckpointError, sf.errors.ConfigError) as error:
                print(error)


def test_a_directory_without_permission_is_refused(forks, public_path):
    closed = public_path / "closed"
    closed.mkdir(mode=0o700)
    end = forks.run(uses_as_nobody, str(closed))
    assert end.code == 0, end
    lines = end.output.splitlines()
    assert len(lines) == 16
    for part in ("expected", f"{closed}/", ";"):
        assert [line for line in lines if part not in line] == []


# An error of how arrays are specified


@pytest.fixture
def saved(tmp_path):
    for step in (1, 2):
        sf.save(tmp_path / "a", {"w": np.full(3, float(step))}, step=step)
    return tmp_path / "a"


def refuse_spec(patch):
    """Specify arrays in a way that tensorstore refuses."""
    make = tensorstore.Spec
    patch.setattr(tensorstore, "Spec", lambda spec: make({**spec, "no_such_member": 1}))


def refuse_path(patch):
    """Give tensorstore a path as before paths were normalized."""
    patch.setattr(
        "stepfold.checkpoint.store.DirectoryStore._path",
        lambda store, step: Path(f"{store.directory}/../{store.directory.name}/{step}"),
    )


@pytest.mark.parametrize("refuse", [refuse_spec, refuse_path])
def test_an_error_of_a_specification_is_no_damage(saved, monkeypatch, capsys, refuse):
    like = {"w": np.zeros(3)}
    words = r"w: cannot be read: .*(no_such_member|Invalid file path)"
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        refuse(patch)
        for use in (
            lambda: sf.restore(saved, like),
            lambda: sf.restore(saved, like, step=1),
            lambda: sf.Checkpoints(saved).restore(like),
            lambda: sf.checkpoint.average_checkpoints(saved, [1, 2], part=""),
        ):
            with pytest.raises(sf.errors.CheckpointError, match=words) as caught:
                use()
            assert "damaged" not in str(caught.value)
        assert all(len(problems) == 1 for problems in sf.checkpoint.verify(saved).values())
        assert look_at_checkpoints(["verify", str(saved)]) == 1
        assert "1: cannot be read\n" in capsys.readouterr().out
    assert names(saved) == ["1", "2"]
    assert sf.restore(saved, like).step == 2


def test_a_key_that_tensorstore_refuses_is_no_damage(tmp_path, monkeypatch):
    url, like = f"file://{tmp_path}/a", {"w": np.zeros(3)}
    sf.save(url, {"w": np.ones(3)}, step=1)
    read = sf.object_storage.Bucket.start_read

    def invalid(bucket, name):
        return read(bucket, f"../{name}" if name.endswith(".000000") else name)

    with monkeypatch.context() as patch:
        patch.setattr(sf.object_storage.Bucket, "start_read", invalid)
        with pytest.raises(sf.errors.CheckpointError, match="cannot be read"):
            sf.restore(url, like)
    assert sf.restore(url, like).step == 1
