"""A server that failed from a moment on is told from one that fails now and then, and misses its SLO for it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from gapmeter.analysis.judge import validity, verdict
from gapmeter.analysis.judge.evidence import Evidence
from gapmeter.analysis.judge.outage import CHANCE, find_row, outage_of
from gapmeter.analysis.judge.warnings import outage_warning
from gapmeter.analysis.results.requests import Outage
from gapmeter.report.slo import slo_sentence
from tests.kit.runs import slo

MS = 1_000_000


def ended(outcomes: list[str]) -> pd.DataFrame:
    """A request every 100 ms."""
    due = np.arange(len(outcomes), dtype=np.int64) * 100 * MS + 10**12
    first = pd.array([at + 20 * MS if out == "ok" else None for at, out in zip(due, outcomes, strict=True)], "Int64")
    return pd.DataFrame({
        "due_ns": due, "attempt_due_ns": due, "sent_ns": due, "turn": 0,
        "first_token_ns": first, "last_token_ns": first, "end_ns": due + 30 * MS,
        "output_tokens": 1, "output_tokens_asked": 1, "outcome": outcomes,
        "status": 0, "token_ns": None,
        "chunk_tokens": None, "prompt_tokens": 1, "prompt_tokens_asked": 1,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("outcomes", "found"),
    [
        (["ok"] * 10 + ["http_5xx"] * 10, (1.0, None)),
        (["ok"] * 12 + ["cut"] + ["refused"] * 7, (1.2, None)),
        (["ok"] * 40 + ["cut"] * 2 + ["refused"] * 26 + ["ok"] * 32, (4.0, 6.8)),
        (["ok"] * 40 + ["timeout"] * 28 + ["ok"] * 32, None),
        (["ok"] * 40 + ["timeout"] * 16 + ["ok"] * 144 + ["cut"] * 10, (20.0, None)),
        (["ok", "http_5xx"] * 30, None),
        (["http_5xx"] * 20, None),
        (["ok"] * 19 + ["cut"], None),
        (["ok"] * 50 + ["aborted"] * 20, None),
        (["ok"] * 10 + ["cut"] * 10 + ["aborted"] * 3, (1.0, None)),
        (["ok"] * 10 + ["cut"] * 5 + ["aborted"] * 3 + ["cut"] * 5, (1.0, None)),
    ],
    ids=[
        "503 from the middle", "died", "restarted", "a burst", "a burst, then died", "every other", "never served",
        "the last", "ended", "died, then ended", "died, some ended",
    ],
)  # fmt: skip
def test_a_server_that_was_gone_is_told_with_its_moment(
    outcomes: list[str], found: tuple[float, float | None] | None
) -> None:
    outage = outage_of(find_row(ended(outcomes), 10**12))
    assert (None if outage is None else (outage.from_s, outage.until_s)) == found
    limits = [slo("errors", None, 0.05), slo("ttft", 90, 200)]
    answers = verdict.judge(limits, ended(outcomes), {}, outage=outage)
    if outage is not None:
        assert [answer.status for answer in answers] == ["FAIL", "FAIL"]
        assert f"from {outage.from_s:.1f} s" in slo_sentence(answers[0])
        assert not any(check.rule == "errors" and check.status == "broken" for check in validity.check_run(
            ended(outcomes), Evidence("open", "constant"), answers[1:], outage=outage))  # fmt: skip


def test_a_server_that_still_answered_when_the_run_was_ended_had_recovered() -> None:
    requests = ended(["ok"] * 40 + ["http_5xx"] * 28 + ["aborted"] * 8)
    assert outage_of(find_row(requests, 10**12)) is not None
    streaming = requests["outcome"] == "aborted"
    requests.loc[streaming, "first_token_ns"] = requests.loc[streaming, "due_ns"] + 20 * MS
    row = find_row(requests, 10**12)
    assert row is not None
    assert (row.until_s, outage_of(row)) == (6.8, None)


def test_a_row_of_failures_that_may_have_been_an_overload_is_told_and_decides_nothing() -> None:
    requests = ended(["ok"] * 40 + ["http_5xx"] * 28 + ["ok"] * 32)
    assert outage_of(find_row(requests, 10**12)) is None
    (told,) = outage_warning(find_row(requests, 10**12))
    assert told.text == "from 4.0 s until 6.8 s all 28 requests failed (28 http_5xx)"


@pytest.mark.parametrize(
    ("percentile", "failed", "count"), [(80, 40, 200), (90, 20, 200), (95, 10, 200), (99.9, 1, 1000)]
)
def test_an_outage_misses_no_limit_that_as_many_may_exceed_as_failed(
    percentile: float, failed: int, count: int
) -> None:
    requests = ended(["ok"] * (count // 2) + ["http_5xx"] * failed + ["ok"] * (count - count // 2 - failed))
    limits, outage = [slo("ttft", percentile, 10_000)], Outage.model_construct(requests=failed)
    (answer,) = verdict.judge(limits, requests, {}, outage=outage)
    assert (answer.beyond, answer.basis == "outage") == (failed, False)


def test_random_failures_are_hardly_ever_called_an_outage() -> None:
    rng = np.random.default_rng(4)
    runs = [np.where(rng.random(60) < rng.uniform(0.05, 0.9), "refused", "ok").tolist() for _ in range(2000)]
    assert sum(outage_of(find_row(ended(run), 10**12)) is not None for run in runs) <= 2000 * CHANCE + 4


@pytest.mark.parametrize(
    ("outcome", "status", "flag"),
    [
        ("http_4xx", 401, "--api-key KEY"),
        ("http_4xx", 302, "--url with that address"),
        ("http_4xx", 429, "--set load.rate=5"),
        ("refused", 0, ""),
        ("http_5xx", 500, ""),
        ("http_5xx", 503, "--set load.rate=5"),
        ("timeout", 0, "--set load.rate=5"),
        ("malformed", 200, ""),
        ("cut", 0, ""),
    ],
)
def test_what_to_try_fits_what_failed(outcome: str, status: int, flag: str) -> None:
    requests = ended(["ok"] * 10 + [outcome] * 10).assign(status=status)
    evidence = Evidence("open", "constant", 10.0)
    told = validity.warnings_of(validity.check_run(requests, evidence), evidence, requests)
    assert next(one.flag for one in told if one.code == "errors") == flag


@pytest.mark.parametrize(
    ("could_be_plain", "status", "said", "flag"),
    [
        (True, 400, "Unrecognized request argument supplied: ignore_eos", "--set server.dialect=plain"),
        (True, 422, '["body", "min_tokens"]: Extra inputs are not permitted', "--set server.dialect=plain"),
        (True, 400, "the prompt is too long", ""),
        (True, 401, "min_tokens", "--api-key KEY"),
        (False, 400, "Unrecognized request argument supplied: ignore_eos", ""),
    ],
)
def test_a_server_that_refuses_our_fields_is_to_be_asked_plainly(
    could_be_plain: bool, status: int, said: str, flag: str
) -> None:
    requests = ended(["http_4xx"] * 20).assign(status=status, error=said)
    evidence = Evidence("open", "constant", 10.0, could_be_plain=could_be_plain)
    told = validity.warnings_of(validity.check_run(requests, evidence), evidence, requests)
    assert next(one.flag for one in told if one.code == "errors") == flag
