"""A pseudo-random order of any number of samples, told by a seed, in next to no memory.

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
_BLOCK = 1 << 16  # numbers that are computed at a time, to stay in the cache


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
            hashes = mix(np.arange(count, dtype=np.uint64), self._keys[0])
            order = np.argsort(hashes).astype(np.int64)  # `_mix` is a bijection: none are equal
            places = np.empty_like(order)
            places[order] = np.arange(count)
            self._table = order, places
            return
        width = int(np.ceil(np.sqrt(count)))
        self._sizes = -(-count // width), width

    def __len__(self) -> int:
        return self.count

    def forward(self, places: Ints) -> Ints:
        """Return which samples come at `places`: int64 of the same shape."""
        return self._apply(places, inverse=False)

    def inverse(self, samples: Ints) -> Ints:
        """Return at which places `samples` come: ``inverse(forward(i)) == i``."""
        return self._apply(samples, inverse=True)

    def _apply(self, numbers: Ints, inverse: bool) -> Ints:
        if self._table is not None:
            return self._table[inverse][numbers]
        flat = np.asarray(numbers, np.int64).reshape(-1)
        out = np.empty(flat.shape, np.int64)
        for at in range(0, len(flat), _BLOCK):
            part = self._once(flat[at : at + _BLOCK].astype(np.uint64), inverse)
            while (outside := np.flatnonzero(part >= np.uint64(self.count))).size:
                part[outside] = self._once(part[outside], inverse)
            out[at : at + _BLOCK] = part.astype(np.int64)
        return out.reshape(np.shape(numbers))

    def _once(self, numbers: Words, inverse: bool) -> Words:
        """Send numbers through the network once."""
        width = np.uint64(self._sizes[1])
        halves = list(np.divmod(numbers, width))
        rounds = range(ROUNDS)
        for r in reversed(rounds) if inverse else rounds:
            moved = r % 2
            size = np.uint64(self._sizes[moved])
            # The upper 32 bits of the hash, scaled to ``0 .. size``: both are below 2**32.
            shift = ((mix(halves[1 - moved], self._keys[r]) >> np.uint64(32)) * size) >> np.uint64(
                32
            )
            turned = halves[moved] + (size - shift if inverse else shift)
            halves[moved] = np.minimum(turned, turned - size)  # below 0 wraps to a huge number
        joined: Words = halves[0] * width + halves[1]
        return joined


def mix(words: Words, key: np.uint64) -> Words:
    """Return a hash of each number and the key: the finaliser of SplitMix64 (Vigna)."""
    x = words ^ key
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x
