import contextlib
import io

import numpy as np
import pytest

import stepfold as sf


def test_numbers_stand_below_one_another(capsys):
    writer = sf.console_writer()
    for step, loss in ((1, 0.6931471), (20, -1.23456e-07), (300, float("nan"))):
        writer.write_scalars(step, {"train/loss": loss, "train/count": np.int64(step * 10**6)})
    writer.close()
    assert capsys.readouterr().out.splitlines() == [
        "       1  train/loss 0.69315      train/count 1000000",
        "      20  train/loss -1.2346e-07  train/count 20000000",
        "     300  train/loss nan          train/count 300000000",
    ]


def test_the_stream_is_found_when_it_is_written_to():
    writer, out = sf.console_writer(), io.StringIO()
    with contextlib.redirect_stdout(out):
        writer.write_scalars(1, {"a": 1})
    assert out.getvalue() == "       1  a 1\n"


def test_a_stream_that_is_given_is_used_and_left_open(capsys):
    out = io.StringIO()
    writer = sf.console_writer(out)
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


def test_what_is_no_stream_is_refused():
    with pytest.raises(sf.ConfigError, match="stream: expected an open text file or None, got 'a'"):
        sf.console_writer("a")


def test_what_is_no_number_is_named():
    with pytest.raises(TypeError, match="loss: expected one real number"):
        sf.console_writer().write_scalars(1, {"loss": "x"})
