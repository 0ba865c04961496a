"""Results and the files that they are: written from their types, read into them.

A file that is not one of this version raises ``NotReadable``, which names the file, the key and the remedy. JSON has
neither NaN nor infinity: a ``Number`` that is not finite is None.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema

from gapmeter.scenarios.plain_file import read_plain, replace_text


class NotReadable(ValueError):
    """A file is not one that this version writes: ``key`` ("" for the whole file) is wrong, missing or unknown."""

    def __init__(self, path: Path, key: str, problem: str, remedy: str) -> None:
        self.path, self.key, self.problem, self.remedy = path, key, problem, remedy
        where = f"{key} " if key else ""
        super().__init__(f"{path}: {where}{problem}; {remedy}")


class _Finite:
    """Python values that are not finite become None; JSON has none of these, and is not looked at."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        plain = handler(source)
        cleaned = core_schema.no_info_before_validator_function(_finite, plain)
        return core_schema.json_or_python_schema(json_schema=plain, python_schema=cleaned)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, _Finite()]
Ends = tuple[Number, Number]  # of an interval; None where the sample does not reach, or nothing bounds it


def left_out() -> Any:
    """The default of a field that a file does not have where it is None."""
    return Field(default=None, exclude_if=lambda value: value is None)


def stands_as(key: str) -> Any:
    """A field with another name in a file, one that Python has no room for."""
    return Field(validation_alias=key, serialization_alias=key)


class Result(BaseModel):
    """A part of a result: frozen, no other keys than its fields, JSON by their names."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True, serialize_by_alias=True,
        defer_build=True,
    )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return self.model_dump(mode="json")


class ResultFile(Result):
    """A result that is a file of its folder."""

    FILE: ClassVar[str]
    REMEDY: ClassVar[str] = "analyse it again: gapmeter report {folder}"

    @classmethod
    def read(cls, folder: Path) -> Self:
        """From the folder's file. Raises NotReadable, FileNotFoundError where there is none, OSError."""
        return cls.parse(read_plain(folder / cls.FILE), folder / cls.FILE)

    @classmethod
    def parse(cls, text: bytes | str, path: Path) -> Self:
        """From the text of the file at ``path``. Raises NotReadable."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise cls.not_readable(path, *_complaint(cls, text, error)) from error

    @classmethod
    def not_readable(cls, path: Path, key: str, problem: str) -> NotReadable:
        """The error about a key of the file, with the remedy for files of this kind."""
        return NotReadable(path, key, problem, cls.REMEDY.format(folder=shlex.quote(str(path.parent))))

    def write(self, folder: Path) -> None:
        """Replace the folder's file as ``replace_text``. Raises OSError."""
        replace_text(folder / self.FILE, self.model_dump_json(indent=1) + "\n")


def _complaint(cls: type[ResultFile], text: bytes | str, error: ValidationError) -> tuple[str, str]:
    """The key, and what is wrong with it: another version first, since all else follows from that."""
    try:
        loaded = json.loads(text)
    except (ValueError, RecursionError) as broken:
        return "", f"is no JSON ({broken})"
    if not isinstance(loaded, Mapping):
        return "", "is not a JSON object"
    version = cls.model_fields.get("schema_version")  # which a part of several kinds of files has none of
    if version is not None and loaded.get("schema_version", version.default) != version.default:
        return "schema_version", f"is {repr(loaded['schema_version'])[:40]}, this gapmeter reads {version.default}"
    return first_problem(error, loaded)


def first_problem(error: ValidationError, value: Any) -> tuple[str, str]:
    """The key of the first mistake in ``value``, and what is wrong with it."""
    first = error.errors(include_url=False)[0]
    key = ".".join(_keys(first["loc"], value))[:200]
    if first["type"] == "missing":
        return key, "is missing"
    if first["type"] == "extra_forbidden":
        return key, "is not a key of it"
    return key, f"is {str(first['input'])[:40]!r}: {first['msg'][0].lower()}{first['msg'][1:]}"


def _keys(places: Sequence[int | str], value: Any) -> Iterator[str]:
    """The keys that lead to a place, without what pydantic calls the variants of a type on the way."""
    for at, place in enumerate(places):
        is_key = isinstance(place, int) or (isinstance(value, Mapping) and place in value) or at == len(places) - 1
        if is_key:
            yield str(place)
            value = value[place] if at < len(places) - 1 else None
