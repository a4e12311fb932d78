"""Every example runs as its reader would run it; the MNIST one also on idx files made here.

Commands, options and links in documents are those that there are.
"""

from __future__ import annotations

import ast
import gzip
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import h5py
import numpy as np
import pytest
import typer
from support import commands_of

import dsprep
from dsprep.cli import app

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
THROUGHPUT = FOLDER / "throughput.py"  # it takes long
GPU_FEED = FOLDER / "gpu_feed.py"
MINI_EPOCHS = FOLDER / "mini_epochs.py"
ALONE = [s for s in EXAMPLES if s not in (THROUGHPUT, GPU_FEED, MINI_EPOCHS)]


def run(script: Path, *arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *map(str, arguments)]
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )


PROCESSES = ("convert_dask", "write_items")
"""Examples that start processes, which import them; the others run in this one."""


@pytest.mark.parametrize("script", ALONE, ids=lambda p: p.stem)
def test_example_runs_without_arguments(script, tmp_path, monkeypatch, capsys):
    library = script.stem.rpartition("_")[2].replace("dask", "distributed")
    optional = ("torch", "jax", "distributed")
    if library in optional and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    if script.stem in PROCESSES:
        done = run(script, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout
    else:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(sys, "argv", [str(script)])
        monkeypatch.syspath_prepend(str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
        assert capsys.readouterr().out
    of_libraries = ("torchinductor", "__pycache__", "__autograph")  # of PyTorch and TensorFlow
    left = [p.name for p in tmp_path.iterdir() if not p.name.startswith(of_libraries)]
    assert not left, "an example clears what it makes"


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda p: p.stem)
def test_example_says_what_it_does_and_how_it_is_run(script):
    text = ast.get_docstring(ast.parse(script.read_text("utf-8")))
    assert text
    assert f"python examples/{script.name}" in text


def test_mini_epochs_cost_what_the_table_shows(tmp_path):
    """More repeats than the training has epochs: a quarter of the samples, and a larger loss."""
    done = run(MINI_EPOCHS, "--quick", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    first, few, many = (line.split() for line in done.stdout.splitlines()[2:])
    assert [row[:4] for row in (first, few, many)] == [
        ["1", "1", "4", "100%"],
        ["8", "2", "2", "100%"],
        ["8", "16", "0.25", "25%"],
    ]
    small, large = ([float(row[at]) for row in (first, few, many)] for at in (4, 6))
    for loss in (small, large):
        assert loss[1] == pytest.approx(loss[0], rel=0.1)
        assert loss[2] > 1.1 * loss[0]
    assert small[2] / small[0] > large[2] / large[0], "a larger batch loses less"
    assert not [*tmp_path.iterdir()]


MNIST = FOLDER / "mnist_to_hdf5.py"


def loaded(script: Path) -> ModuleType:
    """Return an example as a module."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return header + array.tobytes()


RNG = np.random.default_rng(3)
IMAGES, LABELS = RNG.integers(0, 256, (7, 28, 28), np.uint8), RNG.integers(0, 10, 7, np.uint8)


@pytest.fixture
def mnist(tmp_path):
    """Convert files of these bytes, in this process; return the output."""

    def convert(images: bytes, labels: bytes) -> Path:
        (tmp_path / "images").write_bytes(images)
        (tmp_path / "labels").write_bytes(labels)
        out = tmp_path / "out.h5"
        loaded(MNIST).main([str(tmp_path / "images"), str(tmp_path / "labels"), str(out)])
        return out

    return convert


@pytest.mark.parametrize("squeeze", [bytes, gzip.compress])
def test_mnist_values_arrive(mnist, squeeze):
    with h5py.File(mnist(squeeze(idx(IMAGES)), squeeze(idx(LABELS)))) as file:
        assert set(file) == {"image", "label"}
        for name, expected in (("image", IMAGES), ("label", LABELS)):
            assert file[name].dtype == np.uint8
            np.testing.assert_array_equal(file[name][:], expected)


@pytest.mark.parametrize("own", [False, True])
def test_throughput_measures_rows(own, tmp_path):
    rows = ["convert-lmdb", "repack-lmdb"] if own else ["reader-3k-2", "batch-cold", "index-5k"]
    words = ["--quick", "--gigabytes", 0.002, "--rows", *rows, "--json", "figures.json"]
    if own:
        with h5py.File(tmp_path / "own.h5", "w") as file:
            file["x"] = np.arange(6400.0).reshape(64, 100)
        words.insert(0, "own.h5")
    done = run(THROUGHPUT, *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "figures.json").read_text())
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(found)
    assert set(rows) <= set(found)
    assert all(value >= 0 for row in found.values() for value in row["values"])
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"figures.json", "own.h5"} if own else {"figures.json"}


def test_gpu_feed_refuses_in_one_line_where_there_is_no_gpu(tmp_path):
    torch = importlib.util.find_spec("torch") and importlib.import_module("torch")
    if torch and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run(GPU_FEED, "--gigabytes", 0.01, folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"gpu_feed: PyTorch (sees no GPU here|is not installed.*)\n", done.stderr)
    assert not [*tmp_path.iterdir()]


def test_gpu_feed_without_its_gpu(tmp_path):
    """What it does on the CPU: samples, plain reads, and what it says of its figures."""
    feed = loaded(GPU_FEED)
    path = feed.made(tmp_path, 0.002, 2.0, "64KiB")
    with dsprep.Sidecar.open(path) as sidecar:
        assert len(sidecar) == 996
        assert sidecar.layout(0).groups.samples == 32
        assert sidecar.read(5)["x"].shape == (1, 500)
    feed.drop(path)
    rates = dict.fromkeys(("pinned", "read_warm", "read_cold", "feed_warm", "feed_cold"), 2e9)
    rates |= {"pinned": 8e9, "read_warm": feed.read_all(path, 2), "feed_cold": 1e9}
    times = feed.summary([90.0, 3.0, 0.1, 0.2, 4.0], [5.0, 5.0, 0.01, 7.5], [2.0] * 5)
    assert times["stream_waits"] == 1
    assert (times["first_ms"], times["wait_p50_ms"], times["wait_p99_ms"]) == (90.0, 0.2, 4.0)
    said = feed.report(rates | times)
    assert "pinned memory to GPU: 8.00 GB/s" in said
    assert "feed cold: 1.00 GB/s, 0.50 of the slower" in said
    assert "the stream waited 1 times, 7.50 ms" in said


def test_throughput_names_its_rows(tmp_path):
    done = run(THROUGHPUT, "--list", folder=tmp_path)
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert len(names) == len(set(names)) > 40
    assert run(THROUGHPUT, "--rows", "other", folder=tmp_path).returncode == 1


# --- documents and job scripts -----------------------------------------------------------------

README = FOLDER.parent / "README.md"
JOBS = sorted(FOLDER.glob("*.sh"))
PAGES = [README, *sorted(FOLDER.glob("*.md")), *sorted(FOLDER.parent.glob("tests/lab/*/README.md"))]


def options(command, name=()):
    """Yield each command of dsprep with its options."""
    for word, below in commands_of(command).items():
        yield from options(below, (*name, word))
    yield name, {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}


def commands(path: Path) -> list[list[str]]:
    """Return the words behind ``dsprep`` in the code of a document, or in a script."""
    fences = re.compile(r"^```.*?^```", re.M | re.S)
    text = path.read_text().replace("\\\n", " ")
    code = [line for line in text.splitlines() if line[:1] != "#"]
    if path.suffix == ".md":
        inline = re.findall(r"`([^`]+)`", fences.sub("", text))
        code = [line for block in fences.findall(text) for line in block.splitlines()]
        code += [span.replace("\n", " ") for span in inline]
    found = [re.search(r"(?:^|[\s/])dsprep ([a-z][^#|&]+)", line) for line in code]
    return [re.sub(r"[\[\]]", "", match[1]).split() for match in found if match]


@pytest.mark.parametrize("path", [*PAGES, *JOBS], ids=lambda p: f"{p.parent.name}-{p.name}")
def test_commands_in_documents_and_job_scripts_exist(path):
    known = dict(options(typer.main.get_command(app)))
    found = commands(path)
    assert found or "tests" in path.parts or path.stem == "developing"  # for users it has none
    for words in found:
        name = tuple(words[: 2 if tuple(words[:2]) in known else 1])
        assert name in known, words
        for word in words:
            if re.fullmatch(r"--?[a-z][a-z-]*", word, re.I):
                assert word in known[name], words


@pytest.mark.parametrize("path", JOBS, ids=lambda p: p.stem)
def test_job_script_is_a_script(path):
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: f"{p.parent.name}-{p.name}")
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if not target.startswith("http"):
            file, _, anchor = target.partition("#")
            there = path.parent / file if file else path
            assert there.exists(), target
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.M) if anchor else []
            slugs = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
            assert not anchor or anchor in slugs, target


SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < ${NODES_LEFT}; node++)); do "$@" || exit; done  # 0, as if no node was lost
"""
STAGE_JOB = {
    "SLURM_JOB_ID": "7", "SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_CPUS_PER_TASK": "2", "SLURM_JOB_PARTITION": "debug", "SLURM_JOB_ACCOUNT": "physics",
    "USER": "me", "THEN": "1",
}  # fmt: skip


@pytest.mark.parametrize("left", [3, 2])
def test_staging_in_a_job_of_its_own(tmp_path, left):
    """The job after it has its limits; it is not submitted where a node was lost."""
    programs = {
        "srun": SRUN,
        "squeue": "#!/bin/bash\necho 1:30:00\n",
        "dsprep": f'#!/bin/bash\necho "$@" >> {tmp_path}/staged; echo "needed   3 groups"\n',
        "sbatch": f'#!/bin/bash\nprintf "%s\\n" "$@" > {tmp_path}/submitted\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(FOLDER / "slurm_stage.sh"), "data", "cache", "train.py", "a b.pt", "--lr=1"],
        env={**os.environ, **STAGE_JOB, "PATH": path, "NODES_LEFT": str(left)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "--ranks 12 --ranks-per-node 4" in (tmp_path / "staged").read_text()
    submitted = tmp_path / "submitted"
    if left < 3:
        assert done.returncode == 1
        assert "2 of 3 nodes have staged" in done.stderr
        assert not submitted.exists()
        return
    assert done.returncode == 0, done.stderr
    words = submitted.read_text().splitlines()
    assert {"--cpus-per-task=2", "--partition=debug", "--account=physics"} < set(words)
    assert {"--time=1:30:00", "--nodes=3", "--dependency=afterok:7"} < set(words)
    assert not [word for word in words if word.startswith("--qos")]
    assert words[-5:] == ["data", "cache", "train.py", "a b.pt", "--lr=1"]
