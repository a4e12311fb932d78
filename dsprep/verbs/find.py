"""Finding the sidecar that a command is to use, and the samples that the user names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from dsprep.errors import UsageError
from dsprep.formats.options import OpenOptions
from dsprep.sidecar.sidecar import Sidecar
from dsprep.source.dataset import find_sidecar
from dsprep.source.files import find_files
from dsprep.verbs.provenance import provenance
from dsprep.writing.plan import parse_range


def find(
    paths: Sequence[str | Path], options: OpenOptions, at: Path | None = None
) -> Sidecar | None:
    """Return the valid sidecar of a dataset, None if there is none.

    Parameters
    ----------
    paths
        As `open_dataset` takes them.
    options
        How to read: as by default, or as the sidecar was made. Of fields only
        types count.
    at
        The sidecar, if it is not beside the dataset.

    Raises
    ------
    StaleError
        If the data changed since it was written.
    FormatError
        If it is damaged.
    UsageError
        If it was made with other options.
    """
    files = [p for p, _ in find_files(paths)[0]]
    if at is not None and not at.is_file():
        return None
    existing = find_sidecar(files, at)
    if existing is None or not existing[0].layouts:
        return None
    content, dataset, path = existing
    recorded = OpenOptions.from_json(content.reading)
    requested = replace(options, fields=())
    typed = any(s.dtype is not None or s.index for s in options.fields)
    if (
        requested.meaning != OpenOptions() and requested.meaning != replace(recorded, fields=())
    ) or (typed and options.fields != recorded.fields):
        raise UsageError(
            "the sidecar was made with other options on how to read",
            where=path,
            fix="leave them out, or write it again with dsprep provenance and these options",
        )
    return Sidecar(content, dataset, path, follow_external=options.follow_external)


def find_or_make(
    paths: Sequence[str | Path],
    options: OpenOptions,
    at: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Sidecar, bool]:
    """Return the valid sidecar of a dataset, in memory if there is none, and whether there is one.

    Parameters
    ----------
    paths, options, at
        As for `find`.
    progress
        Called with (done, in all) where making it takes long.

    Raises
    ------
    DsprepError, OSError
        As `find` and `provenance` raise them.
    """
    if (existing := find(paths, options, at)) is not None:
        return existing, True
    unchanged = all(s.name == s.path and s.dtype is None and not s.index for s in options.fields)
    options = replace(options, fields=()) if unchanged else options
    made = provenance(paths, options, out=at, write=False, progress=progress)
    return Sidecar(made.content, made.dataset, made.path, made.companion), False


def unlocated(opened: Sidecar) -> dict[str, str]:
    """Return the fields that cannot be located in some file, and why."""
    layouts = (layout for layout, _ in opened.layouts())
    return {name: reason for x in layouts for name, reason in x.unlocated.items()}


def parse_samples(text: str, count: int) -> list[int | slice]:
    """Return the samples that ``5,100:200,-1`` means: numbers and half-open ranges.

    Raises
    ------
    UsageError
        If it is something else, or not all of it is in the dataset.

    Examples
    --------
    >>> parse_samples("5,2:4,-1", 10)
    [5, slice(2, 4, 1), 9]
    """
    chosen: list[int | slice] = []
    for word in text.split(","):
        if word.count(":") == 1:
            chosen.append(slice(*parse_range("".join(word.split()), count), 1))
            continue
        try:
            number = int(word)
        except ValueError:
            raise UsageError(
                f"{word!r} names no samples", expected="numbers and ranges, such as 5,100:200"
            ) from None
        if not -count <= number < count:
            raise UsageError(f"there is no sample {number}", expected=f"below {count}")
        chosen.append(number % count)
    return chosen
