"""A process's share of the plan as a file: numpy arrays and JSON, so that loading it can run nothing."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gapmeter.loadgen.plan import Plan
from gapmeter.loadgen.swaps import Swaps

_ARRAYS = ("due_ns", "prompt_tokens", "output_tokens", "turns", "pauses_ns", "places")
_APART = (*_ARRAYS, "bodies", "swaps")


def save_slice(plan: Plan, path: Path) -> None:
    """Write a plan. Raises OSError."""
    plain = {field.name: getattr(plan, field.name) for field in fields(plan) if field.name not in _APART}
    plain["words"] = [word.decode("latin-1") for word in plan.swaps.words]
    arrays: dict[str, NDArray[Any]] = {name: getattr(plan, name) for name in _ARRAYS}
    arrays["swaps_at"] = plan.swaps.at
    arrays["body_bytes"] = np.array([len(body) for body in plan.bodies], np.int64)
    arrays["bodies"] = np.frombuffer(b"".join(plan.bodies), np.uint8)
    arrays["plain"] = np.frombuffer(json.dumps(plain).encode(), np.uint8)
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def load_slice(path: Path) -> Plan:
    """Read what ``save_slice`` wrote. Raises OSError, or ValueError or KeyError for something else."""
    with np.load(path, allow_pickle=False) as arrays:
        plain = json.loads(arrays["plain"].tobytes())
        words = tuple(word.encode("latin-1") for word in plain.pop("words"))
        ends = np.cumsum(arrays["body_bytes"]).tolist()
        joined = arrays["bodies"].tobytes()
        bodies = [joined[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        columns = {name: arrays[name] for name in _ARRAYS}
        swaps = Swaps(arrays["swaps_at"], words)
    plain["notes"] = tuple(plain["notes"])
    plain["rate_knots"] = tuple((at, rate) for at, rate in plain["rate_knots"])
    return Plan(**plain, **columns, bodies=bodies, swaps=swaps)
