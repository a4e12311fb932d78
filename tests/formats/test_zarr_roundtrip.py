"""What dsprep writes as Zarr reads back bit by bit, in dsprep and in zarr-python."""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zarr
from support import (
    DTYPES,
    STRUCT,
    assert_same_batch,
    random_array,
    random_batch,
    take,
    write_batch,
)
from zarr_stores import F4, SCHEMAS, ZARR, check, no_waiting_for_the_disk, opened

from dsprep.core.schema import Arena, Field, Ragged, Schema
from dsprep.errors import UnsupportedError, UsageError
from dsprep.formats import by_suffix, recognise
from dsprep.formats.base import Compression, WriteOptions
from dsprep.formats.zarr.plan import plan_arrays

__all__ = ["no_waiting_for_the_disk"]  # a fixture of all tests here


OPTIONS = {
    "default": WriteOptions(),
    "small": WriteOptions(chunk=2, zarr_shard=6),
    "files": WriteOptions(chunk=3, zarr_shard=0),
    "v2": WriteOptions(zarr_format=2),
    "v2-small": WriteOptions(zarr_format=2, chunk=2),
    "zstd": WriteOptions(compress=Compression("zstd"), chunk=2, zarr_shard=4),
    "gzip": WriteOptions(compress=Compression("gzip", 1)),
    "blosc": WriteOptions(compress=Compression("blosc"), zarr_shard=4),
    "blosc-files": WriteOptions(compress=Compression("blosc"), zarr_shard=0, chunk=3),
    "v2-zstd": WriteOptions(zarr_format=2, compress=Compression("zstd", 5), chunk=3),
    "v2-blosc": WriteOptions(zarr_format=2, compress=Compression("blosc")),
}


def contents(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def check_library(path: Path, schema: Schema, batch: dict) -> None:
    """zarr-python sees the same bits, by the documented encoding."""
    store = zarr.storage.ZipStore(path, mode="r") if path.is_file() else str(path)
    root = zarr.open_group(store, mode="r")
    assert root.attrs["dsprep_fields"] == list(schema.names)
    for f in schema:
        column = batch[f.name]
        if not isinstance(column, Ragged):
            assert flat(np.asarray(root[f.name][...])) == flat(column), f
            continue
        group = root[f.name]
        assert group.attrs["dsprep_kind"] == f.kind
        assert flat(np.asarray(group["values"][...])) == flat(column.values), f
        assert group["count"][...].tolist() == column.lengths.tolist()
        assert group["first"][...].tolist() == column.offsets[:-1].tolist()
    if path.is_file():
        root.store.close()


def flat(array: np.ndarray) -> bytes:
    """As stored: big-endian v3 arrays come back native, so numbers are compared as native."""
    if array.dtype.names is None and array.dtype.kind in "iufc":
        array = array.astype(array.dtype.newbyteorder("="))
    return array.tobytes()


FEW = ("mixed", "empty-axis", "ragged-<f4", "fixed-<f4", "<U3", "bfloat16")
CASES = [
    pytest.param(name, options, id=f"{name}-{label}")
    for label, options in OPTIONS.items()
    for name in SCHEMAS
    if label == "small" or name in FEW or (label == "v2-small" and name not in FEW)
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_every_schema_comes_back(tmp_path: Path, name: str, options: WriteOptions) -> None:
    schema = SCHEMAS[name]
    batch = random_batch(schema, 11, seed=len(name))
    path = tmp_path / ("d.zarr.zip" if len(name) % 4 == 3 else "d.zarr")
    write_batch(ZARR, path, schema, batch, options, cuts=(1, 3, 4, 8))
    assert recognise(path) is ZARR
    with opened(path) as source:
        assert len(source) == 11
        assert source.schema == schema
        assert source.notes == ()
        arena = Arena()
        for start, stop in ((0, 11), (0, 1), (3, 8), (10, 11), (5, 5)):
            found = source.read(start, stop, arena)
            assert_same_batch(found, take(batch, start, stop), schema)
        assert set(source.storage()) == set(schema.names)
        assert not check(path, source).unlocated


SOME = {n: OPTIONS[n] for n in ("default", "small", "zstd", "v2", "v2-small", "v2-blosc")}


@pytest.mark.parametrize("options", SOME.values(), ids=SOME)
def test_zarr_python_sees_the_same_bits(tmp_path: Path, options: WriteOptions) -> None:
    fields = [Field(f"x{i}", d, (2, 3)) for i, d in enumerate(DTYPES)]
    schema = Schema((*fields, *SCHEMAS["mixed"], *SCHEMAS["empty-axis"].replace().fields[:1]))
    batch = random_batch(schema, 13)
    write_batch(ZARR, tmp_path / "d.zarr", schema, batch, options, cuts=(5,))
    check_library(tmp_path / "d.zarr", schema, batch)


def test_the_dtypes_that_zarr_specifies_need_no_stand_in(tmp_path: Path) -> None:
    names = ["i1", "<u2", ">i4", "<f2", "<f4", ">f8", "?", "<c8"]
    schema = Schema(tuple(Field(n, np.dtype(n), (3,)) for n in names))
    write_batch(ZARR, tmp_path / "d.zarr", schema, random_batch(schema, 4))
    root = zarr.open_group(tmp_path / "d.zarr", mode="r")
    assert [root[n].dtype for n in names] == [np.dtype(n).newbyteorder("=") for n in names]
    assert not any("dsprep_dtype" in root[n].attrs for n in names)


def test_other_dtypes_have_documented_stand_ins(tmp_path: Path) -> None:
    dtypes = {
        "bf": (np.dtype(ml_dtypes.bfloat16), np.dtype("u2"), (4, 3)),
        "f8": (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype("u1"), (4, 3)),
        "s": (np.dtype("S7"), np.dtype("u1"), (4, 3, 7)),
        "u": (np.dtype("<U3"), np.dtype("u4"), (4, 3, 3)),
        "t": (np.dtype("<M8[ns]"), np.dtype("i8"), (4, 3)),
        "d": (np.dtype("<m8[25s]"), np.dtype("i8"), (4, 3)),
        "v": (np.dtype("V5"), np.dtype("u1"), (4, 3, 5)),
        "r": (STRUCT, np.dtype("u1"), (4, 3, 16)),
        "bu": (np.dtype(">U3"), np.dtype("u4"), (4, 3, 3)),
    }
    schema = Schema(tuple(Field(n, d, (3,)) for n, (d, _, _) in dtypes.items()))
    plain = Schema(tuple(f for f in schema if f.dtype.kind != "U"))
    batch = random_batch(plain, 4)
    for n in ("u", "bu"):
        batch[n] = random_array(schema[n].dtype, (4, 3))
    batch = {n: batch[n] for n in schema.names}
    for version in (2, 3):
        path = tmp_path / f"v{version}.zarr"
        write_batch(ZARR, path, schema, batch, WriteOptions(zarr_format=version))
        with opened(path) as source:
            assert_same_batch(source[:], batch, schema)
    root = zarr.open_group(tmp_path / "v3.zarr", mode="r")
    assert {n: (d, root[n].dtype, root[n].shape) for n, (d, _, _) in dtypes.items()} == dtypes


def test_an_integer_by_another_name(tmp_path: Path) -> None:
    schema = Schema((Field("x", np.dtype(np.longlong)), Field("u", np.dtype(np.ulonglong), (2,))))
    batch = random_batch(schema, 3)
    write_batch(ZARR, tmp_path / "a", schema, batch)
    with opened(tmp_path / "a") as source:
        assert_same_batch(source[:], batch, schema)
        write_batch(ZARR, tmp_path / "b", source.schema, source[:])
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_nan_payloads_survive_the_swap_of_bytes(tmp_path: Path) -> None:
    bits = np.array([0x7F800001, 0x7FC12345, 0xFF812345, 0x80000000] * 3, ">u4")
    schema = Schema((Field("x", np.dtype(">f4")),))
    for codec in (None, Compression("zstd")):
        path = tmp_path / f"{codec}.zarr"
        write_batch(ZARR, path, schema, {"x": bits.view(">f4")}, WriteOptions(compress=codec))
        with opened(path) as source:
            assert source[:]["x"].tobytes() == bits.tobytes()


@pytest.mark.parametrize("options", SOME.values(), ids=SOME)
@pytest.mark.parametrize("count", [0, 1])
def test_no_sample_and_one_sample(tmp_path: Path, count: int, options: WriteOptions) -> None:
    schema = Schema((*SCHEMAS["mixed"], *SCHEMAS["five-d"]))
    batch = random_batch(schema, count)
    write_batch(ZARR, tmp_path / "d.zarr", schema, batch, options)
    with opened(tmp_path / "d.zarr") as source:
        assert len(source) == count
        assert_same_batch(source[:], batch, schema)
    check_library(tmp_path / "d.zarr", schema, batch)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_cut_into_pieces_leaves_no_trace(tmp_path: Path, options: WriteOptions) -> None:
    schema = SCHEMAS["mixed"]
    batch = random_batch(schema, 23)
    made = []
    for i, cuts in enumerate([(), (1, 2, 3, 5, 8, 13, 21), (20,)]):
        write_batch(ZARR, tmp_path / f"{i}.zarr", schema, batch, options, cuts)
        made.append(contents(tmp_path / f"{i}.zarr"))
    assert made[0] == made[1] == made[2]


def test_compressed_bytes_do_not_depend_on_time_or_thread(tmp_path: Path, monkeypatch) -> None:
    schema = Schema((Field("x", F4, (300, 300)), Field("n", F4, (None,))))
    rng = np.random.default_rng(0)
    values = rng.integers(0, 9, (8, 300, 300)).astype(F4)
    batch = {"x": values, "n": Ragged.from_lengths(values.reshape(-1), np.full(8, 90_000))}
    for codec in ("gzip", "zstd", "blosc"):
        made = []
        for now in (1.0, 5e8):
            monkeypatch.setattr(time, "time", lambda now=now: now)
            options = WriteOptions(compress=Compression(codec))
            write_batch(ZARR, tmp_path / f"{codec}{now}", schema, batch, options)
            made.append(contents(tmp_path / f"{codec}{now}"))
        assert made[0] == made[1]


def test_padding_of_structured_dtypes_is_written_as_zeros(tmp_path: Path) -> None:
    schema = Schema((Field("x", STRUCT, (2,)),))
    batch = random_batch(schema, 3)
    noisy = np.full((3, 2, 16), 0xAB, "u1").view(STRUCT).reshape(3, 2)
    for name in STRUCT.names or ():
        noisy[name] = batch["x"][name]
    write_batch(ZARR, tmp_path / "a", schema, batch)
    write_batch(ZARR, tmp_path / "b", schema, {"x": noisy})
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_strided_columns_are_written(tmp_path: Path) -> None:
    schema = Schema((Field("x", F4, (4,)), Field("r", F4, (None, 2))))
    table = np.arange(120, dtype=F4).reshape(10, 12)
    rows = np.arange(80, dtype=F4).reshape(10, 8)
    batch = {"x": table[:, 2:10:2], "r": Ragged.from_lengths(rows[:, 1:3], np.full(5, 2))}
    batch["x"] = batch["x"][:5]
    write_batch(ZARR, tmp_path / "d", schema, batch)
    with opened(tmp_path / "d") as source:
        assert_same_batch(source[:], batch, schema)


# --- interruption ------------------------------------------------------------------------------


RUNS = [(o, "zarr") for o in OPTIONS.values()] + [(OPTIONS[n], "zarr.zip") for n in ("v2", "zstd")]


@pytest.mark.parametrize(("options", "suffix"), RUNS)
def test_an_interrupted_run_continues_to_the_same_bytes(
    tmp_path: Path, options: WriteOptions, suffix: str
) -> None:
    schema, count = SCHEMAS["mixed"], 40
    batch = random_batch(schema, count)
    whole, broken = tmp_path / f"whole.{suffix}", tmp_path / f"broken.{suffix}"
    write_batch(ZARR, whole, schema, batch, options)
    unit = plan_arrays(schema, options)[1]
    step = unit * -(-4 // unit)
    edges = [*range(0, count, step), count]
    pieces = list(itertools.pairwise(edges))
    half = len(pieces) // 2

    def run(writer, todo, reserve_more=()):
        for a, b in todo:
            piece = writer.encode(take(batch, a, b), a, Arena())
            writer.reserve(piece)
            writer.write(piece)

    writer = ZARR.create(broken, schema, count, options, None)
    run(writer, pieces[:half])
    state = json.loads(json.dumps(writer.checkpoint()))
    writer.sync()
    run(writer, pieces[half : half + 1])  # behind the checkpoint: will be written again
    writer.close()
    scribble(tmp_path, broken)
    assert not ZARR.recognises(broken)
    writer = ZARR.create(broken, schema, count, options, state)
    run(writer, pieces[half:])
    state = json.loads(json.dumps(writer.checkpoint()))
    writer.sync()
    writer.finish()
    writer.close()
    assert contents(broken) == contents(whole)
    again = ZARR.create(broken, schema, count, options, state)  # killed before it could say so
    again.finish()
    again.close()
    again.clean()
    assert contents(broken) == contents(whole)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([broken.name, whole.name])


def scribble(folder: Path, output: Path) -> None:
    """Leave garbage behind the end of every file that the first half did not complete."""
    for path in folder.rglob("*"):
        beside = path.relative_to(folder).parts[0].startswith(output.name)
        fixed_order = path.parent.name in ("image", "label", "inner") and path.stat().st_size > 0
        if path.is_file() and beside and not fixed_order:
            with path.open("ab") as file:
                file.write(os.urandom(999))


def test_finish_may_be_cut_off_anywhere(tmp_path: Path, monkeypatch) -> None:
    schema, options = SCHEMAS["mixed"], WriteOptions(compress=Compression("zstd"))
    batch = random_batch(schema, 20)
    write_batch(ZARR, tmp_path / "whole", schema, batch, options)
    calls = 0
    real = os.ftruncate

    class Killed(Exception):
        pass

    for limit in range(0, 60, 4):
        path = tmp_path / f"broken{limit}"
        writer = ZARR.create(path, schema, 20, options, None)
        piece = writer.encode(batch, 0, Arena())
        writer.reserve(piece)
        writer.write(piece)
        state = writer.checkpoint()
        writer.sync()
        calls = 0

        def truncate(fd: int, nbytes: int, limit: int = limit) -> None:
            nonlocal calls
            calls += 1
            if calls > limit:
                raise Killed
            real(fd, nbytes)

        monkeypatch.setattr(os, "ftruncate", truncate)
        try:
            writer.finish()
        except Killed:
            assert not ZARR.recognises(path)
        monkeypatch.setattr(os, "ftruncate", real)
        again = ZARR.create(path, schema, 20, options, state)
        again.finish()
        assert contents(path) == contents(tmp_path / "whole")


# --- the rest of the contract --------------------------------------------------------------------


def test_zip_output(tmp_path: Path) -> None:
    schema, path = SCHEMAS["mixed"], tmp_path / "d.zarr.zip"
    batch = random_batch(schema, 30)
    for options in (WriteOptions(), WriteOptions(compress=Compression("zstd"), zarr_shard=8)):
        write_batch(ZARR, path, schema, batch, options, cuts=(11,))
        assert recognise(path) is ZARR
        assert [p.name for p in tmp_path.iterdir()] == [path.name]
        check_library(path, schema, batch)
        with opened(path) as source:
            assert source.schema == schema
            assert_same_batch(source.read(3, 20), take(batch, 3, 20), schema)
            assert source.storage()["image"].stored_nbytes
        gc.collect()


def test_attributes(tmp_path: Path) -> None:
    kept = {"unit": "mm", "scale": 2.5, "n": 3, "list": np.array([1, 2]), "names": np.array(["a"])}
    lost = {"blob": b"\xff", "z": 1j, "nan": float("nan"), "struct": np.zeros(1, STRUCT)}
    field = Field("x", F4, (2,), attrs={**kept, **lost})
    words = Field.opaque("w", "str", {"lang": "de"})
    schema = Schema((field, words), {"title": "t", "text": b"ascii"})
    losses = ZARR.plan(schema, WriteOptions()).notes
    assert len(losses) == len(lost) + 3
    assert all(any(f" {name} " in clause for clause in losses) for name in (*lost, "list", "text"))
    write_batch(ZARR, tmp_path / "d", schema, random_batch(schema, 2))
    with opened(tmp_path / "d") as source:
        found = source.schema["x"].attrs
        assert {k: np.asarray(v).tolist() for k, v in found.items()} == {
            k: np.asarray(v).tolist() for k, v in kept.items()
        }
        assert source.schema["w"].attrs == {"lang": "de"}
        assert source.schema.attrs == {"title": "t", "text": "ascii"}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_plans_estimates_and_layouts(tmp_path: Path, options: WriteOptions) -> None:
    schema = Schema(
        (Field("x", F4, (30, 30)), Field("y", np.dtype("<i8")), Field("r", F4, (None,)))
    )
    batch = random_batch(schema, 50)
    plan = ZARR.plan(schema, options).stored
    assert list(plan) == ["x", "y", "r"]
    assert all("float32" in plan[n] and "chunks of" in plan[n] for n in ("x", "r"))
    write_batch(ZARR, tmp_path / "d", schema, batch, options)
    payload = sum(c.nbytes for c in batch.values())
    actual = sum(len(b) for b in contents(tmp_path / "d").values())
    expected = ZARR.plan(schema, options, 50, payload).nbytes
    assert actual <= expected
    if options.compress is None:
        assert expected - actual < 2048 * (len(schema) + 4)
    with opened(tmp_path / "d") as source:
        layouts = source.storage()
        codec = options.compress.codec if options.compress else None
        assert layouts["x"].codecs == ((codec,) if codec else ())
        stored = sum(layout.stored_nbytes or 0 for layout in layouts.values())
        assert stored <= actual
        assert source.sizes(3, 9).tolist() == [
            3600 + 8 + 4 * int(n) for n in batch["r"].lengths[3:9]
        ]


@pytest.mark.parametrize("codec", [None, Compression("zstd", 1)], ids=str)
@pytest.mark.parametrize(("count", "chunk"), [(20, 4), (20, 1), (70_000, 1)])
def test_the_index_of_a_shard_is_as_long_as_its_samples_need(
    tmp_path: Path, codec: Compression | None, count: int, chunk: int
) -> None:
    schema = Schema((Field("x", F4, (2,)), Field("wide", F4, (150 if count == 20 else 0,))))
    batch = {f.name: random_array(f.dtype, (count, *f.inner)) for f in schema}
    options = WriteOptions(chunk=chunk, compress=codec)
    unit = ZARR.plan(schema, options).unit
    write_batch(ZARR, tmp_path / "d", schema, batch, options)
    payload = sum(c.nbytes for c in batch.values())
    actual = sum(len(b) for b in contents(tmp_path / "d").values())
    entries = (16 + 32 * (codec is not None)) * -(-count // chunk) * len(schema)
    full = max(p.settled(count).files(count) for p in plan_arrays(schema, options)[0]) > 1
    assert actual < payload + entries + 8192 + (16 << 16) * full
    assert actual <= ZARR.plan(schema, options, count, payload).nbytes < 2 * actual + 8192
    assert unit == ZARR.create(tmp_path / "e", schema, count, options, None).unit
    with opened(tmp_path / "d") as source:
        assert_same_batch(source.read(3, 17), take(batch, 3, 17), schema)
    root = zarr.open_group(tmp_path / "d", mode="r")
    assert np.array_equal(root["x"][5:9].view("u4"), batch["x"][5:9].view("u4"))


def test_a_plan_claims_no_more_samples_than_it_knows_of() -> None:
    schema = Schema((Field("x", F4, (150,)), Field("r", F4, (None,))))
    texts = ZARR.plan(schema, WriteOptions()).stored
    assert "chunks of up to 256 samples, shards of up to " in texts["x"]
    assert "chunks of up to 65,536 rows" in texts["r"]


def test_small_fields_do_not_make_small_files(tmp_path: Path) -> None:
    schema = Schema((Field("x", F4, (256, 256)), Field("y", np.dtype("<i8"))))
    options = WriteOptions(compress=Compression("zstd"))
    plans, unit = plan_arrays(schema, options)
    assert unit * schema.fixed_nbytes <= 64 << 20
    assert [p.whole for p in plans] == [True, False]
    assert plans[0].file == unit
    assert plans[1].file * 8 == 64 << 20


@pytest.mark.parametrize(
    "options",
    [
        WriteOptions(zarr_format=1),
        WriteOptions(chunk=0),
        WriteOptions(chunk=4, zarr_shard=6),
        WriteOptions(zarr_format=2, zarr_shard=8),
        WriteOptions(zarr_shard=-1),
        WriteOptions(compress=Compression("zlib")),
        WriteOptions(key_format="{index}"),
    ],
)
def test_options_that_contradict_are_refused(options: WriteOptions) -> None:
    with pytest.raises(UsageError):
        ZARR.plan(SCHEMAS["mixed"], options)


@pytest.mark.parametrize(
    "names",
    [("a", "a/b"), ("..",), ("a//b",), ("/a",), ("zarr.json",), ("__x",), ("a\\b",), ("x" * 256,)],
)
def test_names_that_zarr_cannot_hold_are_refused(names: tuple[str, ...]) -> None:
    schema = Schema(tuple(Field(n, F4) for n in names))
    with pytest.raises(UnsupportedError):
        ZARR.plan(schema, WriteOptions())


def test_a_subarray_dtype_without_stand_in_is_refused() -> None:
    with pytest.raises(UnsupportedError):
        ZARR.plan(Schema((Field("x", np.dtype((F4, (2,)))),)), WriteOptions())


@pytest.mark.parametrize("target", ["d.zarr", "d.zarr.zip"])
def test_loading_code_runs(tmp_path: Path, target: str) -> None:
    schema = Schema(
        (
            *SCHEMAS["mixed"],
            Field("b", np.dtype(ml_dtypes.bfloat16), (3,)),
            Field("s", np.dtype("S4"), (2,)),
            Field("nothing", STRUCT, (0, 2)),
        )
    )
    batch = random_batch(schema, 3)
    write_batch(ZARR, tmp_path / target, schema, batch)
    with opened(tmp_path / target) as source:
        code = source.loading_code()
        first = source[0]
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    lines = run.stdout.splitlines()
    assert len(lines) == len(schema)
    for f, line in zip(schema, lines, strict=True):
        value = first[f.name]
        kinds = {"bytes": "bytes", "str": "str"}
        shown = f"{value.dtype} {value.shape}" if f.kind == "array" else kinds[f.kind]
        assert line.startswith(f"{f.name} {shown}")


def test_importing_the_format_loads_no_library() -> None:
    code = (
        "import sys; from pathlib import Path; from dsprep.formats import load;"
        "z = load('zarr'); z.recognises(Path('/'));"
        "print({'zarr', 'numcodecs', 'ml_dtypes', 'google_crc32c'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
    assert by_suffix(Path("a.ZARR")) is ZARR


@pytest.mark.parametrize("codec", [None, Compression("zstd")])
def test_many_threads_write_what_one_does(tmp_path: Path, codec: Compression | None) -> None:
    options = WriteOptions(compress=codec, chunk=4, zarr_shard=12)
    schema, count = SCHEMAS["mixed"], 300
    batch = random_batch(schema, count)
    write_batch(ZARR, tmp_path / "one", schema, batch, options)
    writer = ZARR.create(tmp_path / "many", schema, count, options, None)
    edges = range(0, count, writer.unit * 2)
    turn, lock = itertools.count(), threading.Condition()
    at = next(turn)

    def work(number: int) -> None:
        nonlocal at
        a = edges[number]
        piece = writer.encode(take(batch, a, min(count, a + writer.unit * 2)), a, Arena())
        with lock:
            lock.wait_for(lambda: at == number)
            writer.reserve(piece)
            at = next(turn)
            lock.notify_all()
        writer.write(piece)
        writer.sync()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(len(edges))))
    writer.finish()
    assert contents(tmp_path / "many") == contents(tmp_path / "one")


def test_samples_of_50_megabytes_and_of_8_bytes(tmp_path: Path) -> None:
    large = Schema((Field("x", F4, (13_000_000,)),))
    value = np.arange(13_000_000, dtype=F4)[None]
    for codec in (None, Compression("blosc")):
        write_batch(ZARR, tmp_path / "l", large, {"x": value}, WriteOptions(compress=codec))
        with opened(tmp_path / "l") as source:
            assert np.array_equal(source[:]["x"], value)
    small = Schema((Field("y", np.dtype("<i8")),))
    values = np.arange(300_000)
    write_batch(ZARR, tmp_path / "s", small, {"y": values}, cuts=(7, 99_999, 200_001))
    with opened(tmp_path / "s") as source:
        assert np.array_equal(source.read(32_767, 299_999)["y"], values[32_767:299_999])
    assert len(contents(tmp_path / "s")) == 3
