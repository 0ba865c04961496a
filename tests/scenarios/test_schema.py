"""The published JSON Schema and the parser agree, since both are made from one model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gapmeter.scenarios import schema as schema_module
from gapmeter.scenarios.errors import ScenarioError
from gapmeter.scenarios.model import KEYS
from gapmeter.scenarios.read import load_scenario

FOLDER = Path(schema_module.__file__).parent
VALIDATOR = jsonschema.Draft202012Validator(schema_module.schema())

# (key, value, whether it is right)
VALUES: list[tuple[str, Any, bool]] = [
    ("load.rate", 8, True), ("load.rate", 0.5, True), ("load.rate", 0, False), ("load.rate", "8", False),
    ("load.rate", True, False), ("load.duration", "75s", True), ("load.duration", "1.5 m", True),
    ("load.duration", 75, True), ("load.duration", "75", False), ("load.duration", "1h30m", False),
    ("load.warmup", "auto", True), ("load.warmup", 0, True), ("load.warmup", "later", False),
    ("load.processes", 2, True), ("load.processes", 0, False), ("load.processes", 1.5, False),
    ("load.timeout", "auto", False), ("load.traceparent", True, True),
    ("load.traceparent", 1, False), ("load.arrivals", "constant", True), ("load.arrivals", "steady", False),
    ("server.engine", "vllm", True), ("server.engine", "VLLM", False), ("server.precision", "fp8", True),
    ("server.precision", "", False), ("server.max_batch", "8", False), ("server.args", {"a": [1]}, True),
    ("server.args", [1], False), ("server.max_model_len", 1, False), ("server.dialect", "odd", False),
    ("workload.prompt_tokens", 1, True), ("workload.prompt_tokens", 0, False),
    ("workload.prompt_tokens", {"uniform": [1, 2]}, True), ("workload.prompt_tokens", {"uniform": [1]}, False),
    ("workload.prompt_tokens", {"lognormal": {"median": 5, "p95": 9}}, True),
    ("workload.prompt_tokens", {"lognormal": {"median": 5}}, False),
    ("workload.prompt_tokens", {"lognormal": {"median": 5, "p95": 9, "p99": 11}}, False),
    ("workload.prompt_tokens", {"uniform": [1, 2], "file": "x"}, False), ("workload.prompt_tokens", {}, False),
    ("workload.shared_prefix", 1, True), ("workload.shared_prefix", 1.1, False), ("workload.temperature", 2, True),
    ("workload.kind", "completion", True), ("workload.kind", "trace", False),
    ("slo", ["ttft p99 <= 500 ms", "errors <= 1%"], True), ("slo", [], True), ("slo", ["ttft <= 500 ms"], False),
    ("slo", ["ttft p99 <= 500"], False), ("slo", "ttft p99 <= 500 ms", False),
    ("name", "chat-p99", True), ("name", "a/b", False), ("summary", "One line.", True), ("summary", 3, False),
    ("seed", 0, True), ("seed", -1, False), ("repeat", 3, True), ("repeat", 0, False), ("sweep", {}, False),
    ("cost.usd_per_hour", 2.49, True), ("cost.usd_per_hour", 0, False), ("cost.utilisation", 1, True),
    ("cost.utilisation", 0, False), ("cost.gpu", "H100", True), ("cost.gpus_per_replica", 0, False),
    ("sweep", [], True), ("sweep", {"load.rate": [1, 2]}, True), ("sweep", {"load.rate": 1}, False),
    ("sweep", {"load.rate": []}, False), ("sweep", {"load.rate": ["x"]}, False), ("sweep", {"rate": [1]}, False),
    ("sweep", [{"server.max_batch": 2, "server.args.forward_ms": 5}, {"load.rate": 3}], True),
    ("sweep", [{}], False), ("sweep", [{"slo": []}], False), ("sweep", {"repeat": [1]}, False),
    ("load.raet", 8, False), ("workload.shared_prefixes", 0, False),
    ("workload.file", 3, False), ("workload.turns", 0, False),
]  # fmt: skip


# (arrivals, value of the key of the same name, whether it is right)
SHAPES: list[tuple[str, Any, bool]] = [
    ("onoff", {"on": "2s", "off": 3, "quiet": 0.5}, True), ("onoff", {"on": "2s"}, False),
    ("onoff", {"on": "2s", "off": 3, "quiet": 2}, False), ("onoff", [2, 3], False),
    ("ramp", {"from": 0, "to": 2, "over": "5s"}, True), ("ramp", {"from": -1, "to": 2}, False),
    ("ramp", {"from": 1, "to": 2, "too": 3}, False),
    ("steps", [{"rate": 2, "for": "9s"}], True), ("steps", [], False), ("steps", [{"rate": 2}], False),
    ("steps", {"rate": 2, "for": "9s"}, False),
    ("diurnal", {"day": "4m"}, True), ("diurnal", {"day": "4m", "swing": 0.4, "peak": 24}, True),
    ("diurnal", {"day": "4m", "hours": [1, 0, 3]}, True), ("diurnal", {"day": "4m", "hours": [1]}, False),
    ("diurnal", {"day": "4m", "peak": 25}, False), ("diurnal", {"swing": 0.4}, False),
    ("trace", {"file": str(FOLDER / "traces" / "chat.jsonl"), "speed": 2}, True), ("trace", {"speed": 2}, False),
    ("trace", {"file": str(FOLDER / "traces" / "code.csv"), "format": "azure"}, True),
    ("trace", {"file": "x", "format": "other"}, False), ("trace", {"file": "x", "speed": 0}, False),
    ("think_time", "2s", True), ("think_time", {"uniform": ["1s", 2]}, True),
    ("think_time", {"uniform": ["1s"]}, False), ("think_time", {"lognormal": {"median": 1, "p95": 2}}, True),
    ("think_time", {"lognormal": {"median": 1}}, False), ("think_time", {"normal": 2}, False),
]  # fmt: skip


def parses(made: dict[str, Any], path: Path) -> bool:
    path.write_text(yaml.safe_dump(made))
    try:
        load_scenario(path, environment={})
    except ScenarioError:
        return False
    return True


@pytest.mark.parametrize(("shape", "value", "right"), SHAPES)
def test_schema_and_parser_agree_on_shapes(tmp_path: Path, shape: str, value: object, right: bool) -> None:
    unrated = shape in ("ramp", "steps", "trace")
    load = {"arrivals": shape, shape: value, "duration": "5s"} | ({} if unrated else {"rate": 5})
    if shape == "think_time":
        load = {"arrivals": "closed", "concurrency": 2, "think_time": value, "duration": "5s"}
    made = {"workload": {"prompt_tokens": 64, "output_tokens": 16}, "load": load}
    assert (parses(made, tmp_path / "one.yaml"), VALIDATOR.is_valid(made)) == (right, right)


def document(key: str, value: object) -> dict[str, Any]:
    made: dict[str, Any] = {
        "workload": {"prompt_tokens": 64, "output_tokens": 16},
        "load": {"arrivals": "poisson", "rate": 8, "duration": "75s"},
    }
    section, _, leaf = key.rpartition(".")
    (made.setdefault(section, {}) if section else made)[leaf] = value
    return made


@pytest.mark.parametrize(("key", "value", "right"), VALUES)
def test_schema_and_parser_agree_on_what_is_right(tmp_path: Path, key: str, value: object, right: bool) -> None:
    made = document(key, value)
    assert (parses(made, tmp_path / "one.yaml"), VALIDATOR.is_valid(made)) == (right, right)


def test_the_committed_schema_is_the_one_that_the_model_gives() -> None:
    committed = schema_module.PATH.read_text(encoding="utf-8")
    assert committed == schema_module.text(), "run: python -m gapmeter.scenarios.schema"


def test_the_schema_is_a_schema_and_describes_every_key() -> None:
    jsonschema.Draft202012Validator.check_schema(schema_module.schema())
    assert all(field.description for field in KEYS.values())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_scenarios_fit_the_schema_and_point_editors_to_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    loaded = yaml.safe_load(text)
    VALIDATOR.validate(loaded)
    assert loaded["name"] == path.stem
    assert json.dumps(loaded["summary"])
