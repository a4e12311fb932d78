"""What the Reader and its like take as a dataset: lists, globs, files that have no sidecar."""

from __future__ import annotations

import io
import json
import multiprocessing
import pickle
import warnings
from dataclasses import replace

import h5py
import numpy as np
import pytest
from support import cli, fails, reading

import dsprep
from dsprep.errors import DsprepError, FormatError, LocatedWarning, SchemaError, UsageError
from dsprep.reader import data
from dsprep.sidecar import spec
from dsprep.sidecar.sidecar import MissingError, StaleError

EACH = 10

pytestmark = pytest.mark.filterwarnings("ignore::dsprep.errors.LocatedWarning")


@pytest.fixture(autouse=True)
def notes(monkeypatch):
    """Notes appear once in a process."""
    monkeypatch.setattr(data, "_noted", set())


def numbered(path, i, values=EACH):
    """Write file number i: samples i * 10 .. i * 10 + values."""
    x = np.arange(i * EACH, i * EACH + values, dtype=np.int64)
    y = np.repeat(x.astype(np.float32)[:, None], 3, axis=1)
    if path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            file["x"], file["y"] = x, y
    else:
        dsprep.write(path, ({"x": a, "y": b} for a, b in zip(x, y, strict=True)), overwrite=True)
    return path


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "d").mkdir()
    return [numbered(tmp_path / f"d/f{i}.h5", i) for i in range(4)]


def values(reader):
    """Return x of all samples of an epoch, of which y has to be the same."""
    found = []
    for batch in reader:
        x, y = (np.asarray(batch[name]) for name in ("x", "y"))
        assert (y == x[:, None]).all()
        found += x.tolist()
    return found


def expected(*files):
    return [i * EACH + k for i in files for k in range(EACH)]


# --- lists -----------------------------------------------------------------------------------


def test_a_list_a_glob_and_a_listing_are_read_in_their_order(folder, tmp_path):
    dsprep.provenance(tmp_path / "d")
    listing = tmp_path / "some.txt"
    listing.write_text("d/f3.h5\nd/f0.h5\n")
    directory = tmp_path / "d"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given, files in (
            ([folder[2], str(folder[0])], (2, 0)),
            (f"{directory}/f[13].h5", (1, 3)),
            (f"{directory}/f{{3..1}}.h5", (3, 2, 1)),
            (f"@{listing}", (3, 0)),
            ([f"{directory}/f[01].h5", folder[3]], (0, 1, 3)),
            (folder[1], (1,)),
            ([directory], (0, 1, 2, 3)),
        ):
            with dsprep.Reader(given, 4, shuffle="none") as reader:
                assert values(reader) == expected(*files)
                assert values(pickle.loads(pickle.dumps(reader))) == expected(*files)


@pytest.mark.parametrize("suffix", [".h5", ".tfrecord", ".lmdb", ".zarr"])
def test_files_with_sidecars_of_their_own_are_joined(tmp_path, suffix):
    rng, files, ragged = np.random.default_rng(1), [], []
    for i in range(3):
        ragged.append([rng.integers(0, 99, (int(n), 2)) for n in rng.integers(1, 9, 700)])
        files.append(tmp_path / f"part{i}{suffix}")
        samples = ({"x": np.uint16(k), "r": row} for k, row in enumerate(ragged[-1]))
        schema = {"x": "uint16", "r": "int64[None,2]"}
        dsprep.write(files[-1], samples, schema=schema, buffer_size="100")
    with dsprep.Reader([files[2], files[0]], 64, shuffle="none", verify=True) as reader:
        assert reader._sidecar.schema["x"].dtype == np.uint16
        rows = [row for batch in reader for row in batch["r"]]
    assert all(map(np.array_equal, rows, ragged[2] + ragged[0]))
    assert len(rows) == 1400


def test_files_that_do_not_go_together(tmp_path):
    a, b = (numbered(tmp_path / f"{i}.h5", i) for i in range(2))
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file["z"] = np.zeros(5)
    dsprep.provenance(a)
    with pytest.raises(UsageError, match=r"1\.h5: it has no sidecar, and 1 of .*provenance"):
        dsprep.Reader([a, b], 4)
    dsprep.provenance(tmp_path / "c.h5")
    with pytest.raises(SchemaError, match="files disagree about their fields"):
        dsprep.Reader([a, tmp_path / "c.h5"], 4)
    with pytest.raises(FormatError, match="mixes formats"):
        dsprep.Reader([a, numbered(tmp_path / "d.tfrecord", 3)], 4)
    dsprep.provenance(b, dsprep.OpenOptions(fields=(dsprep.FieldSpec("x", "x"),)))
    fails(lambda: dsprep.Reader([a, b], 4), SchemaError, "disagree")
    for wrong in ([], None, [1], 3):
        fails(lambda: dsprep.Reader(wrong, 4), UsageError, "expected a path, or a list of paths")
    fails(lambda: dsprep.Reader(f"{tmp_path}/*.none", 4), UsageError, "nothing matches")
    fails(lambda: dsprep.Reader(tmp_path / "none.h5", 4), MissingError, "no such dataset")


def test_a_sidecar_elsewhere_and_a_list(folder, tmp_path):
    dsprep.provenance(folder[:3], out=tmp_path / "F.dsprep.json")
    at = tmp_path / "F.dsprep.json"
    for given, files in ((folder[:3], (0, 1, 2)), (folder[1:2] + folder[:1], (1, 0))):
        with dsprep.Reader(at, 4, data=given, shuffle="none") as reader:
            assert values(reader) == expected(*files)
    fails(lambda: dsprep.Reader(at, 4, data=folder), FormatError, "does not list this file")
    assert dsprep.audit(folder[:3], 2, 4, sidecar=at).kept


def test_other_apis_take_lists_and_the_same_subset(folder, tmp_path):
    some, subset = folder[1:3], "x % 2 == 0"
    want = [v for v in expected(1, 2) if v % 2 == 0]
    dsprep.provenance(tmp_path / "d")
    assert values(dsprep.Reader(some, 4, subset=subset, shuffle="none")) == want
    report = dsprep.audit(some, 2, 4, subset=subset)
    assert (report.samples, report.kept) == (10, True)
    staged = dsprep.stage(some, 2, 4, tmp_path / "tier", ranks_per_node=2, subset=subset)
    assert staged.outcome.copied > 0
    dsprep.repack(some, tmp_path / "out.h5", subset=subset, buffer_size="4")
    assert values(dsprep.Reader(tmp_path / "out.h5", 4, shuffle="none")) == want
    assert "kept" in cli("audit", *some, "-P", 2, "-M", 4, "--subset", subset, "--json").out


# --- caches and states -----------------------------------------------------------------------


def test_copies_and_states_of_other_lists_are_never_taken(folder, tmp_path):
    dsprep.provenance(tmp_path / "d")
    lists = (folder[:2], folder[1:3], folder[1::-1], folder, folder[::-1])
    states, cache = [], tmp_path / "cache"
    for _ in range(2):
        for given, files in zip(
            lists, ((0, 1), (1, 2), (1, 0), (0, 1, 2, 3), (3, 2, 1, 0)), strict=True
        ):
            with dsprep.Reader(given, 4, cache=cache, shuffle="none") as reader:
                states.append(reader.state_dict())
                assert values(reader) == expected(*files)
    assert len([*cache.rglob("copy.json")]) == 5
    assert states[:5] == states[5:]
    for i, given in enumerate(lists):
        for k, state in enumerate(states[:5]):
            with dsprep.Reader(given, 4, shuffle="none") as reader:
                if i == k:
                    reader.load_state_dict(state)
                    continue
                fails(lambda: reader.load_state_dict(state), UsageError)


# --- no sidecar ------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".h5", ".tfrecord"])
def test_a_sidecar_is_written_where_there_is_none(tmp_path, suffix):
    path = numbered(tmp_path / f"a{suffix}", 0)
    beside = tmp_path / f"a{suffix}.dsprep.json"
    beside.unlink(missing_ok=True)
    with pytest.warns(LocatedWarning, match="there was no sidecar; wrote") as noted:
        reader = dsprep.Reader(path, 4)
    assert len(noted) == 1
    assert reader._sidecar.kept
    assert len(reader) == 3
    assert [f["samples"] for f in json.loads(beside.read_text())["files"]] == [EACH]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dsprep.Reader(path, 4)


def test_a_directory_gets_a_sidecar_and_files_of_it_do_not(folder, tmp_path):
    beside, directory = tmp_path / "d.dsprep.json", tmp_path / "d"
    for given, files in ((f"{directory}/f[12].h5", (1, 2)), (folder[::-1], (3, 2, 1, 0))):
        with pytest.warns(LocatedWarning, match=r"in memory each time .*dsprep provenance .*--out"):
            reader = dsprep.Reader(given, 4, shuffle="none")
        assert not beside.exists()
        assert values(reader) == expected(*files)
        assert values(pickle.loads(pickle.dumps(reader))) == values(
            dsprep.Reader(given, 4, **PLAIN)
        )
    with pytest.warns(LocatedWarning, match="wrote"):
        reader = dsprep.Reader(directory, 4, shuffle="none")
    assert values(reader) == expected(0, 1, 2, 3)
    assert beside.exists()


PLAIN = {"shuffle": "none"}


def test_where_no_sidecar_may_be_written(folder, tmp_path, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("dsprep.sidecar.spec.write", refused)
    with pytest.warns(LocatedWarning, match=r"in memory each time \(.*Permission denied\)"):
        reader = dsprep.Reader(tmp_path / "d", 4, cache=tmp_path / "cache", **PLAIN)
    assert values(reader) == expected(0, 1, 2, 3)
    reader.set_epoch(0)
    child = multiprocessing.get_context("fork").Process(target=_read, args=(reader,))
    child.start()
    child.join(600)
    assert child.exitcode == 0
    assert not (tmp_path / "d.dsprep.json").exists()
    before = reader.state_dict()
    monkeypatch.undo()
    dsprep.provenance(tmp_path / "d")
    dsprep.Reader(tmp_path / "d", 4, **PLAIN).load_state_dict(before)  # the same data


def _read(reader):
    monkey = pytest.MonkeyPatch()
    monkey.setattr(data, "locate_files", None)  # a fork has what its parent located
    assert values(reader) == expected(0, 1, 2, 3)


def test_data_that_change_after_they_were_located_are_refused(folder):
    reader = dsprep.Reader(folder[:2], 4)
    numbered(folder[1], 7, values=12)
    fails(lambda: values(reader), StaleError, "changed since they were located: f1.h5")
    assert len(dsprep.Reader(folder[:2], 4)) == 6


def _rank(rank, path, barrier, queue):
    warnings.simplefilter("always")
    with warnings.catch_warnings(record=True) as noted:
        barrier.wait(600)
        reader = dsprep.Reader(path, 4, rank=rank, world_size=2)
        both = reader._sidecar.kept, reader._sidecar.stated
        notes = sum(issubclass(w.category, LocatedWarning) for w in noted)
        queue.put((rank, values(reader), both, notes))


def test_two_ranks_have_one_sidecar(tmp_path):
    (tmp_path / "d").mkdir()
    for i in range(4):
        numbered(tmp_path / f"d/f{i}.h5", i)
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(2), context.Queue()
    arguments = tmp_path / "d", barrier, queue
    ranks = [context.Process(target=_rank, args=(r, *arguments)) for r in range(2)]
    for process in ranks:
        process.start()
    results = sorted(queue.get(timeout=600) for _ in ranks)
    for process in ranks:
        process.join(600)
        assert process.exitcode == 0
    assert sorted(results[0][1] + results[1][1]) == expected(0, 1, 2, 3)
    assert results[0][2] == results[1][2] == (True, (tmp_path / "d.dsprep.json").read_bytes())
    assert results[1][3] == 0  # the notes are those of rank 0
    assert [p.name for p in tmp_path.iterdir() if ".tmp" in p.name] == []


def test_a_sidecar_whose_companion_is_there_first(folder, tmp_path, monkeypatch):
    made = dsprep.provenance(tmp_path / "d", write=False)
    companion = tmp_path / spec.companion_name(made.path)

    def locate(*_):
        companion.write_bytes(b"first")
        monkeypatch.setattr("time.sleep", lambda _: made.save(durable=False))
        return replace(made, companion=b"first")

    monkeypatch.setattr(data, "locate_files", locate)
    with data.open_data(tmp_path / "d", note=False) as opened:
        assert opened.kept


# --- loops that are left early ---------------------------------------------------------------


def left_early(batches, steps):
    loop = iter(batches)
    taken = [x for _ in range(steps) for x in np.asarray(next(loop)["x"]).tolist()]
    loop.close()
    return taken


def test_on_break(folder):
    make = {"seed": 3, "epochs": None}
    with dsprep.Reader(folder, 4, **make) as reader:
        orders = [values(reader) for _ in range(3)]
    with dsprep.Reader(folder, 4, on_break="restart", **make) as reader:
        for epoch in range(3):
            assert left_early(reader, 3) == orders[epoch][:12]
            state = json.loads(json.dumps(reader.state_dict()))
            assert reader.epoch == epoch + 1
    with dsprep.Reader(folder, 4, on_break="restart", **make) as reader:
        loop = iter(reader)
        next(loop), next(loop)
        within = reader.state_dict()
        loop.close()
        reader.load_state_dict(within)  # exact, to the batch
        assert values(reader) == orders[0][8:]
        assert values(reader) == orders[1]
        reader.load_state_dict(state)
        assert reader.epoch == 3
    with dsprep.Reader(folder, 4, **make) as reader:
        assert left_early(reader, 3) + values(reader) == orders[0]
    fails(lambda: dsprep.Reader(folder, 4, on_break="stop"), UsageError, "on_break is 'stop'")


def test_a_file_named_twice_odd_links_and_lists_with_a_mark(folder, tmp_path):
    (tmp_path / "d/loop.h5").symlink_to("loop.h5")
    again = tmp_path / "d" / ".." / "d" / folder[1].name
    fails(lambda: dsprep.Reader([folder[1], folder[0], again], 4), UsageError, "named twice")
    with dsprep.Reader(folder[2:], 4) as reader:  # the link beside them means nothing
        assert sorted(values(reader)) == [*range(20, 40)]
    (tmp_path / "list.txt").write_text("d/f0.h5\r\nd/f1.h5\r\n", "utf-8-sig")
    with dsprep.Reader(f"@{tmp_path}/list.txt", 4) as reader:
        assert sorted(values(reader)) == [*range(20)]


@pytest.mark.parametrize("path", ["", "a\0.h5", ["a.h5", ""]])
def test_what_is_not_a_path(path):
    fails(lambda: dsprep.Reader(path, 4), UsageError, "is not a path")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda d: dsprep.open([]), r"paths is \[\]"),
        (lambda d: dsprep.open(3), "paths is 3"),
        (lambda d: dsprep.provenance({}), "paths is {}"),
        (lambda d: dsprep.Reader([], 8), r"path is \[\]"),
        *(
            (lambda d, call=call: call(d.with_name("nothing")), "nothing: .*[Nn]o such")
            for call in (
                dsprep.open,
                dsprep.provenance,
                dsprep.check,
                dsprep.stats,
                lambda path: dsprep.Reader(path, 8),
                lambda path: dsprep.audit(path, 2, 8),
                lambda path: dsprep.convert(path, "y.h5"),
                lambda path: dsprep.open(f"@{path}"),
            )
        ),
        (lambda d: dsprep.open(d / "f0.h5" / "x"), "x: Not a directory"),
        (lambda d: dsprep.open(d.with_name("dd.h5")), r"did you mean d\.h5"),
        (lambda d: dsprep.verify("a", "b"), "'a' is not an opened dataset"),
        (lambda d: dsprep.inspect("a"), "'a' is not an opened dataset"),
        (lambda d: dsprep.repack(d, d / "y.h5", shuffle=-1), "shuffle is -1"),
        (lambda d: dsprep.repack(d, d / "y.h5", duplicate="2"), "duplicate is '2'"),
        (lambda d: dsprep.convert(d, d / "y.h5", shard_size=2.5), "2.5. is not understood"),
        (lambda d: dsprep.convert(d, d.with_name("y.h5"), workers=2.5), "2.5 workers"),
    ],
)
def test_wrong_arguments_of_functions_are_one_line(call, says, folder, tmp_path):
    (tmp_path / "d.h5").touch()
    with pytest.raises(DsprepError, match=says) as caught:
        call(tmp_path / "d")
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


NAMES = ("input:0", "a@b", "label=y", "x:int32@c", "plain")


@pytest.mark.parametrize("name", ["a.h5", "a.zarr", "a.tfrecord", "a.lmdb"])
def test_bytes_with_a_header_are_not_taken_for_values(tmp_path, name):
    path, field = tmp_path / name, "value" if name == "a.lmdb" else "x"
    values = []
    for i in range(3):
        data = io.BytesIO()
        np.save(data, np.full((300, 5), i, "<f4"))
        values.append(data.getvalue())
    dsprep.write(path, ({field: data} for data in values), length=3)
    path.with_name(f"{name}.dsprep.json").unlink()
    with pytest.raises((FormatError, UsageError), match="decoded in a transform="):
        dsprep.open(path, reading("x:float32[300,5]"))
    with pytest.raises(SchemaError, match="decoded in a transform="):
        dsprep.convert(path, tmp_path / "cast.h5", cast={field: "float32"})
