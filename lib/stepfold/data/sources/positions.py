"""Where a stream is, as text that JSON can hold, by the protocols that streams have for it."""

import json
from typing import Any, NamedTuple, Self

# On the iterator or on what it is made of: grain's iterators have the first, Hugging Face's
# streaming datasets and torch's stateful loaders the second.
_PROTOCOLS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


class Owner(NamedTuple):
    """What knows where a stream is, and the names by which it tells and is told."""

    thing: Any
    get: str
    put: str

    @classmethod
    def among(cls, *things: Any) -> Self | None:
        """Find the first of some things that knows where it is."""
        for thing in things:
            for get, put in _PROTOCOLS:
                if hasattr(thing, get) and hasattr(thing, put):
                    return cls(thing, get, put)
        return None

    def read(self) -> str:
        """Ask where the stream is: text that `write` takes, or that says why it cannot be known.

        The text is a copy, which stays as it is when the stream goes on.
        """
        if _forgets(self.thing):
            return lost("the examples in its shuffle buffer are no part of its state")
        state = getattr(self.thing, self.get)()
        try:
            # grain's DataLoader gives bytes, which are text.
            return json.dumps({"text": state.decode()} if type(state) is bytes else {"json": state})
        except (TypeError, ValueError) as error:
            return lost(f"its state is nothing that JSON can hold: {error}")

    def write(self, position: dict[str, Any]) -> None:
        """Tell where the stream is to go on: what `read` gave, as JSON."""
        state = position["text"].encode() if "text" in position else position["json"]
        try:
            getattr(self.thing, self.put)(state)
        except Exception as error:
            error.add_note(f"setting the state of the stream with its own {self.put}()")
            raise


def lost(why: str) -> str:
    """Say that a stream cannot be gone on with from where it is.

    >>> lost("a generator has no state of its own")
    '{"lost": "a generator has no state of its own"}'
    """
    return json.dumps({"lost": why})


def _forgets(thing: Any) -> bool:
    """Tell whether a Hugging Face stream has a shuffle buffer, which a resumed one begins without.

    What was in it would be left out of the epoch; all it does about that is to log a warning.
    """
    parts = [getattr(thing, "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        if type(part).__name__.startswith("BufferShuffled"):
            return True
        inner = [getattr(part, "ex_iterable", None), *(getattr(part, "ex_iterables", None) or ())]
        parts += [some for some in inner if some is not None]
    return False
