"""Bin packing: choose which sequences share a row."""

import numpy as np


def plan_rows(lengths: list[int], length: int) -> list[list[int]]:
    """Assign sequences to rows by best-fit decreasing, or first-fit decreasing if it needs fewer.

    No sequence may be longer than a row.

    Returns:
      The indices of the sequences in each row, ascending. Rows are in the input order of their
      longest sequences.
    """
    order = np.argsort(-np.array(lengths), kind="stable").tolist()
    plan = _best_fit(order, lengths, length)
    if len(plan) > -(-sum(lengths) // length):  # above the lower bound: first-fit may need fewer
        other = _first_fit(order, lengths, length)
        plan = plan if len(plan) <= len(other) else other
    plan.sort()  # by the index of the longest sequence, which comes first in each row
    return [sorted(row) for row in plan]


def _best_fit(order: list[int], lengths: list[int], length: int) -> list[list[int]]:
    """Put each sequence into the fullest row with room.

    Bit n of `lefts` is set if a row has room for exactly n more tokens.
    """
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
    """Put each sequence into the first row with room."""
    plan: list[list[int]] = []
    left = np.full(len(order), length)
    for index in order:
        row = int(np.argmax(left[: len(plan) + 1] >= lengths[index]))
        if row == len(plan):
            plan.append([])
        plan[row].append(index)
        left[row] -= lengths[index]
    return plan
