"""Layouts of other people's data: read as is meant, or asked with the option that does so."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from support import raw

import dsprep
from dsprep.core.schema import FieldSpec
from dsprep.errors import AmbiguousError, DsprepError
from dsprep.formats.options import OpenOptions

RNG = np.random.default_rng(7)
N = 6


def numbers(*shape: int, dtype: str = "f4") -> np.ndarray:
    return (RNG.random(shape) * 100).astype(dtype)


def h5(path: Path, **arrays: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file[name.replace("__", "/")] = values
    return path


def zar(path: Path, **arrays: Any) -> Path:
    group = zarr.open_group(path, mode="w")
    for name, values in arrays.items():
        group.create_array(name.replace("__", "/"), data=np.asarray(values))
    return path


def npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def nc(path: Path, sizes: dict[str, int], **arrays: Any) -> Path:
    netCDF4 = pytest.importorskip("netCDF4")
    with netCDF4.Dataset(path, "w") as file:
        for name, size in sizes.items():
            file.createDimension(name, size)
        for name, (dims, values) in arrays.items():
            file.createVariable(name, values.dtype, dims)[:] = values
    return path


FILES = {"h5": h5, "zarr": zar, "npz": npz}
"""Writers of named arrays."""


# Each returns what is opened, and the values of every sample that its author means.


def along_the_first(folder, kind):
    x, y = numbers(N, 4), numbers(N, 3, 2)
    return FILES[kind](folder / f"a.{kind}", x=x, y=y), {"x": x, "y": y}


def along_the_last(folder, kind):
    x, y = numbers(50, 4, N), numbers(19, N)
    return FILES[kind](folder / f"a.{kind}", x=x, y=y), {"x": np.moveaxis(x, -1, 0), "y": y.T}


def slices_and_masks(folder, kind):
    """Hold an image and its mask in each file."""
    image, mask = numbers(3, 16, 12, 4), numbers(3, 16, 12, dtype="u1")
    for i in range(3):
        FILES[kind](folder / f"{i}.{kind}", image=image[i], mask=mask[i])
    return folder, {"image": image, "mask": mask}


def square(folder, kind):
    x = numbers(N, N)
    return FILES[kind](folder / f"a.{kind}", x=x, y=x[0]), {"x": x, "y": x[0]}


def frames(folder, kind):
    """Hold 12 arrays side by side."""
    frames = numbers(12, 8, 5)
    path = FILES[kind](folder / f"a.{kind}", **{f"arr_{i}": f for i, f in enumerate(frames)})
    return path, {"*": frames}


def utterances(folder, kind):
    """Hold 14 arrays of a first axis each."""
    rows = [numbers(3 + i % 4, 5) for i in range(14)]
    return FILES[kind](folder / f"a.{kind}", **{f"u{i:02}": r for i, r in enumerate(rows)}), {
        "*": rows
    }


def episodes(folder, kind):
    """Hold a group for each episode."""
    obs, act = [numbers(3 + i, 4) for i in range(5)], [numbers(3 + i, 2) for i in range(5)]
    arrays = {f"ep{i}__{n}": v[i] for n, v in (("obs", obs), ("act", act)) for i in range(5)}
    return FILES[kind](folder / f"a.{kind}", **arrays), {"obs": obs, "act": act}


def one_more_group(folder, kind):
    """Hold 4 groups of the same members, of which two have names of another kind."""
    names, x = ["mol_0", "mol_1", "water", "benzene"], [numbers(3, 3) for _ in range(4)]
    path = FILES[kind](
        folder / f"a.{kind}", **{f"{n}__x": v for n, v in zip(names, x, strict=True)}
    )
    return path, {"x": [x[names.index(n)] for n in sorted(names)]}


def mean_beside(folder, kind):
    x, mean = numbers(N, 40), numbers(40)
    return FILES[kind](folder / f"a.{kind}", x=x, mean=mean), {"x": x}


def scalar_beside(folder, kind):
    """Hold one image and its label in each file."""
    image, label = numbers(3, 16, 12), np.arange(3)
    for i in range(3):
        FILES[kind](folder / f"{i}.{kind}", image=image[i], label=label[i])
    return folder, {"image": image, "label": label}


def resolutions(folder, kind):
    """Hold one thing in several resolutions."""
    arrays = {f"resolutions__{1000 * 2**k}__bins": numbers(64 >> k, 3) for k in range(4)}
    return FILES[kind](folder / f"a.{kind}", **arrays), {
        "*": [arrays[k] for k in sorted(arrays, key=lambda name: name.split("__"))]
    }


def parts(folder, kind):
    """Hold train and test in one file: the larger is meant."""
    x, y = numbers(8, 3), numbers(2, 3)
    return FILES[kind](folder / f"a.{kind}", train__x=x, test__x=y), {"x": x}


def counted_rows(folder, kind):
    """Hold rows of every sample one after another, and a table of where they are."""
    kind, table = kind.split(" ", 1)
    counts = np.array([2, 0, 3, 1, 4, 2])
    ends = np.cumsum(counts)
    x, label = numbers(int(ends[-1]), 3), numbers(N)
    index = {
        "offsets": np.append(0, ends),
        "first and count": np.stack([ends - counts, counts], 1),
        "begin and end": np.stack([ends - counts, ends], 1),
    }[table]
    path = FILES[kind](folder / f"a.{kind}", x=x, where=index, label=label)
    return path, {"x": np.split(x, ends[:-1]), "label": label}


def shapes_that_differ(folder, kind):
    """Hold a slice in each file, of several sizes."""
    sizes = [(25, 21), (23, 25), (25, 21)]
    images = [numbers(*size) for size in sizes]
    for i, image in enumerate(images):
        FILES[kind](folder / f"{i}.{kind}", image=image)
    return folder, {"image": images}


def days(folder):
    """Hold eight times in each file, in dimensions with names."""
    t, lat = numbers(3, 8, 5), np.arange(5.0)
    for i in range(3):
        arrays = {"t": (("time", "lat"), t[i]), "lat": (("lat",), lat)}
        arrays["edges"] = ("lat", "side"), np.stack([lat - 1, lat + 1], 1)
        nc(folder / f"{i}.nc", {"time": 8, "lat": 5, "side": 2}, **arrays)
    return folder, {"t": t.reshape(24, 5)}


def arrays_of_other_dimensions(folder):
    """Hold arrays with no dimension in common: of them, not the largest alone is meant."""
    x, y = numbers(N, 3), numbers(4, 3)
    nc(folder / "0.nc", {"a": N, "b": 4, "c": 3}, x=(("a", "c"), x), y=(("b", "c"), y))
    return folder / "0.nc", {"x": x[None], "y": y[None]}


def one_grid(folder):
    """Hold one map in each file."""
    t = numbers(3, 4, 5)
    for i in range(3):
        nc(folder / f"{i}.nc", {"lat": 4, "lon": 5}, t=(("lat", "lon"), t[i]))
    return folder, {"t": t}


def arrays_one_a_file(folder):
    x = numbers(4, 8, 3)
    for i in range(4):
        np.save(folder / f"{i}.npy", x[i])
    return folder, {"": x}


READ, WRITE = "", "dsprep.write"
LAYOUTS = [
    *[(along_the_first, kind, READ) for kind in FILES],
    *[(along_the_last, kind, "--sample-axis last") for kind in FILES],
    *[(slices_and_masks, kind, "--sample-axis none") for kind in FILES],
    *[(square, kind, "--sample-axis first") for kind in FILES],
    *[(frames, kind, "--sample-axis groups") for kind in FILES],
    *[(utterances, kind, "--sample-axis groups") for kind in FILES],
    *[(episodes, kind, "--sample-axis groups") for kind in ("h5", "zarr")],
    *[(one_more_group, kind, "--sample-axis groups") for kind in ("h5", "zarr")],
    *[(mean_beside, kind, "--sample-axis first") for kind in FILES],
    *[(scalar_beside, kind, "--sample-axis none") for kind in FILES],
    *[(resolutions, kind, "--sample-axis groups") for kind in ("h5", "zarr")],
    *[(parts, kind, "--sample-axis first") for kind in ("h5", "zarr")],
    *[(shapes_that_differ, kind, WRITE) for kind in FILES],
    *[
        (counted_rows, f"{kind} {table}", "--field x=x@where --field label")
        for kind in FILES
        for table in ("offsets", "first and count", "begin and end")
    ],
    (days, None, READ),
    (arrays_of_other_dimensions, None, "--sample-axis none"),
    (one_grid, None, "--sample-axis none"),
    (arrays_one_a_file, None, "--sample-axis none"),
]


def parsed(option: str) -> OpenOptions:
    """Return what the command line makes of an option."""
    fields, found = [], {}
    for name, value in zip(*[iter(shlex.split(option))] * 2, strict=True):
        if name == "--field":
            fields.append(FieldSpec.parse(value))
        else:
            found[name[2:].replace("-", "_")] = value
    return OpenOptions(fields=tuple(fields), **found)


@pytest.mark.parametrize(
    ("make", "kind", "option"), LAYOUTS, ids=[f"{m.__name__}-{k or ''}" for m, k, _ in LAYOUTS]
)
def test_a_layout(tmp_path, make, kind, option):
    path, meant = make(tmp_path, kind) if kind else make(tmp_path)
    if option:
        with pytest.raises(DsprepError) as raised, dsprep.open(path):
            pass
        assert option in str(raised.value)
        if option == WRITE:
            return
        assert isinstance(raised.value, AmbiguousError)
        assert any(option in way for way, _ in raised.value.readings), raised.value.readings
    with dsprep.open(path, parsed(option)) as source:
        names = dict.fromkeys(source.schema.names)
        if len(meant) == 1:
            meant = dict(zip(names, meant.values(), strict=True))
        assert json.dumps(sorted(meant)) == json.dumps(sorted(names))
        for name, values in meant.items():
            assert len(source) == len(values)
            for i, value in enumerate(values):
                found = np.asarray(source[i][name])
                value = value if isinstance(value, bytes) else np.asarray(value).astype(found.dtype)
                assert raw(source[i][name]) == (value if isinstance(value, bytes) else raw(value))
