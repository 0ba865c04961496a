"""An example of your own users and shape; docs/locust.md says how to run it."""

from locust import LoadTestShape, between, task

from gapmeter.locust import GapmeterUser


class Reader(GapmeterUser):
    """Asks, reads the answer, asks again; now and then sends a long prompt."""

    wait_time = between(0.2, 0.6)

    @task(3)
    def talk(self) -> None:
        said = [{"role": "user", "content": "Name a tool that every workshop has."}]
        first = self.ask(messages=said, max_tokens=12)
        if first.ok:
            self.think(0.3)
            said += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And what is it for?"}]
            self.ask(messages=said, max_tokens=12)

    @task
    def summarize(self) -> None:
        self.ask("Sum this up in one sentence: " + "The shop opens at nine. " * 20, max_tokens=24)


class LunchBreak(LoadTestShape):
    """Four users, then twelve, then four again: Locust asks once a second how many there should be."""

    def tick(self) -> tuple[int, float] | None:
        seconds = self.get_run_time()
        return (12, 12.0) if 5 <= seconds < 10 else (4, 12.0)
