"""A fifth format in one file, to show what a format has to give: rows of fixed size and their CRCs.

A file is a header of `HEADER` bytes and then the samples. The header is `MAGIC` and JSON; sample i
is the bytes of its fields, one after another, and their CRC-32. In groups, each group begins at a
multiple of the stripe size.
"""

from __future__ import annotations

import json
import os
import zlib
from functools import partial
from pathlib import Path

import numpy as np

from dsprep.core.groups import EMPTY, Grouping, round_up
from dsprep.core.schema import Schema
from dsprep.errors import FormatError, UnsupportedError
from dsprep.formats.base import FilePlan, Source, WritableFormat, Writer
from dsprep.formats.located import LocatedSource, Parsed
from dsprep.formats.options import OpenOptions, WriteOptions, check_options
from dsprep.layout.laws import Explicit
from dsprep.layout.model import Blocks, FileLayout, Groups, Part, Records
from dsprep.storage.checksums import crc32c
from dsprep.storage.paths import Candidate, open_file

MAGIC, HEADER, CRC = b"toy rows", 4096, 4


class Toy(WritableFormat):
    """Rows of fixed size."""

    name = "toy"
    suffixes = (".toy",)
    keeps_types = True

    def recognises(self, candidate: Candidate) -> bool:
        return candidate.head.startswith(MAGIC)

    def facts(self, path: Path) -> dict[str, int]:
        return {"samples": Shape.of(path).count}

    def open(self, path: Path, options: OpenOptions, hint: Schema | None) -> Source:
        check_options(options, self.open_options, self.name)
        shape, file = Shape.of(path), open_file(path)
        fields = {f.name: f for f in shape.schema}
        parsed = Parsed(version="toy", fields=fields, layout=shape.layout())
        return LocatedSource(path, parsed, options, file.opened, file.close)

    def check(self, schema: Schema, options: WriteOptions) -> tuple[str, ...]:
        self.plan(schema, options)
        return ()

    def plan(
        self,
        schema: Schema,
        options: WriteOptions,
        grouping: Grouping = EMPTY,
        payload: int = 0,
        name: str = "",
    ) -> FilePlan:
        check_options(options, self.write_options, self.name)
        ragged = [f.name for f in schema if f.ragged]
        if ragged:
            raise UnsupportedError(f"toy holds no ragged fields: {ragged[0]}")
        shape = Shape.planned(schema, grouping)
        return FilePlan(
            create=partial(ToyWriter, shape, grouping),
            stored={f.name: "bytes of a row" for f in schema},
            nbytes=shape.nbytes,
            padding=shape.nbytes - shape.count * shape.row,
            group_nbytes=grouping.samples * shape.row,
        )


class Shape:
    """Where the rows of a file are: `per` to a group, groups at multiples of `align`."""

    def __init__(self, schema: Schema, count: int, per: int, align: int) -> None:
        self.schema, self.count, self.per, self.align = schema, count, per, align
        self.row = schema.fixed_nbytes + CRC
        self.stride = round_up(per * self.row, align)
        self.base = round_up(HEADER, align)
        groups = -(-count // per)
        last = count - (groups - 1) * per
        self.nbytes = self.base + ((groups - 1) * self.stride + last * self.row if count else 0)

    @classmethod
    def planned(cls, schema: Schema, grouping: Grouping) -> Shape:
        if not grouping.even:
            raise UnsupportedError("toy has groups of equal numbers of samples")
        return cls(schema, grouping.total, max(1, grouping.samples), grouping.align)

    @classmethod
    def of(cls, path: Path) -> Shape:
        with path.open("rb") as file:
            head = file.read(HEADER)
        try:
            facts = json.loads(head[len(MAGIC) :].rstrip(b"\0"))
            schema = Schema.from_json(facts["fields"])
            found = cls(schema, facts["count"], facts["per"], facts["align"])
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError("the header is damaged", where=path) from error
        if path.stat().st_size != found.nbytes:
            raise FormatError("the file has another size than its header gives", where=path)
        return found

    def header(self) -> bytes:
        facts = {"fields": self.schema.to_json(), "count": self.count}
        text = json.dumps({**facts, "per": self.per, "align": self.align}).encode()
        return (MAGIC + text).ljust(HEADER, b"\0")

    def layout(self) -> FileLayout:
        offsets, parts, at = self.offsets(0, self.count), {}, 0
        for f in self.schema:
            parts[f.name] = Part(at, f.row_nbytes)
            at += f.row_nbytes
        lengths = np.full(self.count, self.row - CRC, np.int64)
        return FileLayout(self.count, Records(Blocks(Explicit(offsets), Explicit(lengths)), parts))

    def offsets(self, start: int, stop: int) -> np.ndarray:
        group, inside = np.divmod(np.arange(start, stop, dtype=np.int64), self.per)
        return self.base + group * self.stride + inside * self.row


class ToyWriter(Writer):
    """A file being written: every place is known, so any checkpoint will do."""

    def __init__(self, shape: Shape, grouping: Grouping, path: Path, state: dict | None) -> None:
        self._shape, self._grouping, self._path = shape, grouping, path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def encode(self, batch, start, arena):
        columns = [np.ascontiguousarray(batch[f.name]) for f in self._shape.schema]
        rows = [b"".join(c[i : i + 1].tobytes() for c in columns) for i in range(len(columns[0]))]
        offsets = self._shape.offsets(start, start + len(rows)).tolist()
        return [(r + zlib.crc32(r).to_bytes(CRC, "little"), o) for r, o in zip(rows, offsets)]  # noqa: B905

    def write(self, piece) -> None:
        for row, offset in piece:
            os.pwrite(self._fd, row, offset)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def finish(self) -> None:
        os.pwrite(self._fd, self._shape.header(), 0)
        os.ftruncate(self._fd, self._shape.nbytes)
        self.sync()
        self.close()

    def groups(self) -> Groups | None:
        if self._grouping.plain:
            return None
        edges = self._grouping.edges
        offsets = self._shape.offsets(0, self._shape.count)[edges[:-1]]
        lengths = np.diff(edges) * self._shape.row
        data = self._path.read_bytes()
        ranges = zip(offsets.tolist(), lengths.tolist(), strict=True)
        sums = np.array([crc32c(data[o : o + n]) for o, n in ranges], np.int64)
        blocks = Blocks(Explicit(offsets), Explicit(lengths))
        return Groups(self._grouping.samples, blocks, Explicit(sums))

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
