import csv
import math

import numpy as np
import pytest

import stepfold as sf


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.csv"


def rows(path):
    with path.open(newline="") as file:
        found = list(csv.DictReader(file, strict=True))
    assert all(None not in row and None not in row.values() for row in found), "not rectangular"
    return found


def test_a_step_is_one_row_and_columns_come_as_names_do(path):
    writer = sf.csv_writer(path)
    writer.write_scalars(10, {"train/loss": 0.5})
    writer.write_scalars(20, {"train/loss": 0.25})
    writer.write_scalars(20, {"eval/loss": np.float32(0.375)})
    writer.write_scalars(30, {"eval/loss": 2, "train/loss": 1})
    assert path.read_text() == "step,train/loss,eval/loss\n10,0.5,\n20,0.25,0.375\n30,1,2\n"
    writer.close()


def test_the_file_is_whole_after_every_write(path):
    writer = sf.csv_writer(path)
    for step in range(40):
        writer.write_scalars(step, {f"m{step % 7}": step})
        writer.write_scalars(step, {f"n{step // 10}": step, f"m{step % 7}": step + 0.5})
        found = rows(path)
        assert [int(row["step"]) for row in found] == list(range(step + 1))
        assert float(found[-1][f"m{step % 7}"]) == step + 0.5
    assert list(path.parent.iterdir()) == [path]
    writer.close()


@pytest.mark.parametrize("value", [0.1, 1e-310, -0.0, 2**70, 1 / 3, math.inf, -math.inf, math.nan])
def test_numbers_are_read_back_as_they_are(path, value):
    writer = sf.csv_writer(path)
    writer.write_scalars(1, {"x": value})
    writer.close()
    got = type(value)(rows(path)[0]["x"])
    assert got == value or (math.isnan(got) and math.isnan(value))


def test_names_with_commas_and_quotes(path):
    name = 'loss, "exact" of a b'
    writer = sf.csv_writer(path)
    writer.write_scalars(1, {name: 1})
    writer.close()
    again = sf.csv_writer(path)
    again.write_scalars(2, {name: 2})
    again.write_scalars(2, {"other": 3})
    again.close()
    assert rows(path) == [
        {"step": "1", name: "1", "other": ""},
        {"step": "2", name: "2", "other": "3"},
    ]


def test_a_resumed_run_drops_what_came_later_and_its_columns(path):
    killed = sf.csv_writer(path)
    for step in (10, 20, 30, 40):
        killed.write_scalars(step, {"loss": step})
    killed.write_scalars(40, {"eval": 1})
    writer = sf.csv_writer(path)
    writer.resume(25)
    assert path.read_text() == "step,loss\n10,10\n20,20\n"
    writer.write_scalars(30, {"other": 1, "loss": 3})
    assert path.read_text() == "step,loss,other\n10,10,\n20,20,\n30,3,1\n"
    writer.resume(5)
    assert path.read_text() == ""
    writer.write_scalars(10, {"new": 1})
    assert path.read_text() == "step,new\n10,1\n"
    writer.close()
    killed.close()


def test_what_a_kill_left_half_written_is_cut_off(path):
    path.parent.mkdir()
    path.write_text("step,a,b\n1,2,3\n2,2")
    writer = sf.csv_writer(path)
    writer.write_scalars(1, {"b": 4})
    assert path.read_text() == "step,a,b\n1,2,4\n"
    writer.close()


def test_what_has_no_place_in_a_table_is_left_out_with_one_warning_for_each_kind(path):
    writer = sf.csv_writer(path)
    with pytest.warns(UserWarning, match=r"metrics.csv leaves out texts, .*; jsonl_writer has"):
        writer.write_texts(1, {"a": "b"})
    writer.write_texts(2, {"a": "b"})
    with pytest.warns(UserWarning, match="leaves out histograms"):
        writer.write_histograms(1, {"a": np.ones(3)})
    with pytest.warns(UserWarning, match="leaves out images"):
        writer.write_images(1, {"a": np.ones((2, 2, 1))})
    with pytest.warns(UserWarning, match="leaves out hyper-parameters"):
        writer.write_hparams({"lr": 0.1})
    assert not path.exists()


def test_nothing_is_touched_before_the_first_write(path):
    writer = sf.csv_writer(path)
    writer.flush()
    writer.close()
    assert not path.parent.exists()


def test_other_files_and_names_are_refused(path):
    writer = sf.csv_writer(path)
    for name in ("step", "a\nb", "a\rb"):
        with pytest.raises(ValueError, match="expected names other than 'step' and on one line"):
            writer.write_scalars(1, {name: 1})
    writer.close()
    path.write_text("time,loss\n1,2\n")
    with pytest.raises(sf.ConfigError, match="begins with 'step,', .* got one .* b'time,'"):
        sf.csv_writer(path).write_scalars(1, {"a": 1})
    path.write_text("step,loss\none,2\n")
    with pytest.raises(sf.ConfigError, match=r"rows that begin with a step, got b'one,2\\n'"):
        sf.csv_writer(path).write_scalars(1, {"a": 1})


def test_steps_do_not_go_back_even_with_a_new_column(path):
    writer = sf.csv_writer(path)
    writer.write_scalars(10, {"a": 1})
    with pytest.raises(ValueError, match="expected step 10"):
        writer.write_scalars(9, {"b": 1})
    assert path.read_text() == "step,a\n10,1\n"
    writer.close()


def test_a_column_that_cannot_be_added_leaves_the_file_and_the_writer_as_they_were(
    path, monkeypatch
):
    writer = sf.csv_writer(path)
    writer.write_scalars(10, {"a": 1})

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        with pytest.raises(OSError, match="No space left on device: .*metrics.csv"):
            writer.write_scalars(20, {"b": 1})
    writer.write_scalars(20, {"a": 2})
    writer.write_scalars(20, {"b": 3})
    assert path.read_text() == "step,a,b\n10,1,\n20,2,3\n"
    assert list(path.parent.iterdir()) == [path]
    writer.close()
