"""A server without a model: answers on an exact schedule, and a log of when each byte left, to measure clients by."""
