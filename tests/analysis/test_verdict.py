"""An SLO passes, fails or stays undecided exactly when the evidence says so."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from gapmeter.analysis.judge import verdict
from gapmeter.analysis.results.run import FAIL, INCONCLUSIVE, INVALID, PASS, SloAnswer, Verdict
from gapmeter.analysis.stats.series import Series
from gapmeter.report.slo import brief_answer, slo_interval, slo_sentence, slo_value
from gapmeter.scenarios.slo import Slo
from tests.kit.runs import slo

MS = 1_000_000


def answers(ttft_ms: list[float] | np.ndarray[Any, Any], failed: int = 0, gap_ms: float = 10.0) -> pd.DataFrame:
    """Requests due every 100 ms with these TTFTs, two tokens each, independent order; then failed ones among them."""
    ttft = np.concatenate([np.asarray(ttft_ms, dtype=float), np.full(failed, np.nan)])
    ttft = np.random.default_rng(0).permutation(ttft)
    due = np.arange(len(ttft), dtype=np.int64) * 100 * MS + 10**12
    good = ~np.isnan(ttft)
    first = due + (np.nan_to_num(ttft) * MS).astype(np.int64)
    last = first + int(gap_ms * MS)

    def known(at: np.ndarray[Any, Any]) -> Any:
        return pd.array(np.where(good, at, -1), dtype="Int64")

    return pd.DataFrame(
        {
            "request_id": [f"r{i}" for i in range(len(ttft))],
            "due_ns": due,
            "sent_ns": due,
            "first_token_ns": known(first),
            "last_token_ns": known(last),
            "end_ns": np.where(good, last, due + 10**9),
            "output_tokens": 2,
            "output_tokens_asked": 2,
            "outcome": np.where(good, "ok", "http_5xx"),
            "token_ns": [[int(f), int(e)] if g else None for f, e, g in zip(first, last, good, strict=True)],
            "measured": True,
        }
    )


def one(rule: Slo, requests: pd.DataFrame) -> SloAnswer:
    return verdict.judge([rule], requests, {})[0]


@pytest.mark.parametrize(
    ("slow", "of", "expected"),
    [
        (0, 298, INCONCLUSIVE),
        (0, 367, PASS),
        (0, 500, PASS),
        (1, 540, INCONCLUSIVE),
        (1, 1500, PASS),
        (10, 1000, INCONCLUSIVE),
        (6, 60, FAIL),
        (30, 1000, FAIL),
        (15, 100, FAIL),
        (1, 100, INCONCLUSIVE),
        (50, 50, FAIL),
    ],
)
def test_p99_is_decided_when_the_exact_binomial_decides(slow: int, of: int, expected: str) -> None:
    requests = answers([450.0 + i * 1e-3 for i in range(of - slow)] + [900.0 + i for i in range(slow)])
    assert one(slo("ttft", 99.0, 500), requests).status == expected


@given(st.integers(20, 800), st.floats(0, 0.1))
@settings(max_examples=60, deadline=None)
def test_the_verdict_is_clopper_and_pearsons_and_the_intervals_position(of: int, share: float) -> None:
    slow = int(share * of)
    requests = answers([450.0] * (of - slow) + [900.0] * slow)
    found = one(slo("ttft", 99.0, 500), requests)
    if found.n_eff == of:
        bounds = stats.binomtest(slow, of).proportion_ci(0.95, method="exact")
        one_sided = slow == 0 and stats.binomtest(0, of, 0.01, "less").pvalue <= 0.05
        passes = bounds.high <= 0.01 or one_sided
        assert found.status == (PASS if passes else FAIL if bounds.low > 0.01 else INCONCLUSIVE)
    below = found.high is not None and found.high <= found.limit
    bounded = found.at_most is not None and found.at_most.ms <= found.limit and found.at_most.confidence >= 0.95
    above = found.low is not None and found.low > found.limit
    assert found.status == (PASS if below or bounded else FAIL if above else INCONCLUSIVE)


def test_a_sample_too_small_to_pass_can_still_prove_a_failure() -> None:
    found = one(slo("ttft", 99.0, 500), answers([900.0] * 20))
    assert (found.status, found.value, found.high) == (FAIL, None, None)
    assert found.low == 900
    assert "at least 900 ms, no upper bound" in slo_sentence(found)


def test_failed_requests_exceed_every_limit() -> None:
    fast = [50.0] * 960
    assert one(slo("ttft", 99.0, 500), answers(fast)).status == PASS
    assert one(slo("ttft", 99.0, 500), answers([], failed=30)).status == FAIL
    for metric in ("ttft", "itl", "tpot", "e2e"):
        found = one(slo(metric, 99.0, 60_000), answers(fast, failed=40))
        assert found.status == FAIL
        assert (found.low, found.infinite) == (None, True)
        what = "never came" if metric == "itl" else "failed"
        assert f"is undefined, since more than 1 % {what}" in slo_sentence(found)


@pytest.mark.parametrize("metric", ["ttft", "tpot", "e2e"])
def test_more_failures_than_a_percentile_leaves_out_miss_it_however_alike_the_answers_are(metric: str) -> None:
    requests = drifting(600)
    failed = np.random.default_rng(0).random(600) < 0.15
    requests.loc[failed, "outcome"] = "http_5xx"
    errors = one(slo("errors", None, 0.1), requests)
    assert errors.status == FAIL and errors.low is not None and errors.low > 0.1
    assert one(slo(metric, 90, 60_000), requests).status == FAIL
    requests.loc[180:, "outcome"] = "http_5xx"
    assert "beyond the limit" in slo_interval(one(slo(metric, 90, 60_000), requests)), "of most the share is told"


def test_a_metric_that_never_occurred_is_invalid_not_a_pass() -> None:
    requests = answers([50.0] * 400)
    requests["token_ns"] = [stamps[:1] for stamps in requests["token_ns"]]
    found = one(slo("itl", 99.0, 100), requests)
    assert found.status == INVALID
    assert slo_sentence(found).endswith("never occurred: no request had one")
    assert verdict.overall([found], []) == INVALID


def test_a_metric_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ValueError, match="latency"):
        verdict.judge([slo("latency", 99.0, 1)], answers([1.0]), {})


@pytest.mark.parametrize(
    ("failed", "of", "limit", "expected"),
    [
        (0, 300, 0.01, INCONCLUSIVE),
        (0, 368, 0.01, PASS),
        (0, 10, 1.0, PASS),
        (1, 1000, 0.01, PASS),
        (5, 50, 0.01, FAIL),
        (20, 1000, 0.01, FAIL),
    ],
)
def test_errors_are_judged_by_the_exact_bound_of_their_share(failed: int, of: int, limit: float, expected: str) -> None:
    found = one(slo("errors", None, limit), answers([50.0] * (of - failed), failed=failed))
    assert found.status == expected
    assert found.value == failed / of


@pytest.mark.parametrize(("again", "expected"), [(0, PASS), (2, PASS), (25, INCONCLUSIVE)])
def test_errors_are_met_only_if_they_are_with_those_that_were_sent_twice(again: int, expected: str) -> None:
    requests = answers([20.0] * 246, 4).assign(attempt=0)
    good = np.flatnonzero(requests["outcome"] == "ok")
    requests.loc[good[:: len(good) // again][:again] if again else [], "attempt"] = 1
    found = one(slo("errors", None, 0.06), requests)
    assert (found.status, found.value) == (expected, 4 / 250)
    told = slo_sentence(found)
    assert ("12 % if the 25 resent requests count as dropped: undecided" in told) is (again == 25)


@pytest.mark.parametrize(("ours", "errors"), [("aborted", 0.0), ("lost", 0.0), ("timeout", 0.02)])
def test_requests_that_we_ended_ourselves_are_no_failures_of_the_server(ours: str, errors: float) -> None:
    requests = answers([20.0] * 392, 8)
    requests.loc[requests["outcome"] != "ok", "outcome"] = ours
    judged = verdict.judge([slo("errors", None, 0.05), slo("ttft", 99.0, 50)], requests, {})
    assert (judged[0].value, judged[1].infinite) == (errors, errors > 0)


def test_errors_in_one_burst_prove_less_than_the_same_number_spread_out() -> None:
    requests = answers([50.0] * 1000)
    burst, spread = requests.copy(), requests.copy()
    burst.loc[500:519, "outcome"] = "http_5xx"
    spread.loc[np.arange(20) * 50, "outcome"] = "http_5xx"
    assert one(slo("errors", None, 0.01), spread).status == FAIL
    found = one(slo("errors", None, 0.01), burst)
    assert found.status == INCONCLUSIVE
    assert found.n_eff < 200


@pytest.mark.parametrize("count", [7, 100, 299, 352])
def test_the_requests_that_errors_lack_are_as_many_as_decide_them(count: int) -> None:
    limit = slo("errors", None, 0.01)
    found = one(limit, answers([50.0] * count))
    assert found.needs is not None and found.status == INCONCLUSIVE
    enough = count + found.needs.requests
    assert one(limit, answers([50.0] * enough)).status == PASS
    assert one(limit, answers([50.0] * (enough - 2))).status == INCONCLUSIVE


@pytest.mark.parametrize(("over", "status"), [(600, FAIL), (599, INCONCLUSIVE)])
def test_a_median_is_missed_where_all_of_a_growing_queue_exceeds_it(over: int, status: str) -> None:
    """In so steep a queue all values are worth one: no interval tells."""
    waits = np.linspace(1000.0, 9000.0, 600)
    waits[over:] = 10.0
    found = verdict.decide(Series(waits), 50.0, 400.0)
    assert (found.status, found.sure) == (status, None)
    assert verdict.decide(Series(waits[:100]), 50.0, 400.0).status == FAIL
    assert verdict.decide(Series(waits[:99]), 50.0, 400.0).status == INCONCLUSIVE, "which may be one burst"


@pytest.mark.parametrize(("share", "burst", "count"), [(0.05, 10, 1000), (0.01, 10, 5000), (0.05, 30, 6000)])
def test_errors_in_bursts_that_are_as_many_as_allowed_seldom_pass(share: float, burst: int, count: int) -> None:
    """Five or ten bursts a run: some runs meet few and short ones, and think that all are short."""
    rng = np.random.default_rng(5)
    passed, high, requests = 0, [], answers([50.0] * count)
    for _ in range(300):
        lasts = rng.geometric(np.resize([share / (1 - share) / burst, 1 / burst], count))  # calm, burst, calm ...
        failed = np.repeat(np.arange(count) % 2 == 1, lasts)[(begin := rng.integers(3 * burst / share)) : begin + count]
        requests["outcome"] = np.where(failed, "http_5xx", "ok")
        found = one(slo("errors", None, share), requests)
        assert found.high is not None
        passed += found.status == PASS
        high.append(found.high)
    assert passed <= 0.04 * 300
    assert np.median(high) < 4.5 * share, "and yet an interval says something"


def test_a_longer_run_is_asked_for_where_bursts_alone_leave_errors_undecided() -> None:
    requests = answers([50.0] * 5000)
    for begin, lasts in ((700, 14), (2100, 3), (4000, 8)):
        requests.loc[begin : begin + lasts - 1, "outcome"] = "http_5xx"
    found = one(slo("errors", None, 0.02), requests)
    assert (found.status, found.value) == (INCONCLUSIVE, 0.005)
    assert found.high > 0.02
    assert found.needs is not None and 1000 < found.needs.requests < 20_000


def test_an_undecided_slo_says_how_many_more_requests_and_minutes_would_settle_it() -> None:
    found = one(slo("ttft", 99.0, 500), answers([450.0] * 100))
    assert found.needs.requests == 199
    assert found.needs.minutes == pytest.approx(199 / 10 / 60, rel=0.01)
    assert "about 200 more requests" in slo_sentence(found)
    close = one(slo("ttft", 99.0, 500), answers([50.0] * 990 + [900.0] * 10))
    assert close.needs is None
    assert "too close" in slo_sentence(close)


@pytest.mark.parametrize(
    ("rule", "values", "leaning", "basis"),
    [
        ((99.0, 500), [450.0] * 230, (PASS, 0.90), "bound"),
        ((99.0, 500), [450.0] * 161, (PASS, 0.80), "bound"),
        ((99.0, 500), [450.0] * 159, None, ""),
        ((99.0, 500), [450.0] * 539 + [900.0], (PASS, 0.94), "interval"),
        ((99.0, 500), [450.0] * 399 + [900.0], (PASS, 0.86), "interval"),
        ((99.0, 500), [450.0] * 199 + [900.0] * 4, (FAIL, 0.85), "interval"),
        ((99.0, 500), [50.0] * 990 + [900.0] * 10, None, ""),
        ((50.0, 500), [450.0] * 60 + [900.0] * 40, (PASS, 0.94), "interval"),
    ],
)
def test_an_undecided_slo_says_which_way_it_leans_if_the_same_test_is_80_percent_sure(
    rule: tuple[float, float], values: list[float], leaning: tuple[Verdict, float] | None, basis: str
) -> None:
    found = one(slo("ttft", *rule), answers(values))
    assert (found.status, verdict.EXIT_CODES[found.status]) == (INCONCLUSIVE, 98)
    if leaning is None:
        assert found.leaning is None
        assert "probably" not in slo_sentence(found)
        return
    assert found.leaning is not None
    assert (found.leaning.status, round(found.leaning.sure, 2), found.leaning.basis) == (*leaning, basis)
    said = f"probably {'met' if leaning[0] == PASS else 'missed'}, {100 * leaning[1]:.0f} % sure"
    assert f": undecided against the limit of 500 ms; {said}; needs about" in slo_sentence(found)
    assert SloAnswer.model_validate(found.to_json()) == found


@pytest.mark.parametrize(
    ("failed", "of", "leaning"),
    [(0, 300, (PASS, 0.94)), (0, 165, (PASS, 0.81)), (0, 100, None), (4, 200, (FAIL, 0.86)), (2, 200, None)],
)
def test_an_undecided_limit_on_errors_leans_too(failed: int, of: int, leaning: tuple[Verdict, float] | None) -> None:
    found = one(slo("errors", None, 0.01), answers([50.0] * (of - failed), failed=failed))
    assert found.status == INCONCLUSIVE
    assert (found.leaning and (found.leaning.status, round(found.leaning.sure, 2))) == leaning


def test_what_is_at_its_limit_is_said_to_lean_the_wrong_way_seldom() -> None:
    """A share beyond the limit that is just what may be: either way is wrong, and each at most one time in five."""
    rng, many = np.random.default_rng(4), 1000
    found = [verdict.decide(Series(rng.exponential(1, 900)), 99.0, -np.log(0.01)) for _ in range(many)]
    leanings = [each.leaning.status for each in found if each.leaning is not None]
    for status in (PASS, FAIL):
        assert leanings.count(status) + sum(each.status == status for each in found) <= 0.2 * many


@pytest.mark.parametrize(
    ("states", "reasons", "expected", "code"),
    [
        ([], [], PASS, 0),
        ([PASS, PASS], [], PASS, 0),
        ([PASS, INCONCLUSIVE], [], INCONCLUSIVE, 98),
        ([INCONCLUSIVE, FAIL, PASS], [], FAIL, 99),
        ([FAIL, PASS], ["late"], INVALID, 98),
        ([PASS, INVALID], [], INVALID, 98),
    ],
)
def test_one_word_for_the_run(states: list[str], reasons: list[str], expected: Verdict, code: int) -> None:
    passed = one(slo("ttft", 99.0, 500), answers([50.0] * 400))
    results = [passed.model_copy(update={"status": state}) for state in states]
    assert verdict.overall(results, reasons) == expected
    assert verdict.EXIT_CODES[expected] == code


def test_repeats_with_other_runs_between_them_need_the_minutes_that_they_were_asked_for() -> None:
    one = answers(np.full(50, 20.0))
    hour_later = one.assign(due_ns=one["due_ns"] + 3600 * 1000 * MS, request_id=[f"s{i}" for i in range(50)])
    both = pd.concat([one, hour_later], ignore_index=True)
    (found,) = verdict.judge([slo("ttft", 99, 40)], both, {}, seconds=10.0)
    assert found.status == INCONCLUSIVE
    assert found.needs.minutes == pytest.approx(found.needs.requests * 0.1 / 60)


def drifting(count: int) -> pd.DataFrame:
    """First tokens after 30 ms, give or take what a machine drifts by for a minute: worth a tenth of their number."""
    requests = answers(np.full(count, 30.0))
    wave = 1.0 * np.sin(np.arange(count) / 40) + np.random.default_rng(2).normal(0, 1, count)
    requests["first_token_ns"] = pd.array(requests["due_ns"] + ((30 + wave) * MS).astype(np.int64), dtype="Int64")
    return requests


def test_a_limit_far_above_all_that_happened_is_kept_with_less_evidence_than_a_near_one() -> None:
    requests = drifting(1500)
    near, far_off = (one(slo("ttft", 99, limit), requests) for limit in (45, 500))
    assert 125 < near.n_eff < 299
    assert (near.status, far_off.status) == (INCONCLUSIVE, PASS)
    assert near.high is far_off.high is None, "the interval is what it was"
    told = slo_sentence(far_off)
    assert told.endswith("within the limit of 500 ms, 99 % sure; no request exceeded it, and none took over 33.9 ms")
    assert far_off.needs is None
    assert brief_answer(far_off).endswith("limit 500 ms (99 % sure)")


@pytest.mark.parametrize(("count", "expected"), [(250, INCONCLUSIVE), (312, PASS)])
def test_how_sure_a_far_limit_is_kept_is_what_the_plain_number_of_requests_gives(count: int, expected: str) -> None:
    found = one(slo("ttft", 99, 500), drifting(count))
    assert (found.n_eff < 100, found.status) == (True, expected)
    if expected == PASS:
        assert found.sure == pytest.approx(1 - 0.99**count)


def test_a_far_limit_is_no_matter_for_requests_that_came_near_it() -> None:
    requests = drifting(1500)
    requests.loc[::60, "first_token_ns"] = requests.loc[::60, "due_ns"] + 480 * MS
    found = one(slo("ttft", 99, 500), requests)
    assert found.basis != "far"


def test_one_request_beyond_a_far_limit_takes_the_evidence_that_a_near_one_does() -> None:
    requests = drifting(1500)
    requests.loc[7, "first_token_ns"] = int(requests.loc[7, "due_ns"]) + 501 * MS
    assert one(slo("ttft", 99, 500), requests).status == INCONCLUSIVE


def overloaded(count: int) -> pd.DataFrame:
    """First tokens of a server that falls behind: each waits longer than the one before, up to two seconds."""
    requests = answers(np.full(count, 30.0))
    wait_ms = np.linspace(0, 2000, count)
    requests["first_token_ns"] = pd.array(requests["due_ns"] + (wait_ms * MS).astype(np.int64), dtype="Int64")
    return requests


@pytest.mark.parametrize(
    ("percentile", "limit", "expected"),
    [
        (99, 500, FAIL),
        (95, 500, FAIL),
        (90, 500, FAIL),
        (99, 1590, FAIL),
        (99, 1990, INCONCLUSIVE),
        (50, 500, INCONCLUSIVE),
    ],
)
def test_what_most_requests_exceed_is_missed_however_alike_they_are(
    percentile: float, limit: float, expected: str
) -> None:
    found = one(slo("ttft", percentile, limit), overloaded(600))
    assert found.n_eff < 12
    assert found.status == expected
    if found.basis == "share":
        beyond = (2000 - limit) / 2000
        assert found.beyond == pytest.approx(600 * beyond, abs=1)
        assert found.sure == pytest.approx(min(1 - (1 - percentile / 100) / beyond, 0.99), abs=0.002)
        assert "of the requests exceeded" in slo_sentence(found)


@pytest.mark.parametrize(("count", "expected"), [(2, INCONCLUSIVE), (100, FAIL)])
def test_many_gaps_of_few_requests_are_few(count: int, expected: str) -> None:
    requests = answers(np.full(count, 30.0))
    gaps_ns = np.arange(64) * 25 * MS
    requests["token_ns"] = [first + gaps_ns for first in requests["first_token_ns"]]
    assert one(slo("itl", 75, 20), requests).status == expected


def test_a_percentile_without_an_upper_end_is_bounded_as_surely_as_the_sample_allows() -> None:
    found = one(slo("ttft", 99, 45), answers(np.linspace(20, 40, 320)))
    assert found.value is found.high is None
    assert (found.status, found.basis) == (PASS, "bound")
    assert found.at_most.ms == pytest.approx(40)
    assert found.sure == found.at_most.confidence == pytest.approx(1 - 0.99**found.n_eff)
    assert found.sample == pytest.approx(39.8, abs=0.1)
    assert found.highest.percentile == 95
    assert "at most 40.0 ms (9" in slo_sentence(found)
    assert "p95 39.0 ms" in slo_sentence(found)


def test_what_stands_beside_an_answer_is_the_end_that_decided_it() -> None:
    """Of a p99 of 320 values both ends of which are not known, and of a p1, which has an upper one alone."""
    beyond = one(slo("ttft", 99, 45), answers(np.linspace(20, 90, 320)))
    assert beyond.status == FAIL and beyond.at_most is not None and beyond.low is not None and beyond.low > 45
    assert slo_interval(beyond).endswith(" or more")
    within = one(slo("ttft", 1, 45), answers(np.linspace(20, 40, 30)))
    assert (within.status, within.low) == (PASS, None)
    assert slo_interval(within).startswith("at most ")


def test_a_limit_that_is_missed_by_little_is_told_from_the_value() -> None:
    missed, met = (one(slo("ttft", 50, limit), answers([200.3] * 400)) for limit in (200, 200.4))
    assert (missed.status, slo_value(missed)) == (FAIL, "200.3 ms")
    assert "p50 TTFT 200.3 ms" in slo_sentence(missed)
    assert (met.status, slo_value(met)) == (PASS, "200 ms")
    errors = one(slo("errors", None, 0.01), answers([1.0] * 90, failed=10))
    assert (errors.status, slo_value(errors)) == (FAIL, "10 %")
    for value, limit, told in ((0.01004, 0.01, "1.004 %"), (3e-5, 1e-5, "0.00300 %"), (0.9998, 0.9996, "99.98 %")):
        assert slo_value(errors.model_copy(update={"value": value, "limit": limit})) == told
    assert slo_value(errors.model_copy(update={"value": math.nextafter(0.01, 1)})) == "1.0 %"
