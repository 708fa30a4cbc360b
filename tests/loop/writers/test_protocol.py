import importlib.util
import inspect

import pytest

import stepfold as sf
from stepfold.loop.writers.protocol import read_writer, resume


class Foreign:
    """A writer as clu's: the methods of its interface, and no `resume`."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("write_") or name in ("flush", "close"):
            return lambda *arguments: self.calls.append((name, *arguments))
        raise AttributeError(name)


def test_names_of_arguments_are_clus():
    # clu.metric_writers cannot be imported without TensorFlow, so its source is read.
    spec = importlib.util.find_spec("clu")
    path = f"{spec.submodule_search_locations[0]}/metric_writers/interface.py"
    interface = importlib.util.spec_from_file_location("interface", path)
    module = importlib.util.module_from_spec(interface)
    interface.loader.exec_module(module)
    ours = [name for name in vars(sf.Writer) if not name.startswith("_")]
    assert len(ours) == 7
    for name in ours:
        theirs = inspect.signature(getattr(module.MetricWriter, name))
        for kind in (sf.Writer, *WRITERS):
            mine = inspect.signature(getattr(kind, name))
            assert list(mine.parameters) == list(theirs.parameters), (kind, name)


WRITERS = [
    type(writer)
    for writer in (
        sf.console_writer(),
        sf.csv_writer("never-written.csv"),
        sf.jsonl_writer("never-written.jsonl"),
        sf.tensorboard_writer("never-written"),
        sf.wandb_writer(),
        sf.multi_writer(),
        sf.async_writer(sf.console_writer()),
    )
]


def test_what_is_no_writer_is_refused_with_what_it_lacks():
    assert isinstance(read_writer("writer", Foreign()), Foreign)
    with pytest.raises(
        sf.ConfigError,
        match=r"writer: expected a writer, as csv_writer\(path\) gives one, got str 'a.csv', "
        "which has no write_scalars, write_texts",
    ):
        read_writer("writer", "a.csv")


def test_a_class_for_a_writer_is_refused():
    with pytest.raises(sf.ConfigError, match="a class; call it"):
        read_writer("writer", WRITERS[0])


def test_a_writer_that_does_not_know_how_to_resume_is_left_alone():
    foreign = Foreign()
    resume(foreign, 3)
    assert foreign.calls == []


def test_an_absent_package_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setattr("stepfold.loop.writers.protocol.find_spec", lambda name: None)
    with pytest.raises(sf.ConfigError, match=r"pip install 'stepfold\[tensorboard\]'"):
        sf.tensorboard_writer("runs")
    with pytest.raises(sf.ConfigError, match=r"wandb_writer: expected wandb, .*stepfold\[wandb\]"):
        sf.wandb_writer()
