"""Each documented feature of another trainer stands at one test, and pages show what tests say."""

import pytest

from . import rows

FOUND = rows.all_rows()


def test_every_feature_is_shown_by_one_test():
    assert [*rows.problems(FOUND, rows.listed())] == []


@pytest.mark.parametrize("page", sorted(rows.PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_pages_have_the_tables_of_the_tests(page):
    text = page.read_text()
    assert rows.render(text, FOUND) == text, f"write it again: {rows.COMMAND}"


def test_each_document_is_on_one_page():
    pages = "".join(page.read_text() for page in rows.PAGES.glob("*.md"))
    for document in rows.DOCUMENTS:
        assert pages.count(f"% rows of {document}\n") == 1


SOURCE = """
@shows("A", "one", {"x": "the same", "y": "an" " other"})
@shows("A", "two", {"z": "refused"})
def test_a(): ...
"""


def test_rows_are_read_without_an_import():
    read = [*rows.read_rows(SOURCE, "test_a.py")]
    assert read == [
        ("A", "one", "x", "the same", "test_a.py:4"),
        ("A", "one", "y", "an other", "test_a.py:4"),
        ("A", "two", "z", "refused", "test_a.py:4"),
    ]
    with pytest.raises(ValueError, match=r"test_a.py:4: expected a test, got helper"):
        [*rows.read_rows(SOURCE.replace("test_a", "helper"), "test_a.py")]


def test_missing_unknown_and_repeated_features_are_problems():
    read = [*rows.read_rows(SOURCE, "test_a.py")]
    listed = [row.key for row in read]
    assert [*rows.problems(read, listed)] == []
    (missing,) = rows.problems(read[1:], listed)
    assert "expected one test with @shows, got none" in missing
    (unknown,) = rows.problems(read, listed[1:])
    assert "expected once in DOCUMENTS, got 0 times" in unknown
    (repeated,) = rows.problems([*read, read[0]], listed)
    assert "got ['test_a.py:4', 'test_a.py:4']" in repeated


def test_a_page_is_filled_between_its_marks(monkeypatch):
    monkeypatch.setattr(rows, "DOCUMENTS", {"A": {"one": ("y", "x"), "two": ("z",)}})
    page = "a\n% rows of A\nold\n% end of rows\nb\n"
    filled = rows.render(page, rows.read_rows(SOURCE, "test_a.py"))
    assert filled == (
        "a\n% rows of A\n\n### one\n\n| documented | here |\n| --- | --- |\n| y | an other |\n"
        "| x | the same |\n\n### two\n\n| documented | here |\n| --- | --- |\n| z | refused |\n\n"
        "% end of rows\nb\n"
    )
