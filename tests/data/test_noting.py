"""Errors that say how far it came."""

import pytest

from stepfold.data.noting import each


def test_every_item_is_taken_in_order():
    assert each(str, range(3), str) == ["0", "1", "2"]


def test_an_error_is_the_same_one_with_a_note_on_which_item_it_was():
    error = OSError("disk")

    def read(item):
        if item == "c":
            raise error
        return item

    with pytest.raises(OSError, match="disk") as caught:
        each(read, "abcd", lambda position: f"reading number {position}")
    assert caught.value is error
    assert error.__notes__ == ["reading number 2"]
