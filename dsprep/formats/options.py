"""Options of reading and writing a dataset, of which each format knows some."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, TypeAlias, get_args, get_origin, get_type_hints

from dsprep.core.memory import allowed_memory
from dsprep.core.schema import FieldSpec
from dsprep.core.units import as_nbytes, show_binary_nbytes, show_nbytes
from dsprep.errors import FormatError, UsageError

Codec: TypeAlias = Literal["gzip", "zlib", "zstd", "blosc"]
FeatureType: TypeAlias = Literal["bytes", "float", "int64"]


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """Options of reading a dataset. Each format knows some of these; the others must be left alone.

    Attributes
    ----------
    fields : SPEC
        The fields wanted, as ``NAME[=PATH][@INDEX][:DTYPE[SHAPE]]``, such as x=climate/data or
        y:int16[9,4]; ``*``: others. All that are found when empty.
    sample_axis : first|last|none|groups|AXIS
        hdf5, netcdf, numpy, zarr: ``"first"``, ``"last"``, or a number: this axis of every array
        counts samples; ``"none"``: a file is one sample; ``"groups"``: each of the groups side by
        side, or arrays, is one; ``"auto"``: the first, if nothing else is possible.
    order
        lmdb: number the samples by key (``"key"``), by offset in the file (``"file"``) or by the
        decimal number that the key spells (``"numeric"``).
    values
        lmdb: ``"opaque"`` byte strings, or Caffe ``"datum"`` messages.
    database : NAME
        lmdb: the named database; by default the main one.
    skip_keys : KEY
        lmdb: keys that are not samples, such as ``length``.
    keys_as : NAME
        lmdb, webdataset: also give each sample's key, as a `bytes` field of this name; hdf5, where
        each group is a sample: the group's name, as a `str` field.
    records
        tfrecord: ``"opaque"``: take whole records as `bytes`; ``"auto"``: discover the features.
    check_crc
        tfrecord: compare the CRCs of all that is read.
    labels : folders|none|TABLE[:COLUMN]
        images: what labels them: ``"folders"``, ``"none"``, or ``"TABLE[:COLUMN]"``, a table in the
        folder, or with a slash the path of another one (kept as an absolute one), and its column
        that names the images, ``file_name`` if not given; ``"auto"``: what is not doubtful.
    nulls
        parquet: ``"refuse"`` columns with nulls; ``"drop-rows"``, those that have a null in any of
        the fields. images: ``"drop-rows"`` leaves out samples that lack a file.
    file_field : NAME
        Also give the number of the file that each sample is from, from 0 on in the order of the
        files, as an int64 field of this name.
    join
        Read several datasets as one, whose samples have the fields of all of them: each path is a
        dataset; of only one path, each file. All have as many samples, in the same order, and
        where several have keys or names of samples, these are the same.
    follow_external
        images, numpy, zarr: also read what the dataset refers to outside of its directory; hdf5:
        what it has in other files.
    stop
        tfrecord, webdataset: read only so many samples of each file, and look at nothing behind
        them: the file may be damaged or cut there.
    memory : SIZE
        Bytes that decoding may take; None: a quarter of what is free. What cannot be decoded in
        as many is refused before it is tried, as far as the file states sizes.
    """

    fields: tuple[FieldSpec, ...] = ()
    sample_axis: str = "auto"
    order: Literal["key", "file", "numeric"] = "key"
    values: Literal["opaque", "datum"] = "opaque"
    database: str | None = None
    skip_keys: tuple[bytes, ...] = ()
    keys_as: str | None = None
    records: Literal["auto", "opaque"] = "auto"
    check_crc: bool = True
    labels: str = "auto"
    nulls: Literal["refuse", "drop-rows"] = "refuse"
    file_field: str | None = None
    join: bool = False
    follow_external: bool = False
    stop: int | None = None
    memory: int | None = None

    @classmethod
    def of(cls, **given: Any) -> OpenOptions:
        """Return the options that are given as text."""
        given["fields"] = tuple(map(FieldSpec.parse, given.get("fields", ())))
        keys = given.get("skip_keys", ())
        given["skip_keys"] = tuple(k.encode("utf-8", "surrogateescape") for k in keys)
        if given.get("memory") is not None:
            given["memory"] = as_nbytes(given["memory"])
        return cls(**given)

    @property
    def memory_limit(self) -> int:
        """Bytes that decoding may take."""
        return allowed_memory(self.memory)

    def __post_init__(self) -> None:
        if re.fullmatch(r"auto|first|last|none|groups|-?\d{1,2}", self.sample_axis) is None:
            raise UsageError(
                f"--sample-axis {self.sample_axis} is not possible",
                expected="first, last, none, groups, or the number of an axis",
            )
        if self.sample_axis == "0":
            object.__setattr__(self, "sample_axis", "first")
        if "/" in self.labels:
            object.__setattr__(self, "labels", os.path.abspath(self.labels))  # noqa: PTH100

    @property
    def meaning(self) -> OpenOptions:
        """The options that determine the samples, without those of the reader alone."""
        return replace(self, **{name: getattr(OpenOptions(), name) for name in UNRECORDED})

    def to_json(self) -> dict[str, Any]:
        """Return options that are not the default, without `UNRECORDED`, as JSON."""
        json: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if value != getattr(OpenOptions(), f.name) and f.name not in UNRECORDED:
                json[f.name] = value
        if self.fields:
            json["fields"] = [str(s) for s in self.fields]
        if self.skip_keys:
            json["skip_keys"] = [k.decode("utf-8", "surrogateescape") for k in self.skip_keys]
        return json

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> OpenOptions:
        """Return the options that `to_json` wrote.

        Raises
        ------
        FormatError
            If they are no such options.
        """
        lists = {name: json.get(name, []) for name in ("fields", "skip_keys")}
        if (
            not json.keys() <= {f.name for f in fields(cls)} - UNRECORDED
            or not all(isinstance(x, list) for x in lists.values())
            or not all(isinstance(s, str) for x in lists.values() for s in x)
            or not all(isinstance(json[name], str) for name in json.keys() - lists.keys())
            or not all(json.get(name, choices[0]) in choices for name, choices in CHOICES.items())
        ):
            raise FormatError("the reading options of a sidecar are damaged", found=str(json)[:80])
        decoded = {
            "fields": tuple(map(FieldSpec.parse, lists["fields"])),
            "skip_keys": tuple(k.encode("utf-8", "surrogateescape") for k in lists["skip_keys"]),
        }
        return cls(**{**json, **decoded})


DATASET_OPTIONS = frozenset({"file_field", "join"})
"""Options about the files of a dataset, which every format accepts."""

UNRECORDED = frozenset({"check_crc", "follow_external", "join", "memory", "stop"})
"""Options that no sidecar keeps: each reader decides what is checked and allowed."""

COMMON_OPTIONS = frozenset({"memory", "stop"})
"""Options that apply to every format."""


@dataclass(frozen=True)
class Compression:
    """A way to compress values.

    Attributes
    ----------
    codec
        ``"gzip"``, ``"zstd"`` or ``"blosc"``.
    level
        The codec's level; None: its default.
    """

    codec: Codec
    level: int | None = None

    LEVELS: ClassVar[Mapping[str, range]] = {
        "gzip": range(10),
        "zlib": range(10),
        "zstd": range(1, 23),
        "blosc": range(10),
    }

    def __post_init__(self) -> None:
        if self.codec not in self.LEVELS:
            raise UsageError(
                f"{self.codec!r} is not a codec", expected="one of " + ", ".join(self.LEVELS)
            )
        levels = self.LEVELS[self.codec]
        if self.level is not None and self.level not in levels:
            raise UsageError(
                f"{self.codec} has no level {self.level}",
                expected=f"{levels.start} to {levels.stop - 1}",
            )

    @classmethod
    def parse(cls, text: str) -> Compression | None:
        """Return the compression that ``--compress`` names.

        Parameters
        ----------
        text
            ``"none"``, ``"CODEC"`` or ``"CODEC:LEVEL"``.

        Returns
        -------
        Compression or None
            None for ``"none"``.

        Raises
        ------
        UsageError
            If the level is not a number; which codecs and levels there are depends on the format.

        Examples
        --------
        >>> Compression.parse("zstd:5")
        Compression(codec='zstd', level=5)
        """
        if text == "none":
            return None
        name, _, level = text.partition(":")
        if level and not level.isdecimal():
            raise UsageError(f"--compress {text!r}: {level!r} is not a level")
        return cls(name, int(level) if level else None)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return self.codec if self.level is None else f"{self.codec}:{self.level}"


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """Options of writing a dataset. Each format knows some of these; the others must be left alone.

    Attributes
    ----------
    compress
        hdf5, tfrecord, zarr: None writes raw bytes.
    chunk
        hdf5, zarr: samples per chunk; None lets the format choose.
    zarr_format
        zarr: 2 or 3.
    zarr_shard
        zarr: samples per shard file, a multiple of `chunk`; None lets the format choose, 0 means
        one file per chunk.
    key_format
        lmdb: a format string for the keys with the one field ``index``.
    features
        tfrecord: field name to the feature list that carries it.
    """

    compress: Compression | None = None
    chunk: int | None = None
    zarr_format: int = 3
    zarr_shard: int | None = None
    key_format: str = "{index:08d}"
    features: Mapping[str, FeatureType] = field(default_factory=dict)


CHOICES: Mapping[str, tuple[str, ...]] = {
    name: get_args(hint)
    for options in (OpenOptions, WriteOptions)
    for name, hint in get_type_hints(options).items()
    if get_origin(hint) is Literal
}
"""The possible values of options that have few."""

FLAGS = {
    "fields": "--field",
    "database": "--db",
    "skip_keys": "--skip-key",
    "records": "--raw-records",
}
"""Options of the command line whose names differ from their attributes."""


def option_name(name: str) -> str:
    """Return the command-line option of an attribute of `OpenOptions` or `WriteOptions`."""
    return FLAGS.get(name, "--" + name.replace("_", "-"))


def memory_error(
    subject: str, needed: int, memory: int, *, where: object = None, fix: str = "raise --memory"
) -> UsageError:
    """Return the error for a task that needs more bytes of memory than are allowed."""
    step = 10 ** max(0, (len(str(needed)) - 1) // 3 * 3 - 1)  # as many digits as are shown
    return UsageError(
        subject,
        where=where,
        expected=f"--memory of at least {show_nbytes(-(-needed // step) * step)}",
        found=show_binary_nbytes(memory),
        fix=fix,
    )


def check_options(options: OpenOptions | WriteOptions, known: frozenset[str], format: str) -> None:
    """Raise `UsageError` for an option that `format` lacks, or an impossible value."""
    default, applicable = type(options)(), known | DATASET_OPTIONS | COMMON_OPTIONS
    for f in fields(options):
        value = getattr(options, f.name)
        if f.name not in applicable and value != getattr(default, f.name):
            raise UsageError(
                f"{option_name(f.name)} does not apply to {format}",
                expected="only " + ", ".join(sorted(map(option_name, known))),
            )
        choices = CHOICES.get(f.name, (value,))
        if value not in choices:
            raise UsageError(
                f"{option_name(f.name)} {value} is not possible",
                expected="one of " + ", ".join(choices),
            )
