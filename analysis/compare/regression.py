"""Has a run become slower than its baseline by more than is allowed, and by more than chance?

Judged are the percentiles that the scenario's SLOs name. One has *regressed* when it grew by more than the limit and
the growth is beyond its interval: Holm's correction over the SLOs' percentiles, at 95 %, and beyond the load tester's
own floor. One that grew by more than the limit, but not beyond chance, is *undecided*: it fails nothing, and is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gapmeter.analysis.compare.claims import NAMES, holm, signed_share
from gapmeter.analysis.compare.differences import CONFIDENCE
from gapmeter.analysis.numbers import duration, share
from gapmeter.analysis.results.distribution import percentile_key
from gapmeter.report.comparison.words import difference, interval

REGRESSED, UNDECIDED, WITHIN, UNKNOWN = "REGRESSED", "UNDECIDED", "WITHIN", "NOT ESTIMABLE"
NOT_COMPARABLE = "NOT COMPARABLE"


def judge_regression(
    document: Mapping[str, Any], slos: Sequence[tuple[str, float]], limit: float, baseline: str
) -> dict[str, Any]:
    """``summary["regression"]`` from a comparison of a baseline (A) with a run (B).

    ``slos``: metric and percentile; ``limit``: the growth that is allowed, as a fraction. ``status`` is the worst
    row's, or NOT COMPARABLE, with ``sentence`` saying why.
    """
    part: dict[str, Any] = {"baseline": baseline, "limit": limit, "rows": []}
    if not document["comparable"]:
        return part | {"status": NOT_COMPARABLE, "sentence": document["headline"]}
    figures = document["comparisons"][0]["metrics"]
    named = [(m, p, figures[m]["percentiles"][percentile_key(p)]) for m, p in dict.fromkeys(slos)]
    known = [i for i, (_, _, figure) in enumerate(named) if figure["p"] is not None]
    adjusted = dict(zip(known, holm([named[i][2]["p"] for i in known]), strict=True))
    rows = [_row(m, p, figure, adjusted.get(i), limit) for i, (m, p, figure) in enumerate(named)]
    worst = next(
        status for status in (REGRESSED, UNDECIDED, UNKNOWN, WITHIN) if any(r["status"] == status for r in rows)
    )
    told = [row["sentence"] for row in rows if row["status"] == worst]
    changed = document["comparisons"][0]["changed"]
    stage = f"; {changed['sentence']}" if worst == REGRESSED and changed and changed["stage"] else ""
    return part | {"rows": rows, "status": worst, "sentence": f"{'; '.join(told)}{stage}"}


def _row(metric: str, percentile: float, figure: Mapping[str, Any], p: float | None, limit: float) -> dict[str, Any]:
    name = f"{metric} p{percentile:g}"
    status = _status(figure, p, limit)
    return {
        "name": name,
        "status": status,
        "p_adjusted": p,
        **{key: figure[key] for key in ("a_ms", "b_ms", "difference_ms", "ci_ms", "relative", "relative_ci", "why")},
        "sentence": _sentence(f"{NAMES[metric]} p{percentile:g}", figure, status, limit),
    }


def _status(figure: Mapping[str, Any], p: float | None, limit: float) -> str:
    if p is None or figure["relative"] is None:
        return UNKNOWN
    if figure["relative"] <= limit:
        return WITHIN
    beyond = p <= 1 - CONFIDENCE and abs(figure["difference_ms"]) > (figure.get("floor_ms") or 0.0)
    return REGRESSED if beyond else UNDECIDED


def _sentence(name: str, figure: Mapping[str, Any], status: str, limit: float) -> str:
    if status == UNKNOWN:
        return f"{name} cannot be compared: {figure['why'] or 'its baseline is 0'}"
    grew = f"{name} {duration(figure['a_ms'])} -> {duration(figure['b_ms'])}, {signed_share(figure['relative'])}"
    told = f"{grew} ({difference(figure)}, 95 % interval {interval(figure)}), allowed +{share(limit)}"
    return (
        told
        + {
            REGRESSED: ": a regression",
            UNDECIDED: ": more than is allowed, but not beyond chance; longer runs, or several, would tell",
            WITHIN: "",
        }[status]
    )
