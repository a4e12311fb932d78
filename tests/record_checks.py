"""What a layout of records says, compared with the bytes of the file, for every format of them."""

from __future__ import annotations

import itertools

import numpy as np
from google_crc32c import value as reference_crc
from support import create, take

from dsprep.core.groups import Grouping
from dsprep.core.schema import Arena, Ragged
from dsprep.formats.options import WriteOptions
from dsprep.formats.tfrecord import example, framing

RNG = np.random.default_rng(12)


def pick(column, field, some):
    """Some values of a column, in this order."""
    if isinstance(column, Ragged):
        return Ragged.pack([column[i] for i in some.tolist()], field)
    return column[some]


# --- TFRecord ---


def frame(payload):
    """A payload as a record."""
    data = np.frombuffer(payload, np.uint8)
    crc = framing.payload_crcs(data, np.array([0]), np.array([len(data)]))
    return framing.headers(np.array([len(data)])).tobytes() + payload + crc.tobytes()


def write_records(path, *payloads):
    """Write a TFRecord file."""
    path.write_bytes(b"".join(map(frame, payloads)))
    return path


def entry(name, type_, data):
    """A feature of an Example that has one range of values."""
    return example.entry_head(name.encode(), type_, len(data)) + data


def message(*entries):
    """An Example of these features."""
    return example.example_head(sum(map(len, entries))) + b"".join(entries)


# --- groups ---


def with_rows(grouping, batch):
    """The groups with the rows that the ragged fields of a batch have in them."""
    rows = {
        name: np.add.reduceat(column.lengths, grouping.edges[:-1])
        for name, column in batch.items()
        if isinstance(column, Ragged) and grouping.count
    }
    return Grouping(grouping.edges, grouping.align, rows)


def feed(writer, batch, edges, *, backwards=False):
    """Give a writer the pieces of a batch between these edges."""
    pieces = []
    for start, stop in itertools.pairwise(edges):
        pieces.append(writer.encode(take(batch, start, stop), start, Arena()))
        writer.reserve(pieces[-1])
    for piece in reversed(pieces) if backwards else pieces:
        writer.write(piece)


def write_groups(format, path, schema, batch, grouping, options=None, cuts=()):
    """Write a batch in groups, the pieces cut there too and written backwards."""
    options = WriteOptions() if options is None else options
    writer = create(format, path, schema, with_rows(grouping, batch), options, None)
    edges = sorted({*grouping.edges.tolist(), *(() if writer.whole else cuts)})
    feed(writer, batch, edges, backwards=True)
    writer.sync()
    writer.finish()
    groups = writer.groups()
    writer.clean()
    writer.close()
    return groups


def group_bytes(path, groups):
    """The bytes of each group, whose sums are right."""
    file = path / groups.blocks.path if groups.blocks.path else path
    data, out = file.read_bytes(), []
    for g in range(groups.blocks.count):
        at, nbytes = groups.blocks.offsets.one(g), groups.blocks.lengths.one(g)
        out.append(data[at : at + nbytes])
        assert len(out[-1]) == nbytes
        assert groups.crc32c.one(g) == reference_crc(out[-1])
    return out
