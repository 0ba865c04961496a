"""Users and shapes of a user's own, through a real generator process against the null server."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from gapmeter.loadgen.fleet import NotStarted, make_fleet
from gapmeter.loadgen.generator import Locustfile
from gapmeter.records import Outcome, read_records
from gapmeter.records.request import ISSUED
from gapmeter.records.stream import parse_answer
from tests.kit.loads import plan, records_of
from tests.kit.servers import answering, null_server
from tests.kit.streams import sse

MS = 1_000_000
HEAD = """
from locust import LoadTestShape, constant, task
from gapmeter.locust import GapmeterUser
"""


def run(text: str, url: str, folder: Path, *, users: int = 2, seconds: float = 2) -> tuple[list[str], Path]:
    """What went wrong, and the record file."""
    file = folder / "mine.py"
    file.write_text(HEAD + text)
    what = plan([-1] * 4, users=users, end_ns=int(seconds * 1000) * MS).without_requests()
    own = Locustfile(str(file), "null", "full")
    with make_fleet(what, url, None, folder, (), 1, warm=1, generator="locust", locustfile=own) as fleet:
        fleet.start()
        fleet.wait(lambda: None, 0.05)
        return fleet.troubles(), fleet.record_paths[0]


async def test_a_request_is_due_a_think_time_after_the_answer_before_it(tmp_path: Path) -> None:
    text = """
print("said as the file is read")


class Mine(GapmeterUser):
    wait_time = constant(0.05)

    @task
    def talk(self):
        print("more than a pipe holds that nobody reads" * 1000)
        first = self.ask("hello", max_tokens=3, exact=True)
        assert first.ok and first.text, first
        self.think(0.02)
        self.ask(messages=[{"role": "user", "content": first.text}], max_tokens=3, exact=True)
"""
    async with null_server() as (_, url):
        troubles, path = await asyncio.to_thread(run, text, url, tmp_path, users=1)
    assert troubles == []
    found = records_of(path)
    assert len(found) > 8
    assert {record.outcome for record in found} == {Outcome.OK}
    assert {len(parse_answer(record).token_ns) for record in found} == {3}
    assert len({record.request_id for record in found}) == len(found)
    pauses = [after.due_ns - before.end_ns for before, after in itertools.pairwise(found)]
    assert pauses == [20 * MS if place % 2 == 0 else 50 * MS for place in range(len(pauses))]
    assert all(record.sent_ns >= record.due_ns for record in found)
    assert [record.index for record in records_of(path, ISSUED)] == [record.index for record in found]


async def test_the_wait_time_of_a_set_of_tasks_is_time_to_think_too(tmp_path: Path) -> None:
    text = """
from locust import TaskSet


class Talks(TaskSet):
    wait_time = constant(0.05)

    @task
    def talk(self):
        self.user.think()
        self.wait()
        self.user.think()


class Mine(GapmeterUser):
    wait_time = constant(0.2)
    tasks = [Talks]

    def think(self):
        self.ask("hello", max_tokens=3, exact=True)

    def _pause(self):
        raise NotImplementedError
"""
    async with null_server() as (_, url):
        troubles, path = await asyncio.to_thread(run, text, url, tmp_path, users=1)
    assert troubles == []
    pauses = [after.due_ns - before.end_ns for before, after in itertools.pairwise(records_of(path))]
    assert pauses
    assert set(pauses) == {50 * MS}


async def test_of_several_answers_a_reply_has_the_first_ones_text(tmp_path: Path) -> None:
    text = """
class Mine(GapmeterUser):
    wait_time = constant(0.05)

    @task
    def talk(self):
        reply = self.ask("hello", n=2)
        assert reply.text == "yes" or not reply.ok, reply.text
"""
    said = [("y", 0), ("n", 1), ("es", 0), ("o", 1)]
    chunks = [{"choices": [{"index": index, "delta": {"content": part}}]} for part, index in said]
    body = b"".join(sse(*chunks, "[DONE]"))
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)) as url:
        troubles, path = await asyncio.to_thread(run, text, url, tmp_path, users=1)
    assert troubles == []
    assert records_of(path)[0].outcome is Outcome.OK


async def test_an_answer_that_is_none_has_no_text_and_ends_no_user(tmp_path: Path) -> None:
    text = """
class Mine(GapmeterUser):
    wait_time = constant(0.05)

    @task
    def talk(self):
        assert self.ask("hello").text == ""
"""
    body = b"data: " + b"[" * 100_000 + b"\n\n"
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)) as url:
        troubles, path = await asyncio.to_thread(run, text, url, tmp_path, users=1)
    assert (troubles, len(records_of(path)) > 1) == ([], True)


async def test_requests_for_several_answers_are_on_record_as_such(tmp_path: Path) -> None:
    text = """
class Mine(GapmeterUser):
    wait_time = constant(0.2)

    @task
    def talk(self):
        self.ask("hello", max_tokens=2, n=2, exact=True)
        self.ask(["one", "two"], completion=True, max_tokens=2, n=2)
        self.ask([101, 102, 103], completion=True, max_tokens=2, exact=True)
"""
    async with null_server() as (_, url):
        troubles, path = await asyncio.to_thread(run, text, url, tmp_path, users=1)
    assert troubles == []
    asked = [record.output_tokens for record in records_of(path)]
    assert asked[:3] == [4, 0, 2]
    (note,) = (note for note in read_records(path).notes if note["type"] == "choices")
    assert note["most"] == 4
    assert abs(note["requests"] - 2 * len(asked) / 3) < 2


async def test_a_shape_says_how_many_users_there_are_and_when_it_ends(tmp_path: Path) -> None:
    text = """
class Mine(GapmeterUser):
    wait_time = constant(0.1)

    @task
    def talk(self):
        self.ask("hello", max_tokens=2, exact=True)


class Steps(LoadTestShape):
    def tick(self):
        seconds = self.get_run_time()
        return None if seconds > 4.5 else (6, 50) if seconds > 2.5 else (1, 50)
"""
    async with null_server() as (_, url):
        troubles, path = await asyncio.to_thread(run, text, url, tmp_path, seconds=30)
    assert troubles == []
    found = records_of(path)
    begun = found[0].due_ns
    assert (found[-1].due_ns - begun) / 1e9 < 15, "the shape had ended long before the plan's time"
    early = [record for record in found if record.due_ns - begun < 1_500 * MS]
    late = [record for record in found if record.due_ns - begun > 3_500 * MS]
    most = [sum(other.sent_ns <= r.due_ns < other.end_ns + 100 * MS for other in found) for r in late]
    assert all(a.end_ns <= b.due_ns for a, b in itertools.pairwise(early)), "one user waits for her answers"
    assert max(most) > 3


# what the file says, what standard error says
BAD = [
    ("class Mine(GapmeterUser:\n    pass\n", r"mine\.py.*SyntaxError"),
    ("import nothing_of_this_name\n", r"mine\.py:4: ModuleNotFoundError: No module named 'nothing_of_this_name'"),
    ("from locust import User\nclass Plain(User):\n    @task\n    def t(self): pass\n", "Plain does not derive from"),
    ("", "no class here derives from"),
]


@pytest.mark.parametrize(("text", "said"), BAD)
async def test_a_file_that_cannot_be_used_is_told_before_the_start(text: str, said: str, tmp_path: Path) -> None:
    async with null_server() as (_, url):
        with pytest.raises(NotStarted, match=said):
            await asyncio.to_thread(run, text, url, tmp_path)


async def test_a_task_that_raises_ends_the_run_with_its_place(tmp_path: Path) -> None:
    text = """
class Mine(GapmeterUser):
    @task
    def talk(self):
        self.ask("hello", max_tokens=2)
        raise ValueError("out of words")
"""
    async with null_server() as (_, url):
        (trouble,), path = await asyncio.to_thread(run, text, url, tmp_path, seconds=60)
    assert f"{tmp_path / 'mine.py'}:9: ValueError: out of words" in trouble
    assert records_of(path)
