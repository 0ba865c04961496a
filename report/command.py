"""The command that makes a run, as words: what its manifest keeps, and the commands that derive from it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_OF_A_KEY = re.compile(r"(key|token|secret|password)=", re.IGNORECASE)
_SWITCHES = ("--json", "--quiet")  # flags without a value, of those that are ever left out
# What does not apply to a run of one trial.
_OF_A_SEARCH = (
    "--target-rps", "--headroom", "--spare", "--confidence", "--within", "--budget", "--resume", "--runs", *_SWITCHES,
)  # fmt: skip
# Flags of a run that change its scenario, as the beginning of what --set takes.
_OF_THE_SCENARIO = {
    "--set": "", "--engine": "server.engine=", "--model": "server.model=", "--url": "server.url=",
    "--tokenizer": "server.tokenizer=",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Command:
    """The words of a command line, ``gapmeter run …``."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, verb: str, scenario: str | Path, overrides: Iterable[str] = (), flags: Iterable[str] = ()) -> Command:
        """``gapmeter VERB SCENARIO --set KEY=VALUE … FLAGS``."""
        return cls((*cls(("gapmeter", verb, str(scenario))).with_set(*overrides).words, *flags))

    @classmethod
    def parse(cls, text: str) -> Command:
        """Read a line; one that a shell could not parse is a single word."""
        try:
            return cls(tuple(shlex.split(text)))
        except ValueError:
            return cls((text,))

    def __str__(self) -> str:
        return self.words[0] if len(self.words) == 1 else " ".join(map(_quoted, self.words))

    def with_set(self, *settings: str) -> Command:
        """The command with scenario keys changed: ``load.rate=4``."""
        return Command((*self.words, *(word for setting in settings for word in ("--set", setting))))

    def without(self, *flags: str) -> Command:
        """The command without these flags and their values."""
        kept: list[str] = []
        value_of_one = False
        for word in self.words:
            name, equals, _ = word.partition("=")
            if not value_of_one and name not in flags:
                kept.append(word)
            value_of_one = not value_of_one and name in flags and not equals and name not in _SWITCHES
        return Command(tuple(kept))

    def resumed(self, folder: Path, *flags: str) -> Command:
        """What resumes a sweep or a search that was interrupted; ``flags`` replace those that it was started with."""
        rest = self.without("--resume", *(flag for flag in flags if flag.startswith("--")))
        return Command((*rest.words, *flags, "--resume", str(folder)))

    def as_run(self, *settings: str) -> Command:
        """For a capacity search: the command that runs one load of its scenario by itself."""
        if self.words[:2] != ("gapmeter", "capacity"):
            return self
        return Command(("gapmeter", "run", *self.words[2:])).without(*_OF_A_SEARCH).with_set(*settings)

    def of_one_point(self, *settings: str) -> Command:
        """For a sweep, or searches of several settings: the command of the point with ``settings`` by itself."""
        typed = self.without("--over", "--resume", "--junit", "--markdown", "--json")._flags
        points = ("sweep", "repeat")  # which there are, and how often each is visited
        sets = [(at, value.lstrip()) for at, (flag, value) in enumerate(pairwise(typed)) if flag == "--set"]
        whole = [at for at, setting in sets if setting.startswith(points)]
        kept = [word for at, word in enumerate(typed) if at not in whole and at - 1 not in whole]
        return Command(tuple(kept)).with_set("sweep=[]", "repeat=1", *settings)

    @property
    def settings(self) -> list[str]:
        """What it changes of its scenario, as ``--set`` takes it; last what was written so, since that wins."""
        flags = self._flags
        given = [pair for pair in pairwise(flags) if pair[0] in _OF_THE_SCENARIO]
        given.sort(key=lambda pair: pair[0] == "--set")
        asked = [f"{_OF_THE_SCENARIO[name]}{value}" for name, value in given]
        return ["server.engine=attach", *asked] if "--url" in flags else asked

    @property
    def _flags(self) -> list[str]:
        return [part for word in self.words for part in _parted(word)]

    def as_comparison(self, b: str) -> Command | None:
        """For a run: the command that runs its scenario as it is and under ``b``, in turn; None for any other one."""
        return self._with_its_settings(("compare", "--run"), ("--b", b))

    def as_search(self) -> Command | None:
        """For a run: the command that searches its scenario's capacity; None for any other command."""
        return self._with_its_settings(("capacity",))

    def _with_its_settings(self, verb: tuple[str, ...], more: tuple[str, ...] = ()) -> Command | None:
        scenario = next(iter(self.words[2:]), "-")
        if self.words[:2] != ("gapmeter", "run") or scenario.startswith("-"):
            return None
        if any(word.partition("=")[0] in ("--locustfile", "--workers") for word in self.words):
            return None  # what neither takes
        probe: tuple[str, ...] = next((pair for pair in pairwise(self._flags) if pair[0] == "--probe-dir"), ())
        return Command(("gapmeter", *verb, scenario, *more, *probe)).with_set(*self.settings)


def _quoted(word: str) -> str:
    """For a shell. What may hold a key is in quotes also where the key was taken out: its text is the same then."""
    quoted = shlex.quote(word)
    return f"'{word}'" if quoted == word and _OF_A_KEY.search(word) else quoted


def _parted(word: str) -> list[str]:
    """``--flag=value`` as two words."""
    name, equals, value = word.partition("=")
    return [name, value] if equals and name in (*_OF_THE_SCENARIO, "--probe-dir") else [word]
