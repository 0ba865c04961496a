"""What every figure carries with it: where it is from, how to get it again, what made it."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from gapmeter.analysis.numbers import counted, plain, rate
from gapmeter.analysis.results.manifest import Hardware, Manifest, ManifestBase
from gapmeter.analysis.results.requests import LoadFacts
from gapmeter.analysis.results.run import INVALID, UNKNOWN, MadeBy, Provenance, RunFigures

_CODE_OF_FIGURES = ("analysis", "records", "report")  # the last: of the words among them, and of pages
# Neither what a compiler or an editor leaves there, nor C, which does the same as the Python beside it.
_SOURCES = (".py", ".yaml", ".html", ".css", ".js")


def provenance_of(manifest: Manifest, figures: RunFigures) -> Provenance:
    """The provenance of one analysed run."""
    return provenance_as_asked(
        manifest,
        manifest.target.model,
        engine=engine_words(manifest),
        load=load_words(figures.load),
        n=str(figures.counts.measured),
        validity="valid" if figures.verdict != INVALID else INVALID,
    )


def provenance_as_asked(manifest: ManifestBase, served: str | None = None, **own: str) -> Provenance:
    """The provenance of several loads together, or of one that goes on.

    ``own``: load, n, validity and what else is not as the manifest says. ``served``: the model that an
    attached server named, whatever the scenario would have launched.
    """
    server = manifest.asked.server
    facts = {
        "scenario": manifest.asked.name, "digest": manifest.scenario_digest, "model": server.model,
        "precision": server.precision, "engine": server.engine, "hardware": device_words(manifest),
        "date": manifest.started_wall.partition("T")[0] or UNKNOWN, "command": manifest.command,
    }  # fmt: skip
    if server.engine == "attach":
        facts |= {"model": served or UNKNOWN, "precision": UNKNOWN}
    return Provenance(**(facts | own))


def provenance_of_several(known: Sequence[Provenance], command: str, **own: str) -> Provenance:
    """The provenance of a comparison: what is not the same on all sides stands with all its values, but for ``own``."""
    names = ("scenario", "digest", "model", "precision", "engine", "hardware", "load", "validity")
    joined = {name: ", ".join(dict.fromkeys(getattr(each, name) for each in known)) for name in names}
    return known[0].model_copy(update={**joined, "command": command or "gapmeter compare", **own})


def engine_words(manifest: Manifest) -> str:
    """The engine and its version, where it is known."""
    engine = manifest.asked.server.engine
    versions = {**manifest.versions, **(manifest.target.versions or {})}
    return f"{engine} {versions.get(engine) or versions.get(f'{engine}-cpu') or ''}".strip()


def device_words(manifest: ManifestBase) -> str:
    """What the server ran on: this machine, but nobody knows what of a server on another."""
    return hardware_words(manifest.hardware) if manifest.is_server_here else UNKNOWN


def hardware_words(hardware: Hardware) -> str:
    """The GPUs where there are any, else the processor."""
    names = [gpu.partition(",")[0] for gpu in hardware.gpus]
    if names:
        kinds = dict.fromkeys(names)
        return ", ".join(f"{names.count(kind)} x {kind}" if names.count(kind) > 1 else kind for kind in kinds)
    return f"{hardware.cpu}, {counted(hardware.cores, 'core')}" if hardware.cpu else UNKNOWN


def load_words(load: LoadFacts) -> str:
    """How it was loaded: rate and loop, how long."""
    if load.loop == "closed":
        return f"{users_words(load)}, closed loop, {load.window_s:.0f} s"
    asked = rate_words(load)
    if load.unit != "requests":
        asked += f", {rate(load.delivered_rate)}"
    shape = ""  # what a mean rate does not say of the arrivals
    if load.rate_range:
        low, high = load.rate_range
        shape = f" on average ({load.arrivals}, {plain(low)} to {plain(high)})"
    elif load.arrivals in ("gamma", "trace"):
        shape = f" ({load.arrivals})"
    return f"{asked}{shape} open loop, {load.window_s:.0f} s"


def rate_words(load: LoadFacts) -> str:
    """The rate of an open loop, of requests or of conversations."""
    if load.unit == "requests":
        return rate(load.requested_rate or load.delivered_rate)
    return f"{plain(load.requested_rate)} {load.unit}/s"


def users_words(load: LoadFacts) -> str:
    """Who asks in a closed loop. The shape of a locustfile may change how many users there are."""
    if load.locustfile:
        return f"users of {load.locustfile}"
    users = counted(load.concurrency or 0, "user")
    return users if load.unit == "requests" else f"{users} in conversations"


@cache
def made_by() -> MadeBy:
    """``gapmeter``: the version installed; ``analysis``: 12 hex digits of the SHA-256 of the code of figures.

    A version number alone does not tell two checkouts apart.
    """
    try:
        version = importlib.metadata.version("gapmeter")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(path for package in _CODE_OF_FIGURES for path in (root / package).rglob("*")):
        if path.suffix in _SOURCES and path.is_file():
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return MadeBy(gapmeter=version, analysis=digest.hexdigest()[:12])
