"""The probe's C module and the Python that does its work where it was not built record the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gapmeter.records import RecordFile, read_records

SCRIPT = Path(__file__).parents[1] / "kit" / "recorded_steps.py"


def _recorded(path: Path, *words: str) -> tuple[RecordFile, str]:
    done = subprocess.run([sys.executable, SCRIPT, path, *words], capture_output=True, text=True, check=True)
    return read_records(path), done.stdout.split()[-1]


def _untimed(file: RecordFile) -> dict[str, Any]:
    """All but the times; of these, which of a span's are the same."""
    spans = file.spans
    same = [(row["queued_ns"] == row["start_ns"], row["start_ns"] == row["end_ns"]) for row in spans]
    long = [name for name in spans.dtype.names or () if not name.endswith("_ns") and name != "n"]
    told = {name: spans[name].tolist() for name in long}
    arrivals = np.isin(spans["code"], (102, 103))  # n is how long the call took
    notes = [{key: value for key, value in note.items() if key != "at_ns"} for note in file.notes[1:]]
    return told | {
        "same": same, "n": np.where(arrivals, spans["n"] > 0, spans["n"]).tolist(),
        "steps": file.steps[["code", "seq", "running", "waiting", "free_blocks", "padded", "entries"]].tolist(),
        "entries": file.entries.tolist(), "entry_step": file.entry_step.tolist(),
        "emissions": file.emissions.tolist(), "emission_step": file.emission_step.tolist(),
        "counts": file.counts[["code", "ref", "prompt", "output", "cached"]].tolist(), "notes": notes,
        "blobs": file.blobs, "complete": file.complete, "dropped": file.dropped, "names": file.engine_ids,
    }  # fmt: skip


def test_the_c_module_and_python_record_the_same(tmp_path: Path) -> None:
    native, which = _recorded(tmp_path / "native.gap")
    if which != "native":
        pytest.skip("the probe was installed without its C module")
    python, which = _recorded(tmp_path / "python.gap", "python")
    assert which == "python"
    ours, theirs = _untimed(native), _untimed(python)
    for name in theirs:
        assert ours[name] == theirs[name], name
    assert (native.process["native"], python.process["native"]) == (True, False)
    assert len(native.steps) > 5 and native.complete
    assert {note["hook"].rpartition(".")[2] for note in native.notes[1:]} == {"schedule"}


def test_a_step_that_is_no_number_is_told_and_let_go() -> None:
    native = pytest.importorskip("gapmeter_probe._native", reason="the probe was installed without its C module")
    told: list[BaseException] = []
    step = object()
    stamps, probe = native.Stamps(1), SimpleNamespace(writer=native.Appender())
    call = native.wrap(native.ARRIVAL, lambda *_: 5, probe, told.append, "gapmeter_seq", 102, stamps, 0)
    before = sys.getrefcount(step)
    for _ in range(9):
        assert call(None, SimpleNamespace(gapmeter_seq=step)) == 5
    assert {type(each) for each in told} == {TypeError}
    assert sys.getrefcount(step) == before
    assert stamps[0] == 0
