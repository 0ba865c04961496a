"""``make fuzz``: atheris drives the client and the parser with bytes of its own, from the seeds in ``corpus``.

An input is what a server sends; where it is cut follows from its checksum. Whatever it is, the request ends in an
outcome that a client of a broken server may have, and its answer reads the same cut and whole.
"""

from __future__ import annotations

import random
import sys
import zlib
from itertools import pairwise
from pathlib import Path

try:
    import atheris
except ModuleNotFoundError:
    sys.exit("atheris is not installed: make fuzz does that, where a build for this Python and system is published")

with atheris.instrument_imports(include=["gapmeter.loadgen.client", "gapmeter.loadgen.exchange", "gapmeter.records"]):
    from gapmeter.records import Outcome
    from gapmeter.records.stream import chunks, events, parse_answer
    from tests.fuzz.feed import ENDED, feed

CORPUS = Path(__file__).parent / "corpus"


def one_input(data: bytes) -> None:
    """Raises AssertionError, or whatever our code raised, for bytes that it cannot take."""
    at = random.Random(zlib.crc32(data))
    edges = sorted(at.randrange(len(data) + 1) for _ in range(at.randrange(12)))
    pieces = [data[start:end] for start, end in pairwise([0, *edges, len(data)]) if end > start]
    ends = bool(at.getrandbits(1))
    cut, at_once = feed(pieces, ends=ends), feed(pieces and [data], ends=ends)
    for record in (cut, at_once):
        assert record.outcome in ENDED, record.outcome
        answer = parse_answer(record)
        assert len(answer.token_ns) == int(answer.chunk_tokens.sum())
        list(chunks(record))
    assert (cut.outcome is Outcome.MALFORMED) == (at_once.outcome is Outcome.MALFORMED)
    if cut.outcome is Outcome.OK:
        assert [text for _, text in events(cut)] == [text for _, text in events(at_once)]


def main() -> None:
    """libFuzzer's own arguments, for instance ``-max_total_time=60``; new inputs go to the first folder named."""
    sys.setrecursionlimit(10_000)
    atheris.Setup([*sys.argv, str(CORPUS)], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
