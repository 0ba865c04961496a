"""A signal in the middle of an import is heard when it is over."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from gapmeter.running.unbroken import unbroken


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_heard_at_the_end_of_the_block(number: signal.Signals) -> None:
    before = signal.signal(number, signal.default_int_handler)
    done = []

    def work() -> None:
        with unbroken():
            signal.raise_signal(number)
            done.append("the rest")

    try:
        with pytest.raises(KeyboardInterrupt):
            work()
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert done == ["the rest"]


def test_without_a_signal_nothing_is_raised_and_an_error_is_the_block_s_own() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="its own"), unbroken():
        raise ValueError("its own")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_thread_may_use_it() -> None:
    def work() -> str:
        with unbroken():
            return "done"

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == "done"
