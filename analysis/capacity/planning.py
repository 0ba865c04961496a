"""How many servers a load takes, from the capacity of one."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fleet:
    """Servers for ``target_rps``: ``needed`` carry it with ``headroom`` (a share) kept free, ``spare`` may fail.

    ``planned_rps`` is what each may be given: the capacity's lower bound less the headroom. A load balancer that deals
    Poisson arrivals out at random gives each server Poisson arrivals, which is what the capacity holds for; one that
    looks at queues does better.
    """

    target_rps: float
    headroom: float
    spare: int
    planned_rps: float
    needed: int

    @property
    def replicas(self) -> int:
        return self.needed + self.spare


def plan_fleet(low: float, target_rps: float, headroom: float, spare: int) -> Fleet:
    """``low``: the lower bound of one server's capacity, requests per second. Raises ValueError for what is no plan."""
    if not (low > 0 and target_rps > 0 and 0 <= headroom < 1 and spare >= 0):
        raise ValueError("a plan needs a capacity and a target above 0, a headroom below 1, and no negative spare")
    planned = low * (1 - headroom)
    return Fleet(target_rps, headroom, spare, planned, max(1, math.ceil(target_rps / planned - 1e-9)))
