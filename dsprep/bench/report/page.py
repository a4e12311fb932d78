"""A report as one static HTML page: self-contained, without scripts, the same as well-formed XML.

All text of a report is foreign: it is escaped by `text`, and not put into the page otherwise.
The page allows itself no loading of anything, by its content security policy.
"""

from __future__ import annotations

import html as escaping
from collections.abc import Mapping, Sequence
from pathlib import Path

from dsprep import __version__
from dsprep.bench.report.comparing import flat
from dsprep.bench.report.model import MEASURES, BenchReport, Row
from dsprep.bench.report.tables import columns, footnotes, label, show, tables
from dsprep.core.escaping import printable

MARK = '<meta name="generator" content="dsprep bench"/>'
"""Marks a page as one of these; within its first 400 bytes."""

LONGEST = 2000
"""Characters of a fact or remark."""

RATE = "samples_per_second"


def text(value: object) -> str:
    """Return foreign text for the page: escaped, cut if very long, nothing that steers."""
    words = str(value)
    words = words if len(words) <= LONGEST else words[: LONGEST - 1] + "..."
    return escaping.escape(printable(words))


def html(report: BenchReport) -> str:
    """Return the page of a report."""
    title = text(f"Reading {report.dataset.get('name', 'a dataset')}")
    style = Path(__file__).with_name("page.css").read_text("utf-8")
    shown = columns(report)
    parts = [f"<h1>{title}</h1>", *(f"<p>{text(words)}</p>" for words in report.answer)]
    for heading, rows in tables(report).items():
        parts += [f"<h2>{text(heading)}</h2>"] * bool(heading)
        parts.append(_table(report, rows, shown))
    notes = "".join(f"<li>{text(words)}</li>" for words in footnotes(report.rows))
    parts += [f"<ul>{notes}</ul>"] * bool(notes)
    kinds = {MEASURES[name].heading: MEASURES[name].words for name in shown}
    ways = {row.name: row.words for row in report.rows if row.words}
    facts = {"columns": kinds, "strategies": ways, "machine": report.machine}
    facts |= {"dataset": report.dataset, "settings": report.settings}
    for heading, known in facts.items():
        parts.append(_facts(heading, flat(known)))
    body = "\n".join(parts)
    return f"""<!DOCTYPE html>
<html lang="en" xmlns="http://www.w3.org/1999/xhtml">
<head>
<meta charset="utf-8"/>
{MARK}
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{title} - dsprep bench</title>
<style>{style}</style>
</head>
<body>
{body}
<footer>{text(report.command)}<br/>dsprep {__version__}, {text(report.when)}</footer>
</body>
</html>
"""


def _table(report: BenchReport, rows: Sequence[Row], shown: Sequence[str]) -> str:
    """Return the rows as on the terminal, each with a bar for its rate."""
    heads = "".join(f'<th scope="col">{text(MEASURES[name].heading)}</th>' for name in shown)
    first = text(report.swept or "strategy")
    fastest = max((row.median(RATE) or 0.0 for row in report.rows), default=0.0)
    lines = [f'<tr><th scope="col">{first}</th><th scope="col"></th>{heads}</tr>']
    for row in rows:
        cells = f'<td colspan="{len(shown) + 1}">{text(row.failure)}</td>'
        if not row.failure:
            share = min(1.0, max(0.0, (row.median(RATE) or 0.0) / fastest)) if fastest > 0 else 0.0
            bar = f'<rect width="{120 * share:.1f}" height="10"/>'
            values = (text(show(name, row.measures.get(name))) for name in shown)
            cells = f'<td><svg width="120" height="10">{bar}</svg></td>' + "".join(
                f"<td>{value}</td>" for value in values
            )
        kind = "bad" if row.failure else "own" if row.name == "dsprep" else "other"
        lines.append(
            f'<tr class="{kind}"><th scope="row">{text(label(report, row))}</th>{cells}</tr>'
        )
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _facts(heading: str, facts: Mapping[str, str]) -> str:
    """Return facts by name, hidden until they are asked for."""
    known = {name: value for name, value in facts.items() if value not in ("", "None", "{}")}
    items = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in known.items())
    summary = f"<summary>{heading}</summary>"
    return f"<details>{summary}<dl>{items}</dl></details>" if items else ""
