"""Threads, buffers and engine of a `Reader`: as requested, or by the rules."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from dsprep.reader.cached import ReaderCache
from dsprep.reader.defaults import buffers_by_rule, cores_of, threads_by_rule, units_ahead
from dsprep.reader.engines import make
from dsprep.reader.node.tokens import staggering
from dsprep.reader.options import ReaderOptions, chosen_fields
from dsprep.reader.order import Assignment
from dsprep.reader.pipeline import PipelineSettings
from dsprep.reader.ranks import RankInfo
from dsprep.reader.units import first_file, is_decoded, sample_nbytes
from dsprep.sidecar.sidecar import Sidecar
from dsprep.storage.paths import StorePath


def choose_concurrency(
    options: ReaderOptions, opened: Sidecar, order: Assignment, rank_info: RankInfo
) -> tuple[int, int]:
    """Return the threads that read, and the units in memory at a time."""
    schema, is_stored = chosen_fields(options, opened), isinstance(opened.dataset, StorePath)
    unit_nbytes = order.largest_group * order.mixed * sample_nbytes(opened, schema)
    if options.io_threads is not None:
        threads = options.io_threads
    elif is_stored:  # where reading is waiting for answers
        threads = max(1, options.buffers - 1) if options.buffers else units_ahead(unit_nbytes)
    else:
        threads = threads_by_rule(cores_of(rank_info), is_decoded(opened, schema.names))
    by_rule = threads + 1 if is_stored else buffers_by_rule(unit_nbytes, threads)
    return threads, options.buffers or by_rule


def make_settings(
    options: ReaderOptions,
    opened: Sidecar,
    order: Assignment,
    rank_info: RankInfo,
    chosen: tuple[int, int],
    cache: ReaderCache | None,
    comm: Any,
) -> PipelineSettings:
    """Return the settings of a pipeline with `chosen` threads and buffers; check the engine."""
    (threads, buffers), stagger, engine = chosen, options.stagger, make(options.engine)
    if options.engine != "buffered" and len(opened) and options.cache is None:
        engine.prepare(first_file(opened, chosen_fields(options, opened).names))
    return PipelineSettings(
        engine=engine,
        threads=threads,
        buffers=buffers,
        unit_samples=order.largest_group * order.mixed,
        first=1 if isinstance(opened.dataset, StorePath) else threads,  # each a request
        transfer=options.transfer_size,
        cache=cache,
        token=nullcontext if stagger is None else staggering(rank_info, stagger, threads, comm),
    )
