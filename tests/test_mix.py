"""Mixtures: which reader gives a step, when epochs end, and states that are exact."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import fails

import dsprep
from dsprep.errors import SchemaError, UsageError
from dsprep.reader.mix import Mix


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two datasets: `source` says which, `i` which sample."""
    directory = tmp_path_factory.mktemp("mix")
    paths = []
    for source, count in enumerate((700, 300)):
        path = directory / f"{source}.h5"
        with h5py.File(path, "w") as file:
            file["i"] = np.arange(count)
            file["source"] = np.full(count, source, "u1")
            file["word"] = np.array([f"{source}" * (i % 5) for i in range(count)], object)
        dsprep.repack(path, directory / f"g{source}.h5", buffer_size="20", durable=False)
        paths.append(directory / f"g{source}.h5")
    return paths


def readers(data: list[Path], *sizes: int, **options: Any) -> list[dsprep.Reader]:
    sizes = sizes or (10, 10)
    return [dsprep.Reader(p, n, **options) for p, n in zip(data, sizes, strict=True)]


def pairs(batches: Any) -> list[list[tuple[int, int]]]:
    return [[*zip(b["source"].tolist(), b["i"].tolist(), strict=True)] for b in batches]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.05, 1), min_size=1, max_size=5), st.integers(0, 99))
def test_shares_are_exact_after_few_steps(shares: list[float], seed: int) -> None:
    mix = Mix({_Nothing(): share for share in shares}, seed=seed)
    sources = mix.sources(0, 3000)
    assert (mix.sources(1000, 1100) == sources[1000:1100]).all()
    for n in (10, 100, 3000):
        counts = np.bincount(sources[:n], minlength=len(shares))
        assert (np.abs(counts - np.array(mix.shares) * n) <= 4).all()


class _Nothing:
    """A reader of which nothing is asked."""

    steps_per_epoch = 1


def test_it_ends_with_the_first_reader(data: list[Path]) -> None:
    with Mix(dict(zip(readers(data), (0.5, 0.5), strict=True))) as mix:
        length = len(mix)
        seen = pairs(mix)
        assert len(seen) == length
        assert 58 <= length <= 62  # 30 steps of the smaller one, as many of the other
        small = [pair for batch in seen for pair in batch if pair[0] == 1]
        assert sorted(i for _, i in small) == list(range(300))
        assert mix.counts[1] == 30
        assert sum(mix.counts) == length == mix.steps
        again = pairs(mix)  # the larger one goes on with the rest of its epoch
        large = [i for batch in seen + again for source, i in batch if source == 0]
        assert len(set(large)) == len(large)
        assert mix.epoch == 2


def test_it_ends_when_all_have(data: list[Path]) -> None:
    with Mix(dict(zip(readers(data), (0.5, 0.5), strict=True)), stop="all") as mix:
        length = len(mix)
        seen = Counter(pair for batch in pairs(mix) for pair in batch)
        assert sum(seen.values()) == 10 * length
        assert all(seen[0, i] == 1 for i in range(700))
        assert {seen[1, i] for i in range(300)} <= {2, 3}
        assert len(mix) <= length + 1


def test_it_may_never_end(data: list[Path]) -> None:
    with Mix(dict(zip(readers(data), (0.7, 0.3), strict=True)), stop="never") as mix:
        seen = pairs(itertools.islice(mix, 500))
        sources = [batch[0][0] for batch in seen]
        assert abs(sources.count(0) - 350) <= 2
        with pytest.raises(TypeError, match="no length"):
            len(mix)


@pytest.mark.parametrize("stop", ["first", "all"])
@pytest.mark.parametrize("within", [False, True])
def test_a_state_is_exact_at_every_step(data: list[Path], stop: Any, within: bool) -> None:
    def made() -> Mix:
        each = readers(data, *((10, 10) if within else (70, 20)))  # one ends long before the other
        return Mix(dict.fromkeys(each, 0.5), stop=stop, within=within, seed=2)

    with made() as mix:
        loops = [pairs(mix) for _ in range(3)]
    first, second, _ = map(len, loops)
    for step in (*range(0, first + second, 131 if within else 83), first):
        with made() as mix:
            before = pairs(itertools.islice(itertools.chain(mix, mix), step))
            state = json.loads(json.dumps(mix.state_dict()))
        over = step > first
        with made() as mix:
            mix.load_state_dict(state)
            after = [pairs(mix), pairs(mix)]
        assert [before[first * over :] + after[0], after[1]] == loops[over : over + 2]


def test_it_resumes_on_other_ranks(data: list[Path]) -> None:
    def made(rank: int, world: int) -> Mix:
        each = readers(data, rank=rank, world_size=world)
        return Mix(dict(zip(each, (0.7, 0.3), strict=True)), stop="all")

    before, states = [], []
    for rank in range(2):
        with made(rank, 2) as mix:
            before += pairs(itertools.islice(mix, 13))
            states.append(mix.state_dict())
    assert states[0] == states[1]
    after = []
    for rank in range(3):
        with made(rank, 3) as mix:
            mix.load_state_dict(states[0])
            after += pairs(mix)
    seen = Counter(pair for batch in before + after for pair in batch)
    assert all(seen[source, i] in (1, 2) for source, n in ((0, 700), (1, 300)) for i in range(n))
    first = Counter(pair for batch in before for pair in batch)
    assert max(first.values()) == 1


def test_batches_of_all_readers(data: list[Path]) -> None:
    a, b = readers(data, 7, 3)
    with Mix({a: 0.7, b: 0.3}, within=True) as mix:
        assert len(mix) == 100
        batches = list(mix)
    assert all(batch["source"].tolist() == [0] * 7 + [1] * 3 for batch in batches)
    for batch in batches:
        expected = [f"{s}" * (i % 5) for s, i in zip(batch["source"], batch["i"], strict=True)]
        assert list(batch["word"]) == expected
    assert sorted(itertools.chain(*pairs(batches))) == [
        (s, i) for s, n in ((0, 700), (1, 300)) for i in range(n)
    ]


def test_readers_divide_threads_and_memory(data: list[Path]) -> None:
    plain = readers(data, epochs=None)
    own = dsprep.Reader(data[0], 10, epochs=None, io_threads=3, buffers=7)
    alone = dsprep.Reader(data[0], 10, epochs=None)
    iter(alone).__next__()
    assert alone._pools is not None
    with Mix({plain[0]: 0.4, plain[1]: 0.4, own: 0.2}, stop="never") as mix, alone:
        next(batches := iter(mix))
        pipelines = [reader._running._source for reader in (*plain, own)]  # type: ignore[union-attr]
        settings_ = [pipeline._settings for pipeline in pipelines]  # type: ignore[attr-defined]
        assert (settings_[2].threads, settings_[2].buffers) == (3, 7)
        whole = alone._settings
        assert [s.buffers for s in settings_[:2]] == [max(2, int(whole.buffers * 0.4))] * 2
        assert [s.threads for s in settings_[:2]] == [math.ceil(whole.threads * 0.4)] * 2
        assert sum(len(batch["i"]) for batch in itertools.islice(batches, 200)) == 2000
    assert not [t for t in threading.enumerate() if t.name.startswith("dsprep-")]


def test_what_is_read_ahead_is_kept_between_epochs(data: list[Path]) -> None:
    a, b = readers(data, epochs=None)
    with Mix({a: 0.5, b: 0.5}) as mix:
        list(mix)
        source = a._running
        assert source is not None
        assert not source.closed
        state = mix.state_dict()
        list(mix)
        assert a._running is source  # it went on with its epoch
        fails(lambda: next(iter(a)), UsageError, "iterated")
        seen = pairs(mix)
        mix.load_state_dict(state)
        list(mix)
        assert pairs(mix) == seen
        list(itertools.islice(mix, 1))
        iter(mix).close()  # left early: nothing is read ahead
        assert source.closed
    made = Mix(dict(zip(readers(data), (0.5, 0.5), strict=True)))
    list(made)
    left = made.readers[0]
    del made
    assert next(iter(left))["source"][0] == 0  # a mix that is gone holds no loop


def test_a_forked_child_reads_for_itself(data: list[Path]) -> None:
    with Mix(dict(zip(readers(data), (0.5, 0.5), strict=True)), stop="all") as mix:
        list(mix)  # one reader is within an epoch, with threads that a child does not have
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # there are threads
            child = multiprocessing.get_context("fork").Pool(1, _keep, (mix,))
        with child:
            found = child.apply_async(_next_pairs).get(60)
        assert found == pairs(mix)


_kept: list[Mix] = []


def _keep(mix: Mix) -> None:
    _kept.append(mix)


def _next_pairs() -> list[list[tuple[int, int]]]:
    return pairs(_kept[0])


def test_what_does_not_fit_is_refused(data: list[Path]) -> None:
    a, b = readers(data)
    fails(lambda: Mix({a: 0.7, b: 0.3}, within=True), UsageError, "batch_size=14, 6")
    vanishing = ({a: 1e308, b: 1e308}, {a: 1.0, b: 1e-300}, {a: float("inf"), b: 1})
    wrong = ({}, {a: 0}, {a: -1, b: 2}, {a: -1, b: -1}, {a: float("nan")}, [a, b], {a: "x"})
    for shares in (*vanishing, *wrong, {a: None}):
        with pytest.raises(UsageError, match="shares are"):
            Mix(shares)  # type: ignore[arg-type]
    for other in ("web.h5", Mix({a: 1})):
        fails(lambda: Mix({other: 1}), UsageError, "has no batches of")
    with pytest.raises(UsageError, match="stop is"):
        Mix({a: 1}, stop="last")  # type: ignore[arg-type]
    (c,) = readers(data[:1], 10, fields=["i"])
    fails(lambda: Mix({c: 0.5, b: 0.5}, within=True), SchemaError, "cannot be joined")
    mix = Mix({a: 0.7, b: 0.3})
    state = mix.state_dict()
    for damaged in (
        {},
        {**state, "version": 9},
        {**state, "counts": [1]},
        {**state, "mix": None},
        {**state, "steps": 2**70},
        {**state, "epoch": 1.5},
        {**state, "counts": [True, 1]},
        {**state, "mix": [1, "first", False, [0.7, 0.3]]},
        {**state, "readers": state["readers"][::-1]},
    ):
        fails(lambda: mix.load_state_dict(damaged), UsageError)
