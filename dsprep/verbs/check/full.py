"""The thorough part of checking a sidecar: all extents, all checksums, and values bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from dsprep import formats
from dsprep.core.schema import Schema, differences
from dsprep.errors import FormatError
from dsprep.formats.base import Source
from dsprep.formats.options import OpenOptions
from dsprep.sidecar import spec
from dsprep.sidecar.sidecar import Sidecar
from dsprep.source.many import Dataset, without
from dsprep.verbs.check.extents import wrong_extents
from dsprep.verbs.verify import differing_samples

Progress: TypeAlias = Callable[[int, int], None]

PIECE = 8 << 20
"""Bytes of samples that are read at once."""
ALL_SAMPLES, ALL_NBYTES = 10_000, 64 << 20
"""Datasets below either are compared sample by sample; of larger ones `BLOCKS` blocks are."""
BLOCKS, BLOCK = 256, 8


def wrong_in_files(opened: Sidecar, progress: Progress | None) -> Iterator[FormatError]:
    """Yield how a sidecar differs from what the format's own library finds in the files."""
    content, paths = opened.content, [opened.root(i) for i in range(len(opened.content.files))]
    for number in range(len(paths)):
        yield from opened.proofs.bad_pieces(number)
    if not paths:
        return
    options = OpenOptions.from_json(content.reading)
    hint = without(content.schema, options.keys_as)  # which no file has as values
    with Dataset(formats.load(content.format), paths, options, hint) as source:
        yield from _wrong_schema(opened, source)
        for number, path in enumerate(paths):
            if (count := source.count(number)) != content.files[number].samples:
                text = "it has another number of samples"
                facts = {"expected": count, "found": content.files[number].samples}
                yield FormatError(text, where=path, **facts)  # type: ignore[arg-type]
            elif count:
                first, truth = opened.first(number), source.layout(number)
                yield from wrong_extents(opened.layout(number), opened.schema, path, first, truth)
        yield from opened.bad_groups()
        if len(opened) == len(source) and not differences(opened.schema, source.schema):
            yield from _wrong_values(opened, source, progress)


def _wrong_schema(opened: Sidecar, source: Source) -> Iterator[FormatError]:
    """Yield how fields and attributes differ; attributes that only the sidecar keeps do not."""
    for line in differences(opened.schema, source.schema):
        text = f"its schema is not that of the sidecar: {line}"
        yield FormatError(text, where=opened.dataset)
    ours = {"": opened.schema.attrs, **{f.name: f.attrs for f in opened.schema}}
    theirs = {"": source.schema.attrs, **{f.name: f.attrs for f in source.schema}}
    for owner, attrs in theirs.items():
        known = ours.get(owner, {})
        for key, value in attrs.items():
            same = key in known and spec.encode_attr(value) == spec.encode_attr(known[key])
            if not same and not np.array_equal(value, known.get(key, ())):  # JSON has no int16
                text = f"its attribute {key} is not that of the sidecar"
                where = f"{opened.dataset}, field {owner}" if owner else opened.dataset
                yield FormatError(text, where=where, expected=value, found=known.get(key))


# --- values ----------------------------------------------------------------------------------


def _pieces(opened: Sidecar) -> Iterator[tuple[int, int]]:
    """Yield ranges of samples of about `PIECE` bytes, none across files."""
    per = max(1, opened.content.nbytes // max(1, len(opened)))
    step = max(1, min(1 << 16, PIECE // per))
    for number, count in enumerate(opened.content.counts.tolist()):
        begin = opened.first(number)
        for a in range(begin, begin + count, step):
            yield a, min(a + step, begin + count)


def _wrong_values(
    opened: Sidecar, source: Source, progress: Progress | None
) -> Iterator[FormatError]:
    """Yield the first samples that read differently; what cannot be read, or proven, raises."""
    n, begins = len(opened), None
    if n >= ALL_SAMPLES and opened.content.nbytes >= ALL_NBYTES:
        begins = np.unique(np.linspace(0, n - BLOCK, BLOCKS).astype(np.int64))
    for a, b in _pieces(opened):
        layout, compared = opened.layout(opened.file_of(a)[0]), [(a, b)]
        names = [name for name in opened.schema.names if name not in layout.unlocated]
        framed = layout.records is not None and layout.records.frame is not None
        if begins is not None:
            low, high = np.searchsorted(begins, [a - BLOCK + 1, b])
            some = begins[low:high].tolist()
            compared = [(max(begin, a), min(begin + BLOCK, b)) for begin in some]
            if framed:  # the checksum of every record is compared
                opened.read(slice(a, b), names, verify="full")
        for start, stop in compared if names else ():
            ours = opened.read(slice(start, stop), names, verify="full" if framed else None)
            theirs = source.read(start, stop)
            for name in names:
                one = Schema((opened.schema[name],))
                rows = differing_samples({name: ours[name]}, {name: theirs[name]}, one)
                if len(rows):
                    text = f"{len(rows):,} of samples {start:,} to {stop - 1:,} differ from the "
                    where = f"{opened.dataset}, sample {start + int(rows[0]):,}, field {name}"
                    yield FormatError(f"{text}library's", where=where)
                    return
        if progress is not None:
            progress(b, n)
