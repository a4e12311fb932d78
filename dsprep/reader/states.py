"""States of a `Reader`: what they have to be so that it continues where they were saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsprep.errors import UsageError
from dsprep.reader.options import at_least
from dsprep.reader.order import ResumePoint
from dsprep.sidecar.sidecar import Sidecar

VERSION = 2

_IN_WORDS = {
    "samples": "number of samples",
    "units": "division of the samples into groups",
    "mixed": "number of groups that are shuffled together",
}  # of what decides the order, if the name alone does not say it

MOST_RANKS = 1 << 20
"""Ranks beyond which a saved state is damaged: what is left is worked out for each of them."""


def check_origin(state: Mapping[str, Any], data: Sidecar | None) -> None:
    """Raise `UsageError` if a state is of another version, or of other data than (None: any)."""
    version = state.get("version") if hasattr(state, "get") else None
    if version != VERSION:
        raise UsageError(
            "this is not a state of a Reader, or one of another version",
            expected=f"version {VERSION}",
            found=repr(state)[:80],
        )
    if data is not None and state.get("dataset") != data.identity:
        raise UsageError(
            "the state was saved by a reader of another dataset",
            where=data.dataset,
            expected=data.identity,
            found=state.get("dataset"),
            fix="open the data that it was saved with; or, if these are the same samples in "
            "the same order, load_state_dict(state, other_data=True)",
        )


def check_facts(state: Mapping[str, Any], facts: Mapping[str, object]) -> None:
    """Raise `UsageError` if a state is of another order than these facts say."""
    absent = dict.fromkeys(("mini_epochs", "subset", "weights"))
    for name, value in {**absent, **facts}.items():
        if state.get(name) != value:
            raise UsageError(
                f"the state was saved by a reader with another {_IN_WORDS.get(name, name)}",
                expected=value,
                found=state.get(name),
                fix="make the Reader as it was made then, of the same data",
            )


def parse(state: Mapping[str, Any]) -> tuple[int, list[ResumePoint]]:
    """Return epoch and stages of a state; `UsageError` if it is damaged."""
    try:
        epoch = at_least("epoch", state["epoch"], 0)
        stages = [
            ResumePoint(
                at_least("world_size", world_size, 1, MOST_RANKS),
                at_least("batch_size", batch_size, 1),
                at_least("steps", steps, 0),
            )
            for world_size, batch_size, steps in state["stages"]
        ]
        if not stages:
            raise ValueError("there are no stages")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"the state of the reader is damaged: {error}") from error
    return epoch, stages
