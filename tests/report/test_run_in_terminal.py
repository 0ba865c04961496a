from __future__ import annotations

import io
import json
import math
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

from gapmeter.analysis.numbers import duration
from gapmeter.analysis.results import Manifest, RunResult
from gapmeter.analysis.results.capacity import CapacityResult
from gapmeter.analysis.results.latency import Burst
from gapmeter.analysis.results.manifest import SearchManifest, SweepManifest
from gapmeter.analysis.results.run import INVALID
from gapmeter.analysis.results.sweep import SweepResult
from gapmeter.analysis.results.trust import RunWarning, SpeedChange
from gapmeter.report import capacity, markdown, run, sweep, terminal
from gapmeter.report.document import Document, Facts
from gapmeter.runs.run import manifest_of
from tests.golden.test_golden import HERE, KEYS
from tests.kit.runs import write_run

AGAIN = "make loadtest SCENARIO=chat-p99"
MOST_LINES = 25
REPORT = "runs/20260102-030405-chat-p99-abcdef/report.html"
LONG_PATH = "runs/20260102-030405-chat-p99-abcdef/" + "deep/" * 20 + "report.html"


def _document(folder: Any) -> Document:
    return run.brief(RunResult.read(folder.path), Manifest.read(folder.path))


def _render(folder: Any, width: int = 80, report: str = "runs/x/report.html", *, details: bool = False) -> list[str]:
    links = Facts([("report", report), ("again", AGAIN)])
    return terminal.text(_document(folder), width, links=links, details=details).plain.splitlines()


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    slos = ("ttft p90 <= 100 ms", "itl p99 <= 400 ms", "ttft p99.9 <= 3000 ms")
    return write_run(tmp_path_factory.mktemp("run") / "r", count=2400, rate=22.0, slos=slos)


def test_a_failed_run_reads_like_this(failed: Any) -> None:
    lines = _render(failed)
    assert _height("\n".join(lines), 80) <= MOST_LINES
    shape = [
        r"chat-p99 @ transformers 5\.19\.0  builtin:tiny  float32  max batch 8$",
        r"  22 req/s open loop, \d+ s, n = 2,400$",
        r"FAIL  p90 TTFT \d+ ms, limit 100 ms: .*?contention",
        r" WHY TTFT +at p90 +slow vs typical +mostly$",
        r" contention +\d+ ms +\+\d+ ms +#{6} +queue$",
        r" Try server\.max_batch=16 \(now 8\) to shorten queue\. To test it:$",
        r"gapmeter compare --run chat-p99 --b server\.max_batch=16$",
        r"   SLO +measured +95 % interval +limit +used$",
        r" x TTFT p90 +\S+ m?s +\S.* \.\. \S+ m?s +100 ms +\|#{10}\|!$",
        r" v ITL p99 +\S+ ms +\S+ \.\. \S+ ms +400 ms +\|\.{10}\|$",
        r" \? TTFT p99\.9 +~\S+ m?s +\S+ m?s or more +3\.00 s +needs about \d+ min more$",
        r" served  22\.\d req/s \(\d+ % good\), \d+ output and [\d,]+ prompt tok/s, none failed$",
        r" TTFT    p50 \S+ ms, p90 \S+ m?s, p95 \S+ m?s, p99 .*, max \S+ m?s$",
        r" trust   valid: lag p99 60\.0 µs, unexplained or in transit p99 \S+ %$",
        r" report  runs/x/report\.html$",
        rf" again   {AGAIN}$",
    ]
    text, at = "\n".join(lines), 0
    for pattern in shape:
        found = re.compile(pattern, re.MULTILINE | (re.DOTALL if pattern.startswith("FAIL") else 0)).search(text, at)
        assert found, f"{pattern!r} not found, in this order, in\n{text}"
        at = found.end()


def test_all_of_the_summary_says_where_the_time_goes_stage_by_stage(failed: Any) -> None:
    tail = json.loads(failed.summary.read_text())["tail"]
    own = tail[tail["metric"]]
    rows = [re.split(r"  +", line.strip()) for line in _render(failed, details=True)]
    at = next(number for number, row in enumerate(rows) if row[1:] == ["owner", "typical", "slow", "difference"])
    sums = next(row for row in rows[at:] if row[0] == "sum")
    waits = own["typical"]["total_ms"], own["slow"]["total_ms"], own["difference_ms"]
    assert sums[1:] == [duration(ms) for ms in waits]
    queue = next(row for row in rows[at:] if row[0] == "queue")
    assert queue[1:4] == ["contention", *(duration(own[band]["stages_ms"]["queue"]) for band in ("typical", "slow"))]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"slos": ("ttft p90 <= 9000 ms", "errors <= 5 %")}, "PASS"),
        ({"slos": ("ttft p99.9 <= 300 ms",)}, "INCONCLUSIVE"),
        ({"evidence": {"incomplete": "stopped by Ctrl-C"}}, "INVALID"),
        ({"slos": ()}, "PASS"),
    ],
)
def test_each_verdict_comes_first(tmp_path: Path, options: dict[str, Any], word: str) -> None:
    lines = _render(write_run(tmp_path / "r", count=400, rate=12.0, **options))
    assert next(line for line in lines[1:3] if not line.startswith(" ")).startswith(f"{word}  ")


def test_an_invalid_run_names_the_reason_beside_the_verdict_and_what_may_have_caused_it(tmp_path: Path) -> None:
    text = "\n".join(_render(write_run(tmp_path / "r", count=300, rate=12.0, failures=60)))
    assert "INVALID  Not valid as a measurement. 60 of 300 requests failed (20 %" in text
    assert " trust   NOT valid:" in text
    assert " rules   docs/how-it-measures.md: what makes a run INVALID" in text
    assert "Likely: the server failed; its own log says why." in " ".join(text.split())
    assert "try --set load.rate" not in text, "half the rate mends no 500"
    assert text.count("60 of 300 requests failed") == 1
    assert " ! Errors. Likely: the server failed" in text


def test_a_run_that_was_broken_off_is_nowhere_called_complete(tmp_path: Path) -> None:
    """Its reason says all that is known: there is neither a cause beside it nor anything to try."""
    lines = _render(write_run(tmp_path / "r", count=300, rate=12.0, evidence={"incomplete": "interrupted"}))
    assert "The run is incomplete: interrupted." in "\n".join(lines)
    assert not any(line.startswith(" ! Complete") for line in lines)


def test_the_doubt_that_is_shown_comes_with_what_to_try(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", count=400, rate=12.0)
    refused = RunWarning(
        code="errors", text="60 of 400 requests failed", cause="the server refuses fields that it does not know",
        flag="--set server.dialect=plain", touches=("ttft",),
    )  # fmt: skip
    result = RunResult.read(folder.path).model_copy(update={"warnings": (refused,)})
    shown = terminal.text(run.brief(result, Manifest.read(folder.path)), 80).plain
    assert " caution 60 of 400 requests failed. Try --set server.dialect=plain." in shown


def test_failures_that_are_told_already_are_not_the_doubt_that_is_shown(tmp_path: Path) -> None:
    judged = {"slo_on_errors": True}
    lines = _render(write_run(tmp_path / "r", count=400, failures=80, slos=("errors <= 5 %",), evidence=judged))
    assert any(line.startswith(" failed  80 of 400") for line in lines)
    assert not any(line.startswith(" caution 80 of 400 requests failed") for line in lines)


def test_a_percentile_of_the_answered_ones_is_none_of_all_requests(tmp_path: Path) -> None:
    """Else the p99 of those answered would be the sample's p99 of all, failures counted as the slowest."""
    lines = _render(write_run(tmp_path / "r", count=40, failures=3, slos=("ttft p99 <= 9000 ms", "errors <= 60 %")))
    assert re.search(r"p99 –", next(line for line in lines if line.startswith(" TTFT")))


def test_how_much_of_what_was_served_was_good_says_nothing_of_what_was_not_served(tmp_path: Path) -> None:
    """Half of the requests failed, and all others were in time: "5 req/s (50 % good)" reads as 2.5."""
    slos = ("ttft p50 <= 9000 ms", "errors <= 60 %")
    lines = _render(write_run(tmp_path / "r", count=400, failures=200, slos=slos, evidence={"slo_on_errors": True}))
    assert re.search(r" req/s \(100 % good\)", next(line for line in lines if line.startswith(" served")))


def test_what_an_infinitely_fast_gpu_would_leave_is_said_once(failed: Any) -> None:
    for details in (False, True):
        text = " ".join("\n".join(_render(failed, details=details)).split())
        assert re.search(r"An infinitely fast GPU would cut p\d+ TTFT to \S+ \.\. \S+ m?s\.", text)
        assert text.count("An infinitely fast GPU would cut") == 1


def test_when_the_slowest_came_together_is_told_where_it_says_why(failed: Any) -> None:
    burst = Burst(
        count=13, of=28, from_s=19.0, to_s=20.02, chance=1e-9, stage=None, share=None, slots=8, queued=True
    )  # fmt: skip
    result = RunResult.read(failed.path).model_copy(update={"bursts": {"ttft": burst}})
    told = run.brief(result, Manifest.read(failed.path))
    said = "13 of the 28 slowest requests were due within 1.02 s (t = 19.0 s), when all 8 slots were taken."
    for text in (terminal.text(told, 80).plain, markdown.text(told)):
        assert said in " ".join(text.split())
    invalid = run.brief(result.model_copy(update={"verdict": INVALID}), Manifest.read(failed.path))
    assert "13 of the 28" not in terminal.text(invalid).plain


def test_without_a_ledger_there_are_no_bars_and_the_trust_line_says_so(tmp_path: Path) -> None:
    text = "\n".join(_render(write_run(tmp_path / "r", count=300, rate=12.0, with_ledger=False)))
    assert "where" not in text
    assert "no ledger" in text


def test_a_run_that_met_its_slos_names_the_one_closest_to_its_limit(tmp_path: Path) -> None:
    slos = ("ttft p90 <= 9000 ms", "itl p99 <= 400 ms", "errors <= 5 %")
    lines = _render(write_run(tmp_path / "r", count=2400, rate=22.0, slos=slos))
    assert lines[2].startswith("PASS  All 3 SLOs met; closest to its limit: ")


@pytest.mark.parametrize("key", KEYS)
def test_the_summary_is_one_screen(key: str, tmp_path: Path) -> None:
    """Of every kind of run, sweep and search that tests/golden keeps, on a terminal that wraps what is too wide."""
    with tarfile.open(HERE / f"{key}.tar.xz") as tar:
        told = [member for member in tar if Path(member.name).name in ("summary.json", "manifest.json")]
        tar.extractall(tmp_path, told, filter="data")
    for folder in sorted(path.parent for path in tmp_path.rglob("summary.json")):
        for width in (80, 100):
            drawn = terminal.text(_golden(folder), width, links=Facts([("report", REPORT)]), end="exit=98 undecided")
            assert _height(drawn.plain, width) <= MOST_LINES, drawn.plain


def _golden(folder: Path) -> Document:
    manifest = manifest_of(folder)
    if isinstance(manifest, SearchManifest):
        return capacity.document(CapacityResult.read(folder), manifest)
    if isinstance(manifest, SweepManifest):
        return sweep.document(SweepResult.read(folder), manifest)
    result = RunResult.read(folder).model_copy(update={"definitions": None})  # nobody asked for those
    return run.brief(result, manifest)


def _height(text: str, width: int) -> int:
    return sum(max(1, math.ceil(len(line) / width)) for line in text.splitlines())


def test_too_few_requests_give_no_number_where_none_can_be_had(tmp_path: Path) -> None:
    lines = _render(write_run(tmp_path / "r", count=12, rate=12.0, warmup=2))
    row = next(line for line in lines if "TTFT p99" in line)
    assert re.match(r" \? TTFT p99 +~\S+ ms +\S+ ms or more +500 ms ", row), "what the sample has, and its lower end"


@pytest.mark.parametrize("width", [60, 72, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal_and_only_paths_are_left_whole(failed: Any, width: int) -> None:
    lines = _render(failed, width, LONG_PATH)
    assert f" report  {LONG_PATH}" in lines
    assert max(len(line) for line in lines if not line.endswith((LONG_PATH, "server.max_batch=16"))) <= min(width, 100)
    assert lines == [line.rstrip() for line in lines]


def test_a_command_that_would_fill_the_screen_is_whole_where_all_is_asked_for(failed: Any) -> None:
    manifest, settings = Manifest.read(failed.path), " ".join(f"--set load.steps={n}" for n in range(9))
    long = manifest.model_copy(update={"command": f"{manifest.command} {settings}"})
    told = run.brief(RunResult.read(failed.path), long)
    first, everything = (terminal.text(told, details=details).plain for details in (False, True))
    begins = "\ngapmeter compare --run chat-p99 --b server.max_batch=16"
    assert f"{begins} … (whole in the report)\n" in first
    assert f"{begins} {settings}\n" in everything


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("colored", [True, False])
def test_colors_go_to_terminals_that_want_them(failed: Any, monkeypatch: pytest.MonkeyPatch, colored: bool) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not colored:
        monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    stream = Terminal()
    terminal.show(_document(failed), stream, details=True)
    assert ("\x1b[1;31mFAIL" in stream.getvalue()) is colored


def test_a_file_gets_plain_text(failed: Any) -> None:
    stream = io.StringIO()
    terminal.show(_document(failed), stream, end="exit=99 SLO missed")
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().endswith("exit=99 SLO missed\n")


def test_a_table_is_as_wide_as_its_content_a_row_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("ü", "1,000", "runs/a-b-c-d"), ("数", "20", "two\nlines")]
    terminal.print_table(("name", "n", "folder"), rows, right=(1,))
    assert capsys.readouterr().out.splitlines() == [
        "", " name       n   folder", f" {'─' * 27}", " ü      1,000   runs/a-b-c-d", " 数        20   two lines", ""
    ]  # fmt: skip


@pytest.mark.parametrize(("ratio", "words"), [(1.38, "1.4 times slower"), (0.5, "2 times faster"), (None, "")])
def test_a_load_that_never_had_enough_says_so_and_when_the_machine_changed_its_speed(
    failed: Any, ratio: float | None, words: str
) -> None:
    result, manifest = RunResult.read(failed.path), Manifest.read(failed.path)
    change = None if ratio is None else SpeedChange(after_s=131.2, ratio=ratio)
    slos = tuple(slo.model_copy(update={"estimable_with": 900}) for slo in result.slo)
    told = result.model_copy(update={"slo": slos, "drift": result.drift.model_copy(update={"machine_change": change})})
    scenario = manifest.scenario | {"load": {**manifest.scenario["load"], "duration": "1m", "patience": "2m"}}
    said = " ".join(
        terminal.text(run.brief(told, manifest.model_copy(update={"scenario": scenario})), details=True).plain.split()
    )
    enough = "never enough independent requests for every SLO percentile"
    assert f"{enough}; the machine became {words} at 131 s, so repeat the run" in said if words else enough in said
    assert ("the machine became" in said) is bool(words)
