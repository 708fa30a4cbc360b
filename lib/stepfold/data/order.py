"""Shuffle orders of epochs, with random access to any position.

The order of a long epoch is a permutation that is evaluated only at the requested positions. So its
memory does not grow with the epoch, and seeking to any step takes constant time.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.int64]]
Rows = slice | Indices
"""Positions in an epoch, or rows of a source: a range or an array of indices."""
Uints = np.ndarray[Any, Any]

_ROUNDS = 6
_POSITION_BITS = np.uint64(14)  # the low bits of a random number, which can hold a position
_SORTED_UP_TO = np.uint64(1) << _POSITION_BITS
_SORTED_AT_ONCE = 64


def make_key(seed: int, epoch: int, stream: int = 0) -> Uints:
    """Make the key of an epoch's order; `stream` separates sources that share a seed."""
    words = _sequence(seed, epoch, stream).generate_state(3 * _ROUNDS, np.uint64)
    return words.reshape(_ROUNDS, 3)


def _sequence(seed: int, epoch: int, stream: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(stream, epoch))


def permute(positions: Rows, length: int, key: Uints) -> Indices:
    """Map positions in an epoch to indices of the source, a bijection on [0, length).

    `length` is at most 2**63 - 1. The key selects a permutation, about uniformly. The permutation
    is a Feistel network: a number is written as a pair with sizes (a, b), where a * b is at least
    `length`, and not much more. The rounds alternately add a hash of one half to the other half,
    modulo its size, which is invertible for any hash. Results outside [0, length) are mapped again
    until they are inside (cycle walking).
    """
    # The product of two halves has to fit a word; 32-bit words are several times as fast.
    word = np.dtype(np.uint32 if length <= 1 << 31 else np.uint64)
    keys, sizes = key.astype(word), _sides(length)
    if isinstance(positions, slice):
        positions = np.arange(positions.start, positions.stop)
    numbers = _scramble(positions.astype(word), sizes, keys)
    outside = np.flatnonzero(numbers >= length)
    while outside.size:
        numbers[outside] = _scramble(numbers[outside], sizes, keys)
        outside = outside[numbers[outside] >= length]
    return numbers.astype(np.int64)


def _sides(length: int) -> tuple[int, int]:
    """Find two numbers of similar size whose product is at least `length`, and not much more."""
    root = math.isqrt(length - 1) + 1
    pairs = [(side, -(-length // side)) for side in range(root, root + 1 + min(root // 8, 15))]
    return min(pairs, key=lambda pair: pair[0] * pair[1])


def _scramble(numbers: Uints, sides: tuple[int, int], keys: Uints) -> Uints:
    word, half = numbers.dtype.type, numbers.dtype.type(numbers.dtype.itemsize * 4)
    sizes = word(sides[0]), word(sides[1])
    high: Uints = numbers // sizes[1]
    halves = [high, numbers - high * sizes[1]]
    for turn, (factor, addend, mixer) in enumerate(keys):
        moved, size = halves[turn % 2], sizes[turn % 2]
        mixed = halves[1 - turn % 2] * factor
        mixed += addend
        mixed ^= mixed >> half
        mixed *= mixer | word(1)
        mixed >>= half
        mixed *= size  # scales the upper half of the word to [0, size)
        mixed >>= half
        moved += mixed
        # Modulo: if `moved` is below the size, the difference wraps around to a huge number.
        np.minimum(moved, moved - size, out=moved)
    high *= sizes[1]
    high += halves[1]
    return high


class Order:
    """The order of every epoch: shuffled differently in each epoch with a seed, sequential without.

    An epoch of up to `_SORTED_UP_TO` examples is sorted by random numbers, so that every order is
    equally likely. Longer epochs use `permute`, without storing the order. Both use only integer
    streams that numpy keeps stable across versions, unlike its shuffling, so that a run can resume
    with another version of numpy.
    """

    def __init__(self, length: int, seed: int | None, stream: int = 0) -> None:
        self.length, self.seed, self.stream = length, seed, stream
        self._last: tuple[int, Callable[[Rows], Indices]] | None = None

    def __call__(self, epoch: int, positions: Rows) -> Rows:
        """Return the source indices at positions of an epoch."""
        if self.seed is None:
            return positions
        last = self._last  # read once: another thread may replace it
        if last is None or last[0] != epoch:
            last = self._last = epoch, self._of(self.seed, epoch)
        return last[1](positions)

    def _of(self, seed: int, epoch: int) -> Callable[[Rows], Indices]:
        if self.length > _SORTED_UP_TO:
            key = make_key(seed, epoch, self.stream)
            return partial(permute, length=self.length, key=key)
        draws: Uints = np.random.Philox(_sequence(seed, epoch, self.stream)).random_raw(self.length)
        if self.length <= _SORTED_AT_ONCE:  # the same order, in one call
            return (draws >> _POSITION_BITS).argsort(kind="stable").__getitem__
        # Two stable sorts are several times as fast as one: numpy's is a radix sort for 16 bits,
        # and then a merge sort that has little left to do. (On a big-endian machine it has more.)
        order = draws.view(np.uint16)[3::4].argsort(kind="stable")
        draws = draws.take(order)
        # The low bits of each number hold its position, which also breaks ties.
        carried = _SORTED_UP_TO - np.uint64(1)
        draws &= ~carried
        draws |= order.view(np.uint64)
        draws.sort(kind="stable")
        draws &= carried
        return draws.view(np.int64).__getitem__
