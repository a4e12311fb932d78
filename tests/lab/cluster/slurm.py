"""SLURM of the lab: a controller on the fabric, a daemon on every node, MUNGE between them."""

from __future__ import annotations

import os
from pathlib import Path

from .filesystems import PATH
from .spaces import Fabric, Node, Space, wait_for


class Slurm:
    """A SLURM cluster over nodes.

    Parameters
    ----------
    base
        The directory of the lab.
    fabric
        Where the controller runs.
    nodes
        The names of all nodes that there will be.
    cores
        Tasks that fit on each.
    """

    def __init__(self, base: Path, fabric: Fabric, nodes: list[str], cores: int = 4) -> None:
        self.base, self.fabric = base / "slurm", fabric
        self.conf = self.base / "slurm.conf"
        self.env = {"SLURM_CONF": str(self.conf), "PATH": PATH}
        for path in (self.base / "state", self.base / "log"):
            path.mkdir(parents=True)
        key = self.base / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self.conf.write_text(
            f"""ClusterName=lab
SlurmctldHost={fabric.name}({fabric.address})
AuthType=auth/munge
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
SlurmUser=root
SlurmdUser=root
StateSaveLocation={self.base}/state
SlurmdSpoolDir={self.base}/%n
SlurmdPidFile=/run/slurmd.pid
SlurmctldPidFile=/run/slurmctld.pid
SlurmdLogFile={self.base}/log/%n.log
SlurmctldLogFile={self.base}/log/ctld.log
MpiDefault=pmi2
ReturnToService=2
SlurmdTimeout=15
KillWait=5
SlurmdParameters=config_overrides
MessageTimeout=10
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=100000
"""
            + "".join(
                f"NodeName={name} NodeAddr={name} CPUs={cores} RealMemory=4000\n" for name in nodes
            )
            + f"PartitionName=lab Nodes={','.join(nodes)} Default=YES MaxTime=INFINITE State=UP\n"
        )
        self._munge(fabric)
        fabric.run(f"slurmctld -c -f {self.conf}", check=True, env=self.env)

    def _munge(self, space: Space) -> None:
        space.run(
            f"mkdir -p /run/munge && munged --force --key-file {self.base}/munge.key"
            " --socket /run/munge/munge.socket.2 --pid-file /run/munge/pid"
            f" --log-file {self.base}/log/munge-{space.name} --seed-file /run/munge/seed",
            check=True,
            env=self.env,
        )

    def join(self, node: Node) -> None:
        """Start the daemon of a node."""
        self._munge(node)
        node.run(f"slurmd -N {node.name} -f {self.conf}", check=True, env=self.env)

    def ready(self, nodes: list[str]) -> None:
        """Wait until the nodes take work."""
        told = "sinfo -h -N -o %N:%T"
        names = {f"{name}:idle" for name in nodes}
        wait_for(
            "slurmd of all nodes",
            lambda: names <= set(self.fabric.run(told, env=self.env).stdout.split()),
        )
