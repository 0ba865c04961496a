"""Traces of both forms are read as they are meant, and a bad line is named with its file and number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gapmeter.scenarios.errors import ScenarioError
from gapmeter.scenarios.model import Scenario
from gapmeter.scenarios.read import load_scenario
from gapmeter.scenarios.trace import Recording

S = 1_000_000_000
GOOD_JSON = '{"timestamp": 10, "input_length": 600, "output_length": 5, "hash_ids": [0, 3]}\n'
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def replay(folder: Path, text: str, *overrides: str, name: str = "t.jsonl", warmup: str = "0") -> Scenario:
    (folder / name).write_text(text)
    scenario = f"workload: {{}}\nload: {{arrivals: trace, trace: {{file: {name}}}, warmup: {warmup}}}\n"
    (folder / "s.yaml").write_text(scenario)
    return load_scenario(folder / "s.yaml", overrides, {})


def trace(folder: Path, text: str, name: str = "t.jsonl") -> Recording:
    found = replay(folder, text, name=name).load.trace
    return found.recorded


def test_json_lines_are_in_milliseconds_from_the_first_and_in_the_order_of_time(tmp_path: Path) -> None:
    later = '{"timestamp": 2510.5, "input_length": 7, "output_length": 0, "other": 1}\n'
    found = trace(tmp_path, later + "\n" + GOOD_JSON)
    assert found.at_ns == (0, 2_500_500_000)
    assert found.prompt_tokens == (600, 7)
    assert found.output_tokens == (5, 1)
    assert found.blocks == ((0, 3), ())
    assert trace(tmp_path, later).blocks == ()


def test_a_csv_may_have_dates_with_seven_decimals_or_seconds_and_further_columns(tmp_path: Path) -> None:
    rows = "2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:04.0319571,396,109\n"
    found = trace(tmp_path, "\ufeff" + HEAD + rows, "t.csv")
    assert found.at_ns == (0, 51_997_100)
    assert (found.prompt_tokens, found.output_tokens) == ((374, 396), (44, 109))
    zoned = "x,1,2024-05-10 00:00:00.5+00:00,2\nx,1,2024-05-10 00:00:01+00:00,2\n"
    assert trace(tmp_path, "model,GeneratedTokens,TIMESTAMP,ContextTokens\n" + zoned, "t.csv").at_ns == (0, S // 2)
    assert trace(tmp_path, HEAD + "0.25,5,6\n1.5,7,8\n", "t.csv").at_ns == (0, 1_250_000_000)
    winter = "2024-10-27 02:00:00.5+01:00,5,6\n2024-10-27 02:59:59+02:00,7,8\n"  # the clocks were put back between them
    assert trace(tmp_path, HEAD + winter, "t.csv").at_ns == (0, 1_500_000_000)
    commas = '"2024-05-10 00:00:01,137",600,40\n"2024-05-10 00:00:01,887",7,8\n'
    assert trace(tmp_path, HEAD + commas, "t.csv").at_ns == (0, 750_000_000)
    padded = trace(tmp_path, "\n" + HEAD + "0,600,40,\n1,7,8, ,\n", "t.csv")  # as spreadsheets write it
    assert padded.prompt_tokens == (600, 7)


def test_times_may_count_from_1970(tmp_path: Path) -> None:
    assert trace(tmp_path, HEAD + "1715299200,5,6\n1715299201.5,7,8\n", "t.csv").at_ns == (0, 1_500_000_000)
    lines = "".join(GOOD_JSON.replace("10", str(at), 1) for at in (1715299200000, 1715299200250))
    assert trace(tmp_path, lines).at_ns == (0, 250_000_000)


def test_blanks_before_the_first_line_do_not_change_a_format(tmp_path: Path) -> None:
    assert trace(tmp_path, "\n  " + GOOD_JSON).format == "mooncake"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD_JSON + "{half\n", "t.jsonl:2: not JSON: "),
        (
            GOOD_JSON + "[1]\n",
            "t.jsonl:2: [1] is not an object with timestamp, input_length and output_length; write for instance {",
        ),
        (GOOD_JSON + '{"timestamp": 1, "input_length": 5}', "t.jsonl:2: output_length is missing"),
        (GOOD_JSON.replace("10", '"soon"'), 't.jsonl:1: timestamp "soon" is not a number of milliseconds from 0'),
        (GOOD_JSON.replace("600", "-1"), "t.jsonl:1: input_length -1 is not a number of tokens"),
        (GOOD_JSON.replace("600", "1.5"), "t.jsonl:1: input_length 1.5 is not a number of tokens"),
        (GOOD_JSON.replace("3]", "-3]"), "t.jsonl:1: hash_ids -3 is out of range; write a block's id from 0 to "),
        (GOOD_JSON.replace("600", "2000"), "t.jsonl:1: 2 hash_ids do not fit input_length 2000: one for each 512"),
        ("", "t.jsonl holds no requests"),
        ("a,b\n1,2\n", "t.jsonl:1: no column TIMESTAMP; the first line must name TIMESTAMP, ContextTokens, "),
        (HEAD, "t.jsonl holds no requests"),
        (HEAD + "1,2,3\n4,5\n", "t.jsonl:3: 2 of 3 columns"),
        (
            HEAD + "2024-05-10 00:00:01,137,600,40\n",
            "t.jsonl:2: 4 cells for 3 columns; quote a value that holds a comma",
        ),
        (HEAD.replace(",", ";"), "t.jsonl:1: its columns are separated by semicolons; write commas"),
        (HEAD.replace(",", "\t"), "t.jsonl:1: its columns are separated by tabs; write commas"),
        (f"[{GOOD_JSON}]", "t.jsonl is one list; write one object a line: {"),
        (HEAD + "1,2,many\n", 't.jsonl:2: GeneratedTokens "many" is not a number of tokens'),
        (HEAD + "yesterday,2,3\n", 't.jsonl:2: TIMESTAMP "yesterday" is not a time; write 2024-05-10 00:00:00.009930'),
        (HEAD + "-1,2,3\n", 't.jsonl:2: TIMESTAMP "-1" is not a time'),
        (HEAD + "nan,2,3\n", 't.jsonl:2: TIMESTAMP "nan" is not a time'),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_number(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        replay(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path}/s.yaml:2:")
    assert f"load.trace.file: {tmp_path}/{says}" in str(caught.value).replace(f"cannot read {tmp_path}/", "")


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    replay(tmp_path, GOOD_JSON)
    with pytest.raises(ScenarioError, match=r"cannot read gone\.jsonl: No such file"):
        load_scenario(tmp_path / "s.yaml", ["load.trace.file=gone.jsonl"], {})


def test_a_trace_lasts_to_its_end_and_a_part_of_it_can_be_set_by_a_flag(tmp_path: Path) -> None:
    lines = "".join(GOOD_JSON.replace("10", str(at), 1) for at in (0, 44_000))
    assert replay(tmp_path, lines).load.duration_ns == 44 * S + 1
    faster = replay(tmp_path, lines, "load.trace.speed=2")
    assert faster.load.duration_ns == 22 * S + 1
    assert faster.digest() != replay(tmp_path, lines).digest()
    assert replay(tmp_path, lines, "load.duration=5s").load.duration_ns == 5 * S
    assert replay(tmp_path, lines, warmup="auto").load.duration_ns == 40 * S + 1
    assert replay(tmp_path, lines, warmup="10s").load.duration_ns == 34 * S + 1


def test_a_trace_can_begin_later_and_begin_again(tmp_path: Path) -> None:
    rows = HEAD + "0,5,1\n1,6,2\n4,7,3\n"  # a lap is 4 s and a mean gap of 2
    late = replay(tmp_path, rows, "load.trace.start=1s", name="t.csv").load
    assert late.duration_ns == 3 * S + 1
    assert late.trace.issued(9) == Recording("azure", (0, 3 * S), (6, 7), (2, 3), ())
    looped = replay(tmp_path, rows, "load.trace.start=1s", "load.trace.loop=true", name="t.csv").load
    assert looped.duration_ns == 6 * S + 1
    assert looped.trace.issued(5).at_ns == (0, 3 * S, 5 * S, 6 * S, 9 * S)
    assert looped.trace.issued(5).prompt_tokens == (6, 7, 5, 6, 7)
    assert looped.trace.rate == 0.5
    twice = looped.trace.at_rate(1.0, part=0.7)
    assert (twice.speed, twice.start_ns, twice.loop, twice.rate) == (2.0, 4 * S, True, 1.0)


def test_a_block_of_text_does_not_come_again_with_the_next_lap(tmp_path: Path) -> None:
    lines = GOOD_JSON + '{"timestamp": 40, "input_length": 5, "output_length": 5}\n'
    looped = replay(tmp_path, lines, "load.trace.loop=true").load.trace
    assert looped.issued(5).blocks == ((0, 3), (), (4, 7), (), (8, 11))


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("load.trace.start=2s", "load.trace.start: is after the last request of "),
        ("load.trace.loop=true", "none can follow the last; leave it out"),
    ],
)
def test_a_trace_that_has_nothing_to_issue_is_refused(tmp_path: Path, key: str, says: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        replay(tmp_path, GOOD_JSON, key)
    assert says in str(caught.value)


def test_a_resolved_trace_written_out_reads_back_to_itself(tmp_path: Path) -> None:
    first = replay(
        tmp_path, HEAD + "0.25,5,6\n1.5,7,8\n", "load.trace.speed=3", "load.trace.format=azure", name="t.csv"
    )
    (tmp_path / "again.yaml").write_text(json.dumps(first.to_dict()))
    again = load_scenario(tmp_path / "again.yaml", (), {})
    assert (again.load.trace, again.digest()) == (first.load.trace, first.digest())
    with pytest.raises(ScenarioError, match=r"t.csv:1: not JSON"):
        load_scenario(tmp_path / "s.yaml", ["load.trace.format=mooncake"], {})


def test_what_a_trace_holds_is_part_of_the_digest(tmp_path: Path) -> None:
    first = replay(tmp_path, GOOD_JSON).digest()
    assert replay(tmp_path, GOOD_JSON.replace("5,", "6,")).digest() != first


def test_the_shipped_traces_are_what_they_say() -> None:
    folder = Path(__file__).parents[2] / "scenarios" / "traces"
    for path in folder.iterdir():
        overrides = [f"load.trace={{file: {json.dumps(str(path))}, speed: 1}}", "load.warmup=0"]
        found = load_scenario("replay-chat", overrides, {}).load.trace
        recorded = found.recorded
        assert 50 < len(recorded.at_ns) < 200
        assert 50 * S < found.span_ns < 61 * S
        assert max(p + o for p, o in zip(recorded.prompt_tokens, recorded.output_tokens, strict=True)) < 2048
