"""A sweep's points: what they set, what they leave, and where a mistake in one is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.scenarios.errors import ScenarioError
from gapmeter.scenarios.read import load_points, load_scenario

PLAIN = """\
workload: {prompt_tokens: 64, output_tokens: 16}
load:
  arrivals: closed
  concurrency: 4
  duration: 75s
repeat: 2
"""

# What follows the plain scenario, and the sentence that its mistake is told in.
MISTAKES = {
    "a value that is none": (
        "sweep: {load.concurrency: [1, 2x]}",
        'mine.yaml:7:31 sweep.load.concurrency: "2x" is not a number of users; write a whole number, for instance 16',
    ),
    "no list": (
        "sweep: {load.concurrency: 3}",
        (
            "mine.yaml:7:27 sweep.load.concurrency: 3 is not a list of values; write for instance "
            "sweep: {load.concurrency: [1, 2, 4, 8]}"
        ),
    ),
    "a key for all points": (
        "sweep: {slo: [[errors <= 1 %]]}",
        "mine.yaml:7:15 sweep.slo: it is one for the whole sweep; write it beside sweep",
    ),
    "values that do not go together": (
        "sweep:\n  - {load.concurrency: 2}\n  - {load.rate: 5}",
        "mine.yaml:9:17 load.rate: a closed loop has no rate; write load.concurrency",
    ),
    "the same point twice": (
        "sweep: {load.concurrency: [2, 2]}",
        "mine.yaml:7:8 sweep: load.concurrency: 2 appears twice; repeat: 2 repeats every point",
    ),
    "no point": (
        "sweep: [3]",
        "mine.yaml:7:9 sweep: 3 is no point; write for instance {server.max_batch: 8, load.rate: 16}",
    ),
    "more processes than users at one point": (
        "sweep: {load.processes: [1, 8]}",
        "mine.yaml:7:29 load.processes: 8 processes cannot share 4 users; write fewer",
    ),
}


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(PLAIN + text)
    return path


def values(path: Path, *flags: str) -> list[dict[str, Any]]:
    return [dict(point.values) for point in load_points(path, flags, {})]


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_in_a_sweep_names_its_own_line_and_column(tmp_path: Path, case: str) -> None:
    text, says = MISTAKES[case]
    path = write(tmp_path, text)
    with pytest.raises(ScenarioError) as raised:
        load_points(path, (), {})
    assert str(raised.value).replace(f"{tmp_path}/", "") == says


def test_a_grid_is_every_combination_and_a_list_is_what_it_says(tmp_path: Path) -> None:
    grid = write(tmp_path, "sweep: {server.max_batch: [1, 8], load.concurrency: [2, 4]}")
    assert values(grid) == [
        {"server.max_batch": batch, "load.concurrency": users} for batch in (1, 8) for users in (2, 4)
    ]
    listed = write(tmp_path, "sweep:\n  - {server.precision: float32}\n  - {server.args.forward_ms: 3}")
    first, second = load_points(listed, (), {})
    assert (first.scenario.server.precision, second.scenario.server.args) == ("float32", {"forward_ms": 3})
    assert second.scenario.load.concurrency == 4, "what a point does not set is the scenario's"


def test_a_point_is_a_scenario_of_its_own_without_the_sweep(tmp_path: Path) -> None:
    path = write(tmp_path, "sweep: {load.concurrency: [2, 4]}")
    point = load_points(path, (), {})[1].scenario
    alone = load_scenario(path, ["sweep=[]", "repeat=1", "load.concurrency=4"], {})
    assert (point.sweep, point.repeat) == ((), 1)
    assert point.digest() == alone.digest()
    assert load_scenario(path, (), {}).repeat == 2


def test_whether_a_model_was_asked_for_beyond_the_file_is_known(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    workload = "workload: {kind: chat, prompt_tokens: 9, output_tokens: 9}"
    path.write_text(f"server: {{model: a}}\n{workload}\nload: {{arrivals: constant, rate: 1, requests: 1}}\n")
    asked = "server.model=b"
    swept = load_points(path, ["sweep={server.model: [a, b]}"], {})
    assert [point.scenario.model_asked_for for point in swept] == [True, True]
    assert load_scenario(path, [asked], {}).model_asked_for
    assert load_scenario(path, [], {"GAPMETER_SERVER_MODEL": "b"}).model_asked_for
    assert not load_scenario(path, [], {}).model_asked_for
    attached = tmp_path / "own.yaml"
    attached.write_text(path.read_text().replace("model: a", "engine: attach, url: 'http://h:1', model: a"))
    assert load_scenario(attached, [], {}).model_asked_for
    assert load_scenario(attached, ["server.url=http://h:2"], {}).model_asked_for
    assert load_scenario(path, [], {}).digest() == load_scenario(path, ["server.model=a"], {}).digest()


def test_what_a_sweep_sets_need_not_be_set_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "sweep: {load.rate: [1, 2]}\nworkload: {prompt_tokens: 9, output_tokens: 9}\nload: {duration: 9s}\n"
    )
    assert load_scenario(path, (), {}).load.rate == 1.0
    assert [point.scenario.load.rate for point in load_points(path, (), {})] == [1.0, 2.0]


def test_a_flag_may_bring_the_sweep_replace_it_and_not_contradict_it(tmp_path: Path) -> None:
    path = write(tmp_path, "sweep: {load.concurrency: [2, 4], server.max_batch: [1, 2]}")
    assert values(path, 'sweep={"load.concurrency":[1]}') == [{"load.concurrency": 1}]
    assert values(path, "sweep=[]") == []
    with pytest.raises(ScenarioError, match=r"--set load\.concurrency: the sweep sets it; write --set sweep=\[\]"):
        load_points(path, ["load.concurrency=3"], {})
    text = "sweep: {server.args.forward_ms: [20, 40]}\nserver: {args: {update_ms: 1}}\nload: {rate: 1, duration: 9s}\n"
    path.write_text(f"{text}workload: {{prompt_tokens: 9, output_tokens: 9}}\n")
    first, _ = load_points(path, ["server.args.update_ms=2"], {})
    assert first.scenario.server.args == {"forward_ms": 20, "update_ms": 2}
    with pytest.raises(ScenarioError, match=r"--set server\.args\.forward_ms: the sweep sets it"):
        load_points(path, ["server.args.forward_ms=10"], {})


@given(st.lists(st.integers(1, 999), min_size=1, max_size=5, unique=True))
def test_the_resolved_sweep_parses_back_to_itself(tmp_path_factory: pytest.TempPathFactory, users: list[int]) -> None:
    path = write(tmp_path_factory.mktemp("back"), f"sweep: {{load.concurrency: {users}}}")
    scenario = load_scenario(path, (), {})
    assert load_scenario(path, [f"sweep={scenario.to_dict()['sweep']}"], {}).sweep == scenario.sweep
