"""The table of strategies: ways of reading that can be measured, a class each.

Nothing is imported until one is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

from dsprep.bench.strategies.base import Strategy
from dsprep.errors import UsageError

Container: TypeAlias = Literal["files", "source", "groups", "hdf5", "lmdb", "tfrecord", "zarr"]
"""The form of the dataset that a strategy reads.

``files``: the dataset as it is; ``source``: the same, through its sidecar; ``groups``: repacked."""


@dataclass(frozen=True)
class Entry:
    """A strategy, and what it needs."""

    where: str  # `module:Class` below this package
    container: Container  # the form of the dataset that it reads
    words: str  # what it does, in half a line
    packages: Sequence[str] = ()  # that have to be installed besides dsprep's own
    tier: bool = False  # whether it needs a fast tier
    settles: bool = False  # whether its first epoch differs from further ones, so never counts

    @property
    def missing(self) -> str:
        """Which packages are missing, and how to install them; empty if none is."""
        names = [p for p in self.packages if find_spec(p) is None]
        return f"{ABSENT}: pip install {' '.join(names)}" if names else ""

    def check(self, name: str) -> None:
        """Raise `UsageError` if the strategy, called `name`, is in a file that is not there."""
        file, _, function = name.rpartition(":")
        absent = file.endswith(".py") and not Path(file).is_file()
        if absent or (":" in name and not function):
            raise UsageError(f"there is no loader {name}", expected="FILE.py:FUNCTION")

    def load(self) -> type[Strategy]:
        """Import the class."""
        module, _, name = self.where.partition(":")
        strategy: type[Strategy] = getattr(import_module(f"{__name__}.{module}"), name)
        return strategy


LIMIT = "pread-limit"
DUMMY = "dummy"
MET = "met"
IN_PLACE = "in-place"

ABSENT = "not installed"
"""What begins the words for a strategy whose packages are missing; that is no failure."""

STRATEGIES: dict[str, Entry] = {
    LIMIT: Entry("limit:Limit", "groups", "plain preadv of whole groups, nothing decoded: 100 %"),
    DUMMY: Entry("limit:Dummy", "groups", "no reading: the step alone, on a batch in memory"),
    IN_PLACE: Entry(
        "in_place:InPlace", "files", "the files as they are, as a plain script reads them"
    ),
    "h5py": Entry("samples:H5pySamples", "hdf5", "h5py, sample by sample, shuffled"),
    "zarr": Entry("samples:ZarrSamples", "zarr", "zarr, sample by sample, shuffled"),
    "lmdb-get": Entry("lmdb_samples:LmdbGet", "lmdb", "py-lmdb get by key, shuffled"),
    "mmap": Entry("mapped:Mapped", "groups", "samples copied out of a mapping, shuffled"),
    "torch": Entry("torch_loader:TorchLoader", "hdf5", "torch DataLoader over h5py", ("torch",)),
    "tf": Entry("tensorflow:TfSamples", "hdf5", "tf.data, one sample per read, no prefetch (TF)"),
    "tf-prefetch": Entry(
        "tensorflow:TfPrefetch", "hdf5", "the same with AUTOTUNE threads and prefetch (TF-Pre)"
    ),
    "tfrecord": Entry(
        "tensorflow:TfRecords", "tfrecord", "tf.data over TFRecord, shuffle buffer, AUTOTUNE"
    ),
    "provenance": Entry(
        "dsprep_reader:Provenance", "source", "samples by preadv through the sidecar, not repacked"
    ),
    "group": Entry("group:Group", "groups", "a group per read, no overlap (Async I/O)"),
    "group-db": Entry("group:GroupDb", "groups", "the same, double buffered (Async I/O DB)"),
    "lmdb-cursor": Entry(
        "lmdb_samples:LmdbCursor", "lmdb", "py-lmdb cursors, strided by rank (Caffe's LMDB)"
    ),
    "lmdbio-lmm": Entry("lmdbio:Lmm", "lmdb", "LMDBIO: one process of the node reads for all"),
    "lmdbio-dm": Entry("lmdbio:Dm", "lmdb", "LMDBIO: and jumps to its records"),
    "lmdbio-dio": Entry("lmdbio:Dio", "lmdb", "LMDBIO: and reads them by pread"),
    "lmdbio-prov": Entry("lmdbio:Prov", "lmdb", "LMDBIO: offsets computed, from provenance"),
    "lmdbio-coal": Entry("lmdbio:Coal", "lmdb", "LMDBIO: many steps by one read"),
    "lmdbio-stag": Entry("lmdbio:Stag", "lmdb", "LMDBIO: readers take turns"),
    "dsprep": Entry("dsprep_reader:DsprepReader", "groups", "dsprep.Reader, all threads"),
    "cache-first": Entry(
        "tiers:CacheFirst", "groups", "dsprep.Reader with an empty cache, which it fills", tier=True
    ),
    "cache-next": Entry(
        "tiers:CacheNext", "groups", "dsprep.Reader, from its cache", tier=True, settles=True
    ),
    MET: Entry(
        "tiers:Met", "groups", "dsprep.Reader, mini-epoch training", tier=True, settles=True
    ),
}

SETS: dict[str, tuple[str, ...]] = {
    "async-io": ("tf", "tf-prefetch", "group", "group-db"),
    "lmdbio": (
        "lmdb-cursor",
        "lmdbio-lmm",
        "lmdbio-dm",
        "lmdbio-dio",
        "lmdbio-prov",
        "lmdbio-coal",
        "lmdbio-stag",
    ),
    "samples": ("h5py", "zarr", "lmdb-get", "mmap", "torch", "tf", "tf-prefetch"),
    "cache": ("dsprep", "cache-first", "cache-next"),
    "all": tuple(name for name, e in STRATEGIES.items() if not e.tier),
}
"""Names for several strategies at once: the papers' tables, and others."""

TODAY = {
    "hdf5": ("h5py", "torch", "tf", "tf-prefetch"),
    "lmdb": ("lmdb-get", "lmdb-cursor"),
    "tfrecord": ("tfrecord",),
    "zarr": ("zarr",),
}
"""How a file of a format is read without dsprep, the likeliest way first; `IN_PLACE` stands for
datasets that these cannot read as they are."""

TIERED = tuple(name for name, entry in STRATEGIES.items() if entry.tier)
"""Those with a cache on a fast tier."""

THROTTLED = ("dsprep", "provenance", *TIERED)
"""Those whose reads of the capacity tier can be throttled."""


def find(name: str) -> Entry:
    """Return the strategy called `name`; ``module:function`` is a loader of the user's own.

    Raises
    ------
    UsageError
        If there is none.
    """
    if ":" in name:
        return Entry("own_loader:OwnLoader", "files", "your own loader")
    if name not in STRATEGIES:
        raise UsageError(
            f"{name!r} is not a strategy",
            expected="FILE.py:FUNCTION, or one of " + ", ".join([*STRATEGIES, *SETS]),
        )
    return STRATEGIES[name]
