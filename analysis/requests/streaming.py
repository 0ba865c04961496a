"""What a server's streams could not tell, said beside the figures that lack it."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gapmeter.analysis.numbers import count, share, significant
from gapmeter.analysis.requests.metrics import stamps_ns, succeeded
from gapmeter.analysis.results.run import RunWarning

Floats = NDArray[np.float64]
_WORTH_SAYING = 0.01  # of the answers
_SEVERAL = 1.05  # tokens a chunk, over all of them


def streaming_warnings(measured: pd.DataFrame) -> list[RunWarning]:
    """``measured`` as from ``measured_requests``; only answers that succeeded are looked at, and all for ``resent``."""
    good = measured[succeeded(measured)]
    found = [_whole(good), _uncounted(good), _several(good), _resent(measured)]
    return [warning for warning in found if warning is not None]


def _tokens(good: pd.DataFrame) -> Floats:
    return np.asarray(good["output_tokens"].astype("Float64").to_numpy(dtype=np.float64, na_value=np.nan))


def _chunks(good: pd.DataFrame) -> Floats:
    return np.array([len(each) for each in good["chunk_tokens"]], dtype=np.float64)


def _whole(good: pd.DataFrame) -> RunWarning | None:
    """Answers of several tokens that arrived at one moment: there is no time between their tokens."""
    at_once = stamps_ns(good, "first_token_ns") == stamps_ns(good, "last_token_ns")
    whole = int(np.count_nonzero(at_once & (_tokens(good) > 1)))
    if whole <= _WORTH_SAYING * len(good):
        return None
    text = (
        f"{count(whole)} of {count(len(good))} answers came whole instead of token by token: "
        "their TTFT is their E2E, and they have no ITL and no TPOT"
    )
    cause = "the server does not stream, or something before it holds the stream back until it is complete"
    return RunWarning(code="not-streamed", text=text, cause=cause, flag="", touches=("ttft", "itl", "tpot"))


def _uncounted(good: pd.DataFrame) -> RunWarning | None:
    unknown = int(np.isnan(_tokens(good)).sum())
    if unknown <= _WORTH_SAYING * len(good):
        return None
    text = (
        f"{count(unknown)} of {count(len(good))} answers did not say how many tokens they had: "
        "TPOT and tokens per second are unmeasured for them"
    )
    cause = "the server sends no usage with a stream, though it was asked to (stream_options.include_usage)"
    return RunWarning(code="tokens-unknown", text=text, cause=cause, flag="", touches=("tpot", "throughput"))


def _several(good: pd.DataFrame) -> RunWarning | None:
    """ITL is between arrivals: with several tokens in each, a user reads a token sooner than its gap says."""
    tokens, chunks = _tokens(good), _chunks(good)
    streamed = (chunks > 1) & ~np.isnan(tokens)
    if not streamed.any():
        return None
    each = float(tokens[streamed].sum() / chunks[streamed].sum())
    if each < _SEVERAL:
        return None
    text = f"a chunk held {significant(each)} tokens on average: ITL is the time between chunks, not between tokens"
    cause = "the server sends several tokens at once (speculative decoding, a stream interval, slow detokenization)"
    return RunWarning(code="several-tokens", text=text, cause=cause, flag="", touches=("itl",))


def _resent(measured: pd.DataFrame) -> RunWarning | None:
    again = int((measured["attempt"] > 0).sum()) if "attempt" in measured else 0
    if not again:
        return None
    text = (
        f"{count(again)} requests ({share(again / len(measured))}) were sent a second time on a new connection, since "
        "the server closed theirs at once without a word; their latency counts from due"
    )
    cause = "it closes connections that have idled; a server that drops requests it has read would look the same"
    return RunWarning(code="resent", text=text, cause=cause, flag="", touches=("errors", "ttft"))
