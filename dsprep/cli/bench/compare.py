"""``dsprep bench compare``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dsprep.cli.command import command
from dsprep.cli.report import Verbosity, current_verbosity, note, print_json, say
from dsprep.core.escaping import printable, printable_json

if TYPE_CHECKING:
    from dsprep.bench.report.comparing import Comparison, Pair

SHOWN = 20
"""Differences of machine, dataset and settings that are printed."""


@command
def compare(
    old: Path,
    new: Path,
    /,
    measure: str = "samples_per_second",
    fail_over: str | None = None,
    json: Path | None = None,
) -> None:
    """Put two reports side by side: what got faster or slower beyond the spread of repeats.

    Parameters
    ----------
    old : OLD
        A report, from --json.
    new : NEW
        One made later.
    measure : NAME
        A measure by its name in reports.
    fail_over : PERCENT
        Exit with 1 if a strategy got worse by more, such as 10%, beyond the spread, or no longer
        has a figure.
    json
        Write the comparison; - prints it.

    Examples
    --------
    dsprep bench compare before.json after.json
    dsprep bench compare before.json after.json --measure exposed_seconds
    dsprep bench compare before.json after.json --fail-over 10%

    Notes
    -----
    Exit status: 0 done, 1 bad data, or a strategy got worse by more than --fail-over, 2 wrong
    usage.
    """
    from dsprep.bench.report.comparing import compare as side_by_side
    from dsprep.bench.report.model import load
    from dsprep.cli.bench.output import STDOUT, check_targets, write
    from dsprep.sidecar.spec import dump_json

    share = None if fail_over is None else _share(fail_over)
    check_targets(json=json)
    comparison = side_by_side(load(old), load(new), measure)
    if json == STDOUT:
        print_json(comparison.to_json())
    else:
        _show(comparison)
        if json is not None:
            write(json, printable_json(dump_json(comparison.to_json())))
    _doubts(comparison)
    bad = [] if share is None else comparison.worse(share)
    if bad:
        note(f"worse by more than {fail_over}: {', '.join(_name(p) for p in bad)}")
        raise typer.Exit(1)


def _share(text: str) -> float:
    """Return the share that ``10%`` or ``10`` means."""
    from dsprep.errors import UsageError

    try:
        percent = float(text.strip().removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent < 1e9:
        raise UsageError(f"{text!r} is not a percentage", expected="--fail-over such as 10%")
    return percent / 100


def _name(pair: Pair) -> str:
    return printable(f"{pair.name} {pair.value}".strip())


def _show(comparison: Comparison) -> None:
    """Print the strategies with both values, the ratio and the verdict."""
    from dsprep.bench.report.model import MEASURES
    from dsprep.bench.report.tables import NOTHING, digits, show

    unit = MEASURES[comparison.measure]
    rows = [("strategy", "old", "new", "new/old", "")]
    for pair in comparison.pairs:
        values = [show(comparison.measure, m) for m in (pair.old, pair.new)]
        ratio = NOTHING if pair.ratio is None else f"{digits(pair.ratio)}x"
        verdict = f"{pair.verdict}: {pair.problem}" if pair.problem else pair.verdict
        rows.append((_name(pair), values[0], values[1], ratio, verdict))
    say(f"{comparison.measure} ({unit.unit}): {unit.words}", "")
    sizes = [max(len(r[i]) for r in rows) for i in range(4)]
    for row in rows:
        numbers = "".join(f"{v:>{s + 2}}" for v, s in zip(row[1:4], sizes[1:], strict=True))
        say(f"{row[0]:<{sizes[0]}}{numbers}  {row[4]}".rstrip())
    for words, names in (("old", comparison.only_old), ("new", comparison.only_new)):
        if names:
            say("", f"only in the {words} report: {', '.join(names)}")


def _doubts(comparison: Comparison) -> None:
    """Say what else differs between the reports."""
    shown = len(comparison.differences) if current_verbosity() >= Verbosity.verbose else SHOWN
    for fact, old, new in comparison.differences[:shown]:
        note(f"{fact} differs: {old[:200]} / {new[:200]}")
    more = len(comparison.differences) - shown
    if more > 0:
        note(f"{more} more facts differ")
    if any(not fact.startswith("command") for fact, _, _ in comparison.differences):
        note("the reports were not made under the same conditions: the comparison is doubtful")
