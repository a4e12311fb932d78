"""What layouts and groups say, compared with the bytes of the files, for every format."""

from __future__ import annotations

import itertools

import numpy as np
from google_crc32c import value as reference_crc
from support import assert_same_batch, create, describe, take

from dsprep.core.groups import Grouping
from dsprep.core.schema import Arena, Ragged, Schema
from dsprep.formats.options import OpenOptions, WriteOptions
from dsprep.formats.tfrecord import example, framing
from dsprep.sidecar.sidecar import Sidecar
from dsprep.verbs.check import check
from dsprep.verbs.provenance import provenance

RNG = np.random.default_rng(12)


def pick(column, field, some):
    """Some values of a column, in this order."""
    if isinstance(column, Ragged):
        return Ragged.pack([column[i] for i in some.tolist()], field)
    return column[some]


def taken(batch, schema, some):
    """Some samples of a batch, in this order."""
    return {f.name: pick(batch[f.name], f, np.asarray(some, int)) for f in schema}


def located(format, path, options=None, hint=None):
    """The layout of a dataset, and its samples: the sidecar gives, proven, what the source does."""
    options = options or OpenOptions()
    with format.open(path, options, hint) as source:
        layout, whole, n = source.extents(), source.read(0, len(source)), len(source)
    assert layout.count == n
    assert layout.records or sorted([*layout.columns, *layout.unlocated]) == sorted(whole)
    if hint is None:
        provenance(path, options)
    else:
        describe(format, hint, [path], path).save(durable=False)
    with Sidecar.open(path) as sidecar:
        inside = Schema(tuple(f for f in sidecar.schema if f.name not in layout.unlocated))
        for some in (np.arange(n), RNG.permutation(n), RNG.integers(0, max(n, 1), min(n, 5))):
            found = sidecar.read(some, inside.names, verify="full") if len(inside) else {}
            assert_same_batch(found, taken(whole, inside, some), inside)
    assert options.follow_external or not check(path, full=True)
    return layout, {name: whole[name] for name in inside.names}


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
    edges = sorted({*grouping.edges.tolist(), *(() if writer.whole_groups else cuts)})
    feed(writer, batch, edges, backwards=True)
    writer.sync()
    writer.finish()
    groups = writer.groups()
    writer.clean()
    writer.close()
    return groups


def group_bytes(path, groups):
    """The bytes of each group, whose sums are right."""
    out = []
    for g in range(groups.blocks.count):
        inside = groups.path(g)
        data = (path / inside if inside else path).read_bytes()
        at, nbytes = groups.blocks.offsets.one(g), groups.blocks.lengths.one(g)
        out.append(data[at : at + nbytes])
        assert len(out[-1]) == nbytes
        assert groups.crc32c is None or groups.crc32c.one(g) == reference_crc(out[-1])
    return out
