"""The program that ``dsprep inspect --code`` prints for an LMDB file: py-lmdb and numpy only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from dsprep.core.schema import Field, dtype_code, is_extension
from dsprep.formats.lmdb.datum import Datum
from dsprep.formats.lmdb.values import Values

_OPEN = """\
import lmdb
import numpy as np
{more}
env = lmdb.open({path!r}, subdir=False, readonly=True, lock=False, readahead=False, max_dbs=1)
database = env.open_db({database!r})
with env.begin(db=database) as txn:
"""

_DATUM = """\
def varint(at):
    number = shift = 0
    while True:
        number |= (value[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if value[at - 1] < 128:
            return number, at

# a Caffe Datum, a protobuf message: (field number << 3 | wire type), value, ...
parts, at = {6: b""}, 0
while at < len(value):
    tag, at = varint(at)
    if tag & 7 == 0:
        parts[tag >> 3], at = varint(at)
    else:
        size, at = varint(at) if tag & 7 == 2 else ({1: 8, 5: 4}[tag & 7], at)
        part, at = value[at:at + size], at + size
        parts[tag >> 3] = parts[6] + part if tag >> 3 == 6 else part
shape = [parts.get(number, 0) for number in (1, 2, 3)]
data = np.frombuffer(parts.get(4) or parts[6], np.uint8 if parts.get(4) else np.float32)
sample["data"] = data.reshape(shape) if data.size == np.prod(shape) else data
sample["label"] = np.array(parts.get(5, 0), np.uint64).astype(np.int32)
"""

_PRINT = """\
for name, data in sample.items():
    array = isinstance(data, np.ndarray)
    print(name, data.dtype if array else type(data).__name__, data.shape if array else len(data))
"""


def loading_code(
    file: Path,
    database: str | None,
    decoder: Values | Datum,
    key_field: str | None,
    key: bytes | None,
) -> str:
    """Return a program that loads the sample with this key and prints its fields."""
    if key is None:
        return f"# {file} has no samples\n"
    body = _DATUM if isinstance(decoder, Datum) else _decode(decoder)
    if key_field is not None:
        body += f"sample[{key_field!r}] = {key!r}\n"
    get = f"    value = txn.get({key!r})  # sample 0\nsample = {{}}\n"
    return _program(file, database, decoder.schema, get + body)


def family_loading_code(file: Path, database: str | None, keys: Mapping[str, bytes]) -> str:
    """Return a program that loads a sample of which each field has its own key."""
    gets = (f"{name!r}: txn.get({key!r})" for name, key in keys.items())
    return _program(file, database, (), f"    sample = {{{', '.join(gets)}}}  # sample 0\n")


def _program(file: Path, database: str | None, fields: Iterable[Field], body: str) -> str:
    more = "import ml_dtypes\n" if any(is_extension(f.dtype) for f in fields) else ""
    name = None if database is None else database.encode()
    return _OPEN.format(more=more, path=str(file), database=name) + body + _PRINT


def _decode(values: Values) -> str:
    """Return the lines that take the fields out of ``value``."""
    lines = []
    if values.table:
        lines.append(f"sizes = np.frombuffer(value, '<u8', {len(values.ragged)}).tolist()")
    at = values.table
    for f in values.fixed:
        count = math.prod(f.inner)
        read = (
            f"np.frombuffer(value, {dtype_code(f.dtype)}, {count}, {at})"
            if f.row_nbytes
            else (f"np.empty({count}, {dtype_code(f.dtype)})")
        )
        lines.append(f"sample[{f.name!r}] = {read}.reshape({f.inner!r})")
        at += f.row_nbytes
    if values.ragged:
        lines.append(f"at = {at}")
    for k, f in enumerate(values.ragged):
        stop = f"at + sizes[{k}]" if values.table else "len(value)"
        lines.append(_ragged(f, f"value[at:{stop}]"))
        if values.table:
            lines.append(f"at += sizes[{k}]")
    return "\n".join(lines) + "\n"


def _ragged(field: Field, part: str) -> str:
    """Return the line that takes a ragged field out of `part`, the code of its bytes."""
    if field.kind == "array":
        part = f"np.frombuffer({part}, {dtype_code(field.dtype)}).reshape({(-1, *field.inner)!r})"
    elif field.kind == "str":
        part += ".decode('utf-8', 'surrogateescape')"
    return f"sample[{field.name!r}] = {part}"
