"""What the Transformers server adds to Transformers' engine, without a model: cancelling, what a probe counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gapmeter.records import RecordWriter, read_records
from gapmeter.servers.transformers.probe import EngineProbe, _Request, _Step


def test_a_cancelled_request_lets_others_in_and_is_passed_over_by_the_step_in_flight() -> None:
    """An eviction lets nobody in until a request finishes; where the others are cancelled, none would."""
    # Here, since Transformers takes seconds to import, in every process that collects the tests.
    from transformers.generation.continuous_batching.requests import RequestStatus

    from gapmeter.servers.transformers.engine import OpenRequest, TransformersEngine

    state = SimpleNamespace(status=RequestStatus.DECODING)
    scheduler = SimpleNamespace(active_requests={"a": state}, block_new_requests=True)
    engine: Any = object.__new__(TransformersEngine)
    engine._mailbox = SimpleNamespace(open={"a": OpenRequest(frozenset())})
    engine._probe = EngineProbe()
    engine._manager = SimpleNamespace(
        batch_processor=SimpleNamespace(scheduler=scheduler), cancel_request=lambda _: None
    )
    engine._take(("cancel", "a"))
    assert not scheduler.block_new_requests
    assert state.status == RequestStatus.FINISHED


def test_what_is_found_in_the_prefix_cache_after_an_eviction_was_not_spared() -> None:
    probe: Any = EngineProbe()
    probe._requests["a"] = request = _Request(1, 128, 0)

    def entry(before: int, tokens: int) -> Any:
        state = SimpleNamespace(request_id="a", position_offset=before)
        return probe._entry(SimpleNamespace(state=state, query_length=tokens, has_new_token=True))

    entry(0, 128)
    request.evicted, request.seen = True, False
    assert entry(64, 70)[3] == 64
    assert request.cached == 0


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("begin", ({}, {"graphs": 1}, None, "cpu")), ("arrived", ("b", 4, None)), ("cancelled", ("a", None)),
        ("emitting", (1, None)), ("emitted", (1, None)), ("_finish", ()),
    ],
)  # fmt: skip
def test_a_failure_of_the_probe_ends_no_request_and_is_recorded_once(
    name: str, given: tuple[Any, ...], tmp_path: Path
) -> None:
    probe: Any = EngineProbe()
    probe.writer = RecordWriter(tmp_path / "core.gap", {"role": "core"})
    probe._requests["a"] = _Request(1, 4, 0)
    probe._open.append(_Step(1, 0))
    probe._device = object() if name == "_finish" else None
    for _ in range(2):
        getattr(probe, name)(*given)
    probe.close()
    file = read_records(tmp_path / "core.gap")
    assert file.complete
    (note,) = [note for note in file.notes if note["type"] == "missing"]
    assert note["hook"].endswith(f"EngineProbe.{name}")
