"""Which samples a rank delivers: every promise of `dsprep.reader.order`, for any numbers."""

from __future__ import annotations

import hashlib
import itertools
import tracemalloc
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsprep.reader.order import (
    REMAINDERS,
    SHUFFLES,
    Epoch,
    ResumePoint,
    Sequence,
    Span,
)


@dataclass(frozen=True)
class Case:
    edges: tuple[int, ...]
    ranks: int
    batch: int
    seed: int
    number: int
    shuffle: str
    mixed: int
    remainder: str
    stages: tuple[ResumePoint, ...] = ()

    @property
    def n(self):
        return self.edges[-1]

    def sequence(self):
        edges = np.array(self.edges, np.int64)
        return Sequence(edges, self.shuffle, self.seed, self.number, self.mixed)

    def epoch(self):
        return Epoch(self.sequence(), self.stages, self.remainder)


@st.composite
def cases(draw, stages=0):
    sizes = draw(
        st.one_of(
            st.lists(st.integers(1, 12), max_size=14),
            st.builds(lambda b, k, r: [b] * k + [r], *(st.integers(1, 9) for _ in range(3))),
        )
    )
    edges = tuple(itertools.accumulate(sizes, initial=0))
    return Case(
        edges,
        ranks=draw(st.integers(1, 9)),
        batch=draw(st.integers(1, 9)),
        seed=draw(st.integers(-3, 1 << 64)),
        number=draw(st.integers(0, 5)),
        shuffle=draw(st.sampled_from(SHUFFLES)),
        mixed=draw(st.integers(1, 4)),
        remainder=draw(st.sampled_from(REMAINDERS)),
        stages=tuple(
            ResumePoint(draw(st.integers(1, 7)), draw(st.integers(1, 7)), draw(st.integers(0, 6)))
            for _ in range(draw(st.integers(0, stages)))
        ),
    )


def unrolled(sequence, units):
    """The samples that units deliver, in order."""
    parts = [np.zeros(0, np.int64)]
    for unit in units:
        samples, slots = sequence.slots(unit)
        assert samples.dtype == slots.dtype == np.int64
        out = np.full(len(unit), -1, np.int64)
        out[slots] = samples
        parts.append(out)
    return np.concatenate(parts)


def rank_order(case, rank, epoch=None):
    epoch = epoch or case.epoch()
    dealt = epoch.share(case.ranks, rank, case.batch)
    return dealt, unrolled(epoch.sequence, epoch.units(dealt))


def every_rank(case, epoch=None):
    epoch = epoch or case.epoch()
    return [rank_order(case, rank, epoch) for rank in range(case.ranks)]


def counts(case, orders):
    return np.bincount(np.concatenate([np.zeros(0, np.int64), *orders]), minlength=case.n)


@given(cases(stages=2), st.integers(0, 120))
def test_what_ranks_deliver(case, skip):
    """As many samples as their shares say, in as many steps; each time the same, from any step."""
    told = every_rank(case)
    assert len({dealt.steps for dealt, _ in told}) == 1
    for rank, (dealt, order) in enumerate(told):
        assert len(order) == dealt.count == dealt.delivered(dealt.steps)
        assert ((order >= 0) & (order < case.n)).all()
        ends = [dealt.delivered(step) for step in range(dealt.steps + 1)]
        sizes = np.diff(ends)
        assert ends[0] == 0
        assert ((sizes >= 0) & (sizes <= case.batch)).all()
        assert dealt.sizes(0, dealt.steps).tolist() == sizes.tolist()
        assert dealt.sizes(1, dealt.steps).tolist() == sizes[1:].tolist()
        if case.remainder != "ragged":
            assert (sizes == case.batch).all()
        else:
            assert (np.diff(sizes) <= 0).all()  # the short ones come last
            assert (sizes > 0).all() or dealt.own < dealt.steps
        again = case.epoch()  # as a process that has just started
        assert again.share(case.ranks, rank, case.batch) == dealt
        rest = unrolled(again.sequence, again.units(dealt, skip))
        assert rest.tolist() == order[skip:].tolist()


@given(cases())
def test_how_often_a_sample_comes(case):
    told = every_rank(case)
    times = counts(case, [order for _, order in told])
    if case.remainder == "ragged":
        assert (times == 1).all()
        sizes = [dealt.own for dealt, _ in told]
        assert max(sizes) - min(sizes) <= 1
    elif case.remainder == "drop":  # it leaves out the remainder of a step of all ranks
        assert (times <= 1).all()
        assert int((times == 0).sum()) == case.n % (case.ranks * case.batch)
    else:  # own samples once, then repeats
        assert (counts(case, [order[: dealt.own] for dealt, order in told]) == 1).all()
        repeats = sum(len(order) for _, order in told) - case.n
        assert repeats == -case.n % (case.ranks * case.batch)
        for dealt, order in told:  # around the ring: none comes again before all others
            times = counts(case, [order])
            assert case.n == 0 or times.min() == dealt.count // case.n
            assert case.n == 0 or times.max() == -(-dealt.count // case.n)


@given(cases(stages=2))
def test_units(case):
    epoch = case.epoch()
    sequence = epoch.sequence
    for rank in range(case.ranks):
        for unit in epoch.units(epoch.share(case.ranks, rank, case.batch)):
            assert unit.fixed
            assert 0 <= unit.low < unit.high <= unit.stop - unit.start
            samples, slots = sequence.slots(unit)
            assert sorted(slots.tolist()) == list(range(len(unit)))
            assert len(set(samples.tolist())) == len(unit)
            ends = np.searchsorted(sequence.ends, (unit.start, unit.stop - 1), "right")
            assert ends[1] - ends[0] < case.mixed
            held = set(sequence.samples(unit.start, unit.stop).tolist())
            assert held >= set(samples.tolist())
            if case.shuffle == "global":
                assert (np.diff(samples) > 0).all()
            else:
                groups = np.searchsorted(case.edges, samples, "right")
                assert len(set(groups.tolist())) <= case.mixed
                falls = np.diff(samples) < 0
                assert (np.diff(groups)[falls] != 0).all()  # within a group they rise


@given(cases())
def test_ranks_share_at_most_the_group_at_either_end(case):
    sequence = case.sequence()
    epoch = Epoch(sequence, (), case.remainder)
    for rank in range(case.ranks):
        dealt = epoch.share(case.ranks, rank, case.batch)
        dealt = replace(dealt, count=min(dealt.own, dealt.count))
        parts = 0
        for unit in epoch.units(dealt):
            low, high = np.searchsorted(sequence.ends, (unit.start, unit.stop - 1), "right")
            parts += int(unit.start > sequence.ends[low - 1])
            parts += int(unit.stop < sequence.ends[high])
        assert parts <= 2


def interrupted(case):
    """Do an epoch in stages: return (own samples, repeats, how many were left for the last)."""
    sequence = case.sequence()
    own, repeats = [], []
    for i, stage in enumerate((*case.stages, ResumePoint(case.ranks, case.batch, 1 << 40))):
        epoch = Epoch(sequence, case.stages[:i], case.remainder)
        left = len(epoch)
        for rank in range(stage.world_size):
            dealt = epoch.share(stage.world_size, rank, stage.batch_size)
            done = dealt.delivered(min(stage.steps, dealt.steps))
            order = unrolled(sequence, epoch.units(dealt))[:done]
            own.append(order[: dealt.own])
            repeats.append(order[dealt.own :])
    return own, repeats, left


@given(cases(stages=4))
def test_resuming_with_other_ranks_loses_and_repeats_nothing(case):
    own, repeats, left = interrupted(case)
    times = counts(case, own)
    assert (times <= 1).all()
    missing = int((times == 0).sum())
    if case.remainder == "drop":
        assert missing == left % (case.ranks * case.batch)
    else:
        assert missing == 0
    if case.remainder != "pad":
        assert not sum(map(len, repeats))


@given(cases())
def test_the_sequence_is_every_sample_in_any_slices(case):
    sequence = case.sequence()
    whole = sequence.samples(0, case.n)
    assert sorted(whole.tolist()) == list(range(case.n))
    for a, b in itertools.combinations(range(0, case.n + 1, max(1, case.n // 5)), 2):
        assert sequence.samples(a, b).tolist() == whole[a:b].tolist()
        assert sequence.samples(a, a).tolist() == []


# --- randomness --------------------------------------------------------------------------------


def places_over_epochs(n, edges, shuffle, mixed, epochs):
    """How often each sample is at each position: int64, shape ``(n, n)``."""
    table = np.zeros((n, n), np.int64)
    for number in range(epochs):
        sequence = Sequence(np.array(edges), shuffle, 1, number, mixed)
        order = unrolled(sequence, sequence.units(Span.uncut(0, n)))
        table[order, np.arange(n)] += 1
    return table


@pytest.mark.parametrize(("shuffle", "mixed"), [("group", 1), ("group", 3), ("global", 1)])
def test_samples_are_at_all_positions_equally_often(shuffle, mixed):
    n, epochs = 60, 800
    table = places_over_epochs(n, range(0, n + 1, 6), shuffle, mixed, epochs)
    expected = epochs / n
    chi_square = ((table - expected) ** 2 / expected).sum(axis=1)  # n - 1 degrees of freedom
    assert abs(chi_square.mean() - (n - 1)) < 4 * np.sqrt(2 * (n - 1) / 10)  # 10 groups at least
    assert chi_square.max() < 110  # p = 1e-4 of one sample


# --- the same on every machine and in every version ----------------------------------------------

EDGES = (0, 5, 6, 13, 20, 21, 40)
GOLDEN = {
    ("group", 1): "bbc532b6f7113554",
    ("group", 2): "6104e6298a547afc",
    ("global", 1): "5cc2978a944adb04",
    ("global", 2): "5cc2978a944adb04",
    ("none", 1): "ec6171d48229f44f",
    ("none", 2): "ec6171d48229f44f",
}


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("mixed", [1, 2])
def test_golden(shuffle, mixed):
    stages = (ResumePoint(3, 2, 2), ResumePoint(2, 5, 1))
    words = hashlib.blake2b(digest_size=8)
    for remainder, number in itertools.product(REMAINDERS, (0, 7)):
        for some in ((), stages):
            case = Case(EDGES, 4, 3, 1234, number, shuffle, mixed, remainder, some)
            for _, order in every_rank(case):
                words.update(order.astype("<i8").tobytes())
    assert words.hexdigest() == GOLDEN[shuffle, mixed]


# --- large -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_a_billion_samples_on_thousands_of_ranks(shuffle):
    n, groups, ranks, batch = 10**9, 300_000, 9216, 64
    edges = np.append(np.arange(groups, dtype=np.int64) * (n // groups), n)
    tracemalloc.start()
    epoch = Epoch(Sequence(edges, shuffle, 5, 1), (), "ragged")
    told = []
    for rank in (0, 4711, ranks - 1):
        dealt = epoch.share(ranks, rank, batch)
        told.append(dealt)
        units = list(epoch.units(dealt))
        assert sum(map(len, units)) == dealt.count
        assert len(units) <= groups // ranks + 3
        assert len(epoch.sequence.slots(units[0])[0]) == len(units[0])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20
    assert len({dealt.steps for dealt in told}) == 1


def test_resuming_a_billion_samples_on_thousands_of_ranks():
    n, ranks, batch = 10**9, 9216, 64
    sequence = Sequence(np.append(np.arange(0, n, 3334), n), "group", 5, 1, 2)
    after = Epoch(
        sequence, (ResumePoint(ranks, batch, 100), ResumePoint(ranks // 2, batch, 10)), "ragged"
    )
    assert len(after) == n - ranks * batch * 100 - ranks // 2 * batch * 10
    assert len(after.spans) <= 2 * (ranks + ranks // 2)
    dealt = after.share(1000, 777, batch)
    assert sum(map(len, after.units(dealt, 1000))) == dealt.own - 1000
