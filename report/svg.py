"""Builds SVG as text. Values are escaped here, so that no caller has to remember to.

A chart's <svg> is exactly its plot area: horizontal positions are per cent of it, vertical ones pixels, and axis
labels hang out of it (``overflow: visible``). It therefore follows the page's width while its text keeps its size.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

Fragment = Markup
NOTHING = Markup("")
_escapes = re.compile("[&<>\"']").search  # most texts have none, and a page has a hundred thousand


def el(name: str, /, *children: object, **attributes: object) -> Fragment:
    """One element. ``_`` in an attribute's name stands for ``-``, a trailing one for nothing; None leaves it out.

    Text children and attribute values are escaped; fragments are taken as they are.
    """
    written = "".join(
        [
            f' {_attribute(key)}="{_number(value) if isinstance(value, float) else _escaped(value)}"'
            for key, value in attributes.items()
            if value is not None
        ]
    )
    return _fragment(f"<{name}{written}>{''.join(map(_escaped, children))}</{name}>")


def group(parts: Iterable[object]) -> Fragment:
    """One after the other; texts are escaped."""
    return _fragment("".join(map(_escaped, parts)))


def _escaped(part: object) -> str:
    if isinstance(part, Markup):
        return part
    text = str(part)
    return escape(text) if _escapes(text) else text


def _fragment(escaped: str) -> Fragment:
    """As ``Markup(escaped)``, which would first ask whether it is one."""
    return str.__new__(Markup, escaped)


@functools.lru_cache(maxsize=256)
def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def percent(fraction: float) -> str:
    """A horizontal position or width: a fraction of the plot area."""
    return f"{_number(round(100 * fraction, 3))}%"


def path(points: Sequence[tuple[float, float]], closed: bool = False) -> str:
    """The ``d`` of a polyline through ``points``."""
    return "M" + "L".join([f"{_number(x)} {_number(y)}" for x, y in points]) + ("Z" if closed else "")


def stretched(height: float, *children: Fragment) -> Fragment:
    """Paths drawn in a box 1000 wide that is stretched to the plot's width (strokes keep theirs)."""
    return el(
        "svg", *children, viewBox=f"0 0 1000 {_number(height)}", preserveAspectRatio="none", width="100%",
        height=height, class_="stretch",
    )  # fmt: skip


def _number(value: float) -> str:
    """With at most two decimals and no needless zeros: most of a chart's bytes are coordinates."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
