"""A program that loads the first sample of a store with zarr-python alone."""

from __future__ import annotations

from pathlib import Path

from dsprep.core.schema import DType, Field, is_extension
from dsprep.formats.zarr.fields import Elements, Parts, Reading, Samples
from dsprep.formats.zarr.metadata import ArrayMeta


def program(path: Path, columns: list[tuple[Field, Reading]]) -> str:
    """Return the program; see `base.Source.loading_code`.

    Parameters
    ----------
    path
        The store.
    columns
        Each field, and the arrays that hold it.
    """
    lines: list[str] = []
    for field, reading in columns:
        lines += ["", *_load(field, reading)]
        lines.append(f"print({field.name!r}, {_shown(field)})")
    body = "\n".join(lines)
    imports = ["ml_dtypes"] if "ml_dtypes." in body else []
    imports += ["numpy as np"] if "np." in body else []
    head = [f"import {name}" for name in (*imports, "zarr")]
    opened = (
        f"zarr.storage.ZipStore({str(path)!r}, mode='r')" if path.is_file() else repr(str(path))
    )
    return "\n".join([*head, "", f"store = zarr.open({opened}, mode='r')", body.lstrip("\n"), ""])


def _shown(field: Field) -> str:
    return "type(x).__name__, len(x)" if field.kind != "array" else "x.dtype, x.shape"


def _array(meta: ArrayMeta) -> str:
    return f"store[{meta.path!r}]" if meta.path else "store"


def _load(field: Field, reading: Reading) -> list[str]:
    """Return the lines that leave sample 0 of a field in ``x``."""
    array = _array(reading.arrays[0].meta)
    if isinstance(reading, Elements):
        return [f"x = {array}[0:1][0]"]
    if isinstance(reading, Parts):
        first, count = (_array(a.meta) for a in reading.arrays[1:])
        lines = [
            f"first, count = int({first}[0]), int({count}[0])",
            f"x = {array}[first : first + count]",
            *_viewed(field, reading, "(-1, " + "".join(f"{n}, " for n in field.inner) + ")"),
        ]
        if field.kind == "array":
            return lines
        return [
            *lines,
            "x = x.tobytes()"
            + (".decode('utf-8', 'surrogateescape')" if field.kind == "str" else ""),
        ]
    rows = "0:1" if isinstance(reading, Samples) else "..."
    end = ["x = x[0]"] if isinstance(reading, Samples) else []
    shape = ("(1, " if end else "(") + "".join(f"{n}, " for n in field.inner) + ")"
    return [f"x = {array}[{rows}]", *_viewed(field, reading, shape), *end]


def _viewed(field: Field, reading: Reading, shape: str) -> list[str]:
    """Return the line that undoes `carriers`, if one is needed."""
    meta = reading.arrays[0].meta
    if field.dtype == meta.dtype:
        return []
    stored = f"np.asarray(x, {meta.dtype.str!r})"
    if 0 in field.inner:
        return [f"x = np.empty({shape.replace('-1', '0')}, {dtype_code(field.dtype)})"]
    return [f"x = {stored}.reshape(-1).view({dtype_code(field.dtype)}).reshape({shape})"]


def dtype_code(dtype: DType) -> str:
    """Return `dtype` as a Python expression."""
    if dtype.names is not None and dtype.fields is not None:
        inside = ", ".join(dtype_code(dtype.fields[n][0]) for n in dtype.names)
        return (
            f"np.dtype({{'names': {list(dtype.names)!r}, 'formats': [{inside}], "
            f"'offsets': {[int(dtype.fields[n][1]) for n in dtype.names]!r}, "
            f"'itemsize': {dtype.itemsize}}})"
        )
    if dtype.subdtype is not None:
        return f"np.dtype(({dtype_code(dtype.subdtype[0])}, {dtype.subdtype[1]!r}))"
    return (
        f"np.dtype(ml_dtypes.{dtype.name})" if is_extension(dtype) else f"np.dtype({dtype.str!r})"
    )
