"""What a locustfile derives its users from: ``from gapmeter.locust import GapmeterUser``."""

from gapmeter.loadgen.locust.locustfile import GapmeterUser, Reply

__all__ = ["GapmeterUser", "Reply"]
