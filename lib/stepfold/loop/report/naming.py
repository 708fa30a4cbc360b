"""What runs are called on a page: as briefly as tells them apart."""

from collections.abc import Sequence
from pathlib import Path


def names_of(places: Sequence[Path]) -> list[str]:
    """Name runs by their directories, with those above where two would be called the same.

    >>> names_of([Path("/runs/a"), Path("/runs/b")]), names_of([Path("/x/runs/a")])
    (['a', 'b'], ['a'])
    >>> names_of([Path("/x/one/run"), Path("/x/two/run")])
    ['one/run', 'two/run']
    """
    deepest = max(len(place.parts) for place in places)
    for depth in range(1, deepest + 1):
        names = ["/".join(place.parts[-depth:]) for place in places]
        if len(set(names)) == len(names):
            break
    return [name or "/" for name in names]
