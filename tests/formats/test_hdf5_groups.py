"""HDF5 outputs in groups: h5py reads the samples and reports each group in one range."""

from __future__ import annotations

import errno
import itertools
import json
import resource
from pathlib import Path

import h5py
import numpy as np
import pytest
from support import assert_same_batch, random_batch, raw, schemas, take, write_batch

from dsprep.core.checksums import crc32c
from dsprep.core.groups import Grouping, even
from dsprep.core.schema import Arena, Batch, Field, FieldSpec, Ragged, Schema
from dsprep.errors import DsprepError, FormatError, UnsupportedError, UsageError
from dsprep.formats.base import Compression, GroupWriter, OpenOptions, WriteOptions
from dsprep.formats.hdf5 import Hdf5, create
from dsprep.layout.model import Groups

HDF5 = Hdf5()
SCHEMAS = dict(schemas())
MIXED = SCHEMAS["mixed"]
PLAIN = WriteOptions()
GZIP = WriteOptions(compress=Compression("gzip", 1))
ZSTD = WriteOptions(compress=Compression("zstd"))
F4, I8, U1 = np.dtype("<f4"), np.dtype("<i8"), np.dtype("u1")
IMAGES = Schema((Field("label", I8), Field("image", U1, (9, 5))))


@pytest.fixture(autouse=True)
def _no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(f"os.{name}", lambda fd: None)


def grouped(batch: Batch, per_group: int, align: int) -> Grouping:
    count = len(next(iter(batch.values())))
    edges = even(count, per_group).edges
    rows = {}
    for name, column in batch.items():
        if isinstance(column, Ragged):
            ends = column.offsets[edges]
            rows[name] = np.diff(ends)
    return Grouping(edges, align, rows)


def cut(writer: GroupWriter, grouping: Grouping, after: int, step: int) -> list[tuple[int, int]]:
    """Pieces of `step` samples that cross no edge, or whole groups."""
    edges = set(grouping.edges.tolist())
    if not writer.whole:
        edges |= set(range(0, int(grouping.edges[-1]), step))
    return list(itertools.pairwise(sorted(e for e in edges if e >= after)))


def feed(writer: GroupWriter, batch: Batch, cuts: list[tuple[int, int]], order: int = -1) -> None:
    pieces = [writer.encode(take(batch, a, b), a, Arena()) for a, b in cuts]
    for piece in pieces:
        writer.reserve(piece)
    for piece in pieces[::order]:
        writer.write(piece)
    writer.sync()


def write(
    path: Path,
    schema: Schema,
    batch: Batch,
    grouping: Grouping,
    options: WriteOptions = PLAIN,
    step: int = 2,
    order: int = -1,
) -> Groups:
    writer = HDF5.create(path, schema, grouping, options, None)
    feed(writer, batch, cut(writer, grouping, 0, step), order)
    writer.finish()
    writer.close()
    groups = writer.groups()
    writer.clean()
    assert list(path.parent.iterdir()) == [path]
    path.rename(path.parent.parent / path.name)
    return groups


def in_folder(tmp_path: Path, name: str) -> Path:
    (tmp_path / "new").mkdir(exist_ok=True)
    return tmp_path / "new" / name


def chunks_of(path: Path) -> dict[str, dict[int, tuple[int, int]]]:
    """By dataset and group: the place and the size of the chunk, as h5py reports them."""
    found: dict[str, dict[int, tuple[int, int]]] = {}

    def visit(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset) and item.chunks:
            rows = item.chunks[0]
            for i in range(item.id.get_num_chunks()):
                info = item.id.get_chunk_info(i)
                place = (info.byte_offset, info.size)
                found.setdefault(name, {})[info.chunk_offset[0] // rows] = place

    with h5py.File(path) as file:
        file.visititems(visit)
    return found


def check(path: Path, groups: Groups, grouping: Grouping, align: int) -> None:
    """Every group is one range: aligned, without gaps between its chunks, with the right CRC."""
    assert groups.blocks.count == grouping.count
    assert groups.first is None
    indices = np.arange(grouping.count)
    offsets, lengths = groups.blocks.offsets.at(indices), groups.blocks.lengths.at(indices)
    assert groups.crc32c is not None
    crcs = groups.crc32c.at(indices)
    found = chunks_of(path)
    with path.open("rb") as file:
        for g in range(grouping.count):
            mine = sorted(places[g] for places in found.values())
            assert mine[0][0] == offsets[g]
            assert offsets[g] % align == 0
            for (a, size), (b, _) in itertools.pairwise(mine):
                assert a + size == b
            end = mine[-1][0] + mine[-1][1]
            assert offsets[g] + lengths[g] <= end
            assert g == 0 or offsets[g - 1] + lengths[g - 1] <= offsets[g]
            file.seek(int(offsets[g]))
            data = file.read(int(lengths[g]))
            assert len(data) == lengths[g]
            assert crc32c(data) == crcs[g]
    end = int((offsets + lengths).max(initial=0))
    assert path.stat().st_size >= end


def read_all(path: Path) -> Batch:
    with HDF5.open(path, OpenOptions(), None) as source:
        return source.read(0, len(source))


@pytest.mark.parametrize("options", [PLAIN, GZIP, ZSTD], ids=["plain", "gzip", "zstd"])
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_every_schema_survives(tmp_path: Path, schema: Schema, options: WriteOptions) -> None:
    batch = random_batch(schema, 8)
    grouping = grouped(batch, 3, 512)
    groups = write(in_folder(tmp_path, "a"), schema, batch, grouping, options)
    path = tmp_path / "a"
    check(path, groups, grouping, 512)
    with HDF5.open(path, OpenOptions(), None) as source:
        assert source.schema == schema
        assert source.notes == ()
        assert_same_batch(source.read(0, 8, Arena()), batch, schema)
        for a, b in ((0, 3), (1, 7), (2, 4), (5, 6), (6, 8), (4, 4)):
            assert_same_batch(source.read(a, b), take(batch, a, b), schema)
        assert all(layout.access for layout in source.layouts().values())
        found = source.extents()
        assert not found.unlocated
        for name, column in found.columns.items():
            values = batch[name]
            if isinstance(values, Ragged):
                assert column.count is not None
                assert column.count.span(0, 8).tolist() == values.lengths.tolist()


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("per_group", [1, 2, 100])
@pytest.mark.parametrize("options", [PLAIN, GZIP], ids=["plain", "gzip"])
def test_few_samples(tmp_path: Path, count: int, per_group: int, options: WriteOptions) -> None:
    for name in ("mixed", "empty-axis", "five-d", "scalar-|u1", "ragged-bfloat16", "str"):
        for align in (1, 4096):
            schema = SCHEMAS[name]
            batch = random_batch(schema, count)
            grouping = grouped(batch, per_group, align)
            groups = write(in_folder(tmp_path, name), schema, batch, grouping, options)
            check(tmp_path / name, groups, grouping, align)
            assert_same_batch(read_all(tmp_path / name), batch, schema)


def test_samples_that_are_all_empty(tmp_path: Path) -> None:
    schema = Schema((Field("x", F4, (None, 2)), Field("z", F4, (None, 0)), Field("y", I8)))
    batch = random_batch(schema, 7, longest=0)
    batch["z"] = Ragged.from_lengths(np.zeros((6, 0), F4), np.array([0, 1, 2, 0, 0, 0, 3]))
    grouping = grouped(batch, 2, 64)
    groups = write(in_folder(tmp_path, "a"), schema, batch, grouping)
    assert groups.blocks.lengths.span(0, 4).min() > 0
    assert_same_batch(read_all(tmp_path / "a"), batch, schema)


def test_ties_and_small_fields_lie_side_by_side(tmp_path: Path) -> None:
    equal = [Field(f"f{i}", F4, (300,)) for i in range(3)]
    small = [Field("s", U1), Field("t", np.dtype("<i2"), (3,))]
    for k, (fields, per_group, align) in enumerate(
        itertools.product(([*equal, *small], [*small, *equal], small), (1, 7, 300), (1, 4096))
    ):
        schema = Schema(tuple(fields))
        batch = random_batch(schema, 800)
        grouping = even(800, per_group, align)
        groups = write(in_folder(tmp_path, f"{k}"), schema, batch, grouping, step=500)
        check(tmp_path / f"{k}", groups, grouping, align)
        offsets = groups.blocks.offsets.span(0, grouping.count)
        assert len(set(np.diff(offsets).tolist())) == 1
        sizes = sum(f.row_nbytes for f in fields) * per_group
        assert np.diff(offsets)[0] == -(-sizes // align) * align


def test_a_range_is_the_rows_of_its_group(tmp_path: Path) -> None:
    batch = random_batch(IMAGES, 11)
    groups = write(in_folder(tmp_path, "a"), IMAGES, batch, even(11, 4, 1024))
    data = (tmp_path / "a").read_bytes()
    for g in range(2):
        at, nbytes = groups.blocks.offsets.one(g), groups.blocks.lengths.one(g)
        expected = raw(batch["image"][4 * g : 4 * g + 4]) + raw(batch["label"][4 * g : 4 * g + 4])
        assert data[at : at + nbytes] == expected
    at, nbytes = groups.blocks.offsets.one(2), groups.blocks.lengths.one(2)
    assert nbytes == 4 * 45 + 3 * 8  # the chunk of the last group is as large as all
    assert data[at : at + 3 * 45] == raw(batch["image"][8:])
    assert data[at + 3 * 45 : at + 4 * 45] == bytes(45)


def test_ragged_values_come_last_and_unused_space_is_not_read(tmp_path: Path) -> None:
    schema = Schema((Field.opaque("jpeg"), Field("y", I8)))
    items = [b"a" * n for n in (5000, 1, 2, 3, 10, 0, 7)]
    batch: Batch = {"jpeg": Ragged.pack(items, schema["jpeg"]), "y": np.arange(7)}
    grouping = grouped(batch, 2, 512)
    groups = write(in_folder(tmp_path, "a"), schema, batch, grouping)
    assert groups.blocks.lengths.span(0, 4).tolist() == [48 + n for n in (5001, 5, 10, 7)]
    with HDF5.open(tmp_path / "a", OpenOptions(), None) as source:
        assert source.layouts()["jpeg"].access.startswith("one read of 717 B")
    with h5py.File(tmp_path / "a") as file:
        first, count = file["jpeg/first"][:], file["jpeg/count"][:]
        values = file["jpeg/values"]
        assert [values[a : a + n].tobytes() for a, n in zip(first, count, strict=True)] == items
        assert values.chunks == (5001,)
    specs = ("jpeg=jpeg/values@jpeg/first,jpeg/count:uint8[None]",)
    with HDF5.open(
        tmp_path / "a", OpenOptions(fields=tuple(map(FieldSpec.parse, specs))), None
    ) as source:
        assert source.read(1, 6)["jpeg"][3].tobytes() == items[4]


@pytest.mark.parametrize("options", [PLAIN, GZIP], ids=["plain", "gzip"])
def test_bytes_depend_on_samples_and_groups_only(tmp_path: Path, options: WriteOptions) -> None:
    for schema in (IMAGES, MIXED):
        batch = random_batch(schema, 23)
        grouping = grouped(batch, 7, 256)
        outputs, told = set(), set()
        for k, (step, order) in enumerate(((1, 1), (2, -1), (3, 1), (50, -1))):
            groups = write(
                in_folder(tmp_path, f"{k}"), schema, batch, grouping, options, step, order
            )
            outputs.add((tmp_path / f"{k}").read_bytes())
            assert groups.crc32c is not None
            told.add(tuple(groups.crc32c.span(0, 4).tolist()))
        assert len(outputs) == len(told) == 1


@pytest.mark.parametrize("schema", [IMAGES, MIXED], ids=["fixed", "ragged"])
@pytest.mark.parametrize("options", [PLAIN, GZIP], ids=["plain", "gzip"])
def test_an_interrupted_file_continues(
    tmp_path: Path, schema: Schema, options: WriteOptions
) -> None:
    batch = random_batch(schema, 23)
    grouping = grouped(batch, 5, 256)
    whole = write(in_folder(tmp_path, "whole"), schema, batch, grouping, options)
    path = in_folder(tmp_path, "part")
    writer = HDF5.create(path, schema, grouping, options, None)
    done = 10 if writer.whole else 12
    cuts = [c for c in cut(writer, grouping, 0, 2) if c[1] <= done]
    feed(writer, batch, cuts)
    state = json.loads(json.dumps(writer.checkpoint()))
    other = random_batch(schema, 23, seed=5)
    for name, column in other.items():  # as many rows, but other ones, where a killed run wrote
        if isinstance(column, Ragged):
            values = batch[name]
            assert isinstance(values, Ragged)
            other[name] = Ragged(np.zeros_like(values.values), values.offsets, values.kind)
    feed(writer, other, cut(writer, grouping, done, 2)[:3])
    writer.close()
    writer = HDF5.create(path, schema, grouping, options, state)
    feed(writer, batch, cut(writer, grouping, done, 2))
    writer.finish()
    state = json.loads(json.dumps(writer.checkpoint()))
    writer.close()
    writer = HDF5.create(path, schema, grouping, options, state)
    writer.finish()  # killed before it was recorded, and repeated
    groups = writer.groups()
    writer.clean()
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()
    for a, b in ((groups, whole), (groups.blocks, whole.blocks)):
        for key in ("crc32c",) if isinstance(a, Groups) else ("offsets", "lengths"):
            count = grouping.count
            assert np.array_equal(getattr(a, key).span(0, count), getattr(b, key).span(0, count))


def test_a_run_that_continues_from_nothing_is_refused(tmp_path: Path) -> None:
    batch = random_batch(MIXED, 6)
    grouping = grouped(batch, 2, 64)
    for options, state in ((PLAIN, {}), (GZIP, {"pieces": 2, "bytes": 900})):
        with pytest.raises((DsprepError, FileNotFoundError)):
            HDF5.create(tmp_path / "gone", MIXED, grouping, options, state)
    write_batch(HDF5, tmp_path / "other", MIXED, batch)
    with pytest.raises(FormatError):
        HDF5.create(tmp_path / "other", MIXED, grouping, PLAIN, {})


@pytest.mark.parametrize("schema", [IMAGES, MIXED], ids=["fixed", "ragged"])
@pytest.mark.parametrize("options", [PLAIN, GZIP], ids=["plain", "gzip"])
def test_irregular_places_are_told_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: Schema, options: WriteOptions
) -> None:
    from dsprep.formats.hdf5.plan import FilePlan

    batch = random_batch(schema, 300)
    grouping = grouped(batch, 1, 256)
    monkeypatch.setattr(FilePlan, "metadata", 2048)  # too little
    monkeypatch.setattr(create, "_TRIES", 1)
    writer = HDF5.create(tmp_path / "a", schema, grouping, options, None)
    feed(writer, batch, cut(writer, grouping, 0, 1))
    writer.finish()
    groups, found = writer.groups(), chunks_of(tmp_path / "a")
    data = (tmp_path / "a").read_bytes()
    assert groups.crc32c is not None
    for g in range(grouping.count):
        at, nbytes = groups.blocks.offsets.one(g), groups.blocks.lengths.one(g)
        assert at == min(places[g][0] for places in found.values())
        assert crc32c(data[at : at + nbytes]) == groups.crc32c.one(g)
    assert_same_batch(read_all(tmp_path / "a"), batch, schema)
    offsets = groups.blocks.offsets.span(0, grouping.count)
    assert (offsets % 256).any(), "the places are regular: this shows nothing"
    monkeypatch.setattr(create, "_TRIES", 8)
    groups = write(in_folder(tmp_path, "b"), schema, batch, grouping, options)
    check(tmp_path / "b", groups, grouping, 256)


def test_attributes_and_a_field_called_like_anything(tmp_path: Path) -> None:
    names = ("_pad", "_lead", "a/b/c", "values")
    fields = tuple(Field(n, F4, (3,), attrs={"unit": "m", "k": [1, 2]}) for n in names)
    schema = Schema(fields, {"title": "é" * 70_000})
    batch = random_batch(schema, 50)
    grouping = even(50, 4, 4096)
    groups = write(in_folder(tmp_path, "a"), schema, batch, grouping)
    check(tmp_path / "a", groups, grouping, 4096)
    with h5py.File(tmp_path / "a") as file:
        assert sorted(file) == ["_lead", "_pad", "a", "values"]
        assert file["a/b/c"].attrs["unit"] == "m"
        assert file.attrs["title"] == "é" * 70_000
    assert_same_batch(read_all(tmp_path / "a"), batch, schema)


def test_the_plan_tells_the_size(tmp_path: Path) -> None:
    for schema, options in ((IMAGES, PLAIN), (MIXED, PLAIN), (IMAGES, GZIP)):
        batch = random_batch(schema, 200)
        grouping = grouped(batch, 16, 4096)
        plan = HDF5.plan(schema, options, grouping).groups
        write(in_folder(tmp_path, "a"), schema, batch, grouping, options)
        assert (tmp_path / "a").stat().st_size <= plan.nbytes
        payload = sum(c.nbytes for c in batch.values())
        assert plan.nbytes - plan.padding >= payload
        assert plan.aligned
        assert plan.reads == 1
        if options is PLAIN:
            assert (tmp_path / "a").stat().st_size > plan.nbytes - 4096 - plan.group_nbytes - 8192


def test_what_hdf5_cannot_hold_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="equally many samples"):
        HDF5.plan(IMAGES, PLAIN, Grouping(np.array([0, 3, 5, 8])))
    large = Schema((Field("x", F4, (1 << 20,)),))
    with pytest.raises(UnsupportedError, match="at most 1023 samples"):
        HDF5.plan(large, PLAIN, even(10_000, 1024))
    HDF5.plan(large, PLAIN, even(10_000, 1023))
    with pytest.raises(UsageError, match="--chunk"):
        HDF5.plan(IMAGES, WriteOptions(chunk=3), even(8, 4))
    with pytest.raises(UnsupportedError, match="blosc"):
        HDF5.plan(IMAGES, WriteOptions(compress=Compression("blosc")), even(8, 4))


def test_a_full_disk_is_an_error_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = Schema((Field("x", F4, (1000,)),))
    batch = random_batch(schema, 40)
    grouping = even(40, 4, 4096)
    monkeypatch.setattr(create, "_check_size", lambda path, nbytes: None)
    writer = HDF5.create(tmp_path / "a", schema, grouping, GZIP, None)
    feed(writer, batch, cut(writer, grouping, 0, 4))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (110_000, hard))
    try:
        for attempt in (writer.finish, lambda: write(tmp_path / "b", schema, batch, grouping)):
            with pytest.raises(OSError, match="large") as caught:
                attempt()
            assert caught.value.errno == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.finish()
    assert_same_batch(read_all(tmp_path / "a"), batch, schema)


def test_rows_that_changed_are_refused(tmp_path: Path) -> None:
    batch = random_batch(MIXED, 6)
    grouping = grouped(batch, 3, 64)
    writer = HDF5.create(tmp_path / "a", MIXED, grouping, PLAIN, None)
    with pytest.raises(FormatError, match="has changed"):
        writer.encode(random_batch(MIXED, 3, seed=3), 0, Arena())
    writer.close()


@pytest.mark.parametrize(
    ("part", "number", "value"),
    [("first", 1, 1), ("first", 2, 7), ("first", 2, -1), ("count", 0, 99), ("first", 3, 10**9)],
)
def test_gaps_inside_groups_are_damage(tmp_path: Path, part: str, number: int, value: int) -> None:
    schema = Schema((Field("x", F4, (None,)),))
    items = [np.arange(n, dtype=F4) for n in (3, 2, 4, 1, 2, 2)]
    batch: Batch = {"x": Ragged.pack(items, schema["x"])}
    write(in_folder(tmp_path, "a"), schema, batch, grouped(batch, 2, 64))
    with h5py.File(tmp_path / "a", "r+") as file:
        assert file["x"].attrs["dsprep_capacity"] == b"5"
        assert file["x/first"][:].tolist() == [0, 3, 5, 9, 10, 12]
        file["x"][part][number] = value
    with pytest.raises(FormatError):
        read_all(tmp_path / "a")


def test_only_groups_may_have_gaps(tmp_path: Path) -> None:
    schema = Schema((Field("x", F4, (None,)),))
    batch: Batch = {"x": Ragged.pack([np.ones(n, F4) for n in (3, 2, 4, 1)], schema["x"])}
    for k, text in enumerate((None, b"many", b"-1", b"9" * 40, b"4")):
        write(in_folder(tmp_path, f"{k}"), schema, batch, grouped(batch, 1, 64))
        with h5py.File(tmp_path / f"{k}", "r+") as file:
            del file["x"].attrs["dsprep_capacity"]
            if text:
                file["x"].attrs["dsprep_capacity"] = np.bytes_(text)
        if text == b"4":
            assert_same_batch(read_all(tmp_path / f"{k}"), batch, schema)
        else:
            with pytest.raises(FormatError):
                read_all(tmp_path / f"{k}")
