"""What several test modules share: samples to try, and a writer driven by hand."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

import dsprep
from dsprep import formats
from dsprep.cli import app
from dsprep.core.groups import Grouping, plain
from dsprep.core.packing import Tables
from dsprep.core.schema import Arena, Batch, Field, FieldSpec, Ragged, Schema
from dsprep.errors import DsprepError
from dsprep.formats.base import Format, Source, State, WritableFormat, Writer
from dsprep.formats.options import OpenOptions, WriteOptions
from dsprep.layout import as_json, fit
from dsprep.storage.identity import BLOCK_NBYTES, BLOCKS
from dsprep.storage.trees import remove, sized_files
from dsprep.verbs.convert import plan_job
from dsprep.writing.create_sidecar import NewSidecar, ScanOptions, make_sidecar
from dsprep.writing.job import RunOptions
from dsprep.writing.run import run_job

MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
"""The program, also of an environment that is not activated; None if there is none."""

STRUCT = np.dtype(
    {"names": ["id", "value"], "formats": ["<u8", "<f4"], "offsets": [0, 8], "itemsize": 16}
)
NESTED = np.dtype([("p", "<i2"), ("v", "<f8", (2,)), ("q", [("a", ">u4"), ("s", "S3")])])

DTYPES = [
    *(np.dtype(c) for c in ("i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8")),
    *(np.dtype(c) for c in (">i2", ">u4", ">i8", "<f2", "<f4", "<f8", ">f4", ">f8")),
    *(np.dtype(c) for c in ("?", "<c8", "<c16", ">c8", "S7", "<U3")),
    np.dtype(ml_dtypes.bfloat16),
    STRUCT,
    NESTED,
]


def random_array(dtype: np.dtype, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Any bits that are a value of `dtype`: NaNs with payload, infinities and -0.0 included."""
    rng = np.random.default_rng(seed)
    if dtype.names is not None:
        out = np.zeros(shape, dtype)
        for k, name in enumerate(dtype.names):
            sub = dtype.fields[name][0]
            base, extra = sub.subdtype if sub.subdtype else (sub, ())
            out[name] = random_array(base, shape + tuple(extra), seed + k + 1)
        return out
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind == "U":
        count = int(np.prod(shape))
        letters = ["", "a", "zß", "日本語", "x\u00e9y"]
        return np.array([letters[i] for i in rng.integers(0, 5, count)], dtype).reshape(shape)
    return rng.integers(0, 256, (*shape, dtype.itemsize), "u1").view(dtype).reshape(shape)


def random_batch(schema: Schema, count: int, seed: int = 0, longest: int = 5) -> Batch:
    rng = np.random.default_rng(seed)
    batch: Batch = {}
    for k, f in enumerate(schema):
        if f.kind == "str":
            words = ["", "a", "naïve", "日本", "nul\0inside", "\U0001f600"]
            batch[f.name] = Ragged.pack([words[i] for i in rng.integers(0, 6, count)], f)
        elif f.ragged:
            lengths = rng.integers(0, longest + 1, count)
            values = random_array(f.dtype, (int(lengths.sum()), *f.inner), seed + k)
            batch[f.name] = Ragged.from_lengths(values, lengths, f.kind)
        else:
            batch[f.name] = random_array(f.dtype, (count, *f.inner), seed + k)
    return batch


def take(batch: Batch, start: int, stop: int) -> Batch:
    return {name: column[start:stop] for name, column in batch.items()}


def raw(value: object) -> bytes:
    """The bits of a value, without the padding of structured types."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    array = np.asarray(value)
    if array.dtype.names is not None:
        return b"".join(raw(np.ascontiguousarray(array[n])) for n in array.dtype.names)
    return np.ascontiguousarray(array).tobytes()


def assert_same_batch(found: Batch, expected: Batch, schema: Schema) -> None:
    assert list(found) == list(schema.names)
    for f in schema:
        a, b = found[f.name], expected[f.name]
        assert len(a) == len(b), f
        if f.ragged:
            assert isinstance(a, Ragged)
            assert a.kind == f.kind
            assert a.values.dtype == f.dtype, f
            assert a.values.shape[1:] == f.inner
            assert a.lengths.tolist() == b.lengths.tolist(), f
            assert raw(a.values) == raw(b.values), f
        else:
            assert a.dtype == f.dtype, f
            assert a.shape == b.shape, f
            assert raw(a) == raw(b), f


def written(
    path: Path, schema: Schema, batch: Batch | int, *, durable: bool = False, **options: Any
) -> Path:
    """Write samples, or so many at random, as `convert` does with options of `plan_job`."""
    memory = path.with_name(f"memory of {path.name}")
    memory.touch()
    samples = random_batch(schema, batch) if isinstance(batch, int) else batch
    source = MemorySource(schema, samples, memory)
    run_job(plan_job(source, path, **options), RunOptions(durable=durable))
    memory.unlink()
    return path


def create(
    format: WritableFormat,
    path: Path,
    schema: Schema,
    samples: int | Grouping,
    options: WriteOptions | None = None,
    state: State | None = None,
) -> Writer:
    """A writer of so many samples without groups, or in these groups."""
    grouping = plain(samples) if isinstance(samples, int) else samples
    plan = format.plan(schema, options or WriteOptions(), grouping, 0, path.name)
    return plan.create(path, state)


def write_batch(
    format: WritableFormat,
    path: Path,
    schema: Schema,
    batch: Batch,
    options: WriteOptions | None = None,
    cuts: tuple[int, ...] = (),
    samples: Grouping | None = None,
) -> None:
    """Drive a writer as `transfer` does; `cuts` are rounded to whole units."""
    options = options or WriteOptions()
    count = len(next(iter(batch.values())))
    format.check(schema, options)
    writer = create(format, path, schema, samples or count, options)
    edges = sorted({0, count, *(min(count, -(-c // writer.unit) * writer.unit) for c in cuts)})
    pieces = []
    for start, stop in itertools.pairwise(edges):
        pieces.append(writer.encode(take(batch, start, stop), start, Arena()))
    for piece in pieces:
        writer.reserve(piece)
    for piece in reversed(pieces):  # any order is allowed
        writer.write(piece)
    writer.sync()
    writer.finish()
    writer.close()
    writer.clean()


def describe(format: Format, schema: Schema, files: Sequence[Path], dataset: Path) -> NewSidecar:
    """The sidecar of files that a test has written by a format's writer."""
    files = [file.absolute() for file in files]
    made = make_sidecar(format, files, OpenOptions(), schema, (), ScanOptions(), {})
    assert made.dataset == dataset
    return made


def check_layout(format: Format, path: Path, schema: Schema, writer: Writer) -> bool:
    """Whether a writer knows where it put the samples; what it knows is what is found."""
    written = writer.layout()
    if written is None:
        return False
    with format.open(path, OpenOptions(), schema) as source:
        found = [fit.fit(layout) for layout in (written, source.extents())]
    told = [json.dumps(as_json.to_json(layout, schema, Tables())) for layout in found]
    assert told[0] == told[1]
    assert found[0].facts == found[1].facts
    return True


MIXED = Schema(
    (
        Field("image", np.dtype("<f4"), (8, 5)),
        Field("label", np.dtype("<i8")),
        Field("points", np.dtype("<i2"), (None, 3)),
        Field.opaque("name", "str"),
        Field("id", np.dtype(">u4"), (2,)),
    )
)
SUFFIX = {"hdf5": ".h5", "lmdb": ".lmdb", "tfrecord": ".tfrecord", "zarr": ".zarr"}


def dataset(
    directory: Path,
    format: str = "hdf5",
    schema: Schema = MIXED,
    samples: Batch | int = 90,
    *,
    name: str = "set",
    grouped: int = 0,
    sidecar: bool = True,
    **options: Any,
) -> tuple[Path, Batch]:
    """A dataset of one file, of these samples, or so many at random; `grouped` by so many."""
    batch = random_batch(schema, samples, seed=10) if isinstance(samples, int) else samples
    path = first = directory / f"{name}{SUFFIX[format]}"
    if grouped:
        first = directory / f"origin of {path.name}"
    write_batch(formats.load(format), first, schema, batch, WriteOptions(**options))
    if sidecar or grouped:
        describe(formats.load(format), schema, [first], first).save(durable=False)
    if grouped:
        dsprep.repack(first, path, buffer_size=grouped, stripe_size="4KiB", durable=False)
        remove(first)
        remove(sidecar_of(first))
        if not sidecar:
            remove(sidecar_of(path))
    return path, batch


def reading(*fields: str, **options: Any) -> OpenOptions:
    """How to open a dataset of these fields."""
    return OpenOptions(fields=tuple(map(FieldSpec.parse, fields)), **options)


def sidecar_of(path: Path) -> Path:
    """The sidecar that lies beside a dataset."""
    return path.with_name(f"{path.name}.dsprep.json")


def files_of(directory: Path) -> dict[str, bytes]:
    """The bytes of all files in a directory but sidecars, which name the time."""
    files = (p for p in sorted(directory.rglob("*")) if p.is_file() and ".dsprep." not in p.name)
    return {str(p.relative_to(directory)): p.read_bytes() for p in files}


def ranks(count: int) -> list[dict[str, int]]:
    """The arguments of a Reader that say its place among so many, for each of them."""
    return [{"rank": rank, "world_size": count} for rank in range(count)]


class MemorySource(Source):
    """Samples in memory, as a source."""

    def __init__(self, schema: Schema, batch: Batch, path: Path = Path("memory")) -> None:
        self.schema, self._batch, self.path = schema, batch, path

    def __len__(self) -> int:
        return len(next(iter(self._batch.values())))

    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        return take(self._batch, start, stop)

    def storage(self) -> dict:
        return {}


def flip(file: Path, at: int, bits: int = 1, *, keep_time: bool = False) -> None:
    """Invert some bits of one byte of a file, and perhaps give it its time stamps back."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ bits]))
    if keep_time:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def flip_sampled(path: Path) -> None:
    """Invert a bit of a sampled block in the middle of a file or directory; see `Identity`."""
    files = list(sized_files(path))
    at = (sum(size for _, size in files) - BLOCK_NBYTES) * 8 // (BLOCKS - 1)
    for file, size in files:
        if at < size:
            flip(file, max(0, at))
            return
        at -= size


def started(work: Callable[[], Any]) -> int:
    """Do something in a child of this process, which exits with 1 if it fails; its number."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def forked(work: Callable[[], Any]) -> int:
    """Do something in a child of this process; return its exit code: 1 if it raised an error."""
    return os.waitstatus_to_exitcode(os.waitpid(started(work), 0)[1])


def kill_at(step: int) -> Callable[[Any, str], None]:
    """Return what has this process killed at a step: before or after a call of ``owner.name``."""
    left = [step]

    def burn() -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            burn()
            result = inner(*args, **kwargs)
            burn()
            return result

        setattr(owner, name, outer)

    return around


def schemas() -> Iterator[tuple[str, Schema]]:
    """Schemas that cover every dtype, rank and kind, by a name for test ids."""
    for dtype in DTYPES:
        label = dtype.str if dtype.names is None else f"struct{dtype.itemsize}"
        label = "bfloat16" if "bfloat16" in str(dtype) else label
        yield f"scalar-{label}", Schema((Field("y", dtype),))
        yield f"fixed-{label}", Schema((Field("x", dtype, (3, 2)), Field("y", dtype)))
        yield f"ragged-{label}", Schema((Field("x", dtype, (None, 2)),))
    f4 = np.dtype("<f4")
    yield "five-d", Schema((Field("x", f4, (2, 1, 3, 2, 2)),))
    yield "empty-axis", Schema((Field("x", f4, (0, 3)), Field("y", np.dtype("u1"))))
    yield "bytes", Schema((Field.opaque("blob"),))
    yield "str", Schema((Field.opaque("name", "str"),))
    yield (
        "mixed",
        Schema(
            (
                Field("image", np.dtype("u1"), (4, 4, 3)),
                Field("label", np.dtype("<i8")),
                Field("points", f4, (None, 3)),
                Field("hits", STRUCT, (None,)),
                Field.opaque("jpeg"),
                Field.opaque("name", "str"),
                Field("group/inner", np.dtype("<f8"), (2,)),
            )
        ),
    )


def some_schemas() -> dict[str, Schema]:
    """Those of `schemas` that formats store differently: each kind of dtype, each rank."""
    dtypes = {
        "scalar": ("<f4", "<i8", "|S7"),
        "fixed": ("|u1", "<f4", ">i2", "struct16"),
        "ragged": ("<f4", "<i8", "|S7", "bfloat16"),
    }
    parts = {name: name.split("-", 1) for name, _ in schemas()}
    return {n: s for n, s in schemas() if parts[n][-1] in dtypes.get(parts[n][0], parts[n])}


def epochs(reader: Any, count: int | None = None) -> Iterator[Any]:
    """Batches of so many epochs of a reader, one loop after another; None: without end."""
    for _ in itertools.count() if count is None else range(count):
        yield from reader


def commands_of(group):
    """All commands of a group of the command line, loaded, by name; none of a plain command."""
    names = group.list_commands(None) if hasattr(group, "list_commands") else ()
    return {name: group.get_command(None, name) for name in names}


@dataclass(frozen=True)
class Answer:
    """What a command prints, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        return self.out + self.err

    def json(self) -> Any:
        return json.loads(self.out)


def cli(*words: object, code: int | None = 0) -> Answer:
    """Run a command in this process; it has to end with this exit code, None: with any."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception  # a traceback that the user would see
    assert code in (None, done.exit_code), done.output
    return Answer(done.exit_code, done.stdout, done.stderr)


def cli_error(*words: object, code: int | None = 1) -> str:
    """Run a command that fails with one line of error; return that line, notes left out."""
    done = cli(*words, code=code)
    assert done.code in (1, 2)
    (line,) = (w for w in done.err.splitlines() if not w.startswith("dsprep: note: "))
    assert line.startswith("dsprep: error: ")
    return line


def fails(call: Callable[[], Any], kind: type[DsprepError], *parts: object) -> DsprepError:
    """Call a function that raises an error of one line, of this kind; return the error.

    The text names each of the parts: the file, the offset, the field, the option that helps.
    """
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert not [part for part in map(str, parts) if part not in text], text
    return caught.value
