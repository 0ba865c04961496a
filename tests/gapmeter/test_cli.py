from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from gapmeter.cli import main, parser
from gapmeter.commands.flags import command_of
from gapmeter.records import RunFolder
from tests.kit.command import SIMULATED, SLOW, Done, Scenes, at_once, gapmeter

pytestmark = pytest.mark.whole_run

TYPO = """\
name: typo
server: {engine: simulated, model: "builtin:tiny"}
workload: {kind: chat, prompt_tokens: 16, output_tokens: 4}
load:
  arrivals: poisson
  ratte: 5
  requests: 20
"""


@dataclass(frozen=True, slots=True)
class Mistake:
    """What was typed, the exit code, and what the sentence must say. ``{tmp}`` and ``{port}`` are filled in."""

    words: tuple[str, ...]
    code: int
    says: tuple[str, ...]


MISTAKES = {
    "no command": Mistake((), 2, ("arguments are required: COMMAND; gapmeter --help lists the commands",)),
    "no scenario": Mistake(("run", "--quiet"), 2, ("required: scenario; gapmeter scenarios lists",)),
    "a space for a sign of equality": Mistake(
        ("run", "smoke", "--set", "seed=2", "--set", "load.rate", "4"), 2, ("write --set load.rate=4\n",),
    ),
    "a key without a value before an unknown flag": Mistake(
        ("run", "smoke", "--set", "load.rate", "--loud"), 2, ("unrecognized arguments: --loud",),
    ),
    "an unknown flag": Mistake(
        ("run", "smoke", "--loud"), 2, ("unrecognized arguments: --loud; gapmeter run --help lists the flags",),
    ),
    "a flag with a typo": Mistake(("run", "smoke", "--juint=x.xml"), 2, ("--juint=x.xml; did you mean --junit?",)),
    "a command with a typo": Mistake(("capcity", "smoke"), 2, ("'capcity'", "did you mean capacity?")),
    "a key taken for a flag where none can be set": Mistake(("runs", "--rate", "4"), 2, ("gapmeter runs --help",)),
    "a key taken for a flag": Mistake(
        ("run", "smoke", "more", "--rate", "4", "--max-batch=2"), 2, ("load.rate=VALUE", "server.max_batch=VALUE"),
    ),
    "an unknown scenario": Mistake(("run", "smok"), 104, ('no scenario "smok"; there are smoke, ', "chat-p99")),
    "a key with a typo": Mistake(
        ("run", "{tmp}/typo.yaml"), 104, ("{tmp}/typo.yaml:6:3 load.ratte", "load.rate"),
    ),
    "an address that is none": Mistake(("run", "smoke", "--url", "localhost:8000"), 104, ("write http://localhost:8000",)),
    "an unknown built-in model": Mistake(
        (*SIMULATED, "--model", "builtin:tinny"), 104, ("tinny", "builtin:tiny"),
    ),
    "a model folder without a tokenizer": Mistake(
        (*SIMULATED, "--model", "{tmp}/bare"), 104, ("{tmp}/bare", "no tokenizer", "save_pretrained"),
    ),
    "a port in use": Mistake(
        (*SIMULATED, "--set", "server.args.port={port}"), 106, ("server.args.port", "{port}", "in use"),
    ),
    "a port that is none": Mistake((*SIMULATED, "--set", "server.args.port=many"), 104, ("server.args.port: many",)),
    "an address that refuses": Mistake(
        ("run", "smoke", "--url", "http://127.0.0.1:{closed}"), 106, ("no server answers", "{closed}", "refused"),
    ),
    "a port of a page that was not asked for": Mistake(
        (*SIMULATED, "--live-port", "8090"), 2, ("--live-port goes with --live",),
    ),
    "a patience without workers": Mistake((*SIMULATED, "--patience", "9s"), 2, ("go with --workers N",)),
    "a JUnit file that cannot be": Mistake((*SIMULATED, "--junit", "{tmp}/no/such.xml"), 2, ("{tmp}/no/such.xml",)),
    "a runs folder that is a file": Mistake(
        (*SIMULATED, "--runs", "{tmp}/typo.yaml"), 2, ("no run's folder can be made in {tmp}/typo.yaml",),
    ),
    "a report of nothing": Mistake(("report", "{tmp}/bare"), 2, ("is not a run's folder: it has no manifest.json",)),
    "a report of a folder with a typo": Mistake(("report", "{tmp}/baer"), 2, ("{tmp}/baer does not exist",)),
    "a report of another format": Mistake(("report", "{tmp}/old"), 2, ("schema_version is 0", "reads 1")),
}  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A folder with what the mistakes need, a port that is taken, and one that nobody listens on."""
    tmp = tmp_path_factory.mktemp("mistakes")
    (tmp / "typo.yaml").write_text(TYPO)
    for name, file, text in (("bare", "config.json", "{}"), ("old", "manifest.json", '{"schema_version": 0}')):
        (tmp / name).mkdir()
        (tmp / name / file).write_text(text)
    with socket.socket() as taken, socket.socket() as closed:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        closed.bind(("127.0.0.1", 0))
        yield {"tmp": str(tmp), "port": str(taken.getsockname()[1]), "closed": str(closed.getsockname()[1])}


def repeats(tmp: Path) -> Done:
    files = ("--junit", str(tmp / "repeats.xml"))
    return gapmeter(*SIMULATED, *SLOW, "--set", "repeat=2", *files, runs=tmp / "repeats")


def missed(tmp: Path) -> Done:
    files = ("--json", "--quiet", "--junit", str(tmp / "missed.xml"), "--markdown", str(tmp / "missed.md"))
    half = ("--set", "server.args.fault_error_share=0.5", "--set", 'slo=["errors <= 5 %", "errors <= 95 %"]')
    return gapmeter(*SIMULATED, *SLOW, *files, *half, runs=tmp / "missed")


@pytest.fixture(scope="module")
def commands(places: dict[str, str], request: pytest.FixtureRequest) -> Iterator[Scenes]:
    """Everything that is typed."""
    tmp = Path(places["tmp"])
    typed = {
        name: partial(gapmeter, *(word.format(**places) for word in case.words), runs=tmp / f"runs-{number}")
        for number, (name, case) in enumerate(MISTAKES.items())
    }
    every = {"repeats": partial(repeats, tmp), "missed": partial(missed, tmp), **typed}
    with at_once(every, request) as futures:
        yield futures


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_with_a_sentence_that_names_it_and_its_exit_code(
    name: str, commands: Scenes, places: dict[str, str]
) -> None:
    done, case = commands[name].result(), MISTAKES[name]
    assert done.code == case.code, done.err
    for part in case.says:
        assert part.format(**places) in done.err
    assert "Traceback" not in done.err
    assert done.out == ""
    assert done.left == []
    assert not list(done.runs.glob("*")), "a run's folder was left for a run that never was"


def test_the_version_and_the_examples_of_the_help_are_told_without_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--version", "--help"):
        with pytest.raises(SystemExit) as ended:
            main([flag])
        assert ended.value.code == 0
    version, *told = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"gapmeter \S+ \(analysis [0-9a-f]{12}\)", version)
    assert max(map(len, told)) <= 80
    examples = [line.split("   ")[0].split()[1:] for line in told if line.startswith("  gapmeter ")]
    assert len(examples) == 5
    assert all(parser().parse_args(words).call for words in examples)


def test_an_error_shows_its_traceback_where_that_is_wanted(tmp_path: Path) -> None:
    done = gapmeter("config", "smok", "--debug", runs=tmp_path)
    assert "Traceback" in done.err
    assert "UserError" in done.err


def test_a_missed_slo_is_99_in_the_json_document_the_junit_file_and_the_markdown(commands: Scenes) -> None:
    done = commands["missed"].result()
    assert done.code == 99, done.err
    assert json.loads(done.out) == done.summary
    assert done.err == "exit=99 SLO missed\n"
    files = done.runs.parent
    assert [case.find("failure") is not None for case in ET.parse(files / "missed.xml").iter("testcase")] == [
        True,
        False,
    ]
    assert "FAIL" in (files / "missed.md").read_text()
    assert done.manifest["command"].startswith("gapmeter run smoke --engine simulated")


@pytest.mark.parametrize(("name", "code"), [("missed", 99), ("repeats", 2)])
def test_a_file_that_cannot_be_written_spoils_only_what_was_well(
    name: str, code: int, commands: Scenes, tmp_path: Path
) -> None:
    run = next(commands[name].result().runs.iterdir())
    done = gapmeter("report", str(run), "--junit", "/dev/full", "--markdown", str(tmp_path / "told.md"), runs=tmp_path)
    assert (done.code, done.out) == (code, f"{run}\n")
    assert "/dev/full cannot be written: No space left on device" in done.err
    assert (tmp_path / "told.md").read_text()


def test_repeats_that_hold_their_slos_are_0_and_print_a_line_and_leave_a_folder_each(commands: Scenes) -> None:
    done = commands["repeats"].result()
    assert (done.code, done.last_line, done.left) == (0, "exit=0 every SLO met", []), done.err
    folders = [RunFolder(Path(line)) for line in done.out.splitlines()]
    assert sorted(folder.path for folder in folders) == sorted(done.runs.iterdir())
    for folder in folders:
        assert json.loads((folder.path / "verdict.json").read_text())["verdict"] == "PASS"
        assert folder.report.stat().st_size
        assert (folder.path / "ledger.parquet").stat().st_size
    assert len(list(ET.parse(done.runs.parent / "repeats.xml").iter("testsuite"))) == 2


def test_repeats_are_the_same_trace_with_other_prompts(commands: Scenes) -> None:
    folders = [RunFolder(Path(line)) for line in commands["repeats"].result().out.splitlines()]
    first, second = (json.loads(folder.manifest.read_text()) for folder in folders)
    assert (first["repeat"], second["repeat"]) == (0, 1)
    assert (first["status"], second["status"]) == ("complete", "complete")
    assert first["plan"]["digest"] != second["plan"]["digest"]
    assert {**first["plan"], "digest": "", "t0_ns": 0} == {**second["plan"], "digest": "", "t0_ns": 0}


def test_config_prints_each_value_with_where_it_came_from(tmp_path: Path) -> None:
    done = gapmeter("config", "smoke", "--set", "load.rate=7", runs=tmp_path)
    rows = {line.split()[0]: line for line in done.out.splitlines()}
    assert done.code == 0
    assert rows["load.rate"].split()[1] == "7.0"
    assert "--set" in rows["load.rate"]
    assert "smoke.yaml" in rows["load.requests"]
    assert "default" in rows["load.timeout"]


@pytest.mark.parametrize("typed", ["run smoke", "compare --run smoke --b seed=2", "compare --run=smoke --b seed=2"])
def test_a_command_is_kept_with_what_the_environment_set(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAPMETER_LOAD_RATE", "3")
    arguments = parser().parse_args(typed.split())
    arguments.words = typed.split()
    assert str(command_of(arguments)) == "gapmeter " + typed.replace("smoke", "smoke --set load.rate=3")


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("run --engine vllm smoke --quiet", "run smoke --engine vllm --quiet"),
        ("run --runs smoke --quiet smoke", "run --runs smoke --quiet smoke"),
        ("run -v -- smoke", "run smoke -v"),
    ],
)
def test_what_is_derived_from_a_command_finds_its_scenario_wherever_it_was_typed(typed: str, kept: str) -> None:
    arguments = parser().parse_args(typed.split())
    arguments.words = typed.split()
    assert str(command_of(arguments)) == f"gapmeter {kept}"


def test_scenarios_are_listed_a_line_each(tmp_path: Path) -> None:
    done = gapmeter("scenarios", runs=tmp_path)
    assert done.code == 0
    assert {line.split()[0] for line in done.out.splitlines()} >= {"chat-p99", "smoke", "long-prompt", "burst"}
    assert all(len(line.split()) > 1 for line in done.out.splitlines())


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_streams_that_were_closed_before_are_no_failure(closed: str, tmp_path: Path) -> None:
    """What is opened next does not take their place."""
    command = [sys.executable, "-P", "-m", "gapmeter", *SIMULATED, "--runs", str(tmp_path)]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *command], capture_output=True, text=True, check=False
    )
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "summary.json").read_text())["counts"]["succeeded"] == 30
    assert done.returncode in (0, 98, 99)
    assert "Traceback" not in done.stderr
