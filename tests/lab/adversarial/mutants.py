"""Files with one or a few wrong bytes.

Whatever they are, opening, reading, locating and checking them ends in time and in bounded
memory, in data or in an error of dsprep's or of the system's. Data that are not those of the
undamaged file are those that the format's own library reads; where there is a checksum, there
are none.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import select
import signal
import tarfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

import h5py
import lmdb
import numpy as np
import oracles
from netcdf_files import Classic, Var
from support import dataset, random_batch

import dsprep
from dsprep.core.schema import Field, Ragged, Schema
from dsprep.errors import DsprepError
from dsprep.verbs.check import check
from dsprep.verbs.provenance import provenance
from lab.adversarial import judging, making
from lab.adversarial.judging import Tally, Values

COUNT = 12
SECONDS = 20.0
"""What one mutant may take: a thousand times what it takes."""

GROWS = 400 << 20
"""Bytes that one mutant may take."""

KINDS = ("hdf5", "lmdb", "tfrecord", "zarr", "numpy", "netcdf", "webdataset")
OF_KIND = {
    "hdf5": ("hdf5", "hdf5-chunks", "hdf5-vlen", "hdf5-latest", "hdf5-filters"),
    "lmdb": ("lmdb", "lmdb-foreign"),
    "tfrecord": ("tfrecord", "tfrecord-gzip"),
    "zarr": ("zarr-2", "zarr-chunks", "zarr-shards", "zarr-zip"),
    "numpy": ("numpy-file", "numpy-directory", "numpy-stored", "numpy-deflated"),
    "netcdf": ("netcdf-1", "netcdf-2", "netcdf-5", "netcdf-fixed"),
    "webdataset": ("webdataset-ustar", "webdataset-gnu", "webdataset-pax"),
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
    known
        What is read from it.
    """

    kind: str
    path: Path
    files: dict[Path, bytes]
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
    """Make a dataset."""
    own = folder / kind
    if kind in making.KINDS:
        origin = folder / "set.tfrecord"
        if not origin.exists():
            dataset(folder, "tfrecord", making.RAGGED, COUNT)
        path = making.make(kind, origin, own)
    else:
        own.mkdir()
        path = FOREIGN[kind](own)
    files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    return Subject(kind, path, {p: p.read_bytes() for p in files if p.name != "lock.mdb"})


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
        how = {"shuffle": True, "fletcher32": True}
        file.create_dataset("gzip", data=values, chunks=(5, 40), compression="gzip", **how)
        file.create_dataset("lzf", data=values[:, 1:], chunks=(5, 39), compression="lzf")
        file.create_dataset("none", data=values[:, 2:], chunks=(5, 38), **how)
        file.create_dataset("two", data=values[:, 3:], chunks=(4, 8), maxshape=(None, 37))
    return path


def foreign_lmdb(folder: Path) -> Path:
    path = folder / "set.lmdb"
    with lmdb.open(str(path), map_size=1 << 20) as env:
        for i in range(COUNT):
            with env.begin(write=True) as txn:
                txn.put(b"%06d" % i, bytes([i]) * (50 if i % 3 else 4500))
    (path / "lock.mdb").unlink()
    return path


def numpy_arrays(folder: Path, form: str) -> Path:
    """Write fixed fields: one as a file, or all as a directory or a ZIP file."""
    batch = random_batch(making.FIXED, COUNT)
    if form == "file":
        np.save(folder / "image.npy", batch["image"])
        return folder / "image.npy"
    if form == "directory":
        (folder / "set").mkdir()
        for name, column in batch.items():
            np.save(folder / "set" / name, column)
        return folder / "set"
    (np.savez if form == "stored" else np.savez_compressed)(folder / "set.npz", **batch)
    return folder / "set.npz"


def classic(folder: Path, version: int, first: str = "records") -> Path:
    """Write classic netCDF; its first variables share their first dimension."""
    values = np.arange(COUNT * 6, dtype="i2").reshape(COUNT, 6)
    attrs = {"units": "K", "scale_factor": 0.5}
    variables = {
        "x": Var(values.astype("f4"), [first, "k"], attrs),
        "odd": Var(values[:, :3] + 1, [first, "three"]),
        "name": Var(np.full((COUNT, 3), b"a", "S1"), [first, "three"]),
        "side": Var(np.arange(6, dtype="f8"), ["k"]),
    }
    return Classic(variables, version, attrs={"title": "of it all"}).write(folder / "set.nc")


def archive(folder: Path, form: str) -> Path:
    """Write a tar archive whose names are short, in two parts, or long."""
    formats = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
    with tarfile.open(folder / "set.tar", "w", format=formats[form]) as made:
        for i in range(COUNT):
            key = f"{'d' * 90}/{i:020d}" if i % 4 == 1 else f"train/{i:04d}"
            for name, data in (("bin", bytes([i + 1]) * 24), ("cls", b"%d" % i)):
                info = tarfile.TarInfo(f"{key}.{name}")
                info.size, info.mtime = len(data), i + 0.5
                made.addfile(info, io.BytesIO(data))
    return folder / "set.tar"


def summed(content: bytes) -> bytes:
    """Return an archive with the checksums of its headers made right again.

    Numbers that say nothing of the bytes of a member are zero then: tarfile ends in silence where
    it cannot read one of them.
    """
    data = bytearray(content)
    for at in range(0, len(data) - 511, 512):
        if data[at + 257 : at + 262] == b"ustar":
            data[at + 100 : at + 124] = b"0000000\0" * 3
            data[at + 136 : at + 148] = b"00000000000\0"
            data[at + 329 : at + 345] = bytes(16)
            head = data[at : at + 148] + b" " * 8 + data[at + 156 : at + 512]
            data[at + 148 : at + 156] = b"%06o\0 " % sum(head)
    return bytes(data)


FOREIGN: dict[str, Callable[[Path], Path]] = {
    "hdf5-vlen": vlen,
    "hdf5-latest": lambda folder: vlen(folder, "latest"),
    "hdf5-filters": filtered,
    "lmdb-foreign": foreign_lmdb,
    **{kind: partial(numpy_arrays, form=kind.partition("-")[2]) for kind in OF_KIND["numpy"]},
    **{kind: partial(archive, form=kind.partition("-")[2]) for kind in OF_KIND["webdataset"]},
    "netcdf-1": lambda folder: classic(folder, 1),
    "netcdf-2": lambda folder: classic(folder, 2),
    "netcdf-5": lambda folder: classic(folder, 5),
    "netcdf-fixed": lambda folder: classic(folder, 5, "n"),
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
    if subject.kind.startswith("webdataset") and rng.random() < 0.7:
        content = summed(content)
    path.write_bytes(content)
    return content != subject.files[path]


# --- one mutant ------------------------------------------------------------------------------

Say = Callable[[str], None]
REFUSED = (DsprepError, OSError)


def library(path: Path) -> Values:
    with dsprep.open(path, through="library") as source:
        return judging.values(source[: 4 * COUNT])


def located(path: Path) -> Values:
    with dsprep.Sidecar.open(path) as opened:
        return judging.values(opened.read(slice(0, 4 * COUNT), verify="full"))


def native(subject: Subject) -> Values:
    """Return what the format's own library reads; its errors are its own."""
    with dsprep.open(subject.path, through="library") as source:
        schema = source.schema
    if subject.kind in ("hdf5-vlen", "hdf5-latest", "hdf5-filters"):
        with h5py.File(subject.path) as file:
            return judging.values({f.name: as_column(file[f.name], f) for f in schema})
    if subject.kind.startswith("numpy"):
        found = np.load(subject.path) if subject.path.is_file() else {}
        paths = {f.name: subject.path / f"{f.name}.npy" for f in schema}
        if isinstance(found, np.ndarray):
            return judging.values({f.name: found for f in schema})
        return judging.values({n: found[n] if found else np.load(p) for n, p in paths.items()})
    if subject.kind.startswith("netcdf"):
        return classic_values(subject.path, schema)
    if subject.kind.startswith("webdataset"):
        return members(subject.path, schema)
    if subject.kind.startswith("lmdb"):
        env = lmdb.open(str(subject.path), readonly=True, lock=False, subdir=subject.path.is_dir())
        with env, env.begin() as txn:
            columns = dict(zip(("key", "value"), zip(*txn.cursor(), strict=True), strict=False))
        texts = {k: [as_kind(v, schema[k]) for v in columns[k]] for k in schema.names}
        return judging.values({k: Ragged.pack(v, schema[k]) for k, v in texts.items()})
    return judging.values(oracles.READ[making.format_of(subject.kind)](subject.path, schema))


def classic_values(path: Path, schema: Schema) -> Values:
    """Return what netCDF's library reads, with the bytes as they are stored."""
    import netCDF4

    with netCDF4.Dataset(path) as file:
        file.set_auto_maskandscale(False)
        file.set_auto_chartostring(False)
        found = {f.name: np.asarray(file.variables[f.name][...]) for f in schema}
    stored = {n: a.astype(a.dtype.newbyteorder(">")) for n, a in found.items()}
    return judging.values(
        {f.name: stored[f.name].reshape(-1).view(f.dtype).reshape(-1, *f.inner) for f in schema}
    )


def members(path: Path, schema: Schema) -> Values:
    """Return the fields of samples as webdataset takes them from an archive."""
    from webdataset.tariterators import group_by_keys, tar_file_iterator

    with path.open("rb") as stream:
        every = group_by_keys({**m, "__url__": ""} for m in tar_file_iterator(stream))
        samples = list(every)
    return judging.values({f.name: Ragged.pack([s[f.name] for s in samples], f) for f in schema})


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
        if not subject.path.stat().st_size:  # TensorFlow reads no records of it either
            return "an empty file, of no records"
        return "!other data, under a checksum"
    say("oracle")
    try:
        expected = native(subject)
    except UnicodeDecodeError:
        return "other data, with a name that the format's library cannot spell"
    except Exception as error:
        return f"!other data, and the format's library refuses | {type(error).__name__}: {error}"
    if bits(found) == bits(expected):
        return "other data, as the format's library reads them"
    return f"!other data than the format's library reads | {found} {expected}"


def bits(found: Values) -> list[str]:
    return sorted(digest for _, digest in found.values())


# --- many ------------------------------------------------------------------------------------


def one(subject: Subject, turn: int, rng: np.random.Generator, say: Say) -> str:
    phase = ["damage"]

    def saying(text: str) -> None:
        phase[0] = text
        say(text)

    try:
        if not damage(subject, rng):
            return "no other byte"
        return judge_file(subject, saying, turn)
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
            subject = subjects.of(kind_of(number), number)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            say(f"mutant {number} {subject.kind}")
            rng = np.random.default_rng([seed, number])
            what = one(subject, int(rng.integers(4)), rng, say)
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
