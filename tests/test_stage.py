"""What is staged is all that a node reads, and no more: Readers open no data file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import cli, cli_error, flip, random_batch, written

import dsprep
from dsprep.cache.folder import CacheFolder
from dsprep.core.schema import Field, Schema
from dsprep.errors import TargetError
from dsprep.reader.mini_epochs import MiniEpochs
from dsprep.reader.order import REMAINDERS, Assignment, Start
from dsprep.verbs.stage.needs import groups_needed, ranks_of

COUNT, GROUP, RANKS, BATCH = 100, 8, 4, 5
FIXED = Schema((Field("x", np.dtype("<f4"), (40, 30)), Field("y", np.dtype("<i8"))))
RAGGED = Schema((Field("points", np.dtype("<f4"), (None, 3)), *FIXED, Field.opaque("name", "str")))

GROUPED = {"buffer_size": GROUP, "stripe_size": "4KiB", "durable": False, "measure": False}
CASES = {
    "out.h5": (FIXED, GROUPED),
    "out.lmdb": (FIXED, GROUPED),
    "out.zarr": (FIXED, GROUPED),
    "ragged.h5": (RAGGED, GROUPED),
    "ragged.zarr": (RAGGED, GROUPED),
    "packed.zarr": (FIXED, {**GROUPED, "compress": "zstd"}),
    "files": (FIXED, {**GROUPED, "to": "tfrecord", "shard_size": 24}),
    "plain.h5": (FIXED, {}),
    "plain.lmdb": (RAGGED, {}),
}
"""Datasets by name: with groups, in all formats, or as `convert` writes them."""

ENGINES = {"out.zarr": {"engine": "direct"}}
"""Others than the default, by the name of the dataset."""

READERS = """
import hashlib, json, sys, warnings
import dsprep

warnings.simplefilter("error")
root, cases = sys.argv[1], json.loads(sys.argv[2])
opened, below = [], [None]


def note(event, arguments):
    if event == "open" and below[0] and str(arguments[0]).startswith(below[0]):
        opened.append(str(arguments[0]).removeprefix(root + "/"))


def read(reader, state):
    for _ in range(2):
        for batch in reader:
            for name, column in batch.items():
                values = getattr(column, "values", column)
                lengths = getattr(column, "lengths", values[:0])
                state.update(values.tobytes() + lengths.tobytes())
    return state.hexdigest()


sys.addaudithook(note)
for name, options in cases.items():
    path, found = f"{root}/{name}", {"same": True, "copied": 0, "missed": 0}
    for rank in (2, 3):
        more = {"rank": rank, "world_size": 4, "epochs": 2, **options}
        below[0] = path
        with dsprep.Reader(path, 5, cache=f"{root}/cache", **more) as reader:
            sums = [read(reader, hashlib.sha256())]
            found["copied"] += sum(e.copied_nbytes for e in reader.stats)
            found["missed"] += sum(e.units - e.cache_units for e in reader.stats)
        below[0] = None
        with dsprep.Reader(path, 5, **more) as reader:
            found["same"] &= read(reader, hashlib.sha256()) == sums[0]
    print(json.dumps([name, {**found, "opened": sorted(set(opened))}]))
    opened.clear()
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("stage")
    for number, schema in enumerate((FIXED, RAGGED)):
        written(root / f"in{number}.h5", schema, random_batch(schema, COUNT, seed=number))
    return root


def made(root: Path, name: str) -> Path:
    """One of the datasets of `CASES`."""
    schema, options = CASES[name]
    if not (root / name).exists():
        source = root / f"in{int(schema is RAGGED)}.h5"
        if "buffer_size" in options:
            dsprep.repack(source, root / name, **options)
        else:
            dsprep.convert(source, root / name, durable=False, **options)
            dsprep.provenance(root / name)
    return root / name


def order_of(name: str) -> dict:
    """Options of the order; without groups so many samples are read at a time."""
    return {"seed": 3, **({} if "buffer_size" in CASES[name][1] else {"buffer_size": GROUP})}


def staged(path: Path, cache: Path | None, **options):
    """Stage what the second node of two reads in two epochs."""
    options = {"ranks_per_node": 2, "node": 1, "epochs": 2, "seed": 3, **options}
    return dsprep.stage(path, RANKS, BATCH, cache, **options)


def copy_of(cache: Path):
    """What is known of the only copy in a cache."""
    (info,) = CacheFolder(cache).infos()
    return info


# --- what is read ------------------------------------------------------------------------------


def test_readers_of_what_is_staged_open_no_data_file(root):
    """All ranks of the node, two epochs: the same batches, and the sidecar alone is opened."""
    for name in CASES:
        found = staged(made(root, name), root / "cache", **order_of(name))
        assert 0 < found.groups < found.total
        assert (found.outcome.there, found.outcome.copied) == (0, found.nbytes)
    cases = json.dumps({name: {**order_of(name), **ENGINES.get(name, {})} for name in CASES})
    command = [sys.executable, "-P", "-c", READERS, str(root), cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = dict(map(json.loads, done.stdout.splitlines()))
    assert list(found) == list(CASES)
    for name, facts in found.items():
        sidecar = f"{name}.dsprep.json"
        assert facts == {"same": True, "copied": 0, "missed": 0, "opened": [sidecar]}, name


def test_data_that_changed_since_are_refused(root, tmp_path):
    """As without a cache; other time stamps are no change."""
    path = tmp_path / "out.h5"
    dsprep.repack(root / "in0.h5", path, **GROUPED)
    staged(path, tmp_path / "cache")
    options = {"seed": 3, "rank": 2, "world_size": 4, "cache": tmp_path / "cache"}
    with dsprep.Reader(path, BATCH, **options) as reader:
        os.utime(path)
        list(reader)
    flip(path, path.stat().st_size - 1)
    with pytest.raises(dsprep.StaleError):
        dsprep.Reader(path, BATCH, **options)


def test_a_mini_epoch_is_staged_whole(root, tmp_path):
    path = made(root, "out.h5")
    found = staged(path, tmp_path, ranks_per_node=4, node=0, epochs=1, mini_epochs=3)
    info = copy_of(tmp_path)
    assert info.part
    assert (info.pieces, info.ready) == (found.groups, found.groups)
    options = {"mini_epochs": 3, "repeats": 2, "seed": 3, "cache": tmp_path, "world_size": 4}
    with dsprep.Reader(path, BATCH, rank=3, **options) as reader:
        list(reader)
        assert reader.stats[0].cache_units == reader.stats[0].units > 0


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=30),
    st.sampled_from(["group", "none", "global"]),
    st.sampled_from(REMAINDERS),
    st.tuples(st.integers(1, 7), st.integers(1, 3), st.integers(1, 6), st.integers(1, 4)),
    st.integers(0, 99),
    st.sampled_from([None, 1, 2]),
)
def test_what_is_needed_is_what_readers_read(sizes, shuffle, remainder, numbers, seed, parts):
    ranks, per_node, batch, mixed = numbers
    edges = np.cumsum([0, *sizes])
    mini = (
        MiniEpochs(parts, (1,)) if parts and parts <= len(sizes) and shuffle != "global" else None
    )
    order = Assignment(edges, shuffle, seed, mixed, remainder, ranks, batch, mini)
    for node in range(-(-ranks // per_node)):
        chosen = ranks_of(node, ranks, per_node)
        found = groups_needed(order, chosen, range(1, 3)).tolist()
        assert len(set(found)) == len(found)
        used: dict[int, tuple[int, int]] = {}
        for epoch in (1, 2):
            for rank in chosen:
                segment = order.segment(rank, Start(epoch, (), 0, 1))
                at = 0
                for unit in segment.epoch.units(segment.share):
                    samples = segment.epoch.sequence.samples(unit.start, unit.stop)
                    for sample in samples.tolist():
                        piece = int(np.searchsorted(edges, sample, "right")) - 1
                        used[piece] = min(used.get(piece, (epoch, at)), (epoch, at))
                        at += 1
        if shuffle == "global":
            assert set(found) >= set(used)
        else:
            assert set(found) == set(used)
            assert [used[piece] for piece in found] == sorted(used.values())


# --- copying -----------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from dsprep.cache.copier import Copier
import dsprep

copy_piece, left = Copier.copy_piece, [int(sys.argv[3])]


def killed(*arguments):
    copy_piece(*arguments)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)


Copier.copy_piece = killed
more = {"mini_epochs": int(sys.argv[4])} if sys.argv[4:] else {}
same = {"ranks_per_node": 2, "node": 1, "epochs": 2, "seed": 3, "threads": 1}
dsprep.stage(sys.argv[1], 4, 5, sys.argv[2], **same, **more)
"""


def test_what_a_killed_run_has_copied_stays(root, tmp_path):
    path = made(root, "out.h5")
    command = [sys.executable, "-P", "-c", KILLED, str(path), str(tmp_path), "3"]
    assert subprocess.run(command, timeout=240).returncode == -signal.SIGKILL
    assert (copy_of(tmp_path).ready, copy_of(tmp_path).complete) == (3, False)
    found = staged(path, tmp_path)
    assert 0 < found.outcome.there < found.nbytes / 2
    assert found.outcome.there + found.outcome.copied == found.nbytes
    assert copy_of(tmp_path).complete
    assert staged(path, tmp_path).outcome.copied == 0


def test_what_does_not_fit_is_said_beforehand(root, tmp_path):
    path, cache = made(root, "out.h5"), tmp_path / "cache"
    for dry_run in (True, False):
        with pytest.raises(TargetError, match=r"368.6 kB are needed.* may take [\d.]+ kB more"):
            staged(path, cache, cache_size=120_000, dry_run=dry_run)
        assert cache.exists() is not dry_run
    assert not copy_of(cache).ready
    found = staged(path, cache, cache_size=120_000, partial=True)
    assert copy_of(cache).ready in (1, 2)  # the tables of a copy take some
    assert found.outcome.copied + found.outcome.left_out == found.nbytes
    planned = staged(path, cache, cache_size=300_000, partial=True, dry_run=True).outcome
    assert staged(path, cache, cache_size=300_000, partial=True).outcome == planned
    assert planned.there == found.outcome.copied


def test_what_does_not_have_its_checksum_is_not_staged(root, tmp_path):
    path = tmp_path / "out.h5"
    dsprep.repack(root / "in0.h5", path, **GROUPED)
    with dsprep.Sidecar.open(path) as sidecar:
        at = int(sidecar.locate(50, "x")[2][0])
    flip(path, at + 99, keep_time=True)
    words = ["-P", 1, "--ranks-per-node", 1, "-M", 5, "--to", tmp_path / "cache"]
    assert "their CRC-32C is" in cli_error("stage", path, *words)
    assert copy_of(tmp_path / "cache").ready == 12
    flip(path, at + 99, keep_time=True)
    assert "38.5 kB" in cli("stage", path, *words).out.partition("copied")[2]


# --- the manifest and the command --------------------------------------------------------------


def words(path: Path, *more: object) -> list[object]:
    return ["stage", path, "-P", 4, "--ranks-per-node", 2, "-M", 5, *more]


def test_a_manifest_lists_the_ranges_in_their_order(root, tmp_path):
    path, file = made(root, "out.h5"), tmp_path / "m.jsonl"
    found = json.loads(cli(*words(path, "--node", 1, "--manifest", file, "--json")).out)
    header, *lines = map(json.loads, file.read_text().splitlines())
    assert header["dataset"] == str(path)
    assert (header["world_size"], header["ranks"], header["epochs"]) == (4, [2, 4], [0, 1])
    assert (header["lines"], header["nbytes"]) == (len(lines), found["nbytes"])
    assert sum(line["length"] for line in lines) == found["nbytes"]
    assert found["outcome"] is None
    order = Assignment(np.append(np.arange(0, COUNT, GROUP), COUNT), "group", 0, 1, "ragged", 4, 5)
    assert [line["group"] for line in lines] == groups_needed(order, range(2, 4), range(1)).tolist()
    with dsprep.Sidecar.open(path) as sidecar:
        groups = sidecar.layout(0).groups
        for line in lines:
            assert line["offset"] == groups.blocks.offsets.one(line["group"])
    assert {line["file"] for line in lines} == {"out.h5"}
    assert file.stat().st_size / (len(lines) + 1) < 250
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.jsonl"]


def test_a_manifest_replaces_nothing_else(root, tmp_path):
    file = tmp_path / "m.jsonl"
    file.write_text("mine")
    told = cli_error(*words(made(root, "out.h5"), "--all", "--manifest", file))
    assert ("is not a manifest" in told, file.read_text()) == (True, "mine")
