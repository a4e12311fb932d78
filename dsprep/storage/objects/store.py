"""Objects as files: `ObjectStore` for each scheme of URLs, and `ObjectFile`.

Names are ``bucket/key`` for ``s3://`` and ``gs://``, ``container/key`` for ``az://``, and
``host/key`` for ``https://``. Credentials, endpoint and region are those that obstore finds in the
environment, or boto3 in a profile; dsprep neither reads nor shows them.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from stat import S_ISDIR
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import obstore
from obstore import exceptions
from obstore.store import from_url
from typing_extensions import override

from dsprep.core.schema import Array, Ints
from dsprep.errors import MissingExtra, UnsupportedError, UsageError
from dsprep.storage.base import Handle, Store, made_status
from dsprep.storage.identity import Identity
from dsprep.storage.objects.requests import (
    PART_NBYTES,
    Version,
    check_process,
    counters,
    etag_of,
    modified_ns,
    parts_of,
    refused,
    requests,
)
from dsprep.storage.paths import ENDPOINTS
from dsprep.storage.scatter import Runs, one_range
from dsprep.storage.trees import SIDECARS

EDGE_NBYTES = 256 << 10
"""Bytes that are fetched of an object at once when it is opened: where formats have structure."""

BLOCK_NBYTES = 1 << 20
"""Bytes that are fetched at a time of what lies between, for reads of fewer."""

BLOCKS = 64
"""Blocks of an object that are kept."""

AHEAD = 16
"""Blocks that are fetched together at most, where an object is read from front to back."""

TOGETHER = 5_000
"""Names below a directory that are listed together, at most."""

LISTINGS = 5_000
"""Listings that are kept."""

SECONDS = 2.0
"""For how long an answer on what an object is holds, within one process: opening a dataset asks
several times. Nothing is ever mixed: each request names the version."""

UPLOAD_NBYTES = 16 << 20
"""Bytes of a part of an upload, at least; stores take 10,000 parts at most."""

UPLOADS = 8
"""Parts of an object that are uploaded at a time."""

TRIES = 7
"""Times that a request is made again by obstore."""

PAUSE = 0.05
"""Seconds before the second try; twice as many before each further one, with jitter."""

DEADLINE = 60.0
"""Seconds after which a request that has not ended fails, and is made again."""

STALLED = 10.0
"""Seconds without a byte after which a request to read fails, and is made again."""

_PLAIN = ("http", "https")


class ObjectFile(Handle):
    """One version of an object."""

    def __init__(self, version: Version, head: bytes = b"") -> None:
        self.name, self.nbytes, self.version = version.name, version.nbytes, version
        self.mtime_ns = version.modified
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._head, self._last, self._ahead = head, -1, 1
        self._lock = threading.Lock()

    @override
    def look(self, offset: int | None = None) -> tuple[int, int]:
        """Return what it is: a version never becomes another one."""
        return self.nbytes, self.mtime_ns

    @override
    def pread(self, nbytes: int, offset: int) -> bytes:
        stop = min(offset + nbytes, self.nbytes)
        if stop <= offset:
            return b""
        if stop - offset > BLOCK_NBYTES:
            return requests().fetch(self.version, offset, stop)
        with self._lock:
            if stop <= len(self._head):
                return self._head[offset:stop]
            return self._between(offset, stop)

    @override
    def pread_blocks(self, nbytes: int, offsets: Sequence[int]) -> list[bytes]:
        blocks: dict[int, Any] = {}
        ends = [min(offset + nbytes, self.nbytes) for offset in offsets]
        for at, end in zip(offsets, ends, strict=True):
            if at < end <= len(self._head):
                blocks[at] = self._head[at:end]
        requests().read(
            [
                (self.version, at, end, partial(blocks.__setitem__, at))
                for at, end in zip(offsets, ends, strict=True)
                if at < end and at not in blocks
            ]
        )
        return [bytes(blocks.get(offset, b"")) for offset in offsets]

    @override
    def pread_into(self, out: Array, offset: int) -> None:
        """Fill `out` by requests for just that: these are values, of which no others are near."""
        nbytes = out.nbytes
        if nbytes:
            self.read_range(offset, np.array([[out.ctypes.data, nbytes]], np.int64))

    def _between(self, start: int, stop: int) -> bytes:
        numbers = range(start // BLOCK_NBYTES, (stop - 1) // BLOCK_NBYTES + 1)
        for number in numbers:
            if number not in self._blocks:
                self._fetch(number)
            self._blocks.move_to_end(number)
        self._last = numbers[-1]
        data = b"".join(self._blocks[number] for number in numbers)
        at = start - numbers[0] * BLOCK_NBYTES
        return data[at : at + stop - start]

    def _fetch(self, number: int) -> None:
        """Fetch a block, and more after it if blocks have been read in about this order."""
        is_next = 0 < number - self._last <= min(self._ahead, AHEAD // 2)
        self._ahead = min(2 * self._ahead, AHEAD) if is_next else 1
        stop = number + self._ahead
        begin, end = number * BLOCK_NBYTES, min(stop * BLOCK_NBYTES, self.nbytes)
        data = requests().fetch(self.version, begin, end)
        for k in range(number, stop):
            if k * BLOCK_NBYTES < end:
                at = (k - number) * BLOCK_NBYTES
                self._blocks[k] = data[at : at + BLOCK_NBYTES]
        while len(self._blocks) > BLOCKS:
            self._blocks.popitem(last=False)

    @override
    def read_range(self, start: int, iovecs: Ints) -> tuple[int, int]:
        return self.read_runs(one_range(start, iovecs))

    @override
    def read_runs(self, ranges: Runs) -> tuple[int, int]:
        return self.read_many([(self, ranges)])

    @classmethod
    @override
    def read_many(cls, parts: Sequence[tuple[Handle, Runs]]) -> tuple[int, int]:
        asked = [
            part
            for file, ranges in parts
            if isinstance(file, cls)
            for part in parts_of(file.version, ranges)
        ]
        requests().read(asked)
        return len(asked), sum(stop - start for _, start, stop, _ in asked)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an object that is open is not sent to other processes")


def _status(version: Version) -> os.stat_result:
    text = f"{version.etag or version.modified} {version.nbytes}".encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little") | 1
    return made_status(version.nbytes, version.modified, number)


class ObjectStore(Store):
    """All buckets, containers or hosts of one scheme of URLs."""

    part_nbytes = PART_NBYTES

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme
        self._roots: dict[tuple[str, bool], Any] = {}
        self._answers: dict[str, tuple[float, tuple[Version | None, bytes]]] = {}
        self._listings: dict[str, tuple[float, dict[str, os.stat_result]]] = {}
        self._lock = threading.Lock()

    def _split(self, name: str, *, is_sent: bool = False) -> tuple[Any, str]:
        """Return the store of obstore that an object is read from, or sent to, and its key."""
        bucket, _, key = name.partition("/")
        if self.scheme in _PLAIN and ("?" in key or "#" in key):
            raise UsageError(
                "a URL with a query, such as one that is signed, names no file that stays",
                where=f"{self.scheme}://{name.partition('?')[0]}",
                fix="give credentials in the environment, and s3://, gs:// or az://",
            )
        if not {".", ".."}.isdisjoint(key.split("/")) or _CONTROL.search(key):
            raise UsageError(
                f"{name!r} has a part that is not read: . or .. or control characters",
                fix="give the object another name",
            )
        check_process()
        with self._lock:
            root = self._roots.get((bucket, is_sent))
            if root is None:
                root = _connect(f"{self.scheme}://{bucket}", None if is_sent else STALLED)
                self._roots[bucket, is_sent] = root
            return root, key

    def _url(self, name: str) -> str:
        return f"{self.scheme}://{name}"

    # --- what objects are --------------------------------------------------------------------

    def look(self, url: str, *, head: bool = False) -> tuple[Version, bytes]:
        """Return the version of an object now, and, with `head`, its first bytes.

        Raises
        ------
        FileNotFoundError
            If there is none.
        """
        name = url.partition("://")[2]
        version, data = self._answer(name, head)
        if version is None:
            raise FileNotFoundError(2, os.strerror(2), url)
        return version, data

    def _answer(self, name: str, head: bool) -> tuple[Version | None, bytes]:
        known = self._kept(name)
        if known is not None:
            version, data = known
            if not head or data or version is None or not version.nbytes:
                return known
        answer: tuple[Version | None, bytes] = None, b""
        if "/" in name:  # a bucket's sidecar would have the name of another bucket
            try:
                if head:
                    answer = self._first(name)
                else:
                    counters["other"] += 1
                    answer = self._version(name, obstore.head(*self._split(name))), b""
            except (FileNotFoundError, exceptions.NotFoundError):
                pass
            except exceptions.BaseError as error:
                # Who may not list a bucket is refused also what is not there.
                denied = isinstance(error, exceptions.PermissionDeniedError)
                if not (denied and name.endswith(SIDECARS)):
                    raise refused(self._url(name), error) from error
        self._note(name, answer)
        return answer

    def _first(self, name: str) -> tuple[Version, bytes]:
        """Return a version and its first bytes, by one request unless it is empty."""
        store, key = self._split(name)
        try:
            answer = obstore.get(store, key, options={"range": (0, EDGE_NBYTES)})
            data = bytes(answer.bytes())
        except (FileNotFoundError, exceptions.NotFoundError):
            raise
        except exceptions.BaseError:  # of no bytes there is no range
            counters["other"] += 1
            meta = obstore.head(store, key)
            if meta["size"]:
                raise
            return self._version(name, meta), b""
        counters["requests"] += 1
        counters["nbytes"] += len(data)
        version = self._version(name, answer.meta)
        if len(data) != min(EDGE_NBYTES, version.nbytes):
            raise OSError(5, "the answer is shorter than the object", version.name)
        return version, data

    def _version(self, name: str, meta: Any) -> Version:
        etag, when = etag_of(meta), modified_ns(meta)
        return Version(*self._split(name), self._url(name), meta["size"], etag, when)

    def _kept(self, name: str) -> tuple[Version | None, bytes] | None:
        """Return the last answer on an object, as long as it holds; also that a list lacks it."""
        kept = self._answers.get(name)
        if kept is not None and time.monotonic() - kept[0] < SECONDS:
            return kept[1]
        directory, _, last = name.rpartition("/")
        inside = self._listed(directory)
        missing = inside is not None and (last not in inside or S_ISDIR(inside[last].st_mode))
        return (None, b"") if missing else None

    def _listed(self, directory: str) -> dict[str, os.stat_result] | None:
        """Return what is in a directory that was listed in the last `SECONDS`."""
        when, inside = self._listings.get(directory, (0.0, None))
        return inside if time.monotonic() - when < SECONDS else None

    def _note(self, name: str, answer: tuple[Version | None, bytes]) -> None:
        if len(self._answers) > 4096:
            self._answers.clear()
        self._answers[name] = time.monotonic(), answer

    @override
    def forget(self, name: str) -> None:
        self._answers.pop(name, None)
        self._listings.clear()

    @override
    def open(self, name: str, path: str, known: Identity | None = None) -> Handle:
        if known is not None and known.etag:
            return ObjectFile(Version(*self._split(name), path, known.nbytes, known.etag))
        return ObjectFile(*self.look(path, head=True))

    @override
    def etag(self, name: str) -> str:
        return self.look(self._url(name))[0].etag

    @override
    def stat(self, name: str) -> os.stat_result:
        try:
            version, _ = self.look(self._url(name))
        except FileNotFoundError:
            if self.scheme in _PLAIN or name.endswith(SIDECARS) or not self._inside(name):
                raise
            return made_status(None)
        return _status(version)

    @override
    def listing(self, directory: str) -> Iterator[tuple[str, os.stat_result]]:
        if self.scheme in _PLAIN:
            raise UnsupportedError(
                "an HTTP server gives no list of files",
                where=self._url(directory),
                fix="name the files, or a list of them as @list.txt",
            )
        yield from self._inside(directory).items()

    def _inside(self, directory: str) -> dict[str, os.stat_result]:
        """Return what is in a directory; empty where there is nothing of this name."""
        inside = self._listed(directory)
        if inside is not None:
            return inside
        store, key = self._split(directory)
        try:
            folders = self._below(directory, obstore.list(store, prefix=key or None))
            if folders is None:
                listed = obstore.list_with_delimiter(store, prefix=key or None)
                folders = self._below(directory, [listed["objects"]]) or {}
                for prefix in listed["common_prefixes"]:
                    name = prefix.rstrip("/").rpartition("/")[2]
                    folders[directory][name] = made_status(None)
        except exceptions.BaseError as error:
            raise refused(self._url(directory), error) from error
        if len(self._listings) > LISTINGS:
            self._listings.clear()
        now = time.monotonic()
        self._listings.update((folder, (now, names)) for folder, names in folders.items())
        return folders[directory]

    def _below(
        self, directory: str, pages: Iterable[Any]
    ) -> dict[str, dict[str, os.stat_result]] | None:
        """Return what is in each directory from one on; None if it is too much to list together."""
        folders: dict[str, dict[str, os.stat_result]] = {directory: {}}
        bucket, names, together = directory.partition("/")[0], 0, not isinstance(pages, list)
        for page in pages:
            counters["other"] += 1
            names += len(page)
            if together and names > TOGETHER:
                return None
            for meta in page:
                name, last = f"{bucket}/{meta['path']}", ""
                version = self._version(name, meta)
                self._note(name, (version, b""))
                status = _status(version)
                while len(name) > len(directory):
                    name, _, last = name.rpartition("/")
                    inside = folders.setdefault(name, {})
                    if last in inside:
                        break
                    inside[last], status = status, made_status(None)
        return folders

    # --- writing -----------------------------------------------------------------------------

    @override
    def check_writable(self, name: str) -> None:
        url = self._url(name)
        if self.scheme in _PLAIN:
            raise UsageError(
                "HTTP servers are only read", where=url, fix="write to s3://, gs:// or az://"
            )
        if not name.partition("/")[2]:
            raise UsageError("this names no object", where=url, expected="scheme://bucket/name")

    @override
    def put(self, name: str, data: Path | bytes, *, overwrite: bool | str) -> str:
        self.check_writable(name)
        store, key = self._split(name, is_sent=True)
        size = len(data) if isinstance(data, bytes) else data.stat().st_size
        part = max(UPLOAD_NBYTES, -(-size // 9000))
        taken = FileExistsError(17, os.strerror(17), self._url(name))
        try:
            mode: Any = "overwrite" if overwrite else "create"
            if isinstance(overwrite, str) or (size > part and not overwrite):
                there = self._meta(store, key)
                if (etag_of(there) if there else "") != (overwrite or ""):
                    raise taken
                known = ("e_tag", "version")
                mode = {name: there[name] for name in known if there[name]} if there else mode
            if size <= part:
                data = data if isinstance(data, bytes) else data.read_bytes()
                made = _put(store, key, data, mode)
            else:  # uploads in several parts know no condition
                made = obstore.put(store, key, data, chunk_size=part, max_concurrency=UPLOADS)
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            # The answer to a request that succeeded may have been lost, and it was made again.
            there = self._meta(store, key)
            if there is None or obstore.get(store, key).bytes() != data:
                raise taken from error
            made = there
        except (FileNotFoundError, exceptions.BaseError) as error:
            raise refused(self._url(name), error) from error
        finally:
            self.forget(name)
        counters["other"] += 1
        counters["sent"] += size
        return etag_of(made)

    def _meta(self, store: Any, key: str) -> Any:
        """Return what the server says of an object now, None if there is none."""
        counters["other"] += 1
        try:
            return obstore.head(store, key)
        except (FileNotFoundError, exceptions.NotFoundError):
            return None

    @override
    def remove(self, name: str) -> None:
        store, key = self._split(name)
        counters["other"] += 1
        self.forget(name)
        try:
            obstore.delete(store, key)
        except (FileNotFoundError, exceptions.NotFoundError):
            return
        except exceptions.BaseError as error:
            raise refused(self._url(name), error) from error


def store(scheme: str) -> ObjectStore:
    """Return the store of a scheme of URLs."""
    return ObjectStore(scheme)


def _put(store: Any, key: str, data: Any, mode: Any) -> Any:
    """Put an object by one request; Ceph compares If-Match with an ETag without quotes."""
    try:
        return obstore.put(store, key, data, mode=mode, use_multipart=False)
    except exceptions.PreconditionError:
        if not isinstance(mode, dict) or "e_tag" not in mode:
            raise
        mode = {**mode, "e_tag": mode["e_tag"].strip('"')}
        return obstore.put(store, key, data, mode=mode, use_multipart=False)


def _connect(url: str, stalled: float | None) -> Any:
    """Return obstore's store of a bucket; `stalled`: seconds without a byte that are too many."""
    scheme = url.partition(":")[0]
    options: dict[str, Any] = {
        "timeout": timedelta(seconds=DEADLINE),
        "connect_timeout": timedelta(seconds=10),
        "pool_max_idle_per_host": "256",
        "allow_http": scheme != "https",  # only an endpoint that says so is http
    }
    if stalled is not None:  # of an upload, nothing comes until all was sent
        options["read_timeout"] = timedelta(seconds=stalled)
    _check_environment(scheme)
    more: dict[str, Any] = {}
    if scheme == "s3" and (provider := _profile()) is not None:
        more["credential_provider"] = provider
    pauses = {"init_backoff": timedelta(seconds=PAUSE), "max_backoff": timedelta(seconds=3)}
    retry: Any = {"max_retries": TRIES, "retry_timeout": timedelta(seconds=60)}
    retry["backoff"] = {**pauses, "base": 2.0}
    try:
        return from_url(url, client_options=options, retry_config=retry, **more)
    except (exceptions.BaseError, ValueError) as error:
        text = str(error).strip().splitlines()[0]
        raise UsageError(f"there is no way to this store: {text}", where=url) from error


_CONTROL = re.compile(r"[\0-\x1f\x7f]")


def _check_environment(scheme: str) -> None:
    """Raise `UsageError` for variables at which obstore panics, or that it would show in errors."""
    # The message has no value: it may be secret.
    for name, value in os.environ.items():
        if scheme == "s3" and name.startswith("AWS_") and _CONTROL.search(value):
            raise UsageError(
                f"{name} has control characters, such as the end of a line",
                fix="unset it or give it again",
            )
        if name in ENDPOINTS.get(scheme, ()):
            with suppress(ValueError):  # of a port that is not a number
                url = urlsplit(value)
                if (
                    url.scheme in _PLAIN
                    and url.hostname
                    and url.port != 0
                    and not ("@" in url.netloc or url.query)
                ):
                    continue
            raise UsageError(
                f"{name} is not the URL of a server",
                expected="https://HOST:PORT, and credentials in variables of their own",
            )


def _profile() -> Any:
    """Return what gives the credentials of a profile (boto3); None: the environment does."""
    if os.environ.get("AWS_ACCESS_KEY_ID") or not os.environ.get("AWS_PROFILE"):
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise MissingExtra("AWS_PROFILE is read by boto3", fix="pip install boto3") from error
    return Boto3CredentialProvider()
