"""Writers have clu's methods, and convert numbers, histograms and images alike."""

import importlib.util
import inspect
import io
import os

import jax.numpy as jnp
import numpy as np
import pytest

import stepfold as sf
from stepfold.writers.base import ConvertingWriter, Writer, console, replace_file
from stepfold.writers.combinators import async_writer, multi_writer
from stepfold.writers.jsonl import jsonl
from stepfold.writers.tensorboard import tensorboard
from stepfold.writers.wandb import wandb

WRITERS = [
    *(console(), jsonl("never-written.jsonl"), tensorboard("never-written"), wandb()),
    *(wandb(library="trackio"), multi_writer(), async_writer(console())),
]


def csv(path):
    return jsonl(path, csv=True)


class Recorder(ConvertingWriter):
    """Keep the converted values of the last call."""

    def _write(self, step, values):
        self.step, self.values = step, values

    def _write_settings(self, settings):
        self.values = settings


def scalar(value, name="x"):
    recorder = Recorder()
    recorder.write_scalars(1, {name: value})
    return recorder.values[name]


def histogram(array, buckets=None):
    recorder = Recorder()
    recorder.write_histograms(1, {"w": array}, None if buckets is None else {"w": buckets})
    return recorder.values["w"]


def image(array):
    recorder = Recorder()
    recorder.write_images(1, {"a": array})
    return recorder.values["a"]


def test_methods_and_arguments_are_clus():
    # clu.metric_writers cannot be imported without TensorFlow, so its source file is loaded.
    spec = importlib.util.find_spec("clu")
    path = f"{spec.submodule_search_locations[0]}/metric_writers/interface.py"
    interface = importlib.util.spec_from_file_location("interface", path)
    module = importlib.util.module_from_spec(interface)
    interface.loader.exec_module(module)
    names = [name for name in vars(Writer) if not name.startswith("_") and name != "resume"]
    assert len(names) == 7
    for name in names:
        expected = inspect.signature(getattr(module.MetricWriter, name))
        for kind in (Writer, *map(type, WRITERS)):
            signature = inspect.signature(getattr(kind, name))
            assert list(signature.parameters) == list(expected.parameters), (kind, name)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        *((0.1, 0.1), (2**70, 2**70), (True, 1), (np.float64(0.1), 0.1), (np.float16(0.5), 0.5)),
        *((np.int64(2**62), 2**62), (np.bool_(True), 1), (np.array([3.0]), 3.0)),
        *((jnp.float32(0.1), float(np.float32(0.1))), (jnp.bfloat16(1.5), 1.5)),
        *((jnp.array([[7]]), 7), (jnp.array(True), 1)),
    ],
    ids=str,
)
def test_numbers_become_pythons(value, plain):
    assert scalar(value) == plain
    assert type(scalar(value)) is type(plain)


@pytest.mark.parametrize("value", ["0.5", None, 1j, np.ones(2), jnp.ones((2, 1)), [1.0], object()])
def test_other_values_are_refused_by_name(value):
    for writer in (Recorder(), console()):
        with pytest.raises(TypeError, match="eval/loss: expected one real number, got"):
            writer.write_scalars(1, {"eval/loss": value})


def test_messages_show_the_value():
    with pytest.raises(TypeError, match=r"loss: expected one real number, got float32\[2,1\]"):
        scalar(jnp.ones((2, 1)), "loss")
    with pytest.raises(TypeError, match=r"scalars: expected names that are strings, got int 3"):
        scalar(1.0, 3)
    with pytest.raises(TypeError, match=r"note: expected text, got int 3"):
        Recorder().write_texts(1, {"note": 3})


@pytest.mark.parametrize("step", [-1, 1.0, "3", None])
def test_steps_are_integers_of_any_library(step):
    recorder = Recorder()
    with pytest.raises(ValueError, match="step: expected an integer of at least 0, got"):
        recorder.write_scalars(step, {"a": 1})
    for valid in (np.int32(3), jnp.int32(3)):
        recorder.write_scalars(valid, {"a": 1})
        assert (recorder.step, type(recorder.step)) == (3, int)


def test_histograms_are_numpys():
    array = np.random.default_rng(0).normal(size=(20, 30)).astype(np.float32)
    for buckets in (7, None):  # 30 by default
        converted = histogram(array, buckets)
        counts, edges = np.histogram(array.astype(np.float64), buckets or 30)
        assert (converted.counts, converted.edges) == (counts.tolist(), edges.tolist())
        assert np.isclose(converted.total, array.sum())
        assert np.isclose(converted.squares, (array**2).sum())
    assert sum(histogram(jnp.arange(100.0, dtype=jnp.bfloat16)).counts) == 100


@pytest.mark.parametrize(
    ("array", "counts", "edges", "nonfinite"),
    [
        (np.full(3, 2.0), [3], [1.5, 2.5], 0),
        (np.array([np.nan, np.inf]), [0], [-0.5, 0.5], 2),
        (np.zeros(0), [0], [-0.5, 0.5], 0),
        (np.array([np.nan, 0.0, 1.0]), [1, 1], [0.0, 0.5, 1.0], 1),
    ],
)
def test_histograms_of_constant_empty_and_nonfinite_arrays(array, counts, edges, nonfinite):
    assert histogram(array, 2)[:3] == (counts, edges, nonfinite)


def test_histograms_are_of_real_numbers():
    with pytest.raises(TypeError, match="w: expected an array of real numbers, got str 'ab'"):
        histogram("ab")
    with pytest.raises(TypeError, match=r"w: expected an array of real numbers, got complex128"):
        histogram(np.ones(2, complex))


def test_images_become_bytes():
    floats = np.array([[[-1.0], [0.0]], [[0.5], [2.0]]])
    assert image(floats).tolist() == [[[[0], [0]], [[128], [255]]]]
    assert image(np.full((3, 4, 5, 3), 7, np.uint8)).shape == (3, 4, 5, 3)
    assert image(np.full((1, 1, 1), np.nan)).item() == 0


@pytest.mark.parametrize(
    "array", [np.zeros((4, 4)), np.zeros((4, 4, 2)), np.zeros((4, 4, 3), int), np.zeros((0, 4, 1))]
)
def test_arrays_that_are_not_images_are_refused_by_name(array):
    with pytest.raises(ValueError, match=r"a: expected images \[H, W, C\] or .*, got \w+64"):
        image(array)


def test_hyper_parameters_are_numbers_or_text():
    recorder = Recorder()
    recorder.write_hparams(
        {"lr": np.float32(0.5), "nesterov": True, "widths": (8, 8), "name": None, "net": "mlp"}
    )
    expected = {"lr": 0.5, "nesterov": True, "widths": "(8, 8)", "name": "None", "net": "mlp"}
    assert recorder.values == expected


@pytest.mark.parametrize("make", [jsonl, csv, tensorboard])
def test_paths_that_cannot_be_written_are_refused(make, tmp_path, monkeypatch):
    def refused(path, message):
        with pytest.raises(sf.errors.ConfigError, match=message):
            make(path)

    kind = "folder" if make is tensorboard else "file"
    name = "tensorboard" if make is tensorboard else "jsonl"
    (tmp_path / "file").touch()
    refused(3, rf"{name}: expected the path of a {kind}, got int 3")
    refused("", rf"{name}: expected the path of a {kind}, got str ''")
    refused(tmp_path / "file" / "a.csv", r"but .*file is a file; give another path")
    refused(tmp_path / ("file" if kind == "folder" else ""), rf"path of a {kind} .* is a ")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    refused(tmp_path / "new" / "a.csv", r"there is no permission to write to .*; give")


@pytest.mark.parametrize("make", [jsonl, csv, tensorboard])
def test_nothing_is_touched_before_the_first_write_to_the_path_as_given(
    make, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    writer = make("run/metrics")
    writer.flush()
    writer.close()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    writer.write_scalars(1, {"a": 1})
    writer.close()
    assert (tmp_path / "run" / "metrics").exists()
    assert list((tmp_path / "other").iterdir()) == []


def test_an_error_for_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr("stepfold.writers.base.find_spec", lambda name: None)
    with pytest.raises(sf.errors.ConfigError, match=r"pip install 'stepfold\[tensorboard\]'"):
        tensorboard("runs")
    with pytest.raises(sf.errors.ConfigError, match=r"wandb: wandb is not .*stepfold\[wandb\]"):
        wandb()
    with pytest.raises(sf.errors.ConfigError, match=r"trackio: trackio is .*stepfold\[trackio\]"):
        wandb(library="trackio")
    for library in ("mlflow", None):
        with pytest.raises(
            sf.errors.ConfigError, match="library: expected 'wandb' or 'trackio', got"
        ):
            wandb(library=library)
    with pytest.raises(
        sf.errors.ConfigError, match="stream: expected an open text file or None, got str 'a'"
    ):
        console("a")


def test_a_file_that_cannot_be_replaced_stays(tmp_path):
    (tmp_path / "page").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "page", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["page"]


# console


def test_numbers_are_aligned(capsys):
    writer = console()
    for step, loss in ((1, 0.6931471), (20, -1.23456e-07), (300, float("nan"))):
        writer.write_scalars(step, {"train/loss": loss, "train/count": np.int64(step * 10**6)})
    writer.close()
    assert capsys.readouterr().out.splitlines() == [
        "       1  train/loss 0.69315      train/count 1000000",
        "      20  train/loss -1.2346e-07  train/count 20000000",
        "     300  train/loss nan          train/count 300000000",
    ]


def test_another_stream_is_used_and_left_open(capsys):
    out = io.StringIO()
    writer = console(out)
    writer.write_texts(3, {"note": "hello"})
    writer.write_histograms(3, {"w": np.array([0.0, 2.0, np.inf]), "v": np.arange(3)})
    writer.write_images(3, {"digits": np.zeros((2, 8, 8, 1))})
    writer.write_hparams({"lr": 0.1, "net": "mlp"})
    writer.flush()
    writer.close()
    assert out.getvalue().splitlines() == [
        "       3  note hello",
        "       3  w 2 from 0 to 2, 1 not finite  v 3 from 0 to 2",
        "       3  digits uint8[2,8,8,1]",
        "          lr 0.1  net mlp",
    ]
    assert capsys.readouterr().out == ""
