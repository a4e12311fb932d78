"""What a person wants to know of a field: how it is stored, and how to load it with h5py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsprep.core.schema import DType, Field, encode_dtype
from dsprep.formats.base import Layout
from dsprep.formats.hdf5 import grids
from dsprep.formats.hdf5.columns import FieldColumn, Fixed, Indexed, PerGroup
from dsprep.formats.hdf5.dtypes import mislabelled
from dsprep.formats.hdf5.sequences import Sequences

_SOME = 1024


def layout(column: FieldColumn, count: int) -> Layout:
    """Return how the field of a column is stored, in a file of `count` samples."""
    dataset = column.dataset
    storage, filters = _storage(dataset)
    stored = int(dataset.id.get_storage_size())
    if isinstance(column, PerGroup):
        mean = _mean_nbytes(column, count)
        access = f"a dataset of {_size(mean)} in a group of its own is looked up and read"
        return Layout(storage=f"a dataset per sample, {storage}", codecs=filters, access=access)
    if isinstance(column, Sequences):
        access = "each sample is in a heap, found through a descriptor of its own: slow at random"
        return Layout(storage=storage, codecs=filters, stored_nbytes=None, access=access)
    if isinstance(column, Indexed):
        names = " and ".join(column.route.names)
        storage += f", rows by {names}"
        tables = len(column.route.names)
        mean = _mean_nbytes(column, count)
        access, reads, nbytes = _access(column, dataset, mean, count)
        after = "a read of its index table" if tables == 1 else f"reads of {tables} index tables"
        access += f", after {after}"
    else:
        assert isinstance(column, Fixed)  # the last of the four
        access, reads, nbytes = _access(column, dataset, column.rows.row_nbytes, count)
    return Layout(
        storage=storage,
        codecs=filters,
        stored_nbytes=stored,
        access=access,
        reads=reads,
        read_nbytes=nbytes,
    )


def _mean_nbytes(column: Indexed | PerGroup, count: int) -> int:
    """Return the bytes of a typical sample; in groups, not all rows belong to one."""
    if isinstance(column, Indexed) and not column.route.tables[-1].capacity:
        return column.rows.count * column.rows.row_nbytes // max(1, count)
    sizes = column.sizes(0, min(_SOME, column.count))
    return 0 if sizes is None or not len(sizes) else int(sizes.mean())


def _storage(dataset: Any) -> tuple[str, tuple[str, ...]]:
    """Return the storage and the filters of a dataset."""
    from h5py import h5d

    plist = dataset.id.get_create_plist()
    found = plist.get_layout()
    if found == h5d.COMPACT:
        return "compact", ()
    if found == h5d.VIRTUAL:
        return "virtual", ()
    if found == h5d.CONTIGUOUS:
        return "external" if plist.get_external_count() else "contiguous", ()
    labels = []
    for i in range(plist.get_nfilters()):
        code, _, values, name = plist.get_filter(i)
        label = grids.filter_name(code, name)
        labels.append(f"{label}:{values[0]}" if code == 1 and values else label)
    return f"chunked ({', '.join(map(str, dataset.chunks))})", tuple(labels)


def _access(
    column: Fixed | Indexed, dataset: Any, wanted: int, count: int
) -> tuple[str, float, float]:
    """Return how a read of one of `count` samples, of `wanted` bytes, performs, and what it costs.

    The costs are the pieces that are read, and their bytes once decoded.
    """
    reader = column.rows.reader
    grid = None if reader is None else reader.column.grid
    if dataset.chunks is None or (grid is not None and grid.plain):
        by = "" if grid is not None else ", by the HDF5 library"
        return f"one read of {_size(wanted)}{by}", 1, wanted
    nbytes = math.prod(map(int, dataset.chunks)) * int(dataset.dtype.itemsize)
    rows = dataset.chunks[0]
    pieces = _chunks_of_sample(column, dataset, wanted)
    work = "is read by the HDF5 library" if grid is None else "is read"
    if dataset.id.get_create_plist().get_nfilters():
        work = "is read and decoded"
    if all(n <= c for n, c in zip(dataset.shape, dataset.chunks, strict=True)):
        only = f"the only chunk ({_size(nbytes)}) {work}"
        return only + (" for one sample" if count > 1 else ""), 1, nbytes
    factor = pieces * nbytes / max(1, wanted)
    times = f": {_times(factor)} the bytes that are wanted" if wanted and factor > 1.05 else ""
    unit = "rows" if isinstance(column, Indexed) else "samples"
    if pieces < 1.05:
        text = f"a chunk of {rows} {unit} ({_size(nbytes)}) {work} for one sample{times}"
    else:
        text = f"a sample is in {_number(pieces)} chunks of {_size(nbytes)}, each {work}{times}"
    return text, pieces, pieces * nbytes


def _chunks_of_sample(column: Fixed | Indexed, dataset: Any, wanted: int) -> float:
    """Return how many chunks the rows of a sample are in, on average."""
    across = 1
    for n, c in zip(dataset.shape[1:], dataset.chunks[1:], strict=True):
        across *= -(-int(n) // int(c))
    length, step = int(dataset.shape[0]), int(dataset.chunks[0])
    if isinstance(column, Fixed):
        return across * (-(-length // step) if column.rows.whole else 1)
    rows = wanted / max(1, column.rows.row_nbytes)
    return across * min(-(-length // step), (rows - 1) / step + 1 if rows > 1 else 1)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"about {value:.1f}"


def _times(factor: float) -> str:
    return f"{factor:,.0f}x" if factor >= 10 or factor == int(factor) else f"{factor:.1f}x"


def _size(nbytes: int) -> str:
    """Return bytes for a person to read, in units of 1000."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


# --- loading code ----------------------------------------------------------------------------


def program(path: Path, columns: Mapping[str, tuple[FieldColumn, Field]]) -> str:
    """Return a Python program that loads sample 0 of every field with h5py, and shows it."""
    readers = [column for column, _ in columns.values()]
    lines = ["import h5py"]
    plists = [c.dataset.id.get_create_plist() for c in readers]
    if any(p.get_filter(i)[0] >= 32001 for p in plists for i in range(p.get_nfilters())):
        lines.append("import hdf5plugin  # registers the filters")
    if any(isinstance(c, Fixed | Indexed) and c.rows.held.carrier.foreign for c in readers):
        lines.append("import ml_dtypes  # registers bfloat16 and its like with numpy")
    lines += ["import numpy as np", ""]
    if any(isinstance(c, Indexed) for c in readers):
        lines += _ROWS.splitlines()
    lines += [f'with h5py.File({str(path)!r}, "r") as f:', "    sample = {}"]
    routes: dict[str, str] = {}
    for name, (column, _) in columns.items():
        lines += [f"    {line}" for line in _load(name, column, routes)]
    lines += [
        "",
        "for name, value in sample.items():",
        "    value = np.asarray(value)",
        "    print(name, value.dtype, value.shape)",
    ]
    return "\n".join(lines) + "\n"


_ROWS = '''
def rows_of(f, sample, tables):
    """Follow index tables from a sample to its rows."""

    def column(path, member):
        rows = f[path][start:stop]
        if member is None:
            return rows
        return rows[:, member] if isinstance(member, int) else rows[member]

    start, stop = sample, sample + 1
    for first, count in tables:
        first, count = column(*first), column(*count)
        if not len(first):
            return slice(0, 0)
        start, stop = int(first[0]), int(first[-1]) + int(count[-1])
    return slice(start, stop)


'''


def _load(name: str, column: FieldColumn, routes: dict[str, str]) -> list[str]:
    """Return the lines that put one field into ``sample``.

    `routes` has the variables that hold rows by now: the arguments they were made of to the name.
    """
    dataset = column.dataset
    path = str(dataset.name).strip("/")
    target = f"sample[{name!r}]"
    if isinstance(column, PerGroup):
        return [f"{target} = f[{path!r}][()]"]
    if isinstance(column, Sequences):
        read = f"f[{path!r}][{'()' if column.whole else '0'}]"
        dtype = column.held.carrier.dtype
        if column.held.kind == "array" and mislabelled(dtype):
            read += f".view({_spell(dtype)})  # h5py takes the bytes for native ones"
        return [f"{target} = {read}"]
    assert isinstance(column, Fixed | Indexed)  # the others of the four
    carrier = column.rows.held.carrier
    if isinstance(column, Fixed):
        index = "()" if column.rows.whole else "0:1"
        lines = [f"{target} = f[{path!r}][{index}]"]
    else:
        tables = [
            (
                (str(t.first.dataset.name).strip("/"), t.first_member),
                (str(t.count.dataset.name).strip("/"), t.count_member),
            )
            for t in column.route.tables
        ]
        lines = []
        if (arguments := repr(tables)) not in routes:
            routes[arguments] = f"rows{len(routes)}"
            lines.append(f"{routes[arguments]} = rows_of(f, 0, {arguments})")
        lines.append(f"{target} = f[{path!r}][{routes[arguments]}]")
    if carrier.foreign:
        view = f"{target} = {target}.view({_spell(carrier.dtype)})"
        lines.append(f"{view}[..., 0]" if carrier.axis else view)
    if isinstance(column, Fixed) and not column.rows.whole:
        lines.append(f"{target} = {target}[0]")
    if isinstance(column, Indexed) and column.route.kind != "array":
        convert = ".tobytes()" + ('.decode("utf-8")' if column.route.kind == "str" else "")
        lines.append(f"{target} = {target}{convert}")
    return lines


def _spell(dtype: DType) -> str:
    """Return an expression for a dtype, for use with ``import ml_dtypes``."""
    text = encode_dtype(dtype)
    if isinstance(text, str):
        return f"np.dtype({text!r})"
    if "base" in text and dtype.subdtype is not None:
        return f"np.dtype(({_spell(dtype.subdtype[0])}, {dtype.subdtype[1]}))"
    members = [dtype.fields[n][0] for n in dtype.names or ()] if dtype.fields else []
    formats = ", ".join(_spell(m) for m in members)
    return (
        f"np.dtype({{'names': {text['names']!r}, 'formats': [{formats}], "
        f"'offsets': {text['offsets']!r}, 'itemsize': {text['itemsize']}}})"
    )
