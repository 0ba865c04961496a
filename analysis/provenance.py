"""What goes along with every figure that leaves the tool: where it is from, and how to get it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gapmeter.report.head import engine_words, load

UNKNOWN = "unknown"
STAMPS = ("INVALID", "NOT COMPARABLE")  # what a validity begins with whose figures must not be taken at their word


@dataclass(frozen=True, slots=True)
class Provenance:
    """Eleven facts about the run, or the runs, behind a figure; each as text, ``n`` too."""

    scenario: str
    digest: str
    model: str
    precision: str
    engine: str
    hardware: str
    load: str
    n: str
    validity: str
    date: str
    command: str

    def line(self) -> str:
        """All of it in one line of text; what is unknown is left out, but for the validity."""
        named = " ".join(part for part in (self.scenario, self.digest) if part and part != UNKNOWN)
        many = f"n = {self.n}" if self.n != UNKNOWN else ""
        parts = [named, self.model, self.precision, self.engine, self.hardware, self.load, many, self.validity,
                 self.date, self.command]  # fmt: skip
        return " · ".join(part for part in parts if part and part != UNKNOWN)

    def facts(self) -> dict[str, str]:
        """The same, by name, for JSON and for the metadata of files."""
        return asdict(self)

    def comments(self, sign: str = "# ") -> str:
        """The same as lines of comment, for the head of a CSV or a log; ends with a line feed."""
        return "".join(f"{sign}{name}: {' '.join(value.split())}\n" for name, value in self.facts().items())

    @property
    def stamp(self) -> str | None:
        """What must be written across every picture, if anything."""
        return next((word for word in STAMPS if self.validity.startswith(word)), None)


def provenance_of(manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> Provenance:
    """The provenance of one analysed run."""
    scenario = manifest.get("scenario") or {}
    server, target = scenario.get("server") or {}, manifest.get("target") or {}
    attached = server.get("engine") == "attach"  # the scenario's model is then whom it would have launched
    return Provenance(
        scenario=str(summary.get("name") or scenario.get("name") or UNKNOWN),
        digest=str(manifest.get("scenario_digest", "")),
        model=str((not attached and server.get("model")) or target.get("model") or UNKNOWN),
        precision=UNKNOWN if attached else str(server.get("precision") or UNKNOWN),
        engine=engine_words(manifest),
        hardware=hardware_words(manifest.get("hardware") or {}),
        load=load(summary).partition(", n = ")[0],
        n=str(summary["counts"]["measured"]),
        validity=_validity(summary),
        date=str(manifest.get("started_wall", UNKNOWN)).partition("T")[0],
        command=str(manifest.get("command", UNKNOWN)),
    )


def hardware_words(hardware: Mapping[str, Any]) -> str:
    """What it ran on: the GPUs where there are any, else the processor."""
    gpus = [str(gpu).partition(",")[0] for gpu in hardware.get("gpus") or []]
    if gpus:
        kinds = dict.fromkeys(gpus)
        return ", ".join(f"{gpus.count(kind)} x {kind}" if gpus.count(kind) > 1 else kind for kind in kinds)
    return f"{hardware['cpu']}, {hardware.get('cores')} cores" if hardware.get("cpu") else UNKNOWN


def _validity(summary: Mapping[str, Any]) -> str:
    return "valid" if summary["verdict"] != "INVALID" else "INVALID"
