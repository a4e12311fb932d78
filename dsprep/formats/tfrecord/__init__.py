"""TFRecord: files of ``tf.train.Example``, or of any records.

``framing`` knows records, ``stream`` the bytes they are in (plain, GZIP, ZLIB), ``example`` and
``lockstep`` the message inside, ``features`` which feature a field is. ``source`` and ``columns``
read, ``writer`` and ``build`` write, ``code`` shows how TensorFlow loads the file. ``group`` and
``group_writer`` write groups. TensorFlow itself is not needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from dsprep.core.groups import Grouping, GroupPlan
from dsprep.core.schema import Schema
from dsprep.core.storage import pread_most
from dsprep.errors import UnsupportedError
from dsprep.formats.base import (
    Format,
    GroupWriter,
    OpenOptions,
    Source,
    State,
    WriteOptions,
    Writer,
)
from dsprep.formats.samples import listed


class TFRecord(Format):
    """TFRecord as TensorFlow writes it; see `dsprep.formats.tfrecord`."""

    name: ClassVar[str] = "tfrecord"
    suffixes: ClassVar[tuple[str, ...]] = (".tfrecord", ".tfrecords", ".tfrec")
    open_options: ClassVar[frozenset[str]] = frozenset({"fields", "records", "check_crc"})
    write_options: ClassVar[frozenset[str]] = frozenset({"compress", "features"})
    infers: ClassVar[bool] = True
    keeps_types: ClassVar[bool] = False

    def recognises(self, path: Path) -> bool:
        """Whether the first record's header is right; an empty file needs a known suffix."""
        from dsprep.formats.tfrecord.stream import holds_records

        if not path.is_file():
            return False
        with path.open("rb") as file:
            found = holds_records(pread_most(file.fileno(), 1024, 0))
        return path.name.lower().endswith(self.suffixes) if found is None else found

    def open(self, path: Path, options: OpenOptions, hint: Schema | None) -> Source:
        """Open one file for reading; see `Format.open`."""
        from dsprep.formats.tfrecord.source import TFRecordSource

        return TFRecordSource(path, options, hint)

    def agree(self, a: Schema, b: Schema) -> Schema | None:
        """Return the features of two files together; see `Format.agree`."""
        from dsprep.formats.tfrecord import features

        return features.agree(a, b)

    def settled(
        self, options: OpenOptions, schema: Schema, hint: Schema | None
    ) -> tuple[OpenOptions, Schema | None]:
        """Return the features as the hint, so that no file is looked through again."""
        return options, schema

    def plan_fields(self, schema: Schema, options: WriteOptions) -> dict[str, str]:
        """Return the list that carries each field; see `Format.plan_fields`."""
        from dsprep.formats.tfrecord import features

        codec = options.compress.codec if options.compress else None
        if codec not in (None, "gzip"):
            raise UnsupportedError(
                f"tfrecord has no {codec} that can be written in pieces"
                if codec == "zlib"
                else f"tf.data reads no {codec}",
                expected="gzip",
                fix="use --compress gzip",
            )
        types = features.plan(schema, options)
        if features.is_opaque(schema):
            return {f.name: "the whole record" for f in schema}
        return {f.name: features.describe(f, types[f.name]) for f in schema}

    def losses(self, schema: Schema, options: WriteOptions) -> list[str]:
        """Return what only the sidecar keeps: attributes, and types that no list has."""
        from dsprep.formats.tfrecord import features

        types = features.plan(schema, options)
        lost = []
        if schema.attrs:
            lost.append("the attributes of the dataset")
        attrs = [f.name for f in schema if f.attrs]
        if attrs:
            lost.append(f"the attributes of {listed(attrs)}")
        typed = [f.name for f in schema if features.loses_type(f, types[f.name])]
        if typed:
            lost.append(f"dtype and shape of {listed(typed)}")
        return [f"TFRecord has no place for {what}: only the sidecar has them" for what in lost]

    def estimate(self, schema: Schema, count: int, payload: int, options: WriteOptions) -> int:
        """Return the bytes of the file: exact for fixed fields uncompressed, else at most."""
        from dsprep.formats.tfrecord import features
        from dsprep.formats.tfrecord.build import MOST_OVERHEAD, Template
        from dsprep.formats.tfrecord.framing import FRAME

        types = features.plan(schema, options)
        if not schema.ragged:
            nbytes = count * Template(schema, types).nbytes
        else:
            names = sum(len(n.encode()) + MOST_OVERHEAD for n in schema.names)
            growth = max(features.growth(f, types[f.name]) for f in schema)
            nbytes = count * (FRAME + MOST_OVERHEAD + names) + int(payload * growth)
        if options.compress is not None:  # what does not compress grows a little
            nbytes += nbytes // 500 + 1024
        return nbytes

    def create(
        self,
        path: Path,
        schema: Schema,
        count: int,
        options: WriteOptions,
        state: State | None,
    ) -> Writer:
        """Start a file or continue one; see `Format.create`."""
        from dsprep.formats.tfrecord.writer import TFRecordWriter

        return TFRecordWriter(path, schema, options, state)

    def plan_groups(
        self, schema: Schema, options: WriteOptions, grouping: Grouping, zipped: bool = False
    ) -> GroupPlan:
        """Return how groups will lie: always contiguous; see `dsprep.formats.tfrecord.group`."""
        from dsprep.formats.tfrecord import features, group

        types = features.plan(schema, options)
        return group.plan(schema, types, group.arrange(schema, types, options, grouping), grouping)

    def create_groups(
        self,
        path: Path,
        schema: Schema,
        grouping: Grouping,
        options: WriteOptions,
        state: State | None,
    ) -> GroupWriter:
        """Start a file of groups or continue one; see `Format.create_groups`."""
        from dsprep.formats.tfrecord.group_writer import TFRecordGroupWriter

        return TFRecordGroupWriter(path, schema, grouping, options, state)
