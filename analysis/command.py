"""The command that makes a run, as words: what its manifest keeps, and the commands that derive from it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_SWITCHES = ("--json", "--quiet")  # flags without a value, of those that are ever left out
# What a run of one trial has no use for.
_OF_A_SEARCH = (
    "--target-rps", "--headroom", "--spare", "--confidence", "--within", "--budget", "--resume", "--runs", *_SWITCHES,
)  # fmt: skip
# Flags of a run that change its scenario, as the beginning of what --set takes; and make's variables that are flags.
_OF_THE_SCENARIO = {
    "--set": "", "--engine": "server.engine=", "--model": "server.model=", "--url": "server.url=",
    "--tokenizer": "server.tokenizer=",
}  # fmt: skip
_VARIABLES = {"ENGINE": "--engine", "URL": "--url"}


@dataclass(frozen=True, slots=True)
class Command:
    """The words of a command line, ``gapmeter run …`` or ``make loadtest …``, which takes flags in its ``ARGS``."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, verb: str, scenario: str, overrides: Iterable[str] = ()) -> Command:
        """``gapmeter VERB SCENARIO --set KEY=VALUE …``."""
        return cls(("gapmeter", verb, scenario)).with_set(*overrides)

    @classmethod
    def parse(cls, text: str) -> Command:
        """From a line; one that no shell would take is a single word."""
        try:
            return cls(tuple(shlex.split(text)))
        except ValueError:
            return cls((text,))

    def __str__(self) -> str:
        if len(self.words) == 1:
            return self.words[0]
        if not self._is_make:
            return shlex.join(self.words)
        return " ".join(name + equals + shlex.quote(value) if equals else name for name, equals, value in
                        (word.partition("=") for word in self.words))  # fmt: skip

    def with_flags(self, *flags: str) -> Command:
        """With more of them at the end."""
        if not self._is_make:
            return Command((*self.words, *flags))
        variables = [word for word in self.words if not word.startswith("ARGS=")]
        return Command((*variables, f"ARGS={shlex.join([*self._args, *flags])}"))

    def with_set(self, *settings: str) -> Command:
        """With scenario keys changed: ``load.rate=4``."""
        return self.with_flags(*(word for setting in settings for word in ("--set", setting))) if settings else self

    def without(self, *flags: str) -> Command:
        """Without these flags and their values."""
        if not self._is_make:
            return Command(tuple(_without(self.words, flags)))
        variables = Command(tuple(word for word in self.words if not word.startswith("ARGS=")))
        rest = _without(self._args, flags)
        return variables.with_flags(*rest) if rest else variables

    def resumed(self, folder: Path, *flags: str) -> Command:
        """What takes up a sweep or a search that was interrupted, with more flags where these are to change."""
        return self.without("--resume", *(flag for flag in flags if flag.startswith("--"))).with_flags(
            *flags, "--resume", str(folder)
        )

    def as_run(self, *settings: str) -> Command:
        """Of a capacity search: what runs one load of its scenario by itself."""
        if self.words[:2] not in (("gapmeter", "capacity"), ("make", "capacity")):
            return self
        verb = "loadtest" if self._is_make else "run"
        return Command((self.words[0], verb, *self.words[2:])).without(*_OF_A_SEARCH).with_set(*settings)

    def as_comparison(self, a: str, b: str) -> Command | None:
        """Of a run: what runs its scenario under ``a`` and under ``b``, in turn; None for any other command."""
        if self._is_make:
            variables = dict(word.split("=", 1) for word in self.words[2:] if "=" in word)
            scenario, flags = variables.get("SCENARIO", ""), self._args
            for name in sorted(_VARIABLES.keys() & variables.keys()):
                flags += [_VARIABLES[name], variables[name]]
        else:
            scenario, flags = next(iter(self.words[2:]), ""), list(self.words[3:])
        if self.words[1:2] not in (("run",), ("loadtest",)) or not scenario or scenario.startswith("-"):
            return None
        flags = [part for word in flags for part in _parted(word)]
        asked = [f"{_OF_THE_SCENARIO[name]}{value}" for name, value in pairwise(flags) if name in _OF_THE_SCENARIO]
        if "--url" in flags:
            asked.insert(0, "server.engine=attach")
        return Command(("gapmeter", "compare", "--run", scenario, "--a", a, "--b", b)).with_set(*asked)

    @property
    def _is_make(self) -> bool:
        return self.words[:1] == ("make",)

    @property
    def _args(self) -> list[str]:
        """The flags that ``make`` hands on."""
        return [flag for word in self.words if word.startswith("ARGS=") for flag in shlex.split(word[len("ARGS=") :])]


def _parted(word: str) -> list[str]:
    """``--flag=value`` as two words."""
    name, equals, value = word.partition("=")
    return [name, value] if equals and name in _OF_THE_SCENARIO else [word]


def _without(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    kept: list[str] = []
    value_of_one = False
    for word in words:
        name, equals, _ = word.partition("=")
        if not value_of_one and name not in flags:
            kept.append(word)
        value_of_one = not value_of_one and name in flags and not equals and name not in _SWITCHES
    return kept
