"""Which delays the tests put into real engines, and where they belong."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from bench.injection import Case

_DELAY_NS = 5_000_000


def _once(point: str, *stages: str, event: str = "first_token") -> list[Case]:
    return [Case(point, how, stages, event, True, _DELAY_NS) for how in ("sleep", "busy")]


def _each_step(point: str, *stages: str) -> list[Case]:
    return [Case(point, how, stages, "last_token", False, _DELAY_NS) for how in ("sleep", "busy")]


# On the way to the first token once a request; in the engine in every step up to the last token. What comes after the
# engine would be hidden behind its next step, so there the first token tells.
# A loop that is held between two stamps is at work, or asleep: while others have the core that counts as core_wait,
# since nobody knows that it would have slept on.
ALONE: tuple[Case, ...] = (
    *_once("loop held when a request is due", "generator_lag"),
    *_once("loop held when a request comes", "network_in", "accept_wait", "core_wait"),
    *_once("parse", "ingress"),
    *_once("template", "template"),
    *_once("tokenize", "tokenize"),
    *_once("hand over", "handoff"),
    *_each_step("schedule", "scheduling"),
    *_each_step("prepare inputs", "input_prep"),
    *_each_step("forward", "prefill", "decode", "interference"),
    *_each_step("sample", "sampling"),
    *_once("loop held when outputs come", "output", "core_wait"),
    *_once("detokenize", "detokenize"),
    *_once("format", "egress"),
)


@dataclass(frozen=True, slots=True)
class Crowd:
    """Two cases under load: ``block`` requests of each in turn from ``users``. The first slows down the tokenizer."""

    users: int
    block: int
    output_tokens: int
    cases: tuple[Case, Case]


# The tokenizer's delays, of all users but one, outlast the rest of a request on any machine: whatever the users' phases
# are, some wait for it, and not for the engine.
CROWDS = {
    "transformers": Crowd(
        6, 30, 4,
        (
            Case("tokenize", "sleep", ("tokenize",), "last_token", False, 60_000_000),
            Case("forward", "sleep", ("prefill", "decode", "interference"), "last_token", False, _DELAY_NS),
        ),
    ),
    "vllm": Crowd(
        8, 32, 4,
        (
            Case("tokenize", "sleep", ("tokenize",), "last_token", False, 60_000_000),
            Case("schedule", "busy", ("scheduling",), "last_token", False, _DELAY_NS),
        ),
    ),
}  # fmt: skip
CASES = (*ALONE, *(case for crowd in CROWDS.values() for case in crowd.cases))


ENGINES = {name: pytest.param(name, marks=[getattr(pytest.mark, name), pytest.mark.alone]) for name in CROWDS}


def on(name: str) -> pytest.MarkDecorator:
    """Only with the fixture ``engine`` of this name."""
    return pytest.mark.parametrize("engine", [ENGINES[name]], indirect=True)
