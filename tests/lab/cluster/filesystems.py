"""The file systems of the lab: each is made on the store or the fabric, and mounted on every node.

A file system is a class: `serve` runs once, on the store or the fabric; `mount` on every node, and
again on one that is started anew; `root` says where it lies there. What is served from the store
ends with the store, and can be served again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from .spaces import Fabric, Node, wait_for

HERE = Path(__file__).parent


@dataclass
class FileSystem:
    """A file system that all nodes mount.

    Attributes
    ----------
    name
        What it is called in tables.
    base
        The directory of the lab, which all namespaces see.
    """

    name: str
    base: Path
    network: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ()

    @property
    def root(self) -> Path:
        """Where nodes have it."""
        return self.base / "mnt" / self.name

    @property
    def made_of(self) -> Path:
        """Where the store keeps what it holds."""
        return self.base / "store" / self.name

    def serve(self, fabric: Fabric, store: Node) -> None:
        """Make and serve it."""

    def mount(self, node: Node) -> None:
        """Mount it on a node."""

    def unmount(self, node: Node) -> None:
        """Unmount it from a node."""
        node.run(f"umount -l {self.root}", check=True)

    def missing(self) -> str:
        """Return why it cannot be had here; empty if it can."""
        lacking = [p for p in self.packages if shutil.which(p, path=PATH) is None]
        return f"{', '.join(lacking)} not installed" if lacking else ""


PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin", "/usr/bin", "/bin"))


class Local(FileSystem):
    """One that lies in a file of the machine: mounted once, seen by all nodes."""

    network = False
    make: ClassVar[str] = ""
    size: ClassVar[str] = "6G"

    def serve(self, fabric: Fabric, store: Node) -> None:
        """Make it in a sparse file, and mount that before there are nodes."""
        self.made_of.mkdir(parents=True)
        image = self.made_of / "image"
        fabric.run(
            f"truncate -s {self.size} {image} && {self.make} {image} && mkdir -p {self.root} &&"
            f" mount -o loop {image} {self.root}",
            check=True,
        )


class Ext4(Local):
    """What most local disks have; what the others are compared with."""

    make = "mkfs.ext4 -q -E lazy_itable_init=1"
    packages = ("mkfs.ext4",)


class Xfs(Local):
    """Large allocation groups, speculative preallocation."""

    make = "mkfs.xfs -q"
    packages = ("mkfs.xfs",)


class Btrfs(Local):
    """Copy on write, checksums; its st_dev differs from that of the mount."""

    make = "mkfs.btrfs -q"
    packages = ("mkfs.btrfs",)


class Tmpfs(Local):
    """Memory: nothing there can be cold."""

    def serve(self, fabric: Fabric, store: Node) -> None:
        """Mount it."""
        fabric.run(
            f"mkdir -p {self.root} && mount -t tmpfs -o size=2G none {self.root}", check=True
        )


class Overlay(Local):
    """What containers lie on: another device and inode after the first write."""

    def serve(self, fabric: Fabric, store: Node) -> None:
        """Mount it over two directories of a tmpfs-free disk."""
        lower, upper, work = (self.made_of / n for n in ("lower", "upper", "work"))
        for path in (lower, upper, work, self.root):
            path.mkdir(parents=True)
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        fabric.run(f"mount -t overlay -o {options} none {self.root}", check=True)


class Sshfs(FileSystem):
    """SFTP over FUSE: inode numbers of each mount's own, times of whole seconds, no locks."""

    packages = ("sshd", "sshfs", "ssh-keygen")
    port: ClassVar[int] = 2222

    def serve(self, fabric: Fabric, store: Node) -> None:
        """Start sshd, which serves SFTP from one directory to one key."""
        keys = self.base / "store" / "sshd"
        self.made_of.mkdir(parents=True, exist_ok=True)
        if not keys.exists():
            keys.mkdir(parents=True)
            for name in ("host", "user"):
                store.run(f"ssh-keygen -q -t ed25519 -N '' -f {keys / name}", check=True)
            shutil.copy(keys / "user.pub", keys / "authorized")
        options = {
            "HostKey": keys / "host",
            "Port": self.port,
            "ListenAddress": store.address,
            "AuthorizedKeysFile": keys / "authorized",
            "StrictModes": "no",
            "UsePAM": "no",
            "PidFile": "none",
            "MaxStartups": "100",
            "PermitRootLogin": "prohibit-password",
            "Subsystem": "sftp internal-sftp",
        }
        told = " ".join(f"-o '{k} {v}'" for k, v in options.items())
        store.run(
            f"mkdir -p /run/sshd && {shutil.which('sshd', path=PATH)} -f /dev/null {told}"
            f" -E {keys / 'log'}",
            check=True,
        )

    def mount(self, node: Node) -> None:
        """Mount it by sshfs with the options that people give it."""
        keys = self.base / "store" / "sshd"
        options = (
            f"IdentityFile={keys / 'user'},StrictHostKeyChecking=no,UserKnownHostsFile=/dev/null,"
            "LogLevel=ERROR,reconnect,ServerAliveInterval=5,ServerAliveCountMax=2"
        )
        node.run(
            f"mkdir -p {self.root} && sshfs -p {self.port} -o {options}"
            f" root@{STORE_ADDRESS}:{self.made_of} {self.root}",
            check=True,
        )


STORE_ADDRESS = "10.77.0.200"


@dataclass
class Gluster(FileSystem):
    """GlusterFS over FUSE: 64-bit inode numbers, bricks whose times may differ."""

    bricks: int = 2
    create: str = ""
    options: tuple[str, ...] = ()
    packages = ("glusterd", "gluster", "glusterfs")

    def serve(self, fabric: Fabric, store: Node) -> None:
        """Start the daemon unless it runs, and make the volume unless it is there."""
        state = self.base / "store" / "glusterd"
        fresh = not self.made_of.exists()
        if store.run("pgrep -x glusterd").returncode:
            store.run(
                f"mkdir -p {state} /run/gluster /var/log/glusterfs &&"
                f" mount --bind {state} /var/lib/glusterd && glusterd -p /run/glusterd.pid",
                check=True,
            )
            wait_for(
                "glusterd",
                lambda: not store.run("gluster --mode=script volume list").returncode,
            )
        if not fresh:
            return
        self.made_of.mkdir(parents=True)
        where = " ".join(f"{store.address}:{self.made_of}/b{i}" for i in range(self.bricks))
        steps = [f"volume create {self.name} {self.create} {where} force"]
        steps += [f"volume set {self.name} {option}" for option in self.options]
        steps += [f"volume start {self.name}"]
        for step in steps:
            store.run(f"gluster --mode=script {step}", check=True)

    def mount(self, node: Node) -> None:
        """Mount the volume."""
        node.run(
            f"mkdir -p {self.root} /var/log/glusterfs && mount -t glusterfs"
            f" {STORE_ADDRESS}:/{self.name} {self.root}",
            check=True,
        )


class MooseFs(FileSystem):
    """A master, chunks of 64 MiB, a FUSE client with locks that all nodes share."""

    packages = ("mfsmaster", "mfschunkserver", "mfsmount")

    def serve(self, fabric: Fabric, store: Node) -> None:
        """Start a master and a chunk server."""
        fresh = not self.made_of.exists()
        meta, chunks, etc = (self.made_of / n for n in ("meta", "chunks", "etc"))
        if fresh:
            for path in (meta, chunks, etc):
                path.mkdir(parents=True)
            shutil.copy("/var/lib/mfs/metadata.mfs.empty", meta / "metadata.mfs")
            (etc / "exports").write_text(f"{SUBNET_ALL} / rw,alldirs,admin,maproot=0:0\n")
            (etc / "hdd").write_text(f"{chunks}\n")
            own = f"WORKING_USER = root\nWORKING_GROUP = root\nDATA_PATH = {meta}\n"
            (etc / "master").write_text(f"{own}EXPORTS_FILENAME = {etc / 'exports'}\n")
            (etc / "chunk").write_text(
                f"{own}MASTER_HOST = {store.address}\nHDD_CONF_FILENAME = {etc / 'hdd'}\n"
                "HDD_LEAVE_SPACE_DEFAULT = 64MiB\n"
            )
        store.run(
            f"mfsmaster -a -c {etc / 'master'} start && mfschunkserver -c {etc / 'chunk'} start",
            check=True,
        )

    def mount(self, node: Node) -> None:
        """Mount it."""
        node.run(f"mkdir -p {self.root} && mfsmount {self.root} -H {STORE_ADDRESS}", check=True)


SUBNET_ALL = "10.77.0.0/24"


class Ceph(FileSystem):
    """CephFS: a monitor, a manager, one OSD, a metadata server; ceph-fuse with capabilities."""

    packages = ("ceph", "ceph-mon", "ceph-mgr", "ceph-osd", "ceph-mds", "ceph-fuse")

    def serve(self, fabric: Fabric, store: Node) -> None:
        """Start all daemons on the store; make the file system if it is not there."""
        home = self.made_of
        conf, fresh = home / "conf", not home.exists()
        ceph = f"ceph --conf {conf} --connect-timeout 20"

        def daemon(kind: str, name: str) -> None:
            store.run(f"ceph-{kind} --conf {conf} -i {name}", check=True)

        def says(question: str, word: str) -> Callable[[], bool]:
            return lambda: word in store.run(f"{ceph} {question}", timeout=60).stdout

        if fresh:
            self._make(home, conf, store)
        daemon("mon", "a")
        wait_for("the monitor", says("-s", "mon:"), 60)
        if fresh:
            for step in (
                f"{ceph} osd new {_CEPH_OSD} 0",
                f"ceph-osd --conf {conf} -i 0 --mkfs --osd-uuid {_CEPH_OSD}",
                f"{ceph} osd crush add osd.0 1.0 host=store root=default",
            ):
                store.run(step, check=True)
        daemon("mgr", "a")
        daemon("osd", "0")
        wait_for("the OSD", says("osd stat", "1 up"), 60)
        if fresh:
            for step in (
                "osd pool create meta 8",
                "osd pool create data 16",
                "fs new fs meta data",
            ):
                store.run(f"{ceph} {step}", check=True)
        daemon("mds", "a")
        wait_for("the metadata server", says("mds stat", "up:active"), 120)

    def _make(self, home: Path, conf: Path, store: Node) -> None:
        """Make directories, the configuration, and the monitor's own."""
        for name in ("mon", "mgr", "osd", "mds", "run"):
            (home / name).mkdir(parents=True)
        address = f"[v2:{STORE_ADDRESS}:3300,v1:{STORE_ADDRESS}:6789]"
        options: dict[str, object] = {
            "fsid": _CEPH_ID,
            "mon host": address,
            "public network": SUBNET_ALL,
            **{f"auth {who} required": "none" for who in ("cluster", "service", "client")},
            "auth allow insecure global id reclaim": "true",
            "run dir": home / "run",
            "admin socket": f"{home}/run/$cluster-$name.$pid.asok",
            "pid file": f"{home}/run/$name.pid",
            "log file": f"{home}/$name.log",
            **{f"{kind} data": home / kind for kind in ("mon", "mgr", "osd", "mds")},
            "mgr initial modules": "",
            # one disk, which is a file, on a machine that may be rather full
            "osd pool default size": 1,
            "osd pool default min size": 1,
            "mon allow pool size one": "true",
            "osd crush chooseleaf type": 0,
            "osd memory target": 900 << 20,
            "bluestore block size": 8 << 30,
            "mon data avail crit": 1,
            "mon data avail warn": 2,
        }
        conf.write_text("[global]\n" + "".join(f"{k} = {v}\n" for k, v in options.items()))
        made = home / "monmap"
        store.run(
            f"monmaptool --create --fsid {_CEPH_ID} --addv a {address} {made} &&"
            f" ceph-mon --conf {conf} --mkfs -i a --monmap {made}",
            check=True,
        )

    def mount(self, node: Node) -> None:
        """Mount it by ceph-fuse, which refuses a node that was lost for up to a minute."""
        log = self.base / node.name / f"{self.name}.log"
        wait_for(
            f"{self.name} on {node.name}",
            lambda: (
                not node.run(
                    f"mkdir -p {self.root} && ceph-fuse --conf {self.made_of}/conf"
                    f" -n client.{node.name} {self.root} > {log} 2>&1",
                    timeout=60,
                ).returncode
            ),
            120,
        )


_CEPH_ID, _CEPH_OSD = (f"00000000-0000-4000-8000-00000000000{n}" for n in (1, 2))


class Nfs(FileSystem):
    """NFS of version 3 in user space: nfs-ganesha, and fuse-nfs over libnfs; no locks."""

    packages = ("ganesha.nfsd", "rpcbind", "fuse-nfs")

    def serve(self, fabric: Fabric, store: Node) -> None:
        """Export a file system of its own, as ganesha takes no plain directory."""
        home = self.base / "store" / "ganesha"
        image, conf = home / "image", home / "conf"
        self.made_of.mkdir(parents=True, exist_ok=True)
        if not home.exists():
            home.mkdir()
            store.run(f"truncate -s 6G {image} && {Ext4.make} {image}", check=True)
            conf.write_text(
                "NFS_CORE_PARAM {"
                f" Bind_addr = {STORE_ADDRESS}; NFS_Port = 2049; MNT_Port = {self.port};"
                " Protocols = 3; Enable_UDP = false; Enable_NLM = false; Enable_RQUOTA = false; }\n"
                f"EXPORT {{ Export_Id = 1; Path = {self.made_of}; Pseudo = /; Access_Type = RW;"
                " Squash = No_Root_Squash; SecType = sys; Protocols = 3; Transports = TCP;"
                " FSAL { Name = VFS; } }\n"
            )
        store.run(
            f"mount -o loop {image} {self.made_of} && mkdir -p /run/ganesha /run/rpcbind &&"
            f" rpcbind -w && ganesha.nfsd -f {conf} -L {home}/log -p /run/ganesha/pid",
            check=True,
        )
        listening = f"bash -c '</dev/tcp/{STORE_ADDRESS}/2049'"
        wait_for("ganesha", lambda: not store.run(listening).returncode)

    port: ClassVar[int] = 20048

    def mount(self, node: Node) -> None:
        """Mount it by fuse-nfs: for all users, with the server's inode numbers."""
        where = f"nfs://{STORE_ADDRESS}{self.made_of}?version=3&nfsport=2049&mountport={self.port}"
        node.run(
            f"mkdir -p {self.root} && fuse-nfs -n '{where}' -m {self.root} -a -q"
            f" -L {self.base}/{node.name}/{self.name}.log",
            check=True,
            timeout=30,
        )
        mounted = f"mountpoint -q {self.root}"
        wait_for(f"{self.name} on {node.name}", lambda: not node.run(mounted).returncode)


class Rclone(FileSystem):
    """An object-like mount: files are uploaded when they are closed, directories are cached.

    What is removed while it is uploaded comes back, so that most outputs are refused there.
    """

    packages = ("rclone",)

    def serve(self, fabric: Fabric, store: Node) -> None:
        """Serve a directory by WebDAV."""
        self.made_of.mkdir(parents=True, exist_ok=True)
        self.daemon = store.start(
            f"exec rclone serve webdav {self.made_of} --addr {store.address}:8080"
            f" --config /dev/null > {self.base}/store/rclone.log 2>&1"
        )

    def mount(self, node: Node) -> None:
        """Mount it; what is written is kept on the node until it is closed."""
        cache = self.base / node.name / "rclone"
        node.run(
            f"mkdir -p {self.root} {cache} && rclone mount"
            f" ':webdav,url=\"http://{STORE_ADDRESS}:8080\",vendor=other:' {self.root}"
            f" --config /dev/null --vfs-cache-mode writes --vfs-write-back 0s --dir-cache-time 5s"
            f" --cache-dir {cache} --daemon",
            check=True,
            timeout=30,
        )


@dataclass
class Faults(FileSystem):
    """The lab's own over FUSE, which does what few others do, over a directory of the store.

    Attributes
    ----------
    faults
        What it does from the beginning; ``{node}`` is the last number of the node's address.
    """

    faults: tuple[str, ...] = ()
    running: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def serve(self, fabric: Fabric, store: Node) -> None:
        """Make the directory."""
        self.made_of.mkdir(parents=True, exist_ok=True)

    def mount(self, node: Node) -> None:
        """Mount it, on each node by a process of its own."""
        number = node.address.rpartition(".")[2]
        command = [sys.executable, str(HERE / "faultfs.py"), str(self.made_of), str(self.root)]
        for fault in self.faults:
            command += ["--fault", fault.replace("{node}", number)]
        log = (self.base / node.name / f"{self.name}.log").open("a")
        node.run(f"mkdir -p {self.root}", check=True)
        with log:
            self.running[node.name] = node.start(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        started = self.running[node.name].stdout
        if started is None or started.readline() != "ready\n":
            raise OSError(f"{self.name} cannot be mounted on {node.name}")


BARE = (
    *("no-odirect", "no-mmap", "no-flock", "no-rename2", "no-links"),
    *("no-copy-file-range", "no-fallocate", "no-dir-fsync", "silly"),
)
"""What the poorest mounts lack."""

ODD = ("coarse=1", "clock=-60", "inodes={node}", "blksize=0x400000", "local-locks")
"""Times of whole seconds by a clock that is late; inode numbers that each mount makes up."""


def all_of(base: Path) -> dict[str, FileSystem]:
    """Return every file system that the lab knows, by name."""
    shard = ("features.shard on", "features.shard-block-size 4MB")
    found = [
        Ext4("ext4", base),
        Xfs("xfs", base),
        Btrfs("btrfs", base),
        Tmpfs("tmpfs", base),
        Overlay("overlay", base),
        Gluster("gluster", base, 2),
        Gluster("gluster-sharded", base, 2, "", shard),
        Gluster("gluster-dispersed", base, 3, "disperse 3 redundancy 1"),
        Sshfs("sshfs", base),
        MooseFs("moosefs", base),
        Ceph("cephfs", base),
        Nfs("nfs3", base),
        Rclone("rclone", base),
        Faults("faults", base),
        Faults("faults-bare", base, BARE),
        Faults("faults-odd", base, ODD),
        Faults("faults-stale", base, ("stale=5", "local-locks")),
        Faults("faults-short", base, ("short=0.3", "short-write=0.3")),
    ]
    return {f.name: f for f in found}
