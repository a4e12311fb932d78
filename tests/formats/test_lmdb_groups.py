"""LMDB in groups: one value per sample, or one per group; py-lmdb reads the same values."""

from __future__ import annotations

from pathlib import Path

import lmdb
import numpy as np
import pytest
from record_checks import group_bytes as ranges
from record_checks import with_rows, write_groups
from support import assert_same_batch, random_batch, schemas, take, write_batch

from dsprep.core.groups import Grouping, even
from dsprep.core.schema import Arena, Batch, Field, Ragged, Schema
from dsprep.errors import DsprepError, UnsupportedError, UsageError
from dsprep.formats import load
from dsprep.formats.base import OpenOptions, Source, WriteOptions
from dsprep.formats.lmdb.group_source import LmdbGroupSource
from dsprep.formats.lmdb.values import HEAD, Packing

LMDB = load("lmdb")
ALL = dict(schemas())
SAMPLES, VALUES = WriteOptions(), WriteOptions(group_values=True)
UNEVEN = np.array([0, 5, 6, 13, 20, 21], np.int64)
BIG = Schema((Field("x", np.dtype("<f4"), (1200,)), Field("y", np.dtype("<i8"))))
MIXED = Schema((Field.opaque("a"), Field("y", np.dtype("<i4"))))


def opened(path: Path, schema: Schema | None, **options) -> Source:
    return LMDB.open(path, OpenOptions(**options), schema)


def values_of(path: Path) -> list[bytes]:
    env = lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False)
    with env, env.begin() as txn:
        return [bytes(v) for _, v in txn.cursor()]


def batch_of(schema: Schema, count: int) -> Batch:
    if schema is MIXED:
        blobs = [bytes([i]) * (5000 if i % 3 else 7) for i in range(count)]
        y = np.arange(count, dtype="<i4")
        return {"a": Ragged.pack(blobs, schema.fields[0]), "y": y}
    return random_batch(schema, count)


CASES = {**ALL, "big": BIG, "mixed-sizes": MIXED}


@pytest.mark.parametrize("name", CASES)
def test_one_value_per_sample(name: str, tmp_path: Path) -> None:
    schema = CASES[name]
    batch = batch_of(schema, 21)
    write_batch(LMDB, tmp_path / "plain.mdb", schema, batch)
    values = values_of(tmp_path / "plain.mdb")
    for k, edges in enumerate((even(21, 8).edges, UNEVEN, np.array([0, 21]))):
        path = tmp_path / f"{k}.lmdb"
        grouping = with_rows(Grouping(edges, 4096), batch)
        groups = write_groups(LMDB, path, schema, batch, grouping, cuts=(3, 10, 11))
        assert values_of(path) == values
        for g, run in enumerate(ranges(path, groups)):
            assert all(v in run for v in values[edges[g] : edges[g + 1]])
        with opened(path, schema) as source:
            records = source.extents().records
        offsets, lengths = (
            law.span(0, 21) for law in (records.blocks.offsets, records.blocks.lengths)
        )
        begins = groups.blocks.offsets.span(0, grouping.count)
        ends = begins + groups.blocks.lengths.span(0, grouping.count)
        which = np.searchsorted(edges, np.arange(21), "right") - 1
        assert (offsets >= begins[which]).all()
        assert (offsets + lengths <= ends[which]).all()
        plan = LMDB.plan(schema, SAMPLES, grouping).groups
        assert not plan.aligned
        if schema is not MIXED:  # small values lie behind the large ones of other groups
            assert int((ends - begins).max()) <= plan.group_nbytes
        assert (path / "data.mdb").stat().st_size <= plan.nbytes


@pytest.mark.parametrize("nbytes", [8, 300, 2000, 4020, 4096, 19000])
def test_the_bytes_of_a_group_are_told_closely(nbytes: int, tmp_path: Path) -> None:
    schema = Schema((Field("x", np.dtype("u1"), (nbytes,)),))
    batch = {"x": np.zeros((640, nbytes), np.uint8)}
    grouping = even(640, 64)
    groups = write_groups(LMDB, tmp_path / "x.lmdb", schema, batch, grouping)
    longest = int(groups.blocks.lengths.span(0, grouping.count).max())
    told = LMDB.plan(schema, SAMPLES, grouping).groups.group_nbytes
    assert longest <= told <= longest * 1.02 + 3 * 4096


@pytest.mark.parametrize("name", CASES)
def test_one_value_per_group(name: str, tmp_path: Path) -> None:
    schema = CASES[name]
    batch = batch_of(schema, 21)
    for k, edges in enumerate((even(21, 8).edges, UNEVEN, np.array([0, 21]))):
        path = tmp_path / f"{k}.lmdb"
        grouping = with_rows(Grouping(edges), batch)
        groups = write_groups(LMDB, path, schema, batch, grouping, VALUES)
        assert ranges(path, groups) == values_of(path)
        plan = LMDB.plan(schema, VALUES, grouping).groups
        assert int(groups.blocks.lengths.span(0, grouping.count).max()) == plan.group_nbytes
        assert (path / "data.mdb").stat().st_size <= plan.nbytes
        with opened(path, schema) as source:
            assert isinstance(source, LmdbGroupSource)
            for a, b in ((0, 21), (3, 17), (20, 21), (4, 4), (5, 6)):
                assert_same_batch(source.read(a, b), take(batch, a, b), schema)
            lengths = source.sizes(2, 19).tolist()
            assert lengths == [size_of(batch, schema, i) for i in range(2, 19)]
            layout = source.extents()
        assert layout.columns.keys() | layout.unlocated.keys() == set(schema.names)
        if grouping.even:
            check_columns(path / "data.mdb", schema, batch, layout.columns)
        with opened(path, None) as source:
            assert len(source) == grouping.count
            assert any("groups" in note for note in source.notes)


def size_of(batch: Batch, schema: Schema, i: int) -> int:
    return sum(
        int(batch[f.name].lengths[i]) * f.row_nbytes if f.ragged else f.row_nbytes for f in schema
    )


def check_columns(file: Path, schema: Schema, batch: Batch, columns) -> None:
    data = file.read_bytes()
    for name, column in columns.items():
        f, grid = schema[name], column.grid
        assert not f.ragged
        if grid is None:
            continue
        per = grid.chunk[0]
        for i in range(len(batch[name])):
            at = grid.blocks.offsets.one(i // per) + i % per * grid.row_nbytes
            found = np.frombuffer(data, f.dtype, grid.row_nbytes // f.dtype.itemsize, at)
            expected = Packing(Schema((f,))).parts({name: batch[name][i : i + 1]}, 0, 1, Arena())
            assert found.tobytes() == b"".join(p.data.tobytes() for p in expected)[HEAD.size :]


def test_options_and_limits(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        LMDB.create(tmp_path / "a.mdb", BIG, 5, VALUES, None)
    large = Schema((Field("x", np.dtype("u1"), (1 << 30,)),))
    with pytest.raises(UnsupportedError, match="group 0"):
        LMDB.plan(large, VALUES, even(12, 4))
    assert LMDB.plan(large, VALUES, even(12, 3)).groups.group_nbytes == (3 << 30) + HEAD.size
    blob = Schema((Field.opaque("b"),))
    rows = {"b": np.array([10, 1 << 32])}
    with pytest.raises(UnsupportedError, match="group 1"):
        LMDB.plan(blob, VALUES, Grouping(np.array([0, 1, 2]), 1, rows))
    batch = random_batch(BIG, 6)
    write_groups(LMDB, tmp_path / "b.mdb", BIG, batch, even(6, 3), VALUES)
    with pytest.raises(UsageError):
        opened(tmp_path / "b.mdb", BIG, keys_as="key")


def test_a_damaged_group_is_an_error(tmp_path: Path) -> None:
    schema = ALL["mixed"]
    path = tmp_path / "a.mdb"
    batch = random_batch(schema, 30)
    groups = write_groups(LMDB, path, schema, batch, even(30, 10), VALUES)
    data = path.read_bytes()
    head = HEAD.size + 10 * schema.fixed_nbytes + 8 * 10 * 4
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(200):
        spoiled = bytearray(data)
        at = groups.blocks.offsets.one(int(rng.integers(3))) + int(rng.integers(head))
        spoiled[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(spoiled)
        try:
            with opened(path, schema) as source:
                for a in range(0, len(source), 7):
                    source.read(a, min(a + 7, len(source)))
        except DsprepError:
            wrong += 1
    assert wrong > 20


@pytest.mark.parametrize("name", ["fixed-<f4", "mixed", "scalar-bfloat16", "str"])
def test_the_program_runs(name: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "a.lmdb"
    write_groups(LMDB, path, ALL[name], random_batch(ALL[name], 9), even(9, 4), VALUES)
    with opened(path, ALL[name]) as source:
        exec(source.loading_code(), {})
    printed = capsys.readouterr().out
    assert all(n in printed for n in ALL[name].names)
