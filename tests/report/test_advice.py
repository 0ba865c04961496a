"""What is advised is a setting that exists, for the stage that matters, with the command that proves it."""

from __future__ import annotations

from typing import Any

import pytest

from gapmeter.analysis.results import Manifest, RunResult
from gapmeter.analysis.results.manifest import PrecisionSupport
from gapmeter.analysis.results.run import CoreHolder
from gapmeter.analysis.results.trust import QueueSlope
from gapmeter.analysis.stages import UNEXPLAINED_OWNER
from gapmeter.report import document as doc
from gapmeter.report import html, run
from gapmeter.report.command import Command
from gapmeter.report.slo import objectives
from gapmeter.report.waits import where
from gapmeter.report.why import advice, most_an_upgrade_brings, owners, setting, tail_sentence
from gapmeter.scenarios.model import KEYS
from tests.kit.runs import write_run


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("gapmeter run chat-p99", "gapmeter compare --run chat-p99 --a k=1 --b k=2"),
        (
            "gapmeter run my.yaml --engine vllm --quiet --set load.rate=4 --runs there",
            "gapmeter compare --run my.yaml --a k=1 --b k=2 --set server.engine=vllm --set load.rate=4",
        ),
        (
            "gapmeter run chat-p99 --url=http://h:8000 --tokenizer /t",
            (
                "gapmeter compare --run chat-p99 --a k=1 --b k=2 --set server.engine=attach "
                "--set server.url=http://h:8000 --set server.tokenizer=/t"
            ),
        ),
        ("gapmeter capacity chat-p99", None),
        ("gapmeter run chat-p99 --locustfile users.py", None),
        ("gapmeter run chat-p99 --workers=2", None),
    ],
)
def test_a_run_becomes_the_comparison_that_proves_a_setting(command: str, told: str | None) -> None:
    found = Command.parse(command).as_comparison("k=1", "k=2")
    assert (None if found is None else str(found)) == told


@pytest.mark.parametrize("stage", ["queue", "other_step", "preempted", "prefill", "decode", "generator_lag"])
def test_what_is_advised_is_a_key_of_scenarios_and_its_value_now(tmp_path: Any, stage: str) -> None:
    manifest = Manifest.read(write_run(tmp_path / "r", count=60, rate=12.0).path)
    assert setting("decode", manifest) is None, "nobody knows whether this device has another precision"
    known = PrecisionSupport(
        precision="float32", format="fp32", device="CPU", native=True, supported=("float32", "bfloat16"), emulated=False
    )
    manifest = manifest.model_copy(update={"target": manifest.target.model_copy(update={"precision": known})})
    found = setting(stage, manifest)
    assert found is not None
    key, now, other = found
    group, leaf = key.split(".")
    assert key in KEYS
    assert str(getattr(getattr(manifest.asked, group), leaf)) == now != other


@pytest.mark.parametrize(
    ("args", "found"),
    [({}, None), ({"--max-num-batched-tokens": 8192}, "8192"), ({"max_num_batched_tokens": 2048}, "2048")],
)
def test_a_budget_of_tokens_that_vllm_chose_by_its_device_is_not_guessed(
    tmp_path: Any, args: dict[str, int], found: str | None
) -> None:
    manifest = Manifest.read(write_run(tmp_path / "r", count=60, rate=12.0).path)
    server = dict(manifest.scenario["server"]) | {"engine": "vllm", "args": args}
    told = setting(
        "interference", manifest.model_copy(update={"scenario": dict(manifest.scenario) | {"server": server}})
    )
    assert (told[1] if told else None) == found


@pytest.mark.parametrize(
    ("engine", "args", "told"),
    [
        ("vllm", {}, None),
        ("vllm", {"--enforce-eager": True}, ("server.args.enforce_eager", "true", "false")),
        ("transformers", {"cuda_graphs": True}, None),
        ("transformers", {}, ("server.args.cuda_graphs", "false", "true")),
    ],
)
def test_graphs_that_are_off_are_what_to_try_where_the_device_waits_for_launches(
    tmp_path: Any, engine: str, args: dict[str, bool], told: tuple[str, str, str] | None
) -> None:
    manifest = Manifest.read(write_run(tmp_path / "r", count=60, rate=12.0).path)
    server = dict(manifest.scenario["server"]) | {"engine": engine, "args": args}
    assert told == setting(
        "launch_gap", manifest.model_copy(update={"scenario": dict(manifest.scenario) | {"server": server}})
    )


def test_a_run_whose_slow_requests_queue_is_advised_a_larger_batch(tmp_path: Any) -> None:
    folder = write_run(tmp_path / "r", count=2400, rate=22.0)
    result, manifest = RunResult.read(folder.path), Manifest.read(folder.path)
    words, command = advice(result, manifest)
    assert isinstance(words, doc.Paragraph) and isinstance(command, doc.Pre)
    assert str(words.words).startswith("Try server.max_batch=16 (now 8) to shorten queue.")
    assert command.text.endswith("--a server.max_batch=8 --b server.max_batch=16")


def test_a_run_that_asked_more_than_the_server_can_do_is_sent_to_a_search(tmp_path: Any) -> None:
    folder = write_run(tmp_path / "r", count=1500, rate=40.0)
    result, manifest = RunResult.read(folder.path), Manifest.read(folder.path)
    slope = QueueSlope(
        per_s=2.0, per_s_ci=(1.8, 2.2), confidence=0.95, in_flight=(5, 80), grows=True, steady_most=9, served_per_s=20.0
    )
    methods = result.steady.methods.model_copy(update={"queue_slope": slope})
    grown = result.model_copy(update={"steady": result.steady.model_copy(update={"methods": methods})})
    words, command = advice(grown, manifest)
    assert isinstance(words, doc.Paragraph) and isinstance(command, doc.Pre)
    assert str(words.words).startswith("The load is more than the server can do.")
    assert command.text.startswith("gapmeter capacity ")


@pytest.mark.parametrize(
    ("kind", "status", "searches"), [("timeout", 0, True), ("http_4xx", 429, True), ("http_5xx", 500, False)]
)
def test_an_overload_that_shows_in_failures_alone_is_sent_to_a_search_beneath_what_failed(
    tmp_path: Any, kind: str, status: int, searches: bool
) -> None:
    folder = write_run(tmp_path / "r", count=900, rate=12.0, failures=30)
    result, manifest = RunResult.read(folder.path), Manifest.read(folder.path)
    assert result.verdict == "FAIL"
    failures = tuple(
        each.model_copy(
            update={
                "name": kind,
                "examples": tuple(one.model_copy(update={"status": status}) for one in each.examples),
            }
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
    tmp_path: Any, process: str, first: str
) -> None:
    folder = write_run(tmp_path / "r", count=2400, rate=22.0)
    result, manifest = RunResult.read(folder.path), Manifest.read(folder.path)
    told = result.tail.of("ttft")
    assert told is not None
    waits = {**told.typical.stages_ms, "core_wait": 0.4 * told.typical.total_ms}
    typical = told.typical.model_copy(update={"stages_ms": waits})
    holder = CoreHolder(process=process, stage="", share=0.7, mean_ms=5.0, program="cc1plus")
    changed = result.model_copy(update={
        "tail": result.tail.model_copy(update={"ttft": told.model_copy(update={"typical": typical})}),
        "ledger": result.ledger.model_copy(update={"core_held": (holder,)}),
    })  # fmt: skip
    words = advice(changed, manifest)[0]
    assert isinstance(words, doc.Paragraph) and str(words.words).startswith(first)
    # What is known of who had the cores is of all requests, not of the typical ones.
    told_of_all = "waiting for a core; in 70 % of all requests' waits the program cc1plus was using it"
    assert (told_of_all in str(words.words)) is (process == "another program")


@pytest.mark.parametrize(
    ("process", "stop"), [("engine", ""), ("another program", ", or stop other programs on them"), (None, ", or stop")]
)
def test_other_programs_are_to_be_stopped_only_where_they_may_have_had_the_cores(
    tmp_path: Any, process: str | None, stop: str
) -> None:
    folder = write_run(tmp_path / "r", count=2400, rate=22.0)
    result, manifest = RunResult.read(folder.path), Manifest.read(folder.path)
    told = result.tail.of("ttft")
    assert told is not None
    waiting = told.model_copy(update={"owners": (told.owners[0].model_copy(update={"stages": ("core_wait",)}),)})
    held = (CoreHolder(process=process, stage="", share=0.7, mean_ms=5.0, program=""),) if process else None
    changed = result.model_copy(update={
        "tail": result.tail.model_copy(update={"ttft": waiting}),
        "ledger": result.ledger.model_copy(update={"core_held": held}),
    })  # fmt: skip
    (words,) = advice(changed, manifest)
    assert isinstance(words, doc.Paragraph)
    assert str(words.words).startswith(f"No setting shortens the wait for a core: give the server more cores{stop}")
    assert ("stop" in str(words.words)) is bool(stop)


def test_a_wait_for_a_core_within_token_gaps_is_told_of_token_gaps(tmp_path: Any) -> None:
    folder = write_run(tmp_path / "r", count=2400, rate=22.0)
    result, manifest = RunResult.read(folder.path), Manifest.read(folder.path)
    told = result.tail.of("itl")
    assert told is not None
    waits = {**told.typical.stages_ms, "core_wait": 0.4 * told.typical.total_ms}
    gaps = told.model_copy(update={"typical": told.typical.model_copy(update={"stages_ms": waits})})
    holder = CoreHolder(process="another program", stage="", share=0.7, mean_ms=5.0, program="cc1plus")
    changed = result.model_copy(update={
        "tail": result.tail.model_copy(update={"metric": "itl", "itl": gaps}), "verdict": "PASS",
        "ledger": result.ledger.model_copy(update={"core_held": (holder,)}),
    })  # fmt: skip
    (words,) = advice(changed, manifest)
    assert isinstance(words, doc.Paragraph) and ": typical token gaps spend " in str(words.words)


def test_a_stop_that_slow_requests_met_is_told_before_any_setting(tmp_path: Any) -> None:
    folder = write_run(tmp_path / "r", count=2400, rate=22.0)
    result, manifest = RunResult.read(folder.path), Manifest.read(folder.path)
    told = result.tail.of("ttft")
    assert told is not None
    waits = {**told.at.stages_ms, "core_wait": 0.4 * told.at.total_ms}
    at = told.at.model_copy(update={"stages_ms": waits})
    holder = CoreHolder(process="stopped", stage="", share=0.9, mean_ms=5.0, program="")
    changed = result.model_copy(update={
        "tail": result.tail.model_copy(update={"ttft": told.model_copy(update={"at": at})}),
        "ledger": result.ledger.model_copy(update={"core_held": (holder,)}),
    })  # fmt: skip
    (words,) = advice(changed, manifest)
    assert isinstance(words, doc.Paragraph)
    assert str(words.words) == (
        "Before changing settings, try to find what stops the server: for 90 % of the time that requests waited for a "
        "core, a signal (SIGSTOP) or a debugger had stopped it."
    )


def test_nothing_is_advised_for_a_stage_that_is_next_to_nothing_of_the_wait(tmp_path: Any) -> None:
    folder = write_run(tmp_path / "r", count=2400, rate=22.0)
    result, manifest = RunResult.read(folder.path), Manifest.read(folder.path)
    told = result.tail.of("ttft")
    assert told is not None and advice(result, manifest)
    endless = told.model_copy(update={"at": told.at.model_copy(update={"total_ms": 1000 * told.at.total_ms})})
    assert advice(result.model_copy(update={"tail": result.tail.model_copy(update={"ttft": endless})}), manifest) == []


def test_what_no_probe_measured_is_not_called_without_a_single_cause(tmp_path: Any) -> None:
    folder = write_run(tmp_path / "r", count=2400, rate=22.0)
    result = RunResult.read(folder.path)
    told = result.tail.of("ttft")
    assert told is not None
    blank = told.owners[0].model_copy(update={"owner": UNEXPLAINED_OWNER})
    typical = told.typical.model_copy(update={"stages_ms": {"unexplained": told.typical.total_ms}})
    open_cause = told.model_copy(update={"owners": (blank,), "typical": typical, "leading": None})
    shown = objectives(result.model_copy(update={"tail": result.tail.model_copy(update={"ttft": open_cause})}))
    assert "no probe timestamps the server's stages" in tail_sentence(open_cause, "ttft", "CPU")
    (table,) = shown.blocks
    assert isinstance(table, doc.Table) and str(table.rows[0][-1]).endswith("unexplained")


def test_an_invalid_run_is_advised_nothing_and_blames_nobody(tmp_path: Any) -> None:
    folder = write_run(tmp_path / "r", count=600, rate=22.0, evidence={"incomplete": "stopped by Ctrl-C"})
    result = RunResult.read(folder.path)
    assert advice(result, Manifest.read(folder.path)) == []
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
    tmp_path: Any, objective: str, told: str
) -> None:
    """Of a percentile that is not among those worked out, the highest known one; of token gaps the whole answer."""
    result = RunResult.read(write_run(tmp_path / "r", count=400, rate=12.0, slos=(objective,)).path)
    assert told in most_an_upgrade_brings(result)
    invalid = result.model_copy(update={"verdict": "INVALID"})
    assert most_an_upgrade_brings(invalid) == "", "nothing is concluded from a run that is no measurement"


def test_the_table_of_owners_shows_whoever_has_most_of_what_everybody_waits(tmp_path: Any) -> None:
    """A queue that slow requests were even spared had 262 of 492 ms at the median, in the row of "the rest"."""
    result = RunResult.read(write_run(tmp_path / "r", count=2400, rate=22.0, slos=("ttft p90 <= 100 ms",)).path)
    anatomy = result.tail.ttft
    assert anatomy is not None
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
    table = owners(result.model_copy(update={"tail": result.tail.model_copy(update={"ttft": told})}))
    assert table is not None
    assert [str(row[0]) for row in table.rows] == ["API server", "framework", "network", "capacity", "the rest"]


def test_the_page_says_of_how_many_requests_the_token_gaps_are_where_not_of_all(tmp_path: Any) -> None:
    result = RunResult.read(write_run(tmp_path / "r", count=400).path)
    some = result.model_copy(update={"ledger": result.ledger.model_copy(update={"gaps_of": 7000})})
    assert "itl" in result.bands and "drawn at random" not in str(where(result))
    assert "token gaps of 7,000 requests, drawn at random" in str(where(some))
