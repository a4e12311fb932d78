"""``dsprep bench convert``, ``repack`` and ``provenance``: whole commands against simpler ones.

Converting and repacking are compared with a plain copy of the same files, writing a sidecar with
reading all and with walking the format's own index. Each runs in a process of its own, in turn, and
a ratio is taken between two runs that followed each other. What is written is removed again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from dsprep import formats
from dsprep.bench import caches
from dsprep.bench.answer import answer
from dsprep.bench.copying.child import LIBRARIES, WALKS
from dsprep.bench.copying.running import Cold, Taken, run_child, run_cp
from dsprep.bench.evidence import weakest
from dsprep.bench.machine import describe
from dsprep.bench.model import MEASURES, Kind, Measure, Report, Row
from dsprep.bench.scratch.folder import check_free, working
from dsprep.bench.scratch.planning import first_samples
from dsprep.bench.summary import spread
from dsprep.bench.watching import Server
from dsprep.core.storage import remove, tree_nbytes
from dsprep.errors import FormatError
from dsprep.formats.base import OpenOptions
from dsprep.sidecar import spec
from dsprep.source.dataset import find_files, open_dataset
from dsprep.write.sidecars import dataset_of

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called with (runs done, of how many, what runs now)."""

ROOM = 5 / 4
"""Free bytes that there have to be, as a share of the larger of the data and their values."""

CP, SCAN, WALK, PROVENANCE, LOCATE = (
    "cp",
    "full scan",
    "index walk",
    "dsprep provenance",
    "locate",
)

SCANS = {
    "hdf5": "every dataset read by h5py",
    "lmdb": "every value copied by a py-lmdb cursor",
    "tfrecord": "every record read, its CRC not computed",
    "zarr": "every array read by zarr",
}

WALK_WORDS = {
    "lmdb": "a py-lmdb cursor over all keys",
    "tfrecord": "the frame of every record, one after the other",
}


_MODULES = {
    "convert": "dsprep.verbs.convert",
    "repack": "dsprep.verbs.repack",
    "provenance": "dsprep.write.sidecars",
}
"""What the commands import before they begin."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to compare.

    Attributes
    ----------
    to
        The formats to write.
    repeat
        Runs of each.
    cold
        Whether the data are dropped from the page cache before each run, or read into it.
    sync
        Whether all that is written is on the disk when the time is taken.
    warm_server, evict_server
        What is done about the server's cache; see `dsprep.bench.watching.Server`.
    buffer_size, shuffle
        Of ``repack``, as its options have them.
    """

    to: tuple[str, ...] = tuple(formats.FORMATS)
    repeat: int = 3
    cold: bool = False
    sync: bool = False
    warm_server: bool = False
    evict_server: str | None = None
    buffer_size: str = "auto"
    shuffle: str = "none"

    @property
    def server(self) -> Server:
        """What is done about the server's cache."""
        return Server(self.warm_server, self.evict_server)


@dataclass(frozen=True)
class Subject:
    """The dataset: as it was named, how it is read, its files, and facts for the report."""

    data: tuple[str, ...]
    reading: OpenOptions
    files: tuple[Path, ...]
    dataset: Path
    format: str
    payload: int
    facts: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the files."""
        return int(self.facts["nbytes"])

    def cold(self, settings: Settings) -> Cold:
        """Return the state of the caches to begin with."""
        files = [f for path in self.files for f in caches.files_of(path)]
        return Cold(files, settings.cold, settings.server)


@dataclass
class _Way:
    """One row: what runs for it, and what that took."""

    name: str
    words: str
    run: Callable[[], Taken]
    all_read: bool = True
    runs: list[Taken] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether it cannot be run, so that trying again is of no use."""
        return any(not t.measures for t in self.runs)


def look(data: Sequence[str], reading: OpenOptions) -> Subject:
    """Return what is to be known of a dataset.

    Raises
    ------
    FormatError
        If it has no samples.
    DsprepError, OSError
        If it cannot be opened.
    """
    found = find_files(data)[0]
    files = tuple(path.absolute() for path, _ in found)
    with open_dataset(list(data), reading) as source:
        if not len(source):
            raise FormatError("the dataset has no samples", where=files[0])
        samples, payload = first_samples(source, None)
        facts = {
            "name": Path(data[0]).name,
            "format": found[0][1].name,
            "samples": samples,
            "of": samples,
            "sample_nbytes": round(payload / samples),
            "payload_nbytes": payload,
            "nbytes": sum(map(tree_nbytes, files)),
            "files": len(files),
            "fields": [str(f) for f in source.schema],
        }
    name = found[0][1].name
    return Subject(tuple(data), reading, files, dataset_of(files), name, payload, facts)


def bench_convert(
    data: Sequence[str],
    settings: Settings | None = None,
    *,
    reading: OpenOptions | None = None,
    folder: Path | None = None,
    command: str = "",
    progress: Progress = lambda done, total, words: None,
) -> Report:
    """Compare ``dsprep convert`` to each format with ``cp`` of the same files.

    Parameters
    ----------
    data, reading
        The dataset, and how to read it.
    settings
        How to compare.
    folder
        Where to write; a temporary folder beside the dataset if None.
    command
        The command line, for the report.
    progress
        Called before each run.

    Raises
    ------
    DsprepError, OSError
        If the dataset cannot be read, or there is no space for a copy. What goes wrong with one
        format is told in its row.
    """
    return _bench_writing(
        "convert", lambda to: [], data, settings, reading, folder, command, progress
    )


def bench_repack(
    data: Sequence[str],
    settings: Settings | None = None,
    *,
    reading: OpenOptions | None = None,
    folder: Path | None = None,
    command: str = "",
    progress: Progress = lambda done, total, words: None,
) -> Report:
    """Compare ``dsprep repack`` to each format with ``cp``; see `bench_convert`."""
    settings = settings or Settings()
    more = ["--no-measure", "--buffer-size", settings.buffer_size, "--shuffle", settings.shuffle]
    return _bench_writing(
        "repack", lambda to: more, data, settings, reading, folder, command, progress
    )


def _bench_writing(
    kind: Kind,
    options: Callable[[str], list[str]],
    data: Sequence[str],
    settings: Settings | None,
    reading: OpenOptions | None,
    folder: Path | None,
    command: str,
    progress: Progress,
) -> Report:
    settings, reading = settings or Settings(), reading or OpenOptions()
    for to in settings.to:
        formats.load(to)
    settings.server.check(settings.cold)
    settings.server.drop()  # a command that fails is found before anything is read
    subject = look(data, reading)
    cold = subject.cold(settings)
    with working(data, subject.dataset, folder) as place:
        fix = "name another folder with --scratch"
        check_free(place, int(ROOM * max(subject.nbytes, subject.payload)), fix)

        def copy() -> Taken:
            return run_cp(subject.files, place, settings.sync)

        def write(to: str) -> Taken:
            return _write(kind, to, options(to), subject, settings.sync, place)

        ways = [_Way(CP, "the same files, copied", copy)]
        for to in dict.fromkeys(settings.to):
            words = f"dsprep {kind} to {to}"
            ways.append(_Way(f"{kind} {to}", words, lambda to=to: write(to)))  # type: ignore[misc]
        _warm_up(place, settings.to, subject.format)
        _run_in_turn(ways, settings.repeat, cold, progress)
        machine = describe(place)
    rows = _rows(ways, subject, settings.cold)
    shown = asdict(settings)
    if kind == "convert":
        shown = {k: v for k, v in shown.items() if k not in ("buffer_size", "shuffle")}
    return _report(kind, command, machine, subject, shown, rows)


def _write(
    kind: str, to: str, options: Sequence[str], subject: Subject, sync: bool, place: Path
) -> Taken:
    """Run a command that writes one format, and remove what it wrote."""
    made = Path(tempfile.mkdtemp(prefix="out-", dir=place))
    target = made / f"out{formats.load(to).suffixes[0]}"
    arguments = [kind, "--to", to, "--sync" if sync else "--no-sync", *options]
    arguments += [*reading_arguments(subject.reading), "--", *subject.data, str(target)]
    task = {
        "do": "command",
        "arguments": arguments,
        "libraries": [_MODULES[kind], *_libraries(to, subject.format)],
    }
    try:
        taken = run_child(task, place, made if sync else None)
        if taken.measures:
            taken.measures["size_bytes"] = float(tree_nbytes(target))
        return taken
    finally:
        remove(made)


def bench_provenance(
    data: Sequence[str],
    settings: Settings | None = None,
    *,
    reading: OpenOptions | None = None,
    folder: Path | None = None,
    command: str = "",
    progress: Progress = lambda done, total, words: None,
) -> Report:
    """Compare ``dsprep provenance`` with a full scan and a walk; see `bench_convert`.

    And tell how fast places are computed from the sidecar that it wrote.
    """
    settings, reading = settings or Settings(), reading or OpenOptions()
    settings.server.check(settings.cold)
    settings.server.drop()  # a command that fails is found before anything is read
    subject = look(data, reading)
    libraries = _libraries(subject.format)
    told = {
        "format": subject.format,
        "files": [str(f) for f in subject.files],
        "database": reading.database,
        "libraries": libraries,
    }
    with working(data, subject.dataset, folder) as place:
        out = place / f"out{spec.SUFFIX}"

        def describe_data() -> Taken:
            arguments = ["provenance", "--out", str(out), *reading_arguments(reading)]
            arguments += ["--", *data]
            modules = [_MODULES["provenance"], *libraries]
            task = {"do": "command", "arguments": arguments, "libraries": modules}
            taken = run_child(task, place)
            if taken.measures:
                companion = out.with_name(spec.companion_name(out))
                both = [p for p in (out, companion) if p.exists()]
                taken.measures["size_bytes"] = float(sum(p.stat().st_size for p in both))
            return taken

        def locate() -> Taken:
            if not out.exists():
                return Taken({}, problem="there is no sidecar to compute places from")
            task = {"do": "locate", "sidecar": str(out), "data": str(subject.dataset)}
            taken = run_child({**task, "libraries": ["dsprep.sidecar.sidecar"]}, place)
            rate = taken.measures.get("locate_per_second")
            measures = {} if rate is None else {"locate_per_second": rate}
            return replace(taken, measures=measures, startup=None)

        ways = [_Way(SCAN, SCANS[subject.format], lambda: run_child({**told, "do": "scan"}, place))]
        if subject.format in WALKS:
            words = WALK_WORDS[subject.format]
            walk = {**told, "do": "walk"}
            ways.append(_Way(WALK, words, lambda: run_child(walk, place), all_read=False))
        ways += [
            _Way(PROVENANCE, "writes the sidecar", describe_data, all_read=False),
            _Way(LOCATE, "places of random samples, from the sidecar", locate, all_read=False),
        ]
        _warm_up(place, (), subject.format)
        _run_in_turn(ways, settings.repeat, subject.cold(settings), progress)
        machine = describe(subject.dataset)
    rows = _rows(ways, subject, settings.cold)
    names = ("repeat", "cold", "warm_server", "evict_server")
    shown = {name: getattr(settings, name) for name in names}
    return _report("provenance", command, machine, subject, shown, rows)


def reading_arguments(options: OpenOptions) -> list[str]:
    """Return the command line's options for how a dataset is read."""
    told: list[str] = []
    for asked in options.fields:
        told += ["--field", str(asked)]
    for flag, value, default in (
        ("--sample-axis", options.sample_axis, "auto"),
        ("--order", options.order, "key"),
        ("--values", options.values, "opaque"),
        ("--db", options.database, None),
        ("--keys-as", options.keys_as, None),
    ):
        if value != default:
            told += [flag, str(value)]
    for key in options.skip_keys:
        told += ["--skip-key", key.decode("utf-8", "surrogateescape")]
    told += ["--raw-records"] * (options.records == "opaque")
    told += ["--follow-external"] * options.follow_external
    return told + ["--no-crc"] * (not options.check_crc)


def _libraries(*names: str) -> list[str]:
    """Return the packages that reading and writing these formats import."""
    return list(dict.fromkeys(LIBRARIES[n] for n in names if n in LIBRARIES))


def _warm_up(place: Path, to: Sequence[str], format: str) -> None:
    """Let the interpreter and the libraries come into the page cache, whose loading is no I/O."""
    run_child({"do": "nothing", "libraries": _libraries(format, *to)}, place)


def _run_in_turn(ways: Sequence[_Way], repeat: int, cold: Cold, progress: Progress) -> None:
    """Run all ways `repeat` times, beginning with another one each time; `LOCATE` stays last."""
    total = repeat * len(ways)
    for number in range(repeat):
        turning = [w for w in ways if w.name != LOCATE]
        turn = number % len(turning)
        order = [*turning[turn:], *turning[:turn], *(w for w in ways if w.name == LOCATE)]
        for i, way in enumerate(order):
            progress(number * len(ways) + i, total, way.name)
            if way.failed:
                continue
            seen, lacking = cold.settle(), cold.lacking()
            taken = way.run()
            if lacking:
                taken.more["lacking"] = lacking
            way.runs.append(cold.judged(taken, seen, way.all_read))
    progress(total, total, "done")


# --- from runs to rows -----------------------------------------------------------------------


def _rows(ways: Sequence[_Way], subject: Subject, cold: bool) -> tuple[Row, ...]:
    base = ways[0]
    usable = not any(t.problem for t in base.runs)
    return tuple(_row(w, base if usable else None, subject, cold) for w in ways)


def _row(way: _Way, base: _Way | None, subject: Subject, cold: bool) -> Row:
    problems = tuple(dict.fromkeys(t.problem for t in way.runs if t.problem))
    if problems:
        return Row(way.name, way.words, problems=problems)
    taken = [t.measures for t in way.runs]
    found: dict[str, Measure] = {}
    for name in MEASURES:
        if all(name in t for t in taken) and (cold or name != "device_bytes"):
            found[name] = spread([t[name] for t in taken])
    if "seconds" in found:
        if way.all_read:
            found["gb_per_second"] = spread([subject.payload / t["seconds"] / 1e9 for t in taken])
        if base is not None:
            pairs = zip(base.runs, taken, strict=True)
            found["ratio"] = spread([a.measures["seconds"] / b["seconds"] for a, b in pairs])
    told = _notes(way, base, subject)
    ordered = {name: found[name] for name in MEASURES if name in found}
    evidence = weakest([t.evidence for t in way.runs if t.evidence is not None])
    words = "" if evidence is None else evidence.words
    return Row(way.name, way.words, ordered, notes=told, runs=len(way.runs), evidence=words)


def _notes(way: _Way, base: _Way | None, subject: Subject) -> tuple[str, ...]:
    notes = []
    if all(t.startup is not None for t in way.runs):
        startup = [t.startup or 0.0 for t in way.runs]
        words = f"{spread(startup).value:.2f} s of it are start-up: the interpreter, imports"
        if base is not None and base.name == CP and way is not base:
            pairs = zip(base.runs, way.runs, startup, strict=True)
            net = [a.measures["seconds"] / (b.measures["seconds"] - s) for a, b, s in pairs]
            words += f"; without it the ratio is {spread(net).value:.2f}"
        notes.append(words)
    notes += list(dict.fromkeys(t.more["lacking"] for t in way.runs if "lacking" in t.more))
    if way.name in (SCAN, WALK) and subject.format == "lmdb":
        notes.append("LMDB maps its file, so what it touches is not asked for by read calls")
    with suppress(KeyError):
        opening = spread([t.more["opening_seconds"] for t in way.runs])
        one = spread([t.more["one_seconds"] for t in way.runs])
        notes.append(
            f"opening the sidecar took {opening.value * 1e3:.1f} ms; 1024 places at a time, "
            f"one alone takes {one.value * 1e6:.1f} us"
        )
    return tuple(notes)


def _report(
    kind: Kind,
    command: str,
    machine: Mapping[str, Any],
    subject: Subject,
    settings: Mapping[str, Any],
    rows: tuple[Row, ...],
) -> Report:
    report = Report(
        kind=kind,
        command=command,
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine,
        dataset=subject.facts,
        settings=settings,
        rows=rows,
    )
    return replace(report, answer=answer(report))
