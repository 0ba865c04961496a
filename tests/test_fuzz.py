"""What strangers hand over ends in a value or a sentence, in bounded time and memory: the targets of ``tests/fuzz``.

``make fuzz`` tries the same for longer.
"""

from __future__ import annotations

import contextlib
import random
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.mutate import mutated
from tests.fuzz.targets import TARGETS

_MOST_MORE_BYTES = 2 << 30


class _TooLong(BaseException):
    """No code of ours takes it for a failure of its own."""


def _ring(number: int, frame: FrameType | None) -> None:
    raise _TooLong


@contextlib.contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Fails what takes longer, or needs more memory than there is until then and some."""
    before = signal.signal(signal.SIGALRM, _ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _TooLong:
        raise AssertionError(f"it takes more than {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def little_memory() -> Iterator[None]:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MOST_MORE_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.usefixtures("little_memory")
def test_whatever_a_stranger_hands_over_ends_in_a_value_or_in_a_sentence(name: str) -> None:
    target = TARGETS[name]
    seeds = target.seeds()
    target.read(seeds[0])  # it raises nothing: what is mutated is valid

    @settings(max_examples=target.examples)
    @given(st.sampled_from(range(len(seeds))), st.integers(0, 2**64), st.one_of(st.none(), st.binary(max_size=400)))
    def walk(seed: int, wrong: int, other: bytes | None) -> None:
        data = mutated(seeds[seed], random.Random(wrong)) if other is None else other
        with bounded(target.seconds):
            target.try_input(data)

    walk()
