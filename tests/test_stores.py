"""Datasets in a store that has no file system: nothing that reads them assumes a path."""

from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest
from image_files import fill
from memory_store import MemoryFile, MemoryStore
from netcdf_files import Classic, Var
from sample_files import COUNT, FORMS, make
from support import assert_same_batch, fails, take

import dsprep
from dsprep.errors import ChangedError, UnsupportedError, UsageError
from dsprep.sidecar.sidecar import Sidecar, StaleError
from dsprep.source.dataset import open_dataset
from dsprep.storage import paths
from dsprep.verbs.verify import verify

RNG = np.random.default_rng(5)
X, Y = RNG.integers(0, 99, (COUNT, 6)).astype("<i4"), np.arange(COUNT)


def archive(path):
    np.savez(path, x=X, y=Y)


def netcdf(path):
    Classic({"x": Var(X.astype(">i4"), ("records", "c"))}).write(path)


def shard(path):
    with tarfile.open(path, "w") as target:
        for i in range(COUNT):
            for suffix, data in (("cls", str(i % 4).encode()), ("bin", X[i].tobytes())):
                info = tarfile.TarInfo(f"s{i:04}.{suffix}")
                info.size = len(data)
                target.addfile(info, io.BytesIO(data))


def images(path):
    fill(path, *(f"{i}.png" for i in range(COUNT)))


def table(path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"x": pyarrow.FixedSizeListArray.from_arrays(X.reshape(-1), 6), "y": Y}
    parquet.write_table(pyarrow.table(columns), path)


OTHERS = {"a.npz": archive, "c.nc": netcdf, "d.tar": shard, "images": images, "e.parquet": table}
UNLOCATED = {("tfrecord", ".tfrecord", "compressed"), "e.parquet"}


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(paths, "_stores", dict(paths._stores))
    made = MemoryStore()
    paths.register("memory", made)
    return made


@pytest.fixture(params=[*FORMS, *OTHERS], ids=lambda form: "".join(form))
def dataset(request, tmp_path, store):
    """A dataset on the disk, its name in the store, and whether its samples have offsets."""
    if isinstance(request.param, str):
        path = tmp_path / request.param
        OTHERS[request.param](path)
    else:
        path = make(request.param, tmp_path)
    for each in tmp_path.glob(f"{path.name}*"):
        store.add(each)
    return path, f"memory://{path.name}", request.param not in UNLOCATED


def test_everything_that_reads(dataset, store, tmp_path, monkeypatch):
    path, name, located = dataset
    monkeypatch.chdir(tmp_path)  # a name taken for a path would lead there
    with open_dataset(path, through="library") as local, open_dataset(name) as remote:
        expected, schema = local[:], local.schema
        assert remote.schema == schema
        assert_same_batch(remote[:], expected, schema)
        assert dsprep.inspect(remote).samples == len(local)
        verdict = verify(local, remote)
        assert (verdict.compared, verdict.differing, verdict.problems) == (len(local), 0, ())
    done = dsprep.convert(name, tmp_path / "out.h5", durable=False)
    with open_dataset(tmp_path / "out.h5") as written:
        assert_same_batch(written[:], expected, written.schema)
    assert done.samples == COUNT
    if not located:
        fails(lambda: dsprep.provenance(name), UnsupportedError)
        return
    dsprep.provenance(name, checksums=True)
    assert f"{path.name}.dsprep.json" in store.files
    with Sidecar.open(name) as sidecar:
        assert_same_batch(sidecar.read(slice(3, 30)), take(expected, 3, 30), schema)
        sidecar.check()
    store.reads = 0
    with dsprep.Reader(name, batch_size=7, seed=1) as reader:
        assert sum(len(next(iter(batch.values()))) for batch in reader) == COUNT
    assert store.reads
    assert not (tmp_path / "memory:").exists()


def test_other_data_of_the_same_name_are_refused(store, tmp_path):
    path = make(FORMS[0], tmp_path)
    store.add(path)
    name = f"memory://{path.name}"
    dsprep.provenance(name)
    opened = MemoryFile(store, path.name, name)
    data = bytearray(path.read_bytes())
    with Sidecar.open(name) as sidecar, open_dataset(name, through="library") as source:
        at = sidecar.extents([0])[0]
        data[at.offset] ^= 1
        path.write_bytes(data)
        store.add(path)
        fails(lambda: opened.check_same(), ChangedError)
        with pytest.raises((ChangedError, StaleError)):
            sidecar.read([0])
        with pytest.raises(ChangedError):
            source[:]


def test_names_that_no_store_has(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fails(lambda: dsprep.open("nfs://a/b.h5"), UsageError, "nfs:// is not a kind of store")
    with pytest.raises(FileNotFoundError):
        dsprep.open("memory://missing.h5")
    np.save(tmp_path / "x.npy", X)
    with pytest.raises(UsageError, match="HTTP servers are only read"):
        dsprep.convert(tmp_path / "x.npy", "https://host/out.h5")
    assert [p.name for p in tmp_path.iterdir()] == ["x.npy"]


def test_paths_of_stores(store):
    path = paths.as_path("memory://a/b/c.h5")
    assert str(path) == f"{path}" == "memory://a/b/c.h5"
    assert (path.name, str(path.parent), path.key) == ("c.h5", "memory://a/b", "a/b/c.h5")
    assert str(path.with_name("d") / "e") == "memory://a/b/d/e"
    assert path.absolute() == path.resolve() == path
    assert [str(p) for p in path.parents] == ["memory://a/b", "memory://a"]
    others = [paths.as_path(f"memory://a/{n}") for n in ("x/1", "x/2")]
    assert str(paths.common_path(others)) == "memory://a/x"
    assert not path.exists()
    fails(lambda: path.open("w"), UsageError, "only read")
