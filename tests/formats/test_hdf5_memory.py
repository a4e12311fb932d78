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

from dsprep.errors import FormatError
from dsprep.formats.base import OpenOptions
from dsprep.formats.hdf5 import Hdf5
from dsprep.formats.hdf5.encoded import Encoded
from dsprep.schema import FieldSpec

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
    whole = Encoded._decode

    def slow(self: Encoded, fd: int, b: int, where: object) -> Any:
        decoded.append(b)
        time.sleep(0.1)
        return whole(self, fd, b, where)

    monkeypatch.setattr(Encoded, "_decode", slow)
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
        assert decoded == [0]
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
