"""Identities of data, by which a change shows at the cost of a status of each file.

Another size is a change, and the same size and time stamp is none. Another time stamp alone
decides nothing: files are touched and copied, and some file systems move times of what has long
been closed. Then a digest of blocks decides that are spread over the data, so a change of other
bytes that keeps the size is not noticed. Of an object in a store its ETag decides.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeAlias

from dsprep.errors import DsprepError, changed
from dsprep.storage.nodes import revalidate
from dsprep.storage.paths import StorePath, open_file, status_of
from dsprep.storage.trees import data_entries, sized_files

BLOCKS = 16
BLOCK_NBYTES = 4096

ENDS = 2
"""Blocks that are sampled of objects, of which the ETag decides: each would be a request."""

Stated: TypeAlias = Callable[[Path], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Identity:
    """By what a file, or all data files of a directory together, are recognised.

    Attributes
    ----------
    nbytes
        Its size.
    mtime_ns
        The newest time stamp; None: not recorded.
    files
        Data files in a directory; 1 for a file.
    facts
        Facts that the format states about it: `Format.facts`.
    sampled
        Digest of the sampled blocks; empty: not recorded.
    etag
        Of an object, or a digest of those of a directory: what the store says changes with every
        other content. Empty: not recorded.
    """

    nbytes: int
    mtime_ns: int | None = None
    files: int = 1
    facts: Mapping[str, Any] = field(default_factory=dict)
    sampled: str = ""
    etag: str = ""

    @property
    def is_object(self) -> bool:
        """True if it is of one object, of which a read can name the version."""
        return bool(self.etag) and self.files == 1

    @classmethod
    def of(cls, path: Path, facts: Mapping[str, Any] | None = None) -> Self:
        """Return the identity of `path` with its sampled blocks; raises as `look`."""
        now = cls.look(path)
        mtime_ns, blocks = (None, ENDS) if now.etag else (now.mtime_ns, BLOCKS)
        sampled = sample(path, now.nbytes, blocks, within_files=bool(now.etag))
        return replace(now, mtime_ns=mtime_ns, facts=facts or {}, sampled=sampled)

    @classmethod
    def look(cls, path: Path) -> Self:
        """Return the identity of `path` as far as nothing is read for it.

        Raises
        ------
        OSError
            If it is gone, or cannot be looked at.
        """
        own, is_stored = path.stat(), isinstance(path, StorePath)
        if not stat.S_ISDIR(own.st_mode):
            etag = path.store.etag(path.key) if isinstance(path, StorePath) else ""
            return cls(own.st_size, own.st_mtime_ns, etag=etag)
        nbytes = newest = files = 0
        versions, root = hashlib.blake2b(digest_size=8), len(os.fsencode(path).rstrip(b"/")) + 1
        for entry in data_entries(path):
            facts = status_of(entry)
            nbytes, files = nbytes + facts.st_size, files + 1
            newest = max(newest, facts.st_mtime_ns)
            if is_stored:  # the change time of an object is the number of its version
                name, version = os.fsencode(entry.path)[root:], facts.st_ctime_ns
                versions.update(b"%b\0%d\0%d\n" % (name, version, version))
        etag = versions.hexdigest() if is_stored and files else ""
        return cls(nbytes, newest, files, etag=etag)

    def changed(self, path: Path, stated: Stated = lambda path: {}) -> str | None:
        """Return how `path` differs from it now, in one clause; None if it does not.

        Parameters
        ----------
        path
            What is looked at.
        stated
            Returns what the format states about it, for `facts`.

        Raises
        ------
        OSError
            If it is there and cannot be examined.
        """
        for again in (False, True):
            if again:  # a client may have kept what its server knows better
                revalidate(path)
            try:
                how = self.differs(path, Identity.look(path), stated)
            except (FileNotFoundError, NotADirectoryError):
                how = "it is missing"
            if how is None:
                return None
        return how

    def differs(self, path: Path, now: Identity, stated: Stated) -> str | None:
        """Return how `path`, which is looked at as `now`, differs from it; see `changed`."""
        if now.nbytes != self.nbytes:
            return f"it has {now.nbytes:,} bytes, expected {self.nbytes:,}"
        if now.files != self.files:
            return f"it has {now.files:,} files, expected {self.files:,}"
        if self.etag and now.etag:
            same = now.etag == self.etag
            return None if same else f"its ETag is {now.etag}, expected {self.etag}"
        if self.mtime_ns == now.mtime_ns:
            return None
        if not self.sampled:
            other = f"its time stamp is {now.mtime_ns}, expected {self.mtime_ns}"
            return None if self.mtime_ns is None else other
        laws = ((BLOCKS, False), (ENDS, True), (BLOCKS, True))
        if self.sampled not in (sample(path, now.nbytes, *law) for law in laws):
            return "its content changed (sampled blocks differ)"
        facts = stated(path) if self.facts else {}
        for name in self.facts.keys() & facts.keys():
            if facts[name] != self.facts[name]:
                words = name.replace("_", " ")
                return f"its {words} is {facts[name]}, expected {self.facts[name]}"
        return None

    def is_exact(self, path: Path) -> bool:
        """Return whether `path` has this size and time stamp."""
        now = Identity.look(path)
        return (now.nbytes, now.mtime_ns) == (self.nbytes, self.mtime_ns)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, without what is not recorded."""
        kept = {name: getattr(self, name) for name in self.__slots__} | {"facts": dict(self.facts)}
        return {k: v for k, v in kept.items() if k == "nbytes" or v != getattr(Identity(0), k)}

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Self:
        """Return what `to_json` wrote; `TypeError` or `KeyError` if it is something else."""
        get = json.get
        nbytes, files, facts = json["nbytes"], get("files", 1), get("facts", {})
        mtime_ns = get("mtime_ns")
        for value in (nbytes, files, 0 if mtime_ns is None else mtime_ns):
            if type(value) is not int or not 0 <= value < 1 << 64:
                raise TypeError(f"{value!r} is not a size or a time")
        if not isinstance(facts, Mapping):
            raise TypeError("facts are no JSON object")
        return cls(nbytes, mtime_ns, files, facts, str(get("sampled", "")), str(get("etag", "")))


def sample(path: Path, nbytes: int, blocks: int = BLOCKS, within_files: bool = False) -> str:
    """Return the digest of blocks spread over `nbytes` of data: the first, the last, those between.

    The data files of a directory count in the order of their paths; a block goes on in the next
    file, but of objects, where that would be a request, and in early sidecars (`within_files`).
    """
    last, begin = max(0, nbytes - BLOCK_NBYTES), 0
    positions = sorted({last * k // (blocks - 1) for k in range(blocks)})
    state = hashlib.blake2b(digest_size=8)
    for file, size in sized_files(path):
        reach = begin - (1 if within_files else BLOCK_NBYTES)
        within = sorted({max(p - begin, 0) for p in positions if reach < p < begin + size})
        if within:
            with closing(open_file(file)) as opened:
                for block in opened.pread_blocks(BLOCK_NBYTES, within):
                    state.update(block)
        begin += size
    return state.hexdigest()


Identities: TypeAlias = tuple[tuple[Path, Identity], ...]
"""Files and directories by their absolute paths, and what they were when they were looked at."""


def identities_of(paths: Iterable[Path]) -> Identities:
    """Return the identities of some files now; raises as `Identity.look`."""
    return tuple((path.absolute(), Identity.of(path)) for path in paths)


def check(identities: Identities) -> None:
    """Raise `ChangedError` if data are not what they were."""
    for path, identity in identities:
        if how := identity.changed(path):
            raise changed(path, how)


@contextmanager
def unchanged(identities: Identities) -> Iterator[None]:
    """Raise `ChangedError` if data are not what they were, before or after what is done.

    That is also raised where what is done fails: its own error may just be a consequence.
    """
    check(identities)
    try:
        yield
    except (DsprepError, OSError):
        check(identities)
        raise
    check(identities)
