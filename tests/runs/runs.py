"""What tests of the loop share: a hook that cuts a run once, and what they compare."""

import json

import jax
import numpy as np


class Cut(Exception):
    """A run was cut by a hook."""


def cut_at(step):
    """Make a hook that raises at the first event of a step, and only once."""
    left = [step]

    def cut(event):
        if [event.step] == left:
            left.clear()
            raise Cut

    return cut


def assert_same(one, other):
    """Compare two states bit for bit, but for their keys."""
    leaves = [jax.tree.leaves(state._replace(key=())) for state in (one, other)]
    assert all(np.array_equal(x, y) for x, y in zip(*leaves, strict=True))


def rows(path):
    """Return the steps of the rows of a `metrics.jsonl`."""
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]
