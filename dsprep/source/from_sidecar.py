"""A dataset with a valid sidecar as a `Source`: opened at once, read without its library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
from typing_extensions import override

from dsprep.core.schema import Arena, Batch, Field, Ints
from dsprep.formats.base import Source
from dsprep.layout.describe import FieldStorage, of_layout
from dsprep.layout.locate import sizes as sizes_of
from dsprep.reading.records import Verify
from dsprep.sidecar import entries, spec
from dsprep.sidecar.sidecar import Sidecar
from dsprep.storage.identity import Identities, identities_of


class SidecarSource(Source):
    """Samples read through a `Sidecar`.

    Parameters
    ----------
    sidecar
        The opened sidecar.
    fields
        The requested fields: the sidecar's name, and the field that it becomes.
    verify
        Checks of every read; see `Sidecar.read`.
    """

    random_access = True

    def __init__(
        self,
        sidecar: Sidecar,
        fields: Sequence[tuple[str, Field]],
        verify: Verify = None,
    ) -> None:
        content = sidecar.content
        self.sidecar, self._verify = sidecar, verify
        self._names = {field.name: name for name, field in fields}  # in the sidecar
        self.schema = replace(sidecar.schema, fields=tuple(field for _, field in fields))
        self.path = sidecar.root(0) if len(content.files) == 1 else sidecar.dataset
        self.version = f"{content.format}, through its sidecar"
        self.notes = tuple(content.notes)

    def __len__(self) -> int:
        return len(self.sidecar)

    @cached_property
    def paths(self) -> list[Path]:
        """The files of the data."""
        return [self.sidecar.dataset / path for path in self.sidecar.content.paths()]

    def files(self) -> list[Path]:
        """Return the files of the data."""
        return self.paths

    @override
    def count_files(self) -> tuple[int, int]:
        content = self.sidecar.content
        return int(entries.numbers(content.files, "files").sum()), content.nbytes

    @override
    def identities(self) -> Identities:
        if self.opening is not None and not self.file_identities:
            path, content = self.sidecar.path, self.sidecar.content
            beside = [path, path.with_name(spec.companion_name(path))][: 1 + content.has_companion]
            own = zip(self.paths, (f.identity for f in content.files), strict=True)
            self.file_identities = (*own, *identities_of(beside))
        return self.file_identities

    def locate(self, sample: int) -> tuple[Path, int]:
        """Return the file that holds `sample`, and the sample's number in it."""
        file, local = self.sidecar.file_of(sample)
        return self.sidecar.root(file), local

    @override
    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        names = [*dict.fromkeys(self._names.values())]
        batch = self.sidecar.read(slice(start, stop), names, verify=self._verify, arena=arena)
        return {new: batch[name] for new, name in self._names.items()}

    def rows(self, name: str, start: int, stop: int) -> Ints | None:
        """Return the rows of a ragged field in each sample, None if the laws do not give them."""
        field = self.sidecar.schema[self._names[name]]
        parts = [np.zeros(0, np.int64)]
        for number, _, part in self.sidecar.by_file(np.arange(start, stop, dtype=np.int64)):
            sizes = sizes_of(self.sidecar.layout(number), field, part)
            if sizes is None:
                return None
            parts.append(sizes // max(1, field.row_nbytes))
        return np.concatenate(parts)

    @override
    def resident_nbytes(self) -> int:
        return self.sidecar.resident_nbytes()

    def storage(self) -> dict[str, FieldStorage]:
        """Return the storage of each field, by the layout of the first file with samples."""
        first = int(np.argmax(self.sidecar.content.counts > 0)) if len(self) else 0
        storage_of = of_layout(self.sidecar.layout(first), self.sidecar.schema)
        return {new: storage_of[name] for new, name in self._names.items()}

    def close(self) -> None:
        """Close all files."""
        self.sidecar.close()
