"""Apache Parquet: read through pyarrow (the extra ``parquet``), row group by row group.

Columns of a fixed width are fields; a list is a ragged field, a list of fixed size a shape; the
members of a struct are fields called ``image.bytes`` and ``image.path``. Directories of parts are
read as one dataset, and what directories are called (``label=3``) is a field, too. Pages are
encoded, so samples have no offsets.

Specification: https://parquet.apache.org/docs/file-format/
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from dsprep.core.schema import Schema
from dsprep.formats.base import Format, Source
from dsprep.formats.options import OpenOptions, check_options
from dsprep.storage.paths import Candidate


class Parquet(Format):
    """The format; see `base.Format`."""

    name: ClassVar[str] = "parquet"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet", ".pq")
    infers: ClassVar[bool] = True
    max_open: ClassVar[int] = 2
    open_options: ClassVar[frozenset[str]] = frozenset({"fields", "nulls"})

    def recognises(self, candidate: Candidate) -> bool:
        """Return whether it begins as a file of rows does; ``_metadata`` holds none of its own."""
        from dsprep.formats.parquet.row_groups import ENCRYPTED, MAGIC

        magic = candidate.head[: len(MAGIC)]
        return magic in (MAGIC, ENCRYPTED) and not candidate.path.name.startswith("_")

    @override
    def open(self, path: Path, options: OpenOptions, hint: Schema | None) -> Source:
        # `hint` says of which type fields are that the path gives.
        from dsprep.formats.parquet.source import ParquetSource

        check_options(options, self.open_options, self.name)
        return ParquetSource(path, options, hint)

    def merge(self, one: Schema, other: Schema, options: OpenOptions) -> Schema | None:
        """Return the fields; one that paths give is an integer if it is in all files."""
        from dsprep.formats.parquet.source import together

        fields = [together(f, g) for f, g in zip(one, other, strict=False)]
        if one.names != other.names or None in fields:
            return None
        return one.replace(*(f for f in fields if f is not None))
