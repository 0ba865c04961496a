"""Results as plain dictionaries with their sentences in them, for what does not read the types yet. To be removed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gapmeter.analysis.cost.economics import SearchTrial, describe_search
from gapmeter.analysis.provenance import hardware_words as hardware_in_words
from gapmeter.analysis.results.cost import Cost, NoCost
from gapmeter.analysis.results.latency import Difference
from gapmeter.analysis.results.manifest import Manifest, Slo
from gapmeter.analysis.results.run import Provenance, RunResult, SloAnswer
from gapmeter.report import words


def read_run(folder: Path) -> dict[str, Any]:
    """``summary.json`` of a run's folder. Raises as ``RunResult.read``."""
    return run_document(RunResult.read(folder))


def run_document(result: RunResult) -> dict[str, Any]:
    """With every sentence beside the figures that it tells of; ``result`` has its words."""
    document, said = result.to_json(), result.words
    if said is None:
        return document
    document["headline"] = said.headline
    for row, sentence in zip(document["slo"], said.slo, strict=True):
        row["sentence"] = sentence
    for name in ("trust", "steady", "drift", "cost", "energy", "value"):
        document[name]["sentence"] = getattr(said, name)
    if document["closed_loop"]:
        document["closed_loop"]["sentence"] = said.closed_loop
    for name in ("tail", "upgrade"):
        sentences = getattr(said, name)
        for metric, sentence in sentences.items():
            document[name][metric]["sentence"] = sentence
        document[name]["sentence"] = next(iter(sentences.values()), None)
    document["tail"]["sentence"] = said.tail.get(result.tail.metric or "")
    for metric in ("ttft", "e2e"):
        if metric in document["compute"]:
            document["compute"][metric]["sentence"] = said.compute.get(metric)
    if document["telemetry"]:
        document["telemetry"]["sentence"] = said.telemetry
        document["telemetry"]["utilisation"]["sentence"] = said.utilisation
    document["roofline"]["sentence"] = said.roofline
    document["roofline"]["line"] = words.roofline_line(result.roofline)
    return document


def slo_row(answer: SloAnswer) -> dict[str, Any]:
    """One SLO's answer."""
    return answer.to_json() | {"sentence": words.slo_sentence(answer)}


def slos_of(manifest: Mapping[str, Any]) -> tuple[Slo, ...]:
    """The SLOs that a manifest lists; what it leaves out is None."""
    empty = dict.fromkeys(Slo.model_fields)
    return tuple(Slo.model_validate(empty | dict(slo)) for slo in manifest["slo"])


def cost_document(cost: Cost | NoCost, manifest: Manifest) -> dict[str, Any]:
    """A cost with its sentence."""
    simulated = manifest.scenario["server"]["engine"] == "simulated"
    return cost.to_json() | {"sentence": words.cost_sentence(cost, simulated=simulated)}


def search_economy(folder: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """The parts ``tokens_per_request``, ``cost``, ``energy`` and ``value`` for a search's summary; none without trials.

    ``summary`` has ``capacity`` with ``low``, ``high`` and ``trials``, each with ``rate``, ``verdict`` and ``folder``.
    The price follows a trial's manifest, which knows the server's cores.
    """
    trials: list[SearchTrial] = []
    manifest: Manifest | None = None
    for trial in summary["capacity"]["trials"]:
        path = folder / trial["folder"] if trial["folder"] else None
        if path is None or trial["verdict"] == "invalid" or not (path / RunResult.FILE).exists():
            continue
        manifest = manifest or Manifest.read(path)
        trials.append(SearchTrial(float(trial["rate"]), trial["verdict"] == "holds", RunResult.read(path)))
    low, high = summary["capacity"].get("low"), summary["capacity"].get("high")
    found = describe_search(low, high, manifest, trials) if manifest else None
    if found is None or manifest is None:
        return {}
    best = [trial for trial in trials if trial.held and (high is None or trial.rate <= high)]
    goodput = max(best, key=lambda trial: trial.rate).result.goodput.share_ci if best else None
    document = found.to_json()
    document["cost"] = cost_document(found.cost, manifest)
    document["energy"]["sentence"] = words.energy_sentence(found.energy)
    document["value"]["sentence"] = words.value_sentence(found.value, goodput)
    return document


def hardware_words(hardware: Mapping[str, Any]) -> str:
    """What it ran on."""
    return hardware_in_words(hardware.get("gpus") or (), hardware.get("cpu") or "", hardware.get("cores") or 0)


def floor_errors_ms(manifest: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """The load tester's own error at p50 and p99 by metric; nothing where it is unmeasured."""
    known = (manifest.get("calibration") or {}).get("generators") or {}
    found = known.get(manifest["scenario"]["load"].get("generator")) if known else None
    return {m: (found[f"{m}_p50_ms"], found[f"{m}_p99_ms"]) for m in ("ttft", "itl", "e2e")} if found else {}


def provenance(summary: Mapping[str, Any]) -> Provenance:
    """That of an analysed run."""
    return Provenance.model_validate(summary["provenance"])


def difference_sentence(found: Mapping[str, Any], a: str, b: str, device: str = "GPU") -> str:
    """Two groups of requests, from the keys of ``Difference``."""
    own = {name: found[name] for name in Difference.model_fields}
    return words.difference_sentence(Difference.model_validate(own), a, b, device)
