"""Mistakes that show while a run is planned."""

from __future__ import annotations


class PlanError(Exception):
    """The plan cannot be made as the scenario asks; the text names the remedy. A user's mistake, not a bug."""
