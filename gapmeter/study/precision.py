"""Before anything is launched: does this machine compute in the precision that the scenario asks for?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gapmeter import errors
from gapmeter.analysis.device.devices import CPU, catalogue, recognise
from gapmeter.analysis.device.precision import CPU_FLAGS, refusal, support
from gapmeter.analysis.results.manifest import PrecisionSupport
from gapmeter.errors import UserError
from gapmeter.scenarios import Scenario
from gapmeter.study.manifest import describe_hardware


def check_precision(scenario: Scenario) -> dict[str, Any]:
    """What the manifest says of a launched server's precision; raises UserError for one that would be emulated.

    ``server.emulation: mark`` lets it run, marked. The simulated engine computes nothing; a GPU outside the catalogue
    is not judged.
    """
    server = scenario.server
    if server.engine == "simulated":
        return {}
    found = own_support(server.precision)
    if found.emulated and server.emulation == "refuse":
        where = f"{scenario.source}: " if scenario.source else ""
        raise UserError(f"{where}server.precision: {refusal(found)}", errors.BAD_SCENARIO)
    return {"precision": found.to_json()}


def own_support(precision: str) -> PrecisionSupport:
    """What this machine's first GPU, or without one its CPU, makes of a precision."""
    gpus = describe_hardware()["gpus"]
    device = recognise(gpus[0]) if gpus else catalogue()[CPU]
    return support(precision, device, cpu_flags())


def cpu_flags() -> frozenset[str]:
    """Those flags of this processor that tell of number formats, as /proc/cpuinfo lists them (x86 and Arm)."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, listed = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return CPU_FLAGS & set(listed.split())
    return frozenset()
