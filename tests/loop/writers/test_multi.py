import numpy as np
import pytest

import stepfold as sf
from stepfold.loop.writers.jsonl import JsonlWriter


class Recorder(JsonlWriter):
    """Writes down its calls, and fails in those that it is told to fail in."""

    def __init__(self, fails=()):
        self.calls, self.fails = [], fails

    def __getattribute__(self, name):
        if name in ("calls", "fails") or name.startswith("__"):
            return object.__getattribute__(self, name)

        def call(*arguments):
            self.calls.append((name, *arguments))
            if name in self.fails:
                raise OSError(f"{name} fails")

        return call


def write_all(writer):
    array = np.ones(3)
    writer.write_scalars(1, {"a": 1})
    writer.write_texts(2, {"a": "b"})
    writer.write_histograms(3, {"a": array})
    writer.write_histograms(3, {"a": array}, {"a": 5})
    writer.write_images(4, {"a": array})
    writer.write_hparams({"lr": 1})
    writer.resume(5)
    writer.flush()
    writer.close()


def test_all_are_given_everything_in_order():
    first, second = Recorder(), Recorder()
    write_all(sf.multi_writer(first, second))
    assert [name for name, *_ in first.calls] == [
        *("write_scalars", "write_texts", "write_histograms", "write_histograms"),
        *("write_images", "write_hparams", "resume", "flush", "close"),
    ]
    assert str(first.calls) == str(second.calls)


@pytest.mark.parametrize("name", ["write_scalars", "flush", "close", "resume"])
def test_one_that_fails_does_not_keep_the_others_from_it(name):
    writers = [Recorder(), Recorder(fails=[name]), Recorder()]
    writer = sf.multi_writer(*writers)
    arguments = {"write_scalars": (1, {"a": 1}), "resume": (3,)}.get(name, ())
    with pytest.raises(OSError, match=f"{name} fails"):
        getattr(writer, name)(*arguments)
    assert [one.calls for one in writers] == [[(name, *arguments)]] * 3


def test_what_is_no_writer_is_refused_by_its_place():
    with pytest.raises(sf.ConfigError, match=r"writers\[1\]: expected a writer, .* got str 'a'"):
        sf.multi_writer(Recorder(), "a")


def test_a_table_does_not_stop_images_from_being_written(tmp_path):
    writer = sf.multi_writer(
        sf.csv_writer(tmp_path / "metrics.csv"), sf.jsonl_writer(tmp_path / "metrics.jsonl")
    )
    with pytest.warns(UserWarning, match="leaves out images"):
        writer.write_images(3, {"a": np.zeros((2, 2, 1))})
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 3, "a": {"shape": [1, 2, 2, 1]}}\n'


def test_one_that_cannot_resume_is_no_hindrance(tmp_path):
    writer = sf.multi_writer(sf.console_writer(), sf.jsonl_writer(tmp_path / "a.jsonl"))
    writer.resume(3)
    assert (tmp_path / "a.jsonl").exists()
    writer.close()
