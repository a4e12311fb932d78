"""TFRecord: files of ``tf.train.Example``, or of any records.

``framing`` knows records, ``stream`` the bytes they are in (plain, GZIP, ZLIB), ``example`` and
``batch_parser`` the message inside, ``features`` which feature a field is. ``parse``, ``fields``,
``locate`` and ``source`` read, ``plan``, ``build`` and ``write`` write. TensorFlow itself is not
needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from dsprep.core.groups import Grouping
from dsprep.core.schema import Schema
from dsprep.errors import UnsupportedError
from dsprep.formats.base import CommonSchema, Source, State, WritableFormat, WritePlan, Writer
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
        """Whether the first record's header is right; an empty file needs a known suffix."""
        from dsprep.formats.tfrecord.stream import holds_records

        verdict = holds_records(candidate.head[:1024]) if candidate.is_file else False
        if verdict is None:
            return candidate.path.name.lower().endswith(self.suffixes)
        return verdict

    @override
    def open(self, path: Path, options: OpenOptions, hint: Schema | None) -> Source:
        from dsprep.formats.tfrecord.source import TFRecordSource

        return TFRecordSource(path, options, hint)

    def merge_schemas(
        self, schemas: Sequence[Schema], options: OpenOptions, hint: Schema | None
    ) -> CommonSchema | None:
        """Return the features of all files as the hint, so that no file is looked through again."""
        from dsprep.formats.tfrecord import features

        schema = schemas[0]
        for other in schemas[1:]:
            together = features.agree(schema, other)
            if together is None:
                return None
            schema = together
        return CommonSchema(schema, options, schema)

    def plan(
        self,
        schema: Schema,
        options: WriteOptions,
        samples: int | Grouping = 0,
        payload: int = 0,
        name: str = "",
    ) -> WritePlan:
        """Return the list that carries each field; groups are contiguous, as all records are."""
        from dsprep.formats.tfrecord import features
        from dsprep.formats.tfrecord.plan import arrange, plan_groups

        codec = options.compress.codec if options.compress else None
        if codec not in (None, "gzip"):
            raise UnsupportedError(
                f"tfrecord has no {codec} that can be written block by block"
                if codec == "zlib"
                else f"tf.data reads no {codec}",
                expected="gzip",
                fix="use --compress gzip",
            )
        if codec and isinstance(samples, Grouping):
            raise UnsupportedError(
                "GZIP runs over a whole TFRecord file, so its groups have no offsets",
                fix="leave --compress out, or write files without groups: dsprep convert",
            )
        types = features.plan(schema, options)
        if features.is_opaque(schema):
            stored = {f.name: "the whole record" for f in schema}
        else:
            stored = {f.name: features.describe(f, types[f.name]) for f in schema}
        groups, grouping = None, samples if isinstance(samples, Grouping) else None
        arranged = arrange(schema, types, grouping)
        if isinstance(samples, Grouping):
            groups = plan_groups(schema, types, arranged, samples)
            nbytes = groups.nbytes
        else:
            nbytes = _estimate(schema, types, samples, payload)
            if options.compress is not None:  # what does not compress grows a little
                nbytes += nbytes // 500 + 1024
        return WritePlan(stored=stored, notes=_lost(schema, types), nbytes=nbytes, groups=groups)

    @override
    def create(
        self,
        path: Path,
        schema: Schema,
        samples: int | Grouping,
        options: WriteOptions,
        state: State | None,
    ) -> Writer:
        from dsprep.formats.tfrecord.write import TFRecordWriter

        return TFRecordWriter(path, schema, samples, options, state)


def _lost(schema: Schema, types: dict[str, int]) -> tuple[str, ...]:
    """Return what only the sidecar keeps: attributes, and types that no list has."""
    from dsprep.formats.tfrecord import features

    lost = []
    if schema.attrs:
        lost.append("the attributes of the dataset")
    attrs = [f.name for f in schema if f.attrs]
    if attrs:
        lost.append(f"the attributes of {listed(attrs)}")
    typed = [f.name for f in schema if features.loses_type(f, types[f.name])]
    if typed:
        lost.append(f"dtype and shape of {listed(typed)}")
    return tuple(f"TFRecord cannot hold {loss}: only the sidecar has them" for loss in lost)


def _estimate(schema: Schema, types: dict[str, int], count: int, payload: int) -> int:
    """Return the bytes of the records: exact for fixed fields, else at most."""
    from dsprep.formats.tfrecord import features
    from dsprep.formats.tfrecord.build import MOST_OVERHEAD, Template
    from dsprep.formats.tfrecord.framing import FRAME

    if not schema.ragged:
        return count * Template(schema, types).nbytes
    names = sum(len(n.encode()) + MOST_OVERHEAD for n in schema.names)
    growth = max(features.growth(f, types[f.name]) for f in schema)
    return count * (FRAME + MOST_OVERHEAD + names) + int(payload * growth)
