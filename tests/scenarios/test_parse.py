"""A scenario file becomes frozen values, or one sentence with its place and remedy."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gapmeter.scenarios.errors import ScenarioError
from gapmeter.scenarios.model import KEYS, Scenario
from gapmeter.scenarios.read import environment_name, load_scenario, provenance
from gapmeter.scenarios.shapes import Constant, Lognormal, Sampled, Uniform
from gapmeter.scenarios.values import SECOND_NS

LOAD_KEYS = ", ".join(key.removeprefix("load.") for key in KEYS if key.startswith("load."))
GOOD = """\
server:
  engine: transformers
workload:
  prompt_tokens: 64
  output_tokens: {uniform: [8, 16]}
load:
  arrivals: poisson
  rate: 8
  duration: 75s
"""


def written(tmp_path: Path, text: str, name: str = "mine.yaml") -> Path:
    path = tmp_path / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def parsed(tmp_path: Path, text: str, *overrides: str, **environment: str) -> Scenario:
    return load_scenario(written(tmp_path, text), overrides, environment)


def mistake(tmp_path: Path, text: str, *overrides: str, **environment: str) -> str:
    """The error's text, with the temporary folder's name taken out."""
    with pytest.raises(ScenarioError) as caught:
        parsed(tmp_path, text, *overrides, **environment)
    return str(caught.value).replace(f"{tmp_path}/", "")


TRACE = Path(__file__).parents[2] / "scenarios" / "traces" / "chat.jsonl"
FILE_MISTAKES = {
    "a rate with a unit": (
        "  rate: 8", "  rate: 20rps",
        'mine.yaml:8:9 load.rate: "20rps" is not a rate; write 20 (requests per second)',
    ),
    "a negative rate": (
        "  rate: 8", "  rate: -8",
        "mine.yaml:8:9 load.rate: -8 is not a rate; write 20 (requests per second)",
    ),
    "an infinite rate": (
        "  rate: 8", "  rate: .inf",
        'mine.yaml:8:9 load.rate: ".inf" is not a rate; write 20 (requests per second)',
    ),
    "a truth value for a number": (
        "  rate: 8", "  rate: true",
        "mine.yaml:8:9 load.rate: true is not a rate; write 20 (requests per second)",
    ),
    "a misspelt key": (
        "  rate: 8", "  raet: 8",
        f"mine.yaml:8:3 load.raet: no such key; did you mean load.rate? (load has {LOAD_KEYS})",
    ),
    "a key in the wrong group": (
        "  rate: 8", "  rate: 8\n  max_batch: 4",
        f"mine.yaml:9:3 load.max_batch: no such key; did you mean server.max_batch? (load has {LOAD_KEYS})",
    ),
    "a misspelt group": (
        "workload:", "worklaod:",
        ("mine.yaml:3:1 worklaod: no such key; did you mean workload? (the file has name, summary, slo, seed, repeat, "
        "sweep, server, workload, load, telemetry, cost)"),
    ),
    "an unknown engine": (
        "engine: transformers", "engine: vlm",
        ('mine.yaml:2:11 server.engine: "vlm" is not one of the choices; did you mean vllm? '
        "write transformers, vllm, attach or simulated"),
    ),
    "arrivals without their shape": (
        "arrivals: poisson", "arrivals: onoff",
        "mine.yaml:6:1 load.onoff: missing; write for instance onoff: {on: 2s, off: 6s}",
    ),
    "a burst without its quiet times": (
        "  arrivals: poisson\n", "  arrivals: onoff\n  onoff: {on: 2s}\n",
        "mine.yaml:8:10 load.onoff: off is missing; write for instance {on: 2s, off: 6s, quiet: 0.1}",
    ),
    "a misspelt part of a shape": (
        "  arrivals: poisson\n", "  arrivals: onoff\n  onoff: {on: 2s, of: 2s}\n",
        ("mine.yaml:8:23 load.onoff.of: no such key; did you mean off? "
        "write for instance {on: 2s, off: 6s, quiet: 0.1}"),
    ),
    "a wrong value inside a list of steps": (
        "  arrivals: poisson\n  rate: 8\n",
        "  arrivals: steps\n  steps: [{rate: 1, for: 2s}, {rate: fast, for: 2s}]\n",
        'mine.yaml:8:38 load.steps.rate: "fast" is not a rate; write 8 (requests per second, or 0 for none)',
    ),
    "a rate beside a ramp": (
        "  arrivals: poisson\n", "  arrivals: ramp\n  ramp: {from: 1, to: 5}\n",
        "mine.yaml:9:9 load.rate: ramp, steps and trace have rates or times of their own; leave it out",
    ),
    "a shape of other arrivals": (
        "  arrivals: poisson\n", "  arrivals: poisson\n  ramp: {from: 1, to: 5}\n",
        "mine.yaml:8:9 load.ramp: only ramp arrivals have it; write arrivals: ramp",
    ),
    "a day with two curves": (
        "  arrivals: poisson\n", "  arrivals: diurnal\n  diurnal: {day: 60s, swing: 0.5, hours: [1, 2]}\n",
        "mine.yaml:8:12 load.diurnal: hours say the whole curve; write hours, or swing and peak",
    ),
    "an unknown distribution of think times": (
        "  arrivals: poisson\n  rate: 8\n", "  arrivals: closed\n  concurrency: 2\n  think_time: {exponentail: 2s}\n",
        ("mine.yaml:9:29 load.think_time.exponentail: no such distribution; did you mean exponential? write 5s, "
        "{exponential: 5s}, {uniform: [1s, 9s]} or {lognormal: {median: 4s, p95: 20s}}"),
    ),
    "users who think in an open loop": (
        "  rate: 8\n", "  rate: 8\n  think_time: 2s\n",
        "mine.yaml:9:15 load.think_time: an open loop has no users who think; leave it out",
    ),
    "conversations at a trace's times": (
        "workload:\n  prompt_tokens: 64\n  output_tokens: {uniform: [8, 16]}\nload:\n  arrivals: poisson\n  rate: 8\n",
        ("workload:\n  kind: conversation\n  prompt_tokens: 64\n  output_tokens: 8\nload:\n  arrivals: trace\n"
        f"  trace: {{file: {TRACE}}}\n"),
        ("mine.yaml:8:13 load.arrivals: a trace has requests, no conversations; "
        "write for instance arrivals: poisson"),
    ),
    "turns of something that has none": (
        "  prompt_tokens: 64\n", "  prompt_tokens: 64\n  turns: 3\n",
        "mine.yaml:5:10 workload.turns: only conversations have turns; write kind: conversation",
    ),
    "several shared texts of nothing": (
        "  prompt_tokens: 64\n", "  prompt_tokens: 64\n  shared_prefixes: 3\n",
        "mine.yaml:5:20 workload.shared_prefixes: nothing is shared; write for instance shared_prefix: 0.5",
    ),
    "a kind that there is not": (
        "workload:", "workload:\n  kind: trace",
        ('mine.yaml:4:9 workload.kind: "trace" is not one of the choices; '
        "write chat, completion, conversation or file"),
    ),
    "a sweep": (
        "server:", "sweep: {server.max_batsh: [1, 2]}\nserver:",
        "mine.yaml:1:28 sweep.server.max_batsh: no such key to sweep over; did you mean server.max_batch?",
    ),
    "a swept key without its group": (
        "server:", "sweep: {rate: [4, 8]}\nserver:",
        "mine.yaml:1:16 sweep.rate: no such key to sweep over; did you mean load.rate?",
    ),
    "a negative price": (
        "server:", "cost: {usd_per_hour: -2.49}\nserver:",
        "mine.yaml:1:22 cost.usd_per_hour: -2.49 is not a price; write 2.49 (USD per hour)",
    ),
    "a service that is planned to carry nothing": (
        "server:", "cost: {utilisation: 0}\nserver:",
        "mine.yaml:1:21 cost.utilisation: 0 is out of range; write a number above 0 up to 1, for instance 0.5",
    ),
    "a duration that is a clock time": (
        "75s", "1:15",
        'mine.yaml:9:13 load.duration: "1:15" is not a duration; write 75s, 500ms or 2m',
    ),
    "an unknown unit of time": (
        "75s", "75 secs",
        'mine.yaml:9:13 load.duration: "75 secs" is not a duration; write 75s',
    ),
    "no time at all": (
        "75s", "0s",
        'mine.yaml:9:13 load.duration: "0s" is out of range; write a duration above 0 up to 30 days',
    ),
    "a wrong value deep inside": (
        "prompt_tokens: 64", "prompt_tokens: {lognormal: {median: 96, p95: 32}}",
        "mine.yaml:4:48 workload.prompt_tokens.lognormal.p95: 32 lies below the median, 96; write a p95 of 96 or more",
    ),
    "a cap below the median": (
        "prompt_tokens: 64", "prompt_tokens: {lognormal: {median: 96, p95: 256, max: 10}}",
        "mine.yaml:4:58 workload.prompt_tokens.lognormal.max: 10 lies below the median, 96; write 96 or more",
    ),
    "a pause's cap below its median": (
        "  rate: 8", "  rate: 8\n  think_time: {lognormal: {median: 4s, p95: 9s, max: 1s}}",
        "mine.yaml:9:54 load.think_time.lognormal.max: it lies below the median; write a longer one",
    ),
    "a missing part": (
        "prompt_tokens: 64", "prompt_tokens: {lognormal: {median: 96}}",
        "mine.yaml:4:30 workload.prompt_tokens.lognormal: p95 is missing; write for instance {median: 96, p95: 256}",
    ),
    "an unknown distribution": (
        "prompt_tokens: 64", "prompt_tokens: {lognorml: {median: 96, p95: 256}}",
        ("mine.yaml:4:29 workload.prompt_tokens.lognorml: no such distribution; did you mean lognormal? write a "
        "number, {uniform: [64, 128]}, {lognormal: {median: 96, p95: 256}} or {file: lengths.txt}"),
    ),
    "a range upside down": (
        "[8, 16]", "[16, 8]",
        "mine.yaml:5:28 workload.output_tokens.uniform: the lowest, 16, lies above the highest, 8; write [8, 16]",
    ),
    "half a token": (
        "[8, 16]", "[8, 16.5]",
        ("mine.yaml:5:32 workload.output_tokens.uniform: 16.5 is not a number of tokens; "
        "write a whole number, for instance 64"),
    ),
    "a file of lengths that is not there": (
        "prompt_tokens: 64", "prompt_tokens: {file: lengths.txt}",
        "mine.yaml:4:25 workload.prompt_tokens.file: cannot read lengths.txt: No such file or directory",
    ),
    "lengths forgotten": (
        "  prompt_tokens: 64\n", "",
        "mine.yaml:3:1 workload.prompt_tokens: missing; write how many tokens, for instance prompt_tokens: 96",
    ),
    "a rate forgotten": (
        "  rate: 8\n", "",
        "mine.yaml:6:1 load.rate: missing; write how many requests per second arrive, for instance rate: 8",
    ),
    "a duration forgotten": (
        "  duration: 75s\n", "",
        "mine.yaml:6:1 load.duration: missing; write how long to measure, for instance duration: 75s, or requests: 500",
    ),
    "duration and requests": (
        "duration: 75s", "duration: 75s\n  requests: 100",
        "mine.yaml:10:13 load.requests: write load.duration or load.requests, not both",
    ),
    "a rate in a closed loop": (
        "arrivals: poisson", "arrivals: closed",
        "mine.yaml:8:9 load.rate: a closed loop has no rate; write load.concurrency",
    ),
    "users in an open loop": (
        "arrivals: poisson", "concurrency: 4",
        "mine.yaml:7:16 load.concurrency: an open loop has no users; write load.rate, or arrivals: closed",
    ),
    "bursts that are not gamma": (
        "arrivals: poisson", "burstiness: 4",
        "mine.yaml:7:15 load.burstiness: only gamma arrivals have a burstiness; write arrivals: gamma",
    ),
    "gamma without its burstiness": (
        "arrivals: poisson", "arrivals: gamma",
        "mine.yaml:6:1 load.burstiness: missing; write for instance burstiness: 4 (1 is Poisson, more comes in bursts)",
    ),
    "attach to nowhere": (
        "engine: transformers", "engine: attach",
        "mine.yaml:1:1 server.url: missing; engine attach needs an address, for instance http://127.0.0.1:8000",
    ),
    "an address for an engine that we launch": (
        "engine: transformers", "engine: transformers\n  url: http://127.0.0.1:8000",
        "mine.yaml:3:8 server.url: only engine attach takes an address; write engine: attach",
    ),
    "an address without a scheme": (
        "engine: transformers", "engine: attach\n  url: 127.0.0.1:8000",
        'mine.yaml:3:8 server.url: "127.0.0.1:8000" is not a server\'s address; write http://127.0.0.1:8000',
    ),
    "an endpoint for an address": (
        "engine: transformers", "engine: attach\n  url: http://127.0.0.1:8000/v1/chat/completions",
        ('mine.yaml:3:8 server.url: "http://127.0.0.1:8000/v1/chat/completions" is one of a server\'s endpoints; '
        "write http://127.0.0.1:8000"),
    ),
    "a word of another tool's": (
        "  rate: 8", "  qps: 8",
        f"mine.yaml:8:3 load.qps: no such key (load has {LOAD_KEYS})",
    ),
    "a tokenizer for a model that we serve": (
        "engine: transformers", "tokenizer: ./elsewhere",
        "mine.yaml:2:14 server.tokenizer: a model that we serve has its own; leave it out",
    ),
    "more than a plan can hold": (
        "  rate: 8", "  rate: 1e6",
        "mine.yaml:8:9 load.rate: rate times duration is more than 2,000,000 requests; write less of either",
    ),
    "a key twice": (
        "  rate: 8", "  rate: 8\n  rate: 9",
        "mine.yaml:9:3 load.rate: duplicate key, first in line 8; remove one",
    ),
    "a key twice, once with its group's name before it": (
        "server:", "load.rate: 9\nserver:",
        "mine.yaml:9:9 load.rate: duplicate key, first in line 1; remove one",
    ),
    "a number as another language writes it": (
        "  rate: 8", "  rate: 0x14",
        'mine.yaml:8:9 load.rate: "0x14" is not a rate; write 20 (requests per second)',
    ),
    "a number with zeros before it": (
        "  rate: 8", "  rate: 008",
        'mine.yaml:8:9 load.rate: "008" is not a rate; write 8 (requests per second)',
    ),
    "digits of another script": (
        "  rate: 8", "  rate: \uff18",
        'mine.yaml:8:9 load.rate: "\uff18" is not a rate; write 20 (requests per second)',
    ),
    "a duration in days": (
        "duration: 75s", "duration: 2d",
        'mine.yaml:9:13 load.duration: "2d" is not a duration; write 75s, 500ms or 2m',
    ),
    "a group that is a list": (
        "server:\n  engine: transformers", "server: [transformers]",
        'mine.yaml:1:9 server: server needs keys below it, not ["transformers"]',
    ),
    "an SLO without a unit": (
        "server:", "slo:\n  - errors <= 1 %\n  - ttft p99 <= 500\nserver:",
        "mine.yaml:3:5 slo: the limit 500 lacks its unit; write 500 ms or 500 s",
    ),
    "an SLO twice": (
        "server:", "slo: [ttft p99 <= 500 ms, ttft  p99<=500 ms]\nserver:",
        "mine.yaml:1:27 slo: ttft p99 <= 500 ms appears twice; remove one",
    ),
    "one SLO instead of a list": (
        "server:", "slo: ttft p99 <= 500 ms\nserver:",
        'mine.yaml:1:6 slo: "ttft p99 <= 500 ms" is not a list of SLOs; write for instance ["ttft p99 <= 500 ms"]',
    ),
    "a name with a slash": (
        "server:", "name: a/b\nserver:",
        'mine.yaml:1:7 name: "a/b" is not a name; write for instance chat-p99',
    ),
    "a key without a name": (
        "server:", "[1, 2]: 3\nserver:",
        "mine.yaml:1:1: a key must be a word, not a list or mapping",
    ),
    "a tab": (
        "  rate: 8", "\trate: 8",
        "mine.yaml:8:1: not valid YAML: a tab where a line begins; indent with spaces",
    ),
    "an open bracket": (
        "[8, 16]", "[8, 16",
        "mine.yaml:5:34: not valid YAML: expected ',' or ']', but got '}' while parsing a flow sequence",
    ),
    "a value that contains itself": (
        "server:", "slo: &me [*me]\nserver:",
        "mine.yaml:1:6 slo: this value contains itself; write it out",
    ),
    "a control character": (
        "  rate: 8", "  rate: \x01 8",
        "mine.yaml:8:9: not valid YAML: character 0x01 is not allowed in a text; remove it",
    ),
    "a Python object": (
        "  rate: 8", "  rate: !!python/name:os.system 8",
        'mine.yaml:8:9 load.rate: "!!python/name:os.system" is not for scenarios; write the value without a tag',
    ),
    "a date": (
        "  rate: 8", "  rate: !!timestamp 2001-01-01",
        'mine.yaml:8:9 load.rate: "!!timestamp" is not for scenarios; write the value without a tag',
    ),
    "a truth value that is none": (
        "  rate: 8", "  rate: !!bool maybe",
        ("mine.yaml:8:9 load.rate: not plain YAML: a number or tag that cannot be read; write fewer digits, or the "
        "value without its tag"),
    ),
    "a number without end": (
        "  rate: 8", f"  rate: {'9' * 400}",
        f'mine.yaml:8:9 load.rate: {"9" * 57}... is not a rate; write 20 (requests per second)',
    ),
    "a time without end": (
        "75s", f"{'9' * 400}s",
        f'mine.yaml:9:13 load.duration: "{"9" * 56}... is out of range; write a duration above 0 up to 30 days',
    ),
    "minutes": (
        "75s", "5min",
        'mine.yaml:9:13 load.duration: "5min" is not a duration; write 5m',
    ),
    "a rate that nobody can mean": (
        "  rate: 8", "  rate: 1e300",
        "mine.yaml:8:9 load.rate: 1e+300 is out of range; write a rate from 1e-05 to 1,000,000 (requests per second)",
    ),
    "requests that take years": (
        "  rate: 8\n  duration: 75s", "  rate: 0.001\n  requests: 200000",
        "mine.yaml:9:13 load.requests: 200,000 at 0.001 a second take 2,315 days; write fewer",
    ),
    "bursts too short to be drawn": (
        "  arrivals: poisson\n", "  arrivals: onoff\n  onoff: {on: 1e-9, off: 1e-9}\n",
        "mine.yaml:8:15 load.onoff.on: 1e-09 is out of range; write a duration from 0.001 s to 30 days",
    ),
    "an engine flag that JSON cannot hold": (
        "engine: transformers", "engine: transformers\n  args: {a: [1, 1e999]}",
        "mine.yaml:3:17 server.args.a: Infinity is too large a number; write less, or text in quotes",
    ),
    "a port that is none": (
        "engine: transformers", "engine: attach\n  url: http://127.0.0.1:99999",
        ('mine.yaml:3:8 server.url: "http://127.0.0.1:99999" is not a server\'s address: Port out of range 0-65535; '
        "write for instance http://127.0.0.1:8000, or http://[::1]:8000 for IPv6"),
    ),
    "half a character": (
        "server:", 'summary: "\\ud800"\nserver:',
        "mine.yaml:1:10 summary: character 0xd800 is not allowed in a text; remove it",
    ),
    "lists in lists in lists": (
        "server:", f"slo: {'[' * 40}{']' * 40}\nserver:",
        "mine.yaml:1:36 slo: lists and mappings in each other, more than 30 deep; write fewer",
    ),
    "aliases that unfold without end": (
        "server:",
        "slo:\n  - &a0 [x]\n" + "".join(f"  - &a{n} [{(f'*a{n - 1}, ' * 9)}]\n" for n in range(1, 9)) + "server:",
        "mine.yaml:7:5 slo: more than 100,000 values with its aliases (*name) written out; write fewer",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "says"), FILE_MISTAKES.values(), ids=FILE_MISTAKES)
def test_a_mistake_in_a_file_names_line_column_key_and_remedy(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in GOOD
    assert mistake(tmp_path, GOOD.replace(old, new, 1)) == says


FLAG_MISTAKES = {
    "load.rate=20rps": '--set load.rate: "20rps" is not a rate; write 20 (requests per second)',
    "load.rate": '--set: "load.rate" is not KEY=VALUE; write for instance --set load.rate=8',
    "load={rate: 8": "--set load: \"{rate: 8\" is not valid YAML: expected ',' or '}', but got '<stream end>' while "
    "parsing a flow mapping",
    "load=8": "--set load: this is a group of keys; write --set GROUP.KEY=VALUE",
    "rate=8": "--set rate: no such key; did you mean load.rate? (the file has name, summary, slo, seed, repeat, sweep, "
    "server, workload, load, telemetry, cost)",
    "load.warmup=soon": '--set load.warmup: "soon" is not a duration; write auto, 75s, 500ms or 2m',
    "workload.output_tokens.uniform.low=8": "--set workload.output_tokens.uniform: "
    '{"low": 8} is not a range; write for instance [64, 128]',
    "load.arrivals=closed": "mine.yaml:6:1 load.concurrency: missing; write how many users ask, for instance "
    "concurrency: 16",
    "server.args=8": "--set server.args: 8 is not a mapping of engine flags; write for instance {num_blocks: 256}",
}  # fmt: skip


@pytest.mark.parametrize(("flag", "says"), FLAG_MISTAKES.items(), ids=FLAG_MISTAKES)
def test_a_mistake_in_a_flag_names_the_flag(tmp_path: Path, flag: str, says: str) -> None:
    assert mistake(tmp_path, GOOD, flag) == says


COUNTED = {
    "a warm-up of minutes": ("load.rate=10000", "load.warmup=10m"),
    "constant arrivals": ("load.arrivals=constant", "load.rate=1e6", "load.warmup=1h"),
    "a ramp": ("load.arrivals=ramp", "load.ramp={from: 1e4, to: 1, over: 1s}", "load.warmup=10m"),
    "steps": ("load.arrivals=steps", "load.steps=[{rate: 1e4, for: 1s}, {rate: 1, for: 1s}]", "load.warmup=10m"),
    "as many as there may be behind it": ("load.requests=2000000", "load.warmup=1s"),
}  # fmt: skip


@pytest.mark.parametrize("flags", COUNTED.values(), ids=COUNTED)
def test_the_requests_of_a_warm_up_are_planned_like_those_that_are_measured(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    says = "--set load.warmup: with it there are more than 2,000,000 requests; write a shorter one"
    assert mistake(tmp_path, GOOD, "load.requests=100", *flags) == says


def test_a_warm_up_has_the_first_rate_and_changes_as_often_as_what_is_measured(tmp_path: Path) -> None:
    steep = ("load.arrivals=ramp", "load.ramp={from: 1, to: 1e4, over: 1s}", "load.requests=100", "load.warmup=10m")
    assert parsed(tmp_path, GOOD, *steep).load.requests == 100
    days = ("load.arrivals=diurnal", "load.diurnal={day: 1s}", "load.rate=0.1", "load.requests=1", "load.warmup=100h")
    assert "load.diurnal: the rate changes more than 1,000,000 times" in mistake(tmp_path, GOOD, *days)


def test_a_mistake_in_the_environment_names_the_variable(tmp_path: Path) -> None:
    says = 'GAPMETER_LOAD_RATE load.rate: "fast" is not a rate; write 20 (requests per second)'
    assert mistake(tmp_path, GOOD, GAPMETER_LOAD_RATE="fast") == says
    says = "GAPMETER_LOAD_RAET: no key of a scenario has this name; did you mean GAPMETER_LOAD_RATE?"
    assert mistake(tmp_path, GOOD, GAPMETER_LOAD_RAET="8") == says
    for name in ("GAPMETER_LOAD", "GAPMETER_SERVER", "GAPMETER_SLOS", "GAPMETER_SEEDS"):
        assert mistake(tmp_path, GOOD, **{name: "{}"}).startswith(f"{name}: no key of a scenario has this name; ")


def test_other_variables_of_ours_and_empty_ones_are_no_mistake(tmp_path: Path) -> None:
    scenario = parsed(tmp_path, GOOD, GAPMETER_LOAD_RATE="", PATH="/bin", LOAD="1")
    assert scenario.load.rate == 8
    others = (
        "API_KEY",
        "CACHE",
        "PROBE_DIR",
        "PROBE_KERNELS",
        "PYTHON_ONLY",
        "TRUTH_DIR",
        "VLLM_PYTHON",
        "WORKER_SECRET",
    )
    parsed(tmp_path, GOOD, **{f"GAPMETER_{name}": "x" for name in others})


def test_what_only_a_launched_server_heeds_is_refused_beside_an_address_but_in_the_file(tmp_path: Path) -> None:
    url, says = "server.url=http://127.0.0.1:9", "cannot be changed on a server that runs already"
    for key, value in {"server.max_batch": 1, "server.precision": "bfloat16", "server.args.max_queue": 4}.items():
        assert f"{says}; " in mistake(tmp_path, GOOD, url, f"{key}={value}")
    text = mistake(tmp_path, GOOD, url, GAPMETER_SERVER_MAX_BATCH="1")
    assert text.startswith(f"GAPMETER_SERVER_MAX_BATCH: server.max_batch {says}")
    launched = GOOD.replace("transformers", "transformers\n  max_batch: 1\n  precision: bfloat16")
    assert parsed(tmp_path, launched, url).server.engine == "attach"
    parsed(tmp_path, GOOD, url, "server.max_model_len=512", "cost.usd_per_hour=2")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "mine.yaml:1:1: the file is empty; it needs at least server, workload or load"),
        ("# only words\n", "mine.yaml:1:1: the file is empty; it needs at least server, workload or load"),
        ("just words\n", 'mine.yaml:1:1: a scenario is a mapping of keys, not "just words"'),
    ],
)
def test_a_file_without_keys_says_so(tmp_path: Path, text: str, says: str) -> None:
    assert mistake(tmp_path, text) == says


def test_a_file_that_is_no_text_says_so(tmp_path: Path) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"load: \xff\xfe")
    with pytest.raises(
        ScenarioError, match=r"binary.yaml: cannot read it: not UTF-8 text \(byte 0xff at 6\); save it as UTF-8"
    ):
        load_scenario(path, environment={})
    with pytest.raises(ScenarioError, match=r"none.yaml: no such file"):
        load_scenario(tmp_path / "none.yaml", environment={})


def test_an_unknown_name_lists_those_there_are_nearest_first() -> None:
    with pytest.raises(ScenarioError, match=r'^no scenario "chat-p9"; there are chat-p99, .*smoke'):
        load_scenario("chat-p9", environment={})


def test_a_file_s_name_with_a_typo_names_the_file_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, GOOD, "t.yaml")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ScenarioError, match=r'^no scenario "t.yam"; did you mean t.yaml\?$'):
        load_scenario("t.yam", environment={})


def test_a_name_is_found_in_the_users_own_folder_before_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scenarios").mkdir()
    written(tmp_path, GOOD.replace("rate: 8", "rate: 9"), "scenarios/smoke.yaml")
    monkeypatch.chdir(tmp_path)
    assert load_scenario("smoke", environment={}).load.rate == 9
    assert load_scenario("chat-p99", environment={}).name == "chat-p99"


def test_a_file_is_parsed_into_the_values_it_says(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("5\n7\n11\n")
    text = """\
        summary: All of it.
        server: {engine: vllm, precision: bf16, max_batch: 4, args: {enforce_eager: true}}
        workload:
          kind: completion
          prompt_tokens: {lognormal: {median: 96, p95: 256, max: 512}}
          output_tokens: {file: lengths.txt}
          shared_prefix: 0.25
        load: {arrivals: gamma, burstiness: 4, rate: 2.5, requests: 100, warmup: 500ms, timeout: 2m, processes: 2}
        slo: ["ttft p99<=500ms", itl p99.9 <= 0.1 s, errors <= 0.5%]
        seed: 7
        repeat: 3
    """
    scenario = parsed(tmp_path, text)
    assert (scenario.name, scenario.seed, scenario.repeat) == ("mine", 7, 3)
    assert (scenario.server.precision, scenario.server.args) == ("bfloat16", {"enforce_eager": True})
    assert scenario.workload.prompt_tokens == Lognormal(lognormal={"median": 96, "p95": 256, "max": 512})
    assert scenario.workload.output_tokens == Sampled(file=str(tmp_path / "lengths.txt"))
    assert scenario.workload.output_tokens.values == (5, 7, 11)
    load = scenario.load
    assert (load.rate, load.burstiness, load.requests, load.duration_ns) == (2.5, 4, 100, None)
    assert (load.warmup_ns, load.timeout_ns, load.loop) == (500_000_000, 120_000_000_000, "open")
    assert [(s.metric, s.percentile, s.limit_ns, s.limit_share, s.text) for s in scenario.slo] == [
        ("ttft", 99, 500_000_000, None, "ttft p99 <= 500 ms"),
        ("itl", 99.9, 100_000_000, None, "itl p99.9 <= 0.1 s"),
        ("errors", None, None, 0.005, "errors <= 0.5 %"),
    ]


def test_numbers_are_read_as_people_type_them(tmp_path: Path) -> None:
    assert parsed(tmp_path, GOOD, "load.rate=1e1").load.rate == 10
    assert parsed(tmp_path, GOOD, "load.duration=0.5").load.duration_ns == 500_000_000
    assert parsed(tmp_path, GOOD, "workload.prompt_tokens=12").workload.prompt_tokens == Constant(12)
    assert parsed(tmp_path, GOOD, "server.model=no").server.model == "no"


def test_flags_win_over_the_environment_over_the_file_over_defaults(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    environment = {"GAPMETER_LOAD_RATE": "2", "GAPMETER_LOAD_TIMEOUT": "9s"}
    settings = {s.key: s for s in provenance(path, ["load.rate=3"], environment)}
    assert list(KEYS) == list(settings)
    sources = {key: (setting.value, setting.source.removeprefix(f"{tmp_path}/")) for key, setting in settings.items()}
    assert sources["load.rate"] == (3, "--set")
    assert sources["load.timeout"] == (9, "GAPMETER_LOAD_TIMEOUT")
    assert sources["load.duration"] == (75, "mine.yaml:9")
    assert sources["load.processes"] == (1, "default")
    assert sources["load.warmup"] == ("auto", "default")


def test_every_key_can_be_set_from_the_environment(tmp_path: Path) -> None:
    names = [environment_name(key) for key in KEYS]
    assert len(set(names)) == len(KEYS)
    scenario = parsed(tmp_path, GOOD, GAPMETER_SLO="[e2e p50 <= 1 s]", GAPMETER_SERVER_MAX_BATCH="3")
    assert (scenario.slo[0].text, scenario.server.max_batch) == ("e2e p50 <= 1 s", 3)


def test_a_part_of_a_value_can_be_overridden(tmp_path: Path) -> None:
    text = GOOD.replace("prompt_tokens: 64", "prompt_tokens: {lognormal: {median: 96, p95: 256}}")
    text = text.replace("engine: transformers", "args: {num_blocks: 256, deep: {a: 1}}")
    longer = parsed(tmp_path, text, "workload.prompt_tokens.lognormal.p95=512").workload.prompt_tokens
    assert longer == Lognormal(lognormal={"median": 96, "p95": 512})
    uniform = parsed(tmp_path, text, "workload.prompt_tokens={uniform: [1, 2]}").workload.prompt_tokens
    assert uniform == Uniform(uniform=(1, 2))
    args = parsed(tmp_path, text, "server.args.num_blocks=8", "server.args.more=x").server.args
    assert args == {"num_blocks": 8, "deep": {"a": 1}, "more": "x"}
    assert parsed(tmp_path, text, "load={rate: 3, duration: 2s}").load.rate == 3


def test_a_later_layer_replaces_what_excludes_it(tmp_path: Path) -> None:
    counted = parsed(tmp_path, GOOD, "load.requests=20").load
    assert (counted.requests, counted.duration_ns) == (20, None)
    closed = parsed(tmp_path, GOOD, "load.arrivals=closed", "load.concurrency=4").load
    assert (closed.loop, closed.concurrency, closed.rate) == ("closed", 4, None)
    gamma = GOOD.replace("arrivals: poisson", "arrivals: gamma\n  burstiness: 4")
    assert parsed(tmp_path, gamma, "load.arrivals=poisson").load.burstiness is None
    with pytest.raises(ScenarioError, match=r"write load.duration or load.requests, not both"):
        parsed(tmp_path, GOOD, "load.requests=20", "load.duration=3s")


def test_an_address_alone_means_attach_and_loses_its_version_path(tmp_path: Path) -> None:
    assert parsed(tmp_path, GOOD, "server.url=http://127.0.0.1:8000//v1").server.url == "http://127.0.0.1:8000"
    server = parsed(tmp_path, GOOD, "server.url=http://127.0.0.1:8000/v1/").server
    assert (server.engine, server.url) == ("attach", "http://127.0.0.1:8000")


def test_null_unsets_what_the_file_says(tmp_path: Path) -> None:
    assert "load.duration: missing" in mistake(tmp_path, GOOD, "load.duration=null")
    assert parsed(tmp_path, GOOD + "  timeout: 5s\n", "load.timeout=").load.timeout_ns == 60_000_000_000


def test_a_closed_loop_needs_a_user_for_each_process_and_warms_up_by_requests(tmp_path: Path) -> None:
    closed = ("load.arrivals=closed", "load.concurrency=2", "load.requests=9")
    assert "3 processes cannot share 2 users" in mistake(tmp_path, GOOD, *closed, "load.processes=3")
    assert "warms up by requests; write auto or 0" in mistake(tmp_path, GOOD, *closed, "load.warmup=2s")
    assert parsed(tmp_path, GOOD, *closed, "load.warmup=0").load.warmup_ns == 0


lengths = st.one_of(
    st.integers(1, 9999),
    st.tuples(st.integers(1, 999), st.integers(0, 999)).map(lambda r: {"uniform": [r[0], r[0] + r[1]]}),
    st.tuples(st.floats(1, 999), st.floats(0, 999)).map(lambda r: {"lognormal": {"median": r[0], "p95": r[0] + r[1]}}),
)
times = st.integers(1, 10**10).map(lambda ns: ns / 1e9)
periods = st.integers(10**9, 10**10).map(lambda ns: ns / 1e9)
thinking = st.one_of(
    times,
    times.map(lambda s: {"exponential": s}),
    st.tuples(times, times).map(lambda pair: {"uniform": sorted(pair)}),
    st.tuples(times, times).map(lambda pair: {"lognormal": {"median": min(pair), "p95": max(pair)}}),
)
loads = st.one_of(
    st.fixed_dictionaries({"arrivals": st.sampled_from(["constant", "poisson"]), "rate": st.floats(0.01, 1000)}),
    st.fixed_dictionaries(
        {"arrivals": st.just("gamma"), "rate": st.floats(0.01, 1000), "burstiness": st.floats(0.1, 9)}
    ),
    st.fixed_dictionaries({"arrivals": st.just("closed"), "concurrency": st.integers(1, 99), "think_time": thinking}),
    st.fixed_dictionaries(
        {
            "arrivals": st.just("onoff"), "rate": st.floats(1, 1000),
            "onoff": st.fixed_dictionaries({"on": periods, "off": periods, "quiet": st.floats(0, 1)}),
        }
    ),
    st.fixed_dictionaries(
        {
            "arrivals": st.just("ramp"),
            "ramp": st.fixed_dictionaries({"from": st.floats(0, 99), "to": st.floats(0.1, 99), "over": times}),
        }
    ),
    st.fixed_dictionaries(
        {
            "arrivals": st.just("steps"),
            "steps": st.lists(
                st.fixed_dictionaries({"rate": st.floats(0.1, 99), "for": times}), min_size=1, max_size=4
            ),
        }
    ),
    st.fixed_dictionaries(
        {
            "arrivals": st.just("diurnal"), "rate": st.floats(1, 1000),
            "diurnal": st.fixed_dictionaries({"day": periods, "swing": st.floats(0, 1), "peak": st.floats(0, 24)}),
        }
    ),
)  # fmt: skip
spans = st.one_of(
    st.integers(1, 10**12).map(lambda ns: {"duration": ns / 1e9}), st.integers(1, 20_000).map(lambda n: {"requests": n})
)


@settings(max_examples=60, deadline=None)
@given(prompt=lengths, output=lengths, load=loads, span=spans, seed=st.integers(0, 2**63 - 1))
def test_a_resolved_scenario_written_out_parses_back_to_itself(
    tmp_path_factory: pytest.TempPathFactory, prompt: object, output: object, load: dict[str, object],
    span: dict[str, object], seed: int,
) -> None:  # fmt: skip
    folder = tmp_path_factory.getbasetemp()
    document = {"workload": {"prompt_tokens": prompt, "output_tokens": output}, "load": load | span, "seed": seed}
    first = load_scenario(written(folder, yaml.safe_dump(document)), environment={})
    again = load_scenario(written(folder, yaml.safe_dump(first.to_dict())), environment={})
    assert again.to_dict() == first.to_dict()
    assert again.digest() == first.digest()


def test_the_digest_follows_the_values_and_not_the_words(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("5 7")
    text = GOOD.replace("prompt_tokens: 64", "prompt_tokens: {file: lengths.txt}")
    digest = parsed(tmp_path, text).digest()
    assert parsed(tmp_path, text, "summary=other words", "name=other").digest() == digest
    assert parsed(tmp_path, text, "load.rate=9").digest() != digest
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "others.txt").write_text("5 7")
    moved = parsed(elsewhere, text.replace("lengths.txt", "others.txt"))
    assert moved.digest() == digest
    assert moved.contents() == parsed(tmp_path, text).contents()
    (tmp_path / "lengths.txt").write_text("5 8")
    assert parsed(tmp_path, text).digest() != digest
    assert parsed(tmp_path, text).contents() != moved.contents()
    turns = text.replace("{file: lengths.txt}", "64\n  kind: conversation\n  turns: {file: lengths.txt}")
    before = parsed(tmp_path, turns).digest()
    (tmp_path / "lengths.txt").write_text("2 3")
    assert parsed(tmp_path, turns).digest() != before


@pytest.mark.parametrize(
    ("overrides", "duration_s", "longest_s"),
    [
        ((), 132, 240),
        (("load.duration=20s",), 20, 20),
        (("load.duration=20s", "load.patience=60s"), 20, 60),
        (("load.patience=5m",), 132, 300),
        (("load.patience=10s",), 132, 132),
        (("load.requests=48",), None, None),
        (("load.arrivals=ramp", "load.ramp={from: 2, to: 20}", "load.patience=5m"), 132, 132),
    ],
)
def test_a_length_that_is_asked_for_later_than_a_patience_is_exact(
    overrides: tuple[str, ...], duration_s: int | None, longest_s: int | None
) -> None:
    load = load_scenario("chat-p99", overrides, environment={}).load
    assert load.duration_ns == (duration_s and duration_s * SECOND_NS)
    assert load.longest_ns == (longest_s and longest_s * SECOND_NS)
