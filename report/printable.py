"""Other people's words on a terminal: a server's, a folder's, a worker's."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    """The text with what a terminal would obey instead of showing it written out: ESC as ``\\x1b``."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if is_shown(char) else char.encode("unicode_escape").decode() for char in text)


def is_shown(char: str) -> bool:
    """Whether a terminal shows it: spaces of every width, the tab and the end of a line among them."""
    return char.isprintable() or char in "\t\n" or unicodedata.category(char) == "Zs"
