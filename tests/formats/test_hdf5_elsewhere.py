"""Values in other files are read from the file's own directory, or where the user allows others."""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
import pytest

import dsprep
from dsprep.core.schema import FieldSpec
from dsprep.errors import FormatError, SchemaError
from dsprep.formats.base import OpenOptions


def field(name: str) -> OpenOptions:
    return OpenOptions(fields=(FieldSpec.parse(name),))


X = np.arange(12, dtype="<i4").reshape(6, 2)


def write(kind: str, folder: Path, other: Path) -> Path:
    """Write a file whose field ``x`` lies in `other`, and return its path."""
    path = folder / "a.h5"
    folder.mkdir(exist_ok=True)
    other.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        file["y"] = np.arange(600.0).reshape(6, 100)
        if kind == "external":
            other.write_bytes(X.tobytes())
            file.create_dataset("x", X.shape, X.dtype, external=[(str(other), 0, X.nbytes)])
            return path
        with h5py.File(other, "w") as source:
            if kind == "chain":  # a virtual dataset of one in external storage
                raw = folder.parent / "far" / "raw"
                raw.parent.mkdir(exist_ok=True)
                raw.write_bytes(X.tobytes())
                source.create_dataset("d", X.shape, X.dtype, external=[(str(raw), 0, X.nbytes)])
            elif kind == "linked":
                with h5py.File(folder.parent / "far.h5", "w") as far:
                    far["d"] = X
                source["d"] = h5py.ExternalLink(str(folder.parent / "far.h5"), "d")
            else:
                source["d"] = X
        layout = h5py.VirtualLayout(X.shape, X.dtype)
        name = os.path.relpath(other, folder) if kind == "relative" else str(other)
        layout[:] = h5py.VirtualSource(name, "d", X.shape)
        file.create_virtual_dataset("x", layout)
    return path


@pytest.mark.parametrize("kind", ["external", "virtual", "relative"])
def test_inside_and_outside(tmp_path: Path, kind: str) -> None:
    path = write(kind, tmp_path / "in", tmp_path / "in" / "sub" / "other")
    with dsprep.open(path) as source:
        assert source.schema.names == ("x", "y")
        np.testing.assert_array_equal(source[:]["x"], X)
        assert any("values lie in other files" in note for note in source.notes)
    path = write(kind, tmp_path / "in", tmp_path / "out" / "other")
    with dsprep.open(path) as source:
        assert source.schema.names == ("y",)
        assert any("out/other, outside" in n and "--follow-external" in n for n in source.notes)
    with pytest.raises(SchemaError, match="--follow-external"):
        dsprep.open(path, field("x"))
    with dsprep.open(path, OpenOptions(follow_external=True)) as source:
        np.testing.assert_array_equal(source[:]["x"], X)
    (tmp_path / "in" / "link").symlink_to(tmp_path / "out" / "other")
    if kind != "relative":
        path = write(kind, tmp_path / "in", tmp_path / "in" / "link")
        with dsprep.open(path) as source:
            assert source.schema.names == ("y",)


@pytest.mark.parametrize("kind", ["chain", "linked"])
def test_what_the_other_file_refers_to(tmp_path: Path, kind: str) -> None:
    path = write(kind, tmp_path / "in", tmp_path / "in" / "other.h5")
    with dsprep.open(path) as source:
        assert source.schema.names == ("y",)
    with dsprep.open(path, OpenOptions(follow_external=True)) as source:
        np.testing.assert_array_equal(source[:]["x"], X)


def test_a_virtual_dataset_of_itself(tmp_path: Path) -> None:
    layout = h5py.VirtualLayout((4,), "i4")
    layout[:] = h5py.VirtualSource(".", "x", (4,))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    with pytest.raises(FormatError, match="without end"):
        dsprep.open(tmp_path / "a.h5")


def test_the_option_is_not_kept_in_a_sidecar(tmp_path: Path) -> None:
    """Whoever reads decides, not whoever wrote the sidecar."""
    path = write("external", tmp_path / "in", tmp_path / "out" / "other")
    dsprep.provenance(path, OpenOptions(follow_external=True))
    assert "follow_external" not in path.with_name("a.h5.dsprep.json").read_text()
    with dsprep.open(path, field("y")) as source:
        assert source.schema.names == ("y",)
    with pytest.raises((SchemaError, FormatError)):
        dsprep.open(path, field("x"))
