"""Whatever stands in a field, the parser takes it or says in one sentence what is wrong with it."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gapmeter.scenarios.errors import BadValue, ScenarioError
from gapmeter.scenarios.files import Prompts
from gapmeter.scenarios.model import KEYS, Scenario
from gapmeter.scenarios.read import load_scenario
from gapmeter.scenarios.trace import read_recording

_LEAF = st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
_FLAT = _LEAF | st.lists(_LEAF, max_size=3) | st.dictionaries(st.text(max_size=5), _LEAF, max_size=3)
# As they would be typed: of the wrong kind, out of range, with odd units, deep, or of a tag of their own.
WORDS = st.one_of(
    st.sampled_from(
        [
            "null", "true", ".nan", "-.inf", "1e400", "-0", "9" * 400, "9" * 5000, f"{'9' * 400}s", "''", "' '",
            r'"\0"', r'"\ud800"', "5 m", "5min", "1e3ms", "1:30", "[]", "{}", "[[]]", "{1: 2}", "{null: 1}", "{[1]: 2}",
            "!!int x", "!!binary aGk=", "!!set {a}", "!!timestamp 2001-01-01", "!mine 3", "&a [*a]", "*a", "{<<: 1}",
            "{uniform: 3}", "{uniform: [9, 1]}", "{lognormal: {median: 1, p95: 1e999}}", "{file: .}", "{file: ''}",
            "{exponential: 0}", "{from: 0, to: 0}", "{from: 1, to: 1e308}", "{on: 1e-9, off: 1e-9}",
            "{day: 1s, hours: [1e308, 1e308]}", "[{rate: 0, for: 1}]", "{load.rate: []}", "{'': [1]}", "{1: [1]}",
            "{load: [1]}", "{server.args.: [1]}", "[{load.rate: null}]", "['ttft p99 <= 1e3 ms']", "['ttft p. <= . s']",
            f"['ttft p99 <= {'9' * 400} s']", "['ttft p99.9999999999999 <= 1 s']", "http://[",
            "http://x:99999", "closed", "{day: 1s, peak: 25}",
        ]
    ),
    st.floats().map(str), st.integers().map(str), st.text(max_size=20).map(json.dumps),
    (_FLAT | st.lists(_FLAT, max_size=3) | st.dictionaries(st.text(max_size=5), st.lists(_FLAT), max_size=3))
    .map(json.dumps),
)  # fmt: skip
BESIDE = {
    "rate": "poisson", "burstiness": "gamma", "onoff": "onoff", "ramp": "ramp", "steps": "steps", "diurnal": "diurnal",
    "trace": "trace", "concurrency": "closed",
}  # fmt: skip


def scenario(key: str, value: str) -> str:
    """A scenario that is right but for this value of this key, as far as one can tell without reading the value."""
    section, _, leaf = key.rpartition(".")
    sections = {
        "workload": {"prompt_tokens": "5", "output_tokens": "5"},
        "load": {"arrivals": BESIDE.get(leaf, "poisson"), "rate": "5", "requests": "10"},
    }
    if leaf in ("ramp", "steps", "trace", "concurrency"):
        del sections["load"]["rate"]
    if leaf == "duration":
        del sections["load"]["requests"]
    top = "" if section else f"{key}: {value}\n"
    if section:
        sections.setdefault(section, {})[leaf] = value
    return top + "".join(
        f"{name}:\n" + "".join(f"  {k}: {v}\n" for k, v in held.items()) for name, held in sections.items()
    )


@settings(max_examples=400, deadline=None)
@example(key="name", value='{"\\n": [{"\\ud800\\udc00": null}]}', by_flag=False)
@given(key=st.sampled_from(list(KEYS)), value=WORDS, by_flag=st.booleans())
def test_any_value_of_any_key_is_taken_or_refused_in_a_sentence_with_its_place(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: str, by_flag: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(scenario("seed", "1") if by_flag else scenario(key, value), encoding="utf-8")
    said = ""
    try:
        found = load_scenario(path, [f"{key}={value}"] if by_flag else [], {})
    except ScenarioError as error:
        said = str(error)
    if said:
        assert "\n" not in said
        assert len(said) < 600
        assert said.startswith(("--set", f"{path}:"))
        assert key.rpartition(".")[2] in said or "not valid YAML" in said or "missing" in said
    else:
        json.dumps(found.to_dict(), allow_nan=False)
        assert found.digest()


LINES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [
            b'{"prompt": "a"}', b'{"prompt": 3}', b'{"prompt": "\\ud800"}', b"[" * 9999, b"9" * 9999,
            b'{"timestamp": 0, "input_length": 9, "output_length": 9}', b'{"timestamp": 0, "input_length": 1e9}',
            b'{"timestamp": 1e400}', b"\xef\xbb\xbf{}", b"TIMESTAMP,ContextTokens,GeneratedTokens", b"1e300,1,1",
            b"0,1,1", b'"' * 3, b"," * 200_000, b"\0", b"2024-13-01 00:00:00,1,1", b"0," + b"9" * 5000 + b",1",
        ]
    ),
)  # fmt: skip


def refusal(read: Callable[[str], object], path: str) -> str | None:
    """What a reader has against a file."""
    try:
        read(path)
    except BadValue as error:
        return error.text
    return None


@settings(max_examples=200, deadline=None)
@given(lines=st.lists(LINES, max_size=4))
def test_a_file_of_prompts_or_a_trace_of_any_lines_is_read_or_refused_by_its_name(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes(b"\n".join(lines))
    readers = (lambda p: Prompts(p).entries, lambda p: read_recording(p, "auto"), lambda p: read_recording(p, "azure"))
    for read in readers:
        assert str(path) in (refusal(read, str(path)) or str(path))


def test_what_an_editor_puts_before_or_between_lines_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes("\ufeff".encode() + '{"prompt": "a\u2028b"}\r\n\r\n{"prompt": "c"}\r\n'.encode())
    assert [entry.prompt for entry in Prompts(str(path)).entries] == ["a\u2028b", "c"]
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes("\ufeff".encode() + b'{"timestamp": 5, "input_length": 9, "output_length": 9}\r\n')
    assert read_recording(str(trace), "auto").format == "mooncake"


def test_a_file_that_is_too_large_for_a_scenario_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_bytes(b"# much ado\n" * 100_000)
    with pytest.raises(ScenarioError, match=r"1,100,000 bytes are too many for a scenario \(1,000,000 at most\)"):
        load_scenario(path, [], {})
    with pytest.raises(ScenarioError, match=r"a folder, not a scenario; write the path of a \.yaml file in it"):
        load_scenario(f"{tmp_path}/", [], {})
    with pytest.raises(ScenarioError, match=rf"no such file; did you mean {tmp_path}/large.yaml\?"):
        load_scenario(tmp_path / "larg.yaml", [], {})
    with pytest.raises(ScenarioError, match=r"smoke\.yaml: no such file; the scenario of that name is written smoke"):
        load_scenario(tmp_path / "none" / "smoke.yaml", [], {})
    with pytest.raises(ScenarioError, match=r"no such file: File name too long"):
        load_scenario(f"/{'x' * 300}.yaml", [], {})


def test_a_value_that_a_key_does_not_take_keeps_nothing_alive_that_its_reader_has() -> None:
    kept = load_scenario("smoke", [], {}).model_dump_json()

    def read() -> weakref.ref[set[int]]:
        large = {1}
        Scenario.model_validate(json.loads(kept))  # its lengths are tried as a number first
        return weakref.ref(large)

    gc.disable()
    try:
        assert read()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("engine", "flag", "key"),
    [
        ("vllm", "dtype=bfloat16", "server.precision"),
        ("vllm", "quantization=fp8", "server.precision"),
        ("vllm", "--max-num-seqs=1", "server.max_batch"),
        ("vllm", "max_num_seqs=null", "server.max_batch"),
        ("vllm", "max-model-len=64", "server.max_model_len"),
        ("vllm", "model=other", "server.model"),
        ("transformers", "precision=bfloat16", "server.precision"),
        ("transformers", "max_batch=1", "server.max_batch"),
        ("simulated", "max-batch=1", "server.max_batch"),
        ("simulated", "served_name=mine", "requests"),
        ("transformers", "served-model-name=mine", "requests"),
    ],
)
def test_what_a_key_says_is_said_where_figures_read_it(engine: str, flag: str, key: str) -> None:
    with pytest.raises(ScenarioError, match=rf"server\.args: \w+ is what {key} "):
        load_scenario("smoke", [f"server.engine={engine}", f"server.args.{flag}"], {})


def test_a_flag_is_written_once_and_a_quantized_model_may_name_its_dtype() -> None:
    with pytest.raises(ScenarioError, match="two of max-queue, max_queue are one flag"):
        load_scenario("smoke", ["server.args={max-queue: 4, max_queue: 5}"], {})
    load_scenario("smoke", ["server.engine=vllm", "server.precision=awq", "server.args.dtype=float16"], {})
