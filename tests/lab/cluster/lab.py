"""The lab: a store, nodes, a scheduler and file systems; it leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from .filesystems import PATH, STORE_ADDRESS, FileSystem, all_of
from .slurm import Slurm
from .spaces import Fabric, Node

ROOT = Path(__file__).parents[3]
STORE = "store"
NODES = ("n1", "n2", "n3", "n4")

_ENTER = """#!/bin/sh
# In place of ssh: run a command on a node. Options of ssh are passed over.
while [ "${{1#-}}" != "$1" ]; do shift; done
name=$1; shift
exec nsenter -t "$(cat {base}/pids/$name)" -m -n -u -i -p -- sh -c "$*"
"""


class Lab:
    """A cluster on this machine.

    Parameters
    ----------
    systems
        Names of the file systems to mount; None: all that can be had.
    nodes
        How many nodes.
    slurm
        Whether SLURM runs.
    """

    def __init__(
        self, systems: Iterable[str] | None = None, nodes: int = 2, slurm: bool = False
    ) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="dsprep-lab-"))
        self.names = NODES[:nodes]
        known = all_of(self.base)
        wanted = [known[n] for n in systems] if systems is not None else list(known.values())
        self.missing = {f.name: why for f in wanted if (why := f.missing())}
        self.systems: dict[str, FileSystem] = {
            f.name: f for f in wanted if f.name not in self.missing
        }
        self.nodes: dict[str, Node] = {}
        self.slurm: Slurm | None = None
        try:
            self._start(slurm)
        except BaseException:
            self.close()
            raise

    def _start(self, slurm: bool) -> None:
        (self.base / "pids").mkdir()
        (self.base / "store").mkdir()
        (self.base / "mnt").mkdir()
        self.enter = self.base / "enter"
        self.enter.write_text(_ENTER.format(base=self.base))
        self.enter.chmod(self.enter.stat().st_mode | stat.S_IXUSR)
        numbers = {STORE: int(STORE_ADDRESS.rpartition(".")[2])}
        numbers |= {name: i + 1 for i, name in enumerate(self.names)}
        self._numbers = numbers
        self.fabric = Fabric("labctl")
        hosts = self.base / "hosts"
        hosts.write_text(
            "127.0.0.1 localhost\n"
            f"{self.fabric.address} labctl\n"
            + "".join(f"10.77.0.{n} {name}\n" for name, n in numbers.items())
        )
        names = self.base / "nsswitch"
        names.write_text("passwd: files\ngroup: files\nhosts: files\n")  # nobody else answers
        # Nodes take over these mounts, each as its own copy.
        self.fabric.run(
            f"mount --bind {hosts} /etc/hosts && mount --bind {names} /etc/nsswitch.conf &&"
            " mount -t tmpfs run /run",
            check=True,
        )
        for system in self.systems.values():
            if not system.network:
                system.serve(self.fabric, None)  # type: ignore[arg-type]  # not served
        self.store = self._node(STORE)
        for system in self.systems.values():
            if system.network:
                system.serve(self.fabric, self.store)
        if slurm:
            self.slurm = Slurm(self.base, self.fabric, list(self.names))
        for name in self.names:
            self.boot(name)
        if self.slurm is not None:
            self.slurm.ready(list(self.names))

    def _node(self, name: str) -> Node:
        (self.base / name / "tmp").mkdir(parents=True, exist_ok=True)
        node = Node(self.fabric, name, self._numbers[name])
        (self.base / "pids" / name).write_text(f"{node.inner_pid}\n")
        node.run("mount -t tmpfs run /run", check=True)
        return node

    def boot(self, name: str) -> Node:
        """Start a node, anew if there was one: its mounts, its daemon of SLURM."""
        node = self.nodes[name] = self._node(name)
        for system in self.systems.values():
            if system.network:
                system.mount(node)
        if self.slurm is not None:
            self.slurm.join(node)
        return node

    def serve_again(self) -> None:
        """Start the store anew, after its end, with what it serves."""
        self.store = self._node(STORE)
        for system in self.systems.values():
            if system.network:
                system.serve(self.fabric, self.store)

    def env(self, node: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of programs on a node: this dsprep, this Python."""
        home = self.base / node
        found = {
            "PYTHONPATH": str(ROOT),
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), PATH)),
            "TMPDIR": str(home / "tmp"),
            "HOME": str(home),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",  # all nodes share the cores of this machine
            "PYTHONDONTWRITEBYTECODE": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "UCX_NET_DEVICES": "eth0",
            "UCX_TLS": "tcp,self",  # nodes share no memory, as UCX would have it of one machine
        }
        if self.slurm is not None:
            found |= {"SLURM_CONF": str(self.slurm.conf)}
        return found | dict(more or {})

    def hydra(self, processes: int, nodes: Iterable[str]) -> list[str]:
        """Return the words before a program that MPICH's mpiexec starts on nodes, in the fabric."""
        hosts = ",".join(nodes)
        return [
            str(Path(sys.executable).parent / "mpiexec"),
            *("-launcher", "ssh", "-launcher-exec", str(self.enter), "-iface", "eth0"),
            *(
                "-hosts",
                hosts,
                "-ppn",
                str(-(-processes // len(hosts.split(",")))),
                "-n",
                f"{processes}",
            ),
        ]

    def close(self) -> None:
        """End everything; nothing stays."""
        if hasattr(self, "fabric"):
            self.fabric.end()
            for node in [*self.nodes.values(), *([self.store] if hasattr(self, "store") else [])]:
                node.end()
        shutil.rmtree(self.base)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
