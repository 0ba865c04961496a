"""The page around the sections, the same for every kind of page: head, policy, style, script, provenance."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from gapmeter.analysis.provenance import Provenance
from gapmeter.report import figure, marks
from gapmeter.report.svg import NOTHING, Fragment, el, group


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a page. ``key`` is its id in the page; ``data`` is given to the page's script as JSON.

    ``body`` is markup (build it with ``svg.el``, ``figure`` or ``fill``, all of which escape); ``short`` names it in
    the contents, "" leaves it out there; without a ``title`` it has no heading.
    """

    key: str
    title: str
    body: Fragment
    lead: str = ""
    short: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


def page_shell(
    title: str,
    sections: Sequence[Section | None],
    provenance: Provenance,
    *,
    header: Fragment = NOTHING,
    scripts: Sequence[str] = (),
    policy: str = "",
    version: str = "",
) -> str:
    """A whole page that asks the network for nothing; sections that are None are left out.

    ``title`` is text; ``header`` stands above the contents. ``scripts`` are further sources of the page's own,
    and ``policy`` further directives of its content-security policy (for a page that a server hands out).
    """
    sources = [asset("report.js"), *scripts]
    allowed = " ".join(f"'{_digest(source)}'" for source in sources)
    shown = [section for section in sections if section is not None]
    return fill(
        "shell.html",
        title=title,
        header=header,
        sections=shown,
        provenance=provenance,
        policy=f"script-src {allowed}; {policy}".strip("; "),
        style=Markup(asset("report.css")),
        scripts=[Markup(source) for source in sources],
        definitions=marks.definitions(),
        data={section.key: _data(section.data) for section in shown if section.data},
        version=version,
    )


def how_section(manifest: Mapping[str, Any], title: str, text: str) -> Section:
    """How a page's runs came about: in words, the command, the scenario."""
    parts = [
        el("p", text), el("pre", str(manifest.get("command", ""))),
        el("details", el("summary", "the scenario"), el("pre", json.dumps(manifest["scenario"], indent=2))),
    ]  # fmt: skip
    return Section("how", title, group(parts), short="how")


def fill(template: str, **context: Any) -> Fragment:
    """A template of ``assets`` filled in. Text is escaped; only fragments are taken as markup."""
    return Markup(_environment().from_string(asset(template)).render(**context))  # the template escapes


@functools.lru_cache(maxsize=32)
def asset(name: str) -> str:
    """A file that is shipped with the page."""
    found = files("gapmeter.report") / "assets"
    for part in name.split("/"):
        found = found / part
    return found.read_text(encoding="utf-8")


@functools.lru_cache(maxsize=1)
def _environment() -> Environment:
    made = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.globals.update(figure=figure.figure, written=figure.written, folded=figure.folded, origin=figure.origin)
    return made


def _digest(source: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


def _data(value: Mapping[str, Any]) -> Markup:
    """JSON that cannot end its element: no ``<``, no ``>``, no ``&``."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)  # three signs less, it is no markup
