"""Every format keeps the contract, and so does a fifth one: one file, and one line for it."""

from __future__ import annotations

import pytest
from format_contract import FIXED, FormatContract, ReadOnlyContract
from oracles import READ

from dsprep import formats
from dsprep.formats.options import Compression, WriteOptions

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class TestToy(FormatContract):
    format, schema = "toy", FIXED
    parted = (False, False)

    @pytest.fixture(autouse=True)
    def _registered(self, monkeypatch):
        monkeypatch.setitem(formats.FORMATS, "toy", "toy_format:Toy")


class TestPlain(ReadOnlyContract):
    format = "plain"

    @pytest.fixture(autouse=True)
    def _registered(self, monkeypatch):
        monkeypatch.setitem(formats.FORMATS, "plain", "toy_format:Plain")

    def write(self, path, batch):
        columns = list(batch.values())
        rows = (c[i : i + 1].tobytes() for i in range(len(columns[0])) for c in columns)
        path.write_bytes(b"".join(rows))


class Read(FormatContract):
    """A format that has a library of its own."""

    def oracle(self, path):
        return READ[self.format](path, self.schema)


class TestHdf5(Read):
    format = "hdf5"


class TestLmdb(Read):
    format = "lmdb"


class TestTFRecord(Read):
    format = "tfrecord"


class TestZarr(Read):
    format = "zarr"


class TestZarrZip(FormatContract):
    format, suffix = "zarr", ".zarr.zip"


class TestHdf5Gzip(Read):
    format, options = "hdf5", WriteOptions(compress=Compression("gzip"))
    located = (True, False)
    parted = (False, False)
    simple = False


class TestZarrZstd(Read):
    format, schema, options = "zarr", FIXED, WriteOptions(compress=Compression("zstd"))
    parted = (False, True)
    simple = False


class TestTFRecordGzip(Read):
    format, options = "tfrecord", WriteOptions(compress=Compression("gzip"))
    located = (False, False)
    parted = (False, False)
