"""Making files cold, and looking at what shows whether they were: around one run of something."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsprep.bench import caches
from dsprep.bench.evidence import Seen
from dsprep.bench.received import Received, mount_under, node, received, remote
from dsprep.errors import UsageError

TIMEOUT = 300.0
"""Seconds that dropping a server's cache may take."""

MANY = 1000
"""Files from which on they are not looked at a second time."""


@dataclass(frozen=True)
class Server:
    """What is done about the cache of the server.

    Attributes
    ----------
    warm
        Whether all is read once before the client's pages are dropped.
    evict
        A command of the shell that drops the server's cache, run after them.
    """

    warm: bool = False
    evict: str | None = None

    def check(self, cold: bool) -> None:
        """Raise `UsageError` if it makes no sense."""
        if self.warm and self.evict is not None:
            raise UsageError("--warm-server and --evict-server contradict each other")
        if (self.warm or self.evict is not None) and not cold:
            name = "--warm-server" if self.warm else "--evict-server"
            raise UsageError(f"{name} is about cold runs", fix="add --cold")

    def drop(self) -> None:
        """Run the command, if there is one.

        Raises
        ------
        UsageError
            If it fails.
        """
        if self.evict is None:
            return
        command = ["/bin/sh", "-c", self.evict]
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # what it starts asks no terminal, and can be ended with it
        ) as process:
            try:
                errors = process.communicate(timeout=TIMEOUT)[1]
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise self._failed(f"nothing after {TIMEOUT:g} s") from None
                raise
        if process.returncode:
            lines = errors.decode(errors="replace").strip().splitlines()
            told = [f"exit status {process.returncode}", *lines[-1:]]
            raise self._failed(": ".join(told)[:300])

    def _failed(self, found: str) -> UsageError:
        return UsageError(
            f"the command of --evict-server failed: {self.evict}",
            found=found,
            fix="try it by itself; it has to end with status 0, and cannot ask for a password",
        )


class Watch:
    """Looks at the page cache and at what counts bytes, for some files of one mount.

    Parameters
    ----------
    files
        Those that are read.
    tries
        Whether to try what the kernel counts, which reads some of them; one process suffices.
    """

    def __init__(self, files: Sequence[Path], tries: bool = True) -> None:
        self.files = tuple(files)
        self._mount = mount_under(self.files[0]) if self.files else None
        look = caches.look(self.files)
        counts = caches.counts(self.files, look) if tries else None
        self._look = look
        self._seen = Seen(keeps=look.keeps, counts=counts, remote=remote(self._mount), node=node())

    def held(self) -> float | None:
        """Return the share of the files that the page cache has; None if it cannot be seen."""
        return self._look.held(self.files)

    def before(self) -> Seen:
        """Return what is seen when the files have just been dropped."""
        return replace(self._seen, held=self.held())

    def opened(self, seen: Seen, nbytes: int) -> Seen:
        """Return what is seen when they were opened, for which `nbytes` were counted.

        They are looked at where nothing is counted.
        """
        again = not seen.counts and len(self.files) <= MANY
        return replace(seen, opening=nbytes, opened=self.held() if again else None)

    def received(self) -> Received:
        """Return what this node received until now."""
        return received(self._mount)
