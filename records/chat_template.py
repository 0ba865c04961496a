"""A model's tokenizer and chat template, as its folder holds them: the load tester counts what our servers render.

The names that a template may use are a convention of Transformers; this is the part for plain messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

# What a template, a program, may end in.
REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class NoTemplate(ValueError):
    """The model has none."""


class TextUnusable(ValueError):
    """A model's tokenizer or chat template cannot be used; the message says which and why."""


def read_tokenizer(folder: Path) -> Tokenizer:
    """``tokenizer.json``, to take texts as they are. Raises TextUnusable."""
    path = folder / "tokenizer.json"
    try:
        tokenizer: Tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no other kind
        raise TextUnusable(f"{path} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_config(folder: Path) -> dict[str, Any]:
    """``tokenizer_config.json``, nothing where there is none. Raises OSError, or TextUnusable."""
    path = folder / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise TextUnusable(f"{path} cannot be read: {error}") from error
    return config if isinstance(config, dict) else {}


class ChatTemplate:
    """Of a folder whose tokenizer_config.json says ``config``. Raises OSError, or TextUnusable."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        try:
            source = _source(folder, config)
            self._template = _environment().from_string(source) if source else None
        except (TemplateSyntaxError, LookupError, TypeError, ValueError) as error:
            raise TextUnusable(f"the chat template in {folder} cannot be read: {error}") from error
        tokens = {name: value for name, value in config.items() if name.endswith("_token")}
        texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
        self._tokens = {name: text for name, text in texts.items() if isinstance(text, str)}

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt, up to where the answer begins. Raises NoTemplate, or any of REFUSALS."""
        if self._template is None:
            raise NoTemplate("the model has none")
        return self._template.render(
            messages=list(messages), tools=None, documents=None, add_generation_prompt=True, **self._tokens
        )


def _source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The default one: a file of its own, or in the config, alone or as one of several with names."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template if isinstance(template, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def refuse(reason: str) -> NoReturn:
        raise TemplateError(reason)

    environment.filters["tojson"] = lambda value, **how: json.dumps(value, **{"ensure_ascii": False, **how})
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda shape: datetime.now().strftime(shape)
    return environment
