"""How it was measured: can it be trusted, what could a faster device bring, how to repeat it."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from gapmeter.report import head, tables
from gapmeter.report.figure import Row, Table, Value, written
from gapmeter.report.run import Run
from gapmeter.report.shell import Section, fill
from gapmeter.report.svg import Fragment, el, group
from gapmeter.report.where import no_ledger

_FILES = {
    "summary.json": "every figure of this page",
    "manifest.json": "what ran, with what, where",
    "verdict.json": "the verdict alone",
    "requests.parquet": "one row a request: stamps, tokens, outcome",
    "ledger.parquet": "one row a request and event: every stage",
    "gaps.parquet": "one row a token gap: every stage",
    "timeline.parquet": "whose nanoseconds each stretch of a wait was",
    "steps.parquet": "one row a step of the engine",
    "trace.json.gz": "open it in Perfetto",
    "hdr": "HdrHistogram V2 logs",
    "requests": "what the load generator recorded",
    "probe": "what the server's processes recorded",
    "telemetry": "samples of the device, the server's processes and its /metrics",
    "logs": "the server's own log",
}
_RESIDUAL = (
    "In time, and as a share of each request's own wait. Strict counts everything in transit as unexplained too."
)
_BRACKET = (
    "The lower end takes queues and other requests' steps out too, as if every request met an idle engine; the upper "
    "one leaves them as they are and only takes the forwards out, less the host's work that they hid."
)


def trust_section(run: Run) -> Section:
    """The residual of the ledgers and every validity rule with what it found."""
    checks: list[Row] = [
        [Value(c.rule, None, {"class_": "name"}), c.text, Value(c.word, None, {"class_": f"mark {c.css}"})]
        for c in head.checks(run.summary)
    ]
    validity = Table("Validity", ["rule", "what was found", "answer"], checks, words=3)
    parts = [
        el("h3", "Validity"), written(validity, run.provenance),
        el("h3", "Residual: what the ledger could not explain"), _residual(run),
    ]  # fmt: skip
    return Section("trust", "Can these figures be trusted?", group(parts), short="trust")


def _residual(run: Run) -> Fragment:
    rows = tables.residual_rows(run.summary)
    if not rows:
        return el("p", f"There is no ledger: {no_ledger(run.summary)}", class_="lead")
    names = [f"{p}{of}" for of in ("", ", share") for p in ("p50", "p99", "worst")]
    cells = [[row["event"], row["which"], *row["cells"]] for row in rows]
    table = Table("Residual", ["to the", "counted", *names], cells, words=2)
    return group([written(table, run.provenance), el("p", _RESIDUAL, class_="lead")])


def upgrade_section(run: Run) -> Section | None:
    """The bracket on what a faster device could bring."""
    rows = head.upgrade_rows(run.summary)
    if not rows:
        return None
    cells = [[row.metric, row.percentile, row.now, row.low, row.high] for row in rows]
    headers = ["metric", "percentile", "now", "lower end", "upper end"]
    table = Table("What a faster device could bring", headers, cells, css="compact")
    title = f"What a faster {run.summary['upgrade']['device']} could bring"
    lead = f"{head.upgrade_sentence(run.summary)} {_BRACKET}"
    return Section("upgrade", title, written(table, run.provenance), lead, "faster device")


def repeat_section(run: Run) -> Section:
    """How to run it again, and what it ran on."""
    manifest = run.manifest
    links = [(n, quote(n), text) for n, text in _FILES.items() if (run.folder.path / n).exists()]
    body = fill(
        "repeat.html",
        command=str(manifest.get("command", "")),
        facts=_facts(manifest),
        files=links,
        scenario=json.dumps(manifest.get("scenario"), indent=2, ensure_ascii=False),
        manifest=json.dumps(manifest, indent=1, ensure_ascii=False),
    )
    return Section("repeat", "Repeat it", body, short="repeat it")


def _facts(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    hardware, versions = manifest.get("hardware", {}), manifest.get("versions", {})
    placement, git = manifest.get("placement") or {}, manifest.get("git") or {}
    versions = {**versions, **manifest.get("target", {}).get("versions", {})}
    facts = [
        ("started", manifest.get("started_wall")),
        ("server", manifest.get("target", {}).get("url")),
        ("processor", f"{hardware.get('cpu')}, {hardware.get('cores')} cores" if hardware else None),
        ("memory", f"{hardware['memory_gib']} GiB" if "memory_gib" in hardware else None),
        ("GPU", ", ".join(hardware.get("gpus", [])) or "none"),
        ("system", hardware.get("system")),
        ("load generator ran on", _cores(placement.get("generator"))),
        ("server ran on", _cores(placement.get("server"))),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("commit", f"{git['commit'][:12]}{' with changes' if git.get('changed') else ''}" if git else None),
    ]
    return [(name, str(value)) for name, value in facts if value]


def _cores(numbers: list[int] | None) -> str | None:
    """By their numbers, which begin with 0."""
    return f"core{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}" if numbers else None
