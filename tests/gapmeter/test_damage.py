"""A run's folder with parts that are gone, cut or of other bytes: every command says so in a sentence."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gapmeter import errors
from gapmeter.cli import main
from gapmeter.records.compression import SUFFIX, open_record

pytestmark = pytest.mark.whole_run
Copy = Callable[[], Path]
Harm = Callable[[Path], object]


def manifest(change: Callable[[dict[str, Any]], object]) -> Harm:
    def harm(run: Path) -> None:
        value = json.loads((run / "manifest.json").read_text())
        change(value)
        (run / "manifest.json").write_text(json.dumps(value))

    return harm


def files(pattern: str, data: Callable[[bytes], bytes]) -> Harm:
    def harm(run: Path) -> None:
        for path in run.glob(pattern):
            path.write_bytes(data(path.read_bytes()))

    return harm


def records(pattern: str, data: Callable[[bytes], bytes]) -> Harm:
    """Not of the compressed bytes, which would not be unpacked any more, but of what is in them."""

    def harm(run: Path) -> None:
        for path in run.glob(f"{pattern}{SUFFIX}"):
            with open_record(path) as file:
                path.with_suffix("").write_bytes(data(file.read()))
            path.unlink()

    return harm


def folder_instead(name: str) -> Harm:
    def harm(run: Path) -> None:
        (run / name).unlink()
        (run / name).mkdir()

    return harm


def other(data: bytes) -> bytes:
    return random.Random(7).randbytes(len(data))


def turned(data: bytes) -> bytes:
    """Every reference to a request is another one."""
    at = random.Random(3)
    out = bytearray(data)
    for _ in range(60):
        out[at.randrange(64, len(out))] ^= 0xFF
    return bytes(out)


EXPLAIN = ("explain", "{run}", "--group", "ttft_ms > 1")
CSV, PROMETHEUS = ("export", "{run}", "--csv", "{tmp}/csv"), ("export", "{run}", "--prometheus", "{tmp}/p.prom")
COMPARE = ("compare", "{run}", "{whole}", "--runs", "{tmp}/compared")
# What happened to the folder, what is typed, the exit code, and what the sentence says.
DAMAGE: dict[str, tuple[Harm, tuple[str, ...], int, str]] = {
    "no plan's time": (
        manifest(lambda m: m["plan"].update(end_ns="soon")), ("report", "{run}"), 98,
        "is damaged: manifest.json: plan.end_ns is 'soon'",
    ),
    "no scenario": (
        manifest(lambda m: m.pop("scenario")), ("report", "{run}"), 98,
        "is damaged: manifest.json: scenario is missing",
    ),
    "no SLOs": (
        manifest(lambda m: m.update(slo=None)), ("report", "{run}"), 98, "is damaged: manifest.json: slo is 'None'",
    ),
    "a manifest without end": (
        files("manifest.json", lambda _: b"[" * 99_999), ("report", "{run}"), 2, "manifest.json: is no JSON (",
    ),
    "half a manifest, explained": (
        files("manifest.json", lambda data: data[: len(data) // 2]), EXPLAIN, 2,
        "is not a run's folder: manifest.json:",
    ),
    "half a manifest, exported": (
        files("manifest.json", lambda data: data[: len(data) // 2]), CSV, 2, "is not a run's folder: manifest.json:",
    ),
    "records of other bytes": (
        records("requests/*.gap", other), ("report", "{run}"), 98, "worker-0.gap: not a record file of schema version",
    ),
    "records that are a folder": (
        folder_instead("requests/worker-0.gap.zst"), ("report", "{run}"), 98, "it is a folder, not a plain file",
    ),
    "empty probe records": (
        records("probe/*.gap", lambda _: b""), ("report", "{run}"), 98, "too short to be a record file",
    ),
    "compressed records that were cut": (
        files("requests/*.gap.zst", lambda data: data[:-100]), ("report", "{run}"), 98,
        "worker-0.gap.zst: it cannot be unpacked: Truncated compressed stream",
    ),
    "compressed records that were cut, to be handed over": (
        files("requests/*.gap.zst", lambda data: data[:-100]), ("archive", "{run}"), 98,
        "worker-0.gap.zst cannot be read as a whole",
    ),
    "compressed switches that were cut": (
        files("telemetry/switches-*.bin.zst", lambda data: data[:-100]), ("report", "{run}"), 98,
        "it cannot be unpacked: Truncated compressed stream",
    ),
    "a summary of nothing": (
        files("summary.json", lambda _: b"{}"), EXPLAIN, 2,
        "summary.json: name is missing; analyse it again: gapmeter report",
    ),
    "a summary that is no JSON": (
        files("summary.json", lambda _: b"{"), PROMETHEUS, 2, "summary.json: is no JSON",
    ),
    "a summary that is a list": (
        files("summary.json", lambda _: b"[]"), CSV, 2, "summary.json: is not a JSON object",
    ),
    "a table of other bytes": (
        files("requests.parquet", other), EXPLAIN, 2, "cannot be read as an analysed run: ArrowInvalid",
    ),
    "another table in its place": (
        lambda run: shutil.copy(run / "steps.parquet", run / "ledger.parquet"), EXPLAIN, 2, "analyse it again",
    ),
    "a manifest without its scenario that is to be compared": (
        manifest(lambda m: m.pop("scenario")), COMPARE, 98, "is damaged: manifest.json: scenario is missing",
    ),
    "a table that is to be compared": (
        files("ledger.parquet", other), COMPARE, 2, "analyse it again: gapmeter report",
    ),
    "a summary that is to be compared": (
        files("summary.json", lambda _: b"[]"), COMPARE, 2, "analyse it again: gapmeter report",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_damaged_is_named_with_what_to_do(
    case: str, run_copy: Copy, finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harm, words, code, says = DAMAGE[case]
    run = run_copy()
    harm(run)
    assert main([word.format(run=run, tmp=tmp_path, whole=finished_run) for word in words]) == code
    said = capsys.readouterr().err
    assert says in said
    assert len([line for line in said.splitlines() if line.startswith("gapmeter: ")]) == 1


@pytest.mark.parametrize("words", [EXPLAIN, COMPARE, CSV])
def test_a_table_that_would_fill_the_memory_is_not_unpacked(
    words: Sequence[str], finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A file may hold a thousand million equal rows in a few bytes."""
    table = pa.table({f"c{i}": pa.repeat(0, 1_000_000) for i in range(20)})
    pq.write_table(table, tmp_path / "bomb")
    assert (tmp_path / "bomb").stat().st_size < 100_000
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    shutil.copy(tmp_path / "bomb", run / "requests.parquet")
    monkeypatch.setattr("gapmeter.analysis.tables.memory_bytes", lambda: 200_000_000)  # of a small machine
    assert main([word.format(run=run, tmp=tmp_path, whole=finished_run) for word in words]) == errors.USAGE
    assert "more than half of this machine's memory" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["requests/*.gap", "probe/*.gap"])
def test_records_with_a_few_other_bits_are_reported_or_refused_and_never_a_pass(
    part: str, run_copy: Copy, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_copy()
    records(part, turned)(run)
    assert main(["verify", str(run)]) == 98
    code = main(["report", str(run)])
    said = capsys.readouterr().err
    assert code in (98, 99), said  # so many answers that cannot be read may miss an SLO on errors


@pytest.mark.parametrize(
    "words", [("verify",), ("archive",), ("report",), ("explain", "--group", "ttft_ms > 1"), ("export", "--csv", "x")]
)
def test_a_name_that_no_file_can_have_is_one_sentence(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([words[0], "/" + "x" * 300, *words[1:]]) == 2
    assert "File name too long" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--url", "--engine", "--model", "--tokenizer"])
def test_a_flag_that_says_nothing_is_no_reason_to_measure_something_else(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "smoke", flag, ""]) == 2
    assert f"{flag} is empty; give it a value, or leave it out" in capsys.readouterr().err


def test_a_probe_s_folder_is_for_servers_that_are_attached_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "smoke", "--engine", "simulated", "--probe-dir", str(tmp_path), "--runs", str(tmp_path / "runs")]
    assert main(words) == 2
    assert "--probe-dir: a server that we launch has its own" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_two_files_of_one_name_and_an_unnamed_folder_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "smoke", "--engine", "simulated", "--junit", "a", "--markdown", f"{tmp_path}/a"]) == 2
    assert f"{tmp_path}/a cannot be both files" in capsys.readouterr().err
    for words in (["export", str(tmp_path), "--csv", ""], ["run", "smoke", "--runs", ""], ["runs", "--runs="]):
        assert main(words) == 2
        assert "it is empty; name a folder" in capsys.readouterr().err


def test_an_engine_to_launch_beside_an_address_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "smoke", "--engine", "simulated", "--url", "http://127.0.0.1:9"]) == 2
    assert "--engine simulated launches a server, and --url names one" in capsys.readouterr().err
    assert main(["run", "smoke", "--engine", "attach", "--url", "http://127.0.0.1:9"]) == 106


def test_ports_that_there_are_not_are_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ui", "--runs", str(tmp_path), "--port", "70000"]) == 2
    assert "--port 70000 is not a port; write one from 1 to 65535" in capsys.readouterr().err
    assert main(["run", "smoke", "--engine", "simulated", "--live", "--live-port", "-1"]) == 2
    assert "--live-port -1 is not a port" in capsys.readouterr().err
