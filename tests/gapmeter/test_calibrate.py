"""Calibration measures the real client against the real null server, and keeps what it found."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from gapmeter.analysis.results.manifest import CalibratedLimit, Calibration, GeneratorFloor
from gapmeter.cli import main
from gapmeter.machine import calibration, doctor
from gapmeter.machine.calibration import Trial, calibrate, highest, render
from gapmeter.machine.instrument import (
    Cores,
    NotMeasured,
    NullRun,
    Timing,
    TooBusy,
    equal_plan,
    issue,
    null_server,
    stamp_errors,
)
from gapmeter.records import RecordWriter, Span, read_records
from tests.kit.streams import arrived, chat, sse, wire

ANYWHERE = Cores((), ())


def test_client_and_null_server_agree_about_every_token() -> None:
    due = np.arange(12, dtype=np.int64) * 5_000_000
    run = issue(ANYWHERE, equal_plan(due, 20), Timing(first_ms=20, gap_ms=2), warm=12)
    seen = stamp_errors(run)
    assert len(seen.ttft) == len(seen.e2e) == len(seen.lag) == 12
    assert len(seen.late) == len(seen.stamps) == 12 * 20
    assert len(seen.itl) == 12 * 19
    assert (seen.late > 0).all()  # no token is stamped before its write began
    # The error counts from due. A write may return after the server has read: then the stamp of sending comes late.
    assert (seen.ttft > seen.lag).any()
    assert (seen.itl >= 0).all()


@pytest.mark.parametrize(
    ("client", "server", "expected"),
    [
        (1000.0, 1e9, (900, 1000, "client")),
        (1e9, 1000.0, (1000, 1000, "server")),
        (1e9, 1e9, (1600, 1600, "search")),
    ],
)  # fmt: skip
def test_the_highest_rate_is_bracketed_and_its_end_named(
    client: float, server: float, expected: tuple[float, float, str]
) -> None:
    def attempt(rate: float) -> Trial:
        return Trial(0.1 if rate <= client else 5.0, min(rate, server))

    low, high, ended_by = expected
    found = highest(attempt, start=100, most=1600, halvings=5, say=lambda *_: None)
    assert low <= found.per_s <= high
    assert found.ended_by == ended_by


def test_one_hiccup_of_the_machine_is_no_limit() -> None:
    hiccups = iter([5.0])

    def attempt(rate: float) -> Trial:
        return Trial(next(hiccups, 0.1), rate)

    assert highest(attempt, 100, 400, 1, lambda *_: None) == CalibratedLimit(per_s=400, ended_by="search")


def test_a_machine_too_busy_for_the_lowest_rate_is_not_calibrated() -> None:
    with pytest.raises(TooBusy, match="stop other work"):
        highest(lambda rate: Trial(5.0, rate), 100, 400, 1, lambda *_: None)


def test_a_null_server_that_cannot_begin_is_said() -> None:
    nowhere = Cores((99_999,), ())
    with pytest.raises(NotMeasured, match="ended before it listened"), null_server(nowhere, Timing(), log=None):
        pass


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "gapmeter" / "calibration.json"


def calibrated(**chunk_us: float) -> Calibration:
    """One whose generators differ in the cost of a chunk."""
    limit = CalibratedLimit(per_s=1.0, ended_by="search")
    errors_ms = {f"{metric}_p{p}_ms": 0.1 for metric in ("ttft", "itl", "e2e", "lag") for p in (50, 99)}
    about = {"tokens": limit, "requests": limit, "measured_wall": "", "quick": True, "cores_shared": False}
    floors = {
        name: GeneratorFloor.model_validate({**errors_ms, **about, "chunk_us": us}) for name, us in chunk_us.items()
    }
    return Calibration(machine=calibration.this_machine(), most_error_ms=1.0, generators=floors)


def test_a_calibration_is_kept_for_this_machine_beside_those_of_others(cache: Path) -> None:
    assert calibration.read_calibration()[0] is None
    assert calibration.save_calibration(calibrated(asyncio=1, locust=2)) == cache
    kept = json.loads(cache.read_text())
    kept["machines"]["another"] = {"generators": {}}
    cache.write_text(json.dumps(kept))
    calibration.save_calibration(calibrated(asyncio=3))
    assert calibration.read_calibration()[0] == calibrated(asyncio=3, locust=2)
    assert set(json.loads(cache.read_text())["machines"]) == {"another", calibration.key_of(calibration.this_machine())}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "JSON"),
        ("{", "JSON"),
        ("[]", "is of another form (JSON"),
        ('{"schema_version": 0}', "is of another form (schema_version: "),
        ('{"schema_version": 1, "machines": 3}', "is of another form (machines: "),
        ('{"schema_version": 1, "machines": {"HERE": 3}}', "holds this machine's in another form"),
        ('{"schema_version": 1, "machines": {"HERE": {"cpu": ""}}}', "in another form (machine: "),
    ],
)
def test_a_file_of_another_form_is_no_calibration_and_the_doctor_says_why(cache: Path, text: str, says: str) -> None:
    cache.parent.mkdir()
    cache.write_text(text.replace("HERE", calibration.key_of(calibration.this_machine())))
    assert calibration.read_calibration()[0] is None
    assert says in doctor.calibration().seen
    calibration.save_calibration(calibrated(asyncio=1))
    assert calibration.read_calibration()[0] == calibrated(asyncio=1)


def test_a_generator_that_does_not_exist_is_a_mistake_of_the_user(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "--generator", "telnet"]) == 2
    assert "no generator 'telnet'; there are asyncio" in capsys.readouterr().err


def test_an_error_is_the_client_s_figure_less_the_log_s_so_that_the_schedule_is_no_part_of_it(tmp_path: Path) -> None:
    """Sent 2 us late on a connection that took 3 us, to a server that takes 50 ms and then 10 ms a token."""
    first, gap = 50_000_000, 10_000_000
    writer = RecordWriter(tmp_path / "null.gap", {"role": "api"})
    ref = writer.request("", "r")
    writer.span(Span.INGRESS, ref, 106_000, 107_000)
    left = [106_000 + first, 106_000 + first + gap, 106_000 + first + 2 * gap]
    for n, at in enumerate(left, 1):
        writer.span(Span.EGRESS, ref, at, at + 500, n)
    writer.close()
    seen = [left[0] + 4_000, left[1] + 7_000, left[2] + 5_000]
    pieces = sse(chat("a", 1), chat("b", 2), chat("c", 3, finish_reason="length"))
    record = dataclasses.replace(
        wire(pieces), due_ns=100_000, connect_start_ns=101_000, connect_end_ns=104_000, sent_ns=105_000,
        **arrived(pieces, seen),
    )  # fmt: skip
    server = read_records(tmp_path / "null.gap")
    run = NullRun([record], server, cpu_ns=9_000)
    found = stamp_errors(run)
    assert (found.ttft.tolist(), found.e2e.tolist()) == ([6_000 + 4_000], [6_000 + 5_000])
    assert (found.itl.tolist(), found.lag.tolist()) == ([3_000, 2_000], [2_000])
    assert (found.late.tolist(), found.stamps.tolist()) == ([4_000, 7_000, 5_000], seen)
    assert run.chunk_us == 3.0


@pytest.mark.whole_run
def test_a_quick_calibration_measures_errors_cost_and_limits_or_says_what_was_too_slow() -> None:
    said: list[str] = []
    refused = ""
    try:
        found = calibrate(["asyncio"], quick=True, say=said.append)
    except TooBusy as busy:
        refused = str(busy)
    if refused:  # of what was tried last the lowest rate was too much
        ((_, too_late),) = tried(said, "requests") or tried(said, "tokens")
        assert too_late >= 1 and f"the error's p99 was {too_late:.2f} ms" in refused
        return
    floor = found.generators["asyncio"].to_json()
    for metric in ("ttft", "itl", "e2e", "lag"):
        assert 0 < floor[f"{metric}_p50_ms"] <= floor[f"{metric}_p99_ms"]
    assert floor["chunk_us"] > 0
    for limit in ("tokens", "requests"):
        kept_up = [delivered for delivered, error_ms in tried(said, limit) if error_ms <= 1]
        assert floor[limit]["per_s"] == pytest.approx(max(kept_up), rel=1e-3, abs=1)
    assert "TTFT error" in render(found)


def tried(said: list[str], what: str) -> list[tuple[float, float]]:
    """Of each rate that was tried what was delivered, at most what was asked for, and the error in ms."""
    line = re.compile(rf"asyncio: ([\d,]+) {what}/s: ([\d,]+) delivered, error p99 ([\d.]+) ms")
    rows = [[float(part.replace(",", "")) for part in row.groups()] for row in map(line.fullmatch, said) if row]
    return [(min(rate, delivered), error_ms) for rate, delivered, error_ms in rows]
