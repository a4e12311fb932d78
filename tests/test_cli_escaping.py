"""Names and values of datasets are printed, and may hold anything: the terminal never obeys them.

Datasets whose paths, fields, attributes, keys and values carry escapes go through every command.
"""

from __future__ import annotations

import json
import os
import re

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
COMMANDS = {
    "inspect": ("inspect DATA --head 2", "inspect DATA --json --head 2"),
    "convert": (
        "convert DATA OUT.zarr --dry-run",
        "convert DATA OUT.tfrecord --verify",
        "convert DATA OUT.lmdb --json",
        "convert DATA OUT.h5 --field nosuch\x1b",
        "convert DATA OUT.h5 --cast nosuch\x1b=float32",
        "convert DATA OUT.h5 --samples \x1b",
        "convert DATA OUT.h5 --compress \x1b",
        "convert DATA nosuch\x1b/OUT.h5",
    ),
    "repack": ("repack DATA OUT.h5 -b 2 --dry-run", "repack DATA OUT.zarr -b 2 --no-measure"),
    "verify": ("verify DATA OTHER", "verify DATA OTHER --json", "verify DATA nosuch\x1b"),
    "provenance": (
        "provenance DATA --dry-run",
        "provenance DATA",
        "provenance DATA --show",
        "provenance DATA --show --json",
        "provenance DATA --locate 0:2",
        "provenance DATA --locate 0:2 --json",
        "provenance DATA --check full",
        "provenance DATA --check --json",
        "provenance DATA --export kerchunk --out OUT",
        "provenance DATA --export \x1b",
        "provenance DATA --law \x1b",
    ),
    "audit": ("audit DATA --ranks 2 --batch-size 2", "audit DATA --ranks 2 --batch-size 2 --json"),
    "synth": ("synth nosuch\x1b OUT", "synth cosmic-tagger OUT --samples 2"),
    "demo": ("demo --nosuch\x1b",),
    "plan": (
        "plan DATA -M 1 --compute 1ms --storage cori --simulate",
        "plan DATA -M 1 --compute 1ms --storage cori --tier x\x1b -E 2",
        "plan DATA -M 1 --compute 1ms --storage no\x1b",
        "plan DATA -M 1 --compute 1ms --storage \x1b=1",
    ),
    "stage": (
        "stage DATA -P 2 --ranks-per-node 1 -M 1 --node 0 --to OUT --manifest OUT.jsonl",
        "stage DATA -P 2 --ranks-per-node 1 -M 1 --all --to OUT --json",
        "stage DATA -P 2 --ranks-per-node 1 -M 1 --all --to OUT --bandwidth \x1b",
        "stage DATA -P 2 --ranks-per-node 1 -M 1 --all --to OUT --field \x1b",
    ),
    "cache list": ("cache list CACHE", "cache list CACHE --json"),
    "cache purge": (
        "cache purge CACHE --all --dry-run",
        "cache purge CACHE --dataset \x1b --json",
        "cache purge CACHE --unused-since \x1b",
    ),
    "bench read": ("bench read DATA --dry-run -s group-db", "bench read DATA -s nosuch\x1b"),
    "bench storage": (
        "bench storage CACHE --size 2MiB --seconds 1 --streams 1 --out OUT.json",
        "bench storage CACHE --dry-run",
        "bench storage no\x1b --streams 1",
        "bench storage CACHE --streams \x1b",
    ),
    "bench compare": ("bench compare OLD NEW", "bench compare OLD NEW --json -"),
}
GROUPS = ("bench", "cache")
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
