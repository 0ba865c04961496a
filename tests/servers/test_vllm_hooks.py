from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gapmeter_probe.hooks import Hook, Probe, install, now
from gapmeter_probe.vllm import register
from gapmeter_probe.vllm.api import ApiProbe, Call, Generation
from gapmeter_probe.writer import RecordWriter

from gapmeter.records import RecordFile, Span, read_records

TARGET = """
import time
class Thing:
    def plain(self, x):
        return x + 1
    def breaks(self):
        raise KeyError("its own")
    @staticmethod
    def fixed(x):
        return x * 2
    async def later(self, x):
        return x + 3
    @property
    def value(self):
        return 7
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that can be imported, and has not been."""
    name = f"hooked_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(TARGET)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("GAPMETER_PROBE_DIR", str(tmp_path / "probe"))
    before = list(sys.meta_path)
    yield name
    sys.meta_path[:] = before
    sys.modules.pop(name, None)


class Watcher(Probe):
    """Hooks everything in the target and keeps what it was told."""

    role = "core"

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.seen: list[tuple[str, Any]] = []

    def make_hooks(self) -> list[Hook]:
        at = f"{self.name}:Thing."
        return [
            self.after(f"{at}plain", ("queue",), lambda s, e, result, args: self.seen.append(("plain", result))),
            self.after(f"{at}later", (), lambda s, e, result, args: self.seen.append(("later", result))),
            self.after(f"{at}breaks", (), lambda *_: self.seen.append(("breaks", None))),
            self.before(f"{at}fixed", (), lambda x: self.seen.append(("fixed", x))),
            self.after((f"{at}gone", f"{self.name}:nothing"), ("egress",), lambda *_: None),
            self.after("no_such_package_at_all:Thing.x", ("template",), lambda *_: None),
            self.after((f"{at}renamed", f"{at}plain"), (), lambda *_: self.seen.append(("second name", None))),
        ]


def wrapped(probe: Probe, name: str, function: Any) -> Any:
    """The function as the probe wraps what has that name."""
    return next(hook for hook in probe.hooks() if hook.targets[0].endswith(f".{name}")).wrap(function)


def missing_hooks(probe: Probe) -> list[dict[str, Any]]:
    return [note for note in read_records(probe.writer.path).notes if note["type"] == "missing"]


@pytest.mark.parametrize("imported_before", [True, False])
def test_functions_are_wrapped_whether_their_module_is_there_or_comes_later(target: str, imported_before: bool) -> None:
    if imported_before:
        importlib.import_module(target)
    probe = Watcher(target)
    install([probe])
    module = importlib.import_module(target)
    thing = module.Thing()
    assert (thing.plain(1), thing.fixed(4), module.Thing.fixed(5), asyncio.run(thing.later(1))) == (2, 8, 10, 4)
    assert sorted(map(str, probe.seen)) == sorted(
        map(str, [("second name", None), ("plain", 2), ("fixed", 4), ("fixed", 5), ("later", 4)])
    )
    assert (
        module.__spec__ is not None
        and module.__spec__.loader is module.__loader__
        and "gapmeter" not in type(module.__loader__).__module__
    )


def test_an_error_of_the_wrapped_function_is_the_callers_and_records_nothing(target: str) -> None:
    probe = Watcher(target)
    install([probe])
    with pytest.raises(KeyError, match="its own"):
        importlib.import_module(target).Thing().breaks()
    assert probe.seen == []


def test_hooks_without_a_target_are_recorded_with_the_stages_that_they_cost(target: str) -> None:
    probe = Watcher(target)
    install([probe])
    importlib.import_module(target)
    probe.open({"server": "test"})
    missing = {note["hook"].partition(":")[2]: note["stages"] for note in missing_hooks(probe)}
    assert missing == {"Thing.gone": ["egress"], "Thing.x": ["template"]}


def test_a_target_may_turn_out_missing_after_the_file_was_opened(target: str) -> None:
    probe = Watcher(target)
    install([probe])
    probe.open({"server": "test"})
    assert [note["stages"] for note in missing_hooks(probe)] == [["template"]]
    importlib.import_module(target)
    assert [note["stages"] for note in missing_hooks(probe)] == [["template"], ["egress"]]


def test_a_failure_of_ours_changes_nothing_for_the_caller_and_is_recorded_once(target: str) -> None:
    class Broken(Watcher):
        def make_hooks(self) -> list[Hook]:
            return [self.after(f"{self.name}:Thing.plain", ("queue",), lambda *_: print(1 // 0))]

    probe = Broken(target)
    install([probe])
    probe.open({"server": "test"})
    thing = importlib.import_module(target).Thing()
    assert [thing.plain(n) for n in range(3)] == [1, 2, 3]
    (note,) = missing_hooks(probe)
    assert note["stages"] == ["queue"] and "ZeroDivisionError" in note["error"]


def test_a_target_that_cannot_be_wrapped_stays_as_it_is_and_the_import_goes_on(target: str) -> None:
    def refuse(_: object) -> Callable[..., Any]:
        raise TypeError("cannot be wrapped")

    class Broken(Watcher):
        def make_hooks(self) -> list[Hook]:
            at = f"{self.name}:Thing."
            return [self.after(f"{at}value", ("queue",), lambda *_: None), Hook((f"{at}plain",), ("decode",), refuse)]

    probe = Broken(target)
    install([probe])
    probe.open({"server": "test"})
    thing = importlib.import_module(target).Thing()
    assert (thing.value, thing.plain(1)) == (7, 2)
    found = {note["stages"][0]: note.get("error", "") for note in missing_hooks(probe)}
    assert found == {"queue": "", "decode": "TypeError: cannot be wrapped"}


def test_where_nothing_can_be_written_the_server_serves_and_its_log_says_so(
    target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GAPMETER_PROBE_DIR", str(tmp_path / "file" / "probe"))
    probe = Watcher(target)
    install([probe])
    thing = importlib.import_module(target).Thing()
    probe.open({"server": "test"})
    assert thing.plain(1) == 2 and probe.writer is None
    assert "nothing of this process is recorded: [Errno 20]" in caplog.text


@pytest.mark.parametrize("name", ["data_received", "run_asgi"])
def test_a_server_whose_insides_have_changed_still_answers(writer: RecordWriter, name: str) -> None:
    class Changed:
        """What is hooked of uvicorn, without anything that the probe reads of it."""

        __slots__ = ()

        def data_received(self, data: bytes) -> bytes:
            return data

        async def run_asgi(self, app: str) -> str:
            return app

    probe = ApiProbe()
    probe.writer = writer
    called = wrapped(probe, name, getattr(Changed, name))(Changed(), "whole")
    assert (asyncio.run(called) if name == "run_asgi" else called) == "whole"
    (note,) = missing_hooks(probe)
    assert note["stages"][:2] == ["network_in", "ingress"] and "AttributeError" in note["error"]


def test_the_wait_for_the_rest_of_a_body_is_the_networks(writer: RecordWriter) -> None:
    class Uvicorn:
        """As much of its protocol, and of a request's cycle, as is looked at."""

        cycle: Any = None

        def __init__(self, head: str = "") -> None:
            self.scope, self.more_body = {"method": "POST", "headers": [(b"x-request-id", head.encode())]}, True

        def data_received(self, data: str) -> None:
            if data in ("first", "second"):
                self.cycle = Uvicorn(data)
            self.cycle.more_body = data != "end"

        async def run_asgi(self, rest: Callable[[], None]) -> None:
            await asyncio.sleep(0.01)
            rest()

    probe = ApiProbe()
    probe.writer = writer
    received, run = (wrapped(probe, name, getattr(Uvicorn, name)) for name in ("data_received", "run_asgi"))
    protocol, at = Uvicorn(), list[int]()

    def rest() -> None:
        for data in ("more", "end"):
            at.append(now())
            received(protocol, data)

    for head in ("first", "second"):  # of a connection that is used again
        received(protocol, head)
        asyncio.run(run(protocol.cycle, rest))
    http, ingress = spans(writer.path, Span.HTTP), spans(writer.path, Span.INGRESS)
    assert len(ingress) == 2
    for last, one, whole in zip(at[1::2], http, ingress, strict=True):
        assert last <= one["start_ns"] == one["end_ns"] == whole["start_ns"] <= whole["end_ns"]


@pytest.mark.parametrize("raises", [False, True])
def test_several_hooks_on_one_function_are_all_called(target: str, raises: bool) -> None:
    class Several(Watcher):
        def make_hooks(self) -> list[Hook]:
            at = f"{self.name}:Thing.{'breaks' if raises else 'plain'}"
            return [
                self.before(at, (), lambda *_: self.seen.append(("before", 0))),
                self.after(at, (), lambda *_: self.seen.append(("after", 0))),
                self.around(at, (), self.begin),
            ]

        def begin(self, *_: Any) -> Callable[[], None]:
            self.seen.append(("begin", 0))
            return lambda: self.seen.append(("end", 0))

    probe = Several(target)
    install([probe])
    thing = importlib.import_module(target).Thing()
    with pytest.raises(KeyError) if raises else contextlib.nullcontext():
        thing.breaks() if raises else thing.plain(1)
    said = [what for what, _ in probe.seen]
    assert said == (["begin", "before", "end"] if raises else ["begin", "before", "after", "end"])


def test_the_plugin_is_idle_unless_told_where_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GAPMETER_PROBE_DIR", raising=False)
    before = list(sys.meta_path)
    register()
    assert sys.meta_path == before


def test_a_plugin_that_cannot_be_loaded_lets_vllm_start_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GAPMETER_PROBE_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "gapmeter_probe.vllm.worker", None)  # as where a file of it is missing
    before = list(sys.meta_path)
    register()
    assert sys.meta_path == before
    assert "nothing of this process is recorded: import of gapmeter_probe.vllm.worker halted" in caplog.text


def spans(path: str, code: int) -> list[Any]:
    file: RecordFile = read_records(path)
    return list(file.spans[file.spans["code"] == code])


@pytest.fixture
def writer(tmp_path: Path) -> RecordWriter:
    return RecordWriter(tmp_path / "x.gap", {})


@dataclass
class Collector:
    """As much of vLLM's RequestOutputCollector as is looked at, merging what was not taken in time."""

    request_id: str
    output: Any = None

    def put(self, output: Any) -> None:
        if self.output is None:
            self.output = output
        else:
            self.output.outputs += output.outputs

    async def get(self) -> Any:
        output, self.output = self.output, None
        return output


class Cycle:
    """A response under way, whose chunks go nowhere."""

    gapmeter_call: Call

    async def send(self, message: dict[str, Any]) -> None:
        await asyncio.sleep(0)


class Connection:
    """An API probe in the middle of one call with ``choices`` answers, wrapped as it wraps vLLM."""

    def __init__(self, writer: RecordWriter, choices: int = 1) -> None:
        self.probe, self.call, self.writer = ApiProbe(), Call(1, "client"), writer
        self.probe.writer = self.probe._answers.writer = writer
        self.collector = Collector("e0" if choices == 1 else "parent")
        for index in range(choices):
            generation = Generation(index + 1, SimpleNamespace(queue=self.collector, request_index=index))
            self.call.generations.append(generation)
            self.probe._generations[f"e{index}"] = generation
        self._cycle = Cycle()
        self._cycle.gapmeter_call = self.call
        self._put, self._get = wrapped(self.probe, "put", Collector.put), wrapped(self.probe, "get", Collector.get)
        self._send = wrapped(self.probe, "send", Cycle.send)
        self._process = wrapped(self.probe, "process_outputs", self._put_all)

    def _put_all(self, processor: None, outputs: list[SimpleNamespace]) -> None:
        for output in outputs:
            part = SimpleNamespace(index=int(output.request_id[1:]), token_ids=output.new_token_ids)
            self._put(self.collector, SimpleNamespace(outputs=[part]))

    def deliver(self, *counts: int, held_back: bool = False) -> None:
        """A message of the engine: how many tokens for each choice; ``held_back``: not yet put for formatting."""
        outputs = [
            SimpleNamespace(request_id=f"e{index}", new_token_ids=[0] * count, finish_reason=None)
            for index, count in enumerate(counts)
            if count
        ]
        if held_back:
            self.probe._marks.clear()
            self.probe._answers.processed(1, 2, None, (None, outputs))
        else:
            self._process(None, outputs)

    def pass_on(self, *counts: int) -> None:
        """Such a message, and the request's own task takes what it brought."""
        self.deliver(*counts)
        asyncio.run(self._get(self.collector))

    def write(self, *bodies: bytes) -> None:
        for body in bodies:
            asyncio.run(self._send(self._cycle, {"type": "http.response.body", "body": body}))

    def written(self) -> list[tuple[int, int]]:
        """(ref, n) of each chunk."""
        return [(int(s["ref"]), int(s["n"])) for s in spans(self.writer.path, Span.EGRESS)]


ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
TEXT = b'data: {"choices":[{"delta":{"content":"a \\"role\\": b"}}]}\n\n'
USAGE, DONE = b'data: {"choices":[],"usage":{}}\n\n', b"data: [DONE]\n\n"


def test_a_chunk_carries_the_tokens_taken_before_it_and_the_others_none(writer: RecordWriter) -> None:
    connection = Connection(writer)
    connection.pass_on(1)
    connection.write(ROLE, TEXT)
    connection.pass_on(1)
    connection.deliver(1)  # arrives while the chunk before is being written: it is not in that chunk
    connection.write(TEXT)
    connection.pass_on(2)  # three tokens, merged
    connection.write(TEXT, USAGE, DONE, b"")
    assert [n for _, n in connection.written()] == [0, 1, 2, 5, 0, 0]
    handled = [int(s["n"]) for s in spans(writer.path, Span.DETOKENIZE)]
    assert handled == [1, 2, 3, 5] == [int(s["n"]) for s in spans(writer.path, Span.OUTPUT_RECEIVE)]


def test_keep_alive_comments_carry_no_tokens(writer: RecordWriter) -> None:
    connection = Connection(writer)
    connection.pass_on(1)
    connection.write(b": keep-alive\n\n", TEXT)
    assert [n for _, n in connection.written()] == [0, 1]


def test_tokens_withheld_by_a_parser_are_counted_in_the_next_chunk(writer: RecordWriter) -> None:
    connection = Connection(writer)
    for tokens in (1, 2):
        connection.pass_on(tokens)
    connection.write(TEXT)
    assert connection.written() == [(1, 3)]


def test_tokens_that_wait_for_a_stream_interval_are_not_in_a_chunk_yet(writer: RecordWriter) -> None:
    connection = Connection(writer)
    connection.pass_on(1)
    connection.write(TEXT)
    connection.deliver(4, held_back=True)
    connection.write(USAGE)
    connection.pass_on(1)
    connection.write(TEXT)
    assert [n for _, n in connection.written()] == [1, 0, 6]


def test_an_answer_that_is_not_streamed_carries_all_its_tokens(writer: RecordWriter) -> None:
    connection = Connection(writer)
    connection.pass_on(7)
    connection.write(b'{"choices":[{"message":{"role":"assistant"}}]}')
    assert connection.written() == [(1, 7)]


def chunk(choice: int) -> bytes:
    return b'data: {"choices":[{"index":%d,"delta":{"content":"a \\"index\\": 7"}}]}\n\n' % choice


def test_choices_of_one_request_are_told_apart_whatever_order_they_are_written_in(writer: RecordWriter) -> None:
    connection = Connection(writer, choices=2)
    connection.pass_on(1, 1)
    connection.write(chunk(1), chunk(0))
    connection.pass_on(0, 1)
    connection.write(chunk(1))
    assert connection.written() == [(2, 1), (1, 1), (2, 2)]


def test_an_answer_that_comes_whole_carries_the_tokens_of_all_its_choices(writer: RecordWriter) -> None:
    connection = Connection(writer, choices=2)
    connection.pass_on(3, 5)
    connection.write(b'{"choices":[{"message":{"role":"assistant"}},{"message":{"role":"assistant"}}]}')
    assert connection.written() == [(1, 3), (2, 5)]
