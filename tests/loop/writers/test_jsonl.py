import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

import stepfold as sf


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_is_one_line_in_the_order_of_names(path):
    writer = sf.jsonl_writer(path)
    writer.write_scalars(10, {"train/loss": 0.5, "train/accuracy": 1})
    writer.write_scalars(10, {"eval/loss": jnp.float32(0.25)})
    writer.write_scalars(jnp.int32(20), {"b": 1, "a": 2})
    assert path.read_text() == (
        '{"step": 10, "train/loss": 0.5, "train/accuracy": 1, "eval/loss": 0.25}\n'
        '{"step": 20, "b": 1, "a": 2}\n'
    )
    writer.close()


def test_the_later_value_of_a_name_counts(path):
    writer = sf.jsonl_writer(path)
    writer.write_scalars(10, {"a": 1, "b": 1})
    writer.write_scalars(10, {"a": 2})
    assert rows(path) == [{"step": 10, "a": 2, "b": 1}]
    writer.close()


@pytest.mark.parametrize("value", [0.1, 1e-310, -0.0, 2**70, 1 / 3, float("inf"), float("-inf")])
def test_numbers_are_read_back_as_they_are(path, value):
    writer = sf.jsonl_writer(path)
    writer.write_scalars(1, {"x": value})
    writer.close()
    ((_, got),) = [row.values() for row in rows(path)]
    assert got == value
    assert math.copysign(1, got) == math.copysign(1, value)


def test_nan_is_read_back(path):
    writer = sf.jsonl_writer(path)
    writer.write_scalars(1, {"x": np.float32("nan")})
    writer.close()
    assert path.read_text() == '{"step": 1, "x": NaN}\n'
    assert math.isnan(rows(path)[0]["x"])


def test_texts_histograms_images_and_settings(path):
    writer = sf.jsonl_writer(path)
    writer.write_hparams({"lr": np.float32(0.5), "widths": (8, 8)})
    writer.write_texts(5, {"sample": "ein Wörtchen\nand more"})
    writer.write_histograms(5, {"w": np.array([0.0, 1.0, np.nan])}, {"w": 2})
    writer.write_images(5, {"digits": np.zeros((2, 4, 3, 1))})
    writer.close()
    assert rows(path) == [
        {"step": 0, "hparams": {"lr": 0.5, "widths": "(8, 8)"}},
        {
            "step": 5,
            "sample": "ein Wörtchen\nand more",
            "w": {"counts": [1, 1], "edges": [0.0, 0.5, 1.0], "nonfinite": 1},
            "digits": {"shape": [2, 4, 3, 1]},
        },
    ]


def test_nothing_is_touched_before_the_first_write(path):
    writer = sf.jsonl_writer(path)
    writer.flush()
    writer.close()
    assert not path.parent.exists()


def test_an_empty_write_adds_no_line(path):
    writer = sf.jsonl_writer(path)
    writer.write_scalars(3, {})
    writer.close()
    assert path.read_text() == ""


def test_a_resumed_run_drops_what_came_later(path):
    killed = sf.jsonl_writer(path)
    for step in (10, 20, 30, 40):
        killed.write_scalars(step, {"loss": step})
    writer = sf.jsonl_writer(path)
    writer.resume(25)
    assert [row["step"] for row in rows(path)] == [10, 20]
    writer.write_hparams({"lr": 0.1})
    writer.write_scalars(30, {"loss": -30})
    writer.close()
    assert rows(path)[1:] == [
        {"step": 20, "loss": 20},
        {"step": 25, "hparams": {"lr": 0.1}},
        {"step": 30, "loss": -30},
    ]
    killed.close()


def test_a_run_that_forgets_to_resume_is_told(path):
    writer = sf.jsonl_writer(path)
    writer.write_scalars(10, {"loss": 1.0})
    writer.close()
    with pytest.raises(ValueError, match=r"expected step 10, .* got 1; call resume\(1\) first"):
        sf.jsonl_writer(path).write_scalars(1, {"loss": 1.0})


def test_the_last_row_may_still_grow_after_another_opening(path):
    writer = sf.jsonl_writer(path)
    writer.write_scalars(10, {"loss": 0.1, "bad": float("nan")})
    writer.close()
    writer.write_scalars(10, {"eval": 1})
    writer.close()
    assert path.read_text() == '{"step": 10, "loss": 0.1, "bad": NaN, "eval": 1}\n'


def test_other_files_and_names_are_refused(path, tmp_path):
    path.parent.mkdir()
    path.write_text('{"step": 1, "a": 2}\n{"stop": 1}\n')
    with pytest.raises(sf.ConfigError, match=r"to hold lines as .*, got b'{\"stop\": 1}\\n'; mend"):
        sf.jsonl_writer(path).write_scalars(3, {"a": 1})
    with pytest.raises(ValueError, match="expected names other than 'step', which each line has"):
        sf.jsonl_writer(tmp_path / "new").write_scalars(3, {"step": 1})
    with pytest.raises(sf.ConfigError, match="jsonl_writer: expected a file, got the directory"):
        sf.jsonl_writer(tmp_path)


def test_a_value_that_is_refused_leaves_the_file_as_it_was(path):
    writer = sf.jsonl_writer(path)
    writer.write_scalars(10, {"loss": 1.0})
    with pytest.raises(TypeError, match="loss: expected one real number, got str 'x'"):
        writer.write_scalars(20, {"other": 1.0, "loss": "x"})
    assert rows(path) == [{"step": 10, "loss": 1.0}]
    writer.close()
