"""What was measured, for other tools: each module makes one format, from a run's folder or from results."""
