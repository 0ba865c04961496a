"""What every document that analysis writes has in common: its version, and values that JSON has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

SCHEMA_VERSION = 1  # names are only ever added; changed when one is renamed


def json_safe(value: Any) -> Any:
    """The same value in types that JSON has: NaN and infinities become null."""
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
