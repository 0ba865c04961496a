"""Calibration measures the real client against the real null server, and keeps what it found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gapmeter.analysis.results.manifest import CalibratedLimit, Calibration, GeneratorFloor
from gapmeter.cli import main
from gapmeter.machine import calibration, doctor
from gapmeter.machine.calibration import Trial, calibrate, highest, render
from gapmeter.machine.instrument import Cores, Timing, TooBusy, equal_plan, errors, issue

ANYWHERE = Cores((), ())


def test_client_and_null_server_agree_about_every_token() -> None:
    due = np.arange(12, dtype=np.int64) * 5_000_000
    run = issue(ANYWHERE, equal_plan(due, 20), Timing(first_ms=20, gap_ms=2), warm=12)
    seen = errors(run)
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


@pytest.mark.whole_run
def test_a_quick_calibration_measures_errors_cost_and_limits() -> None:
    said: list[str] = []
    try:
        found = calibrate(["asyncio"], quick=True, say=said.append)
    except TooBusy as refused:
        pytest.skip(str(refused))
    floor = found.generators["asyncio"].to_json()
    for metric in ("ttft", "itl", "e2e", "lag"):
        assert 0 < floor[f"{metric}_p50_ms"] <= floor[f"{metric}_p99_ms"]
    assert floor["ttft_p50_ms"] < 50  # the schedule's own 50 ms is not part of the error
    assert floor["chunk_us"] > 1
    assert floor["tokens"]["per_s"] > 1000
    assert floor["requests"]["per_s"] > 100
    assert "TTFT error" in render(found)
    assert any("delivered" in line for line in said)
