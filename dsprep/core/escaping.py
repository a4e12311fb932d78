r"""Text from elsewhere made safe to print: names, values and paths of datasets may hold anything.

A terminal obeys what it is sent: escape sequences move the cursor, rewrite lines that stand there
already, or set the clipboard; bidirectional overrides turn the reading order around. Such
characters are shown as Python would spell them, as in ``\x1b``.
"""

from __future__ import annotations

import json
import re

_DOUBTFUL = re.compile("[^\n -~]")


def printable(text: str) -> str:
    r"""Return `text` as one line without anything that could steer a terminal.

    Control characters (newlines among them), escape sequences, bidirectional overrides, other
    invisible characters and lone surrogates are escaped.

    >>> printable("red \x1b[31m")
    'red \\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def printable_json(text: str) -> str:
    """Return JSON with the same content whose strings are printable; newlines lay it out."""

    def escaped(match: re.Match[str]) -> str:
        c = match.group()
        if c.isprintable():
            return c
        if c == "\x7f":  # which JSON takes to be a letter
            return "\\u007f"
        return json.dumps(c)[1:-1]

    return _DOUBTFUL.sub(escaped, text)
