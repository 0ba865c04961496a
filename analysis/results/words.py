"""What a result says in sentences, for people and programs that read ``summary.json``. Nothing of ours reads them."""

from __future__ import annotations

from collections.abc import Mapping

from gapmeter.analysis.results.codec import Result


class VerdictWords(Result):
    """``slo``: a sentence each, in the order of the answers."""

    headline: str
    slo: tuple[str, ...]


class Words(VerdictWords):
    """A sentence for each part of a result that has something to say; mappings are by metric."""

    trust: str
    steady: str
    drift: str | None
    closed_loop: str | None
    turns: str | None
    tail: Mapping[str, str]
    upgrade: Mapping[str, str]
    compute: Mapping[str, str]
    telemetry: str | None
    utilisation: str | None
    roofline: str | None
    cost: str
    energy: str
    value: str
