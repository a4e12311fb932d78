"""What records hold is found in all of them: optional features, keys, families, types asked for."""

from __future__ import annotations

import shlex
from pathlib import Path

import h5py
import numpy as np
import pytest
from support import random_batch, write_batch

import dsprep
from dsprep import formats
from dsprep.errors import DsprepError, UsageError
from dsprep.formats.base import OpenOptions
from dsprep.schema import Field, FieldSpec, Schema

SUFFIX = {"hdf5": ".h5", "lmdb": ".mdb", "tfrecord": ".tfrecord", "zarr": ".zarr"}
F4 = np.dtype("<f4")


def advised(error: DsprepError) -> tuple[str, ...]:
    """The fields of the options that an error advises."""
    words = shlex.split(str(error).partition("--field")[2])
    return tuple(w for w in words if w != "--field")


# --- all other fields ---


@pytest.mark.parametrize("how", ["sidecar", "library"])
@pytest.mark.parametrize("name", SUFFIX)
def test_a_field_renamed_and_all_others(tmp_path: Path, name: str, how: str) -> None:
    schema = Schema((Field("a", F4, (2,)), Field("b", F4, (3,)), Field("c", F4)))
    origin, path = tmp_path / "o.h5", tmp_path / f"x{SUFFIX[name]}"
    write_batch(formats.load("hdf5"), origin, schema, random_batch(schema, 5))
    dsprep.convert(origin, path)
    options = OpenOptions(fields=tuple(map(FieldSpec.parse, ("new=b", "*"))))
    with dsprep.open(origin) as before, dsprep.open(path, options, through=how) as source:
        assert source.schema.names == ("new", "a", "c")
        assert (source[3]["new"] == before[3]["b"]).all()
        assert (source[3]["c"] == before[3]["c"]).all()
    report = tmp_path / "again.h5"
    dsprep.convert([path, path], report, fields=("*", "new=b"))
    with h5py.File(report) as file:
        assert sorted(file) == ["a", "c", "new"]


@pytest.mark.parametrize("spec", ["*=x", "x=*", "*:int64", "*@a"])
def test_all_others_are_asked_for_alone(spec: str) -> None:
    with pytest.raises(UsageError, match="alone"):
        FieldSpec.parse(spec)


@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
def test_the_advice_for_a_clash_of_names_keeps_every_field(tmp_path: Path, suffix: str) -> None:
    names = ("image", "image/encoded", "label", "width", "height")
    schema = Schema(tuple(Field(n, F4, (2,)) for n in names))
    source, target = tmp_path / "a.tfrecord", tmp_path / f"a{suffix}"
    write_batch(formats.load("tfrecord"), source, schema, random_batch(schema, 4))
    with pytest.raises(DsprepError, match="image") as caught:
        dsprep.convert(source, target)
    fields = advised(caught.value)
    dsprep.convert(source, target, fields=fields)
    with dsprep.open(target) as found:
        assert len(found.schema) == len(names)
        assert "NEW" in found.schema.names
