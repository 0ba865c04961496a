"""Which requests are shown one by one: a run of a million has no page and no trace file for all of them."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

MOST = 2000


def chosen(requests: pd.DataFrame, most: int = MOST) -> NDArray[np.bool_]:
    """All answered requests up to ``most``; beyond, a quarter each slowest to first and last token, and an even sample.

    ``requests`` is the client's table; bool, a row each.
    """
    good = (requests["outcome"] == "ok") & requests["first_token_ns"].notna()
    answered: NDArray[np.bool_] = good.to_numpy(np.bool_)
    if answered.sum() <= most:
        return answered
    kept = np.zeros(len(requests), dtype=np.bool_)
    for end in ("first_token_ns", "last_token_ns"):
        waited = (requests[end] - requests["due_ns"]).to_numpy(np.float64, na_value=np.nan)
        waited[~answered] = -1.0
        kept[np.argsort(-waited, kind="stable")[: most // 4]] = True
    others = np.flatnonzero(answered & ~kept)
    kept[others[np.linspace(0, len(others) - 1, most - int(kept.sum())).astype(int)]] = True
    return kept
