"""May two runs be compared? What differs between them, and whether only what was meant to differ does.

Every fact that can change a figure is taken from the runs' manifests and summaries. A difference *follows* from the
declared factor when changing the one changes the other: another ``server.max_batch`` is another command line. What is
left *blocks*. What cannot change a latency (an SLO, a summary's text) is *noted*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from gapmeter.analysis.results import Manifest, RunResult
from gapmeter.analysis.results.comparison import BLOCKS, FACTOR, FOLLOWS, NOTED, Comparability, Fact, Meaning
from gapmeter.analysis.results.run import INVALID
from gapmeter.analysis.results.trust import Floor
from gapmeter.scenarios.model import without_paths

NOT_RECORDED = "not recorded"

_IGNORED = ("name", "summary")
_NOTED = ("slo", "repeat", "sweep", "doc", "cost", "telemetry", "server.ready_timeout")  # and what lies in them
# of what the target is: told elsewhere, or measured anew before every start and therefore never the same
_NO_FACTS = ("url", "model", "command", "env", "peaks")
_FLOOR_FACTOR = 1.5
# a factor's beginning: what differs because of it
_FOLLOWS: dict[str, tuple[str, ...]] = {
    "server.": ("engine.",),
    "server.engine": ("engine.", "device", "versions.", "placement.", "model"),
    "server.model": ("model", "plan"),
    "server.tokenizer": ("model", "plan"),
    "server.url": ("model", "hardware.", "device"),
    "workload.": ("plan",),
    "load.": ("plan", "placement."),
    "seed": ("plan",),
    "hardware": ("floor", "placement.", "device", "engine.", "versions.torch"),
    "engine": ("server.engine", "device", "versions.", "placement.", "model"),
    "model": ("plan", "server.model", "engine."),
}
_ENGINE_FLAGS_OF_THE_PLACE = ("--host", "--port")
# What runs have beside a scenario's keys, and groups whose members depend on machine and engine.
OWN_FACTORS = ("device", "engine", "floor", "hardware", "model", "placement", "plan", "versions")
OPEN_FACTORS = ("server.args.", "engine.", "hardware.", "placement.", "versions.")


def check(
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
    differing = [key for key in sorted({*one, *other}) if one.get(key) != other.get(key)]
    named = tuple(factors) or _recognize(differing)
    repeats = a.repeat != b.repeat
    facts = [
        Fact(key=key, a=_words(one.get(key)), b=_words(other.get(key)), meaning=_meaning(key, named, repeats=repeats))
        for key in differing
    ]
    facts += _floor(floor_a, floor_b, named)
    order = (FACTOR, BLOCKS, FOLLOWS, NOTED)
    found = tuple(sorted(facts, key=lambda fact: order.index(fact.meaning)))
    return Comparability.of("", found, named, recognized=not factors and bool(named))


def facts_of(manifest: Manifest) -> dict[str, Any]:
    """Everything that two comparable runs share, flat, by key. The scenario's keys are as in its file."""
    target, hardware = manifest.target, manifest.hardware.to_json()
    settings = [f"{key}={value}" for key, value in sorted((target.env or {}).items()) if not value.startswith("/")]
    env = None if target.env is None else " ".join(settings)  # without folders
    engine = {"command": _command(target.command), "env": env}
    others = _flatten({key: value for key, value in target.to_json().items() if key not in _NO_FACTS}, 2)
    out = {key: value for key, value in _flatten(manifest.scenario, 2).items() if key not in _IGNORED}
    out |= {f"engine.{key}": value for key, value in (engine | others).items()}
    out |= {f"hardware.{key}": value for key, value in hardware.items() if key != "memory_gib"}
    out |= {f"versions.{key}": value for key, value in manifest.versions.items()}
    out |= {f"placement.{key}": value for key, value in manifest.placement.to_json().items()}
    return out | {"model": target.model, "plan": manifest.plan.digest, "device": manifest.device}


def asked_otherwise(a: Mapping[str, Any], b: Mapping[str, Any], factors: Sequence[str]) -> list[Fact]:
    """What differs in the load and the workload of two scenarios, as manifests have them, and is none of ``factors``.

    What their files hold is left out: ``check`` knows that once both have run.
    """
    of_both = (_flatten({name: each[name] for name in ("workload", "load")}, 2) for each in (a, b))
    one, other = ({key: _without_path(key, value) for key, value in each.items()} for each in of_both)
    return [
        Fact(key=key, a=_words(one.get(key)), b=_words(other.get(key)), meaning=BLOCKS)
        for key in sorted({*one, *other})
        if one.get(key) != other.get(key) and _meaning(key, factors) == BLOCKS
    ]


def _without_path(key: str, value: Any) -> Any:
    section, _, leaf = key.partition(".")
    return without_paths({leaf: value})[leaf] if section in ("workload", "load") else value


def _flatten(value: Mapping[str, Any], depth: int, before: str = "") -> dict[str, Any]:
    """``{"server": {"args": {"x": 1}}}`` as ``{"server.args.x": 1}``; laws of lengths stay whole."""
    out: dict[str, Any] = {}
    for key, inner in value.items():
        name = f"{before}{key}"
        if isinstance(inner, Mapping) and (depth > 1 or name.endswith((".args", ".env"))):
            out |= _flatten(inner, depth - 1, f"{name}.")
        else:
            out[name] = inner
    return out


def _command(words: Sequence[str] | None) -> str | None:
    """The engine's command line without what belongs to the place: interpreter, host, port, folders above models."""
    if not words:
        return None
    kept, skip = [], False
    for word in words[1:]:
        if not skip and word not in _ENGINE_FLAGS_OF_THE_PLACE:
            kept.append(PurePath(word).name if word.startswith("/") else word)
        skip = word in _ENGINE_FLAGS_OF_THE_PLACE
    return " ".join(kept)


def _recognize(differing: Sequence[str]) -> tuple[str, ...]:
    """The scenario's key that differs, if it is only one."""
    sections = ("server.", "workload.", "load.")
    keys = [key for key in differing if key.startswith(sections) or key == "seed"]
    return (keys[0],) if len(keys) == 1 else ()


def _meaning(key: str, factors: Sequence[str], *, repeats: bool = False) -> Meaning:
    """``repeats``: the runs are different repeats of a scenario, which ask with fresh texts."""
    if any(_within(key, noted) for noted in _NOTED) or (repeats and key == "plan"):
        return NOTED
    if any(_within(key, factor) for factor in factors):
        return FACTOR
    return FOLLOWS if any(_follows(key, factor) for factor in factors) else BLOCKS


def _within(key: str, whole: str) -> bool:
    return key == whole or key.startswith(f"{whole}.")


def _follows(key: str, factor: str) -> bool:
    """Whether another value of the factor alone can make ``key`` differ."""
    behind = [
        each
        for start, those in _FOLLOWS.items()
        if factor == start or factor.startswith(start if start.endswith(".") else f"{start}.")
        for each in those
    ]
    return any(key == each or (each.endswith(".") and key.startswith(each)) for each in behind)


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


def unsound_because(manifest: Manifest, result: RunResult) -> str:
    """Why a run is no valid measurement, or ""."""
    if manifest.status != "complete":
        return f"incomplete: {manifest.ended_because or 'killed'}"
    return "; ".join(result.invalid_reasons) if result.verdict == INVALID else ""


def _words(value: Any) -> str:
    if value is None:
        return NOT_RECORDED
    if value == "":
        return "none"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_words(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, float):
        return f"{value:.12g}"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
