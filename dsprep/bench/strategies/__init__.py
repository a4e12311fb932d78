"""The table of strategies: ways of reading that can be measured, a function that opens each.

Nothing is imported until one is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

from dsprep.bench.strategies.base import Opener
from dsprep.errors import UsageError, require

Container: TypeAlias = Literal["files", "source", "groups", "hdf5", "lmdb", "tfrecord", "zarr"]
"""The form of the dataset that a strategy reads.

``files``: the dataset as it is; ``source``: the same, through its sidecar; ``groups``: repacked."""


@dataclass(frozen=True)
class Entry:
    """A strategy, and what it needs."""

    where: str  # `module:function` below this package
    container: Container  # the form of the dataset that it reads
    words: str  # what it does, in half a line
    packages: Sequence[str] = ()  # that have to be installed besides dsprep's own
    tier: bool = False  # whether it needs a fast tier
    settles: bool = False  # whether its first epoch differs from further ones, so never counts
    how: Mapping[str, Any] = field(default_factory=dict)  # other arguments of the function
    # Whether there are samples in the items at all; the limit and the run without any reading have
    # none, and are not checked. A loader of the user's own is only counted, and may leave some out.
    delivers: bool = True
    counted: bool = True
    reopens: bool = False  # whether it is opened before each epoch, and its copies removed after it

    @property
    def missing(self) -> str:
        """The packages that are missing, and how to install them; empty if none is."""
        names = [p for p in self.packages if find_spec(p) is None]
        return f"not installed: pip install {' '.join(names)}" if names else ""

    def load(self) -> Opener:
        """Import the function."""
        module, _, name = self.where.partition(":")
        opener: Opener = getattr(import_module(f"{__name__}.{module}"), name)
        return partial(opener, **self.how) if self.how else opener


LIMIT = "pread-limit"
DUMMY = "dummy"
MET = "met"
IN_PLACE = "in-place"

STRATEGIES: dict[str, Entry] = {
    LIMIT: Entry(
        "limit:open_limit",
        "groups",
        "plain preadv of whole groups, nothing decoded: 100 %",
        delivers=False,
    ),
    DUMMY: Entry(
        "limit:open_dummy",
        "groups",
        "no reading: the step alone, on a batch in memory",
        delivers=False,
    ),
    IN_PLACE: Entry(
        "in_place:open_in_place", "files", "the files as they are, as a plain script reads them"
    ),
    "h5py": Entry("samples:open_h5py", "hdf5", "h5py, sample by sample, shuffled"),
    "zarr": Entry("samples:open_zarr", "zarr", "zarr, sample by sample, shuffled"),
    "lmdb-get": Entry("lmdb_samples:open_get", "lmdb", "py-lmdb get by key, shuffled"),
    "torch": Entry("torch_loader:open_torch", "hdf5", "torch DataLoader over h5py", ("torch",)),
    "tf": Entry(
        "tensorflow:open_samples", "hdf5", "tf.data, one sample per read, no prefetch (TF)"
    ),
    "tf-prefetch": Entry(
        "tensorflow:open_samples",
        "hdf5",
        "the same with AUTOTUNE threads and prefetch (TF-Pre)",
        how={"ahead": True},
    ),
    "tfrecord": Entry(
        "tensorflow:open_records", "tfrecord", "tf.data over TFRecord, shuffle buffer, AUTOTUNE"
    ),
    "provenance": Entry(
        "dsprep_reader:open_provenance",
        "source",
        "samples by preadv through the sidecar, not repacked",
    ),
    "group": Entry("group:open_group", "groups", "a group per read, no overlap (Async I/O)"),
    "group-db": Entry(
        "dsprep_reader:open_reader",
        "groups",
        "the same, double buffered (Async I/O DB)",
        how={"buffers": 2, "io_threads": 1, "engine": "buffered"},
    ),
    "lmdb-cursor": Entry(
        "lmdb_samples:open_cursor", "lmdb", "py-lmdb cursors, strided by rank (Caffe's LMDB)"
    ),
    **{
        f"lmdbio-{name}": Entry("lmdbio:open_steps", "lmdb", f"LMDBIO: {words}", how={"level": i})
        for i, (name, words) in enumerate(
            {
                "lmm": "one process of the node reads for all",
                "dm": "and jumps to its records",
                "dio": "and reads them by pread",
                "prov": "offsets computed, from provenance",
                "coal": "many steps by one read",
                "stag": "readers take turns",
            }.items()
        )
    },
    "dsprep": Entry("dsprep_reader:open_reader", "groups", "dsprep.Reader, all threads"),
    "cache-first": Entry(
        "dsprep_reader:open_cache",
        "groups",
        "dsprep.Reader with an empty cache, which it fills",
        tier=True,
        how={"apart": True},
        reopens=True,
    ),
    "cache-next": Entry(
        "dsprep_reader:open_cache",
        "groups",
        "dsprep.Reader, from its cache",
        tier=True,
        settles=True,
    ),
    MET: Entry(
        "dsprep_reader:open_met",
        "groups",
        "dsprep.Reader, mini-epoch training",
        tier=True,
        settles=True,
    ),
}

SETS: dict[str, tuple[str, ...]] = {
    "async-io": ("tf", "tf-prefetch", "group", "group-db"),
    "lmdbio": ("lmdb-cursor", *(name for name in STRATEGIES if name.startswith("lmdbio-"))),
    "samples": ("h5py", "zarr", "lmdb-get", "torch", "tf", "tf-prefetch"),
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
"""Ways to read a file of a format without dsprep, the likeliest way first; `IN_PLACE` stands for
datasets that these cannot read as they are."""

TIERED = tuple(name for name, entry in STRATEGIES.items() if entry.tier)
"""Strategies with a cache on a fast tier."""


OWN = Entry("own_loader:open_own", "files", "your own loader", delivers=False, counted=False)


def peers() -> tuple[str, ...]:
    """Return the loaders of other projects, of `examples/peers`, whose package is installed.

    Raises
    ------
    UsageError
        If the examples are not here.
    """
    folder = Path(__file__).parents[3] / "examples" / "peers"
    fix = "take them from the repository: -s examples/peers/use_lance.py:make"
    require(folder.is_dir(), UsageError, "the examples are not here", where=folder, fix=fix)
    files = sorted(folder.glob("use_*.py"))
    return tuple(f"{p}:make" for p in files if find_spec(p.stem.removeprefix("use_")))


def find(name: str) -> Entry:
    """Return the strategy called `name`; ``module:function`` is a loader of the user's own.

    Raises
    ------
    UsageError
        If there is none.
    """
    if ":" in name:
        file, _, function = name.rpartition(":")
        is_there = function and (not file.endswith(".py") or Path(file).is_file())
        expected = "FILE.py:FUNCTION"
        require(is_there, UsageError, f"there is no loader {name}", expected=expected)
        return OWN
    expected = "FILE.py:FUNCTION, or one of " + ", ".join([*STRATEGIES, *SETS, "peers"])
    require(name in STRATEGIES, UsageError, f"{name!r} is not a strategy", expected=expected)
    return STRATEGIES[name]
