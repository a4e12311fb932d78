"""HDF5 files as the format opens them, for the tests of the format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support import reading

from dsprep.formats.hdf5 import Hdf5
from dsprep.formats.located import LocatedSource
from dsprep.formats.options import OpenOptions

HDF5 = Hdf5()


def options(*fields: str, axis: Any = "auto", follow: bool = False) -> OpenOptions:
    return reading(*fields, sample_axis=axis, follow_external=follow)


def opened(path: Path, *fields: str, axis: Any = "auto", follow: bool = False) -> LocatedSource:
    source = HDF5.open(path, options(*fields, axis=axis, follow=follow), None)
    assert isinstance(source, LocatedSource)
    return source
