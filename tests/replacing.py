"""Replaces a dataset, and lets each rename, unlink and fsync of it fail, or be the last act.

Run as ``python replacing.py ORIGIN FOLDER NAME OPTIONS_JSON EXCHANGE``: what is in ``FOLDER/old``
is replaced by a conversion of ORIGIN, in a child process for each step, once with a failing system
call and once with a SIGKILL; a sixth of these (all with ``DSPREP_FULL=1``). EXCHANGE is 0 for a
file system that cannot exchange names. Prints as JSON for each attempt what the target is after
it, as its own sidecar says, and after a rerun.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import sys
import warnings
import zlib
from importlib import import_module
from pathlib import Path

import dsprep
from dsprep.core import atomic
from dsprep.sidecar.sidecar import Sidecar
from dsprep.write import staging

fuse = -1
mode = ""
armed = False


def step(*words: object) -> None:
    """Count a system call; the last one fails or kills."""
    global fuse
    if not armed:
        return
    fuse -= 1
    if fuse == 0 and mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fuse == 0:
        raise OSError(errno.EIO, os.strerror(errno.EIO), *map(str, words[:1]))


def counted(owner: object, name: str) -> None:
    real = getattr(owner, name)

    def wrapped(*args, **kwargs):
        if "dir_fd" not in kwargs:  # a tree is removed in one step
            step(*args)
        return None if name == "fsync" else real(*args, **kwargs)

    setattr(owner, name, wrapped)


def attempt(source: str, target: Path, options: dict, burns: int, how: str) -> int:
    """Convert in a child; return 0, 1 for an error and 2 if it was killed."""
    global fuse, mode
    child = os.fork()
    if child == 0:
        code = 3
        try:
            fuse, mode = burns, how
            run = dsprep.repack if "buffer_size" in options else dsprep.convert
            run(source, target, workers=1, overwrite=True, **options)
            code = 0
        except OSError:
            code = 1
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return 2 if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def content(target: Path) -> str:
    """Return what a dataset holds, types included, read in both ways; both say the same."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as a sidecar that is ignored
        with dsprep.open(target) as source, Sidecar.open(target) as opened:
            for batch in (source.read(0, len(source)), opened.read(slice(None))):
                text = "".join(f"{f} {batch[f.name][:]}" for f in source.schema)
                found.append(hashlib.sha256(text.encode()).hexdigest())
            assert list(map(str, opened.schema)) == list(map(str, source.schema))
    assert found[0] == found[1]
    return found[0]


def seen(target: Path, words: dict[str, str]) -> str:
    try:
        return words.get(content(target), "something else")
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    origin, folder, name, text, exchange = sys.argv[1:]
    options, old = json.loads(text), Path(folder, "old")
    work = Path(folder, "work")
    target = work / name
    counted(shutil, "rmtree")
    for call in ("rename", "replace", "unlink", "fsync"):
        counted(os, call)
    if exchange == "1":
        counted(atomic, "exchange")
    else:
        atomic.exchange = lambda a, b: False
    save = staging.Staging.save

    def saved(self, state):
        global armed
        armed = armed or bool(state.get("complete"))  # what is before is not of this test
        save(self, state)

    staging.Staging.save = saved

    def renew() -> None:
        if work.exists():
            shutil.rmtree(work)
        shutil.copytree(old, work)

    for module in ("h5py", "google_crc32c", "dsprep.verbs.convert", "dsprep.verbs.repack"):
        import_module(module)  # once, not in every child
    with dsprep.open(origin, through="library") as source:
        source.read(0, 1)
    renew()
    words = {content(target): "old"}
    assert attempt(origin, target, options, -1, "") == 0
    words[content(target)] = "new"
    assert len(words) == 2
    results: list[dict[str, object]] = []
    every = 1 if os.environ.get("DSPREP_FULL") == "1" else 3
    number, ended = 1 + zlib.crc32(name.encode()) % every, 1
    while ended:
        for how in ("fail", "kill") if every == 1 else (("fail", "kill")[number % 2],):
            renew()
            ended = attempt(origin, target, options, number, how)
            after = seen(target, words)
            again = attempt(origin, target, options, -1, "") if ended else 0
            left = sorted(p.name for p in work.iterdir())
            results.append(
                {
                    "step": f"{how} {number}",
                    "after": after,
                    "rerun": [again, seen(target, words), left],
                }
            )
        number += every
    print(json.dumps(results))


main()
