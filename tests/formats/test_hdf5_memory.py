"""Reading HDF5 within bounds of memory: each chunk is decoded once, lengths are known exactly."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from support import random_array, raw

from dsprep.core.schema import FieldSpec
from dsprep.errors import FormatError
from dsprep.formats.base import OpenOptions
from dsprep.formats.hdf5 import Hdf5
from dsprep.reading import columns

HDF5 = Hdf5()


def opened(path: Path, *fields: str) -> Any:
    specs = tuple(map(FieldSpec.parse, fields))
    return HDF5.open(path, OpenOptions(fields=specs), None)


@pytest.mark.parametrize("damaged", [False, True])
def test_threads_wait_for_the_chunk_that_one_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    x = random_array(np.dtype("<f4"), (64, 100))
    with h5py.File(tmp_path / "a", "w") as file:
        dataset = file.create_dataset("x", data=x, chunks=(64, 100), compression="gzip")
        address = dataset.id.get_chunk_info(0).byte_offset
    if damaged:
        with (tmp_path / "a").open("r+b") as raw_file:
            raw_file.seek(address)
            raw_file.write(b"\xff" * 16)
    decoded: list[int] = []
    decode = columns.filters.decode

    def slow(*args: Any) -> Any:
        decoded.append(1)
        time.sleep(0.1)
        return decode(*args)

    monkeypatch.setattr(columns.filters, "decode", slow)
    found: dict[int, object] = {}
    with opened(tmp_path / "a") as source:
        _ = source.resident_nbytes()  # the chunks are located

        def work(k: int) -> None:
            try:
                found[k] = raw(source.read(8 * k, 8 * k + 8)["x"])
            except FormatError as error:
                found[k] = error

        threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(10)
        assert not any(t.is_alive() for t in threads)
    assert len(found) == 8
    if damaged:
        assert all(isinstance(f, FormatError) for f in found.values())
    else:
        assert decoded == [1]
        assert all(found[k] == raw(x[8 * k : 8 * k + 8]) for k in range(8))


def test_resident_bytes(tmp_path: Path) -> None:
    x = random_array(np.dtype("<f4"), (20, 6))
    with h5py.File(tmp_path / "a", "w") as file:
        file["plain"] = x
        file.create_dataset("chunks", data=x, chunks=(5, 6))
        file.create_dataset("gzip", data=x, chunks=(5, 6), compression="gzip", shuffle=True)
        file.create_dataset("lzf", data=x, chunks=(4, 3), compression="lzf")
        file.create_dataset("values", data=np.arange(30), chunks=(10,), compression="gzip")
        index = np.zeros(20, [("first", "<i8"), ("count", "<i8")])
        file.create_dataset("index", data=index, chunks=(20,), compression="gzip")
    for fields, expected in (
        (("plain",), 0),
        (("chunks",), 0),
        (("gzip",), 2 * 120),
        (("lzf",), 2 * 48),
        (("a=values@index", "b=values@index"), 2 * 80 + 2 * 320),
    ):
        with opened(tmp_path / "a", *fields) as source:
            assert source.resident_nbytes() == expected, fields


def _sequences(path: Path, libver: Any, address_nbytes: int, options: dict[str, Any]) -> None:
    """Write strings and numbers of variable length; element 7 of the numbers never."""
    plist = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    plist.set_sizes(address_nbytes, 8)
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_libver_bounds(*libver)
    made = h5py.h5f.create(bytes(path), h5py.h5f.ACC_TRUNC, plist, access)
    with h5py.File(made) as file:
        texts = ["", "a", "größer", "日本" * 500, *"bcdefghi"]
        file.create_dataset("t", data=texts, dtype=h5py.string_dtype(), **options)
        file.create_dataset("s", data=texts[:1] * 12, dtype=h5py.string_dtype("ascii"), **options)
        numbers = file.create_dataset("n", (12,), h5py.vlen_dtype(np.dtype(">i2")), **options)
        blobs = file.create_dataset("b", (12,), h5py.vlen_dtype(np.dtype("V1")), **options)
        for i in range(12):
            if i != 7:
                numbers[i] = np.arange(i * i, dtype=">i2")
            blobs[i] = np.frombuffer(bytes(5 * i + 1), "V1")


@pytest.mark.parametrize("address_nbytes", [4, 8])
@pytest.mark.parametrize("libver", [(0, 1), (2, 2)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunks": (5,)},
        {"chunks": (5,), "maxshape": (None,)},
        {"chunks": (5,), "compression": "gzip"},
        {"chunks": (5,), "compression": "gzip", "shuffle": True},
        {"chunks": (4,), "shuffle": True},
    ],
)
def test_lengths_are_those_that_h5py_reads(
    tmp_path: Path, options: dict[str, Any], libver: Any, address_nbytes: int
) -> None:
    path = tmp_path / "a"
    _sequences(path, libver, address_nbytes, options)
    with h5py.File(path) as file:
        expected = np.array(
            [
                [len(file["t"][i]), len(file["s"][i]), 2 * len(file["n"][i]), len(file["b"][i])]
                for i in range(12)
            ]
        ).sum(axis=1)
    with opened(path) as source:
        assert set(source.schema.names) == {"t", "s", "n", "b"}
        for start, stop in ((0, 12), (3, 8), (11, 12), (12, 12)):
            sizes = source.sizes(start, stop)
            assert sizes is not None
            assert sizes.tolist() == expected[start:stop].tolist()
        batch = source.read(0, 12)
        assert sum(c.nbytes for c in batch.values()) == expected.sum()


def test_lengths_where_the_library_decodes_or_nothing_is_stored(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a", "w") as file:
        text = h5py.string_dtype()
        file.create_dataset("t", data=["a", "bc"], dtype=text, chunks=(1,), compression="lzf")
        file.create_dataset("never", (2,), text)
    with opened(tmp_path / "a") as source:
        assert source.sizes(0, 2).tolist() == [1, 2]  # type: ignore[union-attr]
        assert source[1] == {"t": "bc", "never": ""}
