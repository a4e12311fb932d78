"""The meaning of keys: a mere counter, a field of a sample each, or a name.

Keys **count** if each follows from the one before: a number that rises by one, in decimal or
hexadecimal digits of one width, or in binary, with the same bytes around it in all keys. They say
nothing that the number of the sample does not say.

Keys such as ``image-000000001`` and ``label-000000001`` may be **fields**: the same bytes around a
decimal number, which is a sample. All other keys are **names**.

A few keys are **facts** about the dataset, such as ``num-samples``, and no records of samples.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from dsprep.core.schema import Bytes, Ints
from dsprep.core.spans import offsets_of, ranges
from dsprep.formats.lmdb.keys import Keys

DIGITS = 18
"""Digits of the largest number that a key may spell."""
MOST_FIELDS = 32
VALUE, KEY = "value", "key"
COUNTS = frozenset(
    {"num-samples", "num_samples", "nsamples", "n_samples", "num-records", "num_records"}
    | {"length", "len", "size", "count", "total", "dataset_size", "dataset-size", "nSamples"}
)
"""Keys whose value is the number of samples: digits, or a pickle, which is not opened."""
OTHERS = frozenset({"deleted_ids", "metadata", "nextid"})
"""Keys of ASE's databases whose values are not samples, but JSON, deflated or not."""
MOST_FACT = 16
"""Bytes of the pickle of a number."""

_SEPARATORS = "-_/:. #@|"
_DIGITS = {10: b"0123456789", 16: b"0123456789abcdef", -16: b"0123456789ABCDEF"}


# --- facts -----------------------------------------------------------------------------------


def is_fact(key: bytes, value: bytes) -> bool:
    """Return whether a record is a fact about the dataset."""
    if len(key) > 4 and key[:2] == key[-2:] == b"__":
        return True
    name = key.decode("utf-8", "replace")
    pickled = value[:1] == b"\x80" and len(value) <= MOST_FACT
    counts = name in COUNTS and (pickled or value.strip().isdigit())
    return counts or (name in OTHERS and value[:1] in (b"", b"x", b"{", b"["))


def numbers(flat: Bytes, key_at: Ints, key_size: Ints) -> tuple[Ints, np.ndarray]:
    """Return the decimal numbers that keys spell, and which keys spell none.

    The keys are those of `key_size` bytes at `key_at` in `flat`.
    """
    digits = flat[ranges(key_at, key_size)].astype(np.int64) - ord("0")
    owner = np.repeat(np.arange(len(key_size)), key_size)
    ends = np.cumsum(key_size)
    power = ends[owner] - 1 - np.arange(len(owner))
    wrong = np.bincount(
        owner, (digits < 0) | (digits > 9) | ((power >= DIGITS) & (digits != 0)), len(key_size)
    )
    bad = (wrong > 0) | (key_size == 0)
    digits *= np.int64(10) ** np.minimum(power, DIGITS - 1)
    digits[power >= DIGITS] = 0
    total = offsets_of(digits)
    return total[ends] - total[ends - key_size], bad


# --- counters --------------------------------------------------------------------------------


class Counter:
    """A judge of keys: they count, or not.

    Attributes
    ----------
    odd
        A key that is not like those before; empty while there is none.
    """

    def __init__(self) -> None:
        self.odd = b""
        self._count = 0
        self._rules: list[tuple[Callable[[Ints], Bytes], int]] | None = None

    @property
    def counts(self) -> bool:
        """True if all keys so far do."""
        return self._rules is None or bool(self._rules)

    def add(self, flat: Bytes, key_at: Ints, key_size: Ints) -> None:
        """Take the next keys: those of `key_size` bytes at `key_at` in `flat`."""
        if not len(key_at) or not self.counts:
            return
        rows, width = np.zeros((0, 0), np.uint8), int(key_size[0])
        if (key_size == width).all():
            rows = flat[key_at[:, None] + np.arange(width)]
        if self._rules is None:
            self._rules = _rules(rows) if len(rows) else []
        new = self._count + np.arange(len(key_at))
        self._rules = [r for r in self._rules if np.array_equal(r[0](r[1] + new), rows)]
        self._count += len(key_at)
        if not self._rules:
            self.odd = flat[key_at[-1] :][: key_size[-1]].tobytes()


def _rules(rows: Bytes) -> list[tuple[Callable[[Ints], Bytes], int]]:
    """Return what the first keys may be, by number, and the number of the first."""
    first, width = rows[0].tobytes(), rows.shape[1]
    digits = [k for k in range(width) if first[k : k + 1].isdigit()]
    differ = np.flatnonzero(rows[0] != rows[1]) if len(rows) > 1 else digits
    stop = int(differ[-1]) + 1 if len(differ) else width
    rules: list[tuple[Callable[[Ints], Bytes], int]] = []
    for base, letters in _DIGITS.items():
        start = stop
        while start and first[start - 1] in letters and stop - start < (DIGITS if base > 0 else 15):
            start -= 1
        spelt = first[start:stop]
        if spelt and (base == 10 or (len(rows) > 1 and any(48 <= c < 58 for c in spelt))):
            keys = Keys(first[:start], first[stop:], len(spelt), letters)
            rules.append((keys.make, int(spelt, abs(base))))
    if width in (4, 8) and not (first.isascii() and first.decode().isprintable()):
        for order in "><":
            dtype = np.dtype(f"{order}u{width}")
            number = int(np.frombuffer(first, dtype)[0])
            if number < 1 << 62:
                rules.append((_binary(dtype), number))
    return rules


def _binary(dtype: np.dtype) -> Callable[[Ints], Bytes]:
    return lambda index: index.astype(dtype).view(np.uint8).reshape(-1, dtype.itemsize)


# --- records that are fields of samples ------------------------------------------------------


def fields_in(keys: Sequence[bytes]) -> dict[str, tuple[bytes, bytes]]:
    """Return what is around the last, or else the first, number of some keys, by field name.

    Empty unless there are a few kinds of keys that names tell apart. What all have in common, up
    to a separator, is not in the names.
    """
    for pattern in (rb"(.*?)[0-9]+([^0-9]*)", rb"([^0-9]*)[0-9]+(.*)"):
        matches = [re.fullmatch(pattern, key, re.S) for key in keys]
        around = list(dict.fromkeys((m[1], m[2]) for m in matches if m))
        if not all(matches) or not 2 <= len(around) <= MOST_FIELDS:
            continue
        befores = [before.decode("utf-8", "replace") for before, _ in around]
        afters = [after.decode("utf-8", "replace") for _, after in around]
        start, end = _common(befores), _common([after[::-1] for after in afters])
        words = [
            (b[start:].strip(_SEPARATORS), a[: len(a) - end].strip(_SEPARATORS))
            for b, a in zip(befores, afters, strict=True)
        ]
        names = ["_".join(filter(None, pair)) or VALUE for pair in words]
        good = all(n.isprintable() and not re.search("[0-9\ufffd]", n) for n in names)
        if good and len({*names, KEY}) > len(names):
            return dict(zip(names, around, strict=True))
    return {}


def _common(names: Sequence[str]) -> int:
    """Return up to where names have all letters in common, up to a separator."""
    cut = 0
    for k, letters in enumerate(zip(*names, strict=False)):
        if len(set(letters)) > 1:
            break
        cut = k + 1 if letters[0] in _SEPARATORS else cut
    return cut
