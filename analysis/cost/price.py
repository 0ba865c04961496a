"""What a replica costs by the hour: whose price, for which device, from the manifest of a run.

The scenario's own price wins over the catalogue's, and using the catalogue's is said. Where the scenario names no
device it is the machine's own, by the driver's name; a machine without a GPU is priced by its server's cores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gapmeter.analysis.device.devices import CPU, Device, UnknownDevice, catalogue, find_device, recognise
from gapmeter.analysis.results.cost import Price
from gapmeter.analysis.results.manifest import Manifest

_PARALLEL = (("tensor_parallel_size", "tp"), ("pipeline_parallel_size", "pp"), ("data_parallel_size", "dp"))
_SET_PRICE = "write cost.usd_per_hour"


class NoPrice(ValueError):
    """Nobody knows what this replica costs; the text says what to write."""


def price_of(manifest: Manifest) -> Price:
    """The price that a run's manifest leads to. Raises NoPrice."""
    asked, engine = manifest.scenario.get("cost") or {}, manifest.scenario["server"]
    here = own_device(manifest)
    device, label = _device(asked.get("gpu"), here, manifest)
    own = asked.get("usd_per_hour")
    count = int(asked.get("gpus_per_replica") or split_over(engine.get("args") or {}))
    if device is None and own is None:
        raise NoPrice(
            f"{label} is not in the catalogue; {_SET_PRICE}, or cost.gpu with one of {', '.join(catalogue())}"
        )
    on_cpu = device is not None and device.is_cpu
    units = (_cores(manifest) if own is None else 1) if on_cpu else count
    other = device is not None and here is not None and here.key != device.key
    usd = float(own) if own is not None else device.price.usd if device else 0.0
    return Price(
        device=label,
        units=units,
        usd_per_unit_hour=usd,
        source="the scenario's price" if own is not None else _source(device),
        is_default=own is None,
        utilisation=float(asked.get("utilisation") or 1.0),
        measured_on=here.key if here is not None and other else "",
        usd_per_hour=units * usd,
    )


def split_over(flags: Mapping[str, Any]) -> int:
    """The GPUs that an engine's flags spread one model over: tensor x pipeline x data parallel, 1 without them."""
    given = {str(name).strip("-").replace("-", "_"): value for name, value in flags.items()}
    sizes = [next((given[name] for name in names if name in given), 1) for names in _PARALLEL]
    return math.prod(int(size) for size in sizes if str(size).isdigit()) or 1


def own_device(manifest: Manifest) -> Device | None:
    """The device that a launched server ran on; None for a GPU outside the catalogue, or somebody else's server."""
    if manifest.scenario["server"]["engine"] == "attach":
        return None
    gpus = manifest.hardware.gpus
    return recognise(gpus[0]) if gpus else catalogue()[CPU]


def _device(named: str | None, here: Device | None, manifest: Manifest) -> tuple[Device | None, str]:
    """The device that is priced and its name. Raises NoPrice for one that only its owner can name."""
    if named is not None:
        try:
            device = find_device(named)
        except UnknownDevice as error:  # written by a version with another catalogue
            raise NoPrice(str(error)) from error
        return device, device.key
    if here is not None:
        return here, here.key
    gpus = manifest.hardware.gpus
    if manifest.scenario["server"]["engine"] == "attach" or not gpus:
        raise NoPrice("somebody else's server: nobody said which device it has; write cost.gpu, for instance H100-SXM")
    return None, gpus[0].partition(",")[0]


def _cores(manifest: Manifest) -> int:
    """The cores that the server had; all of the machine's where it was not confined."""
    return len(manifest.placement.server) or manifest.hardware.cores


def _source(device: Device | None) -> str:
    if device is None:
        return ""
    return f"a default price ({device.price.source}, {device.price.date})"
