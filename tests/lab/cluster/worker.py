"""Does on a node what it is told, line by line, each in a process of its own.

The process has imported all that takes long and forks for each task, so that hundreds of commands
take seconds instead of minutes. A task is JSON of one line with the name of a function of this
module; so is the answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.cluster import truth


def dsprep(argv: Sequence[str]) -> dict[str, Any]:
    """Run the command line; return its exit status and what it printed."""
    from dsprep.cli import main

    said, noted = io.StringIO(), io.StringIO()
    sys.argv = ["dsprep", *argv]
    code: Any = 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(noted):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    status = code if isinstance(code, int) else int(code is not None)
    return {"status": status, "out": said.getvalue(), "err": noted.getvalue()}


def write(path: str, count: int = truth.COUNT, ragged: bool = False) -> dict[str, Any]:
    """Write a source."""
    truth.write(Path(path), count, ragged)
    return {}


def check(path: str, ordered: bool = True, count: int = truth.COUNT, **options: Any) -> Any:
    """Open a dataset, and compare all of it with what its labels say."""
    import dsprep as package

    with package.open(path, **options) as source:
        batch = source[:]
    labels = batch["label"].tolist()
    expected = list(range(count))
    if (labels if ordered else sorted(labels)) != expected:
        return {"wrong": f"{len(labels)} samples, {len(set(labels))} labels"}
    return {"wrong": truth.wrong(batch)}


def reader(
    path: str,
    stop: int | None = None,
    state: dict[str, Any] | None = None,
    meet: Callable[[], object] = bool,
    **options: Any,
) -> dict[str, Any]:
    """Read an epoch, or `stop` steps of it; return the labels in order, and the state.

    `meet` is called before the Reader is closed.
    """
    import dsprep as package
    from dsprep.reader.engines import EngineWarning

    labels: list[int] = []
    with (
        warnings.catch_warnings(record=True, action="always") as noted,
        package.Reader(path, **options) as made,
    ):
        if state is not None:
            made.load_state_dict(state)
        for step, batch in enumerate(made):
            if what := truth.wrong(batch):
                return {"wrong": what, "labels": labels}
            labels += batch["label"].tolist()
            if stop is not None and step + 1 == stop:
                break
        kept = made.state_dict()
        meet()
    said = "".join(f"dsprep: note: {w.message}\n" for w in noted if w.category is EngineWarning)
    return {"wrong": "", "labels": labels, "state": kept, "err": said}


def digest(path: str) -> dict[str, Any]:
    """Return a digest of the bytes of a dataset, and of what its sidecar says of any place."""
    root = Path(path)
    state = hashlib.blake2b(digest_size=8)
    files = sorted(root.rglob("*")) if root.is_dir() else [root]
    for file in files:
        if file.is_file() and file.name != "lock.mdb" and ".dsprep." not in file.name:
            state.update(f"{file.relative_to(root)}\0{file.stat().st_size}\0".encode())
            state.update(file.read_bytes())
    sidecar = root.with_name(f"{root.name}.dsprep.json")
    told = json.loads(sidecar.read_text()) if sidecar.exists() else {}
    for file in told.get("files", ()):
        for key in ("mtime_ns", "inode"):
            file.pop(key, None)
    for key in ("lineage", "data"):
        told.pop(key, None)
    return {"digest": state.hexdigest(), "sidecar": told}


def ranks(folder: str, argument: str) -> None:
    """Read as one of the ranks that a launcher started; write what came into a folder."""
    from mpi4py import MPI

    options = json.loads(argument)
    if "stagger" in options:
        options["comm"] = MPI.COMM_WORLD
    try:
        found = reader(**options, meet=MPI.COMM_WORLD.Barrier)
    except Exception as error:
        ours = type(error).__module__ == "dsprep.errors" or isinstance(error, OSError)
        trace = "" if ours else traceback.format_exc()
        found = {"error": f"{type(error).__name__}: {error}", "trace": trace}
    Path(folder, f"{os.uname().nodename}-{os.getpid()}").write_text(json.dumps(found))
    if "error" in found:
        MPI.COMM_WORLD.Abort(1)  # the others wait for this rank


def make_directory(path: str) -> dict[str, Any]:
    """Make a directory."""
    Path(path).mkdir(parents=True, exist_ok=True)
    return {}


def remove(path: str) -> dict[str, Any]:
    """Remove what is at a path."""
    import shutil

    if os.path.isdir(path):  # noqa: PTH112
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)  # noqa: PTH108
    return {}


FUNCTIONS = {f.__name__: f for f in (dsprep, write, check, reader, digest, make_directory, remove)}


def _answer(task: dict[str, Any]) -> dict[str, Any]:
    """Do a task in a process of its own, killed when its time is over."""
    get, put = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(get)
        os.setpgid(0, 0)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                found = FUNCTIONS[task["do"]](**task.get("with", {}))
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
            ours = type(error).__module__ == "dsprep.errors" or isinstance(error, OSError)
            found = {"error": told, "trace": "" if ours else traceback.format_exc()}
        with os.fdopen(put, "wb") as file:
            file.write(json.dumps(found).encode())
        os._exit(0)
    os.close(put)
    end = began + task.get("seconds", 60)
    kill_at = began + task["kill_after"] if "kill_after" in task else end
    text, killed = b"", ""
    while True:
        now = time.monotonic()
        if now >= min(end, kill_at):
            killed = "killed" if kill_at < end else "hangs"
            break
        if select.select([get], [], [], min(end, kill_at) - now)[0]:
            more = os.read(get, 1 << 20)
            if not more:
                break
            text += more
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if killed == "hangs":  # a process that waits for a dead file system may not even be killed
        end = time.monotonic() + 5
        while os.waitpid(child, os.WNOHANG)[0] == 0 and time.monotonic() < end:
            time.sleep(0.05)
        status = -signal.SIGKILL
    else:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(get)
    took = {"seconds": round(time.monotonic() - began, 2)}
    if killed:
        return {"error": killed, **took}
    if not text:
        return {"error": f"ended by signal or status {status}", "trace": "died", **took}
    return {**json.loads(text), **took}


def serve() -> None:
    """Answer tasks until there are no more."""
    import h5py  # noqa: F401
    import lmdb  # noqa: F401
    import numcodecs  # noqa: F401
    import zarr  # noqa: F401

    import dsprep.cli  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["ranks"]:
        ranks(*sys.argv[2:])
    else:
        serve()
