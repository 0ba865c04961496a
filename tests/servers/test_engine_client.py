"""The messages between the API process and the engine process."""

from __future__ import annotations

import socket
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gapmeter.servers.engine_client import Channel

_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.tuples(st.text(max_size=5), _PLAIN), max_size=6), st.data())
def test_frames_arrive_whole_and_in_order_however_they_are_cut(messages: list[Any], data: st.DataObject) -> None:
    stream = b"".join(_frame(message) for message in messages)
    here, there = socket.socketpair()
    with here, there:
        channel, read = Channel(there), []
        while stream:
            size = data.draw(st.integers(1, len(stream)))
            here.sendall(stream[:size])
            stream = stream[size:]
            read += list(channel.receive())
        assert read == messages and not channel.closed
        here.close()
        assert list(channel.receive()) == [] and channel.closed


def test_a_message_larger_than_the_socket_s_buffer_arrives_bit_by_bit() -> None:
    here, there = socket.socketpair()
    message = ("add", list(range(2_000_000)))
    with here, there:
        sender, receiver, read = Channel(here), Channel(there), []
        sender.send(*message)
        assert sender.unsent
        while not read:
            sender.flush()
            read += list(receiver.receive())
        assert read == [message] and not sender.unsent


def test_what_the_other_side_can_no_longer_get_is_dropped_and_its_end_is_noticed() -> None:
    here, there = socket.socketpair()
    with here:
        channel = Channel(here)
        there.close()
        channel.send("outputs", [1])
        assert not channel.unsent
        assert list(channel.receive()) == [] and channel.closed


def _frame(message: Any) -> bytes:
    here, there = socket.socketpair()
    with here, there:
        Channel(here).send(*message)
        return there.recv(1 << 20)


def test_a_message_whose_taker_fails_does_not_come_again() -> None:
    here, there = socket.socketpair()
    with here, there:
        channel = Channel(there)
        here.sendall(b"".join(_frame(("n", number)) for number in range(3)))
        taken = channel.receive()
        assert next(taken) == ("n", 0)
        taken.close()  # as where it raised
        assert list(channel.receive()) == [("n", 1), ("n", 2)]
