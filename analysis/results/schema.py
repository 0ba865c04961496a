"""The JSON Schemas of result files, made from their types: ``python -m gapmeter.analysis.results.schema NAME``."""

from __future__ import annotations

import argparse
import importlib
import json
from typing import Any

from gapmeter.analysis.results.codec import ResultFile

# The schema's name: whose file it describes, and where that is.
_TYPES = {
    "manifest": "gapmeter.analysis.results.manifest:Manifest",
    "run": "gapmeter.analysis.results.run:RunResult",
    "verdict": "gapmeter.analysis.results.run:VerdictFile",
    "sweep": "gapmeter.analysis.results.sweep:SweepResult",
    "sweep-manifest": "gapmeter.analysis.results.manifest:SweepManifest",
    "capacity": "gapmeter.analysis.results.capacity:CapacityResult",
    "capacity-manifest": "gapmeter.analysis.results.manifest:SearchManifest",
    "comparison": "gapmeter.analysis.results.comparison:Comparison",
    "costs": "gapmeter.analysis.results.costs:CostTable",
}


def types() -> dict[str, type[ResultFile]]:
    """By the schema's name."""
    places = {name: place.partition(":") for name, place in _TYPES.items()}
    return {name: getattr(importlib.import_module(module), cls) for name, (module, _, cls) in places.items()}


def schema(name: str, of: type[ResultFile]) -> dict[str, Any]:
    """The schema as a JSON-able document."""
    document = of.model_json_schema()
    document["required"] = ["schema_version", *document["required"]]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_plain(document),
        "title": f"gapmeter {name}: {of.FILE}",
    }


def _plain(value: Any) -> Any:
    """Without titles, which only repeat the keys."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if not (key == "title" and isinstance(item, str))}
    return [_plain(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the JSON Schema of a kind of result file.")
    parser.add_argument("name", choices=_TYPES)
    asked = parser.parse_args().name
    print(json.dumps(schema(asked, types()[asked]), indent=1))
