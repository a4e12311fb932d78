"""Writing samples that a program gives: `write` and `Writer`.

The output is that of `dsprep.repack`: grouped, aligned, with a sidecar, and there at once or not at
all. With `length` and without ragged fields or a shuffle, samples are written while they come.
Otherwise they are kept until all are known, in memory and then in a temporary file without a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, cast

from dsprep.core.arguments import WriteArguments
from dsprep.core.memory import allowed_memory
from dsprep.core.schema import LARGEST, Schema, batch_nbytes
from dsprep.errors import SchemaError, UsageError
from dsprep.executors import THREADS
from dsprep.reader.options import at_least
from dsprep.source.files import check_replaceable
from dsprep.storage.paths import as_path
from dsprep.verbs.convert import resolve_target
from dsprep.verbs.repack import parse_options, plan_repack
from dsprep.verbs.write_items import write_items
from dsprep.writing.items.calls import Calls
from dsprep.writing.items.tasks import Function
from dsprep.writing.job import Progress, Report
from dsprep.writing.plan import PIECE_NBYTES
from dsprep.writing.run import run_job
from dsprep.writing.samples.assemble import Assembler
from dsprep.writing.samples.feed import FedSource
from dsprep.writing.samples.spool import Spool
from dsprep.writing.samples.values import Declared, columns_of, declared, infer, with_ragged
from dsprep.writing.staging import check_target

MOST = 1 << 16
"""Samples that are packed together at most."""

SHARE, KEPT_NBYTES = 4, 1 << 30
"""One part in so many of the memory keeps samples until all are known, up to so many bytes; more go
to a file."""


class Options(WriteArguments, total=False):
    """The options of `Writer`, all of them by name."""

    schema: Declared | None
    length: int | None
    progress: Progress | None


def _of_target(options: Options) -> dict[str, Any]:
    """Return the options that say how the target is written."""
    return {n: v for n, v in options.items() if n not in ("schema", "length", "progress")}


class Writer:
    """A dataset that is written sample by sample; it appears when the ``with`` block ends.

    An exception inside the block, also `KeyboardInterrupt`, leaves nothing behind. One thread at a
    time may append.

    Parameters
    ----------
    target
        The file or directory to make, also a URL; of HDF5 if neither its suffix nor `to` says
        otherwise.
    schema
        The fields: a `Schema`, or a mapping of field name to what it is, such as
        ``{"points": "float32[None,3]"}``; fields that a mapping leaves out, and all if it is None,
        are those of the first sample. Ragged arrays have to be given so: one sample does not show
        that its first axis varies.
    length
        How many samples will come, if that is known. Another number is an error.
    to, buffer_size, stripe_size, compress, shuffle, shard_size, write_options
        As in `dsprep.repack`; groups are as large as ``"auto"`` makes them by default.
    workers, memory, overwrite, durable
        As in `dsprep.convert`; at least two workers, so that one writes while samples come.
    progress
        Called with (samples, payload bytes) written so far.

    Attributes
    ----------
    report
        What was written, as of `dsprep.convert`; after the ``with`` block.

    Raises
    ------
    DsprepError, OSError
        If the target exists, options contradict each other, or a sample does not fit the others.

    Examples
    --------
    >>> with dsprep.Writer("train.h5") as writer:  # doctest: +SKIP
    ...     writer.append({"image": image, "label": 3})
    """

    report: Report

    def __init__(self, target: str | Path, **options: Unpack[Options]) -> None:
        unknown = options.keys() - (Options.__required_keys__ | Options.__optional_keys__)
        if unknown:
            raise TypeError(f"{min(unknown)!r} is not an option of dsprep.write")
        self._target = resolve_target(as_path(target))
        schema = options.get("schema")
        self._given, self._all = declared(schema), schema if isinstance(schema, Schema) else None
        given = options.get("length")
        self._length = None if given is None else at_least("length", given, 0)
        self._progress = options.get("progress")
        if (self._length or 0) > LARGEST:
            raise UsageError(f"length={self._length} is too many")
        self._options, self._run = parse_options(_of_target(options))
        check_target(self._target, self._run.overwrite)
        if self._run.overwrite:
            check_replaceable(self._target)
        self._count = self._room = self._nbytes = 0
        self._packed: Assembler | None = None
        self._stream: FedSource | None = None
        self._spool: Spool | None = None
        self._open = False

    def __enter__(self) -> Self:
        self._open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.report = self._finish()
        finally:
            self._open, self._packed = False, None
            if self._stream is not None:
                self._stream.abandon()
            if self._spool is not None:
                self._spool.close()

    def append(self, sample: Mapping[str, Any]) -> None:
        """Add a sample.

        Parameters
        ----------
        sample
            Field name to value: an array, a number, `bytes`, `str`, or a list of rows. It may be
            changed afterwards.

        Raises
        ------
        SchemaError
            If it does not fit the samples before; the message names its number and the field. The
            sample is not added.
        UsageError
            If there are more samples than `length`.
        DsprepError, OSError
            If writing fails.
        """
        packed = self._packed
        if packed is None:
            packed = self._begin(self._all or infer(sample, self._given))
        if self._room <= 0:
            self._next(packed)
        packed.add(sample, self._count)
        self._count += 1
        self._room -= 1
        if packed.ragged and packed.nbytes >= PIECE_NBYTES:
            self._room = 0

    def extend(self, batch: Mapping[str, Any]) -> None:
        """Add the samples of a batch.

        Parameters
        ----------
        batch
            Field name to an array with an axis of samples before the axes of the field, to a
            `dsprep.Ragged`, or to a list with one value per sample.

        Raises
        ------
        SchemaError
            If it does not fit the samples before, or columns are of unequal length.
        UsageError, DsprepError, OSError
            As of `append`.
        """
        columns, count = columns_of(batch, self._count)
        packed = self._packed
        if packed is None and count:
            first = {name: column[0] for name, column in columns.items()}
            given = with_ragged(self._given, columns)
            packed = self._begin(self._all or infer(first, given))
        if packed is None or not packed.takes(columns):
            for i in range(count):
                self.append({name: column[i] for name, column in columns.items()})
            return
        done = 0
        while done < count:
            if self._room <= 0:
                self._next(packed)
            some = min(self._room, count - done)
            packed.extend(columns, done, done + some)
            done, self._count, self._room = done + some, self._count + some, self._room - some

    def _begin(self, schema: Schema) -> Assembler:
        """Prepare for samples of these fields; whatever is wrong with the target shows now."""
        if not self._open:
            raise UsageError("a Writer is open inside its with block only")
        length = self._length
        if length and not schema.ragged and self._options.shuffle is None:
            source = FedSource(self._target, schema, length)
            job = plan_repack(source, self._target, self._options, self._run).parts[0]
            source.begin(job, self._run, self._progress)
            self._stream = source
            self._packed = Assembler(schema, 1)
        else:
            plan_repack(FedSource(self._target, schema, 0), self._target, self._options, self._run)
            memory = min(KEPT_NBYTES, allowed_memory(self._run.memory) // SHARE)
            self._spool = Spool(self._target, schema, memory)
            room = min(MOST, max(1, PIECE_NBYTES // max(1, schema.fixed_nbytes)))
            self._packed = Assembler(schema, room)
        return self._packed

    def _next(self, packed: Assembler) -> None:
        """Give away the samples that are packed, and make room for more."""
        if self._length is not None and self._count >= self._length:
            raise UsageError(
                "more samples came than length says", where=self._target, expected=self._length
            )
        if self._stream is not None:
            self._room = self._stream.next(packed)
            return
        self._flush(packed)
        self._room = packed.room if self._length is None else self._length - self._count
        self._room = min(packed.room, self._room)

    def _flush(self, packed: Assembler) -> None:
        if self._spool is None or not len(packed):
            return
        batch = packed.take()
        self._nbytes += batch_nbytes(batch)
        self._spool.put(batch)
        if self._progress is not None:
            self._progress(self._count, self._nbytes)

    def _finish(self) -> Report:
        """Write what is missing, and publish."""
        if self._length is not None and self._count != self._length:
            raise UsageError(
                "fewer samples came than length says",
                where=self._target,
                expected=self._length,
                found=self._count,
            )
        if self._packed is None:
            if self._given is None:
                raise SchemaError(
                    "there are no samples, so the fields are not known",
                    where=self._target,
                    fix="give schema= to write an empty dataset",
                )
            self._begin(self._given)
        assert self._packed is not None
        if self._stream is not None:
            return self._stream.finish()
        assert self._spool is not None
        self._flush(self._packed)
        self._spool.finish()
        try:
            plan = plan_repack(self._spool, self._target, self._options, self._run)
        except UsageError:  # there is not enough memory besides
            self._spool.spill()
            plan = plan_repack(self._spool, self._target, self._options, self._run)
        part = plan.parts[0]
        return run_job(part, self._run)


def write(
    target: str | Path,
    samples: Iterable[Any],
    *,
    batched: bool = False,
    function: Function | None = None,
    executor: str | Executor = THREADS,
    errors: str = "raise",
    resume: bool = False,
    restart: bool = False,
    **options: Unpack[Options],
) -> Report:
    """Write samples that a program gives, such as those of a generator, or of a function of items.

    Parameters
    ----------
    target
        The file or directory to make, as in `Writer`.
    samples
        Any iterable of dicts: field name to an array, a number, `bytes`, `str` or a list of rows.
        It is read once, in order, on the thread that calls. If it has a length, that is taken for
        `length`.
    batched
        Whether `samples` gives whole batches, as `Writer.extend` takes them.
    function
        Makes the samples; `samples` are then *items* for it, a sequence of paths, numbers or
        tuples. Of an item it gives a sample, an iterable of several, or None, which leaves it out.
        The samples come in the order of the items.
    executor
        Who calls the function: ``"threads"`` (`workers` of this process), ``"processes"`` (so many
        of this machine), ``"mpi"``, ``"dask"``, or an executor that is open. For processes and MPI
        it is defined at the top level of a module.
    errors
        ``"raise"``: an item that fails ends the run; what is complete stays for `resume`.
        ``"skip"``: such items are left out, and listed in the report.
    resume, restart
        Continue what an interrupted run of a function left, or discard it; without either, what is
        left is an error. It continues if the function has the same name, the items the same number,
        and fields and options are the same: whether the rest is, is for you to know.
    **options
        Those of `Writer`, `length` and `schema` among them. With a function there is no `length`,
        and `progress` is called with how many items, then samples, are done, and how many there
        are.

    Returns
    -------
    Report
        As of `dsprep.convert`: `target`, `sidecar`, `samples`, `files`, bytes, `seconds`, `notes`.
        With a function an `ItemsReport`, which also has `items`, `left_out`, `failures`, `failed`.

    Raises
    ------
    SchemaError
        If a sample does not fit those before it; the message names its number and the field.
    ItemError
        If the function fails, from what it raised; the message names the item.
    DsprepError, OSError
        If the target exists, options contradict each other, or writing fails.

    Notes
    -----
    What `samples` raises comes out as it is, and nothing is left under the name `target` or beside
    it. What a function has made stays beside the target until a call with `resume` continues: see
    `dsprep.verbs.write_items.write_items`.

    Examples
    --------
    >>> import numpy as np
    >>> samples = ({"x": np.full(3, i, np.float32), "label": i} for i in range(10))
    >>> dsprep.write("train.h5", samples, length=10).samples  # doctest: +SKIP
    10
    """
    if function is not None:
        if batched or options.get("length") is not None:
            raise UsageError("length= and batched= are of samples, not of the items of a function")
        repacking, run = parse_options(_of_target(options))
        if errors not in ("raise", "skip"):
            raise UsageError(f"errors={errors!r} is not possible", expected="'raise' or 'skip'")
        skip, fields = errors == "skip", declared(options.get("schema"))
        return write_items(
            target,
            Calls(function, cast("Sequence[Any]", samples), fields, skip=skip),
            repacking,
            replace(run, restart=restart),
            executor=executor,
            progress=options.get("progress"),
            resume=resume,
        )
    if executor != THREADS or errors != "raise" or resume or restart:
        raise UsageError(
            "executor=, errors=, resume= and restart= are of a function of items: function="
        )
    if isinstance(samples, Mapping):
        raise UsageError(
            "samples are one dict, not several",
            fix="give all samples as one batch: write(target, [samples], batched=True)",
        )
    if options.get("length") is None and isinstance(samples, Sized) and not batched:
        options["length"] = len(samples)
    with Writer(target, **options) as writer:
        take = writer.extend if batched else writer.append
        for sample in samples:
            take(sample)
    return writer.report
