import contextlib
import io

import numpy as np
import pytest

import stepfold as sf
from stepfold.loop.writers.console import console_writer


def test_numbers_are_aligned(capsys):
    writer = console_writer()
    for step, loss in ((1, 0.6931471), (20, -1.23456e-07), (300, float("nan"))):
        writer.write_scalars(step, {"train/loss": loss, "train/count": np.int64(step * 10**6)})
    writer.close()
    assert capsys.readouterr().out.splitlines() == [
        "       1  train/loss 0.69315      train/count 1000000",
        "      20  train/loss -1.2346e-07  train/count 20000000",
        "     300  train/loss nan          train/count 300000000",
    ]


def test_the_stream_is_the_one_at_the_time_of_the_call():
    writer, out = console_writer(), io.StringIO()
    with contextlib.redirect_stdout(out):
        writer.write_scalars(1, {"a": 1})
    assert out.getvalue() == "       1  a 1\n"


def test_another_stream_is_used_and_left_open(capsys):
    out = io.StringIO()
    writer = console_writer(out)
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


def test_objects_that_are_not_streams_are_refused():
    with pytest.raises(sf.ConfigError, match="stream: expected an open text file or None, got 'a'"):
        console_writer("a")


def test_values_that_are_not_numbers_are_refused_by_name():
    with pytest.raises(TypeError, match="loss: expected one real number"):
        console_writer().write_scalars(1, {"loss": "x"})
