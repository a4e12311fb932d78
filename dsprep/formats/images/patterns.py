"""Fields that are files: those whose paths match a pattern, of which the stars give the key."""

from __future__ import annotations

import os
import re
import shlex
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsprep.core.schema import OTHERS, FieldSpec, Ints
from dsprep.errors import FormatError, UsageError
from dsprep.formats.samples import listed, natural_order
from dsprep.layout.words import Words

MAX_FIELDS = 8
"""Folders that may be fields of one sample."""

_JOINTS = "_-. "


class Pattern:
    """The files of a field, such as ``masks/*_mask.png``: a star stands for no slash."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._match = re.compile("([^/]*)".join(map(re.escape, text.split("*")))).fullmatch

    def key(self, name: bytes) -> bytes | None:
        """Return what the stars stand for in the path of a file; None: it is not of this field."""
        match = self._match(os.fsdecode(name))
        return None if match is None else os.fsencode("/".join(match.groups()))


@dataclass(frozen=True)
class Part:
    """A field of which each sample has a file: the path of each in the folder, and its bytes."""

    name: str
    files: Words
    sizes: Ints


def patterns(specs: Sequence[FieldSpec]) -> list[Pattern]:
    """Return the patterns among the fields that are asked for, the longest first."""
    texts = dict.fromkeys(spec.path for spec in specs if "*" in spec.path and spec.path != OTHERS)
    return [Pattern(text) for text in sorted(texts, key=len, reverse=True)]


def join(
    fields: Sequence[Pattern], names: Sequence[bytes], sizes: Ints, nulls: str, root: Path
) -> tuple[list[bytes], list[Part], list[str]]:
    """Return the keys of the samples that have a file of each field, their files, and notes.

    A file is of the field with the longest pattern that it matches.

    Raises
    ------
    FormatError
        If a sample lacks a file, unless `nulls` is ``"drop-rows"``.
    UsageError
        If a field has no files.
    """
    matches: dict[str, dict[bytes, int]] = {field.text: {} for field in fields}
    for i, name in enumerate(names):
        for field in fields:
            if (key := field.key(name)) is not None:
                matches[field.text][key] = i
                break
    if empty := [text for text, files in matches.items() if not files]:
        raise UsageError(f"no file matches {empty[0]}", where=root, fix="look at the pattern")
    keys = list(set.intersection(*map(set, matches.values())))
    notes = []
    for text, files in matches.items():
        if not (lost := sorted({key for each in matches.values() for key in each} - files.keys())):
            continue
        some = listed([os.fsdecode(key) for key in lost])
        if nulls == "refuse" or not keys:
            raise FormatError(
                f"{len(lost):,} of {len(lost) + len(files):,} samples have no file {text}",
                where=root,
                found=f"for the stars: {some}",
                fix="leave these samples out: --nulls drop-rows" if keys else "other patterns",
            )
        notes.append(f"left out {some}: no file {text}")
    keys = [keys[i] for i in natural_order(keys)]
    parts = []
    for text, files in matches.items():
        numbers = np.array([files[key] for key in keys], np.int64)
        parts.append(Part(text, Words.of(names[i] for i in numbers.tolist()), sizes[numbers]))
    return keys, parts, notes


def readings(names: Sequence[bytes]) -> list[tuple[str, str]]:
    """Return options by which files would be fields of samples, and how many these would be.

    Fields are the folders of one level, or files of which the names begin alike.
    """
    paths, ways = sorted(map(os.fsdecode, names)), []
    for level in range(2):
        inside = [path for path in paths if path.count("/") > level]
        if 2 <= len({path.split("/")[level] for path in inside}) <= MAX_FIELDS:
            folders = _grouped((path.split("/")[level], path) for path in inside)
            kinds = [(name, *kind) for name, some in folders.items() for kind in _kinds(some)]
            ways.append({n + word: _pattern(some, *_affixes(some)) for n, word, some in kinds})
    stems = {_stem(path) for path in paths}
    tails = _grouped((_tail(path, stems), path) for path in paths)
    if 2 <= len(tails) <= MAX_FIELDS:
        ways.append({_name_of(tail): _pattern(some, "", tail) for tail, some in tails.items()})
    options: dict[frozenset[str], tuple[str, str]] = {}
    for way in ways:
        fields = {name: Pattern(text) for name, text in way.items() if text}
        if len(fields) == len(way) <= MAX_FIELDS:
            keys = [{field.key(name) for name in names} - {None} for field in fields.values()]
            count = len(set.intersection(*keys))
            words = [f"--field {shlex.quote(f'{n}={f.text}')}" for n, f in fields.items()]
            lacking = any(len(some) > count for some in keys)
            if count:
                option = " ".join(words) + " --nulls drop-rows" * lacking
                reading = option, f"{count:,} samples of {len(words)} files"
                options.setdefault(frozenset(way.values()), reading)
    return [*options.values()]


def _grouped(paths: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    groups = defaultdict(list)
    for group, path in paths:
        groups[group].append(path)
    return groups


def _base(path: str) -> str:
    return path.rpartition("/")[2]


def _stem(path: str) -> str:
    """Return a path without what follows the first point in the name of its file."""
    return path[: len(path) - len(_base(path).partition(".")[2])].removesuffix(".")


def _kinds(paths: list[str]) -> list[tuple[str, list[str]]]:
    """Return files by the last words of their names, if as many have each of a few words."""
    words = _grouped((re.sub(r".*(?=[-_ ])", "", _base(path)), path) for path in paths)
    equal = len(words) <= MAX_FIELDS and len({*map(len, words.values())}) == 1
    named = all(word[0] in _JOINTS and not _name_of(word).isdigit() for word in words)
    if len(words) > 1 and equal and named:
        return [(f"_{_name_of(word)}", some) for word, some in words.items()]
    return [("", paths)]


def _pattern(paths: Sequence[str], head: str, tail: str) -> str:
    """Return the pattern of files, whose names begin and end so; empty if depths differ."""
    folders = {tuple(path.split("/")[:-1]) for path in paths}
    if len({*map(len, folders)}) > 1:
        return ""
    levels = [level[0] if len({*level}) == 1 else "*" for level in zip(*folders, strict=True)]
    return "/".join([*levels, f"{head}*{tail}"])


def _affixes(paths: Sequence[str]) -> tuple[str, str]:
    """Return the words that the names of all files begin and end with."""
    names = sorted({*map(_base, paths)})
    if len(names) == 1:
        return "", names[0][len(_stem(names[0])) :]
    head, tail = _common(names), _common(sorted(name[::-1] for name in names))[::-1]
    return ("" if len(head) + len(tail) > min(map(len, names)) else head), tail


def _common(names: Sequence[str]) -> str:
    """Return what all begin with, up to a joint, or to a letter before digits."""
    common = os.path.commonprefix([names[0], names[-1]])  # noqa: RUF071 (characters)
    for n in range(len(common), 0, -1):
        if common[n - 1] in _JOINTS:
            return common[:n]
        if common[n - 1].isalpha() and all(name[n : n + 1].isdigit() for name in names):
            return common[:n]
    return ""


def _tail(path: str, stems: Container[str]) -> str:
    """Return what follows the shortest stem of a file beside it that its name begins with."""
    begin = len(path) - len(_base(path)) + 1
    ends = (n for n in range(begin, len(path)) if path[n] in _JOINTS and path[:n] in stems)
    return path[next(ends, len(path)) :]


def _name_of(tail: str) -> str:
    """Return what a field would be called: ``mask`` for ``_mask.png``, ``txt`` for ``.txt``."""
    words = re.findall(r"\w+", tail.replace("_", " "))
    return "_".join(words[:-1] if len(words) > 1 else words)
