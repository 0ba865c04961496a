"""The types of a scenario's values for pydantic, each with the sentence that reports a mistake in it.

Durations are written as a number of seconds, or a number with ms, s, m or h; they are nanoseconds inside.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Self, TypeGuard, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ModelWrapValidatorHandler,
    PlainSerializer,
    PlainValidator,
    StrictFloat,
    StrictInt,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from gapmeter.scenarios.errors import BadValue, did_you_mean, either, quoted

READ_FILES = {"files": "read"}  # validation's context in which the files that a scenario names are read at once
MOST_TOKENS = 10_000_000
MOST_RATE = 1_000_000
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wording:
    """What a value is and what to write for it. Turns pydantic's complaint about a value into our sentence.

    In an Annotated type it stands after the constraints, since it reads the range from them.
    """

    what: str
    write: str
    unit: str = ""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema, keys = handler(source), keys_of(source)
        return core_schema.no_info_wrap_validator_function(
            lambda value, inner: self.read(value, inner, schema, keys), schema
        )

    def read(self, value: object, inner: Callable[[Any], T], schema: Mapping[str, Any], keys: Sequence[str]) -> T:
        """What ``inner`` makes of the value; BadValue where it complains about the value itself or one of its keys."""
        try:
            return inner(value)
        except ValidationError as error:
            # A key too many goes before one too few: a key misspelt is both.
            names = {each["type"]: each["loc"][0] for each in error.errors() if len(each["loc"]) == 1}
            if (name := names.get("extra_forbidden", names.get("invalid_key"))) is not None:
                raise BadValue(f"no such key; {did_you_mean(name, keys)}write {self.write}", (name,)) from error
            if (name := names.get("missing")) in keys:
                raise BadValue(f"{name} is missing; write {self.write}") from error
            # An error that has a name here keeps its frames, with all that callers have, until garbage is collected.
            if (sentence := self._sentence(error.errors()[0], schema)) is not None:
                raise BadValue(sentence) from error
            raise  # put into words already, by a validator or deeper inside

    def _sentence(self, error: ErrorDetails, schema: Mapping[str, Any]) -> str | None:
        kind, value, write, unit = error["type"], error["input"], self.write, f" ({self.unit})" if self.unit else ""
        if kind == "value_error" or (error["loc"] and kind != "missing"):  # missing: an entry of a list
            return None
        if kind == "literal_error":
            words = schema["expected"]
            return f"{quoted(value)} is not one of the choices; {did_you_mean(value, words)}write {either(words)}"
        if kind.startswith(("greater_than", "less_than")) and (value > 0 or not schema.get("ge")):
            span = f"from {_figure(schema['ge'])} to" if "ge" in schema else f"above {_figure(schema['gt'])} up to"
            example = unit or (f", {write}" if write.startswith("for instance") else "")
            return f"{quoted(value)} is out of range; write {self.what} {span} {_figure(schema['le'])}{example}"
        if number := number_in(value):
            write = re.sub(r"^\d+(\.\d+)?", number, write)
        return f"{quoted(value)} is not {self.what}; write {write}{unit}"


def _figure(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:,.12g}"


class Part(BaseModel):
    """A mapping of keys, frozen. A field whose name differs from its key (``duration_ns``) has the key as its alias.

    ``example`` is how such a mapping is written, for one that is the value of a key.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", serialize_by_alias=True, use_attribute_docstrings=True)
    example: ClassVar[str] = ""

    @model_validator(mode="wrap")
    @classmethod
    def _in_our_words(cls, value: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not cls.example:
            return handler(value)
        wording = Wording("a mapping", f"for instance {cls.example}")
        return wording.read(value, handler, {}, keys_of(cls))


def keys_of(kind: object) -> list[str]:
    """The keys of a model's mapping; none for any other type."""
    return [info.alias or name for name, info in getattr(kind, "model_fields", {}).items()]


def is_none(value: object) -> bool:
    """For parts of a value that a document leaves out where they are not set."""
    return value is None


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a finite number, which true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def number_in(value: object) -> str | None:
    """The number of usual length that a text is, but for a unit: 20 for ``20rps``, none for ``1e3ms`` or ``0x14``."""
    number = re.fullmatch(r"\s*0*(\d{1,12}(?:\.\d{1,12})?)[\sA-Z/%]*", str(value), re.ASCII | re.IGNORECASE)
    return number[1] if number and isinstance(value, str) else None


def integer(what: str, example: int) -> Wording:
    """For whole numbers."""
    return Wording(what, f"a whole number, for instance {example}")


def bad_value(error: ValidationError) -> BadValue:
    """The first mistake that pydantic found, with the whole path to it."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, BadValue):
        return BadValue(cause.text, (*first["loc"], *cause.path))
    return BadValue(f"{quoted(first['input'])} cannot be read: {first['msg']}", first["loc"])


def one_of(kinds: Mapping[str, type[BaseModel]], bare: type[BaseModel], what: str, write: str) -> BeforeValidator:
    """For a union: reads ``{NAME: …}`` as the kind of that name, and what is no mapping as the ``bare`` one."""

    def read(value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, BaseModel):
            return value
        if not isinstance(value, dict):
            return bare.model_validate(value)
        if len(value) != 1:
            raise BadValue(f"{quoted(value)} is not {what}; write {write}")
        (name,) = value
        if name not in kinds:
            raise BadValue(f"no such distribution; {did_you_mean(name, kinds)}write {write}", (name,))
        return kinds[name].model_validate(value, context=info.context)

    return BeforeValidator(read)


Tokens = Annotated[StrictInt, Field(ge=1, le=MOST_TOKENS), integer("a number of tokens", 64)]
RateOrZero = Annotated[
    StrictFloat, Field(ge=0, le=MOST_RATE), Wording("a rate", "8", "requests per second, or 0 for none")
]
Share = Annotated[StrictFloat, Field(ge=0, le=1), Wording("a number", "for instance 0.5")]
TextLine = Annotated[str, StringConstraints(pattern=r"^\S(.*\S)?$"), Wording("text", "for instance a line of text")]
FilePath = Annotated[
    str, StringConstraints(pattern=r"^\S(.*\S)?$"), Wording("a path", "for instance traces/chat.jsonl")
]
CHOICE = Wording("one of the choices", "")
_SHORT_PRECISIONS = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
Precision = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9_-]+$"),
    Wording("a precision", "for instance float32, bfloat16 or float16"),
    AfterValidator(lambda word: _SHORT_PRECISIONS.get(word, word)),
]
Name = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"), Wording("a name", "for instance chat-p99")
]
Summary = Annotated[
    str, StringConstraints(pattern=r"^(\S(.*\S)?)?$"), Wording("a line of text", "for instance one sentence")
]
DeviceName = Annotated[
    str, StringConstraints(pattern=r"^\S(.*\S)?$"), Wording("a device's name", "for instance H100-SXM")
]


def _check_url(value: str) -> str:
    if re.match(r"https?://[^/]*@", value):
        raise BadValue("the address carries a user's name, which is not sent; pass a key with --api-key")
    if not re.fullmatch(r"https?://[^/\s?#@]+(/[^\s?#]*)?", value):
        bare = re.fullmatch(r"(?:\w+:/{0,2})?([^/\s?#@:]+:\d+(?:/[^\s?#]*)?)", value)
        write = f"http://{bare[1]}" if bare else "for instance http://127.0.0.1:8000"
        raise BadValue(f"{quoted(value)} is not a server's address; write {write}")
    if endpoint := re.fullmatch(r"(https?://.+?)(/v1/models|(/v1)?(/chat)?/completions)/?", value):
        raise BadValue(f"{quoted(value)} is one of a server's endpoints; write {endpoint[1]}")
    try:
        parts = urlsplit(value)
        host = parts.hostname or ""
        host.encode("ascii" if ":" in host else "idna")
        if parts.port == 0 or not host:
            raise ValueError("no port or no host")
    except ValueError as error:
        text = f"{quoted(value)} is not a server's address: {error}; write for instance http://127.0.0.1:8000"
        raise BadValue(f"{text}, or http://[::1]:8000 for IPv6") from error
    return value.rstrip("/").removesuffix("/v1").rstrip("/")


Url = Annotated[
    str,
    AfterValidator(_check_url),
    Wording("a server's address", "for instance http://127.0.0.1:8000"),
    WithJsonSchema({"type": "string", "pattern": r"^https?://[^/\s?#@]+(/[^\s?#]*)?$"}),
]


def _check_finite(value: Any, path: tuple[str | int, ...] = ()) -> Any:
    """JSON has no word for a number that is too large, and a command line's reader may take it for another."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            _check_finite(part, (*path, key))
    elif isinstance(value, int | float) and not isinstance(value, bool) and not is_number(value):
        raise BadValue(f"{quoted(value)} is too large a number; write less, or text in quotes", path)
    return value


_FlagName = Annotated[
    str, StringConstraints(min_length=1), Wording("the name of an engine flag", "for instance num_blocks")
]
Arguments = Annotated[
    dict[_FlagName, Any],
    AfterValidator(_check_finite),
    Wording("a mapping of engine flags", "for instance {num_blocks: 256}"),
    WithJsonSchema({"type": "object"}),
]


SECOND_NS = 1_000_000_000
LONGEST_NS = 30 * 86_400 * SECOND_NS

_PATTERN = r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)"
_UNIT_NS = {"ms": 1_000_000, "s": SECOND_NS, "m": 60 * SECOND_NS, "h": 3600 * SECOND_NS}
_OTHER_UNITS = {
    "ms": ("ms", "msec", "msecs", "millis", "millisecond", "milliseconds"),
    "s": ("", "s", "sec", "secs", "second", "seconds"),
    "m": ("min", "mins", "minute", "minutes"), "h": ("h", "hr", "hrs", "hour", "hours"),
}  # fmt: skip


def read_duration(value: object, *, least_ns: int = 0, otherwise: str = "") -> int:
    """Nanoseconds of ``75``, ``"75s"`` or ``"1.5 m"``; BadValue for anything else, or below ``least_ns``.

    ``otherwise`` is put before what to write instead, for a key that takes a word too.
    """
    written = re.fullmatch(_PATTERN, value) if isinstance(value, str) else None
    if written:
        exact_ns = float(written[1]) * _UNIT_NS[written[2]]
    elif is_number(value):
        exact_ns = float(value) * SECOND_NS
    else:
        meant, word = "75s, 500ms or 2m", str(value).strip(" 0123456789.").lower()
        if number := number_in(value):  # 5m for "5 minutes"
            meant = next((f"{number}{unit}" for unit, words in _OTHER_UNITS.items() if word in words), meant)
        raise BadValue(f"{quoted(value)} is not a duration; write {otherwise}{meant}")
    ns = round(min(max(exact_ns, -1.0), 2.0 * LONGEST_NS))  # infinity cannot be rounded
    if not least_ns <= ns <= LONGEST_NS:
        span = f"from {least_ns / SECOND_NS:g} s to" if least_ns > 1 else "above 0 up to" if least_ns else "up to"
        raise BadValue(f"{quoted(value)} is out of range; write a duration {span} 30 days")
    return ns


def seconds(ns: int) -> int | float:
    """Nanoseconds as seconds, whole where they are."""
    return ns // SECOND_NS if ns % SECOND_NS == 0 else ns / SECOND_NS


_SCHEMA: list[JsonSchemaValue] = [{"type": "number", "minimum": 0}, {"type": "string", "pattern": f"^{_PATTERN}$"}]
_WRITTEN = (PlainSerializer(seconds), WithJsonSchema({"anyOf": _SCHEMA}))

# Nanoseconds, written as above: any, more than none, and long enough to be drawn one after the other.
Duration = Annotated[int, PlainValidator(read_duration), *_WRITTEN]
PositiveDuration = Annotated[int, PlainValidator(partial(read_duration, least_ns=1)), *_WRITTEN]
Period = Annotated[int, PlainValidator(partial(read_duration, least_ns=1_000_000)), *_WRITTEN]
# None is written auto.
Warmup = Annotated[
    int | None,
    PlainValidator(lambda value: None if value == "auto" else read_duration(value, otherwise="auto, ")),
    PlainSerializer(lambda ns: "auto" if ns is None else seconds(ns)),
    WithJsonSchema({"anyOf": [*_SCHEMA, {"const": "auto"}]}),
]


def _check_hz(hz: float) -> float:
    if 0 < hz < 0.01:
        raise BadValue(f"{hz:g} times a second is less than once in a run; write 0.01 or more, 0 for none")
    return hz


def _check_metrics_every(ns: int) -> int:
    if 0 < ns < SECOND_NS // 20:
        raise BadValue("scraping so often adds load; write 50ms or more, or 0 for never")
    return ns


SamplesPerSecond = Annotated[
    StrictFloat, Field(ge=0, le=100), Wording("a number", "for instance 10"), AfterValidator(_check_hz)
]
ScrapePeriod = Annotated[Duration, AfterValidator(_check_metrics_every)]
