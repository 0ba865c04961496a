"""What the HTTP layer must know about the server that it fronts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """``max_model_len`` bounds prompt plus output in tokens; ``describe`` goes into the head of the probe's file."""

    host: str
    port: int
    served_name: str
    max_model_len: int
    server: str
    describe: dict[str, Any] = field(default_factory=dict)
