"""A report as one HTML page: self-contained, without scripts, the same as well-formed XML.

All text of a report is foreign: it is escaped by `text`, and not put into the page otherwise.
The page allows itself no loading of anything, by its content security policy. ``page.css`` is its
style sheet, `plots` draws bars, stacked bars and curves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsprep import __version__
from dsprep.bench.report import plots
from dsprep.bench.report.comparing import flat
from dsprep.bench.report.model import MEASURES, BenchReport, Measure
from dsprep.bench.report.plots import text
from dsprep.bench.report.tables import (
    Line,
    Table,
    columns,
    footnotes,
    number,
    show,
    show_spread,
    tables,
)
from dsprep.bench.strategies import ABSENT, LIMIT
from dsprep.bench.tiering import label
from dsprep.core.units import show_nbytes

MARK = '<meta name="generator" content="dsprep bench"/>'
"""Marks a page as one of these; within its first 400 bytes."""


def html(report: BenchReport) -> str:
    """Return the page of a report."""
    name = str(report.dataset.get("name", report.dataset.get("path", "a dataset")))
    title = f"Reading {name}"
    parts = [_head(report, title), _answer(report)]
    parts += [section(heading, body) for heading, body in _plots(report)]
    parts.append(section("All figures", _tables(report)))
    parts.append(section("How it was measured", _facts(report)))
    footer = f"dsprep {__version__}, {report.when}"
    return document(f"{title} - dsprep bench", parts, footer, MARK)


def document(title: str, parts: Sequence[str], footer: str, mark: str = "") -> str:
    """Return a page of these parts, as they are; `mark` goes to its head."""
    body = "\n".join(filter(None, parts))
    style = Path(__file__).with_name("page.css").read_text("utf-8")
    return f"""<!DOCTYPE html>
<html lang="en" xmlns="http://www.w3.org/1999/xhtml">
<head>
<meta charset="utf-8"/>
{mark}
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{text(title)}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
<footer>{text(footer)}</footer>
</body>
</html>
"""


def section(heading: str, body: str) -> str:
    """Return a part of a page; nothing without a body."""
    return f"<section>\n<h2>{text(heading)}</h2>\n{body}\n</section>" if body else ""


def planned(
    command: str, title: str, facts: Mapping[str, str], notes: Sequence[str], parts: Sequence[str]
) -> str:
    """Return the page of a plan: what was computed by heading, notes, and sections."""
    head = f'<p class="eyebrow">{command}</p>\n<h1>{text(title)}</h1>'
    items = "".join(
        f'<div class="whole"><dt>{text(k)}</dt><dd>{_kept(v)}</dd></div>' for k, v in facts.items()
    )
    lines = "".join(f"<li>{text(words)}</li>" for words in notes)
    plan = section("Plan, predicted", f'<dl class="grid">{items}</dl>')
    remarks = section("Notes", lines and f'<ul class="notes">{lines}</ul>')
    body = [f"<header>\n{head}\n</header>", plan, *parts, remarks]
    return document(f"{title} - {command}", body, f"dsprep {__version__}")


def words_table(lines: Sequence[Sequence[str]]) -> str:
    """Return rows of words as a table; the first one is its heading."""
    rows = []
    for line in lines:
        cells = [
            f'<th scope="row">{text(line[0])}</th>',
            *(f"<td>{text(c)}</td>" for c in line[1:]),
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head = rows[0].replace("<td>", '<th scope="col">').replace("</td>", "</th>")
    body = "\n".join(rows[1:])
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Figures"><table>\n'
        f"<thead>{head}</thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _head(report: BenchReport, title: str) -> str:
    facts = []
    samples, nbytes = (number(report.dataset, k, 0) for k in ("samples", "sample_nbytes"))
    if samples:
        facts.append(f"{samples:,.0f} samples")
    if nbytes:
        facts.append(f"{show_nbytes(nbytes)} each")
    if report.dataset.get("format"):
        facts.append(str(report.dataset["format"]))
    ranks, batch = (number(report.settings, k, 1) for k in ("ranks", "batch_size"))
    facts.append(f"batches of {batch:,.0f}")
    facts.append(f"{ranks:,.0f} rank{'s' if ranks > 1 else ''}")
    compute = report.settings.get("compute", "none")
    facts.append("no compute" if compute == "none" else f"compute {compute}")
    facts.append("cold" if report.settings.get("cold") else "warm: from the page cache")
    if rate := report.settings.get("tier_bandwidth"):
        facts.append(label(str(rate)))
    items = "".join(f"<li>{text(f)}</li>" for f in facts)
    return (
        f'<header>\n<p class="eyebrow">dsprep bench read</p>\n'
        f'<h1>{text(title)}</h1>\n<ul class="facts">{items}</ul>\n</header>'
    )


def _kept(words: str) -> str:
    """Return text of which a number keeps its unit on the same line."""
    return re.sub(r"(?<=\d) (?=(?:ns|µs|ms|s|B|kB|MB|GB|TB|%)\b)", "&#160;", text(words))


def _answer(report: BenchReport) -> str:
    """Return the answer."""
    paragraphs = "\n".join(f"<p>{_kept(p)}</p>" for p in report.answer)
    return f'<section class="answer" aria-label="Answer">\n{paragraphs}\n</section>'


# --- plots, tables and facts -----------------------------------------------------------------


def _plots(report: BenchReport) -> list[tuple[str, str]]:
    """Return headings and figures."""
    figures = []
    if report.rows:
        items = "".join(
            f"<li class='{'absent' * r.failure.startswith(ABSENT)}'><b>{text(r.name)}</b> "
            f"{text(r.failure)}</li>"
            for r in report.rows
            if r.failure
        )
        problems = f'\n<ul class="problems">{items}</ul>' if items else ""
        figures.append(("What each way delivers", plots.bars(report) + problems))
        figures.append(("One epoch, by what it is spent on", plots.epochs(report.rows)))
    if report.sweep is not None:
        figures.append((f"Over --{report.sweep.parameter}", plots.curves(report)))
    return figures


def _tables(report: BenchReport) -> str:
    parts = [_table(table, f"t{i}") for i, table in enumerate(tables(report))]
    notes = [f"<li>{text(n)}</li>" for n in footnotes(report.all_rows)]
    if notes:
        parts.append(f'<ul class="notes">{"".join(notes)}</ul>')
    kinds = [MEASURES[name] for name in columns(report)]
    words = "".join(f"<div><dt>{text(k.heading)}</dt><dd>{text(k.words)}</dd></div>" for k in kinds)
    if words:
        parts.append(
            '<details><summary>What the columns mean</summary><dl class="grid">'
            f"{words}</dl><p>Values are medians over repeats; the small figures are half the "
            "range.</p></details>"
        )
    return "\n".join(parts)


def _table(table: Table, key: str) -> str:
    headings = (text(MEASURES[name].heading) for name in table.columns)
    head = "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    lines = "\n".join(_line(line, table.columns) for line in table.lines)
    title = f"<caption>{text(table.title)}</caption>" if table.title else ""
    label = text(table.title or "All figures")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}" id="{key}">'
        f'<table>{title}\n<thead><tr><th scope="col">{text(table.first)}</th>{head}</tr></thead>\n'
        f"<tbody>\n{lines}\n</tbody></table></div>"
    )


def _line(line: Line, names: Sequence[str]) -> str:
    row = line.row
    kinds = [("knee", line.knee), ("limit", row.name == LIMIT), ("own", row.name == "dsprep")]
    classes = " ".join(k for k, there in kinds if there)
    mark = ' <span class="tag">knee</span>' if line.knee else ""
    words = f' title="{text(row.words)}"' if row.words else ""
    head = f'<th scope="row"{words}>{text(line.label)}{mark}</th>'
    if row.failure:
        span = max(1, len(names))
        return f'<tr class="bad">{head}<td colspan="{span}">{text(row.failure)}</td></tr>'
    cells = "".join(f"<td>{_cell(row.measures.get(name), name)}</td>" for name in names)
    return f'<tr class="{classes}">{head}{cells}</tr>'


def _cell(measure: Measure | None, name: str) -> str:
    value, spread = (
        show(name, measure, spread=False),
        "" if measure is None else show_spread(measure),
    )
    return text(value) + (f"<small>{text(spread)}</small>" if spread else "")


def _facts(report: BenchReport) -> str:
    words = " ".join(f"<span>{text(word)}</span>" for word in report.command.split(" "))
    parts = [f"<h3>Command</h3>\n<pre><code>{words}</code></pre>"]
    ways = {row.name: row.words for row in report.all_rows if row.words}
    items = "".join(_fact(name, text) for name, text in ways.items())
    if items:
        parts.append(f'<h3>Strategies</h3>\n<dl class="grid">{items}</dl>')
    for heading in ("machine", "dataset", "settings"):
        facts: Mapping[str, Any] = getattr(report, heading)
        items = "".join(_fact(key, value) for key, value in facts.items())
        if items:
            parts.append(f'<h3>{heading.title()}</h3>\n<dl class="grid">{items}</dl>')
    return "\n".join(parts)


def _fact(key: str, value: object) -> str:
    """Return a fact; one that has several of its own takes a line."""
    inner = flat({key: value})
    known = [(k, v) for k, v in inner.items() if v not in ("", "None", "{}")]
    if not known:
        return ""
    if isinstance(value, Mapping):
        words = "; ".join(f"{_words(k.partition('.')[2])} {_value(k, v)}" for k, v in known)
    else:
        words = _value(*known[0])
    wide = ' class="whole"' if len(words) > 60 else ""
    return f"<div{wide}><dt>{text(_words(key))}</dt><dd>{text(words)}</dd></div>"


_KEYS = {
    "of": "samples in all",
    "matters": "alignment matters",
    "storage_gb_per_second": "plain reads, GB/s",
    "read_ahead_kb": "read ahead, KiB",
    "max_sectors_kb": "largest request, KiB",
    "nr_requests": "requests queued",
    "named": "strategies asked for",
    "timeout": "timeout, s",
    "in_place": "read as stored",
    "check": "values checked",
}
"""Facts whose own names say too little."""


def _words(key: str) -> str:
    return _KEYS.get(key) or re.sub("[_.]", " ", key.replace("nbytes", "bytes"))


def _value(key: str, value: str) -> str:
    """Return the value of a fact for people: bytes in a fitting unit."""
    sizes = key.endswith(("bytes", "buffer_size"))
    if sizes and value.isascii() and value.isdigit() and len(value) < 20:
        return show_nbytes(int(value))
    if re.fullmatch(r"\d+\.\d+", value):
        return f"{float(value):,.4g}"
    if re.fullmatch(r"\d{4,19}", value, re.ASCII):
        return f"{int(value):,}"
    return {"True": "yes", "False": "no"}.get(value, value)
