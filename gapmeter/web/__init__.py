"""Pages that a local server hands out: a run while it goes on, and the runs folder."""
