"""What a locustfile derives its users from: ``from gapmeter.locust import GapmeterUser``."""

from gapmeter.loadgen.locust.user import GapmeterUser, Reply

__all__ = ["GapmeterUser", "Reply"]
