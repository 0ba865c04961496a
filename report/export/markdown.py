"""Parts of Markdown that the summaries of sweeps and searches share."""

from __future__ import annotations

from collections.abc import Mapping

from gapmeter.analysis.provenance import Provenance


def origin_line(known: Mapping[str, str] | None) -> str:
    """Where the figures are from, small; a block that is copied on takes it along."""
    return f"<sub>{plain(Provenance(**known).line())}</sub>" if known else ""


def plain(text: str) -> str:
    """Text that Markdown and HTML leave as it is, on one line."""
    flat = " ".join(text.split())
    return flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
