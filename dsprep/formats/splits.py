"""Names that state a part of a dataset: those for training, validation and test are not one.

One rule for files, folders, members of archives and arrays. A name is taken apart into words at
everything that is not a letter, and where small letters change to capitals: ``X_train``,
``trainX``, ``train2017`` and ``xtrain`` state the same part.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping

from dsprep.errors import AmbiguousError
from dsprep.formats.samples import Sized, choose, show_reading

PARTS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("dev", "eval", "evaluation", "val", "valid", "validation"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
    "trainval": "train and validation",
}
"""The words that state a part, and which."""

_WORDS = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_PART = re.compile(rf"(?i)[xy]?({'|'.join(sorted(PARTS, reverse=True))})(?:set|data)?")
HINT = re.compile("(?i)train|dev|eval|val|test")
"""A part of every name that states a part."""

_HINT_BYTES = re.compile(HINT.pattern.encode())
_FORM = bytes(ord("0") if 48 <= c < 58 else c for c in range(256))


def parts_of(name: str) -> frozenset[str]:
    """Return the parts that a name states, mostly none or one.

    >>> [sorted(parts_of(name)) for name in ("X_train", "val2017/7.h5", "contest")]
    [['train'], ['validation'], []]
    """
    if HINT.search(name) is None:
        return frozenset()
    words = (_PART.fullmatch(word) for word in _WORDS.findall(name))
    return frozenset(PARTS[word[1].lower()] for word in words if word is not None)


def by_part(names: Iterable[str]) -> dict[str, list[str]]:
    """Return names by the part that they state, ``""`` for those that state none."""
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(" and ".join(sorted(parts_of(name))), []).append(name)
    return parts


def parts_of_many(names: Iterable[bytes]) -> dict[str, str]:
    """Return the parts that very many names state, and a name that states each of them.

    Names that differ in numbers alone are looked at once, so digits of the names may be others.
    """
    joined = b"\0".join(names)
    forms = {*joined.translate(_FORM).split(b"\0")} if _HINT_BYTES.search(joined) else ()
    parts = by_part(sorted(form.decode("utf-8", "backslashreplace") for form in forms))
    return {part: examples[0] for part, examples in parts.items() if part}


def without_part(name: str) -> str:
    """Return a name without the words that state a part, and what joins them to the others.

    >>> [without_part(n) for n in ("x_train", "train/x", "trainX", "xtrain", "test_images_0")]
    ['x', 'x', 'X', 'x', 'images_0']
    """
    rest = _WORDS.sub(
        lambda word: word[0][: part.start(1)] if (part := _PART.fullmatch(word[0])) else word[0],
        name,
    )
    return re.sub(r"[\W_]*([\W_])[\W_]*", r"\1", rest).strip("/_-. ")


def check_arrays(arrays: Mapping[str, Sized], where: object) -> None:
    """Raise `AmbiguousError` if arrays of a file differ in nothing else than the part they name."""
    stems = {name: without_part(name) for name in arrays if "/" not in name}
    counts = Counter(stems.values())
    parts = [*by_part(n for n, stem in stems.items() if counts[stem] > 1).values()]
    if len(parts) > 1:
        firsts = [choose({n: arrays[n] for n in part}, "first") for part in parts]
        raise AmbiguousError(
            "its arrays are named as parts of a dataset, not as the fields of one",
            [(_options(f.names), show_reading(f.count, f.names)) for f in firsts],
            where=where,
            fix="name the fields that are meant: --field NEW=NAME",
        )


def _options(names: Iterable[str]) -> str:
    """Return the options that take some arrays, called as they are without their part."""
    pairs = ((without_part(name) or name, name) for name in names)
    return " ".join(f"--field {shlex.quote(n if c == n else f'{c}={n}')}" for c, n in pairs)
