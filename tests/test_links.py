"""Symbolic links lead out of the directory of a dataset only where the user allows it."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import zarr
from image_files import png
from support import cli, cli_error, random_batch, written

import dsprep
from dsprep.core.schema import Field, Schema
from dsprep.errors import DsprepError, FormatError
from dsprep.formats.options import OpenOptions
from dsprep.sidecar import spec
from dsprep.sidecar.sidecar import Sidecar

SCHEMA = Schema((Field("x", np.dtype("<i2"), (4, 3)), Field("y", np.dtype("<i8"))))
FOLLOW = OpenOptions(follow_external=True)
OUT = "leads out of the directory"


def replace_by_link(file, folder):
    """Move a file of a dataset to another directory, and leave a link; it is as old as before."""
    folder.mkdir(exist_ok=True)
    shutil.move(file, folder / file.name)
    file.symlink_to(folder / file.name)


@pytest.mark.parametrize("to", ["hdf5", "lmdb", "tfrecord", "zarr"])
def test_links_of_a_sidecar(to, tmp_path):
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "set"
    batch = random_batch(SCHEMA, 20)
    written(path, SCHEMA, batch, to=to, shard_size=10)
    last = sorted(path.iterdir())[-1]
    replace_by_link(last, path / "below")
    with Sidecar.open(path) as opened:
        assert len(opened.read(slice(None))["y"]) == 20
    beside = tmp_path / "in" / "beside"
    shutil.move(path / "below", beside)
    last.unlink()
    last.symlink_to(beside / last.name)
    with Sidecar.open(path) as opened, pytest.raises(FormatError, match=OUT) as caught:
        opened.read(slice(None))
    assert "--follow-external" in str(caught.value)
    with pytest.raises(DsprepError, match=OUT), dsprep.Reader(path, batch_size=4) as reader:
        list(reader)
    with Sidecar.open(path, follow_external=True) as opened:
        with dsprep.Reader(opened, batch_size=4) as reader:
            assert sum(len(b["y"]) for b in reader) == 20
        np.testing.assert_array_equal(opened.read(slice(None))["y"], batch["y"])


@pytest.mark.parametrize("codec", ["plain", "only zarr reads"])
@pytest.mark.parametrize("what", ["c/1/0", "c/1", "zarr.json"])
def test_links_of_a_zarr_tree(what, codec, tmp_path):
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.zarr"
    root = zarr.create_group(path)
    x = np.arange(40, dtype="<i4").reshape(10, 4)
    filters = None if codec == "plain" else [zarr.codecs.TransposeCodec(order=(1, 0))]
    root.create_array("x", data=x, chunks=(5, 4), compressors=None, filters=filters or "auto")
    target = path / "x" / what
    replace_by_link(target, tmp_path / "out")
    with pytest.raises(FormatError, match=OUT), dsprep.open(path) as source:
        source.read(0, 10)
    with dsprep.open(path, FOLLOW) as source:
        np.testing.assert_array_equal(source.read(0, 10)["x"], x)
    assert "--follow-external" in cli_error("convert", path, tmp_path / "b.h5")
    cli("convert", path, tmp_path / "b.h5", "--follow-external")
    with dsprep.open(tmp_path / "b.h5") as source:
        np.testing.assert_array_equal(source.read(0, 10)["x"], x)


def test_links_of_a_folder_of_images(tmp_path):
    """They lead below the folder that is named, or to the blobs of a snapshot of the hub."""
    hub = tmp_path / "datasets--a--b"
    root = hub / "snapshots" / "1f"
    (hub / "blobs").mkdir(parents=True)
    (root / "a").mkdir(parents=True)
    for i in range(2):
        (hub / "blobs" / str(i)).write_bytes(png(i))
        (root / "a" / f"{i}.png").symlink_to(f"../../../blobs/{i}")
    for named in (root, root / "a"):
        dsprep.provenance(named, options=OpenOptions(labels="none"))
        with dsprep.Reader(named, 2, shuffle="none") as reader:
            assert [list(batch["image"]) for batch in reader] == [[png(0), png(1)]]
        spec.sidecar_path(named).unlink()
    link = root / "a" / "2.png"
    for target in (hub / "2", hub / "snapshots" / "2", root / "2"):
        target.write_bytes(png(2))
        link.symlink_to(target)
        with pytest.raises(FormatError, match=OUT), dsprep.open(root / "a"):
            pass
        link.unlink()
