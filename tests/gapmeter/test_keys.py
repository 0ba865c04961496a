"""A key that a user gives lies in no file of a run's folder, however it was given and however the run ends."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gapmeter.cli import main
from gapmeter.commands import recorded
from gapmeter.errors import UserError
from gapmeter.keys import REDACTED, Keys
from gapmeter.records.compression import open_record
from gapmeter.report.command import Command
from tests.kit.command import SHORT, SIMULATED, gapmeter

KEY = "sk-<secret>&0123456789"


def contents(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Every file, unpacked where it is packed, with a table's texts; more than none."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        if path.suffix == ".parquet":
            texts = pd.read_parquet(path).select_dtypes(["object", "string"]).to_csv()
            yield path, f"{texts} {pq.read_schema(path).metadata}".encode()
            continue
        with open_record(path) as file:
            data = file.read()
        yield path, gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data


def holding(folder: Path) -> list[Path]:
    """The files with a part of the key that no escaping changes."""
    return [path for path, data in contents(folder) if b"0123456789" in data]


@given(st.text(st.characters(), min_size=6), st.text(), st.text())
@example("\ud800\udcff" * 3, "", "")
def test_a_key_is_in_no_text_any_more(key: str, before: str, after: str) -> None:
    keys = Keys.within({"server": {"args": {"api_key": key}}})
    for text in (before + key + after, before + json.dumps(key) + after):
        assert key not in keys.out_of(text).replace(REDACTED, "")


@given(st.binary(min_size=6).filter(lambda key: 0 not in key))
@example(b"\xff" * 6)
def test_a_key_that_is_no_text_is_in_no_bytes_any_more(key: bytes) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_TOKEN", os.fsdecode(key))
        keys = Keys.within({})
    if len(os.fsdecode(key)) >= 6:
        assert key not in keys.out_of_bytes(b"a " + key + b" b").replace(REDACTED.encode(), b"")


@given(st.text() | st.text("%0123456789ABCDEF", min_size=6))
@example("%41%42")
def test_no_spelling_of_a_key_is_so_short_that_words_hold_it(key: str) -> None:
    assert all(len(spelling) >= 6 for spelling in Keys.within({"api_key": key}).spellings)


VALUES = [
    ({"args": {"api_key": "short"}}, {"args": {"api_key": REDACTED}}),
    ({"args": {"api-key": ["first-key", "other-key"]}}, {"args": {"api-key": [REDACTED, REDACTED]}}),
    ({"api_key": 123456}, {"api_key": REDACTED}),
    ({"command": ["serve", "--api-key", "short", "--port", "8000"]},
     {"command": ["serve", "--api-key", REDACTED, "--port", "8000"]}),
    ({"x": "http://u:long-key@[::1"}, {"x": f"http://u:{REDACTED}@[::1"}),
    ({"x": "https://a@b:long-key@host:80/c:secret@d"}, {"x": f"https://a@b:{REDACTED}@host:80/c:secret@d"}),
    ({"x": "http://host:8000000/c@d"},) * 2,
    ({"api_key": "long-key", "url": "http://host/?k=long-key"}, {"api_key": REDACTED, "url": f"http://host/?k={REDACTED}"}),
    ({"command": ["--max-num-batched-tokens", "8192"], "eos_token": 5, "api_key": None, "password": ""},) * 2,
]  # fmt: skip


@pytest.mark.parametrize(("value", "left"), VALUES)
def test_what_stands_under_a_keys_name_is_taken_out_and_nothing_else(value: object, left: object) -> None:
    assert Keys.within(value).out_of_value(value) == left


COMMANDS = {
    "gapmeter run smoke --set server.args.api_key=short": "gapmeter run smoke --set 'server.args.api_key=REDACTED'",
    "gapmeter run smoke --set 'server.args.api_key=a b'": "gapmeter run smoke --set 'server.args.api_key=REDACTED'",
    "gapmeter run smoke --set load.rate=8": "gapmeter run smoke --set load.rate=8",
    "gapmeter run 'smoke": "gapmeter run 'smoke",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_repeated_without_its_key(command: str) -> None:
    assert str(Keys().out_of_command(Command.parse(command))) == COMMANDS[command]


@pytest.mark.parametrize(
    "sides",
    [
        ("--a", "server.args={api-key: sk-of-a-0123, max-queue: 4}", "--b", "server.max_batch=4"),
        ("--a=server.args.api-key=sk-of-a-0123", "--b=server.args.api-key=sk-of-b-0123"),
    ],
)
def test_a_comparison_of_two_settings_has_the_key_of_neither(
    sides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()

    def begin(_: object, command: str) -> None:
        said.append(command)
        raise UserError("enough", 2)

    monkeypatch.setattr(recorded, "_compared_in_turn", begin)
    assert main(["compare", "--run", "smoke", *sides, "--runs", str(tmp_path)]) == 2
    assert "sk-of" not in said[0]
    assert REDACTED in said[0]


@pytest.mark.whole_run
@pytest.mark.parametrize(
    "words", [("run", "smoke"), ("capacity", "smoke"), ("run", "smoke", "--set", "sweep={load.rate: [1, 2]}")]
)
def test_a_server_that_repeats_its_key_as_it_fails_leaves_it_nowhere(words: tuple[str, ...], tmp_path: Path) -> None:
    """The simulated server knows no such flag, and says so in its log with the flag's value."""
    key = ("--set", f"server.args.api_key={json.dumps(KEY)}", "--set", 'slo=["ttft p50 <= 5 s"]')
    done = gapmeter(*words, "--engine", "simulated", *SHORT, *key, "--runs", str(tmp_path / "runs"), runs=tmp_path)
    assert done.code != 0
    assert "api-key" in done.err and "0123456789" not in done.err
    assert holding(tmp_path / "runs") == []
    assert [path for path, data in contents(tmp_path / "runs") if f"--api-key {REDACTED}".encode() in data]


@pytest.mark.whole_run
def test_a_run_that_went_well_holds_the_key_in_none_of_its_files(tmp_path: Path) -> None:
    more = ("--api-key", KEY, "--set", f"summary=asked with {KEY}")
    done = gapmeter(*SIMULATED, *more, runs=tmp_path)
    assert done.code in (0, 98), done.err
    assert holding(done.folder.path) == []
    assert done.manifest["scenario"]["summary"] == f"asked with {REDACTED}"
    assert REDACTED in done.manifest["command"] and "--api-key" not in done.manifest["command"]
