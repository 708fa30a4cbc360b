import pytest

from stepfold.table import amount, size, table


def test_text_stands_left_and_numbers_right():
    text = table(("path", "size"), [("w", "1.00 MiB"), ("layer/b", "40 B")])
    assert text.splitlines() == [
        "path         size",
        "-------  --------",
        "w        1.00 MiB",
        "layer/b      40 B",
    ]


def test_a_column_with_one_word_is_text():
    assert table(("a", "b"), [("1", "x"), ("none", "y")]).splitlines()[2] == "1     x"


def test_an_empty_cell_leaves_a_column_of_numbers_to_the_right():
    assert table(("n", "what"), [("", "x"), (100, "y")]).splitlines()[2:] == ["     x", "100  y"]


def test_cells_may_be_anything_that_str_spells():
    assert table(("n", "x"), [(7, None), (12, "P")]).splitlines()[2:] == [" 7  None", "12  P"]


def test_a_table_without_rows_is_its_head():
    assert table(("path", "bytes"), []) == "path  bytes\n----  -----"


def test_no_line_ends_in_blanks():
    text = table(("path", "spec"), [("w", ""), ("bias", "fsdp, tp")])
    assert all(line == line.rstrip() for line in text.splitlines())


def test_columns_line_up_where_a_cell_is_longer_than_its_head():
    *_, last = table(("a", "b"), [("long text", "x"), ("y", "z")]).splitlines()
    assert last == "y          z"


def test_rows_of_another_length_are_refused():
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
def test_a_size_is_written_in_binary_units(count, text):
    assert size(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1000, "1.00 k"), (0.5, "0.50"), (12e6, "12.0 M"), (1e24, "1000 Z")],
)
def test_an_amount_is_written_in_thousands(count, text):
    assert amount(count) == text
