"""What the simulated server can be told to do wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Faults:
    """Requests count from 1, in the order in which they come.

    ``start_s``: seconds before the server is ready; ``never_ready``: it listens but its health never answers 200;
    ``die_at``: it is gone, without a word, when that request comes; ``stall_at``: the engine then does nothing for
    ``stall_s`` seconds; ``error_share``: this share of requests, spread evenly, is answered 500. 0 is never.
    """

    start_s: float = 0.0
    never_ready: bool = False
    die_at: int = 0
    stall_at: int = 0
    stall_s: float = 1.0
    error_share: float = 0.0

    def stalls(self, number: int) -> bool:
        """Whether the engine stalls when it gets request ``number``."""
        return number == self.stall_at

    def dies(self, number: int) -> bool:
        """Whether the server dies when request ``number`` comes."""
        return number == self.die_at

    def refuses(self, number: int) -> bool:
        """Whether request ``number`` is answered 500: as often as makes ``error_share`` of all so far."""
        return int(number * self.error_share) > int((number - 1) * self.error_share)
