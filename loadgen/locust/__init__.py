"""The generator that issues through Locust, in processes of its own: gevent's event loop instead of asyncio's."""
