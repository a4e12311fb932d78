"""The classic formats of netCDF: CDF-1, CDF-2 (64-bit offset) and CDF-5 (64-bit data). Only read.

A file is a header, the variables without record dimension one behind another, and then the
records: each holds one row of every variable with that dimension. All numbers are big-endian.
netCDF-4 files are HDF5 and are read as such, so a name that ends in ``.nc`` says nothing.

References
----------
"netCDF Classic and 64-bit Offset File Formats", appendix B of the NetCDF Users Guide, and "CDF-5
File Format Specification" of PnetCDF.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from dsprep.formats.base import Format, Source
from dsprep.formats.options import OpenOptions, check_options
from dsprep.storage.paths import Candidate

if TYPE_CHECKING:
    from dsprep.core.schema import Schema

MAGIC = b"CDF"


class NetCdf(Format):
    """The classic formats of netCDF."""

    name = "netcdf"
    suffixes = (".nc3", ".nc5")
    open_options = frozenset({"fields", "sample_axis"})

    def recognises(self, candidate: Candidate) -> bool:
        """Return whether it begins with ``CDF``; its version is read when it is opened."""
        return candidate.head.startswith(MAGIC)

    @override
    def open(self, path: Path, options: OpenOptions, hint: Schema | None) -> Source:
        # Files keep all types themselves, `hint` is not needed.
        from dsprep.formats.netcdf.source import open_netcdf

        check_options(options, self.open_options, self.name)
        return open_netcdf(path, options)
