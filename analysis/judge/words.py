"""What verdicts, warnings and reports say alike of what was found: facts in, words out."""

from __future__ import annotations

from gapmeter.analysis.numbers import count, duration, plain
from gapmeter.analysis.results.distribution import figure_name
from gapmeter.analysis.results.requests import Outage
from gapmeter.analysis.results.run import SloAnswer
from gapmeter.analysis.results.trust import QueueSlope, SpeedChange

PROCESSES = {
    "api": "API server", "server": "the server's other processes", "load tester": "the load tester",
    "CPU limit": "the container's CPU limit", "unknown": "others", "nobody": "no program",
    "stopped": "no program, as the server was stopped",
}  # fmt: skip
SHARED = (
    "the server had more threads to run than cores; a faster device would not shorten this",
    "more cores for the server",
)
STRANGERS = {
    "another program": ("another program runs on the server's cores", "dedicated cores for the server"),
    "load tester": (
        "the load tester runs on the server's cores",
        "other cores, or another machine, for the load tester",
    ),
    "stopped": ("a signal (SIGSTOP) or a debugger had stopped it", "to find what stops the server"),
    "CPU limit": ("its control group had used up its share of the CPU", "a higher CPU limit (cpu.max) for the server"),
}


def held_by(process: str, stage: str, program: str) -> str:
    """Who had a core, for people; see Culprit."""
    process = "the program" if process == "another program" and program else process
    called = f" {program}" if program else ""
    return f"{PROCESSES.get(process, process)}{called}" + (f" at {stage.replace('_', ' ')}" if stage else "")


def late_words(ms: float, of: str = "it") -> str:
    """Why a figure is refused, or not judged."""
    return f"up to {duration(ms)} of {of} may be the load tester's own lateness"


def not_judged(answer: SloAnswer) -> str:
    """Why an SLO has no answer."""
    if answer.metric == "errors":
        return "0 of 0 requests failed: no request was measured"
    if answer.late is not None:
        return f"{figure_name(answer.metric, answer.percentile)} is not judged: {late_words(answer.late)}"
    return never_occurred(answer.metric, answer.percentile)


def never_occurred(metric: str, percentile: float | None) -> str:
    """Why nobody knows whether a limit is kept: answers of one token have no TPOT, for instance."""
    return f"{figure_name(metric, percentile)} never occurred: no request had one"


def speed_words(change: SpeedChange) -> str:
    """``1.4 times slower``."""
    slower = change.ratio > 1
    return f"{plain(change.ratio if slower else 1 / change.ratio, 2)} times {'slower' if slower else 'faster'}"


def growth_text(slope: QueueSlope) -> str:
    """By how much a queue grew, and a steady one does not."""
    low, high = slope.per_s_ci
    first, last = slope.in_flight
    return (
        f"no steady state: requests in flight grew by {plain(slope.per_s, 2)} a second "
        f"({100 * slope.confidence:.0f} % interval {plain(low, 2)} .. {plain(high, 2)}), "
        f"from about {first:.0f} to {last:.0f}, where a steady queue seldom grows by more than {slope.steady_most:.0f}"
    )


def outage_text(outage: Outage) -> str:
    """From when to when everything failed, and how."""
    how = ", ".join(f"{n} {name}" for name, n in outage.failed.items())
    until = "on" if outage.until_s is None else f"until {outage.until_s:.1f} s"
    return f"from {outage.from_s:.1f} s {until} all {count(outage.requests)} requests failed ({how})"
