"""The JSON Schemas of result files, made from their types: ``python -m gapmeter.analysis.results.schema NAME``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from gapmeter.analysis.results.capacity import CapacityResult
from gapmeter.analysis.results.codec import ResultFile
from gapmeter.analysis.results.comparison import Comparison
from gapmeter.analysis.results.cost_table import CostTable
from gapmeter.analysis.results.manifest import Manifest, SearchManifest, SweepManifest
from gapmeter.analysis.results.run import RunResult, VerdictFile
from gapmeter.analysis.results.sweep import SweepResult

TYPES: dict[str, type[ResultFile]] = {
    "manifest": Manifest,
    "run": RunResult,
    "verdict": VerdictFile,
    "sweep": SweepResult,
    "sweep-manifest": SweepManifest,
    "capacity": CapacityResult,
    "capacity-manifest": SearchManifest,
    "comparison": Comparison,
    "costs": CostTable,
}


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
    parser.add_argument("name", choices=TYPES)
    asked = parser.parse_args().name
    print(json.dumps(schema(asked, TYPES[asked]), indent=1))
