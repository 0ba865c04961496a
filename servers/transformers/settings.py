"""What the API process tells the engine process, at its start and with each request."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

PRECISIONS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Of the engine; lengths and sizes are in tokens.

    ``device`` "auto" is the first CUDA device, else the CPU. ``kv_tokens`` 0: room for every request at full length,
    within bounds. ``async_batching`` None: as Transformers chooses.
    """

    model: str
    precision: str
    max_batch: int
    max_model_len: int
    max_batch_tokens: int
    kv_tokens: int
    page_size: int
    scheduler: str
    prefix_cache: bool
    async_batching: bool | None
    device: str
    threads: int
    seed: int

    def to_json(self) -> str:
        """For the command line of the engine process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineSettings:
        """The inverse of ``to_json``."""
        return cls(**json.loads(text))
