"""A pseudo-random order of any number of samples, given by a seed, in next to no memory.

Up to `SORTED` samples the order sorts a 64-bit hash of each number, so that every order is
possible. Beyond that it is a Feistel network over pairs ``(left, right)`` with ``number = left *
width + right``: in turn each half is moved, modulo its size, by a hash of the other one (Black and
Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Numbers that fall outside ``0 .. count``
are sent through again until they fall inside ("cycle walking"). Either way the order depends on
seed and count alone: not on the version of numpy, nor on the machine.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Ints

Words: TypeAlias = NDArray[np.uint64]

SORTED = 1 << 16
"""Samples up to which the order is kept as a table, 16 bytes each."""

ROUNDS = 8
_BLOCK = 1 << 14  # numbers that are computed at a time, to stay in the cache
_TABLED = 1 << 12  # values of a half up to which how far they move the other one is kept


class Permutation:
    """The order in which `count` samples are taken: `forward` and its inverse.

    Parameters
    ----------
    seed
        Any integer.
    count
        Samples, fewer than 2**62.
    """

    def __init__(self, seed: int, count: int) -> None:
        self.seed, self.count = seed, count
        words = hashlib.blake2b(f"{seed} {count}".encode(), digest_size=8 * ROUNDS).digest()
        self._keys = np.frombuffer(words, "<u8").astype(np.uint64)
        self._table: tuple[Ints, Ints] | None = None
        if count <= SORTED:
            order = np.argsort(mix(np.arange(count, dtype=np.uint64), self._keys[0]))
            positions = np.empty_like(order)
            positions[order] = np.arange(count)
            self._table = order, positions
            return
        width = int(np.ceil(np.sqrt(count)))
        self._sizes = -(-count // width), width
        self._shifts: list[Ints] = []  # by round, for each value of a half
        if width <= _TABLED:
            values = np.arange(width, dtype=np.int64)
            self._shifts = [self._shift(r, values[: self._sizes[1 - r % 2]]) for r in range(ROUNDS)]

    def __len__(self) -> int:
        return self.count

    def forward(self, positions: Ints) -> Ints:
        """Return the samples at `positions`: int64 of the same shape."""
        return self._apply(positions, inverse=False)

    def inverse(self, samples: Ints) -> Ints:
        """Return at which positions `samples` come: ``inverse(forward(i)) == i``."""
        return self._apply(samples, inverse=True)

    def all(self, inverse: bool = False) -> Ints:
        """Return `forward`, or the inverse, of all ``0 .. count``; it is not to be changed."""
        if self._table is not None:
            return self._table[inverse]
        return self._apply(np.arange(self.count, dtype=np.int64), inverse)

    def _apply(self, numbers: Ints, inverse: bool) -> Ints:
        if self._table is not None:
            return self._table[inverse][numbers]
        flat = np.asarray(numbers, np.int64).reshape(-1)
        out = np.empty(flat.shape, np.int64)
        for at in range(0, len(flat), _BLOCK):
            part = self._once(flat[at : at + _BLOCK], inverse)
            while (outside := np.flatnonzero(part >= self.count)).size:
                part[outside] = self._once(part[outside], inverse)
            out[at : at + _BLOCK] = part
        return out.reshape(np.shape(numbers))

    def _once(self, numbers: Ints, inverse: bool) -> Ints:
        """Send numbers through the network once."""
        width = self._sizes[1]
        left = numbers // width
        halves = [left, numbers - left * width]
        rounds = range(ROUNDS)
        for r in reversed(rounds) if inverse else rounds:
            moved, size = halves[r % 2], self._sizes[r % 2]
            other = halves[1 - r % 2]
            shift = self._shifts[r] if self._shifts else self._shift(r, other)
            shift = size - shift if inverse else shift
            moved += shift.take(other) if self._shifts else shift
            # This, or what is a `size` less: that is below 0 then, huge as an unsigned number.
            turned = (moved - size).view(np.uint64)
            np.minimum(moved.view(np.uint64), turned, out=moved.view(np.uint64))
        halves[0] *= width
        halves[0] += halves[1]
        return halves[0]

    def _shift(self, r: int, halves: Ints) -> Ints:
        """Return the shift of the other half in a round, for values of one half."""
        # The upper 32 bits of the hash, scaled to ``0 .. size``: both are below 2**32.
        hashes = mix(halves.view(np.uint64), self._keys[r]) >> np.uint64(32)
        hashes *= np.uint64(self._sizes[r % 2])
        hashes >>= np.uint64(32)
        return hashes.view(np.int64)


def mix(words: Words, key: np.uint64) -> Words:
    """Return a hash of each number and the key: the finaliser of SplitMix64 (Vigna)."""
    x = words ^ key
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x
