"""How an HDF5 file can hold a field: each way gives columns of samples.

`Fixed`: one row of a dataset per sample. `Member`: a member of a compound type. `Indexed`: the rows
that index tables give. `Sequences`: HDF5's own variable-length types. `PerGroup`: a dataset per
sample. `Given`: what is not in datasets, such as attributes of the samples' groups.

A dataset of sequences holds one descriptor per element: the number of items as a little-endian
32-bit integer, the address of a heap, and the number of an object in it (the global heap ID of
the HDF5 File Format Specification, after the length). The descriptors are read like the rows of
any dataset, and the values from the heaps.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from typing_extensions import override

from dsprep.core.schema import Arena, Array, Attrs, DType, Field, Ints, Ragged, new_array
from dsprep.core.schema import Column as Values
from dsprep.errors import FormatError
from dsprep.formats.hdf5.datasets import StoredType
from dsprep.formats.hdf5.guard import hdf5_errors, need_filters
from dsprep.formats.hdf5.heaps import Heaps
from dsprep.formats.hdf5.locate import (
    Outside,
    Unlocated,
    chunk_table,
    filters_of,
    grid_of,
    locate_grid,
)
from dsprep.formats.hdf5.rows import Rows
from dsprep.formats.index_tables import Route, locate
from dsprep.layout import model as layout
from dsprep.layout.laws import LARGEST, Affine, Explicit
from dsprep.layout.model import Blocks, Column, Grid
from dsprep.layout.words import Words
from dsprep.reading.columns import ColumnReader, PendingRead, fetch
from dsprep.storage.base import Handle

_STEP = 1 << 20

Progress: TypeAlias = Callable[[int], None]


class FieldColumn(ABC):
    """A field as the file holds it.

    Attributes
    ----------
    dataset
        The `h5py.Dataset` with the values; that of the first sample where each has its own.
    field
        What the samples are, by the name that they have in the file.
    count
        The number of samples.
    """

    dataset: Any
    field: Field
    count: int

    @property
    def steps(self) -> int:
        """The steps of `locate`."""
        return 0

    @property
    def base(self) -> FieldColumn:
        """The column that is read for this field, which other fields may be parts of too."""
        return self

    def pick(self, values: Values) -> Values:
        """Return this field of what was read of `base`."""
        return values

    @abstractmethod
    def begin(self, start: int, stop: int, arena: Arena | None, key: str) -> PendingRead:
        """Return what samples ``start <= i < stop`` need from the file.

        Where only reading gives their sizes, or only the library reads them, they are read now.
        """

    @abstractmethod
    def sizes(self, start: int, stop: int) -> Ints | None:
        """Return the bytes of each sample, or None where only reading them gives that."""

    @abstractmethod
    def locate(self, field: Field, where: str, progress: Progress) -> Column:
        """Return where all samples are, as the user asked for them: `field`.

        Parameters
        ----------
        where
            File and field, for messages.
        progress
            Called now and then with the number of steps since the last time, `steps` in all.

        Raises
        ------
        Unlocated
            If only the library finds them.
        FormatError
            If the file is damaged.
        """

    @abstractmethod
    def datasets(self) -> Sequence[Rows | Sequences]:
        """Return the datasets that reading keeps parts of in memory; fields may share them."""


class Fixed(FieldColumn):
    """A field whose samples are the rows of a dataset."""

    def __init__(self, rows: Rows, name: str, attrs: Attrs) -> None:
        self.rows, self.dataset, self.count = rows, rows.dataset, rows.count
        self.field = Field(name, rows.dtype, rows.inner, attrs=attrs)

    @property
    def steps(self) -> int:
        """See `FieldColumn`."""
        return _chunks(self.dataset)

    @override
    def begin(self, start: int, stop: int, arena: Arena | None, key: str) -> PendingRead:
        first, count = np.array([start], np.int64), np.array([stop - start], np.int64)
        return self.rows.begin(first, count, arena, key)

    @override
    def sizes(self, start: int, stop: int) -> Ints | None:
        return np.full(stop - start, self.rows.row_nbytes, np.int64)

    @override
    def locate(self, field: Field, where: str, progress: Progress) -> Column:
        grid = self.rows.grid(progress)
        if grid is None or not field.row_nbytes:
            return Column(None)
        return _fitting(Column(grid, grid.shape[0] if self.rows.whole else 1), self.count, field)

    def datasets(self) -> list[Rows]:
        """Return the dataset."""
        return [self.rows]


class Member(FieldColumn):
    """A field that is a member of the rows of a dataset of a compound type.

    Parameters
    ----------
    rows
        All members, as `Fixed` reads them.
    names
        The member, and of nested types the members in it.
    """

    def __init__(self, rows: Fixed, names: tuple[str, ...], name: str, attrs: Attrs) -> None:
        self._rows, self.names = rows, names
        self.dataset, self.count = rows.dataset, rows.count
        self.at, dtype = member(rows.rows.dtype, names)
        base, inner = dtype.subdtype or (dtype, ())
        self.field = Field(name, base, (*rows.rows.inner, *inner), attrs=attrs)

    @property
    def base(self) -> Fixed:
        """See `FieldColumn`."""
        return self._rows

    @override
    def pick(self, values: Values) -> Values:
        picked: Any = values
        for name in self.names:
            picked = picked[name]
        chosen: Array = picked
        return chosen

    @override
    def begin(self, start: int, stop: int, arena: Arena | None, key: str) -> PendingRead:
        pending = self._rows.begin(start, stop, arena, key)
        return replace(pending, done=lambda buffer: self.pick(pending.done(buffer)))

    @override
    def sizes(self, start: int, stop: int) -> Ints | None:
        return np.full(stop - start, self.field.row_nbytes, np.int64)

    def locate(self, field: Field, where: str, progress: Progress) -> Column:
        """Raise `Unlocated`: see `records`."""
        raise Unlocated("members of one table only have offsets; dsprep convert makes them columns")

    def as_stored(self) -> bool:
        """Whether the file has the bytes that the library gives."""
        from h5py import h5t

        type_id = self.dataset.id.get_type()
        for name in self.names:
            type_id = type_id.get_member_type(type_id.get_member_index(name.encode()))
        dtype = member(self._rows.rows.dtype, self.names)[1]
        if type_id.get_class() == h5t.BITFIELD:
            return dtype.kind == "u" and type_id.get_order() == h5t.ORDER_LE
        return bool(type_id == h5t.py_create(dtype, logical=True))

    def records(self) -> Blocks:
        """Return where the rows are that have this member, one block each.

        Raises
        ------
        Unlocated
            If they are compressed, or only the library finds them.
        """
        rows = self._rows.rows
        grid = rows.stored()
        if rows.whole or len(rows.stored_type.shape) != 1 or grid is None or not grid.plain:
            raise Unlocated(
                "its rows are encoded with other members; dsprep convert makes them columns"
            )
        starts = grid.blocks.offsets.span(0, grid.blocks.count)
        if int(starts.min()) < 0 or grid.row_nbytes != rows.row_nbytes:
            raise Unlocated("some of its rows are not stored")
        number = np.arange(self.count, dtype=np.int64)
        block, inside = np.divmod(number, grid.chunk[0])
        offsets = starts[block] + inside * grid.row_nbytes
        return Blocks(Explicit(offsets), Affine(self.count, grid.row_nbytes))

    def datasets(self) -> Sequence[Rows | Sequences]:
        """Return the dataset."""
        return self._rows.datasets()


def member(dtype: DType, names: Sequence[str]) -> tuple[int, DType]:
    """Return where a member of a compound dtype begins, in bytes, and what it is.

    Raises
    ------
    LookupError
        If there is no such member.
    """
    at = 0
    for name in names:
        if dtype.fields is None:
            raise LookupError(name)
        dtype, offset = dtype.fields[name][:2]
        at += offset
    return at, dtype


class Given(FieldColumn):
    """A field whose values are in memory, found when the file was opened.

    Parameters
    ----------
    values
        Of all samples.
    field
        What they are.
    dataset
        An h5py object that has the first of them.
    location
        Where they are, for messages: ``"attributes of the groups"``.
    """

    def __init__(self, values: Values, field: Field, dataset: Any, location: str) -> None:
        self._values, self.field, self.dataset, self.location = values, field, dataset, location
        self.count = len(values)

    @override
    def begin(self, start: int, stop: int, arena: Arena | None, key: str) -> PendingRead:
        values = self._values[start:stop]
        return PendingRead(0, [], lambda _: values)

    @override
    def sizes(self, start: int, stop: int) -> Ints | None:
        if isinstance(self._values, Ragged):
            sizes: Ints = self._values.lengths[start:stop] * self.field.row_nbytes
            return sizes
        return np.full(stop - start, self.field.row_nbytes, np.int64)

    def locate(self, field: Field, where: str, progress: Progress) -> Column:
        """Raise `Unlocated`: see `given`."""
        raise Unlocated(f"it is in {self.location}; dsprep convert makes it addressable")

    def given(self) -> layout.Given:
        """Return the values as a layout keeps them; `Unlocated` if it cannot."""
        number = Affine(self.count, 0, 1)
        if not isinstance(self._values, Ragged):
            small = self._values.dtype.str == "<i8" and self._values.ndim == 1
            if small and -LARGEST < int(self._values.min()) <= int(self._values.max()) < LARGEST:
                return layout.Given(Explicit(self._values))
            return layout.Given(number, self._values)
        texts = [self._values[i].encode("utf-8", "surrogateescape") for i in range(self.count)]
        try:
            return layout.Given(number, Words.of(texts))
        except ValueError as error:
            raise Unlocated(f"{error}; dsprep convert makes it addressable") from error

    def datasets(self) -> Sequence[Rows | Sequences]:
        """Return nothing."""
        return []


class Indexed(FieldColumn):
    """A ragged field whose rows are found through index tables."""

    def __init__(self, rows: Rows, route: Route, name: str, attrs: Attrs) -> None:
        self.rows, self.route = rows, route
        self.dataset, self.count = rows.dataset, route.tables[0].rows
        self.field = Field(name, rows.dtype, (None, *rows.inner), attrs=attrs)
        if route.kind != "array":
            self.field = Field.opaque(name, route.kind, attrs)

    @property
    def steps(self) -> int:
        """See `FieldColumn`."""
        return _chunks(self.dataset) + self.count

    @override
    def begin(self, start: int, stop: int, arena: Arena | None, key: str) -> PendingRead:
        located = locate(self.route.tables, self.rows.count, start, stop)
        pending = self.rows.begin(located.lows, located.highs - located.lows, arena, key)

        def done(buffer: Array) -> Ragged:
            values = pending.done(buffer)
            if self.route.rebase is not None:
                first = values[self.route.rebase] if self.route.rebase else values
                _rebase(first, located.offsets)
            return Ragged(values, located.offsets, self.route.kind)

        return replace(pending, done=done)

    def sizes(self, start: int, stop: int) -> Ints | None:
        """Return the bytes of each sample, from the tables alone."""
        offsets = locate(self.route.tables, self.rows.count, start, stop).offsets
        sizes: Ints = np.diff(offsets) * self.rows.row_nbytes
        return sizes

    @override
    def locate(self, field: Field, where: str, progress: Progress) -> Column:
        if self.route.rebase is not None:
            raise Unlocated(
                "it counts rows of another dataset, and is made to begin at 0 in each sample"
            )
        grid, unit = self.rows.grid(progress), field.row_nbytes
        first, number = self._rows_of_samples(progress)
        if self.route.kind == "bytes" and field.kind == "array" and unit:
            return self._retyped(field, grid, first, number, where)
        if not field.ragged and not unit:
            return Column(None)
        column = Column(grid if unit else None, 1, Explicit(first), _law(number))
        return _fitting(column, self.count, field)

    def datasets(self) -> list[Rows]:
        """Return the values and the tables."""
        tables = (rows for t in self.route.tables for rows in (t.first, t.count))
        return [self.rows, *(rows for rows in tables if isinstance(rows, Rows))]

    def _rows_of_samples(self, progress: Progress) -> tuple[Ints, Ints]:
        """Return the first row of every sample, and how many it has."""
        end = 0
        first, number = np.empty(self.count, np.int64), np.empty(self.count, np.int64)
        for start in range(0, self.count, _STEP):
            stop = min(start + _STEP, self.count)
            located = locate(self.route.tables, self.rows.count, start, stop)
            number[start:stop] = np.diff(located.offsets)
            if located.offsets[-1]:
                first[start:stop] = located.first
                end = int(located.highs[-1])
            else:
                first[start:stop] = end  # samples without rows: where those before them end
            progress(stop - start)
        return first, number

    def _retyped(
        self, field: Field, grid: Grid | None, first: Ints, number: Ints, where: str
    ) -> Column:
        """Return where the samples are of a field of bytes that the user gave another type."""
        unit = field.row_nbytes
        bad = number % unit != 0 if field.ragged else number != unit
        if bool(bad.any()):
            i = int(bad.argmax())
            raise FormatError(
                f"the bytes do not fit {field}",
                where=f"{where}, sample {i}",
                expected=f"a multiple of {unit} bytes" if field.ragged else f"{unit} bytes",
                found=f"{int(number[i])} bytes",
            )
        if not field.ragged:
            if grid is None:
                return Column(None)
            if not np.array_equal(first, np.arange(len(first), dtype=np.int64) * unit):
                raise Unlocated("its bytes are not an array of the type that it was given")
            return _fitting(Column(grid, unit), self.count, field)
        if grid is not None:
            cut = grid.chunk[0] % unit and grid.chunk != grid.shape
            if cut or grid.shape[0] % unit or bool((first % unit).any()):
                raise Unlocated("its bytes are cut inside elements of the type that it was given")
            shape, chunk = (grid.shape[0] // unit,), (grid.chunk[0] // unit,)
            fill = None if grid.fill is None else grid.fill * unit
            grid = replace(grid, shape=shape, chunk=chunk, itemsize=unit, fill=fill)
        return Column(grid, 1, Explicit(first // unit), _law(number // unit))


def _chunks(dataset: Any) -> int:
    return math.prod(grid_of(dataset)) if dataset.chunks and dataset.size else 0


def _rebase(first: Array, offsets: Ints) -> None:
    """Make first rows count from the sample's own first row, in place."""
    lengths = np.diff(offsets)
    starts = first[offsets[:-1][lengths > 0]]
    first -= np.repeat(starts, lengths[lengths > 0])


def _fitting(column: Column, count: int, field: Field) -> Column:
    """Return the column if its rows are samples of the field."""
    grid = column.grid
    if grid is not None:
        per = grid.row_nbytes * (1 if field.ragged else column.lines)
        fixed = column.first is None
        if per != field.row_nbytes or (fixed and grid.shape[0] != count * column.lines):
            raise Unlocated("its rows are stored with another size than its samples have")
    return column


def _law(values: Ints) -> Affine | Explicit:
    if len(values) and bool((values == values[0]).all()):
        return Affine(len(values), int(values[0]))
    return Explicit(values)


class Sequences(FieldColumn):
    """A ragged field of one of HDF5's variable-length types.

    The dataset has one axis or, with `whole`, none, and is the only sample. `where` is the file and
    the field, for messages.
    """

    def __init__(
        self,
        dataset: Any,
        stored_type: StoredType,
        file: Handle,
        heaps: Heaps,
        where: str,
        attrs: Attrs,
        *,
        whole: bool = False,
    ) -> None:
        self.dataset, self.stored_type, self.whole, self._where = dataset, stored_type, whole, where
        self.count = 1 if whole else stored_type.shape[0]
        name, self._dtype = str(dataset.name).strip("/"), stored_type.carrier.dtype
        self.field = Field(name, self._dtype, (None,), stored_type.kind, attrs)
        self._file, self._heaps = file, heaps
        self._reader: ColumnReader | _Foreign | None = None
        self._width = 0
        self._lock = threading.Lock()

    @override
    def begin(self, start: int, stop: int, arena: Arena | None, key: str) -> PendingRead:
        # What only the library could find is refused, as is damage.
        from h5py import h5t

        where = f"{self._where}, samples {start} to {stop - 1}"
        with hdf5_errors(where, "the data cannot be read"):
            need_filters(self.dataset, self._where)
            rows = self._descriptors(start, stop)
            if rows is None:
                raise FormatError(
                    "only the HDF5 library could find these values of variable length, and it "
                    "follows damaged ones without end",
                    where=self._where,
                    expected="plain or chunked storage without a fill value of its own",
                    fix="write the dataset again, with h5repack or h5py",
                )
            element = self.dataset.id.get_type()
            if isinstance(element, h5t.TypeVlenID):
                items = element.get_super()
                values, nbytes = self._heaps.read(rows, items.get_size(), self._where)
                values, nbytes = _as_numpy(values, nbytes, items)
            else:
                values, nbytes = self._heaps.read(rows, 1, self._where)
        if self.stored_type.kind == "str":
            values, nbytes = _to_zeros(values, nbytes)
        lengths = nbytes // self._dtype.itemsize
        column = Ragged.from_lengths(values.view(self._dtype), lengths, self.stored_type.kind)
        return PendingRead(0, [], lambda _: column)

    @override
    def sizes(self, start: int, stop: int) -> Ints | None:
        rows = None if self.whole else self._descriptors(start, stop)
        if rows is None:
            return None
        items = np.ascontiguousarray(rows[:, :4]).view("<u4")[:, 0].astype(np.int64)
        # Where nothing was written, the address of the heap is 0, whatever the length says.
        items[~rows[:, 4:-4].any(axis=1)] = 0
        return items * self._dtype.itemsize

    def locate(self, field: Field, where: str, progress: Progress) -> Column:
        """Raise `Unlocated`."""
        raise Unlocated(
            "its values are in the global heap, each found through a descriptor; "
            "dsprep convert makes them addressable"
        )

    def datasets(self) -> Sequence[Rows | Sequences]:
        """Return the dataset of the descriptors."""
        return [] if self.whole else [self]

    @property
    def resident(self) -> int:
        """Bytes that reading holds besides its result."""
        reader = self._opened()
        return 0 if reader is None else reader.resident_nbytes()

    def _descriptors(self, start: int, stop: int) -> Array | None:
        """Return descriptors as stored: uint8, shape ``(stop - start, width)``."""
        reader = self._opened()
        # The rest of an unlimited dimension of netCDF, where nothing was written.
        written = stop if self.whole else int(self.dataset.shape[0])
        if stop > written:
            rest = np.zeros((stop - max(start, written), self._width), np.uint8)
            before = self._descriptors(start, written) if start < written else rest[:0]
            return None if before is None else np.concatenate([before, rest])
        if reader is None or isinstance(reader, _Foreign):
            return None if reader is None else reader.read(start, stop, self._where)
        first, count = np.array([start], np.int64), np.array([stop - start], np.int64)
        descriptors: Any = fetch({"": reader.begin_rows(first, count, None, "")}, None)[""]
        rows: Array = descriptors.reshape(-1, self._width)
        return rows

    def _opened(self) -> ColumnReader | _Foreign | None:
        """Return what reads the descriptors; None if only the library finds them."""
        with self._lock:
            if not self._width:
                with hdf5_errors(self._where, "the dataset cannot be located"):
                    width = 4 + int(self.dataset.file.id.get_create_plist().get_sizes()[0]) + 4
                    self._reader = self._open(width)
                    self._width = width
        return self._reader

    def _open(self, width: int) -> ColumnReader | _Foreign | None:
        plist = self.dataset.id.get_create_plist()
        if self.dataset.chunks and isinstance(filters_of(plist), str):
            return _Foreign.of(self.dataset, self._file, width)
        try:
            grid = locate_grid(self.dataset, self._file, self._where, raw=width)
        except (Unlocated, Outside):
            return None
        field = Field(self.field.name, np.dtype(np.uint8), (width,))
        return ColumnReader(Column(grid), field, self._file.opened)


def _to_zeros(values: Array, nbytes: Ints) -> tuple[Array, Ints]:
    """Return texts up to their first zero byte, as the library gives them, and their bytes."""
    zeros = np.flatnonzero(values == 0)
    if not len(zeros):
        return values, nbytes
    ends = np.cumsum(nbytes)
    begins = ends - nbytes
    first = np.append(zeros, len(values))[np.searchsorted(zeros, begins)]
    kept = np.minimum(first, ends) - begins
    inside = np.arange(len(values)) < np.repeat(begins + kept, nbytes)
    return values[inside], kept


class _Foreign:
    """Chunks of descriptors with filters that only the library knows.

    `table` is that of `chunk_table`, `block` the descriptors per chunk, `width` the bytes of
    each, and `plist` the dataset's ``h5py.h5p.PropDCID``.
    """

    def __init__(self, table: Array, file: Handle, block: int, width: int, plist: Any) -> None:
        self._table, self._file, self._plist = table, file, plist
        self._block, self._width = block, width
        self._last: tuple[int, Array | None] = (-1, None)

    @classmethod
    def of(cls, dataset: Any, file: Handle, width: int) -> _Foreign | None:
        """Return the chunks of an `h5py.Dataset`, or None if the library cannot list them."""
        from h5py import h5d

        plist = dataset.id.get_create_plist()
        table = chunk_table(dataset, file.nbytes)
        if table is None or (table["address"] > file.nbytes - table["nbytes"].astype("i8")).any():
            return None
        own_fill = plist.fill_value_defined() == h5d.FILL_VALUE_USER_DEFINED
        if own_fill and (table["address"] < 0).any():
            return None
        return cls(table, file, int(dataset.chunks[0]), width, plist)

    def resident_nbytes(self) -> int:
        """Return the bytes of a chunk, and of what it is made from."""
        return 2 * self._block * self._width

    def read(self, start: int, stop: int, where: object) -> Array:
        """Return descriptors ``start <= i < stop``, uint8 of shape ``(n, width)``."""
        out = np.zeros((stop - start, self._width), np.uint8)
        for b in range(start // self._block, -(-stop // self._block)):
            if self._table["address"][b] >= 0:
                number, rows = self._last
                if number != b or rows is None:
                    rows = self._decode(self._table[b], where)
                    self._last = (b, rows)
                first = b * self._block
                low, high = max(start, first), min(stop, first + self._block)
                out[low - start : high - start] = rows[low - first : high - first]
        return out

    def _decode(self, entry: Any, where: object) -> Array:
        """Return a chunk's descriptors, which the library decodes as bytes without a meaning."""
        import h5py
        from h5py import h5d, h5p, h5s, h5t

        address = int(entry["address"])
        here = f"{where}, offset {address}"
        data = self._file.pread_exact(int(entry["nbytes"]), address)
        rows = np.empty((self._block, self._width), np.uint8)
        with (
            hdf5_errors(here, "the chunk cannot be decoded"),
            h5py.File("chunk", "w", driver="core", backing_store=False) as file,
        ):
            plist = h5p.create(h5p.DATASET_CREATE)
            plist.set_chunk((self._block,))
            for i in range(self._plist.get_nfilters()):
                code, flags, values, _ = self._plist.get_filter(i)
                # Without a size, as on types of variable length, the library leaves it out.
                left_out = code == h5py.h5z.FILTER_SHUFFLE and not values
                if not (left_out or int(entry["mask"]) >> i & 1):
                    plist.set_filter(code, flags, values)
            kind = h5t.create(h5t.OPAQUE, self._width)
            space = h5s.create_simple((self._block,))
            dataset = h5d.create(file.id, b"x", kind, space, plist)
            dataset.write_direct_chunk((0,), data, 0)
            dataset.read(h5s.ALL, h5s.ALL, rows, kind)
        return rows


def _as_numpy(values: Array, nbytes: Ints, items: Any) -> tuple[Array, Ints]:
    """Return items of the HDF5 type `items` as numpy has them, and the bytes of each element."""
    from h5py import h5t

    target = h5t.py_create(items.dtype, logical=True)
    if items == target or items.get_class() == h5t.OPAQUE:
        return values, nbytes
    size, made = items.get_size(), target.get_size()
    count = len(values) // size
    buffer = np.zeros(count * max(size, made), np.uint8)
    buffer[: len(values)] = values
    h5t.convert(items, target, count, buffer)
    return buffer[: count * made], nbytes // size * made


class PerGroup(FieldColumn):
    """A field of which each sample is a dataset of its own, in a group of its own.

    Parameters
    ----------
    part
        Opens the dataset of a sample, as the only sample that it has.
    shapes
        Of all these datasets: int64 of shape ``(samples, axes)``.
    stored_type
        What the first one holds; the others differ in their first axis at most.
    """

    def __init__(
        self,
        part: Callable[[int], FieldColumn],
        shapes: Ints,
        stored_type: StoredType,
        name: str,
        attrs: Attrs,
    ) -> None:
        self._part, self._shapes, self.stored_type = part, shapes, stored_type
        self._first = part(0)
        self.dataset, self.count = self._first.dataset, len(shapes)
        self._differ = bool((shapes != shapes[0]).any())
        self.field = replace(self._first.field, name=name, attrs=attrs)
        if not stored_type.vlen and self._differ:
            self.field = replace(self.field, shape=(None, *stored_type.shape[1:]))

    @property
    def steps(self) -> int:
        """See `FieldColumn`."""
        return self.count

    @override
    def begin(self, start: int, stop: int, arena: Arena | None, key: str) -> PendingRead:
        # One dataset is read after another.
        def rows(i: int) -> Array:
            column = fetch({key: self._part(i).begin(0, 1, None, key)}, None)[key]
            values: Array = column.values if isinstance(column, Ragged) else column[0]
            return values

        values: Values
        if not self.field.ragged:
            values = new_array(arena, key, (stop - start, *self.field.inner), self.field.dtype)
            for i in range(start, stop):
                values[i - start] = rows(i)
        else:
            parts = [*map(rows, range(start, stop))]
            empty = np.empty((0, *self.field.inner), self.field.dtype)
            joined = np.concatenate([empty, *parts], dtype=self.field.dtype)
            lengths = np.array([len(p) for p in parts], np.int64)
            values = Ragged.from_lengths(joined, lengths, self.field.kind)
        return PendingRead(0, [], lambda _: values)

    @override
    def sizes(self, start: int, stop: int) -> Ints | None:
        if self.stored_type.vlen:
            return None
        rows = self._shapes[start:stop, 0] if self._differ else np.ones(stop - start, np.int64)
        return rows * self.field.row_nbytes

    def locate(self, field: Field, where: str, progress: Progress) -> Column:
        """Return where all samples are, if they are datasets of one chunk each, all alike.

        Those of several lengths are so if they are stored as they are; their rows are bytes.
        """
        if self.stored_type.vlen:
            raise Unlocated("its samples are in heaps; dsprep convert makes them addressable")
        if not field.row_nbytes:
            return Column(None)
        begins, sizes = np.zeros(self.count, np.int64), np.zeros(self.count, np.int64)
        first = self._grids(begins, sizes, progress)
        if first is None:
            return Column(None, 1, Explicit(begins), Explicit(sizes))
        if self._differ:
            end = int((begins + sizes).max())
            grid = Grid(Blocks(Affine(1, 0), Affine(1, end)), (end,), 1, (end,))
            return Column(grid, 1, Explicit(begins), Explicit(sizes))
        if math.prod(first.chunk) * first.itemsize != field.row_nbytes:
            raise Unlocated("its rows are stored with another size than its samples have")
        shape, chunk = (self.count, *self.stored_type.shape), (1, *self.stored_type.shape)
        blocks, itemsize = Blocks(Explicit(begins), _law(sizes)), field.dtype.itemsize
        return Column(replace(first, blocks=blocks, shape=shape, chunk=chunk, itemsize=itemsize))

    def _grids(self, begins: Ints, sizes: Ints, progress: Progress) -> Grid | None:
        """Note the offset and the bytes of each sample; return where the first with bytes is."""
        first: Grid | None = None
        for i in range(self.count):
            part = self._part(i)
            grid = part.rows.grid() if isinstance(part, Fixed) else None
            progress(1)
            if self._differ and not self._shapes[i].all():
                continue
            several = grid is None or grid.blocks.count != 1
            if grid is None or several or grid.masks is not None or grid.fill is not None:
                raise Unlocated("each of its samples is in a dataset of several chunks")
            first = first or grid
            begins[i], sizes[i] = grid.blocks.offsets.one(0), grid.blocks.lengths.one(0)
            if self._differ:
                if grid.filters or grid.chunk != grid.shape:
                    raise Unlocated(
                        "its samples differ in length and are encoded, each in a dataset of its "
                        "own; dsprep convert makes them addressable"
                    )
            elif (grid.filters, math.prod(grid.chunk)) != (first.filters, math.prod(first.chunk)):
                raise Unlocated("its samples are in datasets that are not stored alike")
        return first

    def datasets(self) -> Sequence[Rows | Sequences]:
        """Return those of the first sample."""
        return self._first.datasets()
