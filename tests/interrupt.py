"""Kills conversions and repacks at every step they have, one after another, and continues each.

Run as ``python interrupt.py FORMAT JOBS``; JOBS is JSON, a list of ``[source, target, options]``.
Every eighth step is taken, which of them depends on the options; all with ``DSPREP_FULL=1``. Each
attempt is a child process that SIGKILLs itself when its fuse has burnt down: before and after
pieces are written, positions are recorded, the output is completed, renamed, and its sidecar is
written. Prints, as JSON, for each job and fuse: whether what was visible after the kill was
complete, whether a rerun with another number of workers gives the same bytes, and whether nothing
else is left then.
"""

from __future__ import annotations

import hashlib
import json
import os
import pkgutil
import shutil
import signal
import sys
import zlib
from importlib import import_module
from pathlib import Path

import dsprep
from dsprep import formats
from dsprep.sidecar import spec
from dsprep.write import plan, staging, transfer
from dsprep.write import run as jobs

fuse = -1


def burn() -> None:
    global fuse
    fuse -= 1
    if fuse == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def around(owner: object, name: str) -> None:
    inner = getattr(owner, name)

    def outer(*args, **kwargs):
        burn()
        result = inner(*args, **kwargs)
        burn()
        return result

    setattr(owner, name, outer)


def digest(path: Path) -> str:
    found = hashlib.sha256()
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        found.update(str(file.relative_to(path.parent)).encode())
        found.update(file.read_bytes())
    return found.hexdigest()


def attempt(source: str, target: Path, options: dict, burnt_after: int, workers: int) -> bool:
    """Convert in a child; return whether it came to its end."""
    global fuse
    child = os.fork()
    if child == 0:
        code = 1
        try:
            fuse = burnt_after
            run = dsprep.repack if "buffer_size" in options else dsprep.convert
            run(source, target, workers=workers, **options)
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


def clear(target: Path) -> None:
    for path in target.parent.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


SKIPPED = ("dsprep.__main__", "dsprep.torch", "dsprep.tf", "dsprep.jax")
"""What takes part in no conversion, and needs packages that may be missing."""


def main() -> None:
    jobs.CHECKPOINT_NBYTES = 100_000
    parts = (m.name for m in pkgutil.walk_packages(dsprep.__path__, "dsprep."))
    for name in ("h5py", "numcodecs", "zarr", "google_crc32c", "ml_dtypes", *parts):
        if name not in SKIPPED:
            import_module(name)  # once, not in every child
    os.fsync = os.fdatasync = lambda fd: None  # a killed process loses nothing that it wrote
    for name in ("pieces", "group_pieces"):  # small ones, so that there are many
        cut = getattr(plan, name)
        small = lambda *args, cut=cut, **kwargs: cut(*args, **{"target": 40_000, **kwargs})  # noqa: E731
        setattr(jobs, name, small)
    around(transfer.ShardCopy, "_copy")
    around(staging.Staging, "save")
    around(staging.Staging, "publish")
    around(staging.Staging, "discard")
    around(spec, "write")
    format = type(formats.load(sys.argv[1]))
    create = format.create

    def created(*args, **kwargs):
        writer = create(*args, **kwargs)
        around(writer, "finish")
        around(writer, "clean")
        return writer

    format.create = created
    print(json.dumps([killed(s, Path(t), options) for s, t, options in json.loads(sys.argv[2])]))


def killed(source: str, target: Path, options: dict) -> list[dict]:
    """Return what came of each kill of one job."""
    target.parent.mkdir()
    attempt(source, target, options, -1, 2)
    expected = digest(target)
    results = []
    stride = 1 if os.environ.get("DSPREP_FULL") == "1" else 8
    step = 1 + zlib.crc32(json.dumps(options).encode()) % stride
    while True:
        clear(target)
        if attempt(source, target, options, step, 1):
            break
        visible = target.exists()
        complete = not visible or digest(target) == expected
        working = staging.partial_path(target)
        if (working / "state.json").exists() or not visible:
            assert attempt(source, target, options, -1, 1 + step % 3)
        elif working.exists():  # killed between its last two acts; all that is left is empty
            working.rmdir()
        left = sorted(p.name for p in target.parent.iterdir())
        results.append(
            {
                "step": step,
                "complete": complete,
                "same": digest(target) == expected,
                "left": left == sorted([target.name, spec.sidecar_path(target).name]),
            }
        )
        step += stride
    return results


main()
