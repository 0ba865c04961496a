"""What to ask: scenario files, and the one place that reads them into plain values."""
