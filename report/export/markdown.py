"""The summary as Markdown, short enough for a comment on a pull request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gapmeter.analysis.ledger.tail import owner_of
from gapmeter.analysis.numbers import count, duration, rate, share
from gapmeter.analysis.provenance import Provenance
from gapmeter.analysis.results.distribution import percentile_key
from gapmeter.analysis.stages import owner_words
from gapmeter.analysis.stats.hdr import PERCENTILES
from gapmeter.report.export.junit import slo_interval, slo_value
from gapmeter.report.head import users

_SMALL = 0.01  # stages below this share of both bands are summed into one line
_NAMES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "E2E"}


def markdown(summary: Mapping[str, Any]) -> str:
    """A heading with the verdict, the SLOs, where the time goes, percentiles, warnings. Ends with a line feed."""
    parts = [
        f"### {summary['verdict']}: {plain(summary['name'] or 'run')}",
        plain(summary["headline"]),
        _load(summary),
        _slos(summary["slo"]),
        _tail(summary["tail"], str((summary.get("compute") or {}).get("device", "GPU"))),
        _metrics(summary["metrics"]),
        _regression(summary.get("regression")),
        _warnings(summary["warnings"]),
        origin_line(summary.get("provenance")),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def origin_line(known: Mapping[str, str] | None) -> str:
    """Where the figures are from, small; a block that is copied on takes it along."""
    return f"<sub>{plain(Provenance(**known).line())}</sub>" if known else ""


def _load(summary: Mapping[str, Any]) -> str:
    load, counts = summary["load"], summary["counts"]
    closed = f"{users(load)}, closed loop"
    how = f"{rate(load['delivered_rate'])}, open loop" if load["loop"] == "open" else closed
    failed, trust = sum(counts["failed"].values()), summary["trust"]["sentence"]
    size = f"{load['window_s']:.0f} s, n = {count(counts['measured'])}, {count(failed)} failed"
    known = summary.get("closed_loop")
    told = known["sentence"] if known else summary["words"]["turns"]
    caveat = f" {plain(told)}." if told else ""
    return f"{how}, {size}. Trust: {plain(trust)}.{caveat}"


def _slos(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    lines = [
        (row["status"], f"`{row['text']}`", slo_value(row), slo_interval(row), count(row["count"]), row["stage"] or "")
        for row in rows
    ]
    return _table(("", "SLO", "measured", "95 % interval", "n", "what slow ones wait for"), lines)


def _tail(tail: Mapping[str, Any], device: str) -> str:
    if tail["metric"] is None:
        return ""
    found = tail[tail["metric"]]
    typical, slow = found["typical"], found["slow"]
    lines: list[tuple[str, ...]] = []
    small = (0.0, 0.0)
    for stage, usual in typical["stages_ms"].items():
        late = slow["stages_ms"][stage]
        if max(abs(usual) / typical["total_ms"], abs(late) / slow["total_ms"]) < _SMALL:
            small = (small[0] + usual, small[1] + late)
        else:
            lines.append(
                (stage, owner_words(owner_of(stage), device), duration(usual), duration(late), duration(late - usual))
            )
    if any(small):
        lines.append(("the rest", "", *(duration(ms) for ms in (*small, small[1] - small[0]))))
    sums = (typical["total_ms"], slow["total_ms"], found["difference_ms"])
    lines.append(("**sum**", "", *(duration(ms) for ms in sums)))
    name = _NAMES[tail["metric"]]
    return _table((f"{name}: where it goes", "owner", "typical (p45-p55)", "slow (p98.5+)", "difference"), lines)


def _metrics(metrics: Mapping[str, Mapping[str, Any]]) -> str:
    keys = [percentile_key(p) for p in PERCENTILES]
    lines = [
        (
            _NAMES[name],
            *(duration(known[f"{key}_ms"]) for key in keys),
            duration(known["max_ms"]),
            count(known["count"]),
        )
        for name, known in metrics.items()
    ]
    return _table(("", *(f"p{p:g}" for p in PERCENTILES), "max", "n"), lines)


def _regression(regression: Mapping[str, Any] | None) -> str:
    """How the run compares with its baseline, where it was held against one."""
    if regression is None:
        return ""
    head = f"**{regression['status']}** against {plain(regression['baseline'])}: {plain(regression['sentence'])}."
    rows = [
        (row["status"], row["name"], duration(row["a_ms"]), duration(row["b_ms"]),
         " .. ".join(duration(end) for end in row["ci_ms"]) if row["ci_ms"] else "not estimable",
         share(row["relative"]))
        for row in regression["rows"]
    ]  # fmt: skip
    if not rows:
        return head
    headers = ("", "percentile", "baseline", "now", "difference, 95 % interval", "relative")
    return f"{head}\n\n{_table(headers, rows)}"


def _warnings(warnings: Iterable[Mapping[str, Any]]) -> str:
    return "\n".join(
        f"- {plain(w['text'])}."
        + (f" Likely: {plain(w['cause'])}." if w["cause"] else "")
        + (f" Try `{w['flag']}`." if w["flag"] else "")
        for w in warnings
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def plain(text: str) -> str:
    """Text that Markdown and HTML leave as it is, on one line."""
    flat = " ".join(text.split())
    return flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
