"""The papers' own figures beside those of the model of `dsprep plan`: theirs, ours, and the ratio.

Few numbers are calibrated, and none per cell: of each machine and application of Lee et al. the
first row gives seconds of a call, bytes per second of a process, the share of the compute that
hides TensorFlow's reads, and how much slower reads are beside compute; of Pumma et al. the seek; of
Mathuriya et al. mean and spread of a read. What these give by construction is marked by *. What
the model lacks where it is more than 25 % off stands in measured.md. Nothing is read or measured.

    python examples/papers.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsprep.core.schema import Array, Ints
from dsprep.planning.published import preset, published
from dsprep.planning.shares import Shares
from dsprep.planning.storage_figures import StorageFigures
from dsprep.planning.waiting import MAPPED, SEEKING, Events, excess
from dsprep.reader.order import Assignment
from dsprep.verbs.tiers import drawn

COLUMNS = ("TF", "TF-Pre", "Async I/O", "Async I/O (DB)")


@dataclass(frozen=True)
class Cell:
    """A figure of a paper, and what the model gives.

    Attributes
    ----------
    source, row, column
        Where it stands, with its unit.
    paper, ours
        The figures; `ours` None: it does not come out.
    calibrated
        Whether the model took it from there.
    """

    source: str
    row: str
    column: str
    paper: float
    ours: float | None
    calibrated: bool = False

    @property
    def ratio(self) -> float | None:
        """Ours by the paper's; 1 where both are nothing."""
        if self.ours is None or not self.paper:
            return 1.0 if self.is_nothing else None
        return self.ours / self.paper

    @property
    def is_nothing(self) -> bool:
        """Whether both are nothing: neither near nor far."""
        return not self.paper and self.ours is not None and self.ours < 0.5

    def within(self, factor: float) -> bool:
        """Whether the figures are so near to each other."""
        return self.ratio is not None and 1 / factor <= self.ratio <= factor


def papers() -> list[Cell]:
    """Return all figures that are compared."""
    return [*_lee(), *_pumma(), *_xu(), *_mathuriya()]


def _lee() -> Iterator[Cell]:
    """Yield exposed I/O, in seconds."""
    paper = published()["lee"]
    for machine, name, rows in paper["tables"]:
        source, application = f"Lee et al., {machine} {name}", paper["applications"][name]
        first, (single, ahead, grouped, buffered, computed) = next(iter(rows.items()))
        count, nbytes = application["samples"] / int(first), application["sample_nbytes"]
        figures = StorageFigures(
            call_seconds=(single - grouped) / count,
            stream_bytes_per_second=count * nbytes / grouped,
        )
        hides = (single - ahead) / computed
        beside = (buffered + computed) / grouped if buffered else 1.0
        for ranks, row in rows.items():
            tf, unit = _tf_and_async(application, int(ranks), figures)
            pre, db = excess(tf, 0, 1, hides * row[4]), excess(beside * unit, 0, 1, row[4])
            for column, seconds, ours in zip(COLUMNS, row, (tf, pre, unit, db), strict=False):
                yield Cell(source, f"{ranks} GPUs, s", column, seconds, ours, ranks == first)
        if (machine, name) == ("Cori", "Neuron-Inverter"):
            ours = _tf_and_async(application, 32, preset("cori"))[1]
            row = "32 GPUs, s, with A from 16 and 64"
            yield Cell(source, row, COLUMNS[2], rows["32"][2], ours, calibrated=True)


def _tf_and_async(
    application: dict[str, int], ranks: int, figures: StorageFigures
) -> tuple[float, float]:
    """Return the seconds in which the busiest rank of dsprep's own order reads an epoch."""
    samples, nbytes = application["samples"], application["sample_nbytes"]
    edges = np.append(np.arange(0, samples, application["group"]), samples)
    order = Assignment(edges, "group", 0, 1, "ragged", ranks, application["batch_size"] // ranks)
    shares = Shares.of(order.sequence(0), ranks)
    count, units = int(shares.samples.max()), int((shares.stop - shares.first).max())
    one, unit = Events(count, 1, nbytes, ranks), Events(units, 1, count / units * nbytes, ranks)
    return count * one.seconds(figures), units * unit.seconds(figures)


def _pumma() -> Iterator[Cell]:
    """Yield how many times faster than LMDB the ways of LMDBIO are, and what does not come out.

    PROV and COAL are simulated at servers that seek; where readers take turns the bytes come at
    full bandwidth; DM and DIO are as published.
    """
    paper, figures = published()["pumma"], preset("lmdbio")
    nodes, steps, block = (paper[k] for k in ("nodes", "steps", "block_nbytes"))
    share, node = paper["batch_size"] // nodes * paper["record_nbytes"], np.arange(nodes)
    blocks = steps * share // block
    prov = _rounds((share, (step * nodes + node) * share) for step in range(steps))
    coal = _rounds((block, (node * blocks + k) * block) for k in range(blocks))
    full = nodes * steps * share / (figures.total_bytes_per_second or 1)
    ways = {"DM": prov * MAPPED, "DIO": prov / SEEKING, "PROV": prov, "COAL": coal, "STAG": full}
    source, faster = "Pumma et al., 4,608 ranks", paper["faster"]
    for row, lmdb, calibrated in (
        ("LMDB by redundant bytes", nodes * full, ()),
        ("LMDB's seconds from STAG", faster["STAG"] * full, ("PROV", "STAG")),
    ):
        for name, seconds in ways.items():
            yield Cell(source, row, name, faster[name], lmdb / seconds, name in calibrated)
    yield Cell(source, "up to 1,152 ranks", "LMM", paper["lmm_faster"], None)


class Targets:
    """Storage targets, each of which serves its requests in the order of their arrival.

    All queues are computed at once: ``done[i] = max(arrival[i], done[i - 1]) + seconds[i]`` is a
    running maximum once the sums of the seconds are taken off.

    Parameters
    ----------
    count
        How many there are.
    seek_seconds
        What a request takes in addition that does not begin where the one before it ended.
    """

    def __init__(self, count: int, seek_seconds: float) -> None:
        self.seek_seconds = seek_seconds
        self.free, self._ends = np.zeros(count), np.zeros(count)
        self.seeks = 0

    def serve(
        self, arrivals: Array, targets: Ints, seconds: Array, offsets: Array, nbytes: Array
    ) -> Array:
        """Return when requests are done that arrive after all those before: float64, ``(n,)``.

        All arrays have that shape; offsets are those on the target.
        """
        order = np.lexsort((arrivals, targets))
        at, begin, end = targets[order], offsets[order], (offsets + nbytes)[order]
        first = np.flatnonzero(np.append(True, at[1:] != at[:-1]))
        last = np.append(first[1:], len(at)) - 1
        queue = np.repeat(np.arange(len(first)), last - first + 1)
        before = np.append(0.0, end[:-1])
        before[first] = self._ends[at[first]]
        seeks = begin != before
        service = seconds[order] + self.seek_seconds * seeks
        arrived = arrivals[order].astype(np.float64)
        arrived[first] = np.maximum(arrived[first], self.free[at[first]])
        served = np.cumsum(service)
        served -= (served - service)[first][queue]
        slack = arrived - (served - service)
        lift = queue * (np.ptp(slack) + 1.0)  # no queue waits for the one before it
        done = np.maximum.accumulate(slack + lift) - lift + served
        self.free[at[last]], self._ends[at[last]] = done[last], end[last]
        self.seeks += int(seeks.sum())
        result: Array = np.empty_like(done)
        result[order] = done
        return result


def _rounds(rounds: Iterable[tuple[int, Ints]]) -> float:
    """Return the seconds of rounds of reads, a size and offsets each, with a barrier after each."""
    paper, figures, now = published()["pumma"], preset("lmdbio"), 0.0
    servers, block = paper["servers"], paper["block_nbytes"]
    targets, jitter = Targets(servers, figures.seek_seconds or 0.0), np.random.default_rng(0)
    for nbytes, offsets in rounds:
        number, size = offsets // block, np.full(len(offsets), float(nbytes))
        arrivals = now + jitter.exponential(paper["jitter_seconds"], len(offsets))
        on_server = (number // servers * block + offsets % block).astype(np.float64)
        seconds = size / figures.stream_bytes_per_second
        now = float(targets.serve(arrivals, number % servers, seconds, on_server, size).max())
    return now


def _xu() -> Iterator[Cell]:
    """Yield what mini-epochs draw, as `dsprep plan --tier` computes it."""
    paper = published()["xu"]
    ours = drawn(paper["consumed"], paper["given"], [paper["repeats"]])
    yield Cell("Xu et al.", "nm = rf = 128, GB/s", "drawn", paper["drawn"], ours)


def _mathuriya() -> Iterator[Cell]:
    """Yield bandwidths and the straggler."""
    paper, figures, source = published()["mathuriya"], preset("cori-lustre"), "Mathuriya et al."
    step, nbytes, targets = paper["step_seconds"], paper["nbytes"], paper["targets"]
    needed, rate = nbytes / step, paper["total_bytes_per_second"] / paper["all_targets"]
    drawn_rate = 128 * nbytes / paper["lustre_step_seconds"] / targets
    kept = step / (1024 * nbytes / targets / drawn_rate)
    lustre = {"128": step / paper["lustre_step_seconds"], "1024": paper["efficiency"]}
    pairs: Sequence[tuple[str, str, Any, float]] = (
        ("b*S/t, MB/s/node", "BW_min", paper["needed_mb_per_second"], needed / 1e6),
        ("700 GB/s of 248, GB/s", "target", paper["target_gb_per_second"], rate / 1e9),
        ("at BW_min, nodes", "target", paper["nodes_per_target"], rate / needed),
        ("128 nodes, MB/s", "target", paper["target_mb_per_second"], drawn_rate / 1e6),
        ("1,024 nodes, efficiency", "slow target kept", lustre["1024"], kept),
    )
    for row, column, value, ours in pairs:
        yield Cell(source, row, column, value, ours)
    mean = nbytes / figures.stream_bytes_per_second
    for ranks, efficiency in lustre.items():
        late = excess(mean, figures.sigma, int(ranks), step) + paper["communication_seconds"][ranks]
        row = f"{int(ranks):,} nodes, efficiency"
        yield Cell(source, row, "slowest of P reads", efficiency, step / (step + late), True)


def main() -> None:
    """Print the table."""
    for cell in papers():
        ours = "-" if cell.ours is None else f"{cell.ours:.4g}{'*' * cell.calibrated}"
        ratio = "-" if cell.ratio is None else f"{cell.ratio:.2f}"
        where = f"{cell.source}, {cell.row}, {cell.column}"
        print(f"{where:<70} {round(cell.paper, 4):>10,} {ours:>10} {ratio:>6}")


if __name__ == "__main__":
    main()
