"""Several attempts of one request: one row each, one request, latency from the first due time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gapmeter.analysis.judge.evidence import Evidence
from gapmeter.analysis.judge.warnings import attempts_warning
from gapmeter.analysis.ledger.ledger import LedgerInputs, make_ledger
from gapmeter.analysis.load import count_attempts
from gapmeter.analysis.requests.attempts import read_attempts
from gapmeter.analysis.requests.metrics import final, generator_lag_ns, measured_requests, request_values_ns
from gapmeter.analysis.results.requests import Attempts
from gapmeter.analysis.run_figures import RunTables, build_figures
from gapmeter.analysis.tables import read_requests
from gapmeter.records import Outcome, RecordWriter, RunFolder, Span, answers
from gapmeter.records.request import FINISHED, ISSUED, Flag, RequestRecord, encode
from tests.kit.loads import write_records
from tests.kit.results import manifest
from tests.kit.streams import arrived, chat, sse, wire
from tests.records.test_answers import OTHER, USUAL

MS = 1_000_000
PLAN = manifest(plan={"timeout_ns": 1000 * MS, "t0_ns": 0, "warmup_ns": 0, "warmup_requests": 0}).plan


def attempt(index: int, retry: int, due_ms: int, outcome: Outcome, end_ms: int, **more: Any) -> RequestRecord:
    """Sent 1 ms after it was due; a good one brings two tokens, 10 ms apart, the last at its end."""
    name = f"r-{index}" + (f".{retry}" if retry else "")
    record: dict[str, Any] = {
        "index": index, "request_id": name, "worker": 0, "retry": retry, "due_ns": due_ms * MS,
        "write_ns": due_ms * MS + 900_000, "sent_ns": (due_ms + 1) * MS, "end_ns": end_ms * MS, "outcome": outcome,
        "status": 200 if outcome is Outcome.OK else 500, "error": "" if outcome is Outcome.OK else "boom",
        "prompt_tokens": 1, "output_tokens": 2,
    }  # fmt: skip
    if outcome is Outcome.OK:
        pieces = sse(chat("a", 1), chat("b", 2, finish_reason="length"))
        record |= arrived(pieces, [(end_ms - 10) * MS, end_ms * MS])
    return RequestRecord(**record | more)


# Request 0: well at once. Request 1: well the third time. Request 2: failed for good. Request 3: refused once.
RECORDS = [
    attempt(0, 0, 100, Outcome.OK, 150),
    attempt(1, 0, 200, Outcome.HTTP_5XX, 210),
    attempt(1, 1, 260, Outcome.TIMEOUT, 300),
    attempt(1, 2, 400, Outcome.OK, 450),
    attempt(2, 0, 300, Outcome.HTTP_5XX, 310),
    attempt(2, 1, 1360, Outcome.HTTP_5XX, 1400),
    attempt(3, 0, 350, Outcome.REFUSED, 351),
    attempt(3, 1, 380, Outcome.OK, 420),
]


@pytest.fixture
def requests(tmp_path: Path) -> pd.DataFrame:
    folder = RunFolder(tmp_path)
    write_records(folder.requests / "worker-0.gap", RECORDS)
    return read_requests(folder, PLAN)[0]


def test_every_attempt_is_a_row_and_the_last_one_is_the_request(requests: pd.DataFrame) -> None:
    assert len(requests) == 8
    assert final(requests)["request_id"].tolist() == ["r-0", "r-1.2", "r-2.1", "r-3.1"]
    assert measured_requests(requests)["outcome"].tolist() == ["ok", "ok", "http_5xx", "ok"]
    assert requests["measured"].sum() == 4


def test_latency_counts_from_when_the_first_attempt_was_due(requests: pd.DataFrame) -> None:
    measured = measured_requests(requests)
    assert (measured["due_ns"] // MS).tolist() == [100, 200, 300, 350]
    good = measured[measured["outcome"] == "ok"]
    assert (request_values_ns(good, "e2e") / MS).tolist() == [50, 250, 70]
    assert (request_values_ns(good, "ttft") / MS).tolist() == [40, 240, 60]


def test_waiting_to_be_asked_again_is_no_lateness_of_the_load_tester(requests: pd.DataFrame) -> None:
    assert (generator_lag_ns(requests) / MS).tolist() == [1] * 8


def test_the_wait_of_a_long_prompt_for_room_in_the_socket_is_the_networks(tmp_path: Path) -> None:
    """The load tester was 1 ms late with both; the socket took the first one's last byte 30 ms later."""
    folder = RunFolder(tmp_path)
    sent = {"write_ns": 101 * MS, "sent_ns": 131 * MS}
    records = [attempt(0, 0, 100, Outcome.OK, 150, flags=Flag.WAITED, **sent), attempt(1, 0, 200, Outcome.OK, 250)]
    write_records(folder.requests / "worker-0.gap", records)
    requests, _ = read_requests(folder, PLAN)
    assert (generator_lag_ns(requests) / MS).tolist() == [1, 1]
    ledger = make_ledger(LedgerInputs.of(requests, None)).rows
    assert (ledger.loc[ledger["event"] == "last_token", "generator_lag_ns"] / MS).tolist() == [1, 1]


def test_a_request_that_failed_for_good_took_at_least_until_its_last_attempt_had_ended(requests: pd.DataFrame) -> None:
    (failed,) = (row for _, row in measured_requests(requests).iterrows() if row["outcome"] != "ok")
    assert failed["censored_ns"] == 1100 * MS  # from 300 to 1,400 ms, which is more than the time-out


def test_the_time_of_earlier_attempts_is_a_stage_of_its_own(requests: pd.DataFrame) -> None:
    rows = make_ledger(LedgerInputs.of(requests, None)).rows
    ends = rows[rows["event"] == "last_token"].set_index("request_id")
    assert (ends["retry_ns"] / MS).to_dict() == {"r-0": 0, "r-1.2": 200, "r-3.1": 30}
    assert (ends["generator_lag_ns"] / MS).tolist() == [1] * 3
    assert (ends["total_ns"] / MS).to_dict() == {"r-0": 50, "r-1.2": 250, "r-3.1": 70}


def test_attempts_are_counted_beside_requests_and_a_warning_says_so(requests: pd.DataFrame) -> None:
    told = build_figures(RunTables(requests), [], Evidence("open", "poisson", planned=4))
    counts = told.counts
    assert (counts.issued, counts.measured, counts.succeeded, counts.failed) == (4, 4, 3, {"http_5xx": 1})
    assert counts.attempts == Attempts(
        total=8, asked_again=3, then_succeeded=2, failed={"http_5xx": 2, "timeout": 1, "refused": 1}
    )
    (warning,) = (warning for warning in told.warnings if warning.code == "retries")
    assert warning.text.startswith("8 attempts for 4 requests: 3 retried after a failure (2 http_5xx, ")
    assert "2 then succeeded" in warning.text


def test_a_run_without_retries_has_one_attempt_a_request_and_no_warning(tmp_path: Path) -> None:
    measured = pd.DataFrame({"outcome": ["ok", "cut"], "index": [0, 1], "retry": 0, "superseded": False})
    counted = count_attempts(measured, measured)
    assert counted == Attempts(total=2, asked_again=0, then_succeeded=0, failed={})
    assert not list(attempts_warning(counted, 2))


def test_what_a_worker_on_another_machine_stamped_is_on_our_clock(tmp_path: Path) -> None:
    folder, day_ms = RunFolder(tmp_path), 86_400_000
    folder.requests.mkdir()
    writer = RecordWriter(folder.requests / "worker-1.gap", {"role": "generator", "worker": 1})
    writer.span(Span.CANARY, 0, (day_ms + 100) * MS, (day_ms + 120) * MS)
    writer.blob(FINISHED, encode(attempt(0, 0, day_ms + 100, Outcome.OK, day_ms + 150, worker=1)))
    writer.close()
    plan = PLAN.model_copy(update={"clock_offsets_ns": {"0": 7, "1": day_ms * MS}})
    requests, (generator,) = read_requests(folder, plan)
    assert requests["due_ns"].tolist() == [100 * MS]
    assert (generator.canary_at_ns.tolist(), generator.canary_ns.tolist()) == ([100 * MS], [20 * MS])


def test_a_request_that_was_in_flight_when_its_generator_process_ended_says_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.requests.mkdir()
    writer = RecordWriter(folder.requests / "worker-1.gap", {"role": "generator", "worker": 1})
    unfinished = RequestRecord(index=0, request_id="r-0", worker=1, due_ns=100 * MS, sent_ns=101 * MS)
    writer.blob(ISSUED, encode(unfinished))
    writer.close()
    requests, _ = read_requests(folder, PLAN)
    assert requests[["outcome", "error"]].to_numpy().tolist() == [["lost", "its generator process ended before it did"]]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_table_is_the_same_where_the_module_in_c_was_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    records = [(ISSUED, RequestRecord(index=99, request_id="r-99", due_ns=7))]
    for number, pieces in enumerate(data.draw(st.lists(st.sampled_from([*USUAL.values(), *OTHER.values()])))):
        record = wire(pieces)
        record.index, record.request_id = number, f"r-{data.draw(st.integers(0, 2 * number))}"
        record.worker, record.due_ns = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 9))
        record.outcome = data.draw(st.sampled_from([Outcome.OK, Outcome.OK, Outcome.TIMEOUT, Outcome.CUT]))
        record.error = data.draw(st.sampled_from(["", "gone"]))
        if data.draw(st.booleans()):
            record.flags, record.chunk_wait_ns = Flag.KERNEL, np.arange(len(pieces), dtype=np.uint32)
        records.append((FINISHED, record))
    path = tmp_path / "worker-0.gap"
    path.unlink(missing_ok=True)
    write_records(path, records)
    with monkeypatch.context() as without:
        fast, _ = read_attempts([path], 5, {"1": 1000})
        without.setattr(answers, "_read", None)
        slow, _ = read_attempts([path], 5, {"1": 1000})
    assert fast.dtypes.equals(slow.dtypes)
    for name in fast:
        pairs = zip(fast[name].astype(object), slow[name].astype(object), strict=True)
        assert all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a is b or a == b or a != a for a, b in pairs)
