"""TFRecord: files of ``tf.train.Example``, or of any records.

``framing`` knows records, ``stream`` the bytes they are in (plain, GZIP, ZLIB), ``example`` the
message inside, ``features`` which feature a field is. ``parse``, ``fields``,
``locate`` and ``source`` read, ``plan``, ``build`` and ``write`` write. TensorFlow itself is not
needed.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from dsprep.core.groups import EMPTY, Grouping
from dsprep.core.schema import Schema
from dsprep.errors import UnsupportedError
from dsprep.formats.base import FilePlan, Source, WritableFormat
from dsprep.formats.options import OpenOptions, WriteOptions
from dsprep.formats.samples import listed
from dsprep.storage.paths import Candidate


class TFRecord(WritableFormat):
    """TFRecord as TensorFlow writes it; see `dsprep.formats.tfrecord`."""

    name: ClassVar[str] = "tfrecord"
    suffixes: ClassVar[tuple[str, ...]] = (".tfrecord", ".tfrecords", ".tfrec")
    open_options: ClassVar[frozenset[str]] = frozenset({"fields", "records", "check_crc"})
    write_options: ClassVar[frozenset[str]] = frozenset({"compress", "features"})
    infers: ClassVar[bool] = True
    keeps_types: ClassVar[bool] = False
    uneven_groups: ClassVar[bool] = True

    def recognises(self, candidate: Candidate) -> bool:
        """Return whether the first record's header is right; an empty file needs a known suffix."""
        from dsprep.formats.tfrecord.stream import holds_records

        verdict = holds_records(candidate.head[:1024]) if candidate.is_file else False
        if verdict is None:
            return candidate.path.name.lower().endswith(self.suffixes)
        return verdict

    @override
    def open(self, path: Path, options: OpenOptions, hint: Schema | None) -> Source:
        from dsprep.formats.tfrecord.source import open_tfrecord

        return open_tfrecord(path, options, hint)

    def merge(self, one: Schema, other: Schema, options: OpenOptions) -> Schema | None:
        """Return the features of both files."""
        from dsprep.formats.tfrecord import features

        return features.agree(one, other)

    @override
    def check(self, schema: Schema, options: WriteOptions) -> tuple[str, ...]:
        from dsprep.formats.tfrecord import features

        self.plan(schema, options)
        types, lost = features.plan(schema, options), []
        if schema.attrs or any(f.attrs for f in schema):
            lost.append("attributes")
        typed = [f.name for f in schema if features.loses_type(f, types[f.name])]
        if typed:
            lost.append(f"dtype and shape of {listed(typed)}")
        return tuple(f"TFRecord cannot hold {loss}: only the sidecar has them" for loss in lost)

    def plan(
        self,
        schema: Schema,
        options: WriteOptions,
        grouping: Grouping = EMPTY,
        payload: int = 0,
        name: str = "",
    ) -> FilePlan:
        """Return the list that carries each field; groups are contiguous, as all records are."""
        from dsprep.formats.tfrecord import features
        from dsprep.formats.tfrecord.plan import arrange, group_sizes
        from dsprep.formats.tfrecord.write import TFRecordWriter

        codec = options.compress.codec if options.compress else None
        if codec not in (None, "gzip"):
            raise UnsupportedError(
                f"tfrecord has no {codec} that can be written block by block"
                if codec == "zlib"
                else f"tf.data reads no {codec}",
                expected="gzip",
                fix="use --compress gzip",
            )
        if codec and not grouping.plain:
            raise UnsupportedError(
                "GZIP runs over a whole TFRecord file, so its groups have no offsets",
                fix="leave --compress out, or write files without groups: dsprep convert",
            )
        types = features.plan(schema, options)
        if features.is_opaque(schema):
            stored = {f.name: "the whole record" for f in schema}
        else:
            stored = {f.name: features.describe(f, types[f.name]) for f in schema}
        builder = arrange(schema, types, grouping)
        sizes = group_sizes(schema, types, builder, grouping, payload)
        nbytes = int(sizes.sum())
        padding = nbytes - grouping.total * (builder.nbytes - builder.padding)
        return FilePlan(
            create=partial(TFRecordWriter, builder, grouping, options.compress),
            stored=stored,
            # What does not compress grows a little.
            nbytes=nbytes + (nbytes // 500 + 1024 if codec else 0),
            padding=padding if builder.nbytes else grouping.count * (builder.align // 2),
            group_nbytes=int(sizes.max(initial=0)),
            aligned=builder.aligned,
        )
