"""The JSON Schema of scenario files, made from the same table as the parser: ``python -m scenarios.schema``.

Written to schema.json beside the scenarios, it gives editors completion and marks mistakes while they are typed.
"""

from __future__ import annotations

import json
from pathlib import Path

from gapmeter.scenarios.fields import FIELDS, REQUIRED, SECTIONS, Field
from gapmeter.scenarios.values import Schema

PATH = Path(__file__).with_name("schema.json")


def schema() -> Schema:
    """The schema as a JSON-able document."""
    top = [field for field in FIELDS if not field.section]
    sections = {name: _object([f for f in FIELDS if f.section == name], doc) for name, doc in SECTIONS.items()}
    whole = _object(top, "One scenario of gapmeter: what serves, what is asked, how, and what must hold.")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "gapmeter scenario",
        **whole,
        "properties": whole["properties"] | sections,
        "required": [name for name in SECTIONS if sections[name].get("required")] + ["load"],
    }


def text() -> str:
    """The schema as it stands in schema.json."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def _object(fields: list[Field], doc: str) -> Schema:
    made: Schema = {
        "type": "object",
        "description": doc,
        "properties": {field.leaf: _property(field) for field in fields},
        "additionalProperties": False,
    }
    required = [field.leaf for field in fields if field.default is REQUIRED]
    return made | {"required": required} if required else made


def _property(field: Field) -> Schema:
    given = {} if field.default in (None, REQUIRED) else {"default": field.default}
    return {"description": field.doc, **given, **field.type.schema}


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
