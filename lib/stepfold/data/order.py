"""The order of an epoch: a bijection that is computed where it is asked for.

Nothing is shuffled ahead of time, so that an epoch of a billion takes no more memory than a short
one, and step ten million is found as fast as step zero.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.int64]]
Words = np.ndarray[Any, Any]

_ROUNDS = 6
_FEW = np.uint64(1 << 14)  # a power of two, so that its bits can carry a position


def make_key(seed: int, epoch: int, stream: int = 0) -> Words:
    """Make the key of an epoch's order; a stream tells several sources of one seed apart."""
    words = _sequence(seed, epoch, stream).generate_state(3 * _ROUNDS, np.uint64)
    return words.reshape(_ROUNDS, 3)


def _sequence(seed: int, epoch: int, stream: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(stream, epoch))


def permute(positions: Indices, length: int, key: Words) -> Indices:
    """Map positions of an epoch to indices of the source, a bijection of [0, length).

    The key picks one of the orders, about evenly. It is a Feistel network on pairs: a number below
    `length` is written as a pair below (a, b), where a * b is hardly more than `length`, and in
    turns each half is moved around its circle by a hash of the other, which can be undone whatever
    the hash. The few that end outside go round again, until they are in.

    Args:
      positions: an array of positions, each in [0, length).
      length: the length of the epoch, up to 2**63 - 1.
      key: what `make_key` gives.

    >>> permute(np.arange(8), 8, make_key(seed=0, epoch=0)).tolist()
    [3, 5, 1, 0, 6, 2, 7, 4]
    >>> permute(np.array([2**40]), 2**40 + 1, make_key(seed=0, epoch=1)) <= 2**40
    array([ True])
    """
    # Products of two halves have to fit a word; the narrow one is several times as fast.
    word = np.dtype(np.uint32 if length <= 1 << 31 else np.uint64)
    keys, sizes = key.astype(word), _sides(length)
    numbers = _scramble(positions.astype(word), sizes, keys)
    outside = np.flatnonzero(numbers >= length)
    while outside.size:
        numbers[outside] = _scramble(numbers[outside], sizes, keys)
        outside = outside[numbers[outside] >= length]
    return numbers.astype(np.int64)


def _sides(length: int) -> tuple[int, int]:
    """Find two numbers, near each other, whose product is hardly more than the length."""
    root = math.isqrt(length - 1) + 1
    pairs = [(side, -(-length // side)) for side in range(root, root + 1 + min(root // 8, 15))]
    return min(pairs, key=lambda pair: pair[0] * pair[1])


def _scramble(numbers: Words, sides: tuple[int, int], keys: Words) -> Words:
    word, half = numbers.dtype.type, numbers.dtype.type(numbers.dtype.itemsize * 4)
    sizes = word(sides[0]), word(sides[1])
    high: Words = numbers // sizes[1]
    halves = [high, numbers - high * sizes[1]]
    for turn, (factor, addend, mixer) in enumerate(keys):
        moved, size = halves[turn % 2], sizes[turn % 2]
        mixed = halves[1 - turn % 2] * factor
        mixed += addend
        mixed ^= mixed >> half
        mixed *= mixer | word(1)
        mixed >>= half
        mixed *= size  # the upper half of the word, scaled to [0, size)
        mixed >>= half
        moved += mixed
        # Where `moved` is below the size the difference wraps around to a huge number.
        np.minimum(moved, moved - size, out=moved)
    high *= sizes[1]
    high += halves[1]
    return high


class Order:
    """The order of every epoch: as it is without a seed, and a new one each epoch with one.

    An epoch of a few thousand is sorted by random numbers, which gives every order the same chance;
    a longer one is not held at all, but computed where it is asked for. Both rest on integers that
    numpy promises to keep, as it does not for its own shuffling, so that a run can be resumed with
    another version.

    >>> order = Order(5, seed=0)
    >>> order(0, np.arange(5)).tolist(), order(1, np.arange(5)).tolist()
    ([3, 2, 4, 1, 0], [2, 1, 0, 4, 3])
    """

    def __init__(self, length: int, seed: int | None, stream: int = 0) -> None:
        self.length, self.seed, self.stream = length, seed, stream
        self._last: tuple[int, Callable[[Indices], Indices]] | None = None

    def __call__(self, epoch: int, positions: Indices) -> Indices:
        """Give the indices at these positions of an epoch."""
        if self.seed is None:
            return positions
        last = self._last  # read once, since another thread may replace it
        if last is None or last[0] != epoch:
            last = self._last = epoch, self._of(self.seed, epoch)
        return last[1](positions)

    def _of(self, seed: int, epoch: int) -> Callable[[Indices], Indices]:
        if self.length > _FEW:
            key = make_key(seed, epoch, self.stream)
            return partial(permute, length=self.length, key=key)
        # Each number carries its position, so that equal ones too have only one order. All is done
        # in place and on bits, since an epoch of a few is over after a few batches.
        draws: Words = np.random.Philox(_sequence(seed, epoch, self.stream)).random_raw(self.length)
        carried = _FEW - np.uint64(1)
        draws &= ~carried
        draws |= np.arange(self.length, dtype=np.uint64)
        draws.sort()
        draws &= carried
        return draws.view(np.int64).take
