"""The runs that are compared: the requests and results of each, what differs between two, and whether it may.

Measured requests are arrays in the order they were due. Every fact that can change a figure is taken from the runs'
manifests and summaries. A difference *follows* from the declared factor when changing the one changes the other:
another ``server.max_batch`` is another command line. What is left *blocks*. What cannot change a latency (an SLO, a
summary's text) is *noted*.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from gapmeter.analysis.arrays import Bools, Floats, Ints
from gapmeter.analysis.requests import figures as fig
from gapmeter.analysis.requests.metrics import (
    ended_by_us,
    gaps_of,
    measured_requests,
    request_values_ns,
    stamps_ns,
    succeeded,
    with_failed,
)
from gapmeter.analysis.results import Manifest, RunResult
from gapmeter.analysis.results.comparison import BLOCKS, FACTOR, FOLLOWS, NOTED, Comparability, Fact, Meaning
from gapmeter.analysis.results.trust import Floor
from gapmeter.analysis.stages import STAGE_NAMES, column
from gapmeter.analysis.stats.series import Series, time_blocks
from gapmeter.analysis.tables import read_table, table_in
from gapmeter.scenarios.model import without_paths
from gapmeter.scenarios.slo import LATENCIES

PER_REQUEST: tuple[str, ...] = ("ttft", "tpot", "e2e")
_UNREAD = frozenset({"chunk_tokens", "receive_wait_ns"})  # half of a table of requests
_UNKNOWN_NS = 3600e9  # that a failed request took, where nothing says how long it was given: an hour, beyond any limit
NOT_RECORDED = "not recorded"
_SECTIONS = ("server.", "workload.", "load.")  # of a scenario
_FREE = (".args", ".env")  # of which a scenario names those that it sets
_IGNORED = ("name", "summary")
_NOTED = ("slo", "repeat", "sweep", "cost", "telemetry", "server.ready_timeout")  # and what lies in them
# of what the target is: told elsewhere, or measured anew before every start and therefore never the same
_NO_FACTS = ("url", "model", "command", "env", "peaks")
_FLOOR_FACTOR = 1.5
# a factor, or what it lies in: what differs because of it, and all within
_FOLLOWS: dict[str, tuple[str, ...]] = {
    "server": ("engine",),
    "server.engine": ("engine", "device", "versions", "placement", "model"),
    "server.model": ("model", "plan"),
    "server.tokenizer": ("model", "plan"),
    "server.url": ("model", "hardware", "device"),
    "workload": ("plan",),
    "load": ("plan", "placement"),
    "seed": ("plan",),
    "hardware": ("floor", "placement", "device", "engine", "versions.torch"),
    "engine": ("server.engine", "device", "versions", "placement", "model"),
    "model": ("plan", "server.model", "engine"),
}
_ENGINE_FLAGS_OF_THE_PLACE = frozenset({"--host", "--port"})
# What runs have beside a scenario's keys, and groups whose members depend on machine and engine.
OWN_FACTORS = ("device", "engine", "floor", "hardware", "model", "placement", "plan", "versions")
OPEN_FACTORS = ("server.args.", "engine.", "hardware.", "placement.", "versions.")


@dataclass(frozen=True, slots=True, eq=False)
class RunColumns:
    """A run's measured requests, index i of every column the same one; times in ns.

    ``planned``: shape (n, 5), what the plan says of each (index, turn, due after the run's t0, prompt and output tokens
    asked for); ``values[metric]``: shape (n,), infinite where a request failed, NaN where it has none (it had one
    token); ``given_ns``: how long a request that failed was given, which it took at least; ``gaps_ns`` and
    ``gap_owner`` (row of the request) in the order the gaps ended, at ``gap_at_ns``, infinite for those that a failed
    request owes; ``ledgers[event]``: shape (n, stages) by ``STAGE_NAMES``, NaN rows where there is no ledger, NaN
    columns where a stage is unmeasured. ``open_loop``: arrivals did not wait for answers. ``down``: the server failed
    from a moment on.
    """

    name: str
    open_loop: bool
    planned: Ints
    good: Bools
    given_ns: Floats
    values: Mapping[str, Floats]
    gaps_ns: Floats
    gap_at_ns: Ints
    gap_owner: Ints
    ledgers: Mapping[str, Floats]
    down: bool = False

    @property
    def count(self) -> int:
        return len(self.planned)

    def digest(self) -> bytes:
        """A digest of what was measured: it seeds this run's resampling, which so is the same on either side."""
        parts = (self.planned, self.values["e2e"], self.values["ttft"])
        return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).digest()

    def at_least_ns(self, metric: str) -> Floats:
        """A metric of every request, shape (n,): of one that failed, what it took at least."""
        values = self.values[metric]
        return np.where(np.isinf(values), self.given_ns, values)

    def gaps_at_least_ns(self) -> Floats:
        """The gaps: of those that a failed request owes, what it took at least."""
        return np.where(np.isinf(self.gaps_ns), self.given_ns[self.gap_owner], self.gaps_ns)

    def sums(self) -> tuple[Floats, Floats]:
        """What each request adds to every metric's sum, and to its number of values: shapes (n, metrics).

        What failed adds nothing: it waited longer than any success, so a mean of all is at least that of successes.
        """
        amounts, counts = np.zeros((2, self.count, len(LATENCIES)))
        for at, metric in enumerate(LATENCIES):
            values = self.gaps_ns if metric == "itl" else self.values[metric]
            owner = self.gap_owner if metric == "itl" else np.arange(self.count)
            there = np.isfinite(values)
            amounts[:, at] = np.bincount(owner[there], values[there], minlength=self.count)
            counts[:, at] = np.bincount(owner[there], minlength=self.count)
        return amounts, counts

    def series(self, metric: str) -> Series:
        """A metric's values and what they are worth; what failed is infinite."""
        if metric != "itl":
            values = self.values[metric]
            return Series(values[~np.isnan(values)])
        if not len(self.gaps_ns):
            return Series(np.zeros(0))
        owners = np.unique(self.gap_owner, return_inverse=True)[1].astype(np.int64)
        return Series(self.gaps_ns, [owners, time_blocks(self.gap_at_ns, self.gaps_ns)])

    def rows(self, keep: Ints) -> RunColumns:
        """The same run with only these requests, in this order."""
        place = np.full(self.count, -1, dtype=np.int64)
        place[keep] = np.arange(len(keep))
        owner = place[self.gap_owner]
        kept = owner >= 0
        return RunColumns(
            self.name, self.open_loop, self.planned[keep], self.good[keep], self.given_ns[keep],
            {metric: values[keep] for metric, values in self.values.items()},
            self.gaps_ns[kept], self.gap_at_ns[kept], owner[kept],
            {event: table[keep] for event, table in self.ledgers.items()}, self.down,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class AnalysedRun:
    """A run with its manifest and its results."""

    columns: RunColumns
    manifest: Manifest
    result: RunResult


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One side of a comparison: runs of the same thing."""

    runs: tuple[AnalysedRun, ...]

    @property
    def first(self) -> AnalysedRun:
        return self.runs[0]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.columns.name for each in self.runs)

    @property
    def requests(self) -> int:
        return sum(each.columns.count for each in self.runs)

    @property
    def failed(self) -> int:
        return sum(int((~each.columns.good).sum()) for each in self.runs)


def read_run(path: Path) -> AnalysedRun:
    """A run's folder that has been analysed.

    Raises FileNotFoundError when manifest, summary or tables are not there, NotReadable when they are not as this
    version writes them.
    """
    manifest, result = Manifest.read(path), RunResult.read(path)
    columns = pq.read_schema(path / "requests.parquet").names
    requests = read_table(path / "requests.parquet", columns=[name for name in columns if name not in _UNREAD])
    ledger = None if result.ledger.refused else table_in(path, "ledger")
    plan = manifest.plan
    own = path.resolve()
    name = f"{own.parent.name}/{own.name}" if own.parent.parent.name == "points" else own.name  # of a sweep's point
    down = result.outage is not None
    run = run_of(requests, ledger, name, open_loop=plan.loop == "open", t0_ns=plan.t0_ns or 0, down=down)
    return AnalysedRun(run, manifest, result)


def run_of(
    requests: pd.DataFrame, ledger: pd.DataFrame | None, name: str, *, open_loop: bool, t0_ns: int = 0,
    down: bool = False,
) -> RunColumns:  # fmt: skip
    """A run from its tables, as ``requests.parquet`` and ``ledger.parquet`` have them."""
    measured = measured_requests(requests)
    measured = measured[~ended_by_us(measured)].reset_index(drop=True)  # no server failed these
    good = succeeded(measured)
    gaps = gaps_of(measured, good, failures=True)
    names = ("index", "turn", "prompt_tokens_asked", "output_tokens_asked")
    index, turn, prompt, output = (stamps_ns(measured, name) for name in names)
    values = {
        metric: with_failed(measured, metric, request_values_ns(measured, metric), good) for metric in PER_REQUEST
    }
    given = stamps_ns(measured, "censored_ns").astype(np.float64)
    longest = max(values["e2e"][good], default=0.0)
    return RunColumns(
        name=name,
        open_loop=open_loop,
        planned=np.stack([index, turn, measured["due_ns"].to_numpy(np.int64) - t0_ns, prompt, output], axis=1),
        good=good,
        given_ns=np.maximum(np.where(given < 0, _UNKNOWN_NS, given), longest),
        values=values,
        gaps_ns=gaps.gap_ns,
        gap_at_ns=gaps.at_ns,
        gap_owner=gaps.row,
        ledgers={event: _ledger_of(ledger, measured, event) for event in fig.LEDGER_OF.values()},
        down=down,
    )


def _ledger_of(ledger: pd.DataFrame | None, measured: pd.DataFrame, event: str) -> Floats:
    """Shape (n, stages). What is unmeasured in every ledger stays NaN; in a few, its time is in their remainder."""
    out = np.full((len(measured), len(STAGE_NAMES)), np.nan)
    rows = fig.ledgers_of(ledger, measured, event)
    there = measured["request_id"].isin(rows["request_id"]).to_numpy(bool)
    for number, name in enumerate(STAGE_NAMES):
        if column(name) in rows:
            values = rows[column(name)].to_numpy(np.float64, na_value=np.nan)
            out[there, number] = values if np.isnan(values).all() else np.nan_to_num(values)
    return out


def check_protocol(
    a: Manifest, b: Manifest, floor_a: Floor | None, floor_b: Floor | None, factors: Sequence[str] = ()
) -> Comparability:
    """Judge two runs by what their manifests say, and by the load tester's own floors.

    ``factors``: keys that may differ, a scenario's (``server.max_batch``) or the protocol's own (``hardware``,
    ``engine``, ``versions.gapmeter``); a key stands for all that begin with it and a point. Without any, a scenario key
    that alone differs is taken.
    """
    one, other = facts_of(a), facts_of(b)
    contents, others = a.contents or {}, b.contents or {}
    # Files that say the same may lie anywhere.
    alike = set(one) if one["plan"] == other["plan"] else {key for key in contents if contents[key] == others.get(key)}
    one, other = ({key: _without_path(key, each[key]) if key in alike else each[key] for key in each}
                  for each in (one, other))  # fmt: skip
    differing = _differing(one, other)
    named = tuple(factors) or _recognize(differing)
    # What follows from a key that was declared with its whole section follows all the same.
    causes = (*named, *(key for key in differing if is_within(key, *named)))
    repeats = a.repeat != b.repeat
    facts = [_fact(key, one, other, _meaning(key, causes, repeats=repeats)) for key in differing]
    facts += _floor(floor_a, floor_b, causes)
    order = (FACTOR, BLOCKS, FOLLOWS, NOTED)
    found = tuple(sorted(facts, key=lambda fact: order.index(fact.meaning)))
    return Comparability.of("", found, named, recognized=not factors and bool(named))


def facts_of(manifest: Manifest) -> dict[str, Any]:
    """Everything that two comparable runs share, flat, by key. The scenario's keys are as in its file."""
    target, hardware = manifest.target, manifest.hardware.to_json()
    settings = [f"{key}={value}" for key, value in sorted((target.env or {}).items()) if not value.startswith("/")]
    env = None if target.env is None else " ".join(settings)  # without folders
    engine = {"command": _command(target.command), "env": env}
    others = flatten({key: value for key, value in target.to_json().items() if key not in _NO_FACTS})
    out = {key: value for key, value in flatten(manifest.scenario).items() if key not in _IGNORED}
    out |= {f"engine.{key}": value for key, value in (engine | others).items()}
    out |= {f"hardware.{key}": value for key, value in hardware.items() if key != "memory_gib"}
    out |= {f"versions.{key}": value for key, value in manifest.versions.items()}
    out |= {f"placement.{key}": value for key, value in manifest.placement.to_json().items()}
    return out | {"model": target.model, "plan": manifest.plan.digest, "device": manifest.device}


def asked_otherwise(a: Mapping[str, Any], b: Mapping[str, Any], factors: Sequence[str]) -> list[Fact]:
    """What differs in the load and the workload of two scenarios, as manifests have them, and is none of ``factors``.

    What their files hold is left out: ``check_protocol`` knows that once both have run.
    """
    of_both = (flatten({name: each[name] for name in ("workload", "load")}) for each in (a, b))
    one, other = ({key: _without_path(key, value) for key, value in each.items()} for each in of_both)
    return [_fact(key, one, other, BLOCKS) for key in _differing(one, other) if _meaning(key, factors) == BLOCKS]


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The keys with another value."""
    return [key for key in sorted({*one, *other}) if not are_alike(one.get(key), other.get(key))]


def are_alike(a: Any, b: Any) -> bool:
    """Whether two values are the same. A number and its text are: an engine is given 8 and "8" alike.

    No other text is what it is the word for: to an engine's flags True and None are no values (``flag_words``).
    """
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, str) and isinstance(b, int | float):
        a, b = b, a
    return bool(a == b) or (isinstance(a, int | float) and isinstance(b, str) and b in (str(a), words(a)))


def _without_path(key: str, value: Any) -> Any:
    section, _, leaf = key.partition(".")
    return without_paths({leaf: value})[leaf] if section in ("workload", "load") else value


def flatten(value: Mapping[str, Any], depth: int = 2, before: str = "") -> dict[str, Any]:
    """``{"server": {"args": {"x": 1}}}`` as ``{"server.args.x": 1}``; laws of lengths stay whole."""
    out: dict[str, Any] = {}
    for key, inner in value.items():
        name = f"{before}{key}"
        if isinstance(inner, Mapping) and (depth > 1 or name.endswith(_FREE)):
            out |= flatten(inner, depth - 1, f"{name}.")
        else:
            out[name] = inner
    return out


def _command(words: Sequence[str] | None) -> str | None:
    """The engine's command line without what belongs to the place: interpreter, host, port, folders above models."""
    if not words:
        return None
    kept = (word for before, word in pairwise(words) if not {before, word} & _ENGINE_FLAGS_OF_THE_PLACE)
    return " ".join(PurePath(word).name if word.startswith("/") else word for word in kept)


def _recognize(differing: Sequence[str]) -> tuple[str, ...]:
    """The scenario's key that differs and may change a latency, if it is only one."""
    keys = [key for key in differing if key.startswith((*_SECTIONS, "seed")) and _meaning(key, ()) != NOTED]
    return (keys[0],) if len(keys) == 1 else ()


def _meaning(key: str, factors: Sequence[str], *, repeats: bool = False) -> Meaning:
    """``repeats``: the runs are different repeats of a scenario, which ask with fresh texts."""
    if is_within(key, *_NOTED) or (repeats and key == "plan"):
        return NOTED
    if is_within(key, *factors):
        return FACTOR
    return FOLLOWS if any(follows(key, factor) for factor in factors) else BLOCKS


def is_within(key: str, *wholes: str) -> bool:
    """Whether a key is one of ``wholes``, or lies below one."""
    return any(key == whole or key.startswith(f"{whole}.") for whole in wholes)


def follows(key: str, factor: str) -> bool:
    """Whether another value of the factor alone can make ``key`` differ."""
    return any(is_within(key, *those) for whole, those in _FOLLOWS.items() if is_within(factor, whole))


def _floor(a: Floor | None, b: Floor | None, factors: Sequence[str]) -> list[Fact]:
    """The load tester's own floor: a difference when a p99 of it is half as large again; noted when one is unknown."""
    one, other = _floor_words(a), _floor_words(b)
    if a is None or b is None:
        return [] if a is b else [Fact(key="floor", a=one, b=other, meaning=NOTED)]
    ends = [(a.ttft_p99_ms, b.ttft_p99_ms), (a.itl_p99_ms, b.itl_p99_ms), (a.e2e_p99_ms, b.e2e_p99_ms)]
    if all(max(pair) <= _FLOOR_FACTOR * min(pair) for pair in ends):
        return []
    return [Fact(key="floor", a=one, b=other, meaning=_meaning("floor", factors))]


def _floor_words(floor: Floor | None) -> str:
    return "unmeasured" if floor is None else f"p99 TTFT {floor.ttft_p99_ms:.3g} ms, ITL {floor.itl_p99_ms:.3g} ms"


def _fact(key: str, one: Mapping[str, Any], other: Mapping[str, Any], meaning: Meaning) -> Fact:
    """What differs, in words."""
    a, b = _told(one, key), _told(other, key)
    return Fact(key=key, a=a, b=b, meaning=meaning) if a != b else fact_of(key, one.get(key), other.get(key), meaning)


def fact_of(key: str, a: Any, b: Any, meaning: Meaning) -> Fact:
    """Two values that differ, in words."""
    one, other = words_apart(a, b)
    return Fact(key=key, a=one, b=other, meaning=meaning)


def _told(facts: Mapping[str, Any], key: str) -> str:
    """A fact's value in words: none is what a scenario leaves unset, or one of ``_FREE`` that it does not name.

    Of a key that an older manifest lacks, and of all that is no scenario's, nobody knows it.
    """
    value, is_own = facts.get(key), is_within(key, *OWN_FACTORS)
    unset = not is_own and (key in facts or any(f"{each}." in key for each in _FREE))
    return words(value) if value is not None or unset else NOT_RECORDED


def words_apart(*values: Any) -> list[str]:
    """Values in words; as JSON where some that differ are called the same, as None and "none" are."""
    said = list(map(words, values))
    if all(are_alike(a, b) for a, b in combinations(values, 2) if words(a) == words(b)):
        return said
    return [json.dumps(each, ensure_ascii=False, default=str) for each in values]


def words(value: Any) -> str:
    """A value in a sentence, as one writes it in a scenario; a number with all of its digits, since two may differ."""
    if value is None or value == "":
        return "none"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {words(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(words, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)
