"""How a stage looks: its color, its hatch, its words. The same in every picture of the page."""

from __future__ import annotations

from collections.abc import Iterable

from gapmeter.analysis.stages import BY_NAME, STAGES, UNEXPLAINED, color, owner_of, owner_words
from gapmeter.report.svg import Fragment, el

HATCHED = "#8A8A8A"

# Where it is not the key with spaces.
_WORDS = {"other_step": "others' steps", "input_prep": "input preparation", "output": "output to API"}


def words(stage: str) -> str:
    """A stage's name for people."""
    return _WORDS.get(stage, stage.replace("_", " "))


def owner(stage: str, device: str) -> str:
    """Who owns a stage, for people; ``device`` is what computed the forwards (see ``owner_words``)."""
    return owner_words(owner_of(stage), device)


def with_owner(stage: str, device: str) -> str:
    """``queue (contention)``."""
    return f"{words(stage)} ({owner(stage, device)})"


def kind(stage: str) -> str:
    return BY_NAME[stage].kind if stage in BY_NAME else "the rest"


def paint(stage: str) -> str:
    """A stage's color, or for the residual and transit stages a hatch of it."""
    return f"url(#hatch-{stage})" if stage == UNEXPLAINED or kind(stage) == "transit" else color(stage)


def ink(fill: str) -> str:
    """Black or white, whichever reads better on a color (WCAG relative luminance); on a hatch the page's own ink."""
    if fill.startswith("url("):
        return "var(--ink)"
    channels = [int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return "#000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else "#fff"


def definitions() -> Fragment:
    """The hatches, once a page: in its owner's color for transit, gray for the residual."""
    hatches = [_hatch(f"hatch-{s.name}", color(s.name), 45) for s in STAGES if s.kind == "transit"]
    hatches.append(_hatch("hatch-unexplained", HATCHED, -45))
    return el("svg", el("defs", *hatches), width=0, height=0, class_="defs", aria_hidden="true", focusable="false")


def _hatch(name: str, line: str, angle: int) -> Fragment:
    return el(
        "pattern",
        el("rect", width=6, height=6, class_="hatch-ground"),
        el("rect", width=6, height=6, fill=line, opacity="0.18"),
        el("rect", width=2.4, height=6, fill=line),
        id=name, width=6, height=6, patternUnits="userSpaceOnUse", patternTransform=f"rotate({angle})",
    )  # fmt: skip


def swatch(stage: str) -> Fragment:
    """A small square in the paint of a stage."""
    return _square(paint(stage))


def key(entries: Iterable[tuple[str, str]]) -> Fragment:
    """What colors stand for, where they are no stage's: (fill, words)."""
    shown = [el("span", _square(fill), words, class_="owner-key") for fill, words in entries]
    return el("p", *shown, class_="lead key")


def _square(fill: str) -> Fragment:
    box = el("rect", width=12, height=12, rx=2, fill=fill, class_="segment")
    return el("svg", box, width=12, height=12, class_="swatch", aria_hidden="true")
