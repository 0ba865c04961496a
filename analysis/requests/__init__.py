"""What the client saw: latencies by their definitions, failures, attempts, turns."""
