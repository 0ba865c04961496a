"""What the API server's event loop records at every message of the engine and every chunk of an answer.

``Answers`` of ``_native.c`` does the same, where that was built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gapmeter_probe import codes
from gapmeter_probe.calls import Sent
from gapmeter_probe.writer import RecordWriter


class Answers:
    """``generations``: engine id -> Generation; ``marks``: collector's id -> when an output was put into it.

    ``carrying(call, body)`` says what a chunk will be recorded as. Nothing is recorded before ``writer`` is
    set.
    """

    def __init__(
        self, generations: dict[str, Any], marks: dict[str, int], carrying: Callable[[Any, bytes], Sent | None]
    ) -> None:
        self.writer: RecordWriter | None = None
        self._generations, self._marks, self._carrying = generations, marks, carrying
        self._arrived: dict[int, int] = {}  # id of an engine output -> when its message was received
        self._arrived_ns = 0

    def decoded(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        """A message was decoded: a decoder is called once it is here."""
        outputs = getattr(result, "outputs", None)
        if outputs and self.writer is not None:
            self._arrived[id(outputs[0])] = start

    def processed(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        """Requests of a batch are handled in turn: each one's share ends when its output is put for its task."""
        writer, outputs, marks = self.writer, args[1], self._marks
        if writer is None or not outputs:
            marks.clear()
            return
        self._arrived_ns = self._arrived.pop(id(outputs[0]), self._arrived_ns)
        arrived = self._arrived_ns or start
        before = start
        records: list[int] = []
        for output in outputs:
            generation = self._generations.get(output.request_id)
            if generation is None:
                continue
            generation.received = count = generation.received + len(output.new_token_ids)
            done = marks.get(getattr(generation.collector, "request_id", ""))
            if done is None:
                done = before  # its tokens wait for more (stream interval), or for the end
            else:
                generation.put = count
            if output.new_token_ids:
                ref = generation.ref
                records += (40, 2, codes.OUTPUT_RECEIVE, ref, count, arrived, arrived, start)
                records += (40, 2, codes.DETOKENIZE, ref, count, start, before, max(before, done))
            before = max(before, done)
            if output.finish_reason is not None:
                generation.finished = True
                del self._generations[output.request_id]
        writer.spans(records)
        marks.clear()

    def sending(self, cycle: Any, message: Any, *_: Any) -> Sent | None:
        """A piece of an answer is about to be written: what will be recorded of that."""
        call = getattr(cycle, "gapmeter_call", None)
        body = message.get("body")
        return self._carrying(call, body) if call is not None and body else None
