"""Folders of which files of equal names are fields of one sample: images and masks, LR and HR.

Which files belong together only their names say: by their paths below the folder of each field,
without suffixes, and without what the names of all files of a field begin or end with
(``7_gtFine_labelIds.png`` is the partner of ``7_leftImg8bit.png``).
"""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import FieldSpec, Ints
from dsprep.errors import FormatError, UsageError
from dsprep.formats.images.recognise import has_suffix
from dsprep.formats.samples import listed, natural_order
from dsprep.formats.splits import parts_of, without_part
from dsprep.layout.words import Words


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


IMAGES = _set(
    "frame frames image images img imgs input inputs lq lr original originals photo photos picture "
    "pictures rgb"
)
"""Words in the names of folders that hold what a model is given."""

PARTNERS = _set(
    "alpha alphas ann anno annos annot annotation annotations annots anns bbox bboxes contour "
    "contours depth depths groundtruth gt gts hq hr label labels manual mask masks matte mattes "
    "seg segmentation segmentations segs target targets trimap trimaps truth xml xmls"
)
"""Words in the names of folders that hold what belongs to each image."""

EITHER = _set(
    "after before blur blurred blurry clean clear degraded edited enhanced haze hazy high left "
    "low noise noisy norain rain rainy raw reference right sharp sketch sketches"
)
"""Names of folders that may be classes, or two images of each sample."""

_WORDS = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_MAGIC = re.compile(r"[*?]")
_JOINTS = "_-. "
_GLUED = re.compile("(?i)(train(?:ing)?|val(?:id(?:ation)?)?|test(?:ing)?)([a-z]+)")
_BESIDE = re.compile(
    rb"(?i)[-_. ](gt|label|mask|matte|seg|segmentation|trimap|annotation)s?([-_. ]?[0-9]+)?\Z"
)


@dataclass(frozen=True)
class Selection:
    """Which files are a field: those below a folder, perhaps those whose names match a pattern.

    Attributes
    ----------
    path
        As the user wrote it, and as the field is called: ``gtFine/train/*_labelIds.png``.
    folder
        Its folder, ``""`` for the dataset's own; a ``*`` in it stands for any folder.
    pattern
        Of the names of files; ``"*"``: all.
    """

    path: str
    folder: str
    pattern: str = "*"

    @classmethod
    def parse(cls, path: str) -> Selection:
        """Return what `path` means: a folder, or a pattern of the names of files in one."""
        folder, _, base = path.rpartition("/")
        return cls(path, folder, base) if _MAGIC.search(base) else cls(path, path)

    def below(self, name: bytes) -> bytes | None:
        """Return the path of a file without the folders named here; None: it is another's."""
        named = self.folder.split("/") if self.folder else []
        *folders, base = os.fsdecode(name).split("/")
        if len(folders) < len(named) or not _matches(base, self.pattern):
            return None
        if not all(map(_matches, folders[: len(named)], named)):
            return None
        kept = [f for f, n in zip(folders, named, strict=False) if _MAGIC.search(n)]
        return os.fsencode("/".join([*kept, *folders[len(named) :], base]))


@dataclass(frozen=True)
class Part:
    """A field whose values are files.

    Attributes
    ----------
    selection
        Which they are.
    names
        Their paths in the dataset.
    sizes
        Bytes of each, int64.
    """

    selection: Selection
    names: Words
    sizes: Ints

    @cached_property
    def stems(self) -> list[bytes]:
        """Their paths below the folder, without suffixes."""
        below = map(self.selection.below, self.names.data.split(b"\0")[:-1])
        return [_stem(name) for name in below if name is not None]


@dataclass(frozen=True)
class Joined:
    """Samples of which some fields are files.

    Attributes
    ----------
    keys
        What the names of the files of each sample have in common, in natural order.
    numbers
        By field: the file of each sample among its `Part.names`, or -1; int64.
    notes
        How names were compared, one clause each.
    """

    keys: list[bytes]
    numbers: Mapping[str, Ints]
    notes: tuple[str, ...]


def role_of(folder: str) -> frozenset[str]:
    """Return what a folder holds by its name: ``image`` and ``partner``, mostly one or none.

    >>> [sorted(role_of(n)) for n in ("JPEGImages", "DIV2K_train_HR", "trainannot", "cat")]
    [['image'], ['partner'], ['partner'], []]
    """
    roles = {"image": IMAGES, "partner": PARTNERS}
    words = frozenset(word.lower() for word in _WORDS.findall(_GLUED.sub(r"\1_\2", folder)))
    return frozenset(role for role, known in roles.items() if known & words)


def roles_of(folders: Sequence[str]) -> dict[str, frozenset[str]]:
    """Return the folders that have a role; ``train`` beside ``train_masks`` holds images."""
    roles = {name: role_of(name) for name in folders}
    parts = {part_of(name) for name in folders if roles[name] == {"partner"}}
    for name in folders:
        if part_of(name) in parts - {frozenset()} and not roles[name] and not without_part(name):
            roles[name] = frozenset({"image"})
    return {name: role for name, role in roles.items() if role}


def part_of(folder: str) -> frozenset[str]:
    """Return the parts of a dataset that a folder is named after, as `parts_of` does.

    >>> [*part_of("trainannot"), *part_of("test_images")]
    ['train', 'test']
    """
    return parts_of(_GLUED.sub(r"\1_\2", folder))


def are_alike(files: Mapping[bytes, Sequence[bytes]]) -> bool:
    """Whether the files of all folders have the same names, but for their suffixes."""
    folders = iter(files.items())
    folder, names = next(folders)
    first = {_stem(name[len(folder) :]) for name in names}
    return all(
        len(names) == len(first) and {_stem(n[len(f) :]) for n in names} == first
        for f, names in folders
    )


def belongs(part: Part, parts: Sequence[Part]) -> bool:
    """Whether files of a field are images, or are called as those of another field are."""
    if any(has_suffix(name) for name in part.names.data.split(b"\0")):
        return True
    bases = {stem.rpartition(b"/")[2] for stem in part.stems}
    others = [p for p in parts if p is not part and len(p.names)]
    called = {stem.rpartition(b"/")[2] for p in others for stem in p.stems}
    return bool(bases & called) or any(_shared(_comparable([part, p])[0]) for p in others)


def check_splits(fields: Mapping[str, str], root: Path) -> None:
    """Raise `UsageError` if some fields belong to one part of a dataset, and some to another.

    `fields` is what says so: the folder of each field, by which `parts_of` judges.
    """
    by_split: dict[frozenset[str], list[str]] = {}
    for folder, name in fields.items():
        by_split.setdefault(part_of(name), []).append(folder)
    by_split.pop(frozenset(), None)
    if len(by_split) > 1:
        options = [" ".join(map(_option, folders)) for folders in by_split.values()]
        raise UsageError(
            "the folders are parts of a dataset, not of one",
            where=root,
            found=listed([folder for folders in by_split.values() for folder in folders]),
            fix="name the fields of one part: " + ", or ".join(options),
        )


def check_splits_within(parts: Sequence[Part], root: Path) -> None:
    """Raise `UsageError` if each field has a folder for every part of a dataset."""
    first = [dict.fromkeys(s.split(b"/")[0] for s in p.stems if b"/" in s) for p in parts]
    named = [os.fsdecode(name) for names in first for name in names]
    if named and all(map(parts_of, named)):
        below = [
            (f"{p.selection.path}/{os.fsdecode(name)}", os.fsdecode(name))
            for p, names in zip(parts, first, strict=True)
            for name in names
        ]
        check_splits(dict(below), root)


def selections(specs: Sequence[FieldSpec], root: Path) -> list[Selection]:
    """Return which of the fields that are asked for are folders, or patterns of files."""
    paths = dict.fromkeys(spec.path for spec in specs)
    below = [path for path in paths if path and not {"", ".", ".."} & {*path.split("/")}]
    return [Selection.parse(p) for p in below if _MAGIC.search(p) or (root / p).is_dir()]


def chosen_for(name: bytes, among: Sequence[Selection]) -> Selection | None:
    """Return which selection a file belongs to: of several, the one with the longest pattern."""
    return max(
        (s for s in among if s.below(name) is not None),
        key=lambda s: (len(s.folder), len(s.pattern)),
        default=None,
    )


def join(parts: Sequence[Part], root: Path) -> Joined:
    """Return the samples that files of equal names make up.

    Raises
    ------
    UsageError
        If two files of a field have one name.
    """
    keys, cuts = _comparable(parts)
    stems, cut = parts[0].stems, _affixes(parts[0].stems)
    firsts = {*keys[0], *_without(stems, cut), *_without(stems, (b"", b"", cut[2]))}
    for part, of_part in zip(parts, keys, strict=True):
        _check_once(part, of_part, firsts, len(keys[0]), root)
        _check_folders(part, of_part, firsts, parts[0], root)
    every = list(dict.fromkeys(key for of_part in keys for key in of_part))
    every = [every[i] for i in natural_order(every)]
    numbers = {}
    for part, of_part in zip(parts, keys, strict=True):
        known = {key: i for i, key in enumerate(of_part)}
        numbers[part.selection.path] = np.array([known.get(key, -1) for key in every], np.int64)
    fields = [part.selection.path for part in parts]
    notes = [f"files of equal names are one sample: {listed(fields)}"]
    notes += [
        f"names of {field} are compared without {affixes}"
        for field, affixes in zip(fields, cuts, strict=True)
        if affixes
    ]
    return Joined(every, numbers, tuple(notes))


@dataclass(frozen=True)
class Complete:
    """Samples that have a file for every field.

    Attributes
    ----------
    parts
        The fields.
    kept
        Which of the samples looked at: true for those that are complete, shape ``(n,)``.
    notes
        What was left out, one clause each.
    """

    parts: tuple[Part, ...]
    kept: NDArray[np.bool_]
    notes: tuple[str, ...]


def complete(
    joined: Joined, parts: Sequence[Part], samples: Ints, nulls: str, root: Path
) -> Complete:
    """Return the samples that are complete, and their fields.

    Parameters
    ----------
    samples
        Numbers of the samples that are wanted.
    nulls
        As `OpenOptions.nulls`: what is done where a sample has no file in a field.

    Raises
    ------
    FormatError
        If that is refused, or nothing is left.
    """
    kept, incomplete, notes = np.ones(len(samples), np.bool_), [], []
    for part in parts:
        there = joined.numbers[part.selection.path][samples] >= 0
        lacking = np.flatnonzero(~there)
        if not len(lacking):
            incomplete.append(part)
            continue
        some = [os.fsdecode(joined.keys[i]) for i in samples[lacking[:4]].tolist()]
        more = f" and {len(lacking) - 4:,} more" if len(lacking) > 4 else ""
        count, where = f"{len(lacking):,} of {len(samples):,}", part.selection.path
        if nulls == "refuse":
            sample = int(samples[lacking[0]])
            other = next(p for p in parts if joined.numbers[p.selection.path][sample] >= 0)
            beside = other.names[int(joined.numbers[other.selection.path][sample])]
            full = [p for p in parts if (joined.numbers[p.selection.path][samples] >= 0).all()]
            others = " ".join(_option(p.selection.path) for p in full)
            others = f"leave the field out: {others}; " if full else ""
            raise FormatError(
                f"{count} samples have no file in {where}",
                where=root / part.selection.folder,
                expected=f"a partner of {os.fsdecode(beside)}",
                found=f"none for {', '.join(some)}{more}",
                fix="leave these samples out: --nulls drop-rows, or --labels ./FILE, a table or "
                f"list of those that are wanted; {others}or, if they are no pairs: "
                "--labels folders, --labels none",
            )
        if nulls == "drop-columns":
            notes.append(f"left out {where}: {count} samples have no file there")
            continue
        incomplete.append(part)
        kept &= there
        notes.append(f"left out {', '.join(some)}{more}: no file in {where}")
    if not incomplete or not kept.any():
        raise FormatError("no sample has all of its files", where=root, found="; ".join(notes))
    return Complete(tuple(incomplete), kept, tuple(notes))


def check_beside(names: Sequence[bytes], others: Sequence[bytes], root: Path) -> None:
    """Raise `UsageError` if files of a folder are named as what belongs to its images.

    Parameters
    ----------
    names, others
        The paths of images, and those of other files.
    """
    known = {_stem(name): name for name in names}
    beside = [name for name in others if _stem(name) in known]
    if beside and 2 * len(beside) >= len(names):
        suffix, own = (_suffix(n) for n in (known[_stem(beside[0])], beside[0]))
        field, tail = own[1:], own
    else:
        marked = [(name, match) for name in names if (match := _BESIDE.search(_stem(name)))]
        partners = [(name, m) for name, m in marked if m.string[: m.start()] in known]
        if not partners or 3 * len(partners) < len(names):
            return
        beside, match = [name for name, _ in partners], partners[0][1]
        suffix, own = _suffix(known[match.string[: match.start()]]), _suffix(beside[0])
        field, tail = match[1].decode().lower(), os.fsdecode(match[0]) + own
    raise UsageError(
        f"{len(beside):,} files are named as what belongs to one of {len(names):,} images",
        where=root,
        found=os.fsdecode(beside[0]),
        fix=f"say what they are: --field 'image=*{suffix}' --field '{field}=*{tail}' makes one "
        "sample of both; --labels none takes each image as one, --labels folders as well, with its "
        "folder as class",
    )


def check_inside(names: Sequence[bytes], root: Path) -> None:
    """Raise `UsageError` if each folder has one of images, and one of what belongs to them."""
    inside = dict.fromkeys(
        os.fsdecode(parts[1]) for parts in (name.split(b"/") for name in names) if len(parts) > 2
    )
    roles = roles_of([*inside])
    if {"image", "partner"} <= frozenset[str]().union(*roles.values()):
        options = " ".join(f"--field {shlex.quote(f'{name}=*/{name}')}" for name in sorted(roles))
        raise UsageError(
            "the folders hold folders of images, and of what belongs to them",
            where=root,
            found=listed([*roles]),
            fix=f"name the fields of a sample: {options}; or --labels folders, --labels none",
        )


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern.replace("[", "[[]"))


def _stem(name: bytes) -> bytes:
    directory, slash, base = name.rpartition(b"/")
    return directory + slash + (base.rpartition(b".")[0] or base)


def _suffix(name: bytes) -> str:
    return os.fsdecode(name[len(_stem(name)) :])


def _option(path: str) -> str:
    return f"--field {shlex.quote(path)}"


def _comparable(parts: Sequence[Part]) -> tuple[list[list[bytes]], list[str]]:
    """Return what tells the files of each field which sample they are of, and what was cut off.

    That are their stems, or these without what all of a field have: whichever fits more samples.
    """
    stems = [part.stems for part in parts]
    affixes = [_affixes(s) for s in stems]
    short = [_without(s, cut) for s, cut in zip(stems, affixes, strict=True)]
    if _shared(short) <= _shared(stems):
        return stems, [""] * len(parts)
    return short, [" and ".join(os.fsdecode(a) for a in cut if a) for cut in affixes]


def _shared(keys: Sequence[list[bytes]]) -> int:
    return len(set(keys[0]).intersection(*keys[1:]))


def _affixes(stems: Sequence[bytes]) -> tuple[bytes, bytes, bytes]:
    """Return the folders that all are in, and what their names begin and end with.

    That is as far as it is a word of its own.
    """
    folder = os.path.commonpath([b"/" + s.rpartition(b"/")[0] for s in stems] or [b"/"])[1:]
    folder += b"/" * bool(folder)
    bases = sorted({stem.rpartition(b"/")[2].decode("latin-1") for stem in stems})
    if len(bases) < 2:
        return folder, b"", b""
    before, after = _prefix(bases), _prefix([base[::-1] for base in bases])[::-1]
    if len(before) + len(after) >= min(map(len, bases)):
        after = ""
    return folder, before.encode("latin-1"), after.encode("latin-1")


def _prefix(bases: Sequence[str]) -> str:
    """Return what all begin with, up to a joint, or to a digit that a letter is before."""
    common = os.path.commonprefix([min(bases), max(bases)])  # noqa: RUF071 (characters)
    for n in range(min(len(common), min(map(len, bases)) - 1), 0, -1):
        last = common[n - 1]
        if last in _JOINTS or (last.isalpha() and all(base[n].isdigit() for base in bases)):
            return common[:n]
    return ""


def _without(stems: Sequence[bytes], cut: tuple[bytes, bytes, bytes]) -> list[bytes]:
    out = []
    for stem in stems:
        directory, slash, base = stem.rpartition(b"/")
        base = base[len(cut[1]) : len(base) - len(cut[2])]
        out.append((directory + slash)[len(cut[0]) :] + base)
    return out


def _check_folders(
    part: Part, stems: Sequence[bytes], known: set[bytes], first: Part, root: Path
) -> None:
    """Raise `UsageError` if the partners of the first field are in folders of their own."""
    if part is first or known.intersection(stems):
        return
    split = [stem.partition(b"/") for stem in stems]
    inside = list(dict.fromkeys(os.fsdecode(f) for f, _, rest in split if rest in known))
    if inside:
        options = [first.selection.path, *(f"{part.selection.folder}/{f}" for f in inside)]
        raise UsageError(
            f"{part.selection.path} has several folders with files for each of "
            f"{first.selection.path}",
            where=root / part.selection.folder,
            found=listed(inside),
            fix="name each that is a field: " + " ".join(map(_option, sorted(options))),
        )


def _check_once(
    part: Part, stems: Sequence[bytes], known: set[bytes], count: int, root: Path
) -> None:
    """Raise `UsageError` if a field has several files for one name of the first field."""
    tails = Counter[bytes]()
    names = part.names.data.split(b"\0")[:-1]
    for name, stem in zip(names, stems, strict=True):
        for n in range(len(stem), 0, -1):
            digits = stem[n - 1 : n + 1]
            if stem[:n] in known and not (len(digits) == 2 and digits.isdigit()):
                tails[stem[n:] + name[name.rfind(b".") :]] += 1
                break
    twice = [stem for stem, n in Counter(stems).items() if n > 1]
    several = [tail for tail, n in tails.most_common(4) if 2 * n > count]
    if not twice and len(several) < 2:
        return
    shown = [os.fsdecode(n) for n, s in zip(names, stems, strict=True) if s in twice[:1]]
    shown = shown or [os.fsdecode(name) for name in names[: len(several)]]
    folder = part.selection.folder and part.selection.folder + "/"
    fixes = [f"--field {shlex.quote(f'NAME={folder}*{os.fsdecode(tail)}')}" for tail in several]
    raise UsageError(
        f"{part.selection.path} has several files of one name",
        where=root / part.selection.folder,
        found=listed(shown),
        fix="name those that are a field, by a pattern of their names: "
        + (", or ".join(fixes) or f"--field 'NAME={folder}*.png'"),
    )
