"""Which sequences share a row, so that few rows do."""

import numpy as np


def plan_rows(lengths: list[int], length: int) -> list[list[int]]:
    """Say which sequences go into which row, best-fit decreasing or, where fewer do, first-fit.

    Args:
      lengths: of the sequences, none longer than a row.
      length: of a row.

    Returns:
      The sequences of each row, by number; the rows come in the order of their longest.

    >>> plan_rows([3, 2, 4, 1], 5)
    [[0, 1], [2, 3]]
    """
    order = np.argsort(-np.array(lengths), kind="stable").tolist()
    plan = _best_fit(order, lengths, length)
    if len(plan) > -(-sum(lengths) // length):  # fewer may do
        other = _first_fit(order, lengths, length)
        plan = plan if len(plan) <= len(other) else other
    plan.sort()  # by the longest, which is the first in each
    return [sorted(row) for row in plan]


def _best_fit(order: list[int], lengths: list[int], length: int) -> list[list[int]]:
    """Put each into the fullest row it fits into; a bit says that a row has so much left."""
    plan: list[list[int]] = []
    with_left: list[list[int]] = [[] for _ in range(length + 1)]
    lefts = 0
    for index in order:
        size = lengths[index]
        fitting = lefts >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            row = with_left[left].pop()
            plan[row].append(index)
            if not with_left[left]:
                lefts ^= 1 << left
        else:
            left, row = length, len(plan)
            plan.append([index])
        left -= size
        if left:
            with_left[left].append(row)
            lefts |= 1 << left
    return plan


def _first_fit(order: list[int], lengths: list[int], length: int) -> list[list[int]]:
    """Put each into the first row it fits into."""
    plan: list[list[int]] = []
    left = np.full(len(order), length)
    for index in order:
        row = int(np.argmax(left[: len(plan) + 1] >= lengths[index]))
        if row == len(plan):
            plan.append([])
        plan[row].append(index)
        left[row] -= lengths[index]
    return plan
