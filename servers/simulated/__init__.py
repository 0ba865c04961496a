"""A continuous-batching server whose stage times are known: the same API and records as real engines, no model."""
