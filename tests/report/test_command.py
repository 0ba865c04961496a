"""Commands that derive from another run what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from gapmeter.report.command import Command


@pytest.mark.parametrize(
    ("command", "again"),
    [
        ("gapmeter run smoke", "gapmeter run smoke --resume 'a folder'"),
        ("gapmeter run smoke --resume=old --quiet", "gapmeter run smoke --quiet --resume 'a folder'"),
        ("gapmeter run --resume old smoke", "gapmeter run smoke --resume 'a folder'"),
    ],
)
def test_what_was_interrupted_is_taken_up_by_the_same_words(command: str, again: str) -> None:
    assert str(Command.parse(command).resumed(Path("a folder"))) == again


def test_a_resumed_search_has_one_budget() -> None:
    command = Command.parse("gapmeter capacity smoke --budget 30s --resume a").resumed(Path("b"), "--budget", "4m")
    assert str(command) == "gapmeter capacity smoke --budget 4m --resume b"


@pytest.mark.parametrize(
    ("command", "alone"),
    [
        (
            "gapmeter capacity smoke --budget 30s --json --set 'slo=[\"ttft p50 <= 60 ms\"]' --within=80% --runs runs",
            "gapmeter run smoke --set 'slo=[\"ttft p50 <= 60 ms\"]' --set load.rate=4",
        ),
        ("python a-script.py", "python a-script.py"),
    ],
)
def test_a_trials_load_is_run_by_itself_without_what_only_a_search_has(command: str, alone: str) -> None:
    assert str(Command.parse(command).as_run("load.rate=4")) == alone


@pytest.mark.parametrize(
    ("command", "alone"),
    [
        (
            "gapmeter run smoke --set 'sweep={\"load.rate\":[1,2]}' --set=repeat=3 --engine=simulated --resume runs/a",
            "gapmeter run smoke --engine simulated --set 'sweep=[]' --set repeat=1 --set load.rate=2",
        ),
        (
            "gapmeter run smoke --set load.seed=9 --locustfile a.py --junit j.xml",
            "gapmeter run smoke --set load.seed=9 --locustfile a.py --set 'sweep=[]' --set repeat=1 --set load.rate=2",
        ),
        (
            "gapmeter capacity smoke --over load.rate=1,2 --budget 30s --target-rps 50 --set repeat=2",
            "gapmeter capacity smoke --budget 30s --target-rps 50 --set 'sweep=[]' --set repeat=1 --set load.rate=2",
        ),
    ],
)
def test_one_point_is_run_by_itself_with_all_that_was_asked_for_but_the_other_points(command: str, alone: str) -> None:
    assert str(Command.parse(command).of_one_point("load.rate=2")) == alone


def test_a_flag_is_left_out_with_its_value_and_nothing_else() -> None:
    words = Command(("gapmeter", "run", "smoke", "--api-key", "secret", "--api-key=secret", "--quiet"))
    assert words.without("--api-key").words == ("gapmeter", "run", "smoke", "--quiet")


def test_a_line_that_is_no_command_line_stays_as_it_is() -> None:
    assert Command.parse("it's").words == ("it's",)


def test_what_was_set_wins_over_a_named_flag_wherever_it_was_typed() -> None:
    typed = Command.parse("gapmeter run smoke --set server.model=a --model b")
    assert typed.settings == ["server.model=b", "server.model=a"]


@pytest.mark.parametrize("flag", ["--probe-dir 'a folder'", "'--probe-dir=a folder'"])
def test_a_search_sees_the_stages_that_its_run_saw(flag: str) -> None:
    search = Command.parse(f"gapmeter run smoke --url http://a:1 {flag} --set load.rate=2").as_search()
    settings = "--set server.engine=attach --set server.url=http://a:1 --set load.rate=2"
    assert str(search) == f"gapmeter capacity smoke --probe-dir 'a folder' {settings}"
