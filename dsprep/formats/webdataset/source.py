"""An archive opened for reading: every field of every sample is a range of its bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dsprep.core.closing import failure_closes
from dsprep.core.schema import Field
from dsprep.errors import FormatError, UnsupportedError, UsageError, require
from dsprep.formats.fields import ENCODED, wanted
from dsprep.formats.located import LocatedSource, Parsed
from dsprep.formats.npy_header import parse as parse_header
from dsprep.formats.options import OpenOptions
from dsprep.formats.webdataset.headers import Archive
from dsprep.formats.webdataset.samples import Extents, Samples, law_of
from dsprep.layout.laws import Affine
from dsprep.layout.model import Blocks, Column, FileLayout, Grid
from dsprep.storage.base import Handle
from dsprep.storage.paths import open_file

AT_ONCE = 4096
"""Headers of .npy files that are read at a time."""


def open_archive(path: Path, options: OpenOptions) -> LocatedSource:
    """Open an archive for reading; see `base.Format.open`."""
    file = open_file(path)
    with failure_closes(file.close):
        parsed = parse(file, options)
        return LocatedSource(path, parsed, replace(options, fields=()), file.opened, file.close)


def parse(file: Handle, options: OpenOptions) -> Parsed:
    """Return the parsed contents of an archive, of the fields requested.

    Raises
    ------
    FormatError, SchemaError, UnsupportedError, UsageError
        If it is damaged, if samples differ in their fields, or bytes do not fit their type.
    """
    samples, chosen = _located(file, options)
    count = samples.count
    extents = {f.name: _extents(samples, member, options) for member, f in chosen}
    typed = {spec.name for spec in options.fields if spec.dtype is not None}
    fields = {f.name: f for _, f in chosen}
    for member, f in chosen:
        if f.name in typed or f".{member}".endswith(".npy"):
            fields[f.name], extents[f.name] = _as_array(file, f, extents[f.name], f.name in typed)
    for name, field in fields.items():
        require(field.row_nbytes or not field.ragged, UsageError, f"{field} has rows without bytes")
        lengths = extents[name][1].span(0, count)
        field.check_nbytes(lengths, lambda i: f"{file.path}, sample {i}", ENCODED)
    columns = {name: _column(f, extents[name], file.nbytes) for name, f in fields.items()}
    return Parsed(
        version="WebDataset in a tar archive",
        fields=fields,
        layout=FileLayout(count, columns=columns),
        notes=tuple(samples.notes),
    )


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


def _as_array(file: Handle, field: Field, extent: Extents, is_typed: bool) -> tuple[Field, Extents]:
    """Return a field of .npy files of one dtype and shape, that of `field` if the user gave it."""
    # Anything else is returned as it is.
    offsets, lengths = (law.span(0, law.count) for law in extent)
    nbytes, begin = int(lengths[0]), int(offsets[0])
    try:
        header = parse_header(lambda n: file.pread(min(n, nbytes), begin), file.path)
    except (FormatError, UnsupportedError):
        return field, extent
    array = replace(field, dtype=header.dtype, shape=header.shape, kind="array")
    other = is_typed and array != field
    if other or header.columns or (lengths != header.begin + header.nbytes).any():
        return field, extent
    head = file.pread(header.begin, begin)
    for i in range(0, len(offsets), AT_ONCE):
        if set(file.pread_blocks(len(head), offsets[i : i + AT_ONCE].tolist())) != {head}:
            return field, extent
    return array, (law_of([offsets + header.begin]), Affine(len(offsets), header.nbytes))


def _column(field: Field, extent: Extents, nbytes: int) -> Column:
    """Return where a field is in an archive of `nbytes` bytes."""
    # A value of a fixed type is a chunk of its own; of others, the bytes of a sample are rows of an
    # array that is the whole archive.
    if field.ragged:
        grid = Grid(Blocks(Affine(1, 0), Affine(1, nbytes)), (nbytes,), 1, (nbytes,))
        return Column(grid, 1, *extent)
    if not field.row_nbytes:
        return Column(None)
    count, inner = extent[0].count, field.inner
    blocks = Blocks(extent[0], Affine(count, field.row_nbytes))
    return Column(Grid(blocks, (count, *inner), field.dtype.itemsize, (1, *inner)))
