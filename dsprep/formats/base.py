"""The contract that every container format fulfils: `Format`, `Source` and `Writer`.

A format is one package in this folder and one line in ``formats/__init__.py``. It gives

- a `Format`: recognises its files and opens them; a `WritableFormat` creates outputs as well;
- a `Source`: one file (or directory) opened for reading, as samples ``0 .. len(source)``;
- a `Writer`: one output being written, from batches that arrive in sample order.

Sources and writers never know each other; only ``transfer`` joins them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from dsprep.core.groups import EMPTY, Grouping
from dsprep.core.schema import Arena, Batch, Column, Schema, differences
from dsprep.errors import UnsupportedError, UsageError
from dsprep.formats.options import OpenOptions, WriteOptions
from dsprep.layout.describe import FieldStorage
from dsprep.layout.model import FileLayout, Groups
from dsprep.storage.identity import Identities, identities_of
from dsprep.storage.paths import Candidate
from dsprep.storage.trees import sized_files

State: TypeAlias = dict[str, Any]


class Source(ABC):
    """A dataset opened for reading.

    Subclasses set the attributes below in ``__init__`` and implement `__len__`, `read` and
    `storage`. `read` is called from several threads at once and must allow it. Sources are closed
    by `close` or by leaving a ``with`` block.

    Attributes
    ----------
    path
        The file or directory.
    schema
        The fields of every sample.
    version
        The format and its version, for a person: ``"HDF5, superblock 2"``.
    notes
        Assumptions and omissions when the dataset was opened, one clause each.
    named
        The paths and patterns by which it was named; empty if it was opened otherwise.
    opening
        A function with which another process opens it; None if it was made in this one.
    format, options
        The name of its format, empty as `opening` is None, and how it is read.
    file_identities
        Identities of its files before they were opened; empty: not recorded.
    dropped
        Number of samples that the options leave out.
    unopened
        Number of files that were not opened, as only a part was inspected.
    others
        The arrays of the file, or the first one, that belong to all samples.
    random_access
        Whether samples are read one by one, in any order, at little more than the cost of their
        bytes, if `resident_nbytes` is 0.
    repeatable
        Whether a later run can read the samples again; not those that a program gives.
    """

    path: Path
    schema: Schema
    version: str = ""
    notes: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    opening: Opening | None = None
    format: str = ""
    options: OpenOptions = OpenOptions()
    file_identities: Identities = ()
    dropped: int = 0
    unopened: int = 0
    others: tuple[str, ...] = ()
    random_access: bool = False
    repeatable: bool = True

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        """Return samples ``start <= i < stop``, of all fields in the schema's order.

        Parameters
        ----------
        start, stop
            Half-open range; the caller guarantees ``0 <= start <= stop <= len(self)``.
        arena
            Memory to use; arrays taken from it are valid until the next call with the same arena.
            None: fresh memory.

        Returns
        -------
        dict
            Field name to an array of shape ``(stop - start, *field.shape)`` and the field's dtype,
            which may be a strided view, or to a `Ragged` of as many samples.

        Raises
        ------
        FormatError
            If the file is damaged there; the message names file, offset or sample, and field.
        ChangedError
            If it was written to since it was opened; of a directory, since the file with these
            samples was looked at for the first time.
        OSError
            If the system cannot read it.
        """

    def read_field(self, name: str) -> Column:
        """Return one field of all samples; those that read all for it do not define this."""
        return self.read(0, len(self))[name]

    @abstractmethod
    def storage(self) -> dict[str, FieldStorage]:
        """Return the storage of each field, by field name."""

    def extents(self, progress: Callable[[int, int], None] | None = None) -> FileLayout:
        """Return the layout that is found in the file, field by field: the extents of every sample.

        The laws are `Explicit`, or such as follow from the container's own header. The file's
        structure is read, not its payload.

        Parameters
        ----------
        progress
            Called with (done, in all), in any unit, where it takes long.

        Raises
        ------
        UnsupportedError
            If the samples of this file have no offsets at all; the message names the remedy.
        FormatError
            If the file is damaged.
        """
        raise UnsupportedError(f"{type(self).__name__} cannot locate samples")

    def check_types(self) -> None:  # noqa: B027  (most formats keep their types)
        """Raise `DsprepError` if samples do not have the types that were known beforehand.

        Reads everything where that takes it.
        """

    def files(self) -> list[Path]:
        """Return the files and stores that it reads."""
        return [self.path]

    def locate(self, sample: int) -> tuple[Path, int]:
        """Return the file that holds `sample`, and the sample's number in it."""
        return self.path, sample

    def count_files(self) -> tuple[int, int]:
        """Return the number of files of the dataset, and their bytes."""
        sizes = [nbytes for path in self.files() for _, nbytes in sized_files(path)]
        return len(sizes), sum(sizes)

    def identities(self) -> Identities:
        """Return the identities of its files when it was opened, or else now, in their order.

        Empty for a source that was made in this process.
        """
        if self.opening is not None and not self.file_identities:
            self.file_identities = identities_of(self.files())
        return self.file_identities

    def part(self, start: int, stop: int) -> tuple[Opening, int]:
        """Return a function with which another process opens samples ``start <= i < stop``.

        Returns
        -------
        The function, and the number that its sample 0 has in this source.

        Parameters
        ----------
        start, stop
            Half-open range of samples.

        Raises
        ------
        UsageError
            If it was made in this process and cannot be opened in another one.
        """
        if self.opening is None:
            raise UsageError("other processes cannot open this dataset", where=self.path)
        return self.opening, 0

    def sizes(self, start: int, stop: int) -> NDArray[np.int64] | None:
        """Return the payload bytes of each sample, or None where that takes reading them.

        The default serves schemas without ragged fields, and those whose `rows` are known.

        Parameters
        ----------
        start, stop
            Half-open range of samples.

        Returns
        -------
        array or None
            int64, shape ``(stop - start,)``.
        """
        nbytes = np.full(stop - start, self.schema.fixed_nbytes, np.int64)
        for f in self.schema:
            rows = self.rows(f.name, start, stop) if f.ragged else 0
            if rows is None:
                return None
            nbytes += rows * f.row_nbytes
        return nbytes

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.int64] | None:
        """Return the rows of a ragged field in each sample; None where that takes reading them.

        Parameters
        ----------
        name
            The field.
        start, stop
            Half-open range of samples.

        Returns
        -------
        array or None
            int64, shape ``(stop - start,)``.
        """
        return None

    def resident_nbytes(self) -> int:
        """Return the bytes that reading holds besides the samples asked for: decoded chunks."""
        return 0

    def close(self) -> None:
        """Release files; the source cannot be used afterwards. Closing twice is allowed."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> Batch: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any]:
        """Return one sample as a dict of values, or a slice (of step 1) as a `Batch`.

        A value is an array of the field's shape, `bytes` or `str`. Negative indices count from
        the end; `IndexError` beyond. The memory is the caller's own.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise UsageError(f"step {step} is not supported, only 1")
            return self.read(start, max(start, stop))
        if isinstance(index, str):
            raise UsageError(
                f"[{index!r}] is not the number of a sample",
                fix=f"such as [0][{index!r}], [0:32][{index!r}]",
            )
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self.path}")
        index %= len(self)
        return {name: column[0] for name, column in self.read(index, index + 1).items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield every sample, as ``self[i]`` does, reading a few megabytes at a time."""
        step = 1
        sizes = self.sizes(0, min(64, len(self)))
        if sizes is not None and len(sizes):
            step = max(1, min(1024, (4 << 20) // max(1, int(sizes.max()))))
        for start in range(0, len(self), step):
            stop = min(start + step, len(self))
            batch = self.read(start, stop)
            for i in range(stop - start):
                yield {name: column[i] for name, column in batch.items()}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}: {len(self)} samples of {self.schema}>"


Opening: TypeAlias = Callable[[], Source]
"""Opens a source as it was opened before: a partial function, which travels to other processes.

Paths, options and the numbers of samples travel with it; who hands the work out compares the files
in the end.
"""


class Writer(ABC):
    """One output being written, at a temporary path that the caller renames later.

    The samples arrive as pieces: consecutive ranges that together make up ``0 .. count``, each
    one except the last a multiple of `unit` long. For every piece ``transfer`` calls, possibly on
    several threads, `encode`, then `reserve`, then `write`. `encode` and `write` run in any order
    and side by side; `reserve` runs in sample order, one at a time, and is where a piece whose
    size was not known before gets its place. The bytes of the output depend only on the samples,
    the cut into pieces and the options: never on threads, time or interruptions. Of an output in
    groups, a piece never crosses from one group into the next.

    A writer is created by a `FilePlan`, which may continue one that was interrupted.

    Attributes
    ----------
    unit
        Samples that stay together in a piece.
    whole_groups
        Whether every piece has to be a whole group; otherwise it may be a part of one.
    durable
        Whether `finish` waits for the disk. Without, only a crash of the machine can do harm.
    """

    unit: int = 1
    whole_groups: bool = False
    durable: bool = True

    @abstractmethod
    def encode(self, batch: Batch, start: int, arena: Arena) -> Any:
        """Turn samples ``start ..`` of the output into a piece; compress, frame, add CRCs.

        The batch and the arrays taken from `arena` stay as they are until the piece is written,
        so a piece may refer to them.
        """

    def reserve(self, piece: Any) -> None:  # noqa: B027  (most writers know every place)
        """Give the piece its place. Called in sample order, one at a time."""

    @abstractmethod
    def write(self, piece: Any) -> None:
        """Write the piece at its place."""

    def checkpoint(self) -> State:
        """Return, as JSON, what `FilePlan.create` needs to continue after the last `reserve`.

        Called between two `reserve`. It is used only after all pieces so far have been written
        and `sync` has returned.
        """
        return {}

    @abstractmethod
    def sync(self) -> None:
        """Make all that has been written durable (fdatasync). May run beside `write`."""

    def start_sync(self) -> None:  # noqa: B027  (only speed rests on it)
        """Have the disk begin with what has been written. May run beside `write`."""

    @abstractmethod
    def finish(self) -> None:
        """Complete the output after the last piece, durably if `durable`, and close it.

        May be interrupted and is then repeated from the last checkpoint, so whatever it needs
        besides the output stays until `clean`. Such working files lie beside the output, named
        as it is with a dot and a word behind (``path.spool``).
        """

    def groups(self) -> Groups | None:
        """Return the ranges of the groups, None if there are none; called after `finish`.

        The blocks are the ranges that one read fetches: from the group's first byte to its last,
        with what lies between its fields and without the padding behind. Their CRC-32Cs are over
        just these bytes, as they are in the file.
        """
        return None

    def layout(self) -> FileLayout | None:
        """Return the layout that `Source.extents` would find; called after `finish`.

        There is at least one sample. None if only looking through the output gives it, since an
        earlier run has written some of it; or if its samples have no offsets.

        Raises
        ------
        FormatError
            If the output is not what was written.
        """
        return None

    def clean(self) -> None:  # noqa: B027  (most writers have no working files)
        """Remove working files. Called when it has been recorded that the output is complete."""

    def close(self) -> None:  # noqa: B027  (some writers keep none open)
        """Release files without completing the output. Closing twice is allowed."""


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """The plan of an output file; nothing has been written.

    Attributes
    ----------
    create
        ``create(path, state)`` starts the file or directory at `path`, or continues it. `state` is
        None, or what `Writer.checkpoint` returned in an interrupted run that has left `path`: all
        up to that checkpoint is there, anything after it is to be overwritten.
    stored
        Storage of each field, by name.
    nbytes
        Bytes on disk, those of holes too: exact for uncompressed output of fixed fields up to
        metadata, an upper bound otherwise.
    scratch_nbytes
        Bytes of working files that lie beside the output while it is made.
    unit
        `Writer.unit`: samples that stay together.
    files
        Number of files and directories.
    padding
        Padding bytes between groups and fields.
    group_nbytes
        Bytes of the largest group, as one read fetches it.
    aligned
        Whether every group begins at a multiple of the stripe size.
    reads
        Reads that fetch one group.
    """

    create: Callable[[Path, State | None], Writer]
    stored: Mapping[str, str]
    nbytes: int = 0
    scratch_nbytes: int = 0
    unit: int = 1
    files: int = 1
    padding: int = 0
    group_nbytes: int = 0
    aligned: bool = True
    reads: int = 1


class Format(ABC):
    """A container format that is read.

    Attributes
    ----------
    name
        Its name in lower case, as users type it.
    suffixes
        File name endings, the preferred one first.
    open_options
        The names in `OpenOptions` that this format knows.
    key
        The field that holds the names of samples, where it is always there.
    infers
        Whether the fields are inferred from the values, so that they may differ between files:
        see `merge`.
    keeps_types
        Whether a file has the types of its fields; otherwise the sidecar alone may have them.
    named_only
        Whether a directory is of this format only if it is named, not where it is found in one.
    max_open
        Files of a dataset that stay open at the same time, with what they hold.
    doubtful
        Whether each of several files of one field may be one sample, or hold several.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    open_options: ClassVar[frozenset[str]] = frozenset({"fields"})
    key: ClassVar[str | None] = None
    infers: ClassVar[bool] = False
    keeps_types: ClassVar[bool] = True
    named_only: ClassVar[bool] = False
    max_open: ClassVar[int] = 8
    doubtful: ClassVar[bool] = False

    @abstractmethod
    def recognises(self, candidate: Candidate) -> bool:
        """Return whether a path is of this format, judged by its first bytes or its members.

        Cheap, imports no heavy library, and returns False for other files; raises `OSError` if it
        cannot be read.
        """

    def facts(self, path: Path) -> Mapping[str, Any]:
        """Return facts about `path` that change with its contents, by a few reads.

        It is JSON. Size and time stamp are known already. Imports no heavy library.

        Raises
        ------
        FormatError, OSError
            If it is damaged or gone.
        """
        return {}

    @abstractmethod
    def open(self, path: Path, options: OpenOptions, hint: Schema | None) -> Source:
        """Open `path` for reading.

        Parameters
        ----------
        path
            One file, or one directory that is one dataset of this format.
        options
            As given by the user; only those in `open_options` are set.
        hint
            The schema that a sidecar gives for this file: types for formats that keep none, and
            attributes for formats that have no place for them. Never trusted over the file.

        Raises
        ------
        FormatError, SchemaError, UsageError
            If the file is damaged, lacks a field that was asked for, or an option does not fit.
        """

    def merge(self, one: Schema, other: Schema, options: OpenOptions) -> Schema | None:
        """Return the fields of two files together, by their names there; None: they do not agree.

        Where fields are inferred; each file is then opened with those of all as its hint.
        """
        return None if differences(one, other) else one


class WritableFormat(Format):
    """A container format that is also written.

    Attributes
    ----------
    archive
        The suffix of outputs that are packed into one file; empty if there is no such form.
    write_options
        The names in `WriteOptions` that this format knows.
    uneven_groups
        Whether groups may differ in their number of samples.
    """

    archive: ClassVar[str] = ""
    write_options: ClassVar[frozenset[str]] = frozenset()
    uneven_groups: ClassVar[bool] = False

    @abstractmethod
    def check(self, schema: Schema, options: WriteOptions) -> tuple[str, ...]:
        """Return losses: facts of the schema that a file cannot keep, one clause each, without I/O.

        Raises
        ------
        UnsupportedError
            If this format cannot hold a field; the message names the nearest thing that it can.
        UsageError
            If an option contradicts the schema.
        """

    @abstractmethod
    def plan(
        self,
        schema: Schema,
        options: WriteOptions,
        grouping: Grouping = EMPTY,
        payload: int = 0,
        name: str = "",
    ) -> FilePlan:
        """Return one file of an output, without I/O.

        Parameters
        ----------
        schema
            The fields of every sample.
        options
            Only those in `write_options` are set.
        grouping
            The samples, and the groups in which they are laid out. An output in groups is an
            ordinary file of the format, and holds the same values as one without.
        payload
            Bytes of all values.
        name
            Name of the file, for formats whose suffix decides the storage.

        Raises
        ------
        UnsupportedError
            As `check`, or if this format cannot keep the fields of a group together.
        UsageError
            If an option contradicts the schema.
        """
