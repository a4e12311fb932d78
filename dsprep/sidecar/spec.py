"""The sidecar: a small JSON file beside a dataset, from which every sample's offset is computed.

Specification, versions 1 and 2
-------------------------------
The sidecar of ``train.tfrecord`` is ``train.tfrecord.dsprep.json``; that of a directory ``train``
is ``train.dsprep.json``. It is written last, so a dataset with a valid sidecar is complete.
Numbers are JSON integers; offsets and sizes count bytes.

================== ============================================================================
``dsprep_sidecar`` the major version of this specification; readers refuse a larger one: 1, or 2
                   with 1,000 files or more, which are listed in the companion, see
                   `dsprep.sidecar.entries`
``format``         ``hdf5``, ``lmdb``, ``tfrecord``, ``zarr`` or one that is only read
``samples``        number of samples of the whole dataset
``schema``         list of fields: ``name`` and either ``kind`` (``bytes``, ``str``) or ``dtype``
                   and ``shape`` (null: the varying first axis); see `schema.encode_dtype`
``static``         arrays that belong to all samples: ``field`` and ``attrs`` of each, and
                   ``values`` of up to `SMALL` bytes
``attrs``          attributes: ``""`` for the dataset, field names for the fields; see
                   `encode_attr`
``files``          in sample order: ``path`` (``.`` for a dataset of one file or store, otherwise
                   relative to the dataset's directory), ``samples``, ``nbytes``; the rest of its
                   identity: ``mtime_ns``, ``files`` (data files in a directory, 1 if left out),
                   ``facts`` (what the format states about itself), ``sampled`` (digest of sampled
                   blocks), ``etag`` (of an object: its version, which every read names; of a
                   directory in a store: a digest of those); ``layout`` (which one of ``layouts``,
                   0 if left out); ``crc32c`` (optional: see below)
``layouts``        how the samples of a file are stored; files that are alike share one
``reading``        how samples are made from the file, where that is not the default: the
                   options of `OpenOptions`
``notes``          what was assumed or left out when the dataset was opened
``companion``      ``nbytes`` and ``blake2b`` of ``NAME.dsprep.bin``, where large tables are; left
                   out if there is none
``lineage``        what it was made from: ``source``, ``command``, ``version``, ``created``
================== ============================================================================

A **layout** gives the location of each field of the schema. ``n`` stands for the samples of the
file that has the layout.

``records``
    A block holds a sample. ``offsets`` and ``lengths``: laws; ``path``: the file in a directory;
    ``blocks``: how many, if not n; ``order``: a law, the block of each sample (sample i is block i
    if left out). ``parts``: field to ``[at, nbytes]``, its range in every block (``nbytes`` null:
    up to the end), or null if only the recipe finds it. ``recipe``: how a block is taken apart:
    ``{"name": "values"}`` (dsprep's encoding in LMDB), ``{"name": "datum"}`` (Caffe),
    ``{"name": "example"}`` (``tf.train.Example``) and parameters. ``frame``: what proves a block:
    ``{"name": "lmdb", "psize": 4096}`` (the header of an overflow page is before it) or
    ``{"name": "tfrecord"}`` (length and CRC before, the payload's CRC after).
``columns``
    A field is an array of its own, in chunks (the whole array is one, if it is contiguous).
    ``rows`` (n times ``lines`` if left out), ``inner`` (the other axes), ``itemsize``; ``chunk``
    (its shape, in elements; the whole if left out); ``path`` (in a directory: ``{0}`` stands for
    the file's number along axis 0), ``files`` (chunks per file along each axis); ``offsets``,
    ``lengths``: laws of the chunks, numbered file by file, each in C order; -1 is a chunk that is
    not stored and holds ``fill`` (an element, base64). ``filters``: what was done to a chunk, in
    that order, see `dsprep.core.filters`; ``masks``: a law, a bit for each filter left out.
    ``which`` instead of ``files``: a law, for each chunk the number that ``{0}`` stands for.
    ``lines``: rows per sample, 1 if left out; ragged fields: ``first`` and ``count``, laws, the
    rows of each sample.
``files``
    Fields of which every sample has a file of its own, whose bytes are the value. ``names``: their
    paths (strings, see below); ``lengths``: a law.
``given``
    Fields whose values are in the sidecar. ``which``: a law, the number of the value of each
    sample; ``words``: the values of a ``bytes`` or ``str`` field (strings); ``values``: ``count``
    and ``data``, a packed table of their bytes; with neither, numbers are the values (int64).
``unlocated``
    Fields that only the format's library can read: name to the reason.
``groups``
    Where samples are stored in groups of ``samples``, each in one range of bytes: ``offsets``,
    ``lengths`` and perhaps ``crc32c``: laws. If groups differ in their number of samples, also
    ``count``, how many groups there are, and ``first``, a law, the first sample of each. In a
    directory ``path``; if groups are in several files, ``{0}`` in it stands for the file's number,
    and ``files`` is the number of groups per file. ``rest``, where fields are outside these ranges:
    ``fields``, their names, and ``crc32c``, a law: of each group the CRC-32C of their stored
    ranges, field by field, those of a field in the order of files and offsets, each once.
``provenance``
    How the file was made, as far as its structure shows; for people.

A **law** is a number (the same for all), or an object, by ``law``: ``affine`` (``base``,
``stride``); ``runs`` (``runs``: how many; ``data``: varints of count, stride and jump of each);
``table`` (``data``: byte planes); ``follow`` (each begins where the one before ends: ``rest``,
``frame``, ``align``); ``periodic`` (``period``, ``of``); ``tree`` and ``replay`` (LMDB's own
order); see `dsprep.layout.laws`. ``data`` is a packed table: base64, or
``{"at", "nbytes", "blake2b"}`` in the companion; see `dsprep.core.packing`. **Strings** are
``count``, and ``data``: a packed table of all of them, each with a NUL after it.

``crc32c`` of a file: ``{"block": bytes, "data": table}``, the CRC-32C of each block of the file (of
the data files of a directory back to back, by path); the last block may be shorter.

Unknown keys are left out when it is written again. Nothing in it is executed, and every offset is
compared with the file before it is used.
"""

from __future__ import annotations

import base64
import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from dsprep.core.packing import digest
from dsprep.core.schema import Field, Ints, Schema, StaticArray, decode_dtype, encode_dtype
from dsprep.errors import FormatError
from dsprep.sidecar import entries
from dsprep.sidecar.entries import MANY, MAX_SAMPLES, FileColumns, FileEntry
from dsprep.storage.atomic import partial_path, write_file
from dsprep.storage.identity import Identity
from dsprep.storage.paths import all_absolute, common_path, open_file
from dsprep.storage.trees import SIDECARS

VERSION, OF_ROWS = 2, 1
"""The newest version that is read; the one of sidecars that list files row by row."""
NAMES = SIDECARS
SUFFIX, COMPANION = NAMES
MAX_COMPANION = 8 << 30
MAX_NBYTES = 256 << 20
"""No sidecar is larger; a larger file is not read into memory."""
MAX_FILES = 1 << 20
"""Files that a sidecar lists at most."""
_MAX_COUNTS = ((b'"path"', MAX_FILES), (b"{", 4 << 20), (b"[", 4 << 20), (b",", 12 << 20))
"""Limits on each text in a sidecar: parsed values take far more memory than their text."""


@dataclass(frozen=True)
class Content:
    """The content of a sidecar; the attributes are those of the specification above.

    `layouts` is their JSON: `dsprep.layout.as_json` reads it when it is needed.
    """

    format: str
    schema: Schema
    files: Sequence[FileEntry]
    lineage: Mapping[str, Any] = field(default_factory=dict)
    layouts: tuple[Mapping[str, Any], ...] = ()
    reading: Mapping[str, Any] = field(default_factory=dict)
    companion: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    @property
    def counts(self) -> Ints:
        """Samples of each file."""
        return entries.numbers(self.files, "samples")

    @property
    def samples(self) -> int:
        """Samples of the whole dataset."""
        return int(self.counts.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return int(entries.numbers(self.files, "nbytes").sum())

    def paths(self) -> list[str]:
        """Return the paths of all files, relative to the dataset."""
        if isinstance(self.files, FileColumns):
            return self.files.paths()
        return [f.path for f in self.files]

    @property
    def has_companion(self) -> bool:
        """True if some of it is in a companion, as far as it was read from a file."""
        return self.companion is not None or isinstance(self.files, FileColumns)

    def to_json(self, *, rows: bool = True) -> dict[str, Any]:
        """Return the sidecar as JSON, perhaps without `rows`; `from_json` is the inverse."""
        attrs = {f.name: f.attrs for f in self.schema if f.attrs}
        if self.schema.attrs:
            attrs = {"": self.schema.attrs, **attrs}
        json: dict[str, Any] = {
            "dsprep_sidecar": OF_ROWS,
            "format": self.format,
            "samples": self.samples,
            "schema": self.schema.to_json(),
        }
        if attrs:
            json["attrs"] = {n: {k: encode_attr(v) for k, v in a.items()} for n, a in attrs.items()}
        if self.schema.static:
            json["static"] = [_static_json(s) for s in self.schema.static]
        json["files"] = [f.to_json() for f in self.files] if rows else []
        if self.layouts:
            json["layouts"] = [dict(layout) for layout in self.layouts]
        if self.reading:
            json["reading"] = dict(self.reading)
        if self.notes:
            json["notes"] = list(self.notes)
        if self.companion is not None:
            json["companion"] = dict(self.companion)
        return {**json, "lineage": dict(self.lineage)}

    @classmethod
    def from_json(cls, json: Mapping[str, Any], where: object) -> Self:
        """Return the sidecar that `to_json` wrote.

        Raises
        ------
        FormatError
            If it is of a later version, or does not follow the specification.
        """
        try:
            version = json["dsprep_sidecar"]
            if not isinstance(version, int) or isinstance(version, bool) or version < 1:
                raise TypeError(f"{version!r} is not a version")
            if version > VERSION:
                raise FormatError(
                    "the sidecar is of a later version",
                    where=where,
                    expected=f"at most {VERSION}",
                    found=version,
                    fix="install a newer dsprep",
                )
            return cls._from_json(json)
        except _WRONG as error:
            raise error if isinstance(error, FormatError) else _unlike(error, where) from error

    @classmethod
    def _from_json(cls, json: Mapping[str, Any]) -> Self:
        attrs = {
            str(n): {str(k): decode_attr(v) for k, v in a.items()}
            for n, a in json.get("attrs", {}).items()
        }
        schema = Schema.from_json(json["schema"])
        schema = Schema(
            tuple(replace(f, attrs=attrs.get(f.name, {})) for f in schema),
            attrs.get("", {}),
            tuple(map(_static_array, json.get("static", ()))),
        )
        files: Sequence[FileEntry] = json["files"]
        if not isinstance(files, FileColumns):
            files = tuple(map(FileEntry.from_json, json["files"]))
        layouts = tuple(json.get("layouts", ()))
        for mapping in (*layouts, json.get("lineage", {}), json.get("reading", {})):
            if not isinstance(mapping, Mapping):
                raise TypeError(f"{str(mapping)[:40]!r} is not a JSON object")
        if not all(isinstance(layout.get("unlocated", {}), Mapping) for layout in layouts):
            raise TypeError("unlocated is not a JSON object")
        if sum(entries.numbers(files, "samples").tolist()) >= MAX_SAMPLES:
            raise ValueError("there are impossibly many samples")
        if layouts and int(entries.numbers(files, "layout").max(initial=0)) >= len(layouts):
            raise ValueError("a file has a layout that is not there")
        companion = json.get("companion")
        if companion is not None and not isinstance(companion, Mapping):
            raise TypeError("companion is not a JSON object")
        return cls(
            str(json["format"]),
            schema,
            files,
            json.get("lineage", {}),
            layouts,
            json.get("reading", {}),
            companion,
            tuple(map(str, json.get("notes", ()))),
        )


_WRONG = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


def _unlike(error: Exception, where: object) -> FormatError:
    return FormatError(
        "the sidecar does not follow its specification",
        where=where,
        found=f"{type(error).__name__}: {str(error)[:200]}",
        fix="delete it, or write it again with dsprep provenance",
    )


SMALL = 1 << 20
"""Bytes of a static array up to which a sidecar has its values."""


def _static_json(static: StaticArray) -> dict[str, Any]:
    """Return a static array as JSON."""
    attrs = {k: encode_attr(v) for k, v in static.field.attrs.items()}
    json = {"field": static.field.to_json(), "attrs": attrs}
    return {**json, "values": encode_attr(static.values)} if is_small(static) else json


def is_small(static: StaticArray) -> bool:
    """Return whether a sidecar has the values of a static array."""
    return static.values is not None and static.values.nbytes <= SMALL


def _static_array(json: Mapping[str, Any]) -> StaticArray:
    """Return the static array that `_static_json` wrote."""
    attrs = {str(k): decode_attr(v) for k, v in json["attrs"].items()}
    f = replace(Field.from_json(json["field"]), attrs=attrs)
    values = np.asarray(decode_attr(json["values"])) if "values" in json else None
    if values is not None and (values.dtype, values.shape) != (f.dtype, f.shape):
        raise TypeError(f"the values of {f} are of another type")
    return StaticArray(f, values)


def sidecar_path(dataset: Path) -> Path:
    """Return the path of the sidecar of `dataset`."""
    return dataset.with_name(dataset.name + SUFFIX)


def staged_path(dataset: Path) -> Path:
    """Return the path of the sidecar of `dataset` until the run that makes the dataset ends."""
    return partial_path(dataset) / sidecar_path(dataset).name


def beside(dataset: Path) -> Path:
    """Return the path of the sidecar of `dataset`, whether it exists or not.

    That is beside it; but if a run was killed after it had put a new dataset in place and before
    its sidecar, it is still in the directory in which the run worked.
    """
    where, staged = sidecar_path(dataset), staged_path(dataset)
    if not os.path.isfile(staged):  # noqa: PTH113 (or this user may not look)
        return where
    for is_same in (Identity.is_exact, lambda known, data: known.changed(data) is None):
        for path in (where, staged):
            with suppress(OSError, FormatError, IndexError):
                first = read(path).files[0]
                if is_same(first.identity, dataset / first.path):
                    return path
    return where


def read(path: Path) -> Content:
    """Read a sidecar; `FormatError` if it is not one."""
    json = read_json(path)
    if isinstance(columns := json.get("files"), Mapping):
        try:
            json["files"] = FileColumns.open(columns, path.with_name(companion_name(path)))
        except (FileNotFoundError, *_WRONG) as error:
            raise _unlike(error, path) from error
    return Content.from_json(json, path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a sidecar as JSON; `FormatError` if it is not one, or would take too much memory."""
    with closing(open_file(path)) as file:
        if file.nbytes > MAX_NBYTES:
            raise FormatError("the sidecar is too large", where=path)
        text = file.pread(file.nbytes, 0)
    for text_mark, max_count in _MAX_COUNTS:
        count = text.count(text_mark)
        if count > max_count:
            raise FormatError(
                f"the sidecar lists more than {MAX_FILES:,} files, or is damaged",
                where=path,
                expected=f"{text_mark.decode()} at most {max_count:,} times",
                found=f"{count:,} times",
                fix="put the samples into fewer files with dsprep repack",
            )
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError("the sidecar is not JSON", where=path, found=error) from error
    if not isinstance(content, dict):
        raise FormatError("the sidecar is not a JSON object", where=path)
    return content


def write(
    content: Content,
    path: Path,
    companion: bytes = b"",
    *,
    durable: bool = True,
    replace: bool = True,
) -> None:
    """Write a sidecar, and before it its companion, each under a temporary name first.

    Without `durable` it is not waited for the disk. Without `replace` a file that is there is left,
    which is a `FileExistsError`.
    """
    text, companion = encode(content, companion)
    if companion:
        write_file(path.with_name(companion_name(path)), companion, durable, replace)
    write_file(path, text, durable, replace)
    if replace and not companion:
        path.with_name(companion_name(path)).unlink(missing_ok=True)


def read_tables(content: Content, path: Path, dataset: Path) -> bytes | None:
    """Return the tables in the companion of a sidecar, None without.

    Raises
    ------
    FormatError
        If it is missing, or of another sidecar.
    """
    known, columns = content.companion, content.files
    if known is None:
        return None
    where, nbytes = path.with_name(companion_name(path)), known.get("nbytes")
    size = columns.end if isinstance(columns, FileColumns) else nbytes
    fix = f"write the sidecar again with dsprep provenance {dataset}"
    if not where.is_file():
        raise FormatError("the companion of the sidecar is missing", where=where, fix=fix)
    with closing(open_file(where)) as file:
        data = b""
        if file.nbytes == size and type(nbytes) is int and 0 <= nbytes <= min(size, MAX_COMPANION):
            data = file.pread_exact(nbytes, 0)
    if digest(data) != known.get("blake2b"):
        raise FormatError("the companion is of another sidecar", where=where, fix=fix)
    return data


def companion_name(path: Path) -> str:
    """Return the name of the companion of the sidecar `path`."""
    return path.name.removesuffix(SUFFIX).removesuffix(".json") + COMPANION


def encode(content: Content, companion: bytes) -> tuple[bytes, bytes]:
    """Return the text of a sidecar, a line for each key, file and layout, and its companion.

    `companion` has its tables; columns of many files come behind them.
    """
    many, block = len(content.files) >= MANY, b""
    json = content.to_json(rows=not many)
    if many:
        json["dsprep_sidecar"] = VERSION
        described, block = entries.encode(content.files)
        companion += bytes(-len(companion) % 8)
        json["files"] = {**described, "at": len(companion)}
    lines = []
    for key, value in json.items():
        if isinstance(value, list) and len(value) > 1:
            inner = ",\n  ".join(map(_text, value))
            lines.append(f"{_text(key)}: [\n  {inner}\n ]")
        else:
            lines.append(f"{_text(key)}: {_text(value)}")
    return ("{\n " + ",\n ".join(lines) + "\n}\n").encode(), companion + block


def write_json(content: Mapping[str, Any], path: Path, *, durable: bool = True) -> None:
    """Replace the file `path` by `content` as JSON, all or nothing."""
    write_file(path, dump_json(content).encode(), durable)


def write_record(content: Mapping[str, Any], path: Path, *, durable: bool = True) -> None:
    """Replace the file `path` by what a run records of itself, as JSON with its digest."""
    own = digest(_text(content).encode())
    write_file(path, _text({**content, "digest": own}).encode(), durable)


def read_record(path: Path) -> dict[str, Any]:
    """Return the record that `write_record` wrote, empty if there is none; else `FormatError`."""
    try:
        content = json.loads(path.read_bytes())
        if content.pop("digest") == digest(_text(content).encode()):
            return dict(content)
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        pass
    raise FormatError(
        "the record of an interrupted run is damaged",
        where=path,
        fix="add --restart to start over",
    )


def to_record(content: Content, companion: bytes) -> dict[str, Any]:
    """Return a sidecar and its companion as one record."""
    return {"sidecar": content.to_json(), "companion": base64.b64encode(companion).decode()}


def from_record(record: Mapping[str, Any], where: Path) -> tuple[Content, bytes]:
    """Return the arguments of `to_record`; `ValueError` or `LookupError` if it is damaged."""
    content = Content.from_json(record["sidecar"], where)
    return content, base64.b64decode(record["companion"])


def dump_json(content: Any) -> str:
    """Return `content` as JSON to read."""
    return _text(content, 1) + "\n"


def _text(value: Any, indent: int | None = None) -> str:
    """Return JSON; names that are not Unicode are escaped, and then everything else too."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=str)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(value, indent=indent, default=str)
    return text


def find(
    files: Sequence[Path], at: Path | None = None, directory: Path | None = None
) -> tuple[Content, Path, Path] | None:
    """Return the sidecar that covers `files`, reduced to them; None without one.

    It is beside the only file, or beside a directory that holds them all, or is the file `at`;
    and it lists them. One that lists none of them is of other files of that directory. Of
    `directory` it may list no other files.

    Returns
    -------
    ``(content, dataset, path)``: its content, the dataset beside it, and its path.

    Raises
    ------
    FormatError
        If there is one and it cannot be read, or lists only some of them.
    """
    located = find_path(files, at)
    if located is None:
        return None
    (dataset, where), content = located, read(located[1])
    if dataset == directory and len(content.files) > len(files):
        present = {*all_absolute(files)}
        lacking = next((p for p in content.paths() if dataset / p not in present), None)
        if lacking is not None:
            raise FormatError(
                "it lists a file that is not there",
                where=where,
                expected=lacking,
                fix=f"bring it back, or write the sidecar again with dsprep provenance {dataset}",
            )
    try:
        return reduced(content, dataset, files, where), dataset, where
    except FormatError:
        listed = {dataset / path for path in content.paths()}
        if at is None and listed.isdisjoint(all_absolute(files)):
            return None  # it is of other files in that directory
        raise


def find_beside(dataset: Path) -> Path | None:
    """Return the sidecar of `dataset`, None if there is none; `OSError` if that cannot be seen."""
    where = beside(dataset)
    with suppress(FileNotFoundError, NotADirectoryError):
        return where if stat.S_ISREG(where.stat().st_mode) else None
    return None


def find_path(
    files: Sequence[Path],
    at: Path | None = None,
    look: Callable[[Path], Path | None] = find_beside,
) -> tuple[Path, Path] | None:
    """Return the dataset of `files` that has a sidecar, and where that is; None without one.

    The dataset is the only file, or a directory that holds them all. If the sidecar is `at`
    another place, it is the one that has what that lists. Raises `OSError` if that cannot be seen.
    """
    common = common_path(all_absolute(files))
    if at is not None:
        above = common.parent
        listed = len(files) == 1 and any(common == above / p for p in read(at).paths())
        return (above if listed else common), at
    for dataset in [common, common.parent] if len(files) == 1 else [common]:
        if dataset.name and (where := look(dataset)) is not None:
            return dataset, where
    return None


def reduced(content: Content, dataset: Path, files: Sequence[Path], where: Path) -> Content:
    """Return a sidecar of some files of `dataset` alone; `FormatError` if one is not listed."""
    absolute, listed, root = all_absolute(files), content.paths(), f"{dataset}/"
    if [*map(str, absolute)] == [root + path for path in listed]:
        return content
    numbers = {dataset / path: i for i, path in enumerate(listed)}
    unknown = [f for f in absolute if f not in numbers]
    if unknown:
        raise FormatError(
            "it does not list this file",
            where=where,
            found=unknown[0].name,
            fix=f"write it again with dsprep provenance {dataset}",
        )
    return replace(content, files=tuple(content.files[numbers[f]] for f in absolute))


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
    if isinstance(json, str | bool | int):
        return json
    if not isinstance(json, dict):
        raise TypeError(f"{str(json)[:40]!r} is not an attribute")
    if "bytes" in json:
        return base64.b64decode(json["bytes"])
    shape = tuple(int(n) for n in json["shape"])
    if "strings" in json:
        if not all(isinstance(s, str) for s in json["strings"]):
            raise TypeError("the texts of an attribute are not texts")
        return np.array(json["strings"], object).reshape(shape)
    array = np.frombuffer(base64.b64decode(json["data"]), decode_dtype(json["dtype"]))
    return array.reshape(shape) if shape else array.reshape(())[()]
