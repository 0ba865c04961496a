"""Per-request sampling inside Transformers' continuous batching, as logits processors of its own kind.

Temperature and seed differ between requests of one batch, so the draw is made by the Gumbel-max rule: the argmax of
logits / temperature + Gumbel noise is a sample of softmax(logits / temperature). The noise is a hash of seed,
position and token, so equal seeds draw alike whatever else is in the batch, wherever the logits are equal.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1


def noise_key(seed: int, position: int) -> int:
    """A positive 31-bit key for one draw (splitmix64's output function)."""
    x = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return ((x ^ (x >> 31)) & 0x7FFFFFFF) or 1


def gumbel(keys: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Standard Gumbel noise, float32 of shape [len(keys), vocabulary], a pure function of keys and token ids."""
    tokens = torch.arange(vocabulary, device=keys.device, dtype=torch.int64)
    x = (keys.to(torch.int64).unsqueeze(-1) * 0x9E3779B1 + tokens * 0x85EBCA77) & _MASK32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK32
    uniform = ((x ^ (x >> 16)).to(torch.float64) + 0.5) / 2.0**32
    return (-torch.log(-torch.log(uniform))).to(torch.float32)


class _PerRequest(ContinuousBatchingLogitsProcessor):
    """One int32 a request. ``idle``: no request of the batch wants anything, so the call costs nothing.

    A captured graph cannot skip, so with graphs it never does.
    """

    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, graphs: bool) -> None:
        self._graphs = graphs
        self._idle = not graphs

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.fill_(self.default)

    def prepare_tensor_args(self, requests_with_new_token: Sequence[Any]) -> torch.Tensor:
        values = [self.value(request.state) for request in requests_with_new_token]
        self._idle = not self._graphs and all(value == self.default for value in values)
        return torch.tensor(values, dtype=torch.int32)

    def __call__(self, scores: Any, tensor_arg: torch.Tensor) -> Any:
        return scores if self._idle else self.apply(scores, tensor_arg[: scores.size(0)])

    default = 0

    def value(self, state: Any) -> int:
        raise NotImplementedError

    def apply(self, scores: torch.Tensor, argument: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Temperature(_PerRequest):
    """Divides by the temperature; 1 (also for greedy requests) changes nothing."""

    supported_kwargs = {"temperature": float}  # noqa: RUF012 - the base class says so
    default = struct.unpack("<i", struct.pack("<f", 1.0))[0]

    def value(self, state: Any) -> int:
        number: int = struct.unpack("<i", struct.pack("<f", state.logit_processor_kwargs.get("temperature") or 1.0))[0]
        return number

    def apply(self, scores: torch.Tensor, argument: torch.Tensor) -> torch.Tensor:
        return scores / argument.view(dtype=torch.float32).unsqueeze(-1)


class Noise(_PerRequest):
    """Adds Gumbel noise for requests that sample; key 0 is greedy."""

    supported_kwargs = {"seed": int}  # noqa: RUF012 - the base class says so

    def value(self, state: Any) -> int:
        arguments = state.logit_processor_kwargs
        if not arguments.get("temperature"):
            return 0
        return noise_key(arguments["seed"], state.position_offset)

    def apply(self, scores: torch.Tensor, argument: torch.Tensor) -> torch.Tensor:
        noise = gumbel(argument, scores.size(-1))
        return torch.where(argument.unsqueeze(-1) != 0, scores + noise, scores)


class MinTokens(_PerRequest):
    """Forbids the end of the sequence before position ``min_length`` (prompt plus the fewest tokens asked for)."""

    supported_kwargs = {"min_length": int}  # noqa: RUF012 - the base class says so

    def __init__(self, graphs: bool, ends: Sequence[int]) -> None:
        super().__init__(graphs)
        self._ends = list(ends)

    def value(self, state: Any) -> int:
        return int(state.position_offset < state.logit_processor_kwargs.get("min_length", 0))

    def apply(self, scores: torch.Tensor, argument: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for end in self._ends:  # a list of them as an index would be copied to the device, which no graph may hold
            scores[:, end].masked_fill_(argument != 0, -torch.inf)
        return scores
