"""May two runs be compared? What differs between them, and whether only what was meant to differ does.

Every fact that can change a figure is taken from the runs' manifests and summaries. A difference *follows* from the
declared factor when changing the one changes the other: another ``server.max_batch`` is another command line. What is
left *blocks*. What cannot change a latency (an SLO, a summary's text) is *noted*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

MANIFEST_VERSION = 1
SUMMARY_VERSION = 2
FACTOR, FOLLOWS, NOTED, BLOCKS = "factor", "follows", "noted", "blocks"
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


class NotReadable(Exception):
    """A run in a form that this version cannot compare."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that differs: its key, its value on either side, in words, and what that means for the comparison."""

    key: str
    a: str
    b: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Protocol:
    """The answer. ``factors`` are what was declared, or the one scenario key that differs (``recognized``)."""

    factors: tuple[str, ...]
    recognized: bool
    facts: tuple[Fact, ...]

    @property
    def blocking(self) -> tuple[Fact, ...]:
        return tuple(fact for fact in self.facts if fact.meaning == BLOCKS)

    @property
    def comparable(self) -> bool:
        return not self.blocking


def check(
    a: Mapping[str, Any], b: Mapping[str, Any], summary_a: Mapping[str, Any], summary_b: Mapping[str, Any],
    factors: Sequence[str] = (),
) -> Protocol:  # fmt: skip
    """Judge two runs by their manifests and summaries.

    ``factors``: keys that may differ, a scenario's (``server.max_batch``) or the protocol's own (``hardware``,
    ``engine``, ``versions.gapmeter``); a key stands for all that begin with it and a point. Without any, a scenario key
    that alone differs is taken. Raises NotReadable where a run is of another version of the format.
    """
    sides = []
    for manifest, summary in ((a, summary_a), (b, summary_b)):
        _readable(manifest, summary)
        sides.append(facts_of(manifest, summary))
    differing = [key for key in sorted({*sides[0], *sides[1]}) if _differ(key, *(side.get(key) for side in sides))]
    named = tuple(factors) or _recognize(differing)
    one, other = sides
    repeats = a.get("repeat") != b.get("repeat")
    facts = [
        Fact(key, _words(one.get(key)), _words(other.get(key)), _meaning(key, named, repeats=repeats))
        for key in differing
    ]
    facts += _floor(one["floor"], other["floor"], named)
    unsound = unsound_because(a, summary_a), unsound_because(b, summary_b)
    facts += [Fact("validity", _words(unsound[0]), _words(unsound[1]), BLOCKS)] if any(unsound) else []
    order = (FACTOR, BLOCKS, FOLLOWS, NOTED)
    found = tuple(sorted(facts, key=lambda fact: order.index(fact.meaning)))
    return Protocol(named, not factors and bool(named), found)


def _readable(manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    for what, found, known in (
        ("manifest.json", manifest.get("schema_version"), MANIFEST_VERSION),
        ("summary.json", summary.get("schema_version"), SUMMARY_VERSION),
    ):
        if found != known:
            by = manifest.get("versions", {}).get("gapmeter", "an unknown version")
            raise NotReadable(
                f"{what} is in version {found} of the format (gapmeter {by}), this gapmeter reads {known}"
            )


def facts_of(manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that two comparable runs share, flat, by key. The scenario's keys are as in its file."""
    flat = _flatten(manifest.get("scenario") or {}, 2)
    target, versions = manifest.get("target") or {}, manifest.get("versions") or {}
    engine = {"command": _command(target.get("command")), "env": _environment(target.get("env"))}
    told = _flatten({k: v for k, v in target.items() if k not in _NO_FACTS}, 2)
    placement = manifest.get("placement") or {}
    out = {key: value for key, value in flat.items() if key not in _IGNORED}
    out |= {f"engine.{key}": value for key, value in (engine | told).items()}
    out |= {f"hardware.{key}": value for key, value in (manifest.get("hardware") or {}).items() if key != "memory_gib"}
    out |= {f"versions.{key}": value for key, value in versions.items()}
    out |= {f"placement.{key}": value for key, value in placement.items()}
    out |= {"model": target.get("model"), "plan": (manifest.get("plan") or {}).get("digest")}
    out |= {"device": manifest.get("device"), "floor": summary.get("floor")}
    return out


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


def _environment(env: Mapping[str, str] | None) -> str | None:
    """The engine's environment without folders."""
    if env is None:
        return None
    return " ".join(f"{key}={value}" for key, value in sorted(env.items()) if not str(value).startswith("/"))


def _differ(key: str, a: Any, b: Any) -> bool:
    return bool(key != "floor" and a != b)


def _recognize(differing: Sequence[str]) -> tuple[str, ...]:
    """The scenario's key that differs, if it is only one."""
    sections = ("server.", "workload.", "load.")
    keys = [key for key in differing if key.startswith(sections) or key == "seed"]
    return (keys[0],) if len(keys) == 1 else ()


def _meaning(key: str, factors: Sequence[str], *, repeats: bool = False) -> str:
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


def _floor(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None, factors: Sequence[str]) -> list[Fact]:
    """The load tester's own floor: a difference when a p99 of it is half as large again; noted when one is unknown."""
    if a is None or b is None:
        return [] if a is b else [Fact("floor", _floor_words(a), _floor_words(b), NOTED)]
    ends = [(a[key], b[key]) for key in ("ttft_p99_ms", "itl_p99_ms", "e2e_p99_ms") if key in a and key in b]
    if all(max(pair) <= _FLOOR_FACTOR * min(pair) for pair in ends):
        return []
    return [Fact("floor", _floor_words(a), _floor_words(b), _meaning("floor", factors))]


def _floor_words(floor: Mapping[str, Any] | None) -> str:
    return (
        "unmeasured" if floor is None else f"p99 TTFT {floor['ttft_p99_ms']:.3g} ms, ITL {floor['itl_p99_ms']:.3g} ms"
    )


def unsound_because(manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Why a run is no valid measurement, or ""."""
    if manifest.get("status") != "complete":
        return f"incomplete: {manifest.get('ended_because', 'killed')}"
    return "; ".join(summary.get("invalid_reasons") or ()) if summary.get("verdict") == "INVALID" else ""


def _words(value: Any) -> str:
    if value is None:
        return NOT_RECORDED
    if value == "":
        return "valid"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_words(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, float):
        return f"{value:.12g}"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
