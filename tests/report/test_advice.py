"""What is advised is a setting that exists, for the stage that matters, with the command that proves it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from gapmeter.analysis.numbers import duration
from gapmeter.analysis.results import Manifest, RunResult
from gapmeter.analysis.results.latency import Band
from gapmeter.analysis.results.manifest import PrecisionSupport
from gapmeter.analysis.results.run import CoreHolder
from gapmeter.analysis.results.trust import QueueSlope
from gapmeter.analysis.stages import UNEXPLAINED_OWNER, owner_words
from gapmeter.records import RunFolder
from gapmeter.records.workers import LocustWorkers
from gapmeter.report import document as doc
from gapmeter.report import html, run
from gapmeter.report.advice import advice, next_step, setting
from gapmeter.report.command import Command
from gapmeter.report.slo import headline, objectives, verdict_sentence
from gapmeter.report.waits import where
from gapmeter.report.why import most_an_upgrade_brings, owners, tail_sentence
from gapmeter.scenarios.model import KEYS
from gapmeter.study.resolve import resolve
from tests.kit.runs import write_run

Told = tuple[RunResult, Manifest]


def read(folder: RunFolder) -> Told:
    return RunResult.read(folder.path), Manifest.read(folder.path)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_run(tmp_path_factory.mktemp("short") / "r", count=60, rate=12.0)


@pytest.fixture
def manifest(short: RunFolder) -> Manifest:
    return read(short)[1]  # each test's own: a copy of one that was asked for its scenario has the old answer


@pytest.fixture(scope="module")
def queueing(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """A run whose slow requests waited in the queue."""
    return read(write_run(tmp_path_factory.mktemp("queueing") / "r", count=2400, rate=22.0))


def serving(manifest: Manifest, **server: object) -> Manifest:
    scenario = dict(manifest.scenario)
    return manifest.model_copy(update={"scenario": scenario | {"server": dict(scenario["server"]) | server}})


def waiting(band: Band, share: float) -> Band:
    """The same requests, had they waited so much of their time for a core."""
    return band.model_copy(update={"stages_ms": {**band.stages_ms, "core_wait": share * band.total_ms}})


def retold(result: RunResult, held: Sequence[CoreHolder] | None = None, **tail: object) -> RunResult:
    """The same run, had its slow requests had this anatomy and somebody its cores."""
    ledger = result.ledger.model_copy(update={"core_held": held})
    return result.model_copy(update={"tail": result.tail.model_copy(update=tail), "ledger": ledger})


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("gapmeter run chat-p99", "gapmeter compare --run chat-p99 --b k=2"),
        (
            "gapmeter run my.yaml --engine vllm --quiet --set load.rate=4 --runs there",
            "gapmeter compare --run my.yaml --b k=2 --set server.engine=vllm --set load.rate=4",
        ),
        (
            "gapmeter run chat-p99 --url=http://h:8000 --tokenizer /t",
            (
                "gapmeter compare --run chat-p99 --b k=2 --set server.engine=attach "
                "--set server.url=http://h:8000 --set server.tokenizer=/t"
            ),
        ),
        (
            "gapmeter run chat-p99 --url http://h:8000 --probe-dir /p",
            (
                "gapmeter compare --run chat-p99 --b k=2 --probe-dir /p --set server.engine=attach "
                "--set server.url=http://h:8000"
            ),
        ),
        ("gapmeter capacity chat-p99", None),
        ("gapmeter run chat-p99 --locustfile users.py", None),
        ("gapmeter run chat-p99 --workers=2", None),
    ],
)
def test_a_run_becomes_the_comparison_that_proves_a_setting(command: str, told: str | None) -> None:
    found = Command.parse(command).as_comparison("k=2")
    assert (None if found is None else str(found)) == told


@pytest.mark.parametrize("stage", ["queue", "other_step", "preempted", "prefill", "decode", "generator_lag"])
def test_what_is_advised_is_a_key_of_scenarios_and_its_value_now(manifest: Manifest, stage: str) -> None:
    assert setting("decode", manifest) is None, "nobody knows whether this device has another precision"
    known = PrecisionSupport(
        precision="float32", format="fp32", device="CPU", native=True, supported=("float32", "bfloat16"), emulated=False
    )
    manifest = manifest.model_copy(update={"target": manifest.target.model_copy(update={"precision": known})})
    key, now, other = setting(stage, manifest)
    group, leaf = key.split(".")
    assert key in KEYS
    assert str(getattr(getattr(manifest.asked, group), leaf)) == now != other


def test_workers_send_from_one_process_each_and_are_advised_no_more(manifest: Manifest) -> None:
    sent = LocustWorkers(locust="", plan="", port=0, workers=(), histograms={})
    assert setting("generator_lag", manifest.model_copy(update={"workers": sent})) is None


@pytest.mark.parametrize(
    ("args", "found"),
    [({}, None), ({"--max-num-batched-tokens": 8192}, "8192"), ({"max_num_batched_tokens": 2048}, "2048")],
)
def test_a_budget_of_tokens_that_vllm_chose_by_its_device_is_not_guessed(
    manifest: Manifest, args: dict[str, int], found: str | None
) -> None:
    told = setting("interference", serving(manifest, engine="vllm", args=args))
    assert (told[1] if told else None) == found


@pytest.mark.parametrize(
    ("engine", "args", "told"),
    [
        ("vllm", {}, None),
        ("vllm", {"--enforce-eager": True}, ("server.args.--enforce-eager", "true", "false")),
        ("transformers", {"cuda_graphs": True}, None),
        ("transformers", {}, ("server.args.cuda_graphs", "false", "true")),
    ],
)
def test_graphs_that_are_off_are_what_to_try_where_the_device_waits_for_launches(
    manifest: Manifest, engine: str, args: dict[str, bool], told: tuple[str, str, str] | None
) -> None:
    assert setting("launch_gap", serving(manifest, engine=engine, args=args)) == told


@pytest.mark.parametrize("name", ["enforce_eager", "--enforce-eager"])
def test_a_flag_is_advised_as_it_is_spelled_since_a_scenario_takes_no_second_one(manifest: Manifest, name: str) -> None:
    key, _, other = setting("launch_gap", serving(manifest, engine="vllm", args={name: True}))
    flags = ["server.engine=vllm", f"server.args.{name}=true", f"{key}={other}"]
    assert resolve("chat-p99", flags).server.args == {name: False}


def test_a_run_whose_slow_requests_queue_is_advised_a_larger_batch(queueing: Told) -> None:
    words, command = advice(*queueing)
    assert isinstance(command, doc.Pre)
    assert str(words.words).startswith("Try server.max_batch=16 (now 8) to shorten queue.")
    assert command.text.endswith("compare --run chat-p99 --b server.max_batch=16")


@pytest.mark.parametrize(("failures", "known"), [(0, True), (74, True), (75, False)])
def test_a_run_that_asked_more_than_the_server_can_do_is_sent_to_a_search(
    tmp_path: Path, failures: int, *, known: bool
) -> None:
    """75 more were in flight in the end: if as many failed, those may have hung, and nothing else have piled up."""
    result, manifest = read(write_run(tmp_path / "r", count=1500, rate=40.0, failures=failures))
    slope = QueueSlope(
        per_s=2.0, per_s_ci=(1.8, 2.2), confidence=0.95, in_flight=(5, 80), grows=True, steady_most=9, served_per_s=20.0
    )
    methods = result.steady.methods.model_copy(update={"queue_slope": slope})
    grown = result.model_copy(update={"steady": result.steady.model_copy(update={"methods": methods})})
    words, command = advice(grown, manifest)
    assert isinstance(command, doc.Pre)
    assert str(words.words).startswith("The load is more than the server can do.") is known
    assert command.text.startswith("gapmeter capacity ") is known


@pytest.mark.parametrize(
    ("kind", "status", "arrivals", "searches"),
    [
        ("timeout", 0, "poisson", True), ("http_4xx", 429, "poisson", True), ("http_5xx", 500, "poisson", False),
        ("timeout", 0, "ramp", False),
    ],
)  # fmt: skip
def test_an_overload_that_shows_in_failures_alone_is_sent_to_a_search_beneath_what_failed(
    tmp_path: Path, kind: str, status: int, arrivals: str, searches: bool
) -> None:
    """Of a ramp there is no rate to search."""
    result, manifest = read(write_run(tmp_path / "r", count=900, rate=12.0, failures=30))
    load = dict(manifest.scenario["load"]) | {"arrivals": arrivals}
    manifest = manifest.model_copy(update={"scenario": dict(manifest.scenario) | {"load": load}})
    assert result.verdict == "FAIL"
    failures = tuple(
        each.model_copy(
            update={"name": kind, "examples": tuple(one.model_copy(update={"status": status}) for one in each.examples)}
        )
        for each in result.failures
    )
    failed = result.model_copy(update={"failures": failures})
    assert bool(advice(failed, manifest)) is searches
    named = [section.key for section in run.brief(failed, manifest).sections if section]
    assert named[0] == "failed"
    assert ("why" in named) is searches


@pytest.mark.parametrize(
    ("process", "first"),
    [("another program", "Before changing settings, try dedicated cores"), ("engine", "Try server")],
)
def test_another_program_on_the_servers_cores_is_told_before_any_setting(
    queueing: Told, process: str, first: str
) -> None:
    result, manifest = queueing
    told = result.tail.ttft
    late = told.model_copy(update={"typical": waiting(told.typical, 0.4)})
    holder = CoreHolder(process=process, stage="", share=0.7, mean_ms=5.0, program="cc1plus")
    words = advice(retold(result, (holder,), ttft=late), manifest)[0]
    assert str(words.words).startswith(first)
    # What is known of who had the cores is of all requests, not of the typical ones.
    told_of_all = "in 70 % of all waits for a core, the program cc1plus was using it"
    assert (told_of_all in str(words.words)) is (process == "another program")


@pytest.mark.parametrize(
    ("process", "stop"), [("engine", ""), ("another program", ", or stop other programs on them"), (None, ", or stop")]
)
def test_other_programs_are_to_be_stopped_only_where_they_may_have_had_the_cores(
    queueing: Told, process: str | None, stop: str
) -> None:
    result, manifest = queueing
    told = result.tail.ttft
    late = told.model_copy(update={"owners": (told.owners[0].model_copy(update={"stages": ("core_wait",)}),)})
    held = (CoreHolder(process=process, stage="", share=0.7, mean_ms=5.0, program=""),) if process else None
    (words,) = advice(retold(result, held, ttft=late), manifest)
    assert str(words.words).startswith(f"No setting shortens the wait for a core: try more cores for the server{stop}")
    assert ("stop" in str(words.words)) is bool(stop)


def test_a_stop_that_slow_requests_met_is_told_before_any_setting(queueing: Told) -> None:
    result, manifest = queueing
    told = result.tail.ttft
    stopped = told.model_copy(update={"at": waiting(told.at, 0.4)})
    holder = CoreHolder(process="stopped", stage="", share=0.9, mean_ms=5.0, program="")
    (words,) = advice(retold(result, (holder,), ttft=stopped), manifest)
    assert str(words.words) == (
        "Before changing settings, try to find what stops the server: for 90 % of the time that requests waited for a "
        "core, a signal (SIGSTOP) or a debugger had stopped it."
    )


def test_nothing_is_advised_for_a_stage_that_is_next_to_nothing_of_the_wait(queueing: Told) -> None:
    result, manifest = queueing
    told = result.tail.ttft
    assert advice(result, manifest)
    endless = told.model_copy(update={"at": told.at.model_copy(update={"total_ms": 1000 * told.at.total_ms})})
    assert advice(retold(result, ttft=endless), manifest) == []


def test_a_limit_that_typical_requests_miss_is_not_blamed_on_the_tail(tmp_path: Path) -> None:
    """Nor is a setting advised for what makes only slow ones slower."""
    result, manifest = read(write_run(tmp_path / "r", count=2400, rate=12.0, slos=("ttft p90 <= 4 ms",)))
    told, (missed,) = result.tail.ttft, result.slo
    payer = max(told.owners, key=lambda part: part.typical_ms)
    assert told.typical.total_ms > missed.limit
    assert f"typical requests already take {duration(told.typical.total_ms)}, " in verdict_sentence(result)
    assert f"{duration(payer.typical_ms)} of it {owner_words(payer.owner, result.device)}" in verdict_sentence(result)
    assert " Typical requests already take " in headline(result)
    assert setting("queue", manifest) is not None
    assert advice(result, manifest) == []


def test_a_run_that_met_its_slos_is_told_how_to_find_how_much_the_server_can_take(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", count=400, rate=8.0, slos=("ttft p50 <= 9 s",))
    result, manifest = read(folder)
    assert result.verdict == "PASS"
    search = doc.Pre("gapmeter capacity chat-p99")
    assert next_step(result, manifest)[-1] == search

    def commands(told: Manifest) -> list[doc.Block]:
        shown = next(section for section in run.brief(result, told).sections if section and section.key == "why")
        return [block for block in shown.blocks if isinstance(block, doc.Pre)]

    assert commands(manifest) == [advice(result, manifest)[-1]], "one of the two: a setting comes first"
    attached = dict(manifest.scenario) | {"server": {"engine": "attach", "url": "http://h:1"}}
    assert commands(read(folder)[1].model_copy(update={"scenario": attached})) == [search]
    assert next_step(result, manifest.model_copy(update={"capacity_of": "chat"})) == []
    assert next_step(result.model_copy(update={"slo": ()}), manifest) == [], "any rate would pass"
    at_once = result.load.model_copy(update={"window_s": 1e-9})
    assert next_step(result.model_copy(update={"load": at_once}), manifest) == [], "a trace of no length has no rate"
    closed = dict(manifest.scenario) | {"load": {"arrivals": "closed", "concurrency": 2}}
    assert next_step(result, read(folder)[1].model_copy(update={"scenario": closed})) == []


def test_what_failed_leads_where_failures_alone_missed_an_slo(tmp_path: Path) -> None:
    """Not what a faster device would bring."""
    folder = write_run(tmp_path / "r", count=900, rate=12.0, failures=30, slos=("errors <= 1 %",))
    result = RunResult.read(folder.path)
    assert result.verdict == "FAIL"
    (first,) = result.failures
    said = [str(one.words) for one in run.document(folder).verdict.more]
    assert any(f"{first.count} of the {first.count} that failed answered 5xx" in words for words in said)
    assert not any("would cut" in words for words in said)


def test_what_no_probe_measured_is_not_called_without_a_single_cause(queueing: Told) -> None:
    result, _ = queueing
    told = result.tail.ttft
    blank = told.owners[0].model_copy(update={"owner": UNEXPLAINED_OWNER})
    typical = told.typical.model_copy(update={"stages_ms": {"unexplained": told.typical.total_ms}})
    open_cause = told.model_copy(update={"owners": (blank,), "typical": typical, "leading": None})
    shown = objectives(retold(result, ttft=open_cause))
    assert "no probe timestamps the server's stages" in tail_sentence(open_cause, "ttft", "CPU")
    (table,) = shown.blocks
    assert str(table.rows[0][-1]).endswith("unexplained")


def test_an_invalid_run_is_advised_nothing_and_blames_nobody(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", count=600, rate=22.0, evidence={"incomplete": "stopped by Ctrl-C"})
    result, manifest = read(folder)
    assert advice(result, manifest) == []
    assert result.words is not None and not result.words.tail and not result.words.upgrade
    page = html.page(run.document(folder))
    assert "longer than typical ones" not in page
    assert '<p class="lead">Typical requests take' not in page


@pytest.mark.parametrize(
    ("objective", "told"),
    [
        ("ttft p90 <= 20 ms", "p90 TTFT from"), ("e2e p50 <= 20 ms", "p50 E2E from"),
        ("ttft p85 <= 20 ms", "p95 TTFT from"), ("itl p90 <= 2 ms", " E2E from"),
    ],
)  # fmt: skip
def test_what_a_faster_device_leaves_is_told_of_the_percentile_that_is_explained(
    tmp_path: Path, objective: str, told: str
) -> None:
    """Of a percentile that is not among those worked out, the highest known one; of token gaps the whole answer."""
    result = RunResult.read(write_run(tmp_path / "r", count=400, rate=12.0, slos=(objective,)).path)
    assert told in most_an_upgrade_brings(result)
    invalid = result.model_copy(update={"verdict": "INVALID"})
    assert most_an_upgrade_brings(invalid) == "", "nothing is concluded from a run that is no measurement"


def test_the_table_of_owners_shows_whoever_has_most_of_what_everybody_waits(tmp_path: Path) -> None:
    """A queue that slow requests were even spared had 262 of 492 ms at the median, in the row of "the rest"."""
    result = RunResult.read(write_run(tmp_path / "r", count=2400, rate=22.0, slos=("ttft p90 <= 100 ms",)).path)
    anatomy = result.tail.ttft
    waits = {
        "API server": (130, 394),
        "framework": (47, 349),
        "GPU": (22, 5),
        "network": (30, 4),
        "capacity": (262, -141),
    }
    parts = tuple(
        anatomy.owners[0].model_copy(update={"owner": owner, "at_ms": float(at), "ms": float(ms)})
        for owner, (at, ms) in waits.items()
    )
    told = anatomy.model_copy(update={"owners": parts})
    table = owners(retold(result, ttft=told))
    assert [str(row[0]) for row in table.rows] == ["API server", "framework", "contention", "the rest"]


def test_the_table_of_owners_names_stages_of_whoever_slow_requests_do_not_wait_longer_for(tmp_path: Path) -> None:
    result = RunResult.read(write_run(tmp_path / "r", count=2400, rate=22.0, slos=("ttft p90 <= 100 ms",)).path)
    anatomy = result.tail.ttft
    at = anatomy.at.model_copy(update={"stages_ms": {"tokenize": 60.0, "parse": 3.0, "prefill": 80.0}})
    part = anatomy.owners[0].model_copy(update={"owner": "API server", "at_ms": 63.0, "ms": -1.0, "stages": ()})
    table = owners(retold(result, ttft=anatomy.model_copy(update={"at": at, "owners": (part,)})))
    assert table.rows[0][-1] == "tokenize"


def test_the_page_says_of_how_many_requests_the_token_gaps_are_where_not_of_all(tmp_path: Path) -> None:
    result = RunResult.read(write_run(tmp_path / "r", count=400).path)
    some = result.model_copy(update={"ledger": result.ledger.model_copy(update={"gaps_of": 7000})})
    assert "itl" in result.bands and "drawn at random" not in str(where(result))
    assert "token gaps of 7,000 requests, drawn at random" in str(where(some))
