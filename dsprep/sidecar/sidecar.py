"""Reading a dataset through its sidecar: offsets are computed, bytes come by ``preadv``.

No format library is opened. Every statement of the sidecar is compared with the files before it is
used. That the files are still those it was written for is checked when it is opened, when a file
is, and after every read.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import numpy as np

from dsprep import formats
from dsprep.core.gather import take
from dsprep.core.packing import Tables
from dsprep.core.schema import Arena, Array, Batch, Bytes, Ints, Schema, concatenate, new_array
from dsprep.errors import DsprepError, FormatError, UsageError
from dsprep.layout import as_json
from dsprep.layout.locate import Extents, locate
from dsprep.layout.model import FileLayout
from dsprep.layout.plain import plain
from dsprep.reading.each import read_files
from dsprep.reading.files import Files, most_open
from dsprep.reading.layout_reader import LayoutReader
from dsprep.reading.read_plan import ReadPlan
from dsprep.reading.records import RecordReader, Verify
from dsprep.reading.single import Single
from dsprep.sidecar import entries, spec
from dsprep.sidecar.proofs import Proofs
from dsprep.sidecar.spec import Content
from dsprep.storage.atomic import refuse_partial, restore, written_as
from dsprep.storage.base import Handle
from dsprep.storage.local import DirectoryGuard
from dsprep.storage.paths import StorePath, as_path
from dsprep.storage.scatter import APART_NEAR

Indices: TypeAlias = int | slice | Sequence[int] | Array

_ROWS = 1 << 16

CHECKED = 64
"""Files that are compared with the sidecar when it is opened; of more, so many spread evenly."""


class StaleError(FormatError):
    """The data are not those for which the sidecar was written; the message names the remedy."""


class MissingError(DsprepError, FileNotFoundError):
    """A dataset has no sidecar, or is not there at all."""

    def __init__(self, path: Path, dataset: Path, command: str = "", size: str = "") -> None:
        if not dataset.exists():
            super().__init__("there is no such dataset", where=dataset)
        else:
            unasked = f", and {size} are not located unasked" if size else ""
            super().__init__(
                f"there is no sidecar {path.name}{unasked}",
                where=dataset,
                fix=f"write it with {command or f'dsprep provenance {dataset}'}; where that cannot "
                "be written to, add --out F, and name F here",
            )


def changes(
    content: Content, dataset: Path, scope: Literal["all", "unnamed", "alone"] = "all"
) -> list[str]:
    """Return the differences between the files and their recorded identities, one clause each.

    Parameters
    ----------
    scope
        The files that are looked at: ``"all"``; of at most `CHECKED`, spread evenly, ``"unnamed"``
        ones: not objects whose version is recorded, since reading names it; or, of these,
        ``"alone"``: not directories of many files.

    Raises
    ------
    OSError
        If a file cannot be examined.
    """
    files, lines = content.files, []
    chosen: Iterable[int] = range(len(files))
    if scope != "all" and len(files) > CHECKED:
        chosen = np.unique(np.linspace(0, len(files) - 1, CHECKED).astype(int)).tolist()
    facts = formats.load(content.format).facts
    for i in chosen:
        file, recorded = dataset / files[i].path, files[i].identity
        named = recorded.is_object and isinstance(file, StorePath)
        if (named and scope != "all") or (scope == "alone" and recorded.files > 1):
            continue
        if how := recorded.changed(file, facts):
            lines.append(f"{file.name}: {how}")
    return lines


def stale(change: str, path: Path, dataset: Path) -> StaleError:
    """Return the error for data that changed since the sidecar `path` was written."""
    return StaleError(
        f"the data changed since the sidecar was written: {change}",
        where=path,
        fix=f"write it again with dsprep provenance {dataset}, or move it away",
    )


class Extent(NamedTuple):
    """Bytes that hold a field of a sample, or a part of it.

    Attributes
    ----------
    index
        The sample.
    field
        The field.
    file
        The file, relative to the directory of the sidecar.
    offset, length
        The stored bytes; offset -1: not stored, fill values.
    inside, inside_nbytes
        Of a chunk that has to be decoded: where in it, once decoded, the sample's bytes are; None
        where the stored bytes are the sample's.
    """

    index: int  # type: ignore[assignment]
    field: str
    file: str
    offset: int
    length: int
    inside: int | None = None
    inside_nbytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, ``inside`` only for chunks."""
        return {k: v for k, v in self._asdict().items() if v is not None}


class Sidecar:
    """A dataset, read through its sidecar; closed by `close` or by leaving a ``with`` block.

    Safe to use from several threads.

    Parameters
    ----------
    companion
        The bytes of its companion, if that is not beside it.
    follow_external
        True: symbolic links may lead out of the directory of the dataset.
    kept
        True: the file `path` has just this content; else that is in memory alone.

    Attributes
    ----------
    path
        The sidecar.
    dataset
        A file, a store, or a directory of files, which it describes.
    content
        Its statements.
    schema
        The fields of every sample.
    proofs
        Compares samples with checksums.
    """

    def __init__(
        self,
        content: Content,
        dataset: Path,
        path: Path,
        companion: bytes | None = None,
        follow_external: bool = False,
        kept: bool = True,
    ) -> None:
        self.content, self.dataset, self.path = content, dataset, path
        self._companion_bytes, self._follow, self.kept = companion, follow_external, kept
        self.schema = content.schema
        if not content.layouts:
            raise FormatError(
                "the sidecar does not locate samples",
                where=path,
                fix=f"write it again with dsprep provenance {dataset}; what cannot be located, "
                "such as GZIP TFRecord, is read by dsprep.open, or repacked",
            )
        guard = DirectoryGuard(dataset, follow_external)
        facts = formats.load(content.format).facts
        self._files = Files(guard, self.root, lambda n: content.files[n].identity, facts)
        self.open_file: Callable[[int, str], Handle] = self._files.get
        """Returns the file at a path below an entry, open: its number, and the path."""
        self._opens_itself = True
        self._starts: Ints = np.concatenate([[0], np.cumsum(content.counts)])
        self._count = int(self._starts[-1])
        self._tables: Tables | None = None
        self._lock = threading.Lock()
        layouts = content.layouts
        self._layout = lru_cache(maxsize=1024)(
            lambda number, n: as_json.from_json(layouts[number], n, self.schema, self.tables())
        )
        self._reader = lru_cache(maxsize=256)(self._make_reader)
        self._single = lru_cache(maxsize=256)(self._make_single)
        self._chosen = lru_cache(maxsize=64)(self._choose)
        self.proofs = Proofs(self)

    @classmethod
    def open(
        cls,
        path: str | Path,
        data: str | Path | None = None,
        *,
        check: bool = True,
        follow_external: bool = False,
    ) -> Sidecar:
        """Open a sidecar.

        Parameters
        ----------
        path
            The sidecar, or the dataset beside which it is.
        data
            The dataset, if it is not the one beside the sidecar.
        check
            True: check that the data have not changed since; takes a few reads.
        follow_external
            True: symbolic links may lead out of the directory of the dataset.

        Returns
        -------
        Sidecar
            To be closed by `close` or by leaving a ``with`` block.

        Raises
        ------
        StaleError
            If the data have changed; the message names the command that writes a new one.
        MissingError
            If there is none.
        FormatError
            If it is not a sidecar, is damaged, or gives no offsets.
        """
        path = as_path(path)
        if not path.name.endswith(spec.SUFFIX) and data is None:
            restore(path)
            data, path = path, spec.beside(path)
        dataset = as_path(data) if data is not None else path.with_name(_stem(path))
        try:
            content = spec.read(path)
        except FileNotFoundError:
            refuse_partial(written_as([dataset]))
            raise MissingError(path, dataset) from None
        opened = cls(content, dataset, path, follow_external=follow_external)
        if check:
            opened.check()
        return opened

    def __reduce__(self) -> tuple[Any, ...]:
        how = {"check": False, "follow_external": self._follow}
        return partial(Sidecar.open, self.path, self.dataset, **how), ()

    def again(self) -> Self:
        """Return the same dataset with files of its own, such as a forked process needs."""
        how = self._companion_bytes, self._follow, self.kept
        return type(self)(self.content, self.dataset, self.path, *how)

    @property
    def stated(self) -> bytes:
        """Bytes that are the same wherever the sidecar states the same: in a file, if it is one."""
        if self.kept:
            return self.path.read_bytes()
        return spec.encode(replace(self.content, lineage={}), b"")[0]

    def _stale(self, change: str) -> StaleError:
        if self.kept:
            return stale(change, self.path, self.dataset)
        return StaleError(
            f"the data changed since they were located: {change}",
            where=self.dataset,
            fix="open them again",
        )

    def through(self, open_file: Callable[[int, str], Handle]) -> Self:
        """Return the same dataset with files opened by `open_file`; closing it closes none.

        `open_file` takes the arguments of `Sidecar.open_file`; the file that it returns holds the
        same bytes at the same offsets.
        """
        other = self.again()
        other.open_file, other._opens_itself, other._layout = open_file, False, self._layout
        return other

    @cached_property
    def identity(self) -> str:
        """A word that is the same for the same samples in copies of the same files.

        It is a digest of the fields, the sizes and sampled blocks of files, and the extents of the
        first, the middle and the last sample: files that differ only in other bytes have the same.
        """
        content, digits = self.content, hashlib.blake2b(digest_size=8)
        digits.update(json.dumps(self.schema.to_json()).encode())
        for entry in content.files:
            recorded = entry.identity
            digits.update(f"{entry.samples} {recorded.nbytes} {recorded.sampled}\n".encode())
        some = self.indices([0, len(self) // 2, len(self) - 1] if len(self) else [])
        for name in self.schema.names:
            for number, _, local in self.by_file(some):
                if name not in self.layout(number).unlocated:
                    extents = locate(self.layout(number), name, local)
                    digits.update(extents.offset.tobytes() + extents.length.tobytes())
        return digits.hexdigest()

    def check(self, *, again: bool = False) -> None:
        """Raise `StaleError` if the data changed since the sidecar was written.

        `again`: directories of many files were looked at, and their files are when they are opened.
        """
        changed = changes(self.content, self.dataset, "alone" if again else "unnamed")
        if changed:
            raise self._stale(changed[0])
        self.expect()

    def check_objects(self) -> None:
        """Raise `StaleError` if objects, some of very many, are not the versions recorded."""
        if isinstance(self.dataset, StorePath):
            files = self.content.files[:CHECKED]
            if changed := changes(replace(self.content, files=files), self.dataset):
                raise self._stale(changed[0])

    def expect(self) -> None:
        """Expect every file that is opened from here on to be what is recorded of it."""
        self._files.expects = True

    def __len__(self) -> int:
        return self._count

    # --- layouts -----------------------------------------------------------------------------

    def layout(self, file: int) -> FileLayout:
        """Return the layout of file number `file`."""
        entry = self.content.files[file]
        return self._layout(entry.layout, entry.samples)

    def layouts(self) -> Iterator[tuple[FileLayout, int]]:
        """Yield the layouts of files, and how many files have each, as many samples each."""
        kinds = np.stack([entries.numbers(self.content.files, "layout"), self.content.counts])
        _, first, files = np.unique(kinds, axis=1, return_index=True, return_counts=True)
        for i in np.argsort(first).tolist():
            yield self.layout(int(first[i])), int(files[i])

    def tables(self) -> Tables:
        """Return the packed tables, with those of the companion."""
        with self._lock:
            if self._tables is None:
                self._tables = Tables(self.companion(), self.path)
            return self._tables

    def companion(self) -> bytes | None:
        """Return the bytes of the companion, None without; `FormatError` if it is another's."""
        if self._companion_bytes is None:
            return spec.read_tables(self.content, self.path, self.dataset)
        return self._companion_bytes

    def file_of(self, sample: int) -> tuple[int, int]:
        """Return the number of the file that holds `sample`, and the sample's number in it."""
        if len(self.content.files) == 1:
            return 0, sample
        file = int(np.searchsorted(self._starts, sample, "right")) - 1
        return file, sample - int(self._starts[file])

    # --- locating ----------------------------------------------------------------------------

    def indices(self, chosen: Indices) -> Ints:
        """Return sample numbers as int64, shape ``(n,)``, negative ones counted from the end.

        Raises
        ------
        IndexError
            If one is not in the dataset.
        """
        n = len(self)
        if isinstance(chosen, slice):
            return np.arange(*chosen.indices(n), dtype=np.int64)
        if isinstance(chosen, int) and 0 <= chosen < n:
            return np.array([chosen], np.int64)
        numbers = np.asarray(chosen).reshape(-1)
        if numbers.size and numbers.dtype.kind not in "iu":
            raise UsageError("samples are chosen by integers", found=numbers.dtype)
        if numbers.dtype.kind == "u" and numbers.size and int(numbers.max()) >= n:
            raise IndexError(f"sample {numbers.max()} of {n} in {self.dataset}")
        numbers = numbers.astype(np.int64, copy=False)
        if not len(numbers):
            return numbers
        low = int(numbers.min())
        if low < -n or int(numbers.max()) >= n:
            wrong = low if low < -n else int(numbers.max())
            raise IndexError(f"sample {wrong} of {n} in {self.dataset}")
        return np.where(numbers < 0, numbers + n, numbers) if low < 0 else numbers

    def by_file(self, indices: Ints) -> list[tuple[int, Ints, Ints]]:
        """Return, for each file that holds some, ``(file, which of the indices, theirs in it)``."""
        if len(self.content.files) == 1:
            return [(0, np.arange(len(indices), dtype=np.int64), indices)]
        file = np.searchsorted(self._starts, indices, "right") - 1
        order = np.argsort(file, kind="stable")
        edges = np.flatnonzero(np.diff(file[order])) + 1
        parts = []
        for positions in np.split(order, edges):
            if len(positions):
                number = int(file[positions[0]])
                parts.append((number, positions, indices[positions] - self._starts[number]))
        return parts

    def locate(self, chosen: Indices, field: str) -> tuple[Array, Ints, Ints, Ints]:
        """Return the extents of a field whose values are contiguous, by vectorised computation.

        Parameters
        ----------
        chosen
            A number, a slice, or numbers in any order; negative ones count from the end.
        field
            The name of the field.

        Returns
        -------
        request, file, offset, length
            Arrays of shape ``(m,)``: which of the requested samples, the number of the entry in
            ``content.files``, and offset and length of the stored bytes; see `extents`.

        Raises
        ------
        UsageError, SchemaError
            If there is no such field, or only the format's library can read it.
        """
        self.schema[field]
        none = np.zeros(0, np.int64)
        parts = [
            (request, np.full(len(request), number, np.int64), extents.offset, extents.length)
            for number, request, extents in self._located(self.indices(chosen), field)
        ]
        if len(parts) == 1:
            return parts[0]
        request, *others = map(np.concatenate, zip((none,) * 4, *parts, strict=True))
        order = np.argsort(request, kind="stable")
        return request[order], *(other[order] for other in others)  # type: ignore[return-value]

    def _located(self, indices: Ints, field: str) -> Iterator[tuple[int, Ints, Extents]]:
        """Yield ``(file, request, extents)`` of each file that holds some of the samples."""
        for number, positions, local in self.by_file(indices):
            extents = locate(self.layout(number), field, local)
            yield number, positions[extents.request], extents

    def extents(self, chosen: Indices, fields: Sequence[str] = ()) -> list[Extent]:
        """Return every range of bytes that holds the fields of the samples, in their order.

        Parameters
        ----------
        chosen
            As for `read`.
        fields
            The fields wanted; all when empty.

        Returns
        -------
        list of Extent
            One or several for each sample and field.

        Raises
        ------
        UsageError, SchemaError
            If there is no such field, or only the format's library can read it.
        """
        return [*self.rows(chosen, fields)]

    def rows(self, chosen: Indices, fields: Sequence[str] = ()) -> Iterator[Extent]:
        """Yield each `Extent` as it is computed; memory does not grow with them.

        Parameters
        ----------
        chosen, fields
            As for `extents`.
        """
        names = list(fields or self.schema.names)
        for name in names:
            self.schema[name]
        indices: range | Ints
        if isinstance(chosen, slice):
            indices = range(*chosen.indices(len(self)))
        else:
            indices = self.indices(chosen)
        for a in range(0, len(indices), _ROWS):
            yield from self._rows(np.asarray(indices[a : a + _ROWS], np.int64), names)

    def _rows(self, indices: Ints, names: Sequence[str]) -> Iterator[Extent]:
        """Yield the rows of some samples, sorted by sample and field."""
        keys: list[Ints] = []
        columns: list[list[Any]] = [[], [], [], [], []]
        for k, name in enumerate(names):
            for number, request, extents in self._located(indices, name):
                n = len(request)
                keys.append(request * len(names) + k)
                columns[0] += self._file_names(number, extents)
                columns[1] += extents.offset.tolist()
                columns[2] += extents.length.tolist()
                columns[3] += [None] * n if extents.inside is None else extents.inside.tolist()
                size = extents.inside_nbytes
                columns[4] += [None] * n if size is None else size.tolist()
        key = np.concatenate([np.zeros(0, np.int64), *keys])
        order = np.argsort(key, kind="stable")
        sample, field = np.divmod(key[order], max(1, len(names)))
        file, offset, length, inside, inside_nbytes = columns
        at = indices[sample].tolist()
        for i, k, j in zip(at, field.tolist(), order.tolist(), strict=True):
            yield Extent(i, names[k], file[j], offset[j], length[j], inside[j], inside_nbytes[j])

    def _file_names(self, number: int, extents: Extents) -> list[str]:
        """Return the file of each range, relative to the directory of the sidecar."""
        entry, parent = self.root(number), self.path.parent
        names = [""] * len(extents.offset)
        for path, chosen in extents.by_path():
            name = os.path.relpath(entry / path if path else entry, parent)
            for i in np.arange(len(names))[chosen].tolist():
                names[i] = name
        return names

    # --- reading -----------------------------------------------------------------------------

    def read(
        self,
        chosen: Indices,
        fields: Sequence[str] = (),
        *,
        verify: Verify = None,
        arena: Arena | None = None,
    ) -> Batch:
        """Return samples by their numbers, in the requested order.

        Parameters
        ----------
        chosen
            A number, a slice, or numbers in any order, also several times the same.
        fields
            The fields wanted; all when empty.
        verify
            ``"header"``: compare what stands before each record (LMDB's overflow page, a
            TFRecord's length and its CRC) with what the sidecar says; ``"full"``: and each
            field with the checksum that the format or the sidecar has, see `sidecar.proofs`.
        arena
            Memory to use; see `Source.read`.

        Returns
        -------
        dict
            Field name to an array of shape ``(n, *field.shape)`` and of the field's dtype, or to a
            `Ragged` of n samples; a number gives n = 1.

        Raises
        ------
        FormatError
            If the files do not fit the sidecar, or are damaged.
        ChangedError
            If they were written to since they were opened.
        UsageError
            If only the format's library can read a field.
        """
        if verify is not None and verify not in ("header", "full"):
            raise UsageError(f"verify is {verify!r}", expected="None, 'header' or 'full'")
        fields = tuple(fields)
        one = chosen[0] if isinstance(chosen, list) and len(chosen) == 1 else chosen
        indices: Ints | None = None
        if type(one) is not int or not 0 <= one < self._count:
            indices = self.indices(chosen)
            one = int(indices[0]) if len(indices) == 1 else -1
        if one >= 0:
            number, index = self.file_of(one)
            single = self._single(number, fields, verify)
            if single is not None and (batch := single.read(index)) is not None:
                return batch
        schema = self._chosen(fields)
        names = schema.names
        if indices is None:
            indices = np.array([one], np.int64)
        groups = self.by_file(indices)
        if verify is None and (batch := self._read_stored(schema, indices, groups, arena)):
            return batch
        if len(groups) == 1:
            number, _, local = groups[0]
            return self._read_file(number, local, names, verify, arena)
        parts, order = [], []
        for number, positions, local in groups:
            batch = self._read_file(number, local, names, verify, None)
            parts.append({n: batch[n] for n in names})
            order.append(positions)
        joined = concatenate(schema, parts) if parts else concatenate(schema, [])
        back = np.argsort(np.concatenate([np.zeros(0, np.int64), *order]), kind="stable")
        if len(back) and bool((back == np.arange(len(back))).all()):
            return joined
        return take(schema, joined, back)

    def _read_stored(
        self,
        schema: Schema,
        indices: Ints,
        groups: Sequence[tuple[int, Ints, Ints]],
        arena: Arena | None,
    ) -> Batch | None:
        """Read scattered samples straight into the batch; None where that is slower."""
        # Consecutive samples are better read by the reader of their file, which knows groups;
        # samples that have to be decoded, or are in very many files, cannot be read so.
        n, files = len(indices), len(groups)
        if n < 2 or schema.ragged or int(indices[-1]) - int(indices[0]) == n - 1:
            return None
        if files > 1 and files > most_open():
            return None
        fields, ranges = [f for f in schema if f.row_nbytes], []
        for number, positions, local in groups if fields else ():
            for each in plain(self.layout(number), fields) or (None,):
                if each is None or (starts := each.starts(local)) is None:
                    return None
                ranges.append((number, positions, each, starts))
        if not ranges:
            return None
        out = {
            f.name: new_array(arena, f"sidecar.field.{f.name}", (n, *f.inner), f.dtype)
            for f in schema
        }
        plan = ReadPlan()
        for number, positions, each, starts in ranges:
            to = [positions * f.row_nbytes + out[f.name].ctypes.data for f, _ in each.fields]
            plan.put_plain(self.open_file(number, each.path), each, starts, to)
        plan.read(APART_NEAR)
        return {**out}

    def _choose(self, fields: tuple[str, ...]) -> Schema:
        names = dict.fromkeys(fields) or self.schema.names
        return Schema(tuple(self.schema[name] for name in names))

    def _read_file(
        self, number: int, local: Ints, names: Sequence[str], verify: Verify, arena: Arena | None
    ) -> Batch:
        reader = self._reader(number)
        if verify == "full":
            # Reading compares the CRCs of records itself.
            crc_read = reader.records is not None and reader.records.has_crcs
            unlocated = self.layout(number).unlocated
            sums = [n for n in names if not crc_read or n in reader.columns]
            self.proofs.check(number, local, [n for n in sums if n not in unlocated])
        return reader.read(local, names, verify, arena, int(self._starts[number]))

    def _make_reader(self, number: int) -> LayoutReader:
        opened = partial(self.open_file, number)
        root = self.root(number)
        return LayoutReader(self.layout(number), self.schema, opened, root, formats.decoders)

    def _make_single(self, number: int, fields: tuple[str, ...], verify: Verify) -> Single | None:
        """Return a `Single` that reads one sample of a file; None if the layout needs more."""
        reader, names = self._reader(number), self._chosen(fields).names
        if verify == "full" or (verify is not None and reader.records is not None):
            return None
        return reader.single(names)

    def read_files(
        self, number: int, names: Sequence[bytes], begins: Ints, ends: Ints, out: Bytes
    ) -> None:
        """Read files below entry number `number`, as `Files.read_each` does."""
        if self._opens_itself:
            self._files.read_each(number, names, begins, ends, out)
        else:
            read_files(names, begins, ends, partial(self.open_file, number), out)

    def root(self, number: int) -> Path:
        """Return the path of file number `number`."""
        return self.dataset / self.content.files[number].path

    def records(self, number: int) -> RecordReader | None:
        """Return the record reader of file number `number`; None if it has no records."""
        return self._reader(number).records

    def first(self, number: int) -> int:
        """Return the first sample of file number `number`."""
        return int(self._starts[number])

    def resident_nbytes(self) -> int:
        """Return the bytes that reading keeps besides the requested samples: decoded chunks."""
        if not self.content.files:
            return 0
        return self._reader(0).resident_nbytes()

    def bad_groups(self) -> Iterator[FormatError]:
        """Yield an error for each group whose checksum is wrong; all that have one are read.

        Raises
        ------
        FormatError, OSError
            If a file is gone, or too short for a group.
        """
        for number in range(len(self.content.files)):
            yield from self.proofs.bad_groups(number)

    def close(self) -> None:
        """Close all files; reading opens them again."""
        if self._opens_itself:
            self._files.close()
        self._reader.cache_clear()
        self._single.cache_clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Sidecar of {self.dataset}: {len(self)} samples of {self.schema}>"


def _stem(path: Path) -> str:
    if not path.name.endswith(spec.SUFFIX) or path.name == spec.SUFFIX:
        raise UsageError(f"{path.name} does not end in {spec.SUFFIX}", fix="name its dataset too")
    return path.name.removesuffix(spec.SUFFIX)
