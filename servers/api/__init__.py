"""The OpenAI-compatible HTTP layer that the Transformers server and the simulated engine share."""
