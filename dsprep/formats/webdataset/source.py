"""An archive opened for reading: every field of every sample is a range of its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dsprep.core.schema import Field
from dsprep.errors import FormatError, UsageError
from dsprep.formats.fields import wanted
from dsprep.formats.located import LocatedSource, Parsed
from dsprep.formats.options import OpenOptions, check_options
from dsprep.formats.webdataset.headers import Archive
from dsprep.formats.webdataset.samples import Extents, Samples
from dsprep.layout.laws import Affine, Law
from dsprep.layout.model import Blocks, Column, FileLayout, Grid, Part, Records
from dsprep.storage.base import Handle
from dsprep.storage.paths import open_file


class WebDatasetSource(LocatedSource):
    """One archive.

    Parameters
    ----------
    path
        The archive.
    options
        Which fields are wanted, what their bytes mean, and whether the keys are.

    Raises
    ------
    FormatError, SchemaError, UnsupportedError, UsageError
        If it is damaged, if samples differ in their fields, or bytes do not fit their type.
    """

    def __init__(self, path: Path, options: OpenOptions) -> None:
        check_options(options, frozenset({"fields", "keys_as"}), "webdataset")
        self._file = open_file(path)
        try:
            samples, chosen = _located(self._file, options)
            self._members = {f.name: member for member, f in chosen}
            extents = {f.name: _extents(samples, member, options) for member, f in chosen}
            fields = {f.name: f for _, f in chosen}
            for name, field in fields.items():
                _check(field, extents[name].lengths, path)
            parsed = Parsed(
                version="WebDataset in a tar archive",
                fields=fields,
                layout=_layout(samples.count, self._file.nbytes, fields, extents),
                notes=tuple(samples.notes),
            )
            super().__init__(path, parsed, replace(options, fields=()), self._file.opened)
        except BaseException:
            self._file.close()
            raise
        self._keys = options.keys_as

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _located(file: Handle, options: OpenOptions) -> tuple[Samples, list[tuple[str, Field]]]:
    """Return the samples of an archive, and the fields that are wanted with their members."""
    keys = options.keys_as
    members = [spec.spelled for spec in options.fields if spec.path != keys]
    named = any(spec.path == keys for spec in options.fields)
    with_keys = keys is not None and (named or not options.fields)
    samples = Samples(Archive(file), members, with_keys, options.stop)
    if keys in samples.fields:
        raise UsageError(f"--keys-as {keys}: there is a field of this name", where=file.path)
    available = [*samples.fields] + ([keys] if keys is not None and samples.keys else [])
    return samples, wanted(options.fields, {name: Field.opaque(name) for name in available})


def _extents(samples: Samples, member: str, options: OpenOptions) -> Extents:
    if member == options.keys_as and samples.keys is not None:
        return samples.keys
    return samples.fields[member]


def _check(field: Field, lengths: Law, path: Path) -> None:
    """Raise unless the bytes of all samples are values of a field."""
    nbytes = field.row_nbytes
    if field.ragged and not nbytes:
        raise UsageError(f"field {field} has rows without bytes")
    constant = isinstance(lengths, Affine) and not lengths.stride
    law = lengths.span(0, 1 if constant else lengths.count)
    bad = law % nbytes != 0 if field.ragged else law != nbytes
    if bad.any():
        i = int(bad.argmax())
        raise FormatError(
            f"the bytes do not fit {field}",
            where=f"{path}, sample {i}",
            expected=f"a multiple of {nbytes} bytes" if field.ragged else f"{nbytes} bytes",
            found=f"{law[i]} bytes",
        )


def _layout(
    count: int, nbytes: int, fields: Mapping[str, Field], extents: Mapping[str, Extents]
) -> FileLayout:
    """Return where all fields are.

    Those of a fixed type at a constant distance from one another are parts of records; of all
    others, the bytes of a sample are rows of an array that is the whole file.
    """
    grid = Grid(Blocks(Affine(1, 0), Affine(1, nbytes)), (nbytes,), 1, (nbytes,))
    columns = {name: Column(grid, 1, *extent) for name, extent in extents.items()}
    fixed = [f for f in fields.values() if not f.ragged]
    for f in fixed:
        if not f.row_nbytes:
            columns[f.name] = Column(None)
    fixed = [f for f in fixed if f.row_nbytes]
    if not fixed:
        return FileLayout(count, None, columns)
    first = min(fixed, key=lambda f: extents[f.name].offsets.one(0))
    begin, parts = extents[first.name].offsets, dict[str, Part]()
    for f in fixed:
        at = _distance(begin, extents[f.name].offsets)
        if at is not None:
            parts[f.name] = Part(at, f.row_nbytes)
            del columns[f.name]
    length = max(fields[name].row_nbytes + (p.at or 0) for name, p in parts.items())
    records = Records(Blocks(begin, Affine(count, length)), parts)
    return FileLayout(count, records, columns)


def _distance(a: Law, b: Law) -> int | None:
    """Return by how much all numbers of `b` are larger than those of `a`; None if they differ."""
    if isinstance(a, Affine) and isinstance(b, Affine):
        return b.base - a.base if a.stride == b.stride else None
    lengths = b.span(0, b.count) - a.span(0, a.count)
    return int(lengths[0]) if bool((lengths == lengths[0]).all()) else None
