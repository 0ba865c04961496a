"""Samples read back: gaps, energy by counter and by power with its bounds, what warns. Figures by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.device.energy import energy_of, unwrapped
from gapmeter.analysis.device.telemetry import _throttled, describe_telemetry, measured_window, servers_gpus
from gapmeter.analysis.judge.warnings import telemetry_warnings
from gapmeter.analysis.results.device import EngineSamples, PageTime, Telemetry
from gapmeter.report.device import utilisation_sentence
from tests.kit.results import manifest
from tests.kit.telemetry import IDLE, read

S = 1_000_000_000
GPU = {"gpu": 0, "name": "NVIDIA H100 80GB HBM3", "pids": [7], "pcie_generation": 5, "pcie_width": 16}
BITS = {"power cap": 4, "too hot (driver)": 32}
MANIFEST = manifest(plan={"t0_ns": 2 * S}, placement={"server": [0, 1]}, hardware={"memory_gib": 64})


def write(folder: Path, source: str, rows: list[dict[str, Any]]) -> None:
    (folder / "telemetry").mkdir(exist_ok=True)
    with (folder / "telemetry" / f"{source}.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def started(folder: Path, gpus: list[dict[str, Any]], **sources: Any) -> None:
    known = {"gpu": {"every_ns": S // 10, "gpus": gpus, "throttle_bits": BITS}, **sources}
    write(folder, "sampler", [{"at_ns": 0, "type": "start", "hz": 10, "cpu_ns": 5, "sources": known}])


def samples(until_s: float, watts_idle: float, watts: float, load_s: float, **more: Any) -> list[dict[str, Any]]:
    """Ten a second: idle power until the load, then the other; the counter is their integral, in mJ."""
    rows = []
    for tenth in range(int(until_s * 10) + 1):
        at = tenth / 10
        joules = watts_idle * min(at, load_s) + watts * max(at - load_s, 0)
        now = watts if at >= load_s else watts_idle
        rows.append({"at_ns": int(at * S), "gpu": 0, "energy_mj": round(joules * 1e3), "power_mw": now * 1e3, **more})
    return rows


def test_energy_is_the_counters_difference_and_its_idle_share_is_from_before_the_load(tmp_path: Path) -> None:
    started(tmp_path, [GPU])
    write(tmp_path, "gpu", samples(10, 100, 500, 2))
    found = energy_of(read(tmp_path), 4 * S, 8 * S, 2 * S)
    assert (found.method, found.joules, found.idle_w) == ("counter", pytest.approx(2000), pytest.approx(100))
    assert found.low_j == pytest.approx(2000) and found.high_j == pytest.approx(2100)  # a sample at either edge
    assert found.idle_j == pytest.approx(400) and found.idle_share == pytest.approx(0.2)
    assert found.source == "energy counter of GPU 0"


def test_power_is_summed_only_where_there_is_no_counter_and_then_has_no_bounds(tmp_path: Path) -> None:
    started(tmp_path, [GPU])
    rows = samples(10, 100, 500, 2)
    write(tmp_path, "gpu", [{key: value for key, value in row.items() if key != "energy_mj"} for row in rows])
    found = energy_of(read(tmp_path), 4 * S, 8 * S, 2 * S)
    assert (found.method, found.joules, found.idle_w) == ("power", pytest.approx(2000), pytest.approx(100))
    assert found.low_j is None and found.high_j is None
    assert "no counter" in found.source


def test_a_window_that_a_gap_leaves_half_unseen_has_no_energy(tmp_path: Path) -> None:
    started(tmp_path, [GPU])
    rows = [row for row in samples(10, 100, 500, 2) if not 4.5 * S < row["at_ns"] < 7 * S]
    write(tmp_path, "gpu", [{key: value for key, value in row.items() if key != "energy_mj"} for row in rows])
    assert energy_of(read(tmp_path), 4 * S, 8 * S, 2 * S) is None
    assert energy_of(read(tmp_path), 20 * S, 30 * S, 2 * S) is None


def test_a_counter_bridges_a_gap_inside_the_window_exactly(tmp_path: Path) -> None:
    started(tmp_path, [GPU])
    write(tmp_path, "gpu", [row for row in samples(10, 100, 500, 2) if not 4.5 * S < row["at_ns"] < 7 * S])
    found = energy_of(read(tmp_path), 4 * S, 8 * S, 2 * S)
    assert found.joules == pytest.approx(2000)


def test_only_the_gpus_on_which_the_server_computes_are_counted(tmp_path: Path) -> None:
    other = GPU | {"gpu": 1, "pids": [99]}
    started(tmp_path, [GPU, other])
    write(tmp_path, "gpu", samples(10, 100, 500, 2) + samples(10, 60, 60, 2, gpu=1))
    write(tmp_path, "processes", [{"at_ns": S, "pid": 7, **IDLE}])
    assert servers_gpus(read(tmp_path)) == {0}
    found = energy_of(read(tmp_path), 4 * S, 8 * S, 2 * S)
    assert found.parts_j == {"GPU 0": pytest.approx(2000)}


def test_where_the_driver_does_not_say_whose_gpus_they_are_all_count(tmp_path: Path) -> None:
    started(tmp_path, [GPU | {"pids": None}, GPU | {"gpu": 1, "pids": None}])
    write(tmp_path, "gpu", samples(10, 100, 500, 2) + samples(10, 100, 250, 2, gpu=1))
    found = energy_of(read(tmp_path), 4 * S, 8 * S, 2 * S)
    assert found.joules == pytest.approx(3000)


def test_rapl_counts_packages_and_memory_but_no_part_of_a_package_and_survives_its_wrap(tmp_path: Path) -> None:
    domains = [
        {"domain": "intel-rapl:0", "name": "package-0", "range_uj": 1_000_000_000},
        {"domain": "intel-rapl:0:0", "name": "core", "range_uj": 1_000_000_000},
        {"domain": "intel-rapl:1", "name": "psys", "range_uj": 1_000_000_000},
        {"domain": "intel-rapl:0:1", "name": "dram", "range_uj": 1_000_000_000},
    ]
    write(tmp_path, "sampler", [{"at_ns": 0, "type": "start", "sources": {"rapl": {"domains": domains}}}])
    rows = [
        {"at_ns": second * S, "domain": domain["domain"], "energy_uj": (base + watts * second * 1_000_000) % 10**9}
        for domain, base, watts in zip(domains, (900_000_000, 0, 0, 0), (50, 30, 90, 10), strict=True)
        for second in range(11)
    ]
    write(tmp_path, "rapl", rows)
    found = energy_of(read(tmp_path), 2 * S, 8 * S, 1 * S)
    assert found.joules == pytest.approx(6 * 60)
    assert set(found.parts_j) == {"CPU package-0 (intel-rapl:0)", "CPU dram (intel-rapl:0:1)"}


def test_energy_of_the_cpu_alone_is_none_of_a_server_whose_gpus_could_not_be_read(tmp_path: Path) -> None:
    domains = [{"domain": "intel-rapl:0", "name": "package-0", "range_uj": 10**12}]
    started(tmp_path, [GPU], rapl={"domains": domains})
    write(tmp_path, "sampler", [{"at_ns": S, "type": "failed", "source": "gpu", "why": "GPU 0: it is lost"}])
    rows = [{"at_ns": at * S, "domain": "intel-rapl:0", "energy_uj": 5 * 10**7 * at} for at in range(11)]
    write(tmp_path, "rapl", rows)
    assert energy_of(read(tmp_path), 2 * S, 8 * S, 1 * S) is None


@given(st.lists(st.integers(0, 999), min_size=1, max_size=50), st.integers(0, 999))
def test_a_counter_that_wraps_is_the_sum_of_its_steps(steps: list[int], first: int) -> None:
    true = first + np.concatenate([[0], np.cumsum(steps)])
    assert unwrapped((true % 1000).astype(np.float64), 1000.0).tolist() == true.astype(np.float64).tolist()


def test_a_half_written_line_is_counted_and_passed_over(tmp_path: Path) -> None:
    started(tmp_path, [GPU])
    write(tmp_path, "gpu", samples(1, 100, 500, 2))
    with (tmp_path / "telemetry" / "gpu.jsonl").open("a") as file:
        file.write('{"at_ns":1234,"gpu":0,"ener')
    found = read(tmp_path)
    assert found.broken_lines == 1 and len(found.tables["gpu"]) == 11
    assert not found.ended


NO_SAMPLES = (
    "3", "[" * 100_000, "\xff", "{}", '{"at_ns": 1e999, "gpu": 0}', '{"at_ns": 5, "gpu": "x"}',
    '{"at_ns": 5, "gpu": 0, "sm_mhz": "fast"}', '{"at_ns": 5, "gpu": 0, "sm_mhz": NaN}', '{"at_ns": 5, "gpu": 1e30}',
    '{"at_ns": 5, "gpu": 0, "sm_mhz": [1]}',
)  # fmt: skip
NO_NOTES = (
    "3", '{"type": "start"}', '{"at_ns": 1, "type": "guess"}', '{"at_ns": 1, "type": "missed", "sources": ["gpu"]}',
    '{"at_ns": 1, "type": "start", "sources": {"gpu": {"gpus": [3]}}}',
    '{"at_ns": 1, "type": "start", "sources": {"rapl": {"domains": [{}]}}}',
    '{"at_ns": 1, "type": "start", "sources": {"gpu": {"every_ns": 0}}}', '{"at_ns": 1, "type": "failed", "source": 3}',
)  # fmt: skip


@pytest.mark.parametrize(
    ("source", "line"), [*(("gpu", line) for line in NO_SAMPLES), *(("sampler", line) for line in NO_NOTES)]
)
def test_a_line_that_no_sampler_writes_is_counted_and_passed_over(source: str, line: str, tmp_path: Path) -> None:
    """Before the others: what is said first of the sources counts."""
    (tmp_path / "telemetry").mkdir()
    (tmp_path / "telemetry" / f"{source}.jsonl").write_bytes(line.encode("latin1") + b"\n")
    started(tmp_path, [GPU])
    write(tmp_path, "gpu", samples(12, 100, 500, 2, sm_mhz=1500))
    found = read(tmp_path)
    assert found.broken_lines == 1 and len(found.tables["gpu"]) == 121
    told = describe_telemetry(found, None, MANIFEST, (2 * S, 12 * S), energy_of(found, 2 * S, 12 * S, 2 * S))
    assert told.gpus[0].sm_mhz.mean == 1500 and told.energy.joules == pytest.approx(5000)


def test_missed_deadlines_and_failed_reads_are_gaps(tmp_path: Path) -> None:
    started(tmp_path, [GPU])
    notes = [
        {"at_ns": 5 * S, "type": "missed", "lane": "fast", "sources": ["gpu"], "count": 7, "since_ns": 3 * S,
         "until_ns": 4 * S},
        {"at_ns": 6 * S, "type": "failed", "source": "gpu", "why": "GPU is lost"},
    ]  # fmt: skip
    write(tmp_path, "sampler", notes)
    first, second = read(tmp_path).gaps
    assert (first.since_ns, first.until_ns, first.missed) == (3 * S, 4 * S, 7)
    assert (second.since_ns, second.missed, second.why) == (6 * S, 1, "GPU is lost")


def test_a_folder_without_samples_has_no_telemetry(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    assert describe_telemetry(None, None, MANIFEST, (0, S), None) is None


def described(folder: Path, **more: Any) -> Telemetry:
    started(folder, [GPU])
    write(folder, "gpu", samples(12, 100, 500, 2, **more))
    return describe_telemetry(read(folder), None, MANIFEST, (2 * S, 12 * S), None)


def test_what_a_killed_sampler_did_not_see_any_more_is_a_warning(tmp_path: Path) -> None:
    started(tmp_path, [GPU])
    write(tmp_path, "gpu", samples(5, 100, 500, 2))
    found = describe_telemetry(read(tmp_path), None, MANIFEST, (2 * S, 12 * S), None)
    assert (found.sources["gpu"].samples, found.sources["gpu"].missed) == (31, 69)
    (warning,) = telemetry_warnings(found, MANIFEST)
    assert warning.text == "telemetry of gpu: 69 of 100 samples are missing"
    assert warning.cause == "the sampler was ended before the run, or the disk was full; the longest gap is 7.00 s"


def test_samples_that_are_missing_at_the_end_of_a_run_are_its_longest_gap(tmp_path: Path) -> None:
    started(tmp_path, [GPU])
    write(tmp_path, "gpu", samples(5, 100, 500, 2))
    missed = {"at_ns": 12 * S, "type": "missed", "lane": "fast", "sources": ["gpu"], "count": 69,
              "since_ns": 5 * S, "until_ns": 12 * S}  # fmt: skip
    write(tmp_path, "sampler", [missed, {"at_ns": 13 * S, "type": "end"}])
    found = describe_telemetry(read(tmp_path), None, MANIFEST, (2 * S, 12 * S), None)
    assert (found.sources["gpu"].missed, found.sources["gpu"].longest_gap_s) == (69, 7.0)


def test_of_a_gap_that_began_before_the_window_what_lies_in_it_is_missing(tmp_path: Path) -> None:
    started(tmp_path, [GPU])
    write(tmp_path, "gpu", [row for row in samples(13, 100, 500, 2) if row["at_ns"] >= 5 * S])
    missed = {"at_ns": 5 * S, "type": "missed", "lane": "fast", "sources": ["gpu"], "count": 50,
              "since_ns": 0, "until_ns": 5 * S}  # fmt: skip
    write(tmp_path, "sampler", [missed, {"at_ns": 13 * S, "type": "end"}])
    found = describe_telemetry(read(tmp_path), None, MANIFEST, (2 * S, 12 * S), None)
    gpu = found.sources["gpu"]
    assert (gpu.samples, gpu.missed, gpu.gaps, gpu.longest_gap_s) == (71, 30, 1, 3.0)


def test_samples_that_did_not_fit_on_the_disk_are_missing_and_said(tmp_path: Path) -> None:
    started(tmp_path, [GPU])
    write(tmp_path, "gpu", [row for row in samples(13, 100, 500, 2) if not 4 * S <= row["at_ns"] < 6 * S])
    write(tmp_path, "sampler", [{"at_ns": 13 * S, "type": "end", "dropped": 20}])
    found = describe_telemetry(read(tmp_path), None, MANIFEST, (2 * S, 12 * S), None)
    (warning,) = telemetry_warnings(found, MANIFEST)
    assert warning.text == "telemetry of gpu: 19 of 100 samples are missing"  # both ends of the window have one
    assert warning.cause == "the disk was full; the longest gap is 2.10 s"


def test_throttling_is_a_warning_with_its_share_and_reason(tmp_path: Path) -> None:
    found = described(tmp_path, throttle_mask=4 | 1)
    assert found.gpus[0].throttled == {"power cap": 1.0}
    (warning,) = telemetry_warnings(found, MANIFEST)
    assert warning.text == "GPU 0 was throttled for 100 % of the run: power cap"
    silent = pd.DataFrame({"throttle_mask": [np.nan, np.nan]})
    assert _throttled(silent, {"power cap": 4}) is None, "a GPU that does not tell, beside one that does"


def test_a_gpu_that_does_not_know_why_it_is_slow_keeps_its_samples(tmp_path: Path) -> None:
    """NVML's mask of reasons is then 2^63, which no signed integer holds."""
    (gpu,) = described(tmp_path, throttle_mask=1 << 63).gpus
    assert gpu.throttled == {} and gpu.power_w.mean == pytest.approx(500)


def test_clocks_that_fell_and_memory_that_is_full_are_warnings(tmp_path: Path) -> None:
    started(tmp_path, [GPU])
    rows = samples(12, 100, 500, 2, memory_used_bytes=79 * 2**30, memory_total_bytes=80 * 2**30)
    for row in rows:
        row["sm_mhz"] = 1980 if row["at_ns"] < 7 * S else 1782
    write(tmp_path, "gpu", rows)
    found = describe_telemetry(read(tmp_path), None, MANIFEST, (2 * S, 12 * S), None)
    told = {warning.code: warning.text for warning in telemetry_warnings(found, MANIFEST)}
    assert told["clocks"] == "GPU 0: the SM clock fell by 10 % from the run's first fifth to its last"
    assert told["gpu-memory"] == "GPU 0: 79.0 of 80.0 GiB of memory were used"


@pytest.mark.parametrize(("each_ms", "told"), [(500.0, ["metrics-cost"]), (5.0, [])])
def test_a_page_of_metrics_that_takes_long_to_make_is_a_warning(
    tmp_path: Path, each_ms: float, told: list[str]
) -> None:
    """Eleven of them in ten seconds: more than a fiftieth of the time from 18 ms on."""
    found = described(tmp_path, busy_percent=97)
    unknown: dict[str, Any] = dict.fromkeys(EngineSamples.model_fields)
    engine = EngineSamples(**unknown | {"took_ms": PageTime(p50=each_ms, max=each_ms)})
    asked = found.sources["engine"].model_copy(update={"expected": 11, "samples": 11})
    found = found.model_copy(update={"engine": engine, "sources": {**found.sources, "engine": asked}})
    assert [warning.code for warning in telemetry_warnings(found, MANIFEST)] == told


def test_nvml_s_utilisation_and_pcie_are_means_over_the_window(tmp_path: Path) -> None:
    write(
        tmp_path, "pcie", [{"at_ns": t * S, "gpu": 0, "pcie_rx_kb_s": 6_300_000, "pcie_tx_kb_s": 0} for t in range(9)]
    )
    found = described(tmp_path, busy_percent=97)
    gpu = found.gpus[0]
    assert gpu.busy_share.mean == pytest.approx(0.97)
    assert gpu.pcie.rx_gb_s.mean == pytest.approx(6.3)
    assert gpu.pcie.link_gb_s == pytest.approx(63.0, abs=0.1)
    assert utilisation_sentence(found.utilisation).startswith("NVML calls the GPU busy 97 % of the time")
    assert found.sources["gpu"].samples == 101 and found.sources["gpu"].expected == 100


def test_cpu_of_a_process_is_its_time_over_the_windows(tmp_path: Path) -> None:
    write(tmp_path, "sampler", [{"at_ns": 0, "type": "start", "hz": 10, "sources": {}}])
    rows = [
        {"at_ns": t * S // 10, "pid": 7, "name": "core", "cpu_ns": t * S // 20, "rss_bytes": 2**30, "threads": 4,
         "voluntary": 10 * t, "involuntary": t}
        for t in range(101)
    ]  # fmt: skip
    write(tmp_path, "processes", rows)
    found = describe_telemetry(read(tmp_path), None, MANIFEST, (0, 10 * S), None)
    (process,) = found.processes
    assert process.cpu_cores == pytest.approx(0.5) and process.cpu_cores_max == pytest.approx(0.5)
    assert process.voluntary_per_s == pytest.approx(100) and process.rss_gib == 1.0
    assert found.utilisation.server_cpu_share == pytest.approx(0.25)  # of two cores


def test_a_process_that_was_there_for_a_while_used_its_cores_for_that_while_alone(tmp_path: Path) -> None:
    write(tmp_path, "sampler", [{"at_ns": 0, "type": "start", "hz": 10, "sources": {}}])
    rest = {"rss_bytes": 2**30, "threads": 4, "voluntary": 0, "involuntary": 0}
    rows = [{"at_ns": t * S // 10, "pid": 7, "name": "core", "cpu_ns": t * S // 20, **rest} for t in range(101)]
    for pid in range(8, 18):  # compilers, a second each, one after the other
        begun = (pid - 8) * 10
        rows += [{"at_ns": (begun + t) * S // 10, "pid": pid, "name": "cc", "cpu_ns": t * S // 10, **rest}
                 for t in range(11)]  # fmt: skip
    write(tmp_path, "processes", sorted(rows, key=lambda row: row["at_ns"]))
    found = describe_telemetry(read(tmp_path), None, MANIFEST, (0, 10 * S), None)
    assert found.utilisation.server_cpu_cores == pytest.approx(1.5)
    assert found.processes[0].name == "core" and found.processes[1].cpu_cores == pytest.approx(0.1)
    assert found.processes[1].cpu_cores_max == pytest.approx(1)


def test_a_server_that_was_stopped_is_told_how_often_and_how_long(tmp_path: Path) -> None:
    sources = {"processes": {"every_ns": S // 10}}
    write(tmp_path, "sampler", [{"at_ns": 0, "type": "start", "hz": 10, "sources": sources}])
    rest = {"name": "core", "cpu_ns": 0, "rss_bytes": 2**30, "threads": 4, "voluntary": 0, "involuntary": 0}
    stops = {*range(20, 25), *range(60, 63)}
    rows = [
        {"at_ns": t * S // 10, "pid": pid, **rest, **({"stopped": True} if pid == 7 and t in stops else {})}
        for t in range(101) for pid in (6, 7)
    ]  # fmt: skip
    write(tmp_path, "processes", rows)
    found = describe_telemetry(read(tmp_path), None, MANIFEST, (0, 10 * S), None)
    assert {one.pid: one.stopped_s for one in found.processes} == {6: None, 7: (0.5, 0.3)}
    (warning,) = (one for one in telemetry_warnings(found, MANIFEST) if one.code == "stopped")
    assert warning.text == "the server was stopped 2 times, for about 800 ms of 10.0 s, at most 500 ms at a time"


def test_the_measured_window_is_from_the_first_due_to_the_last_end() -> None:
    requests = pd.DataFrame({"measured": [False, True, True], "due_ns": [1, 5, 9], "end_ns": [99, 30, 20]})
    assert measured_window(requests) == (5, 30)
    assert measured_window(requests[:1]) is None
