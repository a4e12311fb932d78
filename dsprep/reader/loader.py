"""`Reader`: batches for training, read ahead by ``preadv`` at computed offsets."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, cast

from dsprep.core.schema import Schema
from dsprep.errors import UsageError
from dsprep.reader import checks, states
from dsprep.reader.adaptive import Adaptive
from dsprep.reader.cached import ReaderCache
from dsprep.reader.data import open_data
from dsprep.reader.defaults import cores_of
from dsprep.reader.ledger import EpochStats, Ledger
from dsprep.reader.memory import Allocate, anonymous
from dsprep.reader.mini_epochs import Pass, Policy
from dsprep.reader.node import join
from dsprep.reader.node.client import Client
from dsprep.reader.node.root import Service
from dsprep.reader.options import ReaderOptions, assign, at_least, chosen_fields
from dsprep.reader.order import EpochSegment, ResumePoint, Segments, Start
from dsprep.reader.pipeline import Pipeline, PipelineSettings, Pools, ReadTask, Steps
from dsprep.reader.ranks import RankInfo, detect
from dsprep.reader.setup import choose_concurrency, make_settings
from dsprep.reader.transforming import Transforming
from dsprep.reader.transforms import transformed
from dsprep.reader.unit_plan import UnitPlanner
from dsprep.sidecar.proofs import summarize
from dsprep.sidecar.sidecar import Sidecar


class Reader(ReaderOptions):
    """Batches of a dataset that has a sidecar; best of one that was repacked.

    ``for batch in reader`` runs through one epoch, the next ``for`` through the next one; after
    a ``for`` that was left early, and after `load_state_dict`, it runs through what is left of
    that epoch. ``len(reader)`` is the number of its steps. A batch is a dict of field name to
    array of shape ``(n, *shape)`` and of the field's dtype, or to `Ragged`. It stays as it is as
    long as something refers to it. Every parameter is also an attribute, as it was given.

    Parameters
    ----------
    path
        The dataset, or its sidecar: a file, a directory, a glob, ``@list.txt``, or a list of these,
        which are read as one; or an opened `Sidecar`. Without a sidecar, up to 4 GB in up to 1,000
        files are located at once, and it is written if it may be, which a
        `dsprep.errors.LocatedWarning` says. Where groups of samples that are sorted by a field are
        shuffled one by one, rank 0 warns once (`dsprep.source.alike.OrderWarning`).
    batch_size
        Samples per step of this rank, n.
    buffer_size
        Size of a read: samples (an int, or text such as ``"4096"``) or bytes
        (``"64MiB"``). For a dataset with groups it is rounded down to whole groups, at least
        one; the default (also ``"auto"``) is one group. Without groups: 64 MiB in at most 512
        files.
    seed
        Seed of the order of the samples, with the epoch.
    rank, world_size
        This process and how many there are; by default as `dsprep.reader.ranks.detect` finds.
    epochs
        Of the training, counted from epoch 0; None: without end. Up to the last of them, the
        beginning of the next epoch is read while a ``for`` ends and until the next one begins;
        after the last one, and with the default, reading ends with the ``for``.
    on_break
        The next ``for`` after one that was left early: ``"continue"``: the rest of its epoch;
        ``"restart"``: the next epoch.
    shuffle
        ``"group"`` or True: the groups, and the samples within what is read at a time.
        ``"global"``: all samples, each read by itself. ``"none"`` or False: the order of the files.
    remainder
        Treatment of samples that do not fill a batch on every rank. ``"drop"``: they are left
        out; ``"pad"``: the last batches are filled by repeating samples; ``"ragged"``: the last
        batches are shorter, and every sample comes exactly once. The number of steps is the same on
        every rank always.
    fields
        The fields wanted, or the name of one; all if empty.
    buffers
        Units in memory at a time: one is read while another one is used. None: 2, or within 32 MiB
        (from an object store always) one more than `io_threads`, so that each thread reads one.
    buffers_mixed
        Groups whose samples are shuffled together. None: one; of a subset as many as have about as
        many samples as one group, at most 1,024.
    mini_epochs
        Parts of an epoch that are passed several times, one after another. A ``for`` then runs
        through one pass of one of them, `epoch` and `set_epoch` count passes, and `epochs` what
        it always does: see `dsprep.reader.mini_epochs`. A `dsprep.MiniEpochs` says more.
    repeats
        Passes of each part; or those of each in turn, counted over all epochs, of which the last
        number holds for all further ones; or what decides by what `report` is given, see
        `dsprep.repeats`. In the latter case nothing is read ahead of a pass.
    cache
        A directory of a faster tier, such as a local disk, in which groups are kept, or a
        `dsprep.Cache`, which says more. All Readers of a node share it, also those of several jobs;
        it outlives them. What `dsprep.stage` has put there is found. If it fails, data come from
        the dataset, with a `CacheWarning`. Nobody else may write to it; it is made if it is not
        there.
    io_threads
        Threads that read; None: as many as the cores of this process, divided among the ranks of
        this node that share them, at least 1 and at most 4; all of that share where values are
        decoded; from an object store as many as read 128 MiB ahead. See `dsprep.reader.defaults`.
    transfer_size
        Bytes of one read call at most; None: all of a group by one.
    engine
        The way to read bytes: ``"buffered"`` (through the page cache) or ``"direct"`` (O_DIRECT),
        which some file systems refuse.
    verify
        Compare what is read with its checksums, whichever there are: of the groups that
        `dsprep.repack` wrote, of TFRecord records, of chunks (gzip, Fletcher-32, CRC-32C), of the
        members of a ZIP file, or those of ``dsprep provenance --checksums``. `verified` says which.
        It is read twice, the second time from the page cache; ZIP members and the blocks of
        ``--checksums`` are read whole, and compared once by each Reader.
    transform
        Applied to every batch, in threads. One with a parameter ``rng`` is also given a
        `numpy.random.Generator` that depends on seed, epoch, step and rank. `dsprep.each`: a
        function of a sample in place of a batch. A list of these: one after another.
    collate
        In place of `transform`: a function of the samples of a batch, as ``collate_fn`` of a
        DataLoader is: a list of dicts of field name to value (an array, a number, `bytes` or
        `str`). What it returns is the batch. It runs in threads, and may have a parameter ``rng``.
    readers_per_node
        Processes of a node that read for all of its ranks, into memory that they share; None:
        each reads for itself. They have to keep their Readers open until the other ranks have
        begun. See `dsprep.reader.node`.
    stagger
        Readers of the node, or of `comm`, that read at a time; None: all. See
        `dsprep.reader.node.tokens`.
    comm
        An mpi4py communicator whose processes stagger; they all make their Readers in the same
        order then, and close them.
    subset
        The samples to use, as if the dataset had no others: a condition such as
        ``"label in (3, 5)"``, numbers of samples, one bool for each, a ``.npy`` file with either,
        a part of a split (``"train of train=0.9,val=0.1"``, ``"... by patient"``: samples with the
        same value stay together), or all of these in a `dsprep.Subset`. Groups without any are not
        read.
    weights
        How often samples come: a field, or an array of shape ``(n,)`` with a number for each
        sample of the dataset, or a ``.npy`` file with it. Each epoch then draws as many samples as
        there are, with replacement, by seed and epoch; those of a group are read together.
    data
        The dataset, where it is not the one beside the sidecar.

    Attributes
    ----------
    allocate
        Gives memory for batches, from the next loop on: called with a number of bytes, returns an
        ``mmap`` of at least as many; see `dsprep.reader.memory`.
    rank_info
        Rank and world size, and where they come from.
    schema
        The fields of a batch.
    verified
        With `verify`, by field: what it is compared with; None: nothing, which an
        `UnverifiedWarning` reported.
    epoch
        The epoch of the last batch; after the end of a loop and after `load_state_dict`, of the
        next one. With mini-epochs the number of the pass; see `mini_epoch`.

    Raises
    ------
    UsageError
        If arguments contradict each other or the dataset.
    StaleError, FormatError
        If the sidecar is not that of the data, or damaged.
    """

    allocate: Allocate = staticmethod(anonymous)
    _node: Client | Service | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rank_info: RankInfo = detect(self.rank, self.world_size)
        self._sidecar = self._opened()
        self.schema: Schema = chosen_fields(self, self._sidecar)
        transformed(self.schema, self.transforms)
        self._order = assign(self, self._sidecar, self.rank_info.world_size)
        mini = self._order.mini
        self._adaptive: Adaptive | None = None
        if mini is not None and not mini.repeats:
            self._adaptive = Adaptive(cast("Policy", self.repeats), self.rank_info, self.comm)
        checks.check_steps(self._order)
        self._sidecar.check()
        checks.warn_of_order(self, self._order, self.rank_info, self._sidecar)
        self._concurrency = choose_concurrency(self, self._sidecar, self._order, self.rank_info)
        self.verified: Mapping[str, str | None] = {}
        if self.verify:
            self.verified = checks.find_sums(self._sidecar, self.schema)
        self.epoch = 0
        self._stages: tuple[ResumePoint, ...] = ()
        self._steps = 0  # that were done of the last stage
        self._is_closed = False
        self._begin_process()
        self._settings = self._set_up(self.comm)
        if self.readers_per_node is not None:
            task = ReadTask(self._planner, self._order, self._settings)
            self._node = join(self.rank_info, self.readers_per_node, task)
            if isinstance(self._node, Service):  # also where nobody closes this
                weakref.finalize(self, self._node.close)

    def _opened(self) -> Sidecar:
        return open_data(self.path, self.data, check=False, note=not self.rank_info.rank)

    def _begin_process(self) -> None:
        """Reset: nothing is under way, at first and in a forked child."""
        self._pid, self._lock, self._ledger = os.getpid(), threading.Lock(), Ledger()
        self._running: Steps | None = None
        self._looping: range | None = None  # what the loop that is under way adds to `_steps`
        self._closing: weakref.finalize[Any, Any] | None = None
        largest = self.batch_size if self.remainder == "pad" else max(1, self.samples)
        capacity = min(self.batch_size, largest)
        self._planner = UnitPlanner(self._sidecar, self.schema.names, capacity, self.verify)
        self._pools: Pools | None = None
        self._share = 1.0
        self._transforming: Transforming | None = None
        self._batches: Callable[[], Batches | None] = lambda: None  # the last loop, if it is there
        self._node = None
        self._cache: ReaderCache | None = None
        if (cache := self.cache_options) and self.samples and checks.is_cacheable(self.verified):
            how = cache, self._concurrency[0], self._ledger
            self._cache = ReaderCache(self._sidecar, self.schema.names, self._order, *how)
            weakref.finalize(self, self._cache.close)  # also where nobody does

    def _set_up(self, comm: Any) -> PipelineSettings:
        how = self._sidecar, self._order, self.rank_info
        return make_settings(self, *how, self._concurrency, self._cache, comm)

    @property
    def threads(self) -> int:
        """Threads that read."""
        return self._concurrency[0]

    # --- what comes --------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the steps of the loop that is under way, or else of the next one."""
        if self._looping is not None and self._is_looping():
            return len(self._looping)
        segment = self._segment()
        return segment.stop - segment.first

    @property
    def remaining(self) -> int:
        """Steps that are left of the epoch, after the last batch."""
        if self._looping is not None and self._is_looping():
            return self._looping.stop - self._steps
        return len(self)

    @property
    def steps_done(self) -> int:
        """Steps that were done of the epoch, also on other ranks or in batches of other sizes."""
        return sum(stage.steps for stage in self._stages) + self._steps

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch: what ``len`` is but for an epoch that is resumed."""
        return self.steps_of(self.epoch)

    def steps_of(self, epoch: int) -> int:
        """Return the steps of a whole epoch; those of passes of mini-epochs differ by a few."""
        epoch = at_least("epoch", epoch, 0)
        start = Start(epoch, (), 0, 1, self._mini_pass(epoch))
        segment = self._order.segment(self.rank_info.rank, start)
        return segment.stop - segment.first

    @property
    def mini_epoch(self) -> Pass | None:
        """The pass that `epoch` counts: its part and epoch; None without mini-epochs."""
        return self._mini_pass(self.epoch)

    def _mini_pass(self, epoch: int) -> Pass | None:
        decided = () if self._adaptive is None else self._adaptive.decided
        return None if self._order.mini is None else self._order.mini.at(epoch, decided)

    def report(self, **metrics: float) -> bool:
        """Give the metrics of the pass that has just ended, where these decide about repeats.

        To be called by all ranks, between a loop and the next one. The metrics of rank 0 count;
        the others learn of its decision by `comm`, or else by torch.distributed. As long as its
        cache has not all of the next mini-epoch, this one is not over.

        Parameters
        ----------
        **metrics
            Such as ``loss=0.25, val_error=0.1``.

        Returns
        -------
        bool
            Whether the next pass is one of the next mini-epoch.

        Raises
        ------
        UsageError
            If repeats are not adaptive, no pass has ended since the last call, a metric of the
            score is missing, or the ranks cannot agree.
        """
        self._between_loops("call report")
        if self._adaptive is None:
            raise UsageError(
                "nothing is decided by metrics here", fix="give repeats= a policy: dsprep.repeats"
            )
        if self._adaptive.reported >= self.epoch or self._stages or self._steps:
            raise UsageError("no pass has ended since the last report")
        return self._adaptive.report(metrics, self._cache is None or self._cache.is_ahead)

    @property
    def samples(self) -> int:
        """Samples of an epoch: those of the dataset, or of its subset."""
        return int(self._order.edges[-1])

    def _start(self) -> Start:
        """Return the first step of the next loop."""
        here = Start(self.epoch, self._stages, self._steps, None)
        if self._adaptive is not None:
            return replace(here, epochs=1, mini_pass=self._mini_pass(self.epoch))
        epochs, mini = self.epochs, self._order.mini
        if epochs is not None and mini is not None:
            epochs = mini.first(epochs)
        return here if epochs is None else replace(here, epochs=max(1, epochs - self.epoch))

    def _segment(self) -> EpochSegment:
        return self._order.segment(self.rank_info.rank, self._start())

    def _is_looping(self) -> bool:
        running = self._running
        return running is not None and not running.closed and self._looping is not None

    def _end_complete(self) -> None:
        """End a loop whose last batch was delivered, though nobody has asked for one more."""
        loop, steps = self._batches(), self._looping
        if loop is not None and steps is not None and self._steps == steps.stop:
            loop.close()

    def _between_loops(self, action: str) -> None:
        if self._pid != os.getpid():
            self._reopen()
        self._end_complete()
        if self._is_looping():
            raise UsageError("the reader is being iterated", fix=f"{action} before the loop")

    def take_share(self, share: float) -> None:
        """Read with a share of the threads and buffers from the next loop.

        Explicit `io_threads` and `buffers` are kept. It takes two buffers at least.
        """
        self._share = share

    def _pipeline(self, segments: Segments) -> Pipeline:
        """Start reading in this process."""
        settings = self._settings
        if self._share < 1:
            if self.buffers is None:
                settings = replace(settings, buffers=max(2, int(settings.buffers * self._share)))
            if self.io_threads is None:
                settings = replace(settings, threads=math.ceil(settings.threads * self._share))
        if self._pools is None:
            self._pools = Pools(self._planner, replace(settings, allocate=self.allocate))
        return Pipeline(self._planner, segments, settings, self._pools, self._ledger)

    def _begin(self) -> Steps:
        """Start reading from here on, in this process or in another one of this node."""
        start = self._start()
        segments = self._order.segments(self.rank_info.rank, start)
        if isinstance(self._node, Client):
            source = self._node.begin(start, segments, self._ledger, self._pipeline)
        else:
            source = self._pipeline(segments)
        return Steps(source, segments, self._ledger)

    def __iter__(self) -> Batches:
        """Return the batches of the next epoch, or of what is left of it."""
        self.check_open()
        if self._pid != os.getpid():  # locks and files of the parent
            self._reopen()
        self._end_complete()
        with self._lock:
            if self._is_looping():
                raise UsageError(
                    "the reader is being iterated already",
                    fix="make a second Reader, or end the first loop",
                )
            self._sidecar.check(again=True)
            if self._adaptive is not None and self._adaptive.reported < self.epoch:
                raise UsageError(
                    "metrics of the last pass decide which mini-epoch comes next",
                    fix="call reader.report(loss=...) between the loops",
                )
            running, within = self._running, self._stages or self._steps
            ahead = None if running is None or running.closed or within else running.segment
            if running is None or ahead is None or ahead.number != self.epoch:
                self._stop()
                running = self._running = self._begin()
                self._closing = weakref.finalize(self, running.close)  # also where nobody does
            segment = running.segment
            assert segment is not None, "there is one epoch at least"
            self._looping = range(segment.first, segment.stop)
        batches = Batches(self, running, self._loop(running))
        self._batches = weakref.ref(batches)
        return batches

    def _stop(self) -> None:
        """End the threads, or wait until another thread has done so."""
        if self._closing is not None:
            self._closing()
        if self._running is not None:
            self._running.close()
        self._closing = self._looping = None

    def _loop(self, running: Steps) -> Generator[Any, None, None]:
        if self._transforming is None:
            how = self.seed, self.rank_info.rank, self._sidecar.dataset, self.allocate
            self._transforming = Transforming(self.transforms, *how)
        cores = cores_of(self.rank_info)
        loop = self._transforming.apply(running.batches(), cores, self.io_threads)
        for _, _, batch in loop:
            object.__setattr__(self, "_steps", self._steps + 1)  # quicker than past the options
            yield batch
            del batch

    def _end_loop(self, running: Steps) -> None:
        """End a loop: after its last batch the epoch ends, else what was read ahead is dropped."""
        if running is not self._running or self._looping is None:
            return
        through = self._steps == self._looping.stop
        self._looping = None
        if through:
            self._go_to(self.epoch + 1)
        if running.segment is None or not through:
            self._stop()
        if not through and self.on_break == "restart":
            self._go_to(self.epoch + 1)

    def _go_to(self, epoch: int) -> None:
        self.epoch, self._stages, self._steps = epoch, (), 0

    def set_epoch(self, epoch: int) -> None:
        """Start the next loop at the beginning of an epoch, counted from 0.

        Parameters
        ----------
        epoch
            Its number, at least 0.

        Raises
        ------
        UsageError
            Within a loop, or if it is not a number.
        """
        epoch = at_least("epoch", epoch, 0)
        self._between_loops("call set_epoch")
        self._go_to(epoch)

    def _reopen(self) -> None:
        self._sidecar = self._sidecar.again()
        self._sidecar.check()
        self._begin_process()
        self._settings = self._set_up(None)

    # --- resuming ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the reader, exact to the batch: a few hundred bytes of JSON.

        Every rank has the same state after as many steps. It can be loaded with another world
        size or batch size: what is left of the epoch is then assigned to the ranks there are.

        Returns
        -------
        dict
            JSON, for `load_state_dict` of a reader of the same dataset, order and seed.
        """
        here = ResumePoint(self.rank_info.world_size, self.batch_size, self._steps)
        return {
            "version": states.VERSION,
            "dataset": self._sidecar.identity,
            "epoch": self.epoch,
            "stages": [[s.world_size, s.batch_size, s.steps] for s in (*self._stages, here)],
            **({} if self._adaptive is None else self._adaptive.state()),
            **self._order.facts(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, other_data: bool = False) -> None:
        """Continue where `state_dict` was called.

        Parameters
        ----------
        state
            The result of `state_dict`, also as read from JSON.
        other_data
            Whether the data may be other ones, with as many samples in as many groups, such as the
            same ones written again.

        Raises
        ------
        UsageError
            If the state is of other data or of a reader that draws another order, or is not a
            state.
        """
        self._between_loops("load the state")
        states.check_origin(state, None if other_data else self._sidecar)
        epoch, stages = states.parse(state)
        states.check_facts(state, self._order.facts())
        if self._adaptive is not None:
            self._adaptive.load(state)
        last = stages[-1]
        same = last.world_size == self.rank_info.world_size and last.batch_size == self.batch_size
        self.epoch = epoch
        self._stages = tuple(stages[:-1]) if same else tuple(s for s in stages if s.steps)
        self._steps = last.steps if same else 0
        if self.samples and self._steps >= self._segment().stop:
            self._go_to(self.epoch + 1)  # saved after the last batch of an epoch

    def __getstate__(self) -> dict[str, Any]:
        # A copy reads for itself, and is not a process of the communicator.
        alone = {"readers_per_node": None, "comm": None}
        given = {name: getattr(self, name) for name in ReaderOptions.__dataclass_fields__}
        return {"arguments": {**given, **alone}, "state": self.state_dict()}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(**state["arguments"])  # type: ignore[misc]
        self.load_state_dict(state["state"])

    # --- accounts and the end ----------------------------------------------------------------

    @property
    def stats(self) -> list[EpochStats]:
        """Statistics of this reader, epoch by epoch."""
        return self._ledger.epochs()

    def close(self) -> None:
        """Stop a running loop and close all files; batches that were delivered stay valid."""
        if self._pid != os.getpid():  # of a fork: the loop and the files are the parent's
            return
        self._is_closed = True
        if self._running is not None:
            self._end_loop(self._running)
        self._stop()
        if isinstance(self._node, Service):
            self._node.close()
        if self._cache is not None:
            self._cache.close()
        self._sidecar.close()
        if (loop := self._batches()) is not None:
            loop.stop()
        self._running = self._pools = None  # the memory, but for batches that somebody holds

    def check_open(self) -> None:
        """Raise `UsageError` if the reader was closed."""
        if self._is_closed:
            raise UsageError("the reader was closed", fix="make another one")

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
        proof = f", verified: {summarize(self.verified)}" if self.verified else ""
        return (
            f"<Reader of {self._sidecar.dataset}: {self.samples} samples of {self.schema}, "
            f"{self.rank_info}{proof}>"
        )


class Batches(Iterator[Any]):
    """One loop through a `Reader`; its threads end with it unless they read the next epoch."""

    def __init__(self, reader: Reader, running: Steps, batches: Generator[Any, None, None]) -> None:
        self._reader, self._running, self._batches = reader, running, batches
        self._over = False

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        try:
            self._reader.check_open()
            return next(self._batches)
        except StopIteration:
            self.close()
            raise
        except BaseException:
            self._running.close()
            self.close()
            raise

    def close(self) -> None:
        """End the loop: before its last batch, stop reading; after it, as if it had ended."""
        if not self._over:
            self._over = True
            self._reader._end_loop(self._running)
            self.stop()

    def stop(self) -> None:
        """End the threads of a transform, and hold no batch any more."""
        with suppress(ValueError):  # another thread waits for a batch, and learns that it is over
            self._batches.close()

    def __del__(self) -> None:
        self.close()
