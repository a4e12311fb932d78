"""Cases: each is tried, bounded in time, and told of in one line."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Cases:
    """Counts what went wrong, and what was not done in time; prints a line per case.

    Parameters
    ----------
    only
        A regular expression that a case must have in its name; None: all are tried.
    """

    def __init__(self, only: str | None = None) -> None:
        self.only, self.tried = only, 0
        self.failed, self.late = list[str](), list[str]()

    def wanted(self, what: str) -> bool:
        """Whether a case is to be tried."""
        return self.only is None or re.search(self.only, what) is not None

    @contextmanager
    def case(self, what: str) -> Iterator[list[str]]:
        """Try what is in the context; what it appends to the list is told in the line.

        Anything that is raised makes it a failure.
        """
        self.tried += 1
        began, notes, word = time.monotonic(), list[str](), "ok"
        try:
            yield notes
        except subprocess.TimeoutExpired as error:
            told = error.output or ""
            notes.append(f"not done in {error.timeout:.0f} s: ...{_tail(told)}")
            word = "LATE"
            self.late.append(what)
        except Exception as error:
            notes.append(_tail(f"{type(error).__name__}: {error}", 1500))
            word = "FAILED"
            self.failed.append(what)
        seconds = time.monotonic() - began
        told = f": {'; '.join(notes)}" if notes else ""
        print(f"{word:8}{what} ({seconds:.1f} s){told}", flush=True)

    def end(self) -> int:
        """Print a summary; return an exit status."""
        right = self.tried - len(self.failed) - len(self.late)
        late = f", {len(self.late)} not done in time (--patience)" if self.late else ""
        print(f"{right} of {self.tried} cases are right{late}")
        return 1 if self.failed or self.late else 0


def _tail(text: str | bytes, most: int = 400) -> str:
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    return text[-most:].strip()


PASSING = ("created", "command", "mtime_ns", "inode")
"""Keys of a sidecar that differ from run to run."""


def digests(folder: Path, root: Path, name: str = "") -> dict[str, str]:
    """Return a digest of every file of a folder, but for when and where it was made.

    Parameters
    ----------
    root
        Where the file system is mounted, which stands in sidecars.
    name
        Of an output, which stands in its sidecar and in the names of its files: only these count.
    """
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "lock.mdb"):
        told = str(path.relative_to(folder))
        if name and not told.lstrip(".").startswith((f"{name}.", f"{name}/")):
            continue
        data = path.read_bytes()
        if path.suffix == ".json":
            data = json.dumps(_plain(json.loads(data)), sort_keys=True).encode()
            data = data.replace(str(root).encode(), b"ROOT")
            data = data.replace(name.encode(), b"NAME") if name else data
        told = told.replace(name, "NAME") if name else told
        found[told] = hashlib.sha256(data).hexdigest()
    return found


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if k not in PASSING}
    return [_plain(v) for v in value] if isinstance(value, list) else value


def main() -> None:
    """Print the digests of a folder: the file systems are seen on nodes only."""
    import sys

    print(json.dumps(digests(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])))


if __name__ == "__main__":
    main()
