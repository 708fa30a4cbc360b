"""Tables are aligned, and numbers readable."""

import pytest

from stepfold.table import amount, size, table


def test_text_is_left_aligned_and_numbers_right_aligned():
    text = table(("path", "size"), [("w", "1.00 MiB"), ("layer/b", "40 B")])
    assert text.splitlines() == [
        "path         size",
        "-------  --------",
        "w        1.00 MiB",
        "layer/b      40 B",
    ]


def test_column_with_one_word_is_text():
    assert table(("a", "b"), [("1", "x"), ("none", "y")]).splitlines()[2] == "1     x"


def test_empty_cell_keeps_a_numeric_column_right_aligned():
    assert table(("n", "what"), [("", "x"), (100, "y")]).splitlines()[2:] == ["     x", "100  y"]


def test_cells_are_converted_by_str():
    assert table(("n", "x"), [(7, None), (12, "P")]).splitlines()[2:] == [" 7  None", "12  P"]


def test_table_without_rows_is_its_header():
    assert table(("path", "bytes"), []) == "path  bytes\n----  -----"


def test_no_trailing_spaces():
    text = table(("path", "spec"), [("w", ""), ("bias", "fsdp, tp")])
    assert all(line == line.rstrip() for line in text.splitlines())


def test_columns_align_with_cells_longer_than_the_header():
    *_, last = table(("a", "b"), [("long text", "x"), ("y", "z")]).splitlines()
    assert last == "y          z"


def test_rows_of_unequal_length_raise():
    with pytest.raises(ValueError, match="zip"):
        table(("a", "b"), [("x",)])


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * 1024, "10.0 KiB"),
        (100 * 1024, "100 KiB"),
        (1 << 30, "1.00 GiB"),
        (3.5, "3.50 B"),
        (1 << 70, "1048576 PiB"),
    ],
)
def test_size_in_binary_units(count, text):
    assert size(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1000, "1.00 k"), (0.5, "0.50"), (12e6, "12.0 M"), (1e24, "1000 Z")],
)
def test_amount_in_thousands(count, text):
    assert amount(count) == text
