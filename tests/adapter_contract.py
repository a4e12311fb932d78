"""What every adapter for a framework promises, tested once for each of them."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import MIXED, dataset, epochs, fails, random_batch, raw

import dsprep
from dsprep.cache.folder import CacheFolder
from dsprep.core.schema import Batch, Field, Schema
from dsprep.errors import UnsupportedError, UsageError

ALONE: dict[str, Any] = {"rank": 0, "world_size": 1}
COUNT = 100
STEPS = 13  # of 8 samples
PLAIN = Schema((Field("x", np.dtype("<f4"), (8, 4)), Field("label", np.dtype("<i8"))))


def made(
    directory: Path, schema: Schema, count: int = COUNT, group: int = 16
) -> tuple[Path, Batch]:
    """A repacked dataset and its samples; the label of a sample is its number."""
    batch = random_batch(schema, count, seed=1)
    if "label" in schema.names:
        batch["label"] = np.arange(count, dtype="<i8")
    return dataset(directory, "hdf5", schema, batch, grouped=group)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return made(tmp_path_factory.mktemp("plain"), PLAIN)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    return made(tmp_path_factory.mktemp("mixed"), MIXED)


def labels(batches: Iterable[Any]) -> list[list[int]]:
    return [np.asarray(batch["label"]).tolist() for batch in batches]


def of_reader(path: Path, count: int, **options: Any) -> list[list[int]]:
    """The labels of so many epochs, as a Reader delivers them."""
    with dsprep.Reader(path, 8, epochs=count, **ALONE, **options) as reader:
        return labels(epochs(reader, count))


class AdapterContract:
    """Subclass it as ``Test...`` in a module that has the fixtures `plain` and `mixed`."""

    lacking: Field
    """A field ``t`` of a dtype that the framework has not."""

    def batches(self, path: Path, **options: Any) -> Any:
        """Return batches of 8 samples, each loop an epoch."""
        raise NotImplementedError

    def ragged(self, column: Any, i: int) -> Any:
        """Return the rows of a sample of a ragged field."""
        values, offsets = map(np.asarray, column)
        return values[offsets[i] : offsets[i + 1]]

    def address(self, x: Any) -> int:
        """Return the address of a tensor on the CPU."""
        raise NotImplementedError

    def test_every_value_arrives(self, mixed):
        path, expected = mixed
        seen = []
        for batch in self.batches(path, **ALONE):
            for i, sample in enumerate(np.asarray(batch["label"]).tolist()):
                seen.append(sample)
                assert raw(np.asarray(batch["image"][i])) == raw(expected["image"][sample])
                assert np.asarray(batch["id"])[i].tolist() == expected["id"][sample].tolist()
                for name in ("points", "name"):
                    assert raw(self.ragged(batch[name], i)) == raw(expected[name][sample])
        assert sorted(seen) == list(range(COUNT))

    def test_memory_is_shared_and_held(self, plain):
        path, expected = plain
        places = {}  # by the samples of a batch: several threads note them

        def note(batch):
            places[tuple(batch["label"].tolist())] = batch["x"].ctypes.data
            return batch

        batches = self.batches(path, transform=note, epochs=16, buffers=1, **ALONE)
        kept = [batch if k % 20 == 0 else None for k, batch in enumerate(epochs(batches, 16))]
        kept, right = kept[::20], of_reader(path, 16)[::20]
        assert len(set(places.values())) < len(places)  # most memory was used again
        assert labels(kept) == right
        for samples, batch in zip(right, kept, strict=True):
            assert self.address(batch["x"]) == places[tuple(samples)]
            assert raw(np.asarray(batch["x"])) == raw(expected["x"][samples])

    def test_each_loop_is_an_epoch_in_the_order_of_the_reader(self, plain):
        """However many `epochs` are given, of as many steps as `len` says."""
        expected = of_reader(plain[0], 3, seed=3)
        for count in (1, 2):
            batches = self.batches(plain[0], seed=3, epochs=count, **ALONE)
            assert len(batches) == STEPS
            assert labels(batches) + labels(batches) + labels(batches) == expected

    def test_each_loop_is_a_pass_of_a_mini_epoch(self, plain):
        """Of the steps of its part: parts differ in size."""
        cut = {"seed": 3, "mini_epochs": 3, "repeats": (1, 1, 2, 2, 3, 3)}
        with dsprep.Reader(plain[0], 8, **ALONE, **cut) as reader:
            expected = [labels(reader) for _ in range(12)]  # two epochs
        assert len({len(batches) for batches in expected}) > 1
        for count in (1, 2):
            batches = self.batches(plain[0], epochs=count, **ALONE, **cut)
            assert [labels(batches) for _ in range(12)] == expected

    def test_a_cache_holds_what_loops_read(self, mixed, tmp_path):
        """Its options are those of the Reader; a second adapter copies nothing more."""
        path, cache = mixed[0], tmp_path / "cache"
        expected = of_reader(path, 2, seed=3)
        for size in ("50%", 1):  # of which the second one has no room for anything
            batches = self.batches(path, seed=3, cache=dsprep.Cache(cache, size), **ALONE)
            assert [labels(batches) for _ in range(2)] == [expected[:STEPS], expected[STEPS:]]
            del batches
            gc.collect()
            (info,) = CacheFolder(cache).infos()
            assert info.ready == info.pieces == 7

    def test_loops_leave_no_thread_and_no_file(self, plain):

        def opened() -> set[str]:
            found = Path("/proc/self/fd").iterdir()
            return {str(p.readlink()) for p in found if p.is_symlink()}

        gc.collect()
        before = opened()
        for left in (0, 5, 100):
            batches = self.batches(plain[0], **ALONE)
            for i, _ in enumerate(batches):
                if i == left:
                    break
            del batches, _
            gc.collect()
            assert not [t.name for t in threading.enumerate() if t.name.startswith("dsprep-")]
            assert opened() <= before

    def test_habits_of_other_loaders(self, plain):
        """Shuffling by a truth value, one field by its name; no workers."""
        for habit, word in ((True, "group"), (False, "none")):
            batches = self.batches(plain[0], shuffle=habit, fields="label", **ALONE)
            found = list(batches)
            assert {*found[0]} == {"label"}
            assert labels(found) == of_reader(plain[0], 1, shuffle=word)
        with pytest.raises(UsageError, match=r"no option num_workers.*no workers are needed"):
            self.batches(plain[0], num_workers=4)

    def test_a_function_of_a_sample_is_refused_at_once(self, plain):
        def of_sample(sample, out, rng):
            raise AssertionError

        for options in ({"transform": of_sample}, {"transform": [len, of_sample]}):
            with pytest.raises(UsageError, match=r"transform .*dsprep\.each"):
                self.batches(plain[0], **options, **ALONE)
        fails(lambda: self.batches(plain[0], collate=of_sample, **ALONE), UsageError, "collate")

    def test_dtypes_that_it_lacks_are_refused_by_name(self, tmp_path):
        path, _ = made(tmp_path, Schema((self.lacking, PLAIN["x"])), 20)
        fails(lambda: self.batches(path, **ALONE), UnsupportedError, "field t: ", "fields=")
        assert len(list(self.batches(path, fields=("x",), **ALONE))) == 3


class LoopsContract(AdapterContract):
    """That of `dsprep.reader.adapters.ReaderLoops`, which have states."""

    def test_a_state_is_exact_to_the_batch(self, plain):
        expected = of_reader(plain[0], 2)
        batches = self.batches(plain[0], epochs=2, **ALONE)
        loop, found = epochs(batches), []
        for count in range(STEPS + 3):
            state = json.loads(json.dumps(batches.state_dict()))
            assert batches.epoch == state["epoch"]
            if count in (0, 1, 5, STEPS - 1, STEPS, STEPS + 1):
                other = self.batches(plain[0], **ALONE)
                other.load_state_dict(state)
                rest = labels(other)
                assert found + rest == expected[: len(found + rest)]
                assert len(rest) == (STEPS if count == STEPS else -count % STEPS or STEPS)
            found.append(np.asarray(next(loop)["label"]).tolist())
        loop.close()
        assert batches.epoch == 1
        assert found + labels(batches) == expected  # the loop that was left continues
        batches.set_epoch(0)
        assert labels(epochs(batches, 2)) == expected
        assert [s.epoch for s in batches.stats] == [0, 1]
        batches.close()

    def test_the_length_is_that_of_the_whole_epoch(self, plain):
        """Wherever the loop is; also of one that was begun on more ranks, whose steps count."""
        batches = self.batches(plain[0], epochs=3, **ALONE)
        for count, _ in enumerate(epochs(batches, 2), 1):
            assert len(batches) == STEPS
            assert batches.remaining in (-count % STEPS, -count % STEPS or STEPS)
            if count == 5:
                state = batches.state_dict()
                resumed = self.batches(plain[0], **ALONE)
                resumed.load_state_dict(state)
                assert (len(resumed), resumed.remaining) == (STEPS, STEPS - 5)
                assert [len(resumed) for _ in resumed] == [STEPS] * (STEPS - 5)
                assert (len(resumed), resumed.remaining) == (STEPS, STEPS)
        first = self.batches(plain[0], rank=0, world_size=2)
        loop = iter(first)
        next(loop), next(loop)
        resumed = self.batches(plain[0], **ALONE)
        resumed.load_state_dict(first.state_dict())
        left = -(-(COUNT - 2 * 2 * 8) // 8)
        assert (len(resumed), resumed.remaining) == (2 + left, left)
        assert len(labels(resumed)) == left
        assert len(resumed) == resumed.steps_per_epoch == STEPS

    def test_a_loop_that_a_trainer_leaves_is_over(self, plain):
        """After its last batch, though nobody asks for one more; or when an epoch is set."""
        expected = of_reader(plain[0], 3)
        batches = self.batches(plain[0], epochs=3, **ALONE)
        left = []  # loops, which nobody ends
        for epoch in range(2):
            left.append(iter(batches))
            found = [np.asarray(next(left[-1])["label"]).tolist() for _ in range(STEPS)]
            assert found == expected[epoch * STEPS : (epoch + 1) * STEPS]
        left.append(iter(batches))
        next(left[-1])
        batches.set_epoch(1)
        assert [list(loop) for loop in left] == [[]] * 3
        assert labels(batches) == expected[STEPS : 2 * STEPS]
        with pytest.raises(UsageError, match=r"Samples\(path\)\[i\]"):
            batches[0]

    def test_values_that_it_lacks_are_refused(self, tmp_path):
        path, _ = made(tmp_path, Schema((self.lacking, PLAIN["x"])), 20)
        with pytest.raises(UnsupportedError, match="no dtype"):
            list(self.batches(path, transform=lambda b: b, **ALONE))
