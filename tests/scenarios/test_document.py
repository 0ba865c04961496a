"""A resolved scenario's document and digest stay what they were, since runs are kept and compared by them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gapmeter.scenarios.model import Scenario
from gapmeter.scenarios.read import load_points, load_scenario

DIGESTS = {
    "batch-size": ("8c5997814ae0", "168ab3e764d9 98d5355d9ec9 ce80a85f1b12 97fbab687865 94e165729f0d bf970fca0827"),
    "burst": ("d38bb7c3d5dd", ""),
    "chat-p99": ("bb3d7b75eeb5", ""),
    "concurrency": ("2fae4657147f", "f0e9e40b1708 4dbc68052397 78619aeba374 b9201199865b 8419010d1616 b549e47c437f"),
    "dialogue": ("1c0b01f491ba", ""),
    "long-prompt": ("ea6ff2d2a53c", ""),
    "replay-chat": ("e6d90b60fb49", ""),
    "rush-hour": ("7a4b192be453", ""),
    "smoke": ("beecaad7a633", ""),
}
# What may stand in the load of a scenario with 5 prompt and 6 output tokens, and the scenario's digest.
SPELLINGS = {
    "rate: 8, duration: 75s": "feede4309ef6",
    "arrivals: onoff, onoff: {on: 2s, off: 6s}, rate: 4, duration: 1m": "f3f15d26e914",
    "arrivals: ramp, ramp: {from: 1, to: 2}, duration: 9": "a06bde814b5f",
    "arrivals: ramp, ramp: {from: 0, to: 2.5, over: 1.5s}, requests: 9": "100c67e35c7c",
    "arrivals: steps, steps: [{rate: 1, for: 2s}, {rate: 0, for: 1m}, {rate: 3, for: 100ms}], duration: 300": (
        "67b7f6b76f4b"
    ),
    "arrivals: diurnal, diurnal: {day: 4m, swing: 0.3, peak: 4}, rate: 3, duration: 4m": "4b3910e73cb1",
    "arrivals: diurnal, diurnal: {day: 4m, hours: [1, 2, 0.5]}, rate: 3, duration: 4m": "565cf3974422",
    "arrivals: closed, concurrency: 4, duration: 10, think_time: 1.5s": "49eeb09cfc3e",
    "arrivals: closed, concurrency: 4, duration: 10, think_time: {exponential: 2}": "e4faff46ec29",
    "arrivals: closed, concurrency: 4, duration: 10, think_time: {uniform: [1s, 2500ms]}": "5bce530d09a3",
    "arrivals: closed, concurrency: 4, duration: 10, think_time: {lognormal: {median: 1, p95: 3}}": "040bb607b196",
    "arrivals: constant, rate: 1e2, requests: 10, stall: 3s, retries: 2, retry_pause: 0, traceparent: true, "
    "placement: shared, generator: locust": "018d39765e44",
}
# As an older run's manifest holds it: without the keys that have come since, files of another machine among the values.
OLDER: dict[str, Any] = {
    "name": "old",
    "summary": "",
    "server": {"engine": "vllm", "model": "m", "precision": "bfloat16", "max_batch": 8, "args": {}, "url": None},
    "workload": {
        "kind": "chat", "prompt_tokens": {"lognormal": {"median": 48.0, "p95": 96.0}},
        "output_tokens": {"file": "/elsewhere/lengths.txt"}, "shared_prefix": 0.0, "temperature": 0.0,
    },
    "load": {
        "generator": "asyncio", "arrivals": "trace", "rate": None, "think_time": {"exponential": 2}, "duration": 0.5,
        "requests": None, "warmup": "auto", "timeout": 60, "processes": 1, "placement": "auto",
        "trace": {"file": "/elsewhere/trace.jsonl", "format": "mooncake", "speed": 2.0},
    },
    "slo": ["ttft p99 <= 500 ms", "errors <= 1 %"],
    "seed": 3,
    "repeat": 1,
}  # fmt: skip


def without_newer(document: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    return {
        key: without_newer(value, like[key]) if key in ("server", "workload", "load", "trace") else value
        for key, value in document.items()
        if key in like
    }


@pytest.mark.parametrize("name", DIGESTS)
def test_the_shipped_scenarios_are_found_from_anywhere_and_keep_their_digests(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own, points = DIGESTS[name]
    assert load_scenario(name, environment={}).digest() == own
    assert [p.scenario.digest() for p in load_points(name, environment={})] == points.split()


@pytest.mark.parametrize("load", SPELLINGS)
def test_every_kind_of_load_keeps_its_digest(tmp_path: Path, load: str) -> None:
    path = tmp_path / "any.yaml"
    path.write_text(f"workload: {{prompt_tokens: 5, output_tokens: 6}}\nload: {{{load}}}\n")
    assert load_scenario(path, (), {}).digest() == SPELLINGS[load]


@pytest.mark.parametrize("name", DIGESTS)
def test_a_scenarios_document_is_read_back_to_the_same_scenario(name: str) -> None:
    scenario = load_scenario(name, environment={})
    again = Scenario.model_validate(scenario.to_dict())
    assert again.to_dict() == scenario.to_dict()
    assert again.digest() == scenario.digest()


def test_an_older_runs_document_is_read_without_the_files_it_names_and_gets_defaults_for_newer_keys() -> None:
    scenario = Scenario.model_validate(OLDER)
    assert without_newer(scenario.to_dict(), OLDER) == OLDER
    assert (scenario.server.emulation, scenario.workload.turns.root, scenario.load.retries) == ("refuse", 1, 0)
    assert (scenario.load.duration_ns, scenario.load.warmup_ns) == (500_000_000, None)
    assert [slo.limit_ns for slo in scenario.slo] == [500_000_000, None]


def test_a_document_with_a_key_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"load\.raet\n"):
        Scenario.model_validate({"load": {"raet": 8}})


def test_a_list_of_scenarios_waits_for_no_model() -> None:
    code = (
        "import sys\n"
        "from gapmeter.scenarios.source import list_scenarios\n"
        "assert list_scenarios()\n"
        "assert 'pydantic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
