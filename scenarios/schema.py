"""The JSON Schema of scenario files, made from the model: ``python -m gapmeter.scenarios.schema``.

Written to schema.json beside the scenarios, it gives editors completion and marks mistakes while they are typed.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from gapmeter.scenarios.model import KEYS, SECTIONS, SWEPT_KEYS, Scenario, defaults
from gapmeter.scenarios.points import MOST_POINTS

PATH = Path(__file__).with_name("schema.json")


class _ForEditors(GenerateJsonSchema):
    """Leaves out nulls and titles, which help nobody in an editor, and adds defaults as a file would spell them."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def field_title_should_be_set(self, schema: object) -> bool:
        return False


def schema() -> JsonSchemaValue:
    """The schema as a JSON-able document."""
    document = Scenario.model_json_schema(schema_generator=_ForEditors)
    for part in document["$defs"].values():
        del part["title"]
        part.pop("description", None)  # of the type, for those who read the code; the key that has it says its own
    for key, field in KEYS.items():
        if key != "sweep":
            _property(document, key)["description"] = one_line(field.description)
        if defaults()[key] is not None and key != "name":
            _property(document, key)["default"] = defaults()[key]
    document["properties"]["sweep"] = {"description": one_line(KEYS["sweep"].description), "default": []} | _sweep()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document, "title": "gapmeter scenario"}


def one_line(description: str | None) -> str:
    """A key's description without the line ends of the source."""
    return " ".join((description or "").split())


def _sweep() -> JsonSchemaValue:
    """A grid or a list of points over every key that may be swept over."""
    kinds = {key: {"$ref": f"#/{_pointer(key)}"} for key in SWEPT_KEYS}
    free = r"^server\.args\..+"
    some: JsonSchemaValue = {"type": "object", "minProperties": 1, "additionalProperties": False}
    grid = some | {
        "properties": {key: {"type": "array", "minItems": 1, "items": kind} for key, kind in kinds.items()},
        "patternProperties": {free: {"type": "array", "minItems": 1}},
    }
    point = some | {"properties": kinds, "patternProperties": {free: {}}}
    return {"anyOf": [grid, {"type": "array", "maxItems": MOST_POINTS, "items": point}]}


def _pointer(key: str) -> str:
    section, _, leaf = key.rpartition(".")
    return f"$defs/{SECTIONS[section].__name__}/properties/{leaf}" if section else f"properties/{leaf}"


def _property(document: JsonSchemaValue, key: str) -> JsonSchemaValue:
    node = document
    for part in _pointer(key).split("/"):
        node = node[part]
    return node


def text() -> str:
    """The schema as it stands in schema.json."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
