"""What the load tester itself adds on this machine: measured against the null server, kept between runs, printed."""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ValidationError

from gapmeter.analysis.arrays import Ints
from gapmeter.analysis.numbers import duration
from gapmeter.analysis.results.manifest import (
    CalibratedLimit,
    CalibratedMachine,
    Calibration,
    GeneratorFloor,
    Placement,
)
from gapmeter.errors import NOT_VALID, OK, USAGE, UserError, reason_of, unless_refused
from gapmeter.loadgen.fleet import NotStarted
from gapmeter.loadgen.worker import GENERATORS
from gapmeter.machine.hardware import describe_hardware, describe_versions, place
from gapmeter.machine.instrument import (
    Cores,
    Errors,
    NotMeasured,
    Timing,
    TooBusy,
    equal_plan,
    issue,
    kept_to,
    poisson,
    stamp_errors,
)
from gapmeter.options import Say, tell
from gapmeter.records.folder import write_json

COMMAND = "make calibrate" if "MAKELEVEL" in os.environ else "gapmeter calibrate"  # make keeps it in the checkout


def this_machine() -> CalibratedMachine:
    """What a calibration holds for: another of any of these measures differently."""
    hardware, versions = describe_hardware(), describe_versions()
    return CalibratedMachine(
        cpu=hardware.cpu,
        cores=len(hardware.affinity),
        system=hardware.system,
        python=versions["python"],
        gapmeter=versions.get("gapmeter", "unknown"),
    )


def key_of(machine: CalibratedMachine) -> str:
    """What its calibration is kept under."""
    return " | ".join(
        (machine.cpu, f"{machine.cores} cores", machine.system, f"python {machine.python}", machine.gapmeter)
    )


def cache_file() -> Path:
    """Where calibrations are kept: under XDG_CACHE_HOME, by default ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "gapmeter" / "calibration.json"


def read_calibration() -> tuple[Calibration | None, str]:
    """This machine's calibration or None, and where one is there that cannot be read, why not."""
    kept, why = _kept()
    own = kept.get(key_of(this_machine()))
    if own is None:
        return None, why
    try:
        return Calibration.model_validate(own), ""
    except ValidationError as error:
        return None, f"{cache_file()} holds this machine's in another form ({_complaint(error)})"


def save_calibration(calibration: Calibration) -> Path:
    """Keep it; other machines' stay, and what it does not hold of this machine's other generators. Raises OSError."""
    path = cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    earlier, _ = read_calibration()
    generators = {**(earlier.generators if earlier else {}), **calibration.generators}
    own = calibration.model_copy(update={"generators": generators})
    kept = _KeptFile(machines={**_kept()[0], key_of(this_machine()): own.to_json()})
    write_json(path, kept.model_dump())
    return path


def _kept() -> tuple[Mapping[str, Any], str]:
    """Calibrations by machine; none where the file is missing, torn, or of another form, and then what it is."""
    path = cache_file()
    try:
        return _KeptFile.model_validate_json(path.read_bytes()).machines, ""
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, f"{path} cannot be read ({reason_of(error)})"
    except ValidationError as error:
        return {}, f"{path} is of another form ({_complaint(error)})"


def _complaint(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'JSON'}: {first['msg']}"


class _KeptFile(BaseModel):
    schema_version: Literal[1] = 1
    machines: dict[str, Any]


MOST_ERROR_MS = 1.0
STREAMS = 64
_TRIES = 3
_RATE = 20.0  # of the floor's requests, per second
_TOKENS = 64
_SHORT = Timing(first_ms=10, gap_ms=5)  # for the highest request rate, answers of eight tokens
_SHORT_TOKENS = 8
_ENDS = {
    "client": "",
    "server": " (at least: the null server gave out)",
    "search": " (at least: none higher was tried)",
}
_KEPT_UP = 0.9  # of the asked rate: below it the null server was the slower one


@dataclass(frozen=True, slots=True)
class Effort:
    """How long is measured. ``halvings``: how often the bracket around a limit is narrowed."""

    rounds: int
    floor_s: float
    step_s: float
    halvings: int


EFFORTS = {"full": Effort(3, 12, 1.5, 2), "quick": Effort(1, 3, 0.5, 0)}


@dataclass(frozen=True, slots=True)
class Trial:
    """One rate tried: the worse p99 of lag and of stamps, and the rate that the null server delivered."""

    error_ms: float
    delivered: float


def calibrate(generators: Sequence[str], *, quick: bool, say: Say) -> Calibration:
    """Measure each generator in turn: what the cache and a run's manifest hold.

    Takes about two minutes a generator, a quarter of a minute when quick. Raises instrument.NotMeasured.
    """
    effort = EFFORTS["quick" if quick else "full"]
    placement = place(1, local_server=True)
    found = {}
    with kept_to(placement.server):  # off the generator's core
        for name in generators:
            say(f"{name}: error and cost at {_RATE:g} requests/s ({effort.rounds} times {effort.floor_s:g} s)")
            found[name] = _floor(name, placement, effort, say)
    return Calibration(machine=this_machine(), most_error_ms=MOST_ERROR_MS, generators=found)


def run_calibration(generators: Sequence[str], *, quick: bool, as_json: bool) -> int:
    """The command: calibrate, keep the result, print it. Raises UserError for mistakes that the user can fix."""
    unknown = [name for name in generators if name not in GENERATORS]
    if unknown:
        raise UserError(f"no generator {unknown[0]!r}; there are {', '.join(GENERATORS)}", USAGE)
    installed = [name for name in GENERATORS if name != "locust" or importlib.util.find_spec("locust")]
    try:
        found = calibrate(generators or installed, quick=quick, say=tell)
    except (NotMeasured, NotStarted) as error:
        raise UserError(f"not calibrated: {error}", NOT_VALID) from error
    with unless_refused(f"{cache_file()} cannot be written", NOT_VALID):
        path = save_calibration(found)
    print(found.model_dump_json(indent=1) if as_json else render(found))
    tell(f"kept in {path}; the reports of runs on this machine have it from now on")
    return OK


def render(found: Calibration) -> str:
    """The result as a table of lines."""
    lines = []
    for name, floor in found.generators.items():
        lines.append(f"{name}: one process, against the null server's log")
        for metric in ("ttft", "itl", "e2e", "lag"):
            p50, p99 = (duration(getattr(floor, f"{metric}_p{p}_ms")) for p in (50, 99))
            title = "generator lag" if metric == "lag" else f"{metric.upper()} error"
            lines.append(f"  {title:<16} p50 {p50:>8}   p99 {p99:>8}")
        lines.append(f"  {'CPU per chunk':<16} {floor.chunk_us:.0f} µs")
        for what, limit in (("tokens", floor.tokens), ("requests", floor.requests)):
            end = _ENDS[limit.ended_by]
            lines.append(f"  most {what + '/s':<11} {limit.per_s:,.0f} with the error's p99 within 1 ms{end}")
    return "\n".join(lines)


def highest(
    attempt: Callable[[float], Trial], start: float, most: float, halvings: int, say: Callable[[float, Trial], None]
) -> CalibratedLimit:
    """The highest rate whose error stays within the limit: doubled until one does not, then narrowed down.

    A rate fails when three attempts do: a machine's hiccup is not its limit. What counts is the delivered rate. Raises
    TooBusy when the first rate fails.
    """
    good, rate = 0.0, start
    bad = 0.0
    while rate <= most:
        trial = _try(attempt, rate, say)
        if trial.error_ms > MOST_ERROR_MS:
            bad = rate
            break
        good = max(good, min(rate, trial.delivered))
        if trial.delivered < _KEPT_UP * rate:
            return CalibratedLimit(per_s=good, ended_by="server")
        rate *= 2
    if not bad:
        return CalibratedLimit(per_s=good, ended_by="search")
    if not good:
        raise TooBusy(
            f"at {start:,.0f} a second, the lowest rate that is tried, the error's p99 was {trial.error_ms:.2f} ms:"
            " this machine is too busy to be calibrated; stop other work (gapmeter doctor names it) and try again"
        )
    for _ in range(halvings):
        rate = (good * bad) ** 0.5
        trial = _try(attempt, rate, say)
        if trial.error_ms > MOST_ERROR_MS:
            bad = rate
        else:
            good = max(good, min(rate, trial.delivered))
    return CalibratedLimit(per_s=good, ended_by="client")


def _try(attempt: Callable[[float], Trial], rate: float, say: Callable[[float, Trial], None]) -> Trial:
    trial = attempt(rate)
    for _ in range(_TRIES - 1):
        if trial.error_ms > MOST_ERROR_MS:
            trial = min(trial, attempt(rate), key=lambda one: one.error_ms)
    say(rate, trial)
    return trial


def _floor(name: str, placement: Placement, effort: Effort, say: Say) -> GeneratorFloor:
    """One generator's own error and cost, medians of the rounds.

    The errors are the client's figure minus the null server's log, over requests or gaps.
    """
    cores = Cores(placement.server, placement.generator)
    rounds = [_round(name, cores, effort, seed) for seed in range(effort.rounds)]
    middle = {key: statistics.median(found[key] for found in rounds) for key in rounds[0]}

    def show(what: str) -> Callable[[float, Trial], None]:
        return lambda rate, trial: say(
            f"{name}: {rate:,.0f} {what}/s: {trial.delivered:,.0f} delivered, error p99 {trial.error_ms:.2f} ms"
        )

    tokens = highest(
        lambda rate: _token_trial(name, cores, rate, effort.step_s), 8_000, 1_024_000, effort.halvings, show("tokens")
    )
    requests = highest(
        lambda rate: _request_trial(name, cores, rate, effort.step_s), 200, 12_800, effort.halvings, show("requests")
    )
    return GeneratorFloor.model_validate(
        {
            **middle,
            "tokens": tokens,
            "requests": requests,
            "measured_wall": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "quick": effort is EFFORTS["quick"],
            "cores_shared": placement.shared,
        }
    )


def _round(name: str, cores: Cores, effort: Effort, seed: int) -> dict[str, float]:
    """Errors at a gentle rate, and the CPU time of a chunk that arrives alone."""
    due = poisson(_RATE, round(_RATE * effort.floor_s), [seed, 1])
    seen = stamp_errors(issue(cores, equal_plan(due, _TOKENS), Timing(), generator=name, warm=STREAMS))
    found: dict[str, float] = {}
    for metric in ("ttft", "itl", "e2e", "lag"):
        values = getattr(seen, metric)
        found |= {f"{metric}_p{p}_ms": float(np.percentile(values, p)) / 1e6 for p in (50, 99)}
    apart = np.sort(np.random.default_rng([seed, 2]).uniform(0, 0.5e9, STREAMS)).astype(np.int64)
    tokens = max(100, round(100 * effort.step_s))
    run = issue(cores, equal_plan(apart, tokens), Timing(), generator=name, warm=STREAMS, measure_cpu=True)
    return found | {"chunk_us": run.chunk_us}


def _token_trial(name: str, cores: Cores, rate: float, seconds: float) -> Trial:
    """``STREAMS`` answers at once, each with its share of the tokens, begun at times evenly apart."""
    gap_ns = STREAMS / rate * 1e9
    due = (np.arange(STREAMS) * gap_ns / STREAMS).astype(np.int64)
    plan = equal_plan(due, max(2, round(rate * seconds / STREAMS)))
    run = issue(cores, plan, Timing(gap_ms=gap_ns / 1e6), generator=name, warm=STREAMS)
    seen = stamp_errors(run)
    return Trial(_worst(seen), _pace(seen.stamps, len(seen.stamps)))


def _request_trial(name: str, cores: Cores, rate: float, seconds: float) -> Trial:
    """Poisson arrivals of short answers, on connections that are open."""
    due = poisson(rate, max(100, round(rate * seconds)), [round(rate), 3])
    open_at_once = rate * (_SHORT.first_ms + _SHORT.gap_ms * _SHORT_TOKENS) / 1e3
    warm = min(4000, round(1.5 * open_at_once) + 32)
    run = issue(cores, equal_plan(due, _SHORT_TOKENS), _SHORT, generator=name, warm=warm)
    sent = np.array([record.sent_ns for record in run.records], np.int64)
    planned = (len(due) - 1) / float(due[-1] - due[0]) * 1e9
    return Trial(_worst(stamp_errors(run)), rate * _pace(sent, len(sent) - 1) / planned)


def _worst(seen: Errors) -> float:
    return max(float(np.percentile(values, 99)) for values in (seen.late, seen.lag)) / 1e6


def _pace(at_ns: Ints, count: int) -> float:
    """``count`` over the time from the first stamp to the last, per second."""
    return count / max(1.0, float(at_ns.max() - at_ns.min())) * 1e9
