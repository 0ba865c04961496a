"""What the ledger says of a device, against what a device with a clock of its own truly did."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gapmeter_probe.device import FORWARD, FORWARD_END, SAMPLED, DeviceClock
from gapmeter_probe.kernels import WINDOW, KernelSampler
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.device.roofline import ratio, step_work
from gapmeter.analysis.device.telemetry import describe_utilisation
from gapmeter.analysis.device.use import describe_device
from gapmeter.analysis.judge.warnings import device_warnings
from gapmeter.analysis.ledger.device_time import anchors_of, host_bound, launch_waits, timed_forwards
from gapmeter.analysis.ledger.interference import Interference, fit_interference
from gapmeter.analysis.ledger.trace import Trace
from gapmeter.analysis.results.device import DeviceUse, PeakRate
from gapmeter.records import RecordWriter, Span, read_records
from tests.kit import clocked_transformers
from tests.kit.clocked import Request, Run, settle, virtual_time
from tests.kit.clocked_vllm import Engine, run
from tests.kit.cuda import Device, Faults, HostClock, Stream
from tests.kit.results import WEIGHTS

MS = 1_000_000
BEGIN = HostClock().ns + MS
WITHIN = 0.01


def one(output: int = 40) -> list[Request]:
    return [Request("r1", BEGIN, 64, output)]


def stages(served: Run, event: str = "last_token") -> dict[str, float]:
    """The ledgers' sums, ns."""
    ledger = served.ledger()
    assert ledger.refused == ()
    assert not {"prefill", "decode", "launch_gap"} & set(ledger.unmeasured)
    row = ledger.rows[ledger.rows["event"] == event].sum(numeric_only=True)
    return {str(name).removesuffix("_ns"): float(ns) for name, ns in row.items()}


def computing(found: dict[str, float]) -> float:
    return found["prefill"] + found["decode"]


def truly(served: Run) -> int:
    """How long the device worked while its requests were under way, ns."""
    return sum(served.busy_ns(request.due_ns, request.tokens[-1]) for request in served.requests)


def window(served: Run) -> tuple[int, int]:
    return min(work.start for work in served.device.work), max(work.end for work in served.device.work)


def used(served: Run) -> DeviceUse:
    return describe_device(served.trace(), window(served))


def true_busy_share(served: Run) -> float:
    since, until = window(served)
    return served.busy_ns(since, until) / (until - since)


ENGINES = [
    Engine(runner, asynchronous, separate, graph)
    for runner in (1, 2) for asynchronous in (False, True) for separate in (False, True) for graph in (False, True)
]  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
def test_what_the_device_did_for_a_request_is_in_its_ledger_to_the_hundredth(tmp_path: Path, engine: Engine) -> None:
    served = run(tmp_path, engine, one(), Device(HostClock(), drift_ppm=40))
    found = stages(served)
    assert computing(found) == pytest.approx(truly(served), rel=WITHIN)
    assert used(served).busy_share == pytest.approx(true_busy_share(served), rel=WITHIN)
    assert used(served).idle_share == pytest.approx(1 - true_busy_share(served), rel=WITHIN, abs=1e-4)
    assert found["unexplained"] < WITHIN * found["total"]


def test_a_device_that_is_never_idle_leaves_nothing_to_the_host_work_that_it_covers(tmp_path: Path) -> None:
    served = run(tmp_path, Engine(2, asynchronous=True), one())  # rows of later steps are prepared beneath
    found = stages(served)
    host = found["scheduling"] + found["input_prep"] + found["sampling"]
    assert true_busy_share(served) > 0.999
    assert host < WITHIN * found["total"]
    assert found["hidden_host"] > 0.2 * found["total"]


@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("drift_ppm", [0, 80])
def test_a_pause_of_the_host_within_a_step_is_launch_gap(tmp_path: Path, runner: int, drift_ppm: float) -> None:
    engine = Engine(runner, pause_us=6000)  # the forward is over after about half of it
    served = run(tmp_path, engine, one(), Device(HostClock(), drift_ppm=drift_ppm))
    found = stages(served)
    assert served.gap_ns() > 0.25 * found["total"]
    assert found["launch_gap"] == pytest.approx(served.gap_ns(), rel=WITHIN)
    assert 1 - used(served).busy_share == pytest.approx(1 - true_busy_share(served), rel=WITHIN)


def test_idleness_between_steps_is_the_hosts_and_known_for_every_step(tmp_path: Path) -> None:
    served = run(tmp_path, Engine(1, idle_us=5000), one())
    found, use = stages(served), used(served)
    idle = 1 - true_busy_share(served)
    assert idle > 0.5
    assert use.idle_share == pytest.approx(idle, rel=WITHIN)
    assert found["scheduling"] > 40 * 5 * MS * 0.95
    assert found["launch_gap"] < WITHIN * found["total"]


def test_a_request_that_was_put_behind_anothers_step_on_the_device_has_waited_for_that(tmp_path: Path) -> None:
    engine = Engine(1, asynchronous=True, kernels=200)  # steps of 12 ms
    served = run(tmp_path, engine, [*one(30), Request("r2", BEGIN + 60 * MS, 64, 4)])
    ledger = served.ledger()
    row = ledger.rows[(ledger.rows["event"] == "first_token") & (ledger.rows["request_id"] == "r2")].iloc[0]
    assert ledger.refused == ()
    scheduled = row["other_step_ns"] + row["prefill_ns"]
    assert row["other_step_ns"] > 5 * MS
    assert row["prefill_ns"] == pytest.approx(12.4 * MS, rel=0.02)
    assert scheduled > 0.7 * row["total_ns"]


def lost(fails: bool = False, query_ns: int = 1000, since: int = 0, until: int = 1 << 62) -> Faults:
    """Queries that fail, or take long, for a while."""
    return Faults(lambda at: query_ns if since <= at < until else 1000, lambda at: fails and since <= at < until)


def test_a_step_whose_device_time_was_lost_is_unexplained_and_never_the_hosts_launch(tmp_path: Path) -> None:
    device = Device(HostClock())
    device.faults = lost(fails=True, since=BEGIN + 30 * MS, until=BEGIN + 37 * MS)
    served = run(tmp_path, Engine(1, asynchronous=True), one(), device)
    trace, found = served.trace(), stages(served)
    assert 1 <= len(trace.untimed_steps) <= 4
    step_ns = 50 * 60_000
    assert found["unexplained"] > 0.3 * len(trace.untimed_steps) * step_ns
    assert truly(served) - computing(found) == pytest.approx(found["unexplained"], abs=0.5 * step_ns)
    assert trace.on_device and not (trace.step_spans["n"][trace.step_spans["code"] == Span.FORWARD] == 0).any()
    (warning,) = device_warnings(trace, window(served))
    assert "reported no times" in warning.text and "unspecified launch failure" in warning.cause


def test_without_any_device_time_the_forwards_are_unmeasured_and_so_is_what_encloses_them(tmp_path: Path) -> None:
    device = Device(HostClock())
    device.faults = lost(fails=True)
    served = run(tmp_path, Engine(1), one(), device)
    ledger = served.ledger()
    assert {"prefill", "decode", "launch_gap"} <= set(ledger.unmeasured)
    row = ledger.rows[ledger.rows["event"] == "last_token"].iloc[0]
    assert np.isnan(row["decode_ns"])
    assert row["unexplained_ns"] > 0.95 * truly(served)
    assert describe_device(served.trace(), window(served)) is None
    (warning,) = device_warnings(served.trace(), window(served))
    assert "40 of 40 steps" in warning.text
    said = [note["what"] for note in served.trace().notes if note["type"] == "warning"]
    assert said == ["device timing failed in a step", "device timing ended"]


def test_two_clocks_that_drift_and_sway_apart_are_brought_together_within_the_anchors_width(tmp_path: Path) -> None:
    device = Device(HostClock(), drift_ppm=50, wobble_us=30)
    served = run(tmp_path, Engine(1, idle_us=200_000), one(300), device)  # a minute
    trace = served.trace()
    forwards = trace.step_spans[trace.step_spans["code"] == Span.FORWARD]
    truth = [work for work in device.work if work.name == "forward"]
    stays = trace.step_spans[trace.step_spans["code"] == Span.DEVICE_STEP]
    assert max(work.end for work in truth) - BEGIN > 60e9
    order = np.argsort(forwards["step"])
    off = np.abs(forwards["start"][order] - np.array([work.start for work in truth]))
    assert off.max() <= stays["n"].max() + 20_000  # and the way from the mark to the forward's first kernel
    found = anchors_of(trace.notes)
    assert found.drift == pytest.approx(-50e-6, abs=2e-6)
    one_anchor = off_with_first_anchor_alone(served, [work.start for work in truth])
    assert one_anchor > 1 * MS, "what a single anchor would have made of it"


@given(
    st.lists(st.tuples(st.floats(1e9, 3e9), st.integers(500, 60_000), st.floats(-1, 1)), min_size=1, max_size=8),
    st.floats(-9e-5, 9e-5),
    st.floats(-0.5, 1.5),
)
def test_a_placed_mark_is_never_farther_off_than_is_said(
    made: list[tuple[float, int, float]], drift: float, where: float
) -> None:
    """``made``: device ns since the anchor before, half width, and where in its width the anchor truly was."""
    device = np.cumsum([since for since, _, _ in made])
    notes = [
        {"type": "anchor", "number": number, "since_ns": since, "half_width_ns": half,
         "host_ns": round(at * (1 + drift) + part * half)}
        for number, (at, (since, half, part)) in enumerate(zip(device.tolist(), made, strict=True), 1)
    ]  # fmt: skip
    found = anchors_of(notes)
    at = device[0] + where * max(device[-1] - device[0], 1e9)
    placed, width = found.place(np.array([at]))
    assert abs(placed[0] - at * (1 + drift)) <= width[0] + 2


def test_answers_that_are_slow_now_and_then_place_nothing(tmp_path: Path) -> None:
    device = Device(HostClock(), drift_ppm=40)
    device.faults = Faults(query_ns=lambda at: 400_000 if at // 10**9 % 3 == 0 else 1000)
    served = run(tmp_path, Engine(1, idle_us=50_000), one(300), device)
    widths = [note["half_width_ns"] for note in served.trace().notes if note["type"] == "anchor"]
    assert sum(width > 100_000 for width in widths) >= 2
    assert computing(stages(served)) == pytest.approx(truly(served), rel=WITHIN)
    assert used(served).half_width_us_max < 10


def off_with_first_anchor_alone(served: Run, truth: list[int]) -> float:
    """How far the last forward would lie from the truth if the clocks were taken to run alike."""
    found = anchors_of(served.trace().notes)
    (worker,) = [read_records(path) for path in served.files if path.name == "worker.gap"]
    last = worker.device[-1]
    at = found.origin_ns + found.before[int(last["anchor"])] + int(last["forward_device_ns"])
    return abs(float(at) - truth[-1])


@pytest.mark.parametrize("query_us", [30, 400])
def test_slow_answers_of_the_driver_cost_one_look_an_anchor_and_widen_what_is_said(
    tmp_path: Path, query_us: int
) -> None:
    device = Device(HostClock())
    device.faults = lost(query_ns=query_us * 1000)
    served = run(tmp_path, Engine(1, idle_us=20_000), one(120), device)
    anchors = [note for note in served.trace().notes if note["type"] == "anchor"]
    seconds = (served.requests[0].tokens[-1] - BEGIN) / 1e9
    assert len(anchors) <= 2 + seconds / 2
    assert device.queries <= 2 * 120 + 3 * len(anchors) + 2, "no step looks for an anchor in vain"
    assert min(note["half_width_ns"] for note in anchors) >= 400 * query_us
    error = 120 * used(served).half_width_us_max * 1e3  # of each step's place, by which the host's time before it ends
    assert computing(stages(served)) == pytest.approx(truly(served), rel=WITHIN, abs=error)


def test_the_last_step_is_recorded_when_the_process_closes(tmp_path: Path) -> None:
    served = run(tmp_path, Engine(2, asynchronous=True), one(12))
    trace = served.trace()
    assert sorted(trace.step_spans["step"][trace.step_spans["code"] == Span.FORWARD]) == list(range(1, 13))
    assert not len(trace.untimed_steps)


@pytest.mark.parametrize("graph", [True, False])
def test_sampled_kernels_are_those_of_whole_forwards_and_no_copies(tmp_path: Path, graph: bool) -> None:
    engine = Engine(1, graph=graph, kernel_us=12 if graph else 4, kernel_pause_us=3, kernels=300)
    served = run(tmp_path, engine, one(120), kernels_every=50)
    use = used(served)
    assert use.kernels.steps > 50
    spans = served.trace().step_spans
    forward = spans[spans["code"] == Span.FORWARD]
    ran_ns = 300 * engine.kernel_us * 1000 + 250_000  # the forward's kernels, and the logits' one
    true_share = 120 * ran_ns / float((forward["end"] - forward["start"]).sum())
    assert true_share < (0.9 if graph else 0.6)
    assert use.kernels.busy_share == pytest.approx(true_share, rel=WITHIN)
    assert use.kernels.overlap == pytest.approx(1, rel=WITHIN)
    assert use.kernels.copies_ms > 0
    assert (use.launching_share or 0) > (0.8 if not graph else -1)
    (request,) = served.requests
    assert computing(stages(served)) > 0.9 * sum(
        work.end - work.start for work in served.device.work if work.name == "forward" and work.end < request.tokens[-1]
    ), "the windows make no forward longer or shorter"


def test_a_forward_that_waits_for_its_host_is_the_hosts_and_samples_tell_what_kernels_ran_in_it(tmp_path: Path) -> None:
    engine = Engine(1, graph=False, kernels=300, kernel_us=3)  # launched every 8 µs
    for name in ("marks", "samples"):
        (tmp_path / name).mkdir()
    marks = run(tmp_path / "marks", engine, one(120))
    samples = run(tmp_path / "samples", engine, one(120), kernels_every=40)
    bound, found = stages(marks), stages(samples)
    whole = computing(found) + found["launch_gap"]
    assert computing(bound) + bound["launch_gap"] == pytest.approx(whole, rel=WITHIN)
    assert 0 < computing(bound) < truly(samples), "what was left when it had all been launched"
    assert (used(marks).launching_share or 0) > 0.8
    assert computing(found) == pytest.approx(truly(samples), rel=WITHIN)
    assert found["launch_gap"] == pytest.approx(samples.gap_ns(), rel=WITHIN)
    assert bound["hidden_host"] > 0.9 * bound["decode"], "what an infinitely fast device would leave says so either way"


def test_forwards_that_wait_for_their_host_are_looked_into_unasked_and_once(tmp_path: Path) -> None:
    slow = Engine(1, graph=False, kernels=300, kernel_us=3)
    served = run(tmp_path, slow, one(160), kernels_every="")
    (sampled,) = [note for note in read_records(tmp_path / "worker.gap").notes if note["type"] == "kernels"]
    assert sampled["kernels"] >= (WINDOW - 3) * 301
    found = stages(served)
    assert computing(found) == pytest.approx(truly(served), rel=WITHIN)
    assert found["launch_gap"] == pytest.approx(served.gap_ns(), rel=WITHIN)
    assert not list(device_warnings(served.trace(), window(served)))


@pytest.mark.parametrize("engine", [Engine(1), Engine(2, graph=False, kernel_us=60)], ids=["graph", "ahead"])
def test_forwards_that_the_host_launches_ahead_are_not_looked_into(tmp_path: Path, engine: Engine) -> None:
    served = run(tmp_path, engine, one(60), kernels_every="")
    assert not [note for note in read_records(tmp_path / "worker.gap").notes if note["type"] == "kernels"]
    assert not list(device_warnings(served.trace(), window(served)))


def prompts_took(monkeypatch: pytest.MonkeyPatch, steps: int, excess_ns: int) -> None:
    """Others' prompts in so many steps are said to have taken so long of each."""

    def longer(trace: Trace) -> Interference | None:
        fit = fit_interference(trace)
        assert fit is not None and len(fit.seqs) == steps
        return replace(fit, excess_ns=np.full(steps, excess_ns))

    monkeypatch.setattr("gapmeter.analysis.ledger.ledger.fit_interference", longer)


def test_what_a_mixed_step_waited_for_its_launch_is_no_time_of_others_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Engine(1, graph=False, kernels=600, kernel_us=3)  # forwards of 5 ms, of which kernels run for 2
    others = [Request(f"o{n}", BEGIN + (80 + 20 * n) * MS, 400, 2) for n in range(20)]
    served = run(tmp_path, slow, [*one(200), *others], kernels_every="")

    prompts_took(monkeypatch, 20, 5 * MS)
    ledger = served.ledger()
    row = ledger.rows[(ledger.rows["event"] == "last_token") & (ledger.rows["request_id"] == "r1")].iloc[0]
    true_ns = served.busy_ns(BEGIN, served.requests[0].tokens[-1])
    assert ledger.refused == ()
    assert row["prefill_ns"] + row["decode_ns"] + row["interference_ns"] == pytest.approx(true_ns, rel=WITHIN)
    assert row["interference_ns"] == pytest.approx(20 * (600 * 3_000 + 250_000), rel=WITHIN)
    assert row["hidden_host_ns"] < 1.05 * true_ns, "what was launched in a forward's gaps is not hidden beneath it"


def test_what_others_prompts_took_of_a_step_is_in_no_other_tokens_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = clocked_transformers.Loop(send_us=400)  # the engine is at it still when the token has been read
    others = [Request(f"o{n}", BEGIN + (80 + 20 * n) * MS, 400, 1) for n in range(10)]
    served = clocked_transformers.run(tmp_path, loop, [*one(100), *others])

    prompts_took(monkeypatch, 10, MS)
    ledger = served.ledger()
    gaps = ledger.gaps[ledger.gaps["request_id"] == "r1"]
    assert ledger.refused == ()
    assert sorted(gaps["interference_ns"])[-11:] == [0, *[MS] * 10]
    assert (gaps["first_step"] == gaps["last_step"]).all()


def test_of_several_engines_each_has_the_times_of_its_own_device(tmp_path: Path) -> None:
    served = []
    for number, drift_ppm in enumerate((40, -60)):
        (folder := tmp_path / str(number)).mkdir()
        request = Request(f"r{number}", BEGIN + 3 * MS * number, 64, 30 + number)
        served.append(run(folder, Engine(1, number=number), [request], Device(HostClock(), drift_ppm=drift_ppm)))
    first, second = served
    both = replace(first, files=first.files + second.files, requests=first.requests + second.requests)
    ledger = both.ledger()
    rows = ledger.rows[ledger.rows["event"] == "last_token"].set_index("request_id")
    assert ledger.refused == () and not len(both.trace().untimed_steps)
    for alone in served:
        (request,) = alone.requests
        expected = stages(alone)
        assert expected["decode"] > 0.5 * expected["total"]
        for stage in ("prefill", "decode", "launch_gap", "input_prep", "scheduling", "unexplained", "total"):
            assert rows.loc[request.name, f"{stage}_ns"] == expected[stage], stage


def test_of_several_ranks_devices_that_of_the_one_that_answers_tells_how_long_a_forward_lasted(tmp_path: Path) -> None:
    served = run(tmp_path, Engine(1, separate=True), one())
    alone = served.trace().step_loads
    (tmp_path / "worker-1.gap").write_bytes((tmp_path / "worker.gap").read_bytes())
    beside = replace(served, files=sorted(tmp_path.glob("*.gap"))).trace()
    assert beside.step_loads.equals(alone)


def test_a_forward_that_is_launched_for_seconds_costs_no_step_its_records(tmp_path: Path) -> None:
    served = run(tmp_path, Engine(1, replay_us=4_400_000), one(4))  # longer than 32 bits of nanoseconds
    launches = served.trace().step_spans
    assert sorted(launches["step"][launches["code"] == Span.HOST_LAUNCH]) == [1, 2, 3, 4]
    assert stages(served)["launch_gap"] > 4 * 4.29e9


def test_forwards_of_which_nothing_was_sampled_are_in_no_share_of_kernels(tmp_path: Path) -> None:
    prompts = [Request(f"p{n}", BEGIN + 6 * n * MS, 64, 1) for n in range(60)]  # all that the window meets
    slow = Engine(1, graph=False, kernels=300, kernel_us=3)
    served = run(tmp_path, slow, [*prompts, Request("r1", BEGIN + 600 * MS, 64, 100)], kernels_every="")
    forwards, kernels = timed_forwards(served.trace()), used(served).kernels
    assert kernels is not None and (forwards.busy_ns[~forwards.prompts] == -1).all()
    assert kernels.busy_share == pytest.approx((300 * 3_000 + 250_000) / 2_600_000, rel=0.05)


def test_a_window_of_one_engine_tells_nothing_of_anothers_kernels(tmp_path: Path) -> None:
    trace = run(tmp_path, Engine(1, graph=False, kernels=300, kernel_us=3), one(100), kernels_every="").trace()
    ours = timed_forwards(trace)
    assert (ours.busy_ns > 0).any()
    (note,) = [note for note in trace.notes if note["type"] == "kernels"]
    note["pid"] += 1
    assert (timed_forwards(trace).busy_ns == -1).all()


def test_a_process_that_has_captured_graphs_is_never_looked_into_unasked(tmp_path: Path) -> None:
    device = Device(HostClock())
    writer = RecordWriter(tmp_path / "worker.gap", {"role": "worker"})
    with virtual_time(device.clock), pytest.MonkeyPatch.context() as patch:
        patch.delenv("GAPMETER_PROBE_KERNELS", raising=False)
        found = []
        for graphs in (True, False):
            clock = DeviceClock(writer, device.torch, graphs=graphs)
            for seq in range(1, 40):
                clock.begin(seq)
                clock.mark(FORWARD)
                for _ in range(400):
                    device.launch("forward", 1_000)
                clock.mark(FORWARD_END)
                clock.mark(SAMPLED)
                device.clock.spend(MS)
            found.append(clock.kernels)
            clock.finish()
    assert found[0] is None and found[1] is not None


def test_that_the_device_was_as_fast_as_its_host_is_said_where_no_kernels_were_sampled(tmp_path: Path) -> None:
    served = run(tmp_path, Engine(1, graph=False, kernels=300, kernel_us=3), one(60))
    (warning,) = device_warnings(served.trace(), window(served))
    assert warning.code == "host-bound" and "100 % of the forwards' time" in warning.text
    assert warning.touches == ("prefill", "decode", "launch_gap")


def test_without_samples_a_forward_that_waits_for_its_host_has_at_least_what_its_bytes_and_operations_need(
    tmp_path: Path,
) -> None:
    """Kernels run for 0.9 ms of 2.4; that they need 0.6 is known. What was sampled is not less for that."""
    slow = Engine(1, graph=False, kernels=300, kernel_us=3)
    for name in ("marks", "samples"):
        (tmp_path / name).mkdir()
    served = run(tmp_path / "marks", slow, one(60))
    trace = served.trace()
    steps, waits = launch_waits(trace)
    known = replace(trace, least=(steps[1:], np.full(len(steps) - 1, 0.6 * MS)))
    again, less = launch_waits(known)
    bound = host_bound(timed_forwards(trace))
    assert (again == steps).all() and bound.all()
    lasted = timed_forwards(trace).end - timed_forwards(trace).start
    assert (lasted - less)[1:] == pytest.approx(0.6 * MS), "of the first nothing is known"
    assert less[0] == waits[0] and (lasted - waits)[1:].max() < 0.3 * MS
    (warning,) = device_warnings(known, window(served))
    assert "that counts as the host's, but for the least that the GPU's peaks allow" in warning.text
    sampled = run(tmp_path / "samples", slow, one(60), kernels_every="").trace()
    _, true = launch_waits(sampled)
    _, same = launch_waits(replace(sampled, least=known.least))
    assert true == pytest.approx(same)


@pytest.mark.parametrize("runner", [1, 2])
def test_a_steps_bytes_are_over_the_time_that_read_them(tmp_path: Path, runner: int) -> None:
    engine = Engine(runner, kernels=50, kernel_us=80, logits_us=1000, sampling_us=0)  # 4 ms, and 1 ms of logits
    trace = run(tmp_path, engine, one()).trace()
    steps = step_work(trace, WEIGHTS)
    assert steps.equals(step_work(trace, WEIGHTS)), "what others read of the steps is as it was"
    decode = steps[steps["prompts"] == 0]
    true = PeakRate(peak=float(decode["bytes"].mean()) / 5e6, low=1.0)  # bytes a nanosecond
    achieved = ratio(decode["bytes"].to_numpy(np.float64), decode["forward_ns"].to_numpy(np.float64), true)
    assert achieved.share == pytest.approx(1, rel=WITHIN)


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_our_transformers_servers_steps_are_told_to_the_last(tmp_path: Path, asynchronous: bool, graph: bool) -> None:
    loop = clocked_transformers.Loop(asynchronous, graph)
    served = clocked_transformers.run(tmp_path, loop, one(), Device(HostClock(), drift_ppm=-60))
    trace, found = served.trace(), stages(served)
    assert sorted(trace.step_spans["step"][trace.step_spans["code"] == Span.FORWARD]) == list(
        range(1, 41 + asynchronous)
    )
    assert not len(trace.untimed_steps)
    assert computing(found) == pytest.approx(truly(served), rel=WITHIN)
    assert used(served).idle_share == pytest.approx(1 - true_busy_share(served), abs=WITHIN)
    assert found["unexplained"] < WITHIN * found["total"]


def test_a_token_that_waits_while_the_next_step_is_launched_is_not_in_transit(tmp_path: Path) -> None:
    slow = Engine(1, asynchronous=True, graph=False, kernels=600, kernel_us=3)  # launched for 5 ms, ahead
    ledger = run(tmp_path, slow, one()).ledger()
    row = ledger.rows[ledger.rows["event"] == "first_token"].iloc[0]
    assert ledger.refused == ()
    assert row["launch_gap_ns"] > 6 * MS, "for its own step's launches, and for the next one's"
    assert row["strict_ns"] < 0.05 * row["total_ns"]


@pytest.mark.parametrize("runner", [1, 2])
def test_an_idle_device_waits_for_its_graph_and_not_for_the_logits_behind_it(tmp_path: Path, runner: int) -> None:
    engine = Engine(runner, replay_us=500, logits_launch_us=300)
    served = run(tmp_path, engine, one())
    found = stages(served)
    assert computing(found) == pytest.approx(truly(served), rel=WITHIN)
    assert found["launch_gap"] > 40 * 400_000


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_idle_device_waits_until_its_graph_is_launched(tmp_path: Path, asynchronous: bool) -> None:
    loop = clocked_transformers.Loop(asynchronous, graph=True, replay_us=900)
    served = clocked_transformers.run(tmp_path, loop, one())
    found = stages(served)
    assert computing(found) == pytest.approx(truly(served), rel=WITHIN)
    assert found["launch_gap"] == pytest.approx(0 if asynchronous else 40 * 900_000, rel=WITHIN, abs=MS)


def test_the_step_that_was_in_flight_while_the_server_slept_takes_no_tokens_of_the_next_request(tmp_path: Path) -> None:
    requests = [Request("r1", BEGIN, 64, 12), Request("r2", BEGIN + 300 * MS, 64, 12)]
    served = clocked_transformers.run(tmp_path, clocked_transformers.Loop(asynchronous=True), requests)
    found = stages(served)
    assert computing(found) == pytest.approx(truly(served), rel=WITHIN)
    assert found["unexplained"] < WITHIN * found["total"]


def test_a_device_does_not_wait_for_its_host_while_the_server_sleeps_with_a_step_in_flight(tmp_path: Path) -> None:
    requests = [Request("r1", BEGIN, 64, 12), Request("r2", BEGIN + 3000 * MS, 64, 12)]
    served = clocked_transformers.run(tmp_path, clocked_transformers.Loop(asynchronous=True), requests)
    assert used(served).idle_share > 0.95
    assert used(served).waiting_share < WITHIN
    parts = describe_utilisation((), (), served.trace(), window(served), 1)
    assert (parts.forward_share_of_step or 0) > 0.9


def test_the_last_step_of_a_load_is_recorded_while_the_server_waits_for_the_next(tmp_path: Path) -> None:
    device = Device(HostClock())
    writer = RecordWriter(tmp_path / "core.gap", {"role": "core"})
    with virtual_time(device.clock), pytest.MonkeyPatch.context() as patch:
        clock = DeviceClock(writer, device.torch)
        for seq in (1, 2):
            clock.begin(seq)
            clock.mark(FORWARD)
            device.launch("forward", 3 * MS)
            clock.mark(SAMPLED)
        patch.setattr("gapmeter_probe.device.TIDY_S", 0.2)
        clock.tidy()
        assert not len(read_records(writer.path).device), "it may still go on"
        device.clock.spend(300 * MS)
        clock.tidy()
    assert read_records(writer.path).device["seq"].tolist() == [1, 2]


def test_kernels_that_run_side_by_side_are_summed_once_and_twice_and_collectives_apart(tmp_path: Path) -> None:
    device = Device(HostClock())
    writer = RecordWriter(tmp_path / "worker.gap", {"role": "worker"})
    side = Stream("side")
    with virtual_time(device.clock):
        sampler = KernelSampler(writer, device.torch, every=100)
        sampler.at(1)
        settle(sampler)
        device.launch("gemm", 400_000)
        device.launch("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 300_000, side)
        device.launch("copy", 50_000, side)
        device.clock.spend(2 * MS)
        sampler.at(WINDOW + 1)
        settle(sampler)
        sampler.finish()
    file = read_records(writer.path)
    (note,) = [note for note in file.notes if note["type"] == "kernels"]
    busy = file.spans[file.spans["code"] == Span.KERNELS]
    assert (note["kernels"], note["sum_ns"], note["communication_ns"], note["copies_ns"]) == (
        2, 700_000, 300_000, 50_000,
    )  # fmt: skip
    assert busy["n"].tolist() == [2] and 400_000 <= (busy["end_ns"] - busy["start_ns"]).sum() < 420_000
    assert note["start_ns"] <= busy["start_ns"][0] and busy["end_ns"][0] <= note["end_ns"]


def test_the_profiler_waits_for_the_device_of_the_engines_thread(tmp_path: Path) -> None:
    device, chosen = Device(HostClock()), list[int]()
    device.torch.cuda.current_device, device.torch.cuda.set_device = lambda: 1, chosen.append
    writer = RecordWriter(tmp_path / "worker.gap", {"role": "worker"})
    with virtual_time(device.clock):
        sampler = KernelSampler(writer, device.torch, every=100)
        sampler.at(1)
        settle(sampler)
        assert chosen == [1]
        sampler.finish()


def test_a_profiler_that_cannot_be_had_ends_sampling_alone_and_that_is_said(tmp_path: Path) -> None:
    device = Device(HostClock())

    def refuse(**_: object) -> None:
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    device.torch.autograd.profiler.profile = refuse
    served = run(tmp_path, Engine(1), one(), device, kernels_every=30)
    assert stages(served)["decode"] > 0
    (warning,) = device_warnings(served.trace(), window(served))
    assert warning.text == "kernels were not sampled" and "PRIVILEGES" in warning.cause
