"""Nodes on one machine: namespaces that have their own processes, mounts, names and addresses.

All nodes lie in one outer PID, mount, network, UTS and IPC namespace, the *fabric*, which has a
bridge that joins them and no way out. The first process of a PID namespace takes all others with
it when it ends; that of the fabric ends when its standard input does, and so with the program that
made it. Nothing is left then: no process, no mount, no loop device, no interface.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_FIRST = """
import os, signal, sys, threading, time
def end():
    while os.read(0, 1):
        pass
    os._exit(0)
threading.Thread(target=end, daemon=True).start()
print("ready", flush=True)
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.05)
"""
"""What the first process of a PID namespace does: it waits for orphans, until its input ends."""

SUBNET = "10.77.0"

_patience = 1.0


def be_patient(times: float) -> None:
    """Wait for everything so many times as long, where the machine has much else to do."""
    global _patience
    _patience = times


def patient(seconds: float) -> float:
    """Return how long to wait for what should take so many seconds at most."""
    return seconds * _patience


class Space:
    """Namespaces of their own, with a process that keeps them.

    Parameters
    ----------
    name
        The host name in them.
    outer
        The space in which these are made; None: the machine itself.
    """

    def __init__(self, name: str, outer: Space | None = None) -> None:
        self.name = name
        kinds = ["--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
        command = ["unshare", *kinds, "--propagation", "private", "--mount-proc"]
        command += [sys.executable, "-Suc", _FIRST]
        self._held = subprocess.Popen(
            [*(outer.entering() if outer else []), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # unshare complains of a signal mask when it is killed
            start_new_session=True,
        )
        assert self._held.stdout is not None
        if self._held.stdout.readline() != b"ready\n":
            raise OSError(f"namespaces for {name} cannot be made: is this root?")
        self.pid = _last_descendant(self._held.pid)
        self.run(f"hostname {name}; ip link set lo up; mount -t tmpfs shm /dev/shm", check=True)

    def entering(self) -> list[str]:
        """Return the command before a command that runs in these namespaces."""
        return ["nsenter", "-t", str(self.pid), "-m", "-n", "-u", "-i", "-p", "--"]

    def start(
        self, command: str | Sequence[str], env: Mapping[str, str] | None = None, **options: object
    ) -> subprocess.Popen[str]:
        """Start a command, or a line for the shell, in these namespaces."""
        words = ["bash", "-c", command] if isinstance(command, str) else list(command)
        own: dict[str, object] = {"stdin": subprocess.DEVNULL, "text": True, "errors": "replace"}
        return subprocess.Popen(
            [*self.entering(), *words],
            env={**os.environ, **(env or {})},
            **{**own, **options},  # type: ignore[call-overload]
        )

    def run(
        self,
        command: str | Sequence[str],
        *,
        timeout: float = 120,
        check: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command; what it prints comes back together.

        Raises
        ------
        TimeoutExpired
            If it takes longer; it and its children of the same session are ended then.
        RuntimeError
            If `check` and it fails.
        """
        started = self.start(
            command,
            env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            printed, _ = started.communicate(timeout=patient(timeout))
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.communicate()
            raise
        if check and started.returncode:
            told = command if isinstance(command, str) else shlex.join(command)
            raise RuntimeError(f"on {self.name}: {told}: {started.returncode}\n{printed}")
        return subprocess.CompletedProcess(command, started.returncode, printed, "")

    @property
    def alive(self) -> bool:
        """Whether its first process still runs."""
        return self._held.poll() is None

    def end(self) -> None:
        """End all its processes at once, as if its power failed."""
        if self._held.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ends with the fabric just now
                os.kill(self.pid, signal.SIGKILL)
        self._held.wait(20)
        for pipe in (self._held.stdin, self._held.stdout):
            if pipe is not None:
                pipe.close()


class Fabric(Space):
    """The outer namespaces: a bridge to which nodes are joined."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.address = f"{SUBNET}.254"
        self.nodes: dict[str, Node] = {}
        self.run(
            "ip link add eth0 type bridge && ip link set eth0 up &&"
            f" ip addr add {self.address}/24 dev eth0",
            check=True,
        )


class Node(Space):
    """A node of the cluster.

    Parameters
    ----------
    fabric
        What it is joined to.
    name, number
        Its host name, and the last number of its address.
    """

    def __init__(self, fabric: Fabric, name: str, number: int) -> None:
        super().__init__(name, fabric)
        self.address = f"{SUBNET}.{number}"
        inner = _pids(self.pid)[-2]  # as the fabric sees it
        self.inner_pid = inner
        fabric.run(
            f"ip link del v{number} 2>/dev/null; ip link add v{number} type veth peer name eth0"
            f" netns {inner} && ip link set v{number} master eth0 up",
            check=True,
        )
        self.run(f"ip addr add {self.address}/24 dev eth0 && ip link set eth0 up", check=True)
        fabric.nodes[name] = self


def _last_descendant(pid: int) -> int:
    """Return the youngest process of a chain of processes that each started one."""
    while True:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if not children:
            return pid
        pid = int(children[0])


def _pids(pid: int) -> list[int]:
    """Return what a process is called in each PID namespace, the outermost first."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return [int(word) for word in line.split()[1:]]
    raise OSError(f"process {pid} has ended")


def wait_for(what: str, ready: object, seconds: float = 30) -> None:
    """Wait until `ready()` is true.

    Raises
    ------
    TimeoutError
        If it is not within `seconds`.
    """
    assert callable(ready)
    seconds = patient(seconds)
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.1)
