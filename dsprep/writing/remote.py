"""The records that a run keeps in a store while it writes a dataset there, for others to see.

Beside ``NAME`` there are, in ``.NAME.dsprep-partial/``:

``job.dsprep.json``
    The claim: what is being made from what, and which process does. It is made by a conditional
    create, replaced by If-Match, and removed when the sidecar is there. While it is there, and no
    sidecar, nothing reads the dataset.
``shard-N.json``
    That a shard is complete, which version of it, and its sidecar; so a run on another machine
    continues with it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsprep.core.packing import digest
from dsprep.errors import ChangedError, TargetError
from dsprep.sidecar import spec
from dsprep.sidecar.spec import Content
from dsprep.storage.atomic import marker_path
from dsprep.storage.paths import StorePath, scan
from dsprep.storage.trees import data_entries

THREADS = 16
"""Small objects that are read, written or removed at a time."""

MEANWHILE = "another process has begun to write it meanwhile"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The process that makes a dataset in a store, and its job.

    Attributes
    ----------
    job
        What is being made, as of `Staging`.
    run
        A word that records of other runs do not have: those of another job, or given up.
    replaces
        Whether something was there when the run began.
    owner
        The process, see `locking.signature`; empty if it ended in an orderly way.
    sidecar
        The digest of the sidecar that makes it complete; empty until then.
    """

    job: Mapping[str, Any]
    run: str
    replaces: bool
    owner: str = ""
    sidecar: str = ""


def read_claim(target: StorePath) -> tuple[Claim | None, str]:
    """Return the claim to a target, and its version; None without one.

    Raises
    ------
    TargetError
        If it is not one.
    """
    path = _root(target) / marker_path(target).name
    path.store.forget(path.key)
    try:
        version = path.store.etag(path.key)
        data = path.read_bytes()
    except FileNotFoundError:
        return None, ""
    except ChangedError as error:
        raise TargetError(MEANWHILE, where=target, fix="let that one end") from error
    try:
        return Claim(**json.loads(data)), version
    except (ValueError, TypeError) as error:
        raise TargetError(
            "the record of a run that writes it is damaged", where=path, fix="remove it"
        ) from error


def write_claim(target: StorePath, claim: Claim, version: str) -> str:
    """Make or replace the claim of this version; return the new version.

    Raises
    ------
    TargetError
        If another process has made or replaced it meanwhile.
    """
    path = _root(target) / marker_path(target).name
    try:
        data = json.dumps(asdict(claim), indent=1).encode()
        return path.store.put(path.key, data, overwrite=version or False)
    except FileExistsError as error:
        raise TargetError(MEANWHILE, where=target, fix="let that one end") from error


def published(target: StorePath) -> bool:
    """Return whether a run has written all of it, and left its claim."""
    claim, _ = read_claim(target)
    return claim is not None and bool(claim.sidecar) and claim.sidecar == sidecar_digest(target)


def sidecar_digest(target: StorePath) -> str:
    """Return the digest of the sidecar that is there; empty without one."""
    path = as_object(spec.sidecar_path(target))
    path.store.forget(path.key)
    try:
        return digest(path.read_bytes())
    except FileNotFoundError:
        return ""


def check_target(target: StorePath, overwrite: bool) -> None:
    """Raise `TargetError` if something is there that may not be replaced."""
    if overwrite:
        return
    claim, _ = read_claim(target)
    if exists(target) if claim is None else claim.replaces or published(target):
        raise TargetError("it exists already", where=target, fix="add --overwrite to replace it")


def exists(target: StorePath) -> bool:
    """Return whether an object has the name or is below, or there is a sidecar of it."""
    for path in (target, as_object(spec.sidecar_path(target))):
        path.store.forget(path.key)
        if path.exists():
            return True
    return False


def discard(target: StorePath) -> None:
    """Remove all that a run keeps beside the target, the claim last."""
    for path in _records(target):
        path.unlink(missing_ok=True)
    claim = _root(target) / marker_path(target).name
    claim.unlink(missing_ok=True)


def objects(path: StorePath) -> Iterator[StorePath]:
    """Yield the objects of a dataset: the one of this name, and all below."""
    path.store.forget(path.key)
    if path.is_file():
        yield path
    with suppress(FileNotFoundError, NotADirectoryError):
        for entry in data_entries(path):
            yield StorePath(entry.path)


def remove(path: StorePath) -> None:
    """Remove the objects of a dataset."""
    for each in list(objects(path)):
        each.unlink(missing_ok=True)


def write_record(target: StorePath, number: int, run: str, made: tuple[Content, bytes]) -> None:
    """Record that a shard is complete, which has this sidecar and companion."""
    record = {"run": run, **spec.to_record(*made)}
    path = _root(target) / f"shard-{number}.json"
    path.store.put(path.key, json.dumps(record).encode(), overwrite=True)


def read_records(target: StorePath, run: str) -> dict[int, tuple[Content, bytes]]:
    """Return sidecar and companion of all shards that a run recorded, by number."""

    def read(path: StorePath) -> tuple[int, tuple[Content, bytes]] | None:
        with suppress(ValueError, KeyError, TypeError, FileNotFoundError):
            record = json.loads(path.read_bytes())
            if record["run"] == run:
                number = int(path.name.removeprefix("shard-").removesuffix(".json"))
                return number, spec.from_record(record, path)
        return None

    with ThreadPoolExecutor(THREADS) as pool:
        return dict(record for record in pool.map(read, _records(target)) if record is not None)


def as_object(path: Path) -> StorePath:
    """Return a path that is one of a store."""
    assert isinstance(path, StorePath)
    return path


def _root(target: StorePath) -> StorePath:
    return as_object(marker_path(target).parent)


def _records(target: StorePath) -> list[StorePath]:
    root = _root(target)
    with suppress(FileNotFoundError):
        names = [os.fsdecode(entry.name) for entry in scan(root)]
        return [root / name for name in names if name.startswith("shard-")]
    return []
