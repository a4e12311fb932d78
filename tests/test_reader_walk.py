"""What a newcomer runs into with the Reader: where a state leads to, and mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import dsprep
from dsprep.errors import UsageError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "x.h5"
    with h5py.File(found, "w") as file:
        file["x"] = np.arange(40, dtype=np.int32)
    dsprep.provenance(found)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_behind_the_last_batch_leads_to_the_next_epoch(path: Path, ranks: int) -> None:
    with dsprep.Reader(path, 8, rank=0, world_size=1) as reader:
        for step, _ in enumerate(reader):
            if step == 4:
                state = reader.state_dict()
                break
        assert reader.epoch == 1
    with dsprep.Reader(path, 8, rank=0, world_size=ranks) as again:
        again.load_state_dict(state)
        assert again.epoch == 1
        assert sum(1 for _ in range(again.epoch, 3) for _ in again) == 2 * len(again)
        assert again.epoch == 3


@pytest.mark.parametrize(
    ("arguments", "what"),
    [({"batch_size": True}, "batch_size is True"), ({"transform": 5}, "transform is 5")],
)
def test_mistakes(path: Path, arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        dsprep.Reader(path, **{"batch_size": 8, **arguments})
