"""What a person wants to know of a field: how it is stored, and how to load it with h5py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsprep.core.schema import DType, Field, encode_dtype
from dsprep.formats.hdf5 import grids
from dsprep.formats.hdf5.columns import FieldColumn, Fixed, Indexed, PerGroup
from dsprep.formats.hdf5.dtypes import mislabelled
from dsprep.formats.hdf5.sequences import Sequences
from dsprep.layout.describe import Chunking, FieldStorage, of_array, show_nbytes

_SOME = 1024


def storage(column: FieldColumn, count: int) -> FieldStorage:
    """Return how the field of a column is stored, in a file of `count` samples."""
    if isinstance(column, Sequences):
        form = _chunking(column.dataset, "")
        access = "each sample is in a heap, found through a descriptor of its own: slow at random"
        words = form.words("descriptors")
        return FieldStorage(storage=words, codecs=form.codecs, access=access)
    if isinstance(column, PerGroup):
        form = _chunking(column.dataset, "")
        mean = show_nbytes(_mean_nbytes(column, count))
        return FieldStorage(
            storage=f"a dataset per sample, {form.words('rows')}",
            codecs=form.codecs,
            access=f"a dataset of {mean} in a group of its own is looked up and read",
        )
    assert isinstance(column, Fixed | Indexed)  # the other two of the four
    reader = column.rows.reader
    grid = None if reader is None else reader.column.grid
    form = _chunking(column.dataset, "the HDF5 library" if grid is None else "")
    form = replace(form, plain=grid is not None and grid.plain)
    nbytes: float = column.rows.row_nbytes
    if isinstance(column, Indexed):
        nbytes = _mean_nbytes(column, count)
    return of_array(
        form,
        nbytes / form.row_nbytes if form.row_nbytes else column.rows.lines,
        count,
        ragged=isinstance(column, Indexed),
        stored_nbytes=int(column.dataset.id.get_storage_size()),
        tables=column.route.names if isinstance(column, Indexed) else (),
    )


def _mean_nbytes(column: Indexed | PerGroup, count: int) -> float:
    """Return the bytes of a typical sample; in groups, not all rows belong to one."""
    if isinstance(column, Indexed) and not column.route.tables[-1].capacity:
        return column.rows.count * column.rows.row_nbytes / max(1, count)
    sizes = column.sizes(0, min(_SOME, column.count))
    return 0 if sizes is None or not len(sizes) else float(sizes.mean())


def _chunking(dataset: Any, library: str) -> Chunking:
    """Return the form of a dataset, as far as it is known without its chunks."""
    from h5py import h5d

    plist = dataset.id.get_create_plist()
    found, chunks, stored, labels = plist.get_layout(), None, "", []
    if found == h5d.CHUNKED:
        chunks = tuple(map(int, dataset.chunks))
        for i in range(plist.get_nfilters()):
            code, _, values, name = plist.get_filter(i)
            label = grids.filter_name(code, name)
            labels.append(f"{label}:{values[0]}" if code == 1 and values else label)
    elif found != h5d.CONTIGUOUS or plist.get_external_count():
        stored = {h5d.COMPACT: "compact", h5d.VIRTUAL: "virtual"}.get(found, "external")
    return Chunking(
        shape=tuple(map(int, dataset.shape)),
        itemsize=int(dataset.dtype.itemsize),
        chunk=chunks,
        codecs=tuple(labels),
        library=library,
        stored=stored,
    )


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
