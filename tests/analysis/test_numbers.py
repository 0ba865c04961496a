from __future__ import annotations

import math

import pytest

from gapmeter.analysis.numbers import bounds, counted, duration, plain, rate, share, significant


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (1420.4, "1,420"), (0.02346, "0.0235"), (9.996, "10.0"), (0.9996, "1.00"), (99.96, "100"),
        (8, "8.00"), (-3.14159, "-3.14"), (123456.7, "123,457"),
    ],
)  # fmt: skip
def test_numbers_keep_three_significant_digits(value: float, text: str) -> None:
    assert significant(value) == text


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (None, "–"), (math.nan, "–"), (math.inf, "∞"), (0.0, "0 ms"), (0.05, "50.0 µs"), (0.1, "0.100 ms"),
        (41.23, "41.2 ms"), (999.4, "999 ms"), (999.6, "1.00 s"), (1420.0, "1.42 s"), (75_000.0, "75.0 s"),
    ],
)  # fmt: skip
def test_durations_take_the_unit_that_keeps_them_short(ms: float | None, text: str) -> None:
    assert duration(ms) == text


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (1310.0, 1580.0, "1.31 .. 1.58 s"), (40.0, 43.0, "40.0 .. 43.0 ms"), (950.0, 1100.0, "0.950 .. 1.10 s"),
        (-1.17, 0.0682, "-1.17 .. 0.0682 ms"), (-0.0332, 0.12, "-0.0332 .. 0.120 ms"),
        (None, 43.0, "not estimable"), (40.0, None, "not estimable"),
    ],
)  # fmt: skip
def test_an_interval_is_written_in_one_unit(low: float | None, high: float | None, text: str) -> None:
    assert bounds(low, high) == text


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (0.8612, "86 %"), (0.0002, "0.020 %"), (0.00001, "< 0.01 %"), (0.0, "0 %"), (None, "–"),
        (0.9994, "99.9 %"), (2152 / 2153, "> 99.9 %"), (1 - 1e-12, "100 %"), (1.0, "100 %"), (1.0004, "100 %"),
    ],
)  # fmt: skip
def test_shares_are_per_cent(fraction: float | None, text: str) -> None:
    assert share(fraction) == text


def test_plain_numbers_have_neither_needless_zeros_nor_an_exponent() -> None:
    assert [plain(n, 2) for n in (184.0, 1250.0, 0.000016, -2.0, 0.0)] == ["184", "1,250", "0.000016", "-2", "0"]


def test_rates_lose_needless_zeros() -> None:
    assert [rate(r) for r in (8.0, 7.95, 120.0, None)] == ["8 req/s", "7.95 req/s", "120 req/s", "–"]


def test_things_are_counted_in_the_singular_and_in_the_plural() -> None:
    told = [counted(n, noun) for n, noun in ((1, "user"), (0, "user"), (1000, "user"), (1, "stretch"), (2, "stretch"))]
    assert told == ["1 user", "0 users", "1,000 users", "1 stretch", "2 stretches"]
