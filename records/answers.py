"""Many answers at once: the same as ``parse_answer`` of each, in a fraction of the time.

What most servers send, a small C module (``_events.c``) reads, a block of records in a call, and without Python's lock.
Other answers, and all of them where it was not built, are left to ``parse_answer``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gapmeter.records.request import Block, Ints, Table
from gapmeter.records.stream import engine_metrics, storable

_read: Callable[[bytes, Ints], tuple[bytes, bytes]] | None = None
with contextlib.suppress(ImportError):  # it was built where a compiler was
    from gapmeter.records._events import answers as _read

_SAID = np.dtype(
    [
        *((name, "<i8") for name in ("first_text_ns", "characters", "chunks", "tokens")),
        *((name, "<i8") for name in ("finish_reason", "finish_reason_end", "metrics", "metrics_end")),
        *((name, "<i4") for name in ("usual", "by_usage", "prompt", "output", "cached", "done")),
    ]
)
_CHUNK = np.dtype([("arrival_ns", "<i8"), ("tokens", "<i8")])
UNKNOWN = np.int64(np.iinfo(np.int64).min)  # in place of a number


@dataclass(frozen=True, slots=True)
class Answers:
    """What the answers of a block say, an entry each, nothing of one that is not ``usual``; fields as of ``Answer``.

    ``said`` has what is a number: of chunks and of tokens how many there are, those of one answer behind the other.
    ``UNKNOWN`` stands for None.
    """

    data: bytes
    said: Table
    chunk_ns: Ints
    chunk_tokens: Ints
    token_ns: Ints

    @property
    def usual(self) -> NDArray[np.bool_]:
        """Whether it could be read so."""
        return self.said["usual"] > 0

    def finish_reasons(self) -> list[str]:
        texts = self._texts("finish_reason")
        readable = {text: storable(text.decode()) for text in set(texts)}
        return [readable[text] for text in texts]

    def request_metrics(self) -> list[dict[str, Any] | None]:
        return [engine_metrics(json.loads(text)) if text else None for text in self._texts("metrics")]

    def counted(self) -> list[str]:
        return ["usage" if by_usage else "unmeasured" for by_usage in self.said["by_usage"].tolist()]

    def prompt_tokens(self) -> Ints:
        return np.where(self.said["prompt"] > 0, self.said["prompt"], UNKNOWN)

    def output_tokens(self) -> Ints:
        said = self.said
        counted = np.where(said["by_usage"] > 0, said["tokens"], UNKNOWN)
        return np.where(said["output"] > 0, said["output"], counted)

    def cached_tokens(self) -> Ints:
        return np.where(self.said["cached"] >= 0, self.said["cached"], UNKNOWN)

    def _texts(self, name: str) -> list[bytes]:
        places = zip(self.said[name].tolist(), self.said[f"{name}_end"].tolist(), strict=True)
        return [self.data[at:end] for at, end in places]


def read_answers(block: Block) -> Answers:
    """As many of a block's answers as are of the usual shape."""
    heads = block.heads
    places = np.empty((len(heads), 5), np.int64)  # as ``Place`` of the C module has it
    for column, values in enumerate((block.stamps_at, heads["chunk_ns"], block.waited, block.bodies_at, heads["body"])):
        places[:, column] = values
    if _read is None:
        said, chunks = np.zeros(len(heads), _SAID), np.empty(0, _CHUNK)
    else:
        read = _read(block.data, places)
        said, chunks = np.frombuffer(read[0], _SAID), np.frombuffer(read[1], _CHUNK)
    chunk_ns, chunk_tokens = chunks["arrival_ns"].copy(), chunks["tokens"].copy()
    return Answers(block.data, said, chunk_ns, chunk_tokens, np.repeat(chunk_ns, chunk_tokens))
