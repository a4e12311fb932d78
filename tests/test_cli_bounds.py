"""Numbers at and beyond bounds: the command does its work, or says in one line why not."""

from __future__ import annotations

import pytest
from support import cli, commands_of
from typer.main import get_command

from dsprep.cli import app

LINES = {
    "inspect": "inspect train.h5 --stats",
    "convert": "convert train.h5 out.h5 -n",
    "repack": "repack train.h5 out.h5 -n",
    "verify": "verify train.h5 train.h5",
    "provenance": "provenance train.h5 --dry-run",
    "audit": "audit train.h5 -P 2 -M 4 --mini-epochs 2",
    "stage": "stage train.h5 -P 2 --ranks-per-node 2 -M 4 --to cache -n",
    "plan": "plan train.h5 -M 4 --compute 1ms --storage cori --tier 1GB",
    "synth": "synth cosmic-tagger out.h5 --scale 0.01 --samples 1",
    "bench read": "bench read train.h5 -n",
    "bench storage": "bench storage . -n",
}
"""A command each, which works; options that it has already are given once more."""


@pytest.mark.parametrize("name", LINES)
def test_values_at_and_beyond_bounds(name, train, monkeypatch):
    monkeypatch.chdir(train.parent)
    cli("provenance", train)
    command = get_command(app)
    for word in name.split():
        command = commands_of(command)[word]
    for param in command.params:
        option = max(param.opts, key=len)
        if not option.startswith("--") or param.metavar != "N":
            continue
        for value in ("0", "9" * 25):
            done = cli(*LINES[name].split(), f"{option}={value}", code=None)
            errors = [w for w in done.err.splitlines() if w.startswith("dsprep: error: ")]
            assert len(errors) == (done.code != 0), (option, value, done.err)
            assert done.code in (0, 1, 2), (option, value)
