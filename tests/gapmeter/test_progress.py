from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

from gapmeter.progress import Progress, ProgressLine, line

NOW = Progress(
    phase="load", elapsed_s=65.2, remaining_s=24.6, asked_per_s=8.0, sent_per_s=8.02, done_per_s=7.5, issued=534,
    done=520, failed=0, in_flight=14, value_ms=612.0, limit_ms=500.0, lag_p99_ms=0.21,
)  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_names_time_left_rates_flight_percentile_errors_and_lag() -> None:
    assert line(NOW, 200) == (
        "load 1:05, 0:25 left · asked/sent/done 8.0/8.0/7.5 per s · in flight 14 · p99 TTFT 612 ms > 500 ms"
        " · no errors · lag p99 0.21 ms · 520 of 534 done"
    )


@pytest.mark.parametrize("width", range(20, 140, 7))
def test_the_line_never_exceeds_the_width(width: int) -> None:
    assert len(line(NOW, width)) <= width


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"remaining_s": None}, "load 1:05 · "),
        ({"remaining_s": 132.2, "least_s": 24.6}, "load 1:05, 0:25 to 2:12 left · "),
        ({"remaining_s": 107.6, "least_s": 0.0}, "load 1:05, at most 1:48 left · "),
        ({"remaining_s": 596_160.4}, "load 1:05, 165:36:00 left · "),
        ({"failed": 3}, "3 failed"),
        ({"failed": 1234, "in_flight": 10_000}, "in flight 10,000 · p99 TTFT 612 ms > 500 ms · 1,234 failed · "),
        ({"value_ms": None}, "p99 TTFT – · "),
        ({"limit_ms": None}, "p99 TTFT 612 ms · "),
        ({"value_ms": 321.0}, "p99 TTFT 321 ms ≤ 500 ms"),
        ({"lag_p99_ms": None}, "lag p99 –"),
        ({"behind_s": 3.2}, "0:25 left (as of 3 s ago) · "),
    ],
)
def test_what_is_unknown_or_failed_is_said(change: dict[str, float | None], expected: str) -> None:
    assert expected in line(replace(NOW, **change), 200)


def test_a_terminal_gets_one_line_redrawn_at_most_four_times_a_second_and_cleared_at_the_end() -> None:
    clock, stream, taken = [0.0], Terminal(), []
    shown = ProgressLine(stream, lambda: clock[0])
    for _ in range(1280):
        shown.offer(lambda: taken.append(1) or NOW)
        clock[0] += 1 / 128
    shown.close()
    assert len(taken) == 40
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().count("\r") == 41
    assert stream.getvalue().endswith("\r\x1b[K")


def test_a_file_gets_a_plain_line_every_ten_seconds() -> None:
    clock, stream = [0.0], io.StringIO()
    shown = ProgressLine(stream, lambda: clock[0])
    for _ in range(280):
        shown.offer(lambda: NOW)
        clock[0] += 0.125
    shown.close()
    assert stream.getvalue() == f"{line(NOW, 200)}\n" * 3


def test_a_program_gets_a_json_object_a_second() -> None:
    clock, stream = [0.0], io.StringIO()
    shown = ProgressLine(stream, lambda: clock[0], as_json=True)
    for _ in range(25):
        shown.offer(lambda: NOW)
        clock[0] += 0.125
    told = [json.loads(text) for text in stream.getvalue().splitlines()]
    assert len(told) == 4 and all(one["type"] == "progress" and one["in_flight"] == NOW.in_flight for one in told)
