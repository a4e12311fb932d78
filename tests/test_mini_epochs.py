"""Mini-epochs: every promise of their order, for any numbers."""

from __future__ import annotations

import itertools
import json
from dataclasses import astuple, replace
from itertools import islice

import h5py
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from support import fails

import dsprep
from dsprep.errors import FormatError, UsageError
from dsprep.reader.mini_epochs import MiniEpochs
from dsprep.reader.order import REMAINDERS, SHUFFLES, Assignment, Epoch, ResumePoint, Start
from dsprep.repeats import Bollinger, Patience
from dsprep.verbs.counting import Counter, Parts

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=16)


@st.composite
def assignments(draw):
    sizes = draw(SIZES)
    edges = np.array([0, *itertools.accumulate(sizes)], np.int64)
    shuffle = draw(st.sampled_from(SHUFFLES))
    mini = MiniEpochs(
        parts=draw(st.integers(1, len(sizes))),
        repeats=tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))),
        recompose=draw(st.booleans()),
        pools=1 if shuffle == "global" else draw(st.integers(1, 4)),
    )
    numbers = {"mixed": draw(st.integers(1, 3)), "world_size": draw(st.integers(1, 5))}
    return Assignment(
        edges,
        shuffle,
        seed=draw(st.integers(0, 99)),
        remainder=draw(st.sampled_from(REMAINDERS)),
        batch_size=draw(st.integers(1, 5)),
        mini=mini,
        **numbers,
    )


def delivered(order, number):
    """What all ranks deliver in a pass as their own samples, and their steps."""
    found, steps = [], set()
    for rank in range(order.world_size):
        segment = order.segment(rank, Start(number, (), 0, 1))
        steps.add(segment.stop - segment.first)
        rest = min(segment.share.count, segment.share.own)
        for unit in segment.epoch.units(segment.share):
            samples, slots = segment.epoch.sequence.slots(unit)
            assert sorted(slots.tolist()) == list(range(len(unit)))
            found += samples[np.argsort(slots)].tolist()[: max(0, rest)]
            rest -= len(unit)
    assert len(steps) == 1
    return found


@given(assignments(), st.integers(0, 3))
def test_every_sample_comes_in_one_part_as_often_as_it_is_repeated(order, epoch):
    mini, n = order.mini, int(order.edges[-1])
    times = np.zeros(n, np.int64)
    parts = np.full(n, -1)
    for number in range(mini.first(epoch), mini.first(epoch + 1)):
        which = mini.at(number)
        assert which.number == number
        assert which.epoch == epoch
        found = delivered(order, number)
        assert len(set(found)) == len(found)
        length = len(order.sequence(number))
        left_out = length % (order.world_size * order.batch_size)
        assert len(found) == length - (left_out if order.remainder == "drop" else 0)
        assert np.isin(parts[found], (-1, which.part)).all()
        parts[found] = which.part
        times[found] += 1
    first, last = epoch * mini.parts, len(mini.repeats) - 1
    rf = [mini.repeats[min(part, last)] for part in range(first, first + mini.parts)]
    assert mini.first(epoch + 1) - mini.first(epoch) == sum(rf)
    if order.remainder != "drop":
        assert times.tolist() == [rf[p] for p in parts]


STAGES = st.lists(
    st.builds(ResumePoint, st.integers(1, 6), st.integers(1, 6), st.integers(0, 5)), max_size=3
)


@given(assignments(), st.integers(0, 12), STAGES)
def test_a_pass_continues_on_other_ranks(order, number, stages):
    """After any steps of any numbers of ranks and sizes of batches: the part, each sample once."""
    sequence, done = order.sequence(number), []
    part = sorted(np.concatenate([sequence.samples(0, len(sequence))]).tolist())
    for i, stage in enumerate(stages):
        epoch = Epoch(sequence, tuple(stages[:i]), order.remainder)
        for rank in range(stage.world_size):
            share = epoch.share(stage.world_size, rank, stage.batch_size)
            done += own(epoch, share, share.delivered(min(stage.steps, share.steps)))
    steps, sizes = set(), set()
    for rank in range(order.world_size):
        segment = order.segment(rank, Start(number, tuple(stages), 0, 1))
        steps.add(segment.stop - segment.first)
        sizes |= set(
            np.diff([segment.share.delivered(s) for s in range(segment.stop + 1)]).tolist()
        )
        done += own(segment.epoch, segment.share, segment.share.count)
    assert len(steps) == 1
    if order.remainder == "drop":
        lacking = len(segment.epoch) % (order.world_size * order.batch_size)
        assert len(set(done)) == len(done) == len(part) - lacking
        assert set(done) <= set(part)
    else:
        assert sorted(done) == part
    if order.remainder != "ragged":
        assert sizes <= {order.batch_size}


@given(
    assignments(), st.integers(0, 2), st.none() | st.tuples(st.integers(0, 4), st.integers(1, 4))
)
def test_the_audit_finds_nothing(order, epochs, resume):
    """But passes without a full batch, where such are left out."""
    parts, at = Parts(order, order.mini), resume or (None, None)
    for number in range(order.mini.first(epochs)):
        sequence, which = order.sequence(number), order.mini.at(number)
        last = order.mini.at(number + 1).turn == 0
        problems = parts.problems(which, sequence.groups, last)
        counter = Counter(sequence, order.remainder, order.batch_size, which, problems)
        found = counter.run(order.world_size, *at)
        assert found.never + found.once + found.more == len(sequence) > 0
        empty = order.remainder == "drop" and not found.once
        assert len(found.problems) == empty
        assert not empty or "not one full batch" in found.problems[0]


def own(epoch, share, count):
    """The first of the samples that a rank delivers, but for those that fill up batches."""
    found, count = [], min(count, share.own)
    for unit in epoch.units(share):
        if len(found) < count:
            samples, slots = epoch.sequence.slots(unit)
            found += samples[np.argsort(slots)].tolist()
    return found[:count]


def fixed(parts=4, repeats=(3,), groups=40, **others):
    edges = np.arange(groups + 1, dtype=np.int64) * 10
    mini = MiniEpochs(parts, repeats, **others)
    return Assignment(edges, "group", 7, 1, "ragged", 2, 5, mini)


@example([1, 3, 1, 1, 1], 3, 1, 0, False)
@given(SIZES, st.integers(1, 16), st.integers(1, 4), st.integers(0, 99), st.booleans())
def test_each_part_has_a_group(sizes, parts, pools, seed, shuffled):
    """However large the others are; and each pool that has samples."""
    edges = np.array([0, *itertools.accumulate(sizes)], np.int64)
    mini = MiniEpochs(min(parts, len(sizes)), (1,), pools=pools)
    for part in range(mini.parts):
        which = mini.at(part)
        found = mini.groups(edges, seed, which, shuffled=shuffled)
        each = [mini.pool(edges, seed, which, i, shuffled=shuffled) for i in range(pools)]
        assert set(np.concatenate(each).tolist()) == set(found.tolist())
        assert 0 < sum(map(len, each)) < len(found) + pools  # at most one at each border is in two
        n = int(np.diff(edges)[found].sum())
        assert min(map(len, each)) > 0 or n < pools


def test_passes_differ_and_parts_are_drawn():
    order = fixed()
    orders = [order.sequence(i).samples(0, 100).tolist() for i in range(3)]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert orders[0] != orders[1] != orders[2]
    first, later = order.sequence(0), order.sequence(order.mini.first(1))
    assert sorted(first.samples(0, 100)) != sorted(later.samples(0, 100))


def test_without_recomposing_parts_stay_and_their_order_is_drawn():
    order = fixed(recompose=False)
    epochs = []
    for epoch in range(6):
        first = order.mini.first(epoch)
        parts = [order.sequence(first + 3 * m).samples(0, 100) for m in range(4)]
        epochs.append([tuple(sorted(p.tolist())) for p in parts])
    assert len({frozenset(parts) for parts in epochs}) == 1
    assert len({tuple(parts) for parts in epochs}) > 1


@given(assignments(), st.integers(1, 3))
def test_a_rank_reads_from_its_pool_alone(order, ranks_per_node):
    """Also what fills up its batches, and wherever in a group a pool begins."""
    assume(order.shuffle != "global")
    order = replace(order, world_size=order.mini.pools * ranks_per_node)
    for number in range(order.mini.first(2)):
        which = order.mini.at(number)
        assume(len(order.sequence(number)) >= order.mini.pools)
        for rank in range(order.world_size):
            segment = order.segment(rank, Start(number, (), 0, 1))
            pool = order.pool(which, rank).tolist()
            for unit in segment.epoch.units(segment.share):
                samples, _ = segment.epoch.sequence.slots(unit)
                groups = np.searchsorted(order.edges, samples, "right") - 1
                assert set(groups.tolist()) <= set(pool)


def test_the_same_on_every_machine():
    order = fixed(repeats=(2, 5), pools=2)
    found = [(order.sequence(i).samples(0, 100)[::10] // 10).tolist() for i in (0, 1, 6)]
    assert found == [
        [39, 14, 5, 28, 22, 24, 6, 26, 19, 3],
        [39, 22, 14, 28, 5, 24, 19, 26, 6, 3],
        [16, 37, 17, 25, 34, 2, 32, 1, 38, 9],
    ]


# --- the Reader ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("mini") / "x.h5"
    with h5py.File(path.with_name("in.h5"), "w") as file:
        file["x"] = np.arange(400)
    dsprep.repack(path.with_name("in.h5"), path, buffer_size="10")
    return path


def passes(reader, count):
    return [[x for batch in reader for x in batch["x"].tolist()] for _ in range(count)]


def test_reader(data):
    with dsprep.Reader(data, batch_size=7, mini_epochs=4, repeats=3) as reader:
        assert astuple(reader.mini_epoch) == (0, 0, 0, 0)
        found = passes(reader, 12)
        assert (reader.epoch, astuple(reader.mini_epoch)) == (12, (12, 1, 0, 0))
    assert all(len(set(part)) == len(part) == 100 for part in found)
    for m in range(4):
        same = found[3 * m : 3 * m + 3]
        assert len({frozenset(part) for part in same}) == 1
        assert same[0] != same[1] != same[2]
    assert sorted(x for part in found[::3] for x in part) == list(range(400))


@pytest.mark.parametrize(("ranks", "batch"), [(1, 7), (3, 4)])
def test_reader_continues(data, ranks, batch):
    """In the middle of a pass, also with other ranks and batches: each sample of the part once."""
    options = {"mini_epochs": 3, "repeats": (1, 2), "seed": 5}
    seen, states, rest, steps = [], [], [], set()
    for rank in range(2):
        with dsprep.Reader(data, 7, rank=rank, world_size=2, **options) as reader:
            passes(reader, 2)
            for step in islice(reader, 4):
                seen += step["x"].tolist()
            states.append(reader.state_dict())
    assert states[0] == states[1]
    for rank in range(ranks):
        with dsprep.Reader(data, batch, rank=rank, world_size=ranks, **options) as reader:
            reader.load_state_dict(json.loads(json.dumps(states[0])))
            assert astuple(reader.mini_epoch) == (2, 0, 1, 1)
            steps.add(len(reader))
            rest += passes(reader, 1)[0]
            assert astuple(reader.mini_epoch) == (3, 0, 2, 0)
    with dsprep.Reader(data, 7, **options) as reader:
        reader.set_epoch(2)
        whole = passes(reader, 1)[0]
    assert len(steps) == 1
    assert sorted(seen + rest) == sorted(whole)


def test_reading_ahead_ends_with_the_last_epoch(data):
    with dsprep.Reader(data, batch_size=7, epochs=2, mini_epochs=2, repeats=(1, 3)) as reader:
        passes(reader, 10)
        assert astuple(reader.mini_epoch) == (10, 2, 0, 0)


@pytest.mark.parametrize(
    "wrong",
    [{"mini_epochs": 0}, {"mini_epochs": 41}, {"repeats": 2}]
    + [{"mini_epochs": 40, "batch_size": 11, "remainder": "drop"}]
    + [{"mini_epochs": 2, "repeats": r} for r in (0, (), (1, 0), "3", 1.5, lambda part: 2)],
)
def test_what_makes_no_sense(data, wrong):
    fails(lambda: dsprep.Reader(data, **{"batch_size": 7, **wrong}), UsageError)


@pytest.mark.parametrize("other", [{"repeats": (1, 1, 2, 3)}, {"repeats": 1}, {"mini_epochs": 3}])
def test_other_passes_do_not_continue(data, other):
    options = {"batch_size": 7, "mini_epochs": 2, "repeats": (1, 1, 2, 2)}
    with dsprep.Reader(data, **options) as reader:
        state = reader.state_dict()
    with (
        dsprep.Reader(data, **{**options, **other}) as reader,
        pytest.raises(UsageError, match="another mini_epochs"),
    ):
        reader.load_state_dict(state)


# --- repeats that adapt ----------------------------------------------------------------------


def reports(*losses):
    return [{"loss": loss} for loss in losses]


def test_patience():
    policy = Patience(passes=2, least=2, most=6)
    assert not policy.enough(reports(1.0))
    assert not policy.enough(reports(1.0, 2.0))
    assert policy.enough(reports(1.0, 2.0, 1.0))
    assert not policy.enough(reports(1.0, 2.0, 0.9))
    assert policy.enough(reports(6, 5, 4, 3, 2, 1))
    mixed = Patience(passes=1, score={"loss": 1.0, "accuracy": -2.0})
    assert not mixed.enough([{"loss": 1, "accuracy": 0.5}, {"loss": 1.5, "accuracy": 0.8}])
    assert mixed.enough([{"loss": 1, "accuracy": 0.5}, {"loss": 1.5, "accuracy": 0.7}])


def test_bollinger():
    policy = Bollinger(periods=4, width=2.0)
    flat = reports(1.0, 1.2, 1.0, 1.2)
    assert not policy.enough(flat)
    assert not policy.enough([*flat, {"loss": 0.91}])  # the mean is 1.1, the deviation 0.1
    assert policy.enough([*flat, {"loss": 0.89}])
    assert not policy.enough([*reports(9, 0.1), *flat, {"loss": 0.91}])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Patience(score={}),
        lambda: Patience(least=0),
        lambda: Patience(least=5, most=4),
        lambda: Bollinger(periods=1),
        lambda: Patience().enough([{"error": 1.0}]),
        lambda: Patience().enough(reports(float("nan"))),
    ],
)
def test_policies_that_make_no_sense(wrong):
    fails(wrong, UsageError)


class Scripted:
    """Ends mini-epochs after given numbers of passes."""

    def __init__(self, *repeats):
        self.repeats = list(repeats)

    def enough(self, reports):
        if len(reports) < self.repeats[0]:
            return False
        self.repeats.pop(0)
        return True


def test_repeats_adapt_and_can_be_replayed(data, tmp_path):
    options = {"batch_size": 7, "mini_epochs": 3, "seed": 2}
    found, over = [], []
    with dsprep.Reader(data, repeats=Scripted(2, 1, 3, 1), **options) as reader:
        for number in range(7):
            found += passes(reader, 1)
            fails(lambda: next(iter(reader)), UsageError, "report")
            over.append(reader.report(loss=1.0))
            assert reader.epoch == number + 1
        fails(lambda: reader.report(loss=1.0), UsageError, "no pass")
        assert astuple(reader.mini_epoch) == (7, 1, 1, 0)
        state = tmp_path / "state.json"
        state.write_text(json.dumps(reader.state_dict()))
    assert over == [False, True, True, False, False, True, True]
    replay = dsprep.repeats.Replay(state)
    assert replay == (2, 1, 3, 1)
    with dsprep.Reader(data, repeats=replay, **options) as reader:
        assert passes(reader, 7) == found
        fails(lambda: reader.report(loss=1.0), UsageError, "metrics")


def test_a_mini_epoch_is_not_over_before_the_next_one_is_staged(data, tmp_path):
    class Always:
        def enough(self, reports):
            return True

    nbytes = data.stat().st_size
    options = {"cache": dsprep.Cache(tmp_path / "cache", bandwidth=nbytes // 2)}
    with dsprep.Reader(data, 7, mini_epochs=2, repeats=Always(), **options) as reader:
        numbers = 1
        list(reader)
        while not reader.report(loss=1.0):
            numbers += 1
            list(reader)
        assert numbers > 1  # a second for the other half
        list(reader)
        assert reader.stats[-1].cache_nbytes == reader.stats[-1].nbytes


def test_decisions_are_part_of_the_state(data):
    options = {"batch_size": 7, "mini_epochs": 3, "seed": 2}
    with dsprep.Reader(data, repeats=Scripted(1, 3, 1), **options) as reader:
        for _ in range(2):
            passes(reader, 1)
            reader.report(loss=1.0)
        state = json.loads(json.dumps(reader.state_dict()))
        passes(reader, 1)
        reader.report(loss=2.0)
        expected = passes(reader, 1)
    seen = []

    class Looking:
        def enough(self, reports):
            seen.append(len(reports))
            return False

    with dsprep.Reader(data, repeats=Looking(), **options) as reader:
        reader.load_state_dict(state)
        assert astuple(reader.mini_epoch) == (2, 0, 1, 1)
        passes(reader, 1)
        reader.report(loss=2.0)
        assert seen == [2]
        assert passes(reader, 1) == expected
        for damage in ({"repeats": [0]}, {"reports": None}, {"repeats": "x"}):
            fails(lambda: reader.load_state_dict({**state, **damage}), UsageError, "damaged")


class Comm:
    """What rank 0 says is what was said last; what others say is nothing."""

    def __init__(self):
        self.said = None

    def bcast(self, value, root):
        assert root == 0
        self.said = self.said if value is None else value
        return self.said


def test_rank_0_decides(data):
    """By its own metrics, which are in the states of all ranks."""
    options = {"batch_size": 7, "mini_epochs": 3, "world_size": 2, "comm": Comm()}
    never, always = Scripted(99), Scripted(2)
    states = []
    for turn in range(2):
        for rank, policy in ((0, always), (1, never)):
            with dsprep.Reader(data, rank=rank, repeats=policy, **options) as reader:
                if turn:
                    reader.load_state_dict(states[rank])
                passes(reader, 1)
                assert reader.report(loss=1.0 + rank) == bool(turn)
                states.append(reader.state_dict())
        assert states[-1] == states[-2]
        assert states[-1]["reports"] == ([] if turn else [{"loss": 1.0}])
    del options["comm"]
    with dsprep.Reader(data, rank=1, repeats=never, **options) as reader:
        passes(reader, 1)
        fails(lambda: reader.report(loss=1.0), UsageError, "agree")


@pytest.mark.parametrize("metrics", [{"loss": float("nan")}, {"error": 1.0}, {"loss": "low"}])
def test_all_ranks_learn_that_rank_0_cannot_decide(data, metrics):
    options = {"batch_size": 7, "mini_epochs": 3, "world_size": 2, "comm": Comm()}
    for rank, said in (
        (0, "metric|could not convert"),
        (1, "rank 0 could not decide.*(metric|str)"),
    ):
        with dsprep.Reader(data, rank=rank, repeats=Patience(), **options) as reader:
            passes(reader, 1)
            given = {"loss": 1.0} if rank else metrics
            with pytest.raises(UsageError, match=said):
                reader.report(**given)
            assert reader.state_dict()["reports"] == []


@pytest.mark.parametrize(
    "content", ["", "{}", '{"repeats": []}', '{"repeats": [1, 0]}', "[" * 9999]
)
def test_what_cannot_be_replayed(content, tmp_path):
    path = tmp_path / "state.json"
    path.write_text(content)
    fails(lambda: dsprep.repeats.Replay(path), FormatError)
