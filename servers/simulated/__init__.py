"""A continuous-batching server whose stage times are known: the same API and records as real engines, no model."""

from gapmeter.servers.simulated.options import ServerOptions, simulated_command

__all__ = ["ServerOptions", "simulated_command"]
