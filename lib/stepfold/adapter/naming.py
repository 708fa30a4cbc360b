"""Names that nobody knows, and the nearest that somebody does."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from stepfold.errors import ConfigError


def refuse_unknown(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse names that are not known.

    Raises:
      ConfigError: with the nearest name, if one is near.

    >>> refuse_unknown("Trainer", ["dataset_trian"], ["dataset_train", "dataset_eval"])
    Traceback (most recent call last):
    ...
    stepfold.errors.ConfigError: Trainer: there is no 'dataset_trian'; did you mean 'dataset_train'?
    """
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"{what}: there is no {name!r}; {advice}")
