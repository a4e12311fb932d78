"""The sidecar: a small JSON file beside a dataset, from which others read what it holds.

Specification, version 1
------------------------
The sidecar of ``train.tfrecord`` is ``train.tfrecord.dsprep.json``; that of a directory ``train``
is ``train.dsprep.json``. It is written last, so a dataset with a valid sidecar is complete.

================== ============================================================================
``dsprep_sidecar`` the major version of this specification, 1; readers refuse a larger one
``format``         ``hdf5``, ``lmdb``, ``tfrecord`` or ``zarr``
``samples``        number of samples of the whole dataset
``schema``         list of fields: ``name`` and either ``kind`` (``bytes``, ``str``) or ``dtype``
                   and ``shape`` (null: the varying first axis); see `schema.encode_dtype`
``attrs``          attributes: ``""`` for the dataset, field names for the fields; see
                   `encode_attr`
``files``          in sample order: ``path`` (``.`` for a dataset of one file or store, otherwise
                   relative to the dataset's directory), ``samples``, ``nbytes``
``lineage``        what it was made from: ``source``, ``command``, ``version``, ``created``
================== ============================================================================

Unknown keys are kept when a sidecar is read and written again. Nothing in it is executed.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from dsprep.errors import FormatError
from dsprep.schema import Schema, decode_dtype, encode_dtype
from dsprep.storage import sync_directory, tree_nbytes

VERSION = 1
SUFFIX = ".dsprep.json"
MAX_NBYTES = 256 << 20
"""No sidecar is larger; a larger file is not read into memory."""


@dataclass(frozen=True)
class FileEntry:
    """One file (or store directory) of the dataset.

    Attributes
    ----------
    path
        Relative to the dataset; ``.`` for the dataset itself.
    samples
        Samples in it.
    nbytes
        Its size, by which a change is noticed.
    """

    path: str
    samples: int
    nbytes: int


@dataclass(frozen=True)
class Sidecar:
    """The content of a sidecar; the attributes are those of the specification above."""

    format: str
    schema: Schema
    files: tuple[FileEntry, ...]
    lineage: Mapping[str, Any] = field(default_factory=dict)
    unknown: Mapping[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Samples of the whole dataset."""
        return sum(f.samples for f in self.files)

    def to_json(self) -> dict[str, Any]:
        """Return the sidecar as JSON; `from_json` is the inverse."""
        attrs = {f.name: f.attrs for f in self.schema if f.attrs}
        if self.schema.attrs:
            attrs = {"": self.schema.attrs, **attrs}
        return {
            "dsprep_sidecar": VERSION,
            "format": self.format,
            "samples": self.samples,
            "schema": self.schema.to_json(),
            "attrs": {n: {k: encode_attr(v) for k, v in a.items()} for n, a in attrs.items()},
            "files": [
                {"path": f.path, "samples": f.samples, "nbytes": f.nbytes} for f in self.files
            ],
            "lineage": dict(self.lineage),
            **self.unknown,
        }

    @classmethod
    def from_json(cls, json: Mapping[str, Any], where: object) -> Self:
        """Return the sidecar that `to_json` wrote.

        Raises
        ------
        FormatError
            If it is of a later version, or does not follow the specification.
        """
        try:
            version = int(json["dsprep_sidecar"])
            if version > VERSION:
                raise FormatError(
                    "the sidecar is of a later version",
                    where=where,
                    expected=f"at most {VERSION}",
                    found=version,
                    fix="install a newer dsprep",
                )
            attrs = {
                str(n): {str(k): decode_attr(v) for k, v in a.items()}
                for n, a in json.get("attrs", {}).items()
            }
            schema = Schema.from_json(json["schema"])
            schema = Schema(
                tuple(replace(f, attrs=attrs.get(f.name, {})) for f in schema),
                attrs.get("", {}),
            )
            files = tuple(
                FileEntry(str(f["path"]), int(f["samples"]), int(f["nbytes"]))
                for f in json["files"]
            )
            known = {"dsprep_sidecar", "format", "samples", "schema", "attrs", "files", "lineage"}
            unknown = {k: v for k, v in json.items() if k not in known}
            return cls(str(json["format"]), schema, files, json.get("lineage", {}), unknown)
        except FormatError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(
                "the sidecar does not follow its specification",
                where=where,
                found=f"{type(error).__name__}: {error}",
                fix="delete it, or write it again",
            ) from error


def sidecar_path(dataset: Path) -> Path:
    """Return where the sidecar of `dataset` lies."""
    return dataset.with_name(dataset.name + SUFFIX)


def read(path: Path) -> Sidecar:
    """Read a sidecar.

    Raises
    ------
    FormatError
        If it is not one.
    """
    try:
        if path.stat().st_size > MAX_NBYTES:
            raise FormatError("the sidecar is too large", where=path)
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FormatError("the sidecar is not JSON", where=path, found=error) from error
    if not isinstance(content, dict):
        raise FormatError("the sidecar is not a JSON object", where=path)
    return Sidecar.from_json(content, path)


def write(sidecar: Sidecar, path: Path, *, durable: bool = True) -> None:
    """Write a sidecar under a temporary name and rename it, durably unless told otherwise."""
    write_json(sidecar.to_json(), path, durable=durable)


def write_json(content: Mapping[str, Any], path: Path, *, durable: bool = True) -> None:
    """Replace the file `path` by `content` as JSON, all or nothing."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(dump_json(content).encode())
        file.flush()
        if durable:
            os.fsync(file.fileno())
    temporary.replace(path)
    if durable:
        sync_directory(path.parent)


def dump_json(content: Any) -> str:
    """Return `content` as JSON to read; names that are no Unicode are escaped, as are all then."""
    text = json.dumps(content, indent=1, ensure_ascii=False, default=str) + "\n"
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(content, indent=1, default=str) + "\n"
    return text


def find(files: Sequence[Path]) -> tuple[Sidecar, Path] | None:
    """Return the sidecar that covers `files`, reduced to them, and the dataset; None without one.

    It lies beside the only file, or beside the directory that holds them all, and lists them.

    Raises
    ------
    FormatError
        If there is one and it cannot be read, or lists other files.
    """
    absolute = [f.absolute() for f in files]
    candidates = [absolute[0].parent] if len(files) > 1 else [absolute[0], absolute[0].parent]
    for dataset in candidates:
        where = sidecar_path(dataset)
        if not where.is_file():
            continue
        sidecar = read(where)
        entries = {dataset / e.path: e for e in sidecar.files}
        unknown = [f for f in absolute if f not in entries]
        if unknown:
            raise FormatError("it does not list this file", where=where, found=unknown[0].name)
        return replace(sidecar, files=tuple(entries[f] for f in absolute)), dataset
    return None


def changes(sidecar: Sidecar, dataset: Path) -> list[str]:
    """Return how the files differ from what the sidecar says, one clause each."""
    lines = []
    for entry in sidecar.files:
        path = dataset / entry.path
        if not path.exists():
            lines.append(f"{path.name} is missing")
        elif (found := tree_nbytes(path)) != entry.nbytes:
            lines.append(f"{path.name} has {found} bytes, expected {entry.nbytes}")
    return lines


def encode_attr(value: Any) -> Any:
    """Return an attribute as JSON; `decode_attr` is the inverse.

    Strings, booleans and integers stay as they are. Everything else becomes an object: bytes
    ``{"bytes": base64}``, strings in arrays ``{"strings": [...], "shape": [...]}``, numpy values
    (and floats) ``{"dtype": ..., "shape": [...], "data": base64 of the C-order bits}``.
    """
    if isinstance(value, str | bool | int) and not isinstance(value, np.generic):
        return value
    if isinstance(value, bytes) and not isinstance(value, np.generic):
        return {"bytes": base64.b64encode(value).decode()}
    array = np.asarray(value)
    if array.dtype.hasobject:
        flat = [v.decode() if isinstance(v, bytes) else str(v) for v in array.reshape(-1)]
        return {"strings": flat, "shape": list(array.shape)}
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": encode_dtype(array.dtype), "shape": list(array.shape), "data": data}


def decode_attr(json: Any) -> Any:
    """Return the attribute that `encode_attr` wrote."""
    if not isinstance(json, dict):
        return json
    if "bytes" in json:
        return base64.b64decode(json["bytes"])
    shape = tuple(int(n) for n in json["shape"])
    if "strings" in json:
        return np.array(json["strings"], object).reshape(shape)
    array = np.frombuffer(base64.b64decode(json["data"]), decode_dtype(json["dtype"]))
    return array.reshape(shape) if shape else array.reshape(())[()]


def make(
    format: str,
    schema: Schema,
    files: list[tuple[Path, int]],
    dataset: Path,
    lineage: Mapping[str, Any],
) -> Sidecar:
    """Return the sidecar of finished `files` (path and samples) of `dataset`."""
    entries = tuple(
        FileEntry(os.path.relpath(path, dataset), samples, tree_nbytes(path))
        for path, samples in files
    )
    return Sidecar(format, schema, entries, lineage)
