"""A capacity search's folder as values: what was asked, and every trial from its own run's folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.capacity.counts import count_all, count_good, promises_of
from gapmeter.analysis.capacity.evidence import find, plan_looks
from gapmeter.analysis.capacity.search import Goal
from gapmeter.analysis.capacity.trial import Count, Outcome, Trial
from gapmeter.analysis.requests.metrics import measured_requests, request_values_ns
from gapmeter.report import bridge

# Rules of validity.py that speak of the load tester's own limits; and others without which nothing was measured.
CLIENT_RULES = ("delivered", "dispersion", "lag", "loop_lag", "client_cpu", "token_rate", "request_rate")
FIRST_LOOK = 20  # an overloaded server is told from so few
_LATENESS, _LATE_SHARE = ("lag", "loop_lag"), 0.1
_OTHER_RULES = ("requests", "records", "rate")


@dataclass(frozen=True, slots=True)
class Measured:
    """A trial with the summary of its run, None where there is none."""

    trial: Trial
    summary: Mapping[str, Any] | None


def goal_of(manifest: Mapping[str, Any]) -> Goal:
    """What the manifest of a search says was searched."""
    asked = manifest["capacity"]
    return Goal(
        promises_of(manifest["slo"]), asked["start"], asked["confidence"], asked["within"], asked["longest"],
        budget_s=asked["budget_s"], lost_s=asked.get("lost_s", 8.0), first_look=FIRST_LOOK,
    )  # fmt: skip


def read_trials(folder: Path, manifest: Mapping[str, Any]) -> list[Measured]:
    """Every trial that the manifest lists, in the order in which they were run."""
    promises = promises_of(manifest["slo"])
    out = []
    for noted in manifest["capacity"]["trials"]:
        outcome, summary = read_outcome(folder / noted["folder"], manifest["slo"], noted)
        looks = plan_looks(promises, noted["looks"][-1], noted["looks"][0])
        finding = find(promises, outcome.counts, looks[min(outcome.looks, len(looks)) - 1])
        out.append(Measured(Trial(float(noted["rate"]), outcome, finding), summary))
    return out


def read_outcome(
    path: Path, slos: list[Mapping[str, Any]], noted: Mapping[str, Any]
) -> tuple[Outcome, Mapping[str, Any] | None]:
    """What came of one trial: counted anew from its table of requests, validity from its summary."""
    died, interrupted = str(noted.get("died") or ""), bool(noted.get("interrupted"))
    common = {"seconds": float(noted["seconds"]), "died": died, "interrupted": interrupted, "name": noted["folder"]}
    try:
        summary = bridge.read_run(path)
        requests = pd.read_parquet(path / "requests.parquet")
    except (OSError, ValueError):
        empty = tuple(Count(0.0, 0, 0.0) for _ in slos)
        why = str(noted.get("reason") or "it could not be analysed")
        return Outcome(empty, 0, 0, good=0, good_n_eff=0.0, invalid=why, **common), None
    measured = measured_requests(requests)
    looks, ended = noted["looks"], noted.get("ended", len(noted["looks"]))
    if ended < len(looks):  # what came after the look that ended it is no part of its verdict
        measured = measured[measured["due_ns"] >= noted["from_ns"]].head(looks[ended - 1])
    good, worth = count_good(slos, measured)
    invalid, client = validity(summary, slos)
    if interrupted:
        invalid = invalid or "it was interrupted"
    outcome = Outcome(
        count_all(slos, measured, float(noted["rate"])), int(summary["counts"]["issued"]), len(measured), good=good,
        good_n_eff=worth, looks=ended,
        in_flight=_in_flight(measured, float(noted["rate"])), invalid=invalid, client_limit=client, **common,
    )  # fmt: skip
    return outcome, summary


def _in_flight(measured: pd.DataFrame, rate: float) -> float:
    """Requests in flight on average, by Little's law; infinite where one failed, since it may have stayed for long."""
    took = request_values_ns(measured, "e2e")
    return rate * float(took.mean()) / 1e9 if len(took) and not np.isnan(took).any() else math.inf


def validity(summary: Mapping[str, Any], slos: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """Why a trial is no measurement ("" if it is one), and whether that is the load tester's own limit.

    Errors of the server do not make a trial invalid: they count against the SLOs. Lateness of the load tester is
    inside every latency that a verdict was made from, so it is weighed against the SLOs' limits, not against what
    happened to be measured: beyond a tenth of the tightest it may be what fails.
    """
    tightest = min((float(slo["limit_ns"]) for slo in slos if slo.get("limit_ns")), default=0.0)
    broken = [
        check
        for check in summary["checks"]
        if check["status"] == "broken"
        and not (check["rule"] in _LATENESS and (check["value"] or 0.0) <= _LATE_SHARE * tightest)
    ]
    for rules, client in ((_OTHER_RULES, False), (CLIENT_RULES, True)):
        found = [check["text"] for check in broken if check["rule"] in rules]
        if found:
            return "; ".join(found), client
    return "", False
