"""Every format keeps the contract, and so does a fifth one: one file, and one line for it."""

from __future__ import annotations

import pytest
from format_contract import FIXED, FormatContract
from oracles import READ

from dsprep import formats
from dsprep.formats.options import Compression, WriteOptions

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class TestToy(FormatContract):
    format, schema = "toy", FIXED

    @pytest.fixture(autouse=True)
    def _registered(self, monkeypatch):
        monkeypatch.setitem(formats.FORMATS, "toy", "toy_format:Toy")


class One:
    """Of a variant, what is not grouped is enough; or what is."""

    is_grouped = False

    @pytest.fixture
    def grouped(self):
        return self.is_grouped


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


class TestZarrZip(One, FormatContract):
    format, suffix, is_grouped = "zarr", ".zarr.zip", True


class TestHdf5Gzip(One, Read):
    format, options = "hdf5", WriteOptions(compress=Compression("gzip"))
    located = (True, False)
    simple = False


class TestHdf5GzipGroups(TestHdf5Gzip):
    is_grouped = True
    test_flipped_bits = None  # nothing proves the gaps between groups


class TestZarrZstd(One, Read):
    is_grouped = True
    format, schema, options = "zarr", FIXED, WriteOptions(compress=Compression("zstd"))
    simple = False


class TestTFRecordGzip(One, Read):
    is_grouped = False
    format, options = "tfrecord", WriteOptions(compress=Compression("gzip"))
    located = (False, False)
    test_groups = None  # a GZIP file has none
