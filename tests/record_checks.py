"""What a layout of records says, compared with the bytes of the file, for every format of them."""

from __future__ import annotations

import itertools
import os

import numpy as np
from google_crc32c import value as reference_crc
from support import assert_same_batch, create, raw, take

from dsprep.core.groups import Grouping
from dsprep.core.schema import Arena, Ragged, Schema
from dsprep.formats import decoders
from dsprep.formats.options import WriteOptions
from dsprep.formats.tfrecord import example, framing

RNG = np.random.default_rng(12)


def places(layout, samples=None):
    """The offsets and lengths of the records of these samples, or of all."""
    samples = np.arange(layout.count) if samples is None else np.asarray(samples, np.int64)
    records = layout.records
    numbers = samples if records.order is None else records.order.at(samples)
    return records.blocks.offsets.at(numbers), records.blocks.lengths.at(numbers)


def stored_at(path, layout, offsets, lengths):
    """The bytes at these offsets."""
    below = layout.records.blocks.path
    with (path / below if below else path).open("rb") as file:
        fd = file.fileno()
        found = [os.pread(fd, int(n), int(at)) for at, n in zip(offsets, lengths, strict=True)]
    assert [len(data) for data in found] == np.asarray(lengths).tolist()
    return found


def bits(column, i):
    """The bits of one value of a column; a slice keeps the byte order."""
    if isinstance(column, Ragged):
        return raw(column.values[column.offsets[i] : column.offsets[i + 1]])
    return raw(column[i : i + 1])


def pick(column, field, some):
    """Some values of a column, in this order."""
    if isinstance(column, Ragged):
        return Ragged.pack([column[i] for i in some.tolist()], field)
    return column[some]


def decoded(layout, schema, records, even=False):
    """The records through the recipe, from a buffer that has them in another order, with gaps."""
    starts, parts, at = np.empty(len(records), np.int64), [], 0
    for i in np.arange(len(records)) if even else RNG.permutation(len(records)):
        gap = 3 if even else int(RNG.integers(0, 5))
        starts[i] = at + gap
        parts += [b"\xff" * gap, records[i]]
        at += gap + len(records[i])
    lengths = np.array([len(r) for r in records], np.int64)
    buffer = np.frombuffer(b"".join(parts), np.uint8)
    recipe = decoders(layout.records, schema)[1]
    assert recipe is not None
    return recipe.decode(buffer, starts, lengths, "sample {}".format)


def assert_told_right(path, source):
    """Every field of every sample is where the layout says, or what the recipe makes of it."""
    layout = source.extents()
    n, records = len(source), layout.records
    assert layout.count == n
    assert {*records.parts, *layout.unlocated} == set(source.schema.names)
    whole = source.read(0, n)
    offsets, lengths = places(layout)
    payloads = stored_at(path, layout, offsets, lengths)
    for name, part in records.parts.items():
        field = source.schema[name]
        if part.at is None:
            assert records.recipe is not None
            continue
        assert field.ragged or part.nbytes == field.row_nbytes
        stop = None if part.nbytes is None else part.at + part.nbytes
        for i, payload in enumerate(payloads):
            data = np.frombuffer(payload[part.at : stop], np.uint8)
            found = data.view(field.dtype) if data.size else np.empty(0, field.dtype)
            assert raw(found) == bits(whole[name], i)
    if records.recipe is not None and n:
        inside = Schema(tuple(f for f in source.schema if f.name in records.parts))
        for size, even in itertools.product((1, n // 2 + 1, n), (False, True)):
            some = RNG.choice(n, size)
            found = decoded(layout, inside, [payloads[i] for i in some], even)
            expected = {f.name: pick(whole[f.name], f, some) for f in inside}
            assert_same_batch(found, expected, inside)
        one = decoders(records, inside)[1].one
        for i in RNG.permutation(n).tolist():
            found = one(np.frombuffer(payloads[i], np.uint8))
            if found is not None:  # which is then right
                expected = {f.name: pick(whole[f.name], f, np.array([i])) for f in inside}
                assert_same_batch(found, expected, inside)
    return layout


def frame_of(layout):
    """What proves the records of a layout."""
    return decoders(layout.records, Schema(()))[0]


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
