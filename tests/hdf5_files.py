"""HDF5 files as the format opens them, for the tests of the format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsprep.core.schema import FieldSpec
from dsprep.formats.hdf5 import Hdf5
from dsprep.formats.hdf5.parse import Hdf5Source
from dsprep.formats.options import OpenOptions

HDF5 = Hdf5()


def options(*fields: str, axis: Any = "auto") -> OpenOptions:
    return OpenOptions(fields=tuple(map(FieldSpec.parse, fields)), sample_axis=axis)


def opened(path: Path, *fields: str, axis: Any = "auto") -> Hdf5Source:
    source = HDF5.open(path, options(*fields, axis=axis), None)
    assert isinstance(source, Hdf5Source)
    return source
