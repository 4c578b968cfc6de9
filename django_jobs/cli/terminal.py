"""The output of the commands: tables and lines for people, JSON for machines, progress on a terminal only."""

from __future__ import annotations

import json
import shutil
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from django_jobs.cli.errors import UsageError
from django_jobs.text import printable

GAP = "  "


class Terminal:
    """The streams of one command."""

    def __init__(self, out: Any, err: Any, *, ask: TextIO, as_json: bool = False) -> None:
        self.as_json = as_json
        self._out = out
        self._err = err
        self._ask = ask
        self._progress = ""

    def line(self, text: str) -> None:
        """Write one line for people; nothing in JSON mode."""
        if not self.as_json:
            self._out.write(_fit(printable(text), self._width()))

    def text(self, text: str) -> None:
        """Write lines as they are, however long; nothing in JSON mode."""
        if not self.as_json:
            self._out.write("\n".join(printable(line) for line in text.splitlines()))

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write aligned columns, each line cut to the width of a terminal; columns without any value are left out."""
        cells = [[printable(cell) for cell in row] for row in rows]
        shown = [index for index in range(len(headings)) if any(row[index] for row in cells)]
        lines = [[headings[index] for index in shown], *([row[index] for index in shown] for row in cells)]
        widths = [max(_columns(line[place]) for line in lines) for place in range(len(shown))]
        for line in lines:
            padded = [cell + " " * (width - _columns(cell)) for cell, width in zip(line, widths, strict=True)]
            self.line(GAP.join(padded).rstrip())

    def json(self, value: Any, *, indent: int | None = 2) -> None:
        """Write one JSON document in JSON mode; with indent=None it is one line."""
        if self.as_json:
            self._out.write(json.dumps(value, indent=indent, default=str))

    def note(self, text: str) -> None:
        """Write one line to the error stream, in JSON mode as well."""
        self.end_progress()
        self._err.write(printable(text))

    def progress(self, text: str) -> None:
        """Show how far a command has come, on one line that is overwritten; on a terminal only."""
        if self._err.isatty():
            self._err.write(f"\r{text.ljust(len(self._progress))}", ending="")
            self._err.flush()
            self._progress = text

    def end_progress(self, *, keep: bool = False) -> None:
        """Erase the line of progress, or keep it where a command was stopped: it says how far that came."""
        if self._progress:
            self._err.write("\n" if keep else f"\r{' ' * len(self._progress)}\r", ending="")
            self._progress = ""

    def confirm(self, question: str, *, yes: bool) -> bool:
        """Return the answer to a question; `yes` answers it beforehand. Raises UsageError with nobody to ask."""
        if yes:
            return True
        if not self._ask.isatty():
            raise UsageError(f"{question} Add --yes, as there is no terminal to ask on.")
        self._err.write(f"{printable(question)} [y/N] ", ending="")
        self._err.flush()
        return self._ask.readline().strip().lower() in {"y", "yes"}

    def flush(self) -> None:
        """Flush the output."""
        flush: Callable[[], None] | None = getattr(self._out, "flush", None)
        if flush is not None:
            flush()

    def _width(self) -> int | None:
        # A pipe or a file gets everything.
        return shutil.get_terminal_size().columns if self._out.isatty() else None


def _columns(text: str) -> int:
    """Return how many columns a text takes: wide characters take two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def _fit(text: str, width: int | None) -> str:
    if width is None or _columns(text) <= width:
        return text
    while text and _columns(text) > max(width - 1, 0):
        text = text[: -max(1, (_columns(text) - width) // 2)]
    return text + "…"
