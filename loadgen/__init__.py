"""Asking: the plan of a run (when each request is due and what it says), and the generators that issue it."""
