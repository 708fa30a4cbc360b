"""Read and restore the positions of streams, by their own protocols."""

import json
from typing import Any, NamedTuple, Self

# Of an iterator or of its iterable. Grain's iterators have the first protocol. Hugging Face's
# streaming datasets and torch's stateful loaders have the second.
_PROTOCOLS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


class Owner(NamedTuple):
    """The object that has a stream's state, and the names of its getter and setter."""

    thing: Any
    get: str
    put: str

    @classmethod
    def among(cls, *things: Any) -> Self | None:
        """Find the first object that has a state, or None."""
        for thing in things:
            for get, put in _PROTOCOLS:
                if hasattr(thing, get) and hasattr(thing, put):
                    return cls(thing, get, put)
        return None

    def read(self) -> str:
        """Return the position as JSON text for `write`, or the reason why it is unknown.

        The text is a copy, so advancing the stream does not change it.
        """
        if _forgets(self.thing):
            return lost("the examples in its shuffle buffer are no part of its state")
        state = getattr(self.thing, self.get)()
        try:
            # grain's DataLoader returns bytes that hold text.
            return json.dumps({"text": state.decode()} if type(state) is bytes else {"json": state})
        except (TypeError, ValueError) as error:
            return lost(f"its state is nothing that JSON can hold: {error}")

    def write(self, position: dict[str, Any]) -> None:
        """Restore a position from `read`, parsed from JSON."""
        state = position["text"].encode() if "text" in position else position["json"]
        try:
            getattr(self.thing, self.put)(state)
        except Exception as error:
            error.add_note(f"setting the state of the stream with its own {self.put}()")
            raise


def lost(why: str) -> str:
    """Return the position, as JSON text, of a stream that cannot resume, with the reason."""
    return json.dumps({"lost": why})


def _forgets(thing: Any) -> bool:
    """Return whether a Hugging Face stream has a shuffle buffer, which is empty after a resume.

    The examples in the buffer would be missing from the epoch; Hugging Face only logs a warning.
    """
    parts = [getattr(thing, "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        if type(part).__name__.startswith("BufferShuffled"):
            return True
        inner = [getattr(part, "ex_iterable", None), *(getattr(part, "ex_iterables", None) or ())]
        parts += [some for some in inner if some is not None]
    return False
