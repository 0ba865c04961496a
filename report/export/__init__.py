"""A run for other tools: each module reads a run's folder and writes one format."""
