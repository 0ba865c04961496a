"""In which order a sweep's points are run: one server after the other, within one shuffled, repeats interleaved."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence

Visit = tuple[int, int]  # a point and a repeat, both from 0


def visits(servers: Sequence[Hashable], repeats: int, seed: int) -> list[list[Visit]]:
    """Which point is run when: a list for each server that is started. ``servers``: each point's, equal for one.

    A machine's speed drifts: with points in the order of their values the drift would look like an effect. Every
    repeat visits all points of its server in an order of its own before the next one begins; the servers' order is
    drawn too. The same seed gives the same order.
    """
    rng = random.Random(f"sweep {seed}")
    by_server: dict[Hashable, list[int]] = {}
    for point, server in enumerate(servers):
        by_server.setdefault(server, []).append(point)
    groups = list(by_server.values())
    rng.shuffle(groups)
    return [[(point, repeat) for repeat in range(repeats) for point in rng.sample(group, len(group))]
            for group in groups]  # fmt: skip
