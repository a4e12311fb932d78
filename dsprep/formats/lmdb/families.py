"""What keys say of the records: a mere counter, which field of which sample each is, or a name.

A key is a **counter** if it follows from the one before: a number that rises by one, in decimal or
hexadecimal digits of one width, or in binary, with the same bytes around it in all keys. It says
nothing that the number of the sample does not say.

Keys such as ``image-000000001`` and ``label-000000001`` are of **families**: the same bytes around
a decimal number. Where every family has the same numbers, a number is a sample, and a family may
be a field of it. All other keys are **names**.

A few keys are **facts** about the dataset, such as ``num-samples``, and no records of samples.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dsprep.core.schema import Bytes, Ints
from dsprep.core.spans import offsets_of, ranges

DIGITS = 18
"""Digits of the largest number that a key may spell."""
MOST_FAMILIES = 32
VALUE, KEY = "value", "key"
COUNTS = frozenset(
    {"num-samples", "num_samples", "nsamples", "n_samples", "num-records", "num_records"}
    | {"length", "len", "size", "count", "total", "dataset_size", "dataset-size", "nSamples"}
)
"""Keys whose value is the number of samples, if it is a number; also between ``__`` and ``__``."""
OTHERS = frozenset({"deleted_ids", "metadata", "nextid"})
"""Keys of ASE's databases whose values are no samples, but JSON, deflated or not."""
FIELDS = frozenset(
    {"image", "images", "img", "label", "labels", "lbl", "text", "target", "mask", "data", "x", "y"}
    | {"input", "output", "feature", "features", "feat", "audio", "video", "depth", "seg", "gt"}
    | {"caption", "class", "cls", "jpg", "jpeg", "png", "json", "txt", "npy", "bbox", "boxes"}
    | {"points", "meta", "id", "info", "shape", "lr", "hr", "lq", "wav", "mp4", "webp", "value"}
)
"""Names of families that are fields of a sample rather than kinds of samples."""

_SEPARATORS = "-_/:. #@|"
_ZERO, _NINE = ord("0"), ord("9")


# --- facts -----------------------------------------------------------------------------------


def number_of(value: bytes) -> int | None:
    """Return the number that a value spells: decimal digits, or Python's pickle of an int."""
    text = value.strip()
    if text.isdigit() and len(text) <= DIGITS:
        return int(text)
    pickled = re.fullmatch(
        rb"\x80[\2-\5](?:\x95.{8})?(?:K(.)|M(..)|J(....)|\x8a[\1-\x08](.{1,8}))\.", value, re.S
    )
    if pickled is None:
        return None
    digits = next(g for g in pickled.groups() if g is not None)
    return int.from_bytes(digits, "little", signed=len(digits) > 2)


def fact(key: bytes, value: bytes) -> tuple[bool, int | None]:
    """Return whether a record is a fact about the dataset, and the samples that it counts."""
    hidden = len(key) > 4 and key[:2] == key[-2:] == b"__"
    name = (key[2:-2] if hidden else key).decode("utf-8", "replace")
    count = number_of(value) if name in COUNTS else None
    hidden |= name in OTHERS and value[:1] in (b"", b"x", b"{", b"[")
    return hidden or count is not None, count


def maybe_facts(flat: Bytes, key_at: Ints, key_size: Ints) -> Ints:
    """Return which of some keys may be facts, by their first letter and their length."""
    first = flat[key_at]
    if not (first >= ord("_")).any():
        return np.zeros(0, np.int64)
    hidden = first == ord("_")
    names = COUNTS | OTHERS
    letters = np.unique(np.frombuffer("".join(n[0] for n in names).encode(), np.uint8))
    sizes = sorted({len(n) for n in names})
    return np.flatnonzero(hidden | (np.isin(first, letters) & np.isin(key_size, sizes)))


def numbers(flat: Bytes, key_at: Ints, key_size: Ints) -> tuple[Ints, np.ndarray]:
    """Return the decimal numbers that keys spell, and which keys spell none.

    The keys are those of `key_size` bytes at `key_at` in `flat`.
    """
    digits = flat[ranges(key_at, key_size)].astype(np.int64) - _ZERO
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


def _digits(text: str) -> Bytes:
    table = np.full(256, 255, np.uint8)
    table[np.frombuffer(text.encode(), np.uint8)] = np.arange(len(text))
    return table


_TABLES = {
    "decimal": _digits("0123456789"),
    "hex": _digits("0123456789abcdef"),
    "HEX": _digits("0123456789ABCDEF"),
}


@dataclass
class _Rule:
    """How keys count: the number is in columns ``a:b``, in the digits of `table` or in binary."""

    kind: str
    a: int
    b: int
    first: Bytes
    next: int = 0

    def numbers(self, rows: Bytes) -> Ints | None:
        """Return the numbers of keys, None if they are not like the first."""
        around = np.ones(rows.shape[1], bool)
        around[self.a : self.b] = False
        if (rows[:, around] != self.first[around]).any():
            return None
        inside = rows[:, self.a : self.b]
        if self.kind in ("big", "little"):
            wide = np.zeros((len(rows), 8), np.uint8)
            if self.kind == "big":
                wide[:, 8 - inside.shape[1] :] = inside
                return wide.view(">u8")[:, 0].astype(np.int64)
            wide[:, : inside.shape[1]] = inside
            return wide.view("<u8")[:, 0].astype(np.int64)
        table = _TABLES[self.kind]
        base = 10 if self.kind == "decimal" else 16
        total = np.zeros(len(rows), np.int64)
        for k in range(inside.shape[1]):
            digit = table[inside[:, k]]
            if (digit == 255).any():
                return None
            total *= base
            total += digit
        return total

    def follows(self, rows: Bytes) -> bool:
        """Whether keys continue the counter; then they are counted."""
        counted = self.numbers(rows)
        if counted is None or not (counted == self.next + np.arange(len(counted))).all():
            return False
        self.next += len(counted)
        return True


def _rules(rows: Bytes) -> list[_Rule]:
    """Return the rules that the first keys may follow."""
    first, width = rows[0], rows.shape[1]
    if len(rows) > 1:
        differ = np.flatnonzero(rows[0] != rows[1])
        last = int(differ[-1]) if len(differ) else width - 1
    else:
        digits = np.flatnonzero((first >= _ZERO) & (first <= _NINE))
        last = int(digits[-1]) if len(digits) else width - 1
    rules = []
    for kind, table in _TABLES.items():
        a = last + 1
        while a > 0 and table[first[a - 1]] != 255 and last + 1 - a < DIGITS:
            a -= 1
        if kind != "decimal":
            a = max(a, last - 14)
            spelt = first[a : last + 1]
            if len(rows) == 1 or not ((spelt >= _ZERO) & (spelt <= _NINE)).any():
                continue
        if a <= last:
            rules.append(_Rule(kind, a, last + 1, first))
    if width in (4, 8) and not ((first >= 32) & (first < 127)).all():
        rules += [_Rule("big", 0, width, first), _Rule("little", 0, width, first)]
    for rule in rules:
        start = rule.numbers(rows[:1])
        rule.next = 0 if start is None else int(start[0])
    return rules


# --- all keys --------------------------------------------------------------------------------


@dataclass
class Family:
    """Keys with the same bytes around a number: the numbers, rising, and the row of each."""

    before: bytes
    after: bytes
    numbers: Ints
    rows: Ints


@dataclass
class Keys:
    """What the keys of the records that are samples say; a row is the number of one of them.

    `odd` is the first key that is not like those before; None while there is none.
    """

    count: int = 0
    odd: bytes | None = None
    _rules: list[_Rule] | None = None
    _width: int = -1
    _last: bool | None = None  # whether the number is the last of a key, not the first
    _named: bool = False
    _parts: dict[tuple[bytes, bytes], list[tuple[Ints, Ints]]] = field(default_factory=dict)
    _widths: dict[tuple[bytes, bytes], tuple[int, int, bool]] = field(default_factory=dict)

    @property
    def counter(self) -> bool:
        """Whether the keys are a counter, in key order."""
        return not self.count or bool(self._rules)

    @property
    def start(self) -> int:
        """The number of the first key of a counter."""
        return self._rules[0].next - self.count if self._rules else 0

    def add(self, flat: Bytes, key_at: Ints, key_size: Ints) -> None:
        """Take the next keys: those of `key_size` bytes at `key_at` in `flat`."""
        if not len(key_at):
            return
        rules = self._rules
        self.count += len(key_at)
        if rules is None or rules:
            width = int(key_size[0])
            alike = bool((key_size == width).all()) and self._width in (-1, width)
            if alike:
                rows: Bytes = flat[key_at[:, None] + np.arange(width)]
                if rules is None:
                    self._width, rules = width, _rules(rows)
                left = [rule for rule in rules if rule.follows(rows)]
                if left:
                    self._rules = left
                    return
            self._break(rules or [], len(key_at))
        if not self._named:
            self._sort(flat, key_at, key_size)

    def _break(self, rules: Sequence[_Rule], new: int) -> None:
        """Make what was a counter so far the beginning of a family."""
        self._rules = []
        before = self.count - new
        if not before:
            return
        decimal = next((r for r in rules if r.kind == "decimal"), None)
        if decimal is None:
            self._named = True
            return
        key = decimal.first.tobytes()
        self._last = True
        a, b = _number_in(key, True)
        if (a, b) != (decimal.a, decimal.b):
            self._last = False
            a, b = _number_in(key, False)
        if b != decimal.b:
            self._named = True
            return
        name = key[:a], key[b:]
        start = int(key[a:b])
        numbers = np.arange(start, start + before)
        self._parts[name] = [(numbers, np.arange(before))]
        self._widths[name] = (len(key), len(key), True)

    def _sort(self, flat: Bytes, key_at: Ints, key_size: Ints) -> None:
        """Give each key to its family."""
        tried = (True, False) if self._last is None else (self._last,)
        templates = {last: _templates(flat, key_at, key_size, last) for last in tried}
        usable = {k: v for k, v in templates.items() if v is not None}
        self._last = min(usable, key=lambda k: len(usable[k][0]), default=None)
        if self._last is None:
            self._give_up(flat, key_at, key_size)
            return
        names, owner, at, size = usable[self._last]
        values, bad = numbers(flat, at, size)
        if bad.any() or len(self._parts.keys() | set(names)) > MOST_FAMILIES:
            self._give_up(flat, key_at, key_size)
            return
        rows = np.arange(self.count - len(owner), self.count)
        for k, name in enumerate(names):
            mine = owner == k
            self._parts.setdefault(name, []).append((values[mine], rows[mine]))
            sizes = key_size[mine]
            zeros = bool(((flat[at[mine]] == _ZERO) & (size[mine] > 1)).any())
            low, high, padded = self._widths.get(name, (1 << 16, 0, False))
            self._widths[name] = (
                min(low, int(sizes.min())),
                max(high, int(sizes.max())),
                padded or zeros,
            )

    def _give_up(self, flat: Bytes, key_at: Ints, key_size: Ints) -> None:
        self._named, self._parts = True, {}
        at = int(key_at[-1])
        self.odd = flat[at : at + int(key_size[-1])].tobytes()

    def families(self) -> list[Family]:
        """Return the families if there are several, however many numbers each has; else none."""
        if self.counter or self._named or not 2 <= len(self._parts) <= MOST_FAMILIES:
            return []
        complete: list[Family] = []
        for name, parts in self._parts.items():
            numbers = np.concatenate([n for n, _ in parts])
            rows = np.concatenate([r for _, r in parts])
            low, high, padded = self._widths[name]
            if low != high and padded:
                return []  # 1 and 01 may both be there
            order = np.argsort(numbers, kind="stable")
            complete.append(Family(*name, numbers[order], rows[order]))
        return complete if len(complete[0].numbers) > 1 else []


def _number_in(key: bytes, last: bool) -> tuple[int, int]:
    """Return where the last or the first number of a key begins and ends."""
    spans = [m.span() for m in re.finditer(rb"[0-9]+", key)]
    return spans[-1 if last else 0] if spans else (0, 0)


_Templates = tuple[list[tuple[bytes, bytes]], Ints, Ints, Ints]


def _templates(flat: Bytes, key_at: Ints, key_size: Ints, last: bool) -> _Templates | None:
    """Return the bytes around the last or the first number of keys.

    ``(names, which, at, size)``: the different bytes before and after it, which of them each key
    has, and the offset of its number in `flat`; None if a key has no number or they are too many.
    """
    n, width = len(key_at), int(key_size.max())
    begins = offsets_of(key_size)[:-1]
    text = flat[ranges(key_at, key_size)]
    rows = np.zeros((n, width), np.uint8)
    column = np.arange(len(text)) - np.repeat(begins, key_size)
    rows[np.repeat(np.arange(n), key_size), column] = text
    digit = (rows >= _ZERO) & (rows <= _NINE)
    if not digit.any(axis=1).all():
        return None
    at = np.arange(width)
    if last:
        stop = width - digit[:, ::-1].argmax(axis=1)
        start = np.where(~digit & (at < stop[:, None]), at, -1).max(axis=1) + 1
    else:
        start = digit.argmax(axis=1)
        stop = np.where(~digit & (at > start[:, None]), at, width).min(axis=1)
    stop = np.minimum(stop, key_size)
    inside = (at >= start[:, None]) & (at < stop[:, None])
    rows[inside] = 0
    behind = np.take_along_axis(rows, np.minimum(at + stop[:, None], width - 1), axis=1)
    behind[at >= (key_size - stop)[:, None]] = 0
    rows[at >= start[:, None]] = 0
    sizes = np.stack([start, key_size - stop], axis=1).astype(np.uint16).view(np.uint8)
    table = np.ascontiguousarray(np.concatenate([sizes, rows, behind], axis=1))
    if (table == table[0]).all():
        chosen, owner = np.zeros(1, np.int64), np.zeros(n, np.int64)
    else:
        rows_as_bytes = table.view(np.dtype((np.void, table.shape[1])))[:, 0]
        _, chosen, owner = np.unique(rows_as_bytes, return_index=True, return_inverse=True)
        if len(chosen) > MOST_FAMILIES:
            return None
        order = np.argsort(chosen)  # in the order in which they come
        rank = np.argsort(order)
        chosen, owner = chosen[order], rank[owner]
    names = []
    for i in chosen.tolist():
        key = flat[key_at[i] : key_at[i] + key_size[i]].tobytes()
        names.append((key[: start[i]], key[stop[i] :]))
    return names, owner.reshape(-1), key_at + start, stop - start


def field_names(families: Sequence[Family]) -> list[str] | None:
    """Return what families are called as fields, None if that does not come out well.

    What all have in common, up to a separator, is left out.
    """
    befores = [f.before.decode("utf-8", "replace") for f in families]
    afters = [f.after.decode("utf-8", "replace") for f in families]
    start, stop = _cut(befores), _cut([a[::-1] for a in afters])
    names = []
    for before, after in zip(befores, afters, strict=True):
        parts = before[start:], after[: len(after) - stop]
        words = [w for w in (p.strip(_SEPARATORS) for p in parts) if w]
        names.append("_".join(words) or VALUE)
    good = len(set(names)) == len(names) and KEY not in names
    good &= all(n.isprintable() and "\ufffd" not in n and not re.search("[0-9]", n) for n in names)
    return names if good else None


def _cut(names: Sequence[str]) -> int:
    """Return up to where names have all letters in common, up to a separator."""
    cut = 0
    for k, letters in enumerate(zip(*names, strict=False)):
        if len(set(letters)) > 1:
            break
        cut = k + 1 if letters[0] in _SEPARATORS else cut
    return cut


def lacking(families: Sequence[Family]) -> tuple[Ints, Ints]:
    """Return the numbers that not every family has, and all numbers."""
    every, counts = np.unique(np.concatenate([f.numbers for f in families]), return_counts=True)
    return every[counts != len(families)], every


def are_fields(names: Iterable[str], samples: int, counts: Iterable[int | None]) -> bool:
    """Whether families are fields of one sample for certain, not kinds of samples."""
    known = sum(word.lower() in FIELDS for word in names)
    return known > 1 or samples in set(counts)
