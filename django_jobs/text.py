"""Make text storable in every database (no NUL, no lone surrogates, bounded), or fit for one line of a log."""

from __future__ import annotations

import re
from collections.abc import Sequence

# PostgreSQL refuses NUL in text; neither JSONB nor UTF-8 allow lone surrogates.
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_REPLACEMENT = "\ufffd"


def clean_text(value: object, limit: int) -> str:
    """Return `value` as storable text of at most `limit` characters; "…" marks a cut.

    Never raises: an object whose `str()` fails gives "<str() failed>".
    """
    text = _as_text(value)
    if len(text) > limit:
        text = text[: max(limit - 1, 0)] + "…"[:limit]
    return storable(text)


def clean_middle(value: object, limit: int) -> str:
    """Return `value` as storable text of at most about `limit` characters; a marker replaces a cut middle."""
    text = _as_text(value)
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
    return storable(text)


def some(names: Sequence[object], most: int) -> str:
    """Return the first `most` of these, separated by commas, with "…" for the others."""
    return ", ".join([*map(str, names[:most]), *(["…"] if len(names) > most else [])])


def one_line(error: BaseException) -> str:
    """Return the text of an error without line breaks, or the name of its class if there is no text."""
    return " ".join(str(error).split()) or type(error).__name__


def printable(text: str) -> str:
    """Return the text without control characters, which a terminal would obey: keys and messages come from anywhere."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else " " if char in "\t\n\r" else "\N{REPLACEMENT CHARACTER}" for char in text
    )


def storable(text: str) -> str:
    """Return the text with every character replaced that some database refuses."""
    if text.isascii() and "\0" not in text:
        return text
    return _UNSTORABLE.sub(_REPLACEMENT, text)


def _as_text(value: object) -> str:
    try:
        text = value if isinstance(value, str) else str(value)
        # A subclass of str may override anything; make it a plain string.
        return text if type(text) is str else str.__getitem__(text, slice(None))
    except BaseException:  # noqa: BLE001 - str() of a user's object may raise anything
        return "<str() failed>"
