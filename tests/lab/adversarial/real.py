"""Files that other projects wrote: read right, or refused with a way out that works.

Takes a directory; each file in it, and each directory that is an LMDB or a Zarr store, is
inspected, located, converted to another format and verified. What dsprep reads is compared with
what h5py, zarr, py-lmdb, tf.data, NumPy, netCDF4 or pyarrow read.
"""

from __future__ import annotations

import argparse
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import oracles

from dsprep.core.schema import Ragged
from dsprep.source.dataset import open_dataset
from lab.adversarial import judging
from lab.adversarial.judging import Ended, Tally

STORES = (".zgroup", ".zarray", "zarr.json", "data.mdb")
MOST = 200
"""Samples that are compared value by value."""

OPTION = re.compile(r"--(?:sample-axis|nulls|field|values|raw-records|skip-key|order|db|no-crc|to|follow-external)(?:[ =][^\s;:,()]+)?")  # fmt: skip # noqa: E501


def found(folder: Path) -> list[Path]:
    """Return the datasets below a folder."""
    paths = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not any((path / name).exists() for name in STORES):
            paths += found(path)
        elif path.is_dir() or ".dsprep" not in path.name:
            paths.append(path)
    return paths


def trials(numbers: Iterator[int], tally: Tally, folder: Path, options: argparse.Namespace) -> None:
    paths = found(options.files)
    for number in numbers:
        if number >= len(paths):
            break
        here = folder / "here"
        here.mkdir()
        origin = paths[number]
        path = here / origin.name
        (shutil.copytree if origin.is_dir() else shutil.copy2)(origin, path)
        name = str(origin.relative_to(options.files))
        what = trial(path, here, folder)
        kind = name.partition("/")[0]
        tally.judge(number, kind, f"{what}; {name}" if " | " in what else f"{what} | {name}")
        print(f"{number:4} {name}: {what}".replace(str(here), "."), flush=True)
        shutil.rmtree(here)


def trial(path: Path, here: Path, folder: Path) -> str:
    """Try one dataset; return what came out."""
    ended: dict[str, Ended] = {}
    target = here / "converted" / ("out.zarr" if h5py.is_hdf5(path) else "out.h5")
    target.parent.mkdir()
    for name, words in (
        ("inspect", ("inspect", path, "--head", 2)),
        ("convert", ("convert", path, target, "--no-sync")),
        ("verify", ("verify", path, target)),
        ("provenance", ("provenance", path)),
        ("check", ("provenance", path, "--check", "full")),
        ("verify again", ("verify", path, target)),
    ):
        if name.startswith("verify") and ended["convert"].code:
            continue
        if name == "check" and ended["provenance"].code:
            continue
        ended[name] = judging.forked(judging.command(*words), folder)
        wrong = judging.complaint(ended[name])
        if wrong is None and "\x1b" in ended[name].out + ended[name].err:
            wrong = "an escape reaches the terminal"
        if wrong:
            return f"!{name}: {wrong}"
    for name in ("verify", "check", "verify again"):
        if name in ended and ended[name].code:
            return f"!{name} fails | {judging.first_error(ended[name])}{ended[name].out[-300:]}"
    if ended["convert"].code:
        return refused(path, here, folder, judging.first_error(ended["convert"]))
    try:
        compared = compare(path)
    except Exception as error:
        return f"!not compared: the oracle fails | {type(error).__name__}: {error}"[:200]
    if compared.startswith("!"):
        return compared
    notes = [x for x in ended["convert"].err.splitlines() if "note:" in x]
    return f"read right | {compared}; {len(notes)} notes: {' '.join(notes)[:600]}"


def refused(path: Path, here: Path, folder: Path, line: str) -> str:
    """Try the options that a refusal names."""
    line = line.replace(str(here), ".").replace("dsprep: error: ", "")
    one = re.search(r"expected one of ([^\s,)]+)", line)
    named = line.replace("NAME", one[1]) if one else line
    words = [re.split("[ =]", o, maxsplit=1) for o in dict.fromkeys(OPTION.findall(named))]
    if not words:
        return f"refused | {line}"
    tried = [[w for o in words for w in o], *words]
    for more in tried:
        target = here / "advised.zarr"
        ended = judging.forked(judging.command("convert", path, target, *more), folder)
        wrong = judging.complaint(ended)
        if wrong:
            return f"!as advised ({' '.join(more)}): {wrong}"
        if ended.code == 0:
            return f"refused, {' '.join(w[0] for w in words)} works | {line}"
    return f"!refused, and the way out fails | {line} THEN {judging.first_error(ended)}"


def compare(path: Path) -> str:
    """Compare what dsprep reads with what the format's own library reads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with open_dataset(path) as source:
            most = min(MOST, len(source))
            batch, schema, count = source[:most], source.schema, len(source)
        if h5py.is_hdf5(path):
            with h5py.File(path) as file:
                return compare_arrays(file, batch, count)
        if path.is_dir() and (path / "data.mdb").exists():
            return compare_lmdb(path, batch, count)
        if path.is_dir() or path.suffix == ".zip":
            import zarr

            store: Any = zarr.storage.ZipStore(path, mode="r") if path.is_file() else str(path)
            return compare_arrays(zarr.open(store, mode="r"), batch, count)
        with path.open("rb") as file:
            head = file.read(6)
        if head == b"\x93NUMPY":
            return compare_arrays(np.load(path), batch, count)
        if head[:4] == b"PK\x03\x04":
            with np.load(path) as members:
                return compare_arrays(dict(members), batch, count)
        if head[:3] == b"CDF":
            return compare_netcdf(path, batch, count)
        if head[:4] == b"PAR1":
            return compare_parquet(path, batch, count)
        return compare_records(path, batch, count, len(schema))


def compare_arrays(root: Any, batch: dict, count: int) -> str:
    same = 0
    for name, column in batch.items():
        node = root[name] if hasattr(root, "keys") and name in root else None
        node = root if not hasattr(root, "keys") else node
        if node is None or not hasattr(node, "shape"):
            continue
        if (
            isinstance(column, Ragged) and node.shape and node.shape[0] != count
        ):  # rows of a sparse matrix
            parent, _, _ = name.rpartition("/")
            ends = root[f"{parent}/indptr"][: len(column) + 1]
            values = [node[a:b] for a, b in pairwise(ends)]
        elif not node.shape or node.shape[0] != count:
            if count != 1:
                return f"!{count} samples, but {name} has shape {node.shape}"
            values = [node[()]]
        else:
            values = node[: len(column)]
        for found, expected in zip(column, values, strict=True):
            if not alike(found, expected):
                return f"!other values | {name}: {found!r} {expected!r}"[:400]
        same += 1
    return f"{count} samples, {same} of {len(batch)} fields compared"


def alike(found: Any, expected: Any) -> bool:
    if isinstance(found, str | bytes):
        expected = expected.item() if isinstance(expected, np.generic) else expected
        as_bytes = [v if isinstance(v, bytes) else str(v).encode("utf-8", "surrogateescape")
                    for v in (found, expected)]  # fmt: skip
        return as_bytes[0].rstrip(b"\0") == as_bytes[1].rstrip(b"\0")
    a, b = np.asarray(found), np.asarray(expected)
    if a.dtype.names or b.dtype.names:
        return a.tobytes() == b.astype(a.dtype).tobytes() or str(a) == str(b)
    if a.dtype.kind == "S" or b.dtype.kind in "OSUT":
        return str(a.tolist()) == str(b.tolist()) or a.tobytes() == b.astype(a.dtype).tobytes()
    with suppress(TypeError):
        return a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    return bool(np.array_equal(a, b))


def compare_netcdf(path: Path, batch: dict, count: int) -> str:
    import netCDF4

    with netCDF4.Dataset(path) as file:
        file.set_auto_mask(False)
        file.set_auto_scale(False)
        return compare_arrays(dict(file.variables), batch, count)


def compare_parquet(path: Path, batch: dict, count: int) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.ParquetFile(path).read()
    if len(table) != count:
        return f"!{count} samples, pyarrow reads {len(table)}"
    while any(pa.types.is_struct(t) for t in table.schema.types):
        table = table.flatten()  # fields of structures by dotted names, as dsprep's
    same = 0
    for name, column in batch.items():
        if name not in table.column_names:
            continue
        values = table[name].slice(0, len(column)).combine_chunks()
        if isinstance(values.type, pa.BaseExtensionType):
            values = values.storage
        if pa.types.is_temporal(values.type):
            values = values.view(pa.int32() if values.type.bit_width == 32 else pa.int64())
            column = np.asarray(column).view(f"i{np.asarray(column).dtype.itemsize}")
        for found, expected in zip(column, values.to_pylist(), strict=True):
            if not same_as_python(found, expected):
                return f"!other values | {name}: {found!r} {expected!r}"[:400]
        same += 1
    return f"{count} samples, {same} of {len(batch)} fields compared"


def same_as_python(found: Any, expected: Any) -> bool:
    if isinstance(expected, str | bytes):
        return alike(found.tobytes() if isinstance(found, np.void) else found, expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same_as_python, found, expected))
    return bool(found == expected or (found != found and expected != expected))


def compare_lmdb(path: Path, batch: dict, count: int) -> str:
    import lmdb

    with lmdb.open(str(path), readonly=True, lock=False) as env, env.begin() as txn:
        values = [v for _, v in zip(range(MOST), txn.cursor().iternext(keys=False), strict=False)]
        entries = txn.stat()["entries"]
    if list(batch) == ["value"] and count == entries:
        if list(batch["value"]) != [bytes(v) for v in values]:
            return "!other values"
        return f"{count} samples, compared"
    return f"{count} samples of {entries} entries, fields {', '.join(batch)}"


def compare_records(path: Path, batch: dict, count: int, fields: int) -> str:
    tf = oracles.tensorflow()
    gzip = path.open("rb").read(2) == b"\x1f\x8b"
    records = list(tf.data.TFRecordDataset(str(path), "GZIP" if gzip else "").as_numpy_iterator())
    if len(records) != count:
        return f"!{count} samples, tf.data reads {len(records)}"
    if list(batch) == ["record"]:
        if list(batch["record"]) != records[:MOST]:
            return "!other records"
        return f"{count} opaque records, compared"
    same = 0
    for i, record in enumerate(records[:MOST]):
        features = tf.train.Example.FromString(record).features.feature
        for name, column in batch.items():
            if name not in features:
                return f"!a feature {name} that record {i} lacks"
            kind = features[name].WhichOneof("kind")
            value = list(getattr(features[name], kind).value) if kind else []
            found = column[i]
            if kind == "bytes_list" and isinstance(found, str | bytes):
                value = value[0] if len(value) == 1 else b"".join(value)
                good = alike(found, value)
            elif kind == "bytes_list":
                good = np.asarray(found).tobytes() == b"".join(value)
            else:
                good = np.ravel(np.asarray(found)).tolist() == value
            if not good and not (isinstance(column, Ragged) and not value and not len(found)):
                return f"!other values | record {i}, {name}: {found!r} {value!r}"[:400]
        same = max(same, len(batch))
    return f"{count} samples, {same} of {fields} fields compared"
