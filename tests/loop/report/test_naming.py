from pathlib import Path

from stepfold.loop.report.naming import names_of


def test_as_much_of_a_path_as_is_needed():
    places = [Path(place) for place in ("/a/x/run", "/a/y/run", "/a/y/other")]
    assert names_of(places) == ["x/run", "y/run", "y/other"]
    assert names_of([Path("/")]) == ["/"]
