"""Writing to a store: what is made on this machine is uploaded, shard by shard, as it is complete.

The directory for temporary files (``TMPDIR``) has the shards that are being written and uploaded,
no more. The sidecar is uploaded last: until then, a claim in the store shows that the dataset is
not there as a whole (`dsprep.writing.remote`).
"""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

from typing_extensions import override

from dsprep.core.packing import digest
from dsprep.errors import TargetError
from dsprep.sidecar import spec
from dsprep.sidecar.spec import Content, write_record
from dsprep.storage import trees
from dsprep.storage.atomic import make_scratch
from dsprep.storage.identity import Identity
from dsprep.storage.locking import signature
from dsprep.storage.paths import StorePath
from dsprep.writing import remote
from dsprep.writing.create_sidecar import NewSidecar
from dsprep.writing.job import PARALLEL_UPLOADS
from dsprep.writing.remote import Claim, as_object
from dsprep.writing.staging import START, Staging


class UploadStaging(Staging):
    """The directory in which shards of `target`, in a store, are made, and uploaded from."""

    def __init__(self, target: Path, job: Mapping[str, Any], **options: Any) -> None:
        self._remote = as_object(target)
        self._claim: Claim | None = None
        self._version = self._sidecar = ""
        self._is_held = False
        self._before = set[StorePath]()  # what was there when this run began
        self._begun = set[StorePath]()  # the shards that have been uploaded, perhaps in part
        self._clearing = Lock()
        self._pool = ThreadPoolExecutor(PARALLEL_UPLOADS, "dsprep-upload")
        self._waiting: deque[Future[None]] = deque()
        make_scratch(target)
        super().__init__(target, job, **options)

    # --- the claim -----------------------------------------------------------------------------

    @override
    def _continue(self, job: Mapping[str, Any], restart: bool) -> dict[str, Any] | None:
        self._claim, self._version = remote.read_claim(self._remote)
        if self._claim is not None and not restart:
            self._check_owner(self._claim)
        state = super()._continue(job, restart)
        assert self._claim is not None  # or it has begun
        if not self._is_held:
            self._hold(self._claim)
        self._look()
        there = remote.sidecar_digest(self._remote)
        self.is_published = bool(there) and there == self._claim.sidecar
        if self.is_published:
            return {**(state or START), "complete": True}
        if there:
            beside = as_object(spec.sidecar_path(self._remote))
            self._sidecar = beside.store.etag(beside.key)
        return None if state is None else {k: v for k, v in state.items() if k != "complete"}

    def _check_owner(self, claim: Claim) -> None:
        """Raise `TargetError` if another process may be making it."""
        number, _, host = claim.owner.removeprefix("process ").partition(" on ")
        if claim.owner and (host != os.uname().nodename or Path("/proc", number).exists()):
            raise TargetError(
                "another process is writing it, or was killed",
                where=self.target,
                found=claim.owner,
                fix="wait for it to end; if it was killed, repeat the command on that machine to "
                "continue it, or add --restart to discard what it left",
            )

    def _hold(self, claim: Claim) -> None:
        """Make the claim this process's, unless another one has changed it meanwhile."""
        claim = replace(claim, owner=signature())
        self._version = remote.write_claim(self._remote, claim, self._version)
        self._claim, self._is_held = claim, True

    @override
    def _load(self, name: str, ignore: bool = False) -> dict[str, Any] | None:
        """Return a record; for the job, the claim in the store, which alone counts."""
        claim = self._claim
        if ignore or claim is None:
            return None
        if name == "job.json":
            return dict(claim.job)
        recorded = super()._load(name)
        if super()._load("job.json") == claim.job and self.data.is_dir():
            return recorded or dict(START)
        super()._begin(claim.job)  # what lies here is of another run
        return dict(START)

    @override
    def _begin(self, job: Mapping[str, Any]) -> None:
        super()._begin(job)
        before = self._claim
        if before is None:
            replaces = remote.exists(self._remote)
        else:
            replaces = before.replaces or remote.published(self._remote)
        self._hold(Claim(job=job, run=secrets.token_hex(8), replaces=replaces))
        if before is not None and not replaces:
            remote.remove(self._remote)  # all that is there was uploaded by runs that are given up

    def _look(self) -> None:
        """List the objects in the store: those that runs of this job uploaded, and others."""
        assert self._claim is not None
        self._before = set(remote.objects(self._remote))
        for number, (content, companion) in remote.read_records(
            self._remote, self._claim.run
        ).items():
            entry = content.files[0]
            path, who = self._remote / entry.path, entry.identity
            with suppress(FileNotFoundError):
                if who.changed(path) is None:
                    self.uploaded[number] = content, companion
                    self._begun.add(path)

    # --- uploading -----------------------------------------------------------------------------

    @override
    def complete(self, number: int, path: Path, made: NewSidecar | None = None) -> None:
        super().complete(number, path, made)
        if number in self.uploaded:
            trees.remove(path)
            return
        self._wait(PARALLEL_UPLOADS - 1)
        self._waiting.append(self._pool.submit(self._upload, number, path))

    @override
    def reset(self, *kept: str) -> None:
        self._wait()
        self.uploaded.clear()
        for path in self._begun:
            remote.remove(path)
        super().reset(*kept)

    def _wait(self, most: int = 0) -> None:
        while len(self._waiting) > most:
            self._waiting.popleft().result()

    def _upload(self, number: int, path: Path) -> None:
        """Upload a shard, record that, and remove it here."""
        assert self._claim is not None
        name = str(path.relative_to(self.made))
        target = self._remote / name
        content, companion = self.record(number)
        self._begun.add(target)
        if path.is_dir() or path != self.made:
            self._remove_sidecar()
        etag = self._put_all(path, target) if path.is_dir() else self._put(path, target)
        entry = content.files[0]
        who = replace(entry.identity, etag=etag, mtime_ns=None)
        content = replace(content, files=(replace(entry, path=name, identity=who),))
        remote.write_record(self._remote, number, self._claim.run, (content, companion))
        self.uploaded[number] = content, companion
        trees.remove(path)

    def _put_all(self, directory: Path, target: StorePath) -> str:
        """Upload a directory, return its version; what else is below `target` is removed."""
        files = {target / p.relative_to(directory): p for p in directory.rglob("*") if p.is_file()}
        with ThreadPoolExecutor(remote.THREADS, "dsprep-upload") as pool:
            list(pool.map(self._put, files.values(), files))
        for path in list(remote.objects(target)):
            if path not in files:
                path.unlink(missing_ok=True)
        return Identity.look(target).etag

    def _put(self, path: Path, target: StorePath) -> str:
        """Upload a file, unless only others can have put what is there; return its version."""
        try:
            return target.store.put(target.key, path, overwrite=target in self._before)
        except FileExistsError as error:
            raise self._meanwhile(target) from error

    def _meanwhile(self, path: Path) -> TargetError:
        return TargetError(
            "another program has written it meanwhile",
            where=path,
            fix="look at it; to replace it, repeat the command with --restart --overwrite",
        )

    def _remove_sidecar(self) -> None:
        """Remove the sidecar of what is replaced: from now on no reader takes it for complete."""
        with self._clearing:
            if self._sidecar:
                spec.sidecar_path(self._remote).unlink(missing_ok=True)
                self._sidecar = ""

    # --- the end -------------------------------------------------------------------------------

    @override
    def save(self, state: Mapping[str, Any]) -> None:
        if state.get("complete"):
            self._wait()
        if not self.is_published and (self._resumable or state.get("complete")):
            write_record(state, self.root / "state.json", durable=self.durable)

    @override
    def publish(self, content: Content, companion: bytes) -> None:
        """Remove what was there and is not part of the new dataset; put the sidecar."""
        assert self._claim is not None
        for path in self._before:
            above = self._begun.intersection(path.parents)
            if path not in self._begun and not any(shard.is_dir() for shard in above):
                self._remove_sidecar()
                path.unlink(missing_ok=True)
        path = as_object(spec.sidecar_path(self._remote))
        data, companion = spec.encode(content, companion)
        self._hold(replace(self._claim, sidecar=digest(data)))  # it is still this process's
        beside = as_object(path.with_name(spec.companion_name(path)))
        if companion:
            beside.store.put(beside.key, companion, overwrite=True)
        else:
            beside.unlink(missing_ok=True)
        try:
            path.store.put(path.key, data, overwrite=self._sidecar or False)
        except FileExistsError as error:
            raise self._meanwhile(path) from error
        self.is_published = True

    @override
    def discard(self) -> None:
        self._stop()
        if self._is_held:
            if not self.is_published:
                for path in self._begun:
                    remote.remove(path)
            remote.discard(self._remote)
        self._claim, self._is_held = None, False
        super().discard()

    def _stop(self) -> None:
        """Wait for uploads that are under way, and begin no more."""
        self._pool.shutdown(cancel_futures=True)

    @override
    def close(self) -> None:
        self._stop()
        if self._is_held and self._claim is not None:
            self._is_held = False
            with suppress(OSError):  # then others see that this process has ended
                remote.write_claim(self._remote, replace(self._claim, owner=""), self._version)
        super().close()
