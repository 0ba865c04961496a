"""What a reader should know of how answers came: whole, uncounted, in groups, without an end, or several at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import Floats
from gapmeter.analysis.numbers import count, share, significant
from gapmeter.analysis.requests.metrics import (
    in_blocks,
    reads_of,
    request_values_ns,
    resent_once,
    sent_tokens,
    stamps_ns,
    succeeded,
)
from gapmeter.analysis.results.trust import RunWarning

_WORTH_SAYING = 0.01  # of the answers
_TOO_FAST = 0.5  # of the time to a first token: a whole answer does not come sooner from a server that computes it
_SEVERAL = 1.05  # tokens a chunk, over all of them
_GATHERED = 1.5  # chunks a read, or tokens a chunk where they are not counted


def _warning(code: str, text: str, cause: str, *touches: str) -> RunWarning:
    return RunWarning(code=code, text=text, cause=cause, flag="", touches=touches)


def streaming_warnings(measured: pd.DataFrame) -> Iterator[RunWarning]:
    """``measured`` as from ``measured_requests``; only answers that succeeded are looked at, and all for ``resent``."""
    good = measured[succeeded(measured)]
    tokens = sent_tokens(good)
    chunks = np.array([len(each) for each in good["chunk_tokens"]], dtype=np.float64)
    yield from _whole(good, tokens, chunks)
    unknown = int(np.isnan(tokens).sum())
    if unknown > _WORTH_SAYING * len(tokens):
        text = (
            f"{count(unknown)} of {count(len(tokens))} answers did not say how many tokens they had: "
            "TPOT and tokens per second are unmeasured for them"
        )
        cause = (
            "the server sends no usage with a stream, though it was asked to (stream_options.include_usage), "
            "or one without counts"
        )
        yield _warning("tokens-unknown", text, cause, "tpot", "throughput")
    yield from _tokens_per_chunk(tokens, chunks)
    yield from _gathered(good)
    if unended := int((good["error"] != "").sum()):
        text = (
            f"{count(unended)} of {count(len(good))} answers were complete, but their body was never ended: the "
            "connection was closed, or held open; their figures count up to the last token"
        )
        cause = "the server does not end the body of its answers, which some HTTP clients call an error"
        yield _warning("unended", text, cause, "load")
    if again := int(resent_once(measured).sum()):
        text = (
            f"{share(again / len(measured))} of requests were sent a second time on a new connection, because the "
            "server closed the first one without answering; their latency counts from due"
        )
        cause = "it closes connections that have idled; a server that drops requests it has read would look the same"
        yield _warning("resent", text, cause, "errors", "ttft")


def _whole(good: pd.DataFrame, tokens: Floats, chunks: Floats) -> Iterator[RunWarning]:
    """Answers that came at once, of so many tokens and chunks, where others stream."""
    at_once = stamps_ns(good, "first_token_ns") == stamps_ns(good, "last_token_ns")
    # As short an answer as fits into a chunk of this server's comes whole where it streams.
    streams = tokens[~at_once] / chunks[~at_once]
    fits = math.ceil(np.nanmax(streams)) if np.isfinite(streams).any() else 1
    came_whole = at_once & (tokens > np.where(chunks == 1, fits, 1))
    whole = int(np.count_nonzero(came_whole))
    if whole > _WORTH_SAYING * len(good):
        text = (
            f"{count(whole)} of {count(len(good))} answers came whole instead of token by token: "
            "their TTFT is their E2E, and they have no ITL and no TPOT"
        )
        cause = "the server does not stream, or something in front of it holds the stream back until it is complete"
        ttft, e2e = request_values_ns(good, "ttft"), request_values_ns(good, "e2e")
        if np.median(chunks[came_whole]) > 1:  # it did send them token by token
            cause = (
                "the load tester read late, the server's event loop was busy, or something in front of it holds the "
                "stream back"
            )
        elif not at_once.all() and np.median(e2e[came_whole]) < _TOO_FAST * np.median(ttft[~at_once]):
            cause = (
                "they came sooner than others' first tokens: probably cached answers; try other prompts (--set seed=N)"
            )
        yield _warning("not-streamed", text, cause, "ttft", "itl", "tpot")


def _tokens_per_chunk(tokens: Floats, chunks: Floats) -> Iterator[RunWarning]:
    """ITL is between arrivals: with several tokens in each, a user reads a token sooner than its gap says."""
    streamed = (chunks > 1) & ~np.isnan(tokens)
    each = float(tokens[streamed].sum() / chunks[streamed].sum()) if streamed.any() else 1.0
    text = f"a chunk held {significant(each)} tokens on average: ITL is the time between chunks, not between tokens"
    if each >= _SEVERAL:
        text += ", and TPOT comes out too short"
        cause = (
            "the server sends several tokens at once (speculative decoding, a stream interval, slow detokenization), "
            "or counts some that it does not send (hidden reasoning)"
        )
        yield _warning("several-tokens", text, cause, "itl", "tpot")
    elif each <= 1 / _SEVERAL:
        cause = "something in front of the server sends a token's text in several chunks, or counts too few tokens"
        yield _warning("divided-tokens", text, cause, "itl", "tpot", "throughput")


def _gathered(good: pd.DataFrame) -> Iterator[RunWarning]:
    """Several chunks a read, and several tokens a chunk where only the length that was asked for can tell."""
    reads = chunks = 0
    for some in in_blocks(good):
        whose, _, came = reads_of(some)
        streamed = np.bincount(whose)[whose] > 1  # the others came whole
        reads, chunks = reads + int(streamed.sum()), chunks + int(came[streamed].sum())
    if reads and (each := chunks / reads) >= _GATHERED:
        text = (
            f"chunks arrived in groups of {significant(each)} on average: TTFT includes the wait for a whole group, "
            "ITL is the time between groups, and TPOT comes out too short"
        )
        cause = "something in front of the server buffers what it sends (a proxy); or the load tester read late"
        yield _warning("gathered", text, cause, "ttft", "itl", "tpot")
    whole = good["output_tokens"].isna().to_numpy(bool) & (good["finish_reason"] == "length").to_numpy(bool)
    asked = good.loc[whole, "output_tokens_asked"].to_numpy(np.float64)
    chunks = sum(map(len, good.loc[whole, "chunk_tokens"]))
    if chunks and (each := float(asked.sum() / chunks)) >= _GATHERED:
        text = (
            f"by the length asked for, which {count(len(asked))} answers reached, a chunk held {significant(each)} "
            "tokens: ITL is the time between chunks, not between tokens, and TPOT comes out too short"
        )
        yield _warning("several-tokens", text, "the server sends several tokens at once", "itl", "tpot")


def choices_warning(notes: Iterable[Mapping[str, Any]]) -> Iterator[RunWarning]:
    """Where a locustfile asked for several answers in one request; ``notes``: of the generator processes."""
    for note in notes:
        if note.get("type") == "choices":
            text = (
                f"{count(note['requests'])} requests asked for up to {count(note['most'])} answers at once: their "
                "tokens are those of all, so that ITL and TPOT are shorter than each answer's own"
            )
            cause = "n, or a list of prompts, in the locustfile; ask for one answer a request to see a reader's pace"
            yield _warning("choices", text, cause, "itl", "tpot")
