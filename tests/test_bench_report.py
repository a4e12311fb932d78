"""What `dsprep bench` tells: tables, page, answer, sweeps, comparisons."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support import cli, cli_error, fails

from dsprep.bench.report import answer as answers
from dsprep.bench.report import comparing, model, page, sweeping, tables
from dsprep.bench.report.model import MEASURES, BenchReport, Measure, Row
from dsprep.bench.strategies import STRATEGIES
from dsprep.bench.task import Settings
from dsprep.cli.bench import output
from dsprep.errors import FormatError, UsageError

SAMPLES, NBYTES, LIMIT_RATE = 8192, 19_200, 62_500.0
HOSTILE = '<script src="http://evil.example/x.js">&\x1b[31m\u202e\ud800</script>'


def measure(value, spread=0.03):
    return Measure(value, value * (1 - spread), value * (1 + spread))


def row(name, rate, *, step=0.0, ranks=1, spread=0.03):
    """A row that loads `rate` samples/s by itself, with steps that take `step` seconds."""
    load, compute = SAMPLES / rate, -(-SAMPLES // 32 // ranks) * step
    found = {
        "epoch_seconds": load + compute,
        "exposed_seconds": load,
        "first_batch_seconds": load / 64,
        "samples_per_second": SAMPLES / (load + compute),
        "gb_per_second": SAMPLES * NBYTES / (load + compute) / 1e9,
        "limit_percent": 100 * SAMPLES / (load + compute) / LIMIT_RATE,
        "read_calls": 8192.0,
    }
    if step:
        found |= {"compute_seconds": compute}
        found |= {"utilisation_percent": 100 * compute / (load + compute)}
    if ranks > 1:
        found["skew_seconds"] = 0.02 * compute
    words = STRATEGIES[name].words if name in STRATEGIES else ""
    return Row(name, words, {k: measure(v, spread) for k, v in found.items()}, runs=3)


RATES = {"pread-limit": LIMIT_RATE, "h5py": 2600, "tf": 1900, "group": 38_000, "dsprep": 55_000}


def report(step=0.012, ranks=1, cold=True, rates=RATES, spread=0.03, **settings):
    rows = [
        row(n, rate, step=step * (n != "pread-limit"), ranks=ranks, spread=spread)
        for n, rate in rates.items()
    ]
    compute = f"{1000 * step:g}ms" if step else "none"
    return BenchReport(
        command="dsprep bench read train.h5",
        when="2025-06-01T12:00:00+00:00",
        machine={"cpu": "Some CPU @ 2.50GHz", "file_system": {"type": "ext4", "mount": "/"}},
        dataset={"name": "t.h5", "format": "hdf5", "samples": SAMPLES, "sample_nbytes": NBYTES},
        settings={"batch_size": 32, "ranks": ranks, "compute": compute, "cold": cold, **settings},
        rows=tuple(rows),
    )


VALUES = ("1MiB", "4MiB", "16MiB", "64MiB")


def swept(rates=(9e3, 2e4, 3.9e4, 4e4)):
    """A sweep, in which only the Reader and groups gain something."""
    rows = []
    for v, r in zip(VALUES, rates, strict=True):
        made = row("pread-limit", 6e4), row("dsprep", r), row("group", 0.8 * r)
        rows += [replace(one, value=v) for one in made]
    one = replace(report(step=0), rows=tuple(rows), swept="buffer-size")
    knees = {n: sweeping.knee(rows) for n, rows in tables.tables(one).items()}
    one = replace(one, knees={n: k for n, k in knees.items() if k is not None})
    return replace(one, answer=answers.answer(one))


def full():
    """A report with all that may be in one."""
    bad = Row("zarr", "zarr, sample by sample", problems=("not cold: 12% came from a device",))
    noted = replace(row("torch", 3000, step=0.012, ranks=2), notes=("2 workers per rank",))
    made = report(ranks=2)
    made = replace(made, rows=(*made.rows, noted, bad))
    return replace(made, answer=answers.answer(made))


def saved(path, one):
    path.write_text(json.dumps(one.to_json()))
    return path


# --- reports as JSON -------------------------------------------------------------------------


@pytest.mark.parametrize("one", [full(), swept()], ids=["rows", "sweep"])
def test_a_report_comes_back_from_json(one, tmp_path):
    assert model.load(saved(tmp_path / "r.json", one)) == one


@pytest.mark.parametrize(
    "raw",
    [b"", b"\xff\xfe", b"[", b"[]", b"null", b"{}", b"[" * 100_000, b'{"dsprep_bench": 1}'],
    ids=lambda raw: str(raw[:8]),
)
def test_what_is_not_a_report_is_a_format_error(tmp_path, raw):
    (tmp_path / "r").write_bytes(raw)
    with pytest.raises(FormatError, match="version" if b": 1" in raw else "not a report"):
        model.load(tmp_path / "r")


# --- tables ----------------------------------------------------------------------------------


def test_columns_are_those_that_somebody_has():
    names = set(tables.columns(report(ranks=2)))
    assert {"utilisation_percent", "skew_seconds", "exposed_seconds"} <= names
    assert "major_faults" not in names
    assert not {"utilisation_percent", "skew_seconds"} & set(tables.columns(report(step=0)))


# --- the page --------------------------------------------------------------------------------


def hostile():
    bad = Row(HOSTILE, HOSTILE, problems=(HOSTILE,), notes=(HOSTILE,), value=HOSTILE)
    good = replace(row("h5py", 2600), name=HOSTILE + "2", notes=(HOSTILE,))
    one = full()
    return replace(
        one,
        command=HOSTILE,
        dataset={**one.dataset, "name": HOSTILE, HOSTILE: HOSTILE},
        machine={**one.machine, HOSTILE: [HOSTILE]},
        rows=(*one.rows, bad, good),
        swept=HOSTILE,
        knees={HOSTILE: HOSTILE},
        answer=(HOSTILE,),
    )


@pytest.mark.parametrize(
    "one",
    [full(), swept(), hostile(), replace(report(), rows=(), machine={}, dataset={}, settings={})],
    ids=["full", "sweep", "hostile", "empty"],
)
def test_the_page_is_well_formed_and_stands_alone(one):
    text = page.html(one)
    assert page.MARK.encode() in text.encode()[: output.HEAD]
    tree = ElementTree.fromstring(text.encode())
    tags = {e.tag.rpartition("}")[2] for e in tree.iter()}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "image", "use", "a"}
    for name in (name for element in tree.iter() for name in element.attrib):
        assert not name.startswith("on")
        assert name.rpartition("}")[2] not in ("href", "src", "style")
    style = next(e.text for e in tree.iter() if e.tag.endswith("}style"))
    assert "url(" not in style
    assert "@import" not in style
    assert not set("\x1b\u202e\ud800") & set(text)
    words = " ".join(tree.itertext())
    for made in one.rows:  # what the terminal shows
        for name, m in made.measures.items():
            assert (
                not MEASURES[name].heading or tables.show(name, m) in words or HOSTILE in one.knees
            )
    widths = [float(e.get("width")) for e in tree.iter() if e.tag.endswith("}rect")]
    rates = [r.median("samples_per_second") for r in one.rows if not r.failure]
    assert one.swept or widths == pytest.approx([120 * r / max(rates) for r in rates], abs=0.1)


# --- the answer ------------------------------------------------------------------------------


def told(one):
    return " ".join(answers.answer(one))


TODAY = {"h5py": 5000, "torch": 3000, "tf": 4000, "dsprep": 55_000}


def of_user(rates=TODAY, **more):
    """Some ways of reading, as their user asked for them, by steps that compute nothing."""
    return report(step=0, rates={"pread-limit": 6e4, **rates}, **more)


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (report(ranks=2), "12.0 ms on 32 samples of 19.2 kB needs 102.4 MB/s for all 2 ranks"),
        (report(), "needs 51.2 MB/s | (h5py) | loading is the bottleneck | dsprep 1.93 times"),
        (report(step=0.5), "loading is not the bottleneck"),
        (of_user({"h5py": 3000, "dsprep": 3300}, spread=0.2), "No gain beyond the spread from"),
        (of_user(), "as it is today (h5py)"),
        (of_user(named=["tf", "torch", "h5py"]), "today (torch) | dsprep 18.3 times"),
        (of_user(named=["dsprep", "group-db", "h5py"]), "today (h5py)"),
        (of_user(named=["torch"], baseline="tf"), "today (tf)"),
        (of_user(baseline="zarr"), "has no figures"),
        (of_user({**TODAY, "lmdbio-stag": 9e5}), "More samples/s: dsprep 11.0 times."),
        (report(cold=False), "warm, from the page cache"),
        (of_user(storage="cori"), "delayed by --storage cori, | 21.8 ms a call"),
        (replace(report(), rows=(), machine={}, settings={}, dataset={}), "has no figures"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_the_answer_says_what_was_measured(one, said):
    words = told(one)
    assert all(phrase in words for phrase in said.split(" | ")), words


# --- sweeps ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("buffer-size=4MiB,1MiB", {"1MiB": "1MiB", "4MiB": "4MiB"}),
        ("--buffer-size=64,1024", {"64": "64", "1024": "1024"}),
        ("transfer-size=4KiB,1KiB", {"1KiB": 1024, "4KiB": 4096}),
        ("stagger=3", {"3": 3}),
        ("engine=direct,buffered", {"buffered": "buffered", "direct": "direct"}),
    ],
)
def test_sweeps_are_parsed(text, values):
    found = sweeping.parse(text)
    assert found == (text.partition("=")[0].removeprefix("--"), values)
    assert [*found[1]] == [*values]


def test_details_are_set_or_swept():
    swept, points = sweeping.points(Settings(), ["threads=2", "buffers=3,4"])
    assert swept == "buffers"
    found = [(value, one.threads, one.buffers) for value, one in points]
    assert found == [("3", 2, 3), ("4", 2, 4)]
    with pytest.raises(UsageError, match="varies buffers and threads"):
        sweeping.points(Settings(), ["buffers=3,4", "threads=1,2"])


@pytest.mark.parametrize(
    "text",
    [
        *("", "threads", "threads=", "threads=0", "threads=-1", "threads=1,1", "threads=1,,2"),
        *("threads=1MiB", "threads=1..4", "threads=٣", "colour=1", "engine=auto"),
        *("buffer-size=64,1MiB", "buffer-size=1024,1KiB", "buffer-size=inf", "tier-size=lots"),
        "threads=" + ",".join(map(str, range(1, 100))),
        "threads=" + "9" * 5000,
    ],
    ids=lambda text: text[:30],
)
def test_what_is_not_a_sweep_is_a_usage_error(text):
    fails(lambda: sweeping.parse(text), UsageError)


@pytest.mark.parametrize(
    ("rates", "value"),
    [((1, 2, 2.05), "1"), ((1, 2, 3), None), ((1, 1, 1), "0"), ((2, 1, 3), None), ((), None)],
)
def test_beyond_the_knee_nothing_is_better(rates, value):
    measures = [{"samples_per_second": measure(rate, 0.01)} for rate in rates]
    rows = [Row("x", measures=one, value=str(i)) for i, one in enumerate(measures)]
    assert sweeping.knee(rows) == value


def test_a_sweep_names_the_setting_to_use():
    one = swept()
    assert one.knees["dsprep"] == "16MiB"
    assert told(one).startswith("dsprep: use buffer-size=16MiB: 39,000 samples/s")
    rising = swept(rates=(1e3, 1e4, 2e4, 4e4))
    assert rising.knees == {"pread-limit": "1MiB"}  # so no other row is marked as one
    assert "sweep further" in told(rising)
    assert swept(rates=(4e4, 4e4, 4e4, 4e4)).knees["dsprep"] == "1MiB"


# --- comparing -------------------------------------------------------------------------------


def faster(one, name, times):
    rates = {n: rate * (times if n == name else 1) for n, rate in RATES.items()}
    return replace(one, rows=report(step=0, rates=rates).rows)


@pytest.mark.parametrize(
    ("times", "verdict", "failed"),
    [(1.5, "better", False), (1.02, "same", False), (0.96, "same", False), (0.5, "worse", True)],
)
def test_a_change_counts_beyond_the_spread(times, verdict, failed):
    found = comparing.compare(report(step=0), faster(report(step=0), "dsprep", times))
    verdicts = {p.name: p.verdict for p in found.pairs}
    assert verdicts.pop("dsprep") == verdict
    assert set(verdicts.values()) == {"same"}
    assert [p.name for p in found.worse(0.1)] == (["dsprep"] if failed else [])
    assert found.differences == ()


def test_compare_on_the_command_line(tmp_path):
    old = saved(tmp_path / "old.json", report(step=0))
    new = saved(tmp_path / "new.json", faster(report(step=0), "dsprep", 0.5))
    command = ("bench", "compare")
    assert re.search(r"dsprep .*0\.500x +worse", cli(*command, old, new).out)
    cli(*command, old, new, "--fail-over", "10%", code=1)
    cli(*command, old, new, "--fail-over", "60%")
    cli(*command, new, old, "--fail-over", "10")
    found = cli(*command, old, new, "--json", "-").json()["strategies"]
    assert {p["name"]: p["verdict"] for p in found}["dsprep"] == "worse"
    file = tmp_path / "compared.json"
    for _ in range(2):
        cli(*command, old, new, "--json", file)
    assert json.loads(file.read_text())["unit"] == "samples/s"


def test_compare_refuses_what_it_cannot(tmp_path):
    old = saved(tmp_path / "old.json", report())
    (tmp_path / "kind").write_text(json.dumps(report().to_json() | {"kind": "convert"}))
    for args, code, words in (
        ([old, old, "--fail-over", "much"], 2, "percentage"),
        ([old, old, "--measure", "speed"], 2, "not a measure"),
        ([old, old, "--measure", "hit_percent"], 2, "no strategy has"),
        ([old, tmp_path / "kind"], 1, "not a report"),
    ):
        assert words in cli_error("bench", "compare", *args, code=code)


# --- what is written -------------------------------------------------------------------------


def test_emit_prints_and_writes(tmp_path, capsys):
    files = {n: tmp_path / f"r.{n}" for n in ("json", "html")}
    for _ in range(2):  # its own files are replaced
        output.emit(full(), **files)
    out, err = capsys.readouterr()
    assert "pread-limit" in out
    assert "loading is the bottleneck" in out.replace("\n", " ")
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 100
    assert err.count("wrote") == 4
    assert model.load(files["json"]) == full()
    assert files["html"].read_text().startswith("<!DOCTYPE html>")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.html", "r.json"]


def test_emit_prints_json_alone_and_nothing_that_steers_a_terminal(capsys):
    output.emit(full(), json=Path("-"), html=None)
    assert BenchReport.from_json(json.loads(capsys.readouterr().out)) == full()
    output.emit(hostile(), json=None, html=None)
    assert not set("\x1b\u202e\ud800") & set(capsys.readouterr().out)


@pytest.mark.parametrize("option", ["json", "html"])
def test_files_of_others_are_kept(tmp_path, option):
    file = tmp_path / "mine"
    file.write_text('{"my": "data"}')
    asked = {"json": None, "html": None, option: file}
    fails(lambda: output.emit(full(), **asked), UsageError, "mine")
    assert file.read_text() == '{"my": "data"}'
    file.write_text("")
    output.emit(full(), **asked)
    assert file.stat().st_size > 1000
