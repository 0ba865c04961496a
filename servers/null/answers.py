"""The bytes of the answers, made before the first request: sending k tokens is one slice of one buffer.

And what may be wrong with an answer, by name: as the server's default, or in a request's body as ``"fault": NAME``.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

# Answered at once, instead of a stream.
AT_ONCE = ("status_500", "status_404", "not_http", "close_unanswered", "silent")
# Happen after half of the tokens.
MIDWAY = ("cut", "reset", "half_event", "garbage", "error_event", "stall")
# Complete answers, told in another way.
FORMS = ("plain", "close_delimited", "split", "close_after", "drop_reused", "trailing", "interim", "uncounted")
FAULTS = ("none", *AT_ONCE, *MIDWAY, *FORMS)
WORD = " né世"  # several bytes a character, so that a cut can fall inside one
_ID = "null-0"


def chunk(data: bytes) -> bytes:
    """One chunk of HTTP's chunked transfer coding."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: dict[str, Any] | str) -> bytes:
    """One server-sent event."""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return f"data: {text}\n\n".encode()


class PreparedAnswer:
    """The stream of one kind of answer (chat or completion), up to ``most`` tokens; ``coded``: chunked coding.

    Not ``counted``: no chunk says how many tokens there are.

    ``start`` is what precedes the first token: the role, for a chat.
    """

    def __init__(self, kind: str, prompt_tokens: int, most: int, *, coded: bool, counted: bool = True) -> None:
        self._kind, self._prompt_tokens, self._coded = kind, prompt_tokens, coded
        self._counted = counted
        named = "chat.completion.chunk" if kind == "chat" else "text_completion"
        self._head: dict[str, Any] = {"id": _ID, "object": named, "created": 0, "model": "null"}
        pieces = [self._frame(self._piece(number)) for number in range(1, most + 1)]
        self._buffer = memoryview(b"".join(pieces))
        self._ends = [0]
        for piece in pieces:
            self._ends.append(self._ends[-1] + len(piece))
        self.most = most
        self.start = self._frame(self._piece(0)) if kind == "chat" else b""
        self.end = lru_cache(maxsize=1024)(self._end)

    def tokens(self, after: int, upto: int) -> memoryview:
        """The chunks of tokens ``after`` + 1 … ``upto``, none of them the answer's last."""
        return self._buffer[self._ends[after] : self._ends[upto]]

    def length(self, count: int) -> int:
        """Bytes of a whole answer of ``count`` tokens."""
        return len(self.start) + self._ends[count - 1] + len(self.end(count))

    def whole(self, count: int) -> bytes:
        """The answer as one JSON document, not streamed."""
        choice = {"index": 0, "finish_reason": "length"}
        if self._kind == "chat":
            choice |= {"message": {"role": "assistant", "content": WORD * count}}
        else:
            choice |= {"text": WORD * count}
        whole = {**self._head, "object": self._head["object"].removesuffix(".chunk")}
        value = {**whole, "choices": [choice], "usage": self._usage(count)}
        return json.dumps(value, ensure_ascii=False).encode()

    def _end(self, count: int) -> bytes:
        """The last token, the usage and the end mark."""
        usage = event({**self._head, "choices": [], "usage": self._usage(count)}) if self._counted else b""
        parts = [self._piece(count, finish="length"), usage, event("[DONE]")]
        return b"".join(map(self._frame, filter(None, parts))) + (b"0\r\n\r\n" if self._coded else b"")

    def _piece(self, number: int, finish: str | None = None) -> bytes:
        """Token ``number``; 0 is the chunk that only names the role."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        if self._kind == "chat":
            choice |= {"delta": {"content": WORD} if number else {"role": "assistant", "content": ""}}
        else:
            choice |= {"text": WORD}
        usage = {"usage": self._usage(number)} if self._counted else {}
        return event({**self._head, "choices": [choice], **usage})

    def _usage(self, count: int) -> dict[str, int]:
        prompt = self._prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}

    def _frame(self, data: bytes) -> bytes:
        return chunk(data) if self._coded else data
