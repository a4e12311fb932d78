"""``dsprep plan papers``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from dsprep.cli import options as opt
from dsprep.cli.report import print_json, print_rows, print_table, say

if TYPE_CHECKING:
    from dsprep.verbs.plan_papers import Cell

EPILOG = """
dsprep plan papers

dsprep plan papers --json

Exit status: 0 done, 2 wrong usage.
"""


@opt.command(EPILOG)
def papers(json: opt.Json = False) -> None:
    """Compare the model with the figures of the papers: theirs, ours, and the ratio.

    What is calibrated is marked by *; what does not come out is listed with what the model lacks.
    """
    from dsprep.verbs import plan_papers as verb

    cells = verb.papers()
    if json:
        print_json([{**asdict(c), "ratio": c.ratio, "lacks": c.lacks} for c in cells])
        return
    print_table([("paper", "row", "column", "theirs", "ours", "ratio"), *map(_words, cells)])
    say("", "What the model lacks where it is more than 25 % off, or in another order:")
    lacking = {c.lacks: f"{c.source}: {c.column}" for c in reversed(cells) if c.lacks}
    print_rows([(where, words) for words, where in lacking.items()])
    free = [c for c in cells if not (c.calibrated or c.is_nothing)]
    near, twice = (sum(c.within(factor) for c in free) for factor in (1.25, 2))
    say("", f"of {len(free)} that are neither calibrated (*) nor 0 in both:")
    say(f"{near} within 25 %, {twice} within 2x")


def _words(cell: Cell) -> tuple[str, ...]:
    """Return a figure in words."""
    from dsprep.bench.report.tables import digits

    ours = "-" if cell.ours is None else digits(cell.ours) + "*" * cell.calibrated
    ratio = "-" if cell.ratio is None else f"{cell.ratio:.2f}"
    return (cell.source, cell.row, cell.column, digits(cell.paper), ours, ratio)
