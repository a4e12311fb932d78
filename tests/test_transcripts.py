"""Commands as they are typed and what they answer: ``cli/*.txt``, written anew by DSPREP_UPDATE=1.

``dsprep`` runs in this process, other commands in a shell; both in a directory with the files of
`fill`. What a command prints follows it, errors last, then its exit code if that is not 0.
What changes from run to run stands as ``#``.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import h5py
import lmdb
import numpy as np
import pytest
from support import cli

FOLDER = Path(__file__).with_name("cli")
CHANGING = re.compile(
    r"\d[\d.,]* ?(?:[kMGT]?B/s|[mµ]?s\b)|\d{4}-\d\d-\d\dT\S+"
    r"|(?<=with dsprep  )\S+|(?<=line )\d+|(?<=KiB of )\w+"
    r"|(?<=^bytes    ).+|(?<=^bytes        ).+|(?<=\"nbytes\": )\d+"
    r"|(?<=^pays off ).*",
    re.MULTILINE,
)
"""Times, rates, versions, places in the code, the kind of the file system, sizes of sidecars."""
SIZES = re.compile(
    r"^((?:on disk|written|size|data|payload) +)\d.*|((?:gzip|zlib)[^,\n]*, )[\d.]+ k?B",
    re.MULTILINE,
)
"""Of files and compressed data, which depend on the libraries."""


def fill(folder: Path) -> None:
    """Make the files that the commands name."""
    x, y = np.arange(600, dtype="<f4").reshape(100, 2, 3), np.arange(100)
    changed, more = x.copy(), y.copy()
    changed[17, 1, 2], more[40:60] = np.nan, -1
    large = x.copy()
    large[3] = 1e30
    bits = {"nan": 0x7FC00000, "payload": 0x7FC00001, "zeros": 0, "minus": 1 << 31}
    files = {
        "train": {"x": x, "y": y},
        "other": {"x": changed, "y": more},
        "large": {"x": large, "y": y},
        "small": {"x": x},
        "odd": {"x": x, "y": y, "odd": np.arange(7)},
        "many": {"x": np.arange(10_000)},
        "none": {"x": np.zeros((0, 3))},
        "text": {"s": np.array(["abc"] * 3, h5py.string_dtype())},
        "partly": {"x": y[:3], "s": np.array(["abc"] * 3, h5py.string_dtype())},
        **{name: {"x": np.full(3, word, "u4").view("f4")} for name, word in bits.items()},
        **{f"set/{i}": {"x": x, "y": y} for i in range(3)},
    }
    for name in ("empty", "text", "of-data.mdb", "of-zarr.json", "set"):
        (folder / name).mkdir()
    for name, fields in files.items():
        with h5py.File(folder / f"{name}.h5", "w") as file:
            for field, values in fields.items():
                file[field] = values
            file.attrs["title"] = "long " * 9
    with h5py.File(folder / "chunks.h5", "w") as file:
        file.create_dataset("z", data=x.reshape(100, 6), chunks=(10, 6), shuffle=True)
    with lmdb.open(str(folder / "dup.lmdb"), max_dbs=1, map_size=1 << 24) as env:
        db = env.open_db(b"d", dupsort=True)
        with env.begin(write=True) as txn:
            txn.put(b"k", b"1", db=db)
            txn.put(b"k", b"2", db=db)
    for name, text in (
        ("text/a.txt", "hello\n"),
        ("nothing", "\n# no\n"),
        ("@nested", "@nested\n"),
    ):
        (folder / name).write_text(text)
    (folder / "zero.h5").touch()
    for name in ("pipe.h5", "of-data.mdb/data.mdb", "of-zarr.json/zarr.json"):
        os.mkfifo(folder / name)


def answer(command: str) -> tuple[str, int]:
    """Return what a command prints, and its exit code."""
    if not command.startswith("dsprep "):
        ended = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
        return ended.stdout, ended.returncode
    done = cli(*shlex.split(command)[1:], code=None)
    return done.out + done.err, done.code


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_commands_answer_as_they_did(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    found = []
    for line in path.read_text().splitlines():
        if line.startswith(("# ", "$ ")):
            found += ["", line] if line.startswith("# ") and found else [line]
        if line.startswith("$ "):
            text, code = answer(line[2:])
            text = CHANGING.sub("#", text.replace(str(tmp_path), "HERE"))
            text = SIZES.sub(lambda found: f"{found[1] or found[2]}#", text)
            found += [word.rstrip() for word in text.splitlines()] + [f"[{code}]"] * (code != 0)
    now = "\n".join(found) + "\n"
    if os.environ.get("DSPREP_UPDATE") == "1":
        path.write_text(now)
    assert now == path.read_text(), "DSPREP_UPDATE=1 writes the transcripts anew"
