"""What kept a thread is taken from its stretches to the nanosecond, however often it was kept."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.ledger import shares
from gapmeter.analysis.ledger.classes import CLASSES
from gapmeter.analysis.ledger.cores import CORE, LOCK, WORK, CoreUse, Culprit, ManyStretches, Reason, Stretches
from gapmeter.analysis.ledger.critical_path import Intervals, pieces
from gapmeter.analysis.ledger.shares import Processes, Sharer
from gapmeter.analysis.ledger.trace import EMISSION, ENTRY, STEP_SPAN, Trace
from gapmeter.analysis.stages import STAGES
from gapmeter.records import Span
from gapmeter.records.reader import STEP_DTYPE

API, ENGINE, EVENTS = 7, 8, 3
REASONS = (Reason(CORE, Culprit("engine")), Reason(CORE, Culprit("nobody")), Reason(LOCK), Reason(WORK))
KINDS = ("loop", "loop turn", "loop woken", "pool woken", "engine", "forward", "engine woken")
_spans = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9), st.integers(0, len(REASONS) - 1)), max_size=12)
_rows = st.lists(
    st.tuples(st.integers(0, EVENTS - 1), st.integers(0, 60), st.integers(1, 30), st.integers(0, len(CLASSES) - 1)),
    max_size=20,
)


def _pieces(rows: list[tuple[int, int, int, int]], classes: int) -> Intervals:
    event, start, length, cls = np.array(rows, np.int64).reshape(-1, 4).T
    return pieces(Intervals(event, start, start + length, cls), EVENTS, classes)


def _trace(stretches: dict[str, list[tuple[int, int, int]]]) -> Trace:
    use = {}
    for kind, spans in stretches.items():
        found = _pieces([(0, *span) for span in spans], len(REASONS))
        pid = API if kind.startswith(("loop", "pool")) else ENGINE
        use[kind, pid] = ManyStretches(Stretches(found.start, found.end, found.cls).packed())
    tables = (np.empty(0, dtype) for dtype in (STEP_SPAN, STEP_DTYPE, ENTRY, EMISSION))
    step_spans, steps, entries, emissions = tables
    return Trace(
        request_spans={}, step_spans=step_spans, process_spans={}, steps=steps, entries=entries,
        emissions=emissions, unmeasured=frozenset(), notes=[],
        cores=CoreUse(REASONS, use, "switches"),
    )  # fmt: skip


def test_a_forward_is_shorter_by_the_waits_of_its_own_engine_alone() -> None:
    waits = ManyStretches(Stretches(*(np.array([value]) for value in (10, 30, 0))).packed())
    forwards = [(1, Span.FORWARD, 0, 0, 100), (2, Span.FORWARD, 0, 0, 100)]
    trace = replace(
        _trace({}), step_spans=np.array(forwards, STEP_SPAN), engine_steps=(1, 2), engine_of={ENGINE: 0, ENGINE + 1: 1},
        entries=np.array([(step, 0, 1, 0, 0) for step in (1, 2)], ENTRY),
        cores=CoreUse(REASONS, {("forward", ENGINE): waits}, "switches"),
    )  # fmt: skip
    assert trace.step_loads["forward_ns"].tolist() == [80, 100]
    assert trace.step_loads is trace.step_loads, "it takes seconds of a large run"
    assert trace.belong_to(np.array([1, 2, 3]), ENGINE + 1).tolist() == [False, True, True], "as engines_of has it"


@given(st.fixed_dictionaries(dict.fromkeys(KINDS, _spans)), _rows)
def test_sums_are_those_of_the_rows_cut_at_every_reason(
    stretches: dict[str, list[tuple[int, int, int]]], rows: list[tuple[int, int, int, int]]
) -> None:
    owned = _pieces(rows, len(CLASSES))
    processes = Processes(np.full(EVENTS, API), np.where(np.arange(EVENTS) == 0, -1, ENGINE))
    sharer = Sharer(_trace(stretches))
    counted = np.arange(EVENTS) != 1
    found, cut = sharer.shares(owned, processes, counted), sharer.cut(owned, processes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "native", None)  # where it was not built
        other = sharer.shares(owned, processes, counted)
    assert (found.ns == other.ns).all() and found.core_holders == other.core_holders
    want, transit = np.zeros((EVENTS, len(STAGES)), int), np.zeros(EVENTS, int)
    np.add.at(want, (cut.event, cut.cls // 2), cut.end - cut.start)
    np.add.at(transit, cut.event, (cut.end - cut.start) * (cut.cls % 2))
    assert (found.by_stage == want).all()
    assert (found.transit == transit).all()
    core = [stage.name for stage in STAGES].index("core_wait")
    assert sum(found.core_holders.values()) == found.by_stage[counted, core].sum()


@pytest.mark.parametrize(("apart_ns", "few"), [(10, 500_000), (1_000_000, 0)], ids=["as they were", "packed"])
def test_what_kept_a_thread_at_other_times_takes_no_memory(
    apart_ns: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a long run there are many million stretches; an event, and two that lie far apart, ask for a few of them."""
    monkeypatch.setattr("gapmeter.analysis.ledger.cores._FEW", few)
    start = np.arange(500_000) * apart_ns
    kept = ManyStretches(Stretches(start, start + 5, np.zeros(len(start), np.int16)).packed())
    use = CoreUse(REASONS, {("loop", API): kept}, "switches")
    trace, loop = replace(_trace({}), cores=use), np.array([cls.thread for cls in CLASSES]).tolist().index("loop")
    begin = np.array([start[0], start[-1]])
    rows = Intervals(np.arange(2), begin, begin + 10, np.full(2, loop))
    one = Intervals(*(column[:1] for column in (rows.event, rows.start, rows.end, rows.cls)))
    both = Processes(np.full(2, API), np.full(2, ENGINE))
    tracemalloc.start()
    try:
        sharer = Sharer(trace)
        found = sharer.shares(one, Processes(*(of[:1] for of in both)), np.ones(1, np.bool_))
        cut = sharer.cut(rows, both)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(found.core_holders.values()) == 5
    assert (cut.end - cut.start).tolist() == [5, 5, 5, 5]
    assert peak < start.nbytes / 10
