"""``dsprep audit``: whether every sample comes as often as promised, and saying so when not."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import h5py
import numpy as np
import pytest

import dsprep
from dsprep.errors import UsageError
from dsprep.reader import order
from dsprep.reader.mini_epochs import MiniEpochs, Pass
from dsprep.reader.order import REMAINDERS, SHUFFLES, Epoch, Sequence
from dsprep.sidecar.sidecar import MissingError

N, GROUP = 1000, 64


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("audit")
    with h5py.File(root / "plain.h5", "w") as file:
        file["x"], file["y"] = np.zeros((N, 3), "<f4"), np.arange(N)
    dsprep.repack(root / "plain.h5", root / "grouped.h5", buffer_size=str(GROUP), measure=False)
    with h5py.File(root / "bare.h5", "w") as file:
        file["x"] = np.zeros(10)
    dsprep.provenance(root / "plain.h5")
    return root


@pytest.mark.parametrize("remainder", REMAINDERS)
@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("name", ["plain.h5", "grouped.h5"])
def test_the_promise_is_kept(root, name, shuffle, remainder):
    for ranks, batch in ((7, 9), (40, 2)):
        found = dsprep.audit(
            root / name, ranks, batch, epochs=2, shuffle=shuffle, remainder=remainder, seed=4
        )
        assert found.kept, found
        assert [e.epoch for e in found.epochs] == [0, 1]
        for epoch in found.epochs:
            assert epoch.never + epoch.once + epoch.more == N
            left = N % (ranks * batch)
            assert epoch.never == (left if remainder == "drop" else 0)
            assert epoch.repeats == (-N % (ranks * batch) if remainder == "pad" else 0)
            assert epoch.more == (epoch.repeats if epoch.repeats < N else N)
            (only,) = epoch.runs
            assert only.ranks == ranks
            assert (only.full + only.short + only.empty) == ranks * only.steps
            delivered = N - epoch.never + epoch.repeats
            assert only.least <= delivered / ranks <= only.most
            assert (epoch.shared_groups is None) == (shuffle == "global")


def test_figures(root):
    found = dsprep.audit(root / "grouped.h5", 4, 10)
    assert (found.samples, found.groups, found.grouped, found.mixed) == (N, 16, True, 1)
    assert found.largest_unit_nbytes == GROUP * 20
    assert 1 <= found.epochs[0].shared_groups <= 3
    mixed = dsprep.audit(root / "grouped.h5", 4, 10, buffers_mixed=3)
    assert mixed.epochs[0].largest_unit == 3 * GROUP
    assert dsprep.audit(root / "grouped.h5", 4, 10, buffer_size="200").mixed == 3
    one = dsprep.audit(root / "plain.h5", 1, 10, buffer_size=100)
    assert (one.groups, one.grouped, one.epochs[0].shared_groups) == (10, False, 0)
    assert dsprep.audit(root / "plain.h5", 1, 10, buffer_size="2kB").epochs[0].largest_unit == 100
    assert dsprep.audit(root / "plain.h5", 1, 10, buffer_size="2kB", fields=("y",)).groups == 4


@pytest.mark.parametrize("remainder", REMAINDERS)
@pytest.mark.parametrize(("ranks", "step"), [(5, 0), (8, 3), (11, 14), (5, 500)])
def test_resuming(root, remainder, ranks, step):
    found = dsprep.audit(
        root / "grouped.h5", 8, 8, remainder=remainder, resume_at=step, resume_ranks=ranks
    )
    assert found.kept, found.epochs[0].problems
    first, second = found.epochs[0].runs
    assert (first.ranks, second.ranks) == (8, ranks)
    assert first.steps == min(step, first.steps)
    if ranks == 8:
        whole = dsprep.audit(root / "grouped.h5", 8, 8, remainder=remainder).epochs[0]
        assert first.steps + second.steps == whole.runs[0].steps
        assert (whole.never, whole.repeats) == (found.epochs[0].never, found.epochs[0].repeats)


# --- mini-epochs -----------------------------------------------------------------------------


@pytest.mark.parametrize("remainder", REMAINDERS)
@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("resume", [None, (1, 3)])
def test_every_pass_of_mini_epochs(root, shuffle, remainder, resume):
    at, ranks = resume or (None, None)
    found = dsprep.audit(
        root / "grouped.h5", 2, 8, epochs=2, shuffle=shuffle, remainder=remainder,
        buffer_size=50, mini_epochs=4, repeats=(1, 3, 2), recompose=remainder != "pad",
        pools=1 + (remainder == "ragged" and shuffle != "global"),
        resume_at=at, resume_ranks=ranks,
    )  # fmt: skip
    assert found.kept, [e.problems for e in found.epochs]
    assert found.repeats == (1, 3, 2, 2, 2, 2, 2, 2)
    passes = [e.mini_epoch for e in found.epochs]
    assert [(p.number, p.epoch, p.part, p.turn) for p in passes] == [
        (number, part // 4, part % 4, turn)
        for number, (part, turn) in enumerate(
            (part, turn) for part, rf in enumerate(found.repeats) for turn in range(rf)
        )
    ]
    sizes = [e.never + e.once + e.more for e in found.epochs]
    for epoch in range(2):
        first = [n for n, p in zip(sizes, passes, strict=True) if (p.epoch, p.turn) == (epoch, 0)]
        assert sum(first) == N
    for each, size in zip(found.epochs, sizes, strict=True):
        assert len(each.runs) == (1 if resume is None else 2)
        if resume is None:
            assert each.never == (size % 16 if remainder == "drop" else 0)
            assert each.repeats == (-size % 16 if remainder == "pad" else 0)


def test_it_counts_what_readers_deliver(root):
    path, cut = root / "grouped.h5", {"mini_epochs": 3, "repeats": (1, 1, 2), "seed": 9}
    found = dsprep.audit(path, 2, 9, remainder="pad", **cut)
    times = np.zeros((len(found.epochs), N), int)
    for rank in range(2):
        with dsprep.Reader(path, 9, remainder="pad", rank=rank, world_size=2, **cut) as reader:
            for each, count in zip(found.epochs, times, strict=True):
                assert reader.mini_epoch == each.mini_epoch
                assert len(reader) == each.runs[0].steps
                for batch in reader:
                    np.add.at(count, batch["y"], 1)
    assert found.repeats == (1, 1, 2)
    assert len(found.epochs) == 4
    delivered = [((c == 1).sum(), (c > 1).sum()) for c in times]
    assert [(e.once, e.more) for e in found.epochs] == delivered
    assert (np.sign(times[0]) + np.sign(times[1]) + np.sign(times[2]) == 1).all()


# --- broken promises: each is found --------------------------------------------------------------


def problems(root, ranks=2, **options):
    """The problems in each epoch, or pass, by its place."""
    found = dsprep.audit(root / "grouped.h5", ranks, 8, **options)
    assert not found.kept
    said = {}
    for epoch in found.epochs:
        part = epoch.mini_epoch
        where = epoch.epoch if part is None else (part.epoch, part.part, part.turn)
        said |= {where: " ".join(epoch.problems)} if epoch.problems else {}
    return said


def twice(kept=[]):  # noqa: B006
    def wrong(which, groups):
        kept.append(groups[0])
        return np.append(groups, kept[0]) if which.part == 2 else groups

    return wrong


WRONG_PARTS = [  # the groups of a pass; where that is noticed first, and in which words
    (twice(), (0, 2, 0), "in an earlier mini-epoch as well"),
    (lambda which, g: np.sort(g)[which.part == 1 :], (0, 3, 1), f"of this epoch: {GROUP}"),
    (lambda which, g: g[which == Pass(5, 0, 2, 1) :], (0, 2, 1), "not those of the first pass"),
]


@pytest.mark.parametrize(("wrong", "where", "told"), WRONG_PARTS)
def test_wrong_mini_epochs_are_found(root, monkeypatch, wrong, where, told):
    groups = MiniEpochs.groups

    def patched(self, edges, seed, which, *, shuffled):
        return wrong(which, groups(self, edges, seed, which, shuffled=shuffled))

    monkeypatch.setattr(MiniEpochs, "groups", patched)
    said = problems(root, mini_epochs=4, repeats=2)
    assert min(said) == where
    assert told in said[where]


def other(self, unit):
    samples, places = POSITIONS(self, unit)
    others = np.setdiff1d(np.arange(len(self.edges) - 1), self.groups)
    return np.append(samples[:-1], self.edges[others[0]]), places


def one_slot(self, unit):
    samples, places = POSITIONS(self, unit)
    return samples, 0 * places


def of_rank(change):
    def share(self, world_size, rank, batch_size):
        kept = order.share(len(self), world_size, rank, batch_size, self.remainder)
        return change(kept, rank, self, (len(self), world_size, rank, batch_size))

    return share


POSITIONS, UNITS = Sequence.positions, Epoch.units
WRONG = [  # what is replaced by what; options; the words for it
    (Sequence, "positions", other, {"ranks": 1, "mini_epochs": 16}, "of other mini-epochs: 1"),
    (
        *(Epoch, "share", of_rank(lambda dealt, *_: replace(dealt, start=max(0, dealt.start - 1)))),
        *({}, "samples that come more than once: 1"),
    ),
    (
        *(Epoch, "share", of_rank(lambda d, rank, *_: replace(d, steps=d.steps + (rank == 0)))),
        *({}, "different numbers of steps: "),
    ),
    (
        *(Epoch, "share", of_rank(lambda _, rank, epoch, sizes: order.share(*sizes, "ragged"))),
        *({"remainder": "pad", "ranks": 4}, "batches are not full"),
    ),
    (Sequence, "positions", one_slot, {}, "two samples have one slot"),
    (Epoch, "units", lambda *a, skip=0: [*UNITS(*a)][1:], {"ranks": 4}, "rank 0 of 4 lacks"),
]


@pytest.mark.parametrize(("owner", "name", "wrong", "options", "told"), WRONG)
def test_broken_promises_are_found(root, monkeypatch, owner, name, wrong, options, told):
    monkeypatch.setattr(owner, name, wrong)
    said = problems(root, **options)
    assert told in said[min(said)]


def test_a_mini_epoch_without_a_step_is_found(root):
    found = dsprep.audit(root / "grouped.h5", 1, 125, mini_epochs=8, remainder="drop")
    assert any(e.problems and not e.runs[0].steps for e in found.epochs)
    assert not found.kept


# --- the command -------------------------------------------------------------------------------


IMPOSSIBLE = [
    ({"ranks": 0}, "ranks is 0"),
    ({"drop_last": True}, "there is no option drop_last"),
    ({"mini_epochs": 1, "repeats": dsprep.repeats.Patience()}, "decided by training"),
    ({"resume_at": -1, "resume_ranks": 2}, "resume_at is -1"),
]


def test_impossible_arguments(root, monkeypatch):
    monkeypatch.setattr("dsprep.reader.data.QUICK_NBYTES", 0)
    for options, said in IMPOSSIBLE:
        with pytest.raises(UsageError, match=said):
            dsprep.audit(root / "plain.h5", **{"ranks": 2, "batch_size": 4, **options})
    with pytest.raises(MissingError, match=r"dsprep provenance .*bare\.h5"):
        dsprep.audit(root / "bare.h5", 1, 1)


def test_memory_and_progress(tmp_path):
    n = 1_000_000
    with h5py.File(tmp_path / "many.h5", "w") as file:
        file["x"] = np.zeros(n, "u1")
    dsprep.provenance(tmp_path / "many.h5")
    told = []
    tracemalloc.start()
    for shuffle in SHUFFLES:
        dsprep.audit(
            tmp_path / "many.h5", 64, 32, buffer_size=20_000, shuffle=shuffle,
            progress=lambda done, total: told.append((done, total)),
        )  # fmt: skip
    peak = tracemalloc.get_traced_memory()[1]
    assert peak < 3 * n + (8 << 20)
    tracemalloc.reset_peak()
    cut = {"buffer_size": 5_000, "mini_epochs": 6}
    dsprep.audit(tmp_path / "many.h5", 64, 32, progress=lambda *_: told.append(_), **cut)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < n + (2 << 20)
    assert told[-1][1] == n
    assert all(0 < done <= total for done, total in told)
