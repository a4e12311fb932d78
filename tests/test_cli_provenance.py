"""``dsprep provenance`` as a user types it."""

from __future__ import annotations

import lmdb
from support import cli


def test_the_history_of_a_database(tmp_path):
    with lmdb.open(str(tmp_path / "h.lmdb"), map_size=1 << 30, sync=False) as env:
        for a in range(0, 1000, 100):
            with env.begin(write=True) as txn:
                for i in range(a, a + 100):
                    txn.put(b"%08d" % i, b"x" * 5000, append=True)
    cli("provenance", tmp_path / "h.lmdb")
    shown = cli("provenance", tmp_path / "h.lmdb", "--show").out
    assert "commit interval 100" in shown
    assert "leaf" in shown
    facts = cli("provenance", tmp_path / "h.lmdb", "--show", "--json").json()
    assert facts["layouts"][0]["made with"]["commit interval"] == 100
