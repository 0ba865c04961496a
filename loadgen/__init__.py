"""Asking: the plan of a run (when each request is due and what it says), and the generators that issue it."""


class PlanError(Exception):
    """The plan cannot be made as the scenario asks; the text names the remedy. A user's mistake, not a bug."""
