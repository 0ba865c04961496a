"""Comparing runs: may they be compared, what differs and by how much, and which stage accounts for it."""
