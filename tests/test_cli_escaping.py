"""Names and values of datasets are printed, and may hold anything: the terminal never obeys them.

Datasets whose paths, fields, attributes, keys and values carry escapes go through every command.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import h5py
import lmdb
import numpy as np
import pytest
from oracles import SUFFIX
from support import cli, commands_of
from test_bench_report import hostile
from typer.main import get_command

import dsprep
from dsprep.cli import app
from dsprep.core.escaping import printable, printable_json
from dsprep.sidecar.spec import dump_json

STEER = "\x1b[2J\x07\x9b31m\x7f\u202e\u2066\u2028\r\nforged: line\n"
PATH = f"evil{STEER}\udcff\udc9b"
CONTROLS = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff]"
)
LINES = Path(__file__).with_name("cli").joinpath("escaping.list").read_text()
GROUPS = ("bench", "cache")
COMMANDS: dict[str, list[str]] = {}
for _line in LINES.replace("\\x1b", "\x1b").splitlines():
    _words = _line.split(" ")
    COMMANDS.setdefault(" ".join(_words[: 1 + (_words[0] in GROUPS)]), []).append(_line)
OF_FORMATS = ("inspect", "convert", "provenance")
"""Commands that say something of each format."""


def run(*args: object, code: int | None = None):
    """Run a command; whatever it prints must not steer a terminal, nor add lines of its own."""
    done = cli(*args, code=code)
    text = done.out + done.err
    assert not CONTROLS.search(text), ascii(text)
    assert not re.search("^ *forged", text, re.MULTILINE), text
    return done


@pytest.fixture(scope="module")
def evil(tmp_path_factory):
    """A dataset of each format, one that differs, and two reports of benchmarks."""
    folder = tmp_path_factory.mktemp("evil")
    made = {name: folder / f"{PATH}{suffix}" for name, suffix in SUFFIX.items()}
    made["other"] = folder / f"other{PATH}.h5"
    for path in (made["hdf5"], made["other"]):
        with h5py.File(os.fsencode(path), "w") as file:
            names = [n.replace("/", "") for n in (f"x{STEER}", f"text{STEER}")]
            x = file[names[0]] = np.arange(12.0).reshape(4, 3) + (path == made["other"])
            file[names[1]] = np.array([STEER.encode()] * 4, "S99")
            file[names[0]].attrs[f"unit{STEER}"] = STEER
            file.attrs[f"title{STEER}"] = STEER
            assert x.shape == (4, 3)
    for name in ("zarr", "tfrecord"):
        run("convert", made["hdf5"], made[name], code=0)
    with lmdb.open(str(folder / "made")) as env, env.begin(write=True) as txn:
        for i in range(4):
            txn.put(f"{i}{STEER}".encode(), STEER.encode())
    (folder / "made").rename(made["lmdb"])
    made["CACHE"] = folder / f"cache{PATH}"
    dsprep.repack(made["other"], folder / f"packed{PATH}.h5", buffer_size=2, durable=False)
    with dsprep.Reader(folder / f"packed{PATH}.h5", 2, cache=made["CACHE"]) as reader:
        assert len(list(reader)) == 2
    (copy,) = made["CACHE"].glob("packed*")
    (copy / "0").write_bytes(b"")
    for name in ("OLD", "NEW"):
        made[name] = folder / f"{name}{PATH}.json"
        made[name].write_text(dump_json(hostile().to_json()))
    return made


def test_every_command_is_tried():
    top = commands_of(get_command(app))
    groups = {name: commands_of(command) for name, command in top.items() if name in GROUPS}
    found = {f"{group} {n}" for group, inside in groups.items() for n in inside}
    assert found | set(top) - set(groups) == set(COMMANDS)


@pytest.mark.parametrize(
    ("name", "format"),
    [(n, f) for n in COMMANDS for f in sorted(SUFFIX) if f == "hdf5" or n in OF_FORMATS],
)
def test_no_command_lets_data_steer_the_terminal(name, format, evil, tmp_path):
    named = {"DATA": evil[format], "OTHER": evil["other"]}
    named |= {name: evil[name] for name in ("OLD", "NEW", "CACHE")}
    for line in COMMANDS[name]:
        words = [str(named.get(w, w.replace("OUT", f"{tmp_path}/{PATH}"))) for w in line.split(" ")]
        done = run(*words)
        if "--json" in words and done.code == 0 and done.out.startswith(("{", "[")):
            done.json()


def test_unknown_commands_and_options_are_escaped_too():
    for words in (["nosuch\x1b"], ["convert", "--nosuch\x1b"], ["audit", "x", "--ranks", "\x1b"]):
        run(*words, code=2)


def test_what_is_printable_stays_and_json_keeps_its_meaning():
    assert printable("naïve 日本 µs 😀 ~") == "naïve 日本 µs 😀 ~"
    assert printable("a\tb\x9b\x7f\u202e\udc80") == "a\\tb\\x9b\\x7f\\u202e\\udc80"
    content = {f"{STEER}\U000e0001": ["naïve 😀", "\x7f\x80", 'a\\b"c'], "n": 1.5}
    text = printable_json(dump_json(content))
    assert json.loads(text) == content
    assert "naïve 😀" in text
    assert not CONTROLS.search(text)
