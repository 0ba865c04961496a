"""How numbers are written for people: three significant digits, the unit that keeps them short."""

from __future__ import annotations

import math

DASH = "–"


def significant(value: float, digits: int = 3) -> str:
    """``value`` to so many significant digits, without an exponent: 1420.4 -> 1,420; 0.02345 -> 0.0235."""
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    rounded = round(value, decimals)
    if abs(rounded) >= 10 ** (digits - decimals) and decimals:  # 9.996 -> 10.0, not 10.00
        decimals -= 1
    return f"{rounded:,.{decimals}f}"


def plain(value: float | None, digits: int = 3) -> str:
    """``significant`` without the zeros that end its decimals: 60.0 -> 60; a dash for None."""
    text = DASH if value is None else significant(value, digits)
    return text.rstrip("0").rstrip(".") if "." in text else text


def duration(ms: float | None, digits: int = 3) -> str:
    """Milliseconds as text with its unit: µs below 0.1 ms, s from 1,000 ms; a dash for None, ∞ for infinite."""
    if ms is None or math.isnan(ms):
        return DASH
    if math.isinf(ms):
        return "∞"
    unit = unit_of(ms)
    return f"{significant(in_unit(ms, unit), digits)} {unit}"


def over(ms: float) -> str:
    """A time that is only known to be exceeded: ``> 60 s``."""
    unit = unit_of(ms)
    return f"> {plain(in_unit(ms, unit))} {unit}"


def unit_of(ms: float) -> str:
    """The unit that ``duration`` writes this many milliseconds in."""
    size = abs(ms)
    if size >= 999.5:
        return "s"
    return "ms" if size >= 0.0995 or size == 0 else "µs"


def in_unit(ms: float, unit: str) -> float:
    """Milliseconds as a number of ``unit`` (µs, ms or s)."""
    return ms / {"s": 1000.0, "ms": 1.0, "µs": 0.001}[unit]


def bounds(low: float | None, high: float | None) -> str:
    """An interval in milliseconds, as ``1.31 .. 1.58`` in the unit of the larger end, or ``not estimable``."""
    if low is None or high is None:
        return "not estimable"
    if math.isinf(high):
        return f"{duration(low)} .. ∞"
    unit = unit_of(max(low, high, key=abs))
    return f"{significant(in_unit(low, unit))} .. {significant(in_unit(high, unit))} {unit}"


def share(fraction: float | None, digits: int = 2) -> str:
    """A fraction as per cent: 0.8612 -> 86 %, 0.0002 -> 0.02 %; next to nothing, and all but a little, as such.

    With more ``digits`` than two these are given in full.
    """
    if fraction is None or not math.isfinite(fraction):
        return DASH
    percent = 100 * fraction
    if percent == 0:
        return "0 %"
    if abs(percent) < 0.01 and digits == 2:
        return "< 0.01 %"
    if 99.95 <= percent < 100 - 1e-9 and digits == 2:  # which else were 100 %
        return "> 99.9 %"
    return f"{significant(percent, digits if abs(percent) < 99.5 else digits + 1)} %"


def count(value: float | None) -> str:
    """A whole number with thousands separated."""
    return DASH if value is None else f"{value:,.0f}"


def counted(number: int, noun: str) -> str:
    """So many of them: ``1 user``, ``8 users``, ``1,000 users``, ``2 stretches``."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def large(value: float | None) -> str:
    """A number of which three digits matter: 1,089,183 -> 1.09 million, 285,092 -> 285,000."""
    if value is None:
        return DASH
    if abs(value) < 100:
        return significant(value)
    if abs(value) >= 999_500:
        return f"{significant(value / 1e6)} million"
    digits = 3 - len(f"{abs(value):.0f}")
    return f"{round(value, min(digits, 0)):,.0f}"


def rate(per_second: float | None) -> str:
    """A rate to three significant digits, with its unit."""
    return DASH if per_second is None else f"{plain(per_second)} req/s"


def usd(value: float | None) -> str:
    """Three digits of a price: $0.0000123, $2.49; a dash for None."""
    return DASH if value is None else f"${significant(value)}"


def round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least so much, but for rounding."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - 1e-9))
