"""Files and sidecars with one or a few wrong bytes.

Whatever they are, opening, reading, locating and checking them ends in time and in bounded
memory, in data or in an error of dsprep's or of the system's. Data that are not those of the
undamaged file are those that the format's own library reads; where there is a checksum, there
are none.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import h5py
import lmdb
import numpy as np
import oracles
from test_located import mutations

import dsprep
from adversarial import judging, making
from adversarial.judging import Tally, Values
from dsprep.core.schema import Field, Ragged, Schema, concatenate
from dsprep.errors import DsprepError
from dsprep.verbs.check import check
from dsprep.verbs.provenance import provenance

COUNT = 12
SECONDS = 20.0
"""What one mutant may take: a thousand times what it takes."""

GROWS = 400 << 20
"""Bytes that one mutant may take."""

FEW = Schema((making.FIXED["label"], making.FIXED["id"], making.MIXED["points"]))
KINDS = ("hdf5", "lmdb", "tfrecord", "zarr", "sidecar")
OF_KIND = {
    "hdf5": ("hdf5", "hdf5-chunks", "hdf5-vlen", "hdf5-latest", "hdf5-filters"),
    "lmdb": ("lmdb", "lmdb-foreign"),
    "tfrecord": ("tfrecord", "tfrecord-gzip"),
    "zarr": ("zarr-2", "zarr-chunks", "zarr-shards", "zarr-zip"),
    "sidecar": tuple(k for k in making.KINDS if k != "tfrecord-gzip"),
}


@dataclass
class Subject:
    """A dataset that is damaged again and again, always in the same folder.

    Attributes
    ----------
    path
        The dataset, in a folder of its own.
    files
        All its files, without those beside it, with their bytes.
    beside
        The same of its sidecar, by name.
    known
        What is read from it.
    """

    kind: str
    path: Path
    files: dict[Path, bytes]
    beside: dict[str, bytes] = field(default_factory=dict)
    known: Values = field(default_factory=dict)

    def restore(self) -> None:
        """Put everything as it was, and nothing else."""
        names = {p.name for p in self.path.parent.iterdir()} - {self.path.name}
        for name in names:
            (self.path.parent / name).unlink()
        if self.path.is_dir():
            for path in self.path.rglob("*"):
                if path.is_file() and path not in self.files:
                    path.unlink()
        for path, content in self.files.items():
            path.write_bytes(content)


def subject(kind: str, folder: Path) -> Subject:
    """Make a dataset; those of which a sidecar is damaged keep theirs."""
    own = folder / kind
    if kind in making.KINDS:
        origin = folder / "origin"
        schema = making.FIXED if kind == "hdf5-groups" else FEW
        if not origin.exists():
            origin.mkdir()
        path = making.origin(origin, schema, making.samples(schema, COUNT))
        path = making.make(kind, path, own)
    else:
        own.mkdir()
        path = FOREIGN[kind](own)
    files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    found = Subject(kind, path, {p: p.read_bytes() for p in files if p.name != "lock.mdb"})
    found.beside = {p.name: p.read_bytes() for p in own.glob(f"{path.name}.dsprep.*")}
    return found


class Subjects:
    """Datasets to damage, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Subject] = {}

    def of(self, kind: str, number: int) -> Subject:
        """Return that of a trial."""
        names = OF_KIND[kind]
        name = names[number // len(KINDS) % len(names)]
        if f"{kind} {name}" not in self._made:
            own = self._folder / kind
            own.mkdir(exist_ok=True)
            found = subject(name, own)
            if kind == "sidecar":
                found.known = judging.read(found.path)
            else:
                found.restore()
                found.known = library(found.path)
            self._made[f"{kind} {name}"] = found
        return self._made[f"{kind} {name}"]


def vlen(folder: Path, libver: str = "earliest") -> Path:
    """Write what only HDF5's own library can read: variable lengths, and attributes."""
    path = folder / "set.h5"
    with h5py.File(path, "w", libver=libver) as file:
        ragged = file.create_dataset("points", (COUNT,), h5py.vlen_dtype("<i2"))
        names = file.create_dataset("name", (COUNT,), h5py.string_dtype())
        for i in range(COUNT):
            ragged[i] = np.arange(i % 4, dtype="<i2") + i
            names[i] = f"sample {i}"
        file["label"] = np.arange(COUNT)
        file["label"].attrs["unit"] = "K"
        file["label"].attrs.create("words", ["a", "bc"], dtype=h5py.string_dtype())
        file.attrs["title"] = np.bytes_("of it all")
        file.attrs.create("list", [np.arange(3), np.arange(2)], dtype=h5py.vlen_dtype("<i4"))
    return path


def filtered(folder: Path) -> Path:
    path = folder / "set.h5"
    values = np.arange(COUNT * 40, dtype="<i4").reshape(COUNT, 40)
    with h5py.File(path, "w") as file:
        for name, codec in (("gzip", "gzip"), ("lzf", "lzf"), ("none", None)):
            options = {"shuffle": True, "fletcher32": True} if name != "lzf" else {}
            file.create_dataset(name, data=values, chunks=(5, 40), compression=codec, **options)
        file.create_dataset("two", data=values, chunks=(4, 8), maxshape=(None, 40))
    return path


def foreign_lmdb(folder: Path) -> Path:
    path = folder / "set.lmdb"
    with lmdb.open(str(path), map_size=1 << 20) as env:
        for i in range(COUNT):
            with env.begin(write=True) as txn:
                txn.put(b"%06d" % i, bytes([i]) * (50 if i % 3 else 4500))
    (path / "lock.mdb").unlink()
    return path


FOREIGN: dict[str, Callable[[Path], Path]] = {
    "hdf5-vlen": vlen,
    "hdf5-latest": lambda folder: vlen(folder, "latest"),
    "hdf5-filters": filtered,
    "lmdb-foreign": foreign_lmdb,
}


# --- damage ----------------------------------------------------------------------------------


def damaged(content: bytes, rng: np.random.Generator) -> bytes:
    """Return it with one to four other bytes, or cut."""
    data = bytearray(content)
    if not data or rng.random() < 0.02:
        return bytes(data[: int(rng.integers(len(data) + 1))])
    busy = [i for i, b in enumerate(data) if b] if len(data) < 1 << 14 else []
    for _ in range(1 if rng.random() < 0.8 else int(rng.integers(2, 5))):
        at = int(rng.choice(busy)) if busy and rng.random() < 0.7 else int(rng.integers(len(data)))
        how = int(rng.integers(5))
        data[at] = (
            data[at] ^ (1 << int(rng.integers(8))),
            int(rng.integers(256)),
            (data[at] + int(rng.choice([-1, 1]))) % 256,
            0,
            255,
        )[how]
    return bytes(data)


def damage(subject: Subject, rng: np.random.Generator) -> bool:
    """Write the files with one of them damaged; return whether it differs."""
    subject.restore()
    names = sorted(subject.files)
    path = names[int(rng.integers(len(names)))]
    content = damaged(subject.files[path], rng)
    path.write_bytes(content)
    return content != subject.files[path]


def damage_sidecar(subject: Subject, rng: np.random.Generator) -> bool:
    """Write its sidecar damaged, as text or as JSON, or its companion."""
    names = sorted(subject.beside)
    name = names[int(rng.integers(len(names)))]
    for each in names:
        (subject.path.parent / each).write_bytes(subject.beside[each])
    good = subject.beside[name]
    content = good
    if name.endswith(".json") and rng.random() < 0.6:
        parsed = json.loads(good)
        for _ in range(1 if rng.random() < 0.8 else 2):
            mutations(parsed, rng)
        content = json.dumps(parsed).encode()
        if json.loads(content) == json.loads(good):
            return False
    else:
        content = damaged(good, rng)
    (subject.path.parent / name).write_bytes(content)
    return content != good


# --- one mutant ------------------------------------------------------------------------------

Say = Callable[[str], None]
REFUSED = (DsprepError, OSError)


def library(path: Path) -> Values:
    with dsprep.open(path, through="library") as source:
        return judging.values(source[: 4 * COUNT])


def located(path: Path, verify: str | None = "full") -> Values:
    with dsprep.Sidecar.open(path) as opened:
        return judging.values(opened.read(slice(0, 4 * COUNT), verify=verify))


def native(subject: Subject) -> Values:
    """Return what the format's own library reads; its errors are its own."""
    with dsprep.open(subject.path, through="library") as source:
        schema = source.schema
    if subject.kind in ("hdf5-vlen", "hdf5-latest", "hdf5-filters"):
        with h5py.File(subject.path) as file:
            return judging.values({f.name: as_column(file[f.name], f) for f in schema})
    if subject.kind.startswith("lmdb"):
        env = lmdb.open(str(subject.path), readonly=True, lock=False, subdir=subject.path.is_dir())
        with env, env.begin() as txn:
            columns = dict(zip(("key", "value"), zip(*txn.cursor(), strict=True), strict=False))
        texts = {k: [as_kind(v, schema[k]) for v in columns[k]] for k in schema.names}
        return judging.values({k: Ragged.pack(v, schema[k]) for k, v in texts.items()})
    return judging.values(oracles.READ[making.format_of(subject.kind)](subject.path, schema))


def as_kind(value: bytes, f: Field) -> bytes | str:
    return value.decode("utf-8", "surrogateescape") if f.kind == "str" else value


def as_column(node: h5py.Dataset, f: Field) -> np.ndarray | Ragged:
    if f.kind == "str":
        return Ragged.pack([as_kind(v, f) for v in node[...]], f)
    if f.ragged:
        # h5py labels them as of the machine's byte order, whichever they have.
        items = [v.astype(f.dtype.newbyteorder("=")).view(f.dtype) for v in node[...]]
        return Ragged.pack(items, f)
    return node[...]


def judge_file(subject: Subject, say: Say, turn: int) -> str:
    """Open and read a damaged dataset, every second one also located, every fourth checked."""
    outcomes: dict[str, Values | None] = {}
    phases: list[tuple[str, Callable[[], Values | None]]] = [
        ("open", lambda: library(subject.path)),
        ("provenance", lambda: provenance([subject.path]) and None),
        ("Sidecar.read", lambda: located(subject.path)),
    ]
    for phase, work in phases[: 3 if turn % 2 == 0 else 1]:
        say(phase)
        try:
            outcomes[phase] = work()
        except REFUSED:
            outcomes[phase] = None
            if phase == "provenance":
                break
    say("check")
    if "Sidecar.read" in outcomes and turn % 4 == 0:
        check([subject.path], full=True)
    opened, through = outcomes["open"], outcomes.get("Sidecar.read")
    if opened is None and through is None:
        return "refused"
    for found in (opened, through):
        if found is not None and found != subject.known:
            return judge_other(subject, found, say)
    return "same data" if opened else "same data through the sidecar"


def judge_other(subject: Subject, found: Values, say: Say) -> str:
    """Compare other data than the undamaged file has with what the library reads."""
    if subject.kind.startswith("tfrecord"):
        return "!other data, under a checksum"
    say("oracle")
    try:
        expected = native(subject)
    except Exception as error:
        return f"!other data, and the format's library refuses | {type(error).__name__}: {error}"
    if bits(found) == bits(expected):
        return "other data, as the format's library reads them"
    return f"!other data than the format's library reads | {found} {expected}"


def bits(found: Values) -> list[str]:
    return sorted(digest for _, digest in found.values())


def judge_sidecar(subject: Subject, say: Say, turn: int) -> str:
    """Use a dataset whose sidecar is damaged; every fourth time write it again."""
    found: dict[str, Values | None] = {}

    def delivered() -> Values:
        with dsprep.Reader(subject.path, 5, shuffle="none", io_threads=1) as reader:
            return judging.values(concatenate(reader.schema, list(islice(reader, 20))))

    for phase, work in (
        ("Sidecar.read", lambda: located(subject.path, None)),
        ("Sidecar.read full", lambda: located(subject.path)),
        ("Reader", delivered),
        ("open", lambda: judging.read(subject.path)),
    ):
        say(phase)
        try:
            found[phase] = work()
        except REFUSED:
            found[phase] = None
    say("check")
    try:
        problems = check([subject.path], full=True)
    except REFUSED:
        problems = [None]
    say("provenance")
    with suppress(*REFUSED):
        if turn % 4 == 0:
            provenance([subject.path])
    if found["Sidecar.read"] is None:
        return "refused"
    if bits(found["Sidecar.read"]) == bits(subject.known):
        return "same data" if found["Sidecar.read"] == subject.known else "other names or types"
    types = [sorted(kind for kind, _ in v.values()) for v in (found["Sidecar.read"], subject.known)]
    if types[0] != types[1] and subject.kind.startswith(("lmdb", "tfrecord")):
        return "other types, which only the sidecar has"
    return "other data, check tells" if problems else "!other data, and --check full says valid"


# --- many ------------------------------------------------------------------------------------


def one(subject: Subject, kind: str, turn: int, rng: np.random.Generator, say: Say) -> str:
    phase = ["damage"]

    def saying(text: str) -> None:
        phase[0] = text
        say(text)

    try:
        if kind == "sidecar":
            subject.restore() if not subject.path.exists() else None
            differs = damage_sidecar(subject, rng)
        else:
            differs = damage(subject, rng)
        if not differs:
            return "no other byte"
        return (judge_sidecar if kind == "sidecar" else judge_file)(subject, saying, turn)
    except MemoryError:
        return f"!{phase[0]}: memory | {traceback.format_exc()[-600:]}"
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)
        own = [f for f in place if "/dsprep/" in f.filename and "/tests/" not in f.filename]
        last = (own or place)[-1]
        where = f"{Path(last.filename).name}:{last.name}"
        text = traceback.format_exc()[-600:]
        return f"!{phase[0]}: {type(error).__name__} in {where} | {text}"


def child(
    numbers: list[int], kind_of: Callable[[int], str], subjects: Subjects, seed: int, pipe: int
) -> None:
    """Do mutant after mutant, and say which, and in which phase."""
    os.fsync = os.fdatasync = lambda fd: None
    warnings.simplefilter("ignore")
    nothing = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(nothing, fd)
    say = lambda text: os.write(pipe, f"{text}\n".encode())  # noqa: E731
    with judging.limited(4 << 30):
        for number in numbers:
            kind = kind_of(number)
            subject = subjects.of(kind, number)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            beside = "sidecar of " if kind == "sidecar" else ""
            say(f"mutant {number} {beside}{subject.kind}")
            rng = np.random.default_rng([seed, number])
            what = one(subject, kind, int(rng.integers(4)), rng, say)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
            if grown > GROWS and not what.startswith("!"):
                what = f"!memory | {grown >> 20} MiB"
            say("done " + json.dumps(what))


def trials(numbers: Iterator[int], tally: Tally, folder: Path, options: argparse.Namespace) -> None:
    chosen = tuple(options.kind or KINDS)
    subjects = Subjects(folder)

    def kind_of(number: int) -> str:
        return chosen[number % len(chosen)]

    while some := list(islice(numbers, 250)):
        for number in some:
            subjects.of(kind_of(number), number)
        while some:
            some = some[survived(some, kind_of, subjects, options.seed, tally) :]


def survived(
    numbers: list[int], kind_of: Callable[[int], str], subjects: Subjects, seed: int, tally: Tally
) -> int:
    """Have a child do mutants; return how many it did, with the one that it did not survive."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(ours)
            child(numbers, kind_of, subjects, seed, theirs)
        finally:
            os._exit(0)
    os.close(theirs)
    done, left, begun = 0, b"", time.monotonic()
    number, name, phase, ended = -1, "", "", False
    try:
        while True:
            wait = max(0.0, begun + SECONDS - time.monotonic())
            if not select.select([ours], [], [], wait)[0]:
                os.kill(pid, signal.SIGKILL)
                break
            data = os.read(ours, 1 << 16)
            if not data:
                ended = True
                break
            *lines, left = (left + data).split(b"\n")
            for line in map(bytes.decode, lines):
                if line.startswith("mutant "):
                    _, text, name = line.split(maxsplit=2)
                    number, begun = int(text), time.monotonic()
                elif line.startswith("done "):
                    tally.judge(number, name, json.loads(line[5:]))
                    done += 1
                    number = -1
                else:
                    phase = line
    finally:
        os.close(ours)
        _, status = os.waitpid(pid, 0)
    if number < 0:
        return done if done else len(numbers)
    how = f"killed by signal {os.WTERMSIG(status)}" if ended else "hang"
    if phase == "oracle":
        tally.judge(number, name, f"the format's library: {how}")
    else:
        tally.judge(number, name, f"!{phase}: {how}")
    return done + 1
