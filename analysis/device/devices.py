"""What a device can do and what an hour of it costs: the catalogue of gpus.yaml as frozen values.

Figures are the vendors' data sheets', dense only; prices are defaults with a date and a source.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

CPU = "CPU"
FORMATS = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")


@dataclass(frozen=True, slots=True)
class ListPrice:
    """USD for an hour of one device (of one core for a CPU), when that held and who said so."""

    usd: float
    date: str
    source: str


@dataclass(frozen=True, slots=True)
class Device:
    """One entry. ``tflops``: dense peak by format, None where the device has no such arithmetic.

    A CPU's figures are None, since they depend on the processor: ``price`` is then that of a core.
    """

    key: str
    name: str
    aliases: tuple[str, ...]
    nvml: tuple[str, ...]
    memory_gb: float | None
    bandwidth_gb_s: float | None
    tflops: Mapping[str, float | None] | None
    tdp_w: float | None
    data_sheet: str | None
    price: ListPrice

    @property
    def is_cpu(self) -> bool:
        return self.key == CPU


class UnknownDevice(ValueError):
    """No entry has this name; ``nearest`` are names that look like it."""

    def __init__(self, name: str, nearest: tuple[str, ...]) -> None:
        self.name = name
        self.nearest = nearest
        hint = f"did you mean {' or '.join(nearest)}? " if nearest else ""
        super().__init__(f'"{name}" is not in the catalogue; {hint}known are {", ".join(catalogue())}')


@cache
def catalogue() -> Mapping[str, Device]:
    """Every device by its key, in the file's order."""
    loaded: dict[str, Any] = yaml.safe_load((files("gapmeter.analysis") / "gpus.yaml").read_text(encoding="utf-8"))
    return {key: _device(key, entry) for key, entry in loaded.items()}


def find_device(name: str) -> Device:
    """The device of this name or alias, whatever its case and punctuation. Raises UnknownDevice."""
    names = {_plain(word): device for device in catalogue().values() for word in (device.key, *device.aliases)}
    found = names.get(_plain(name))
    if found is not None:
        return found
    close = get_close_matches(_plain(name), list(names), n=6, cutoff=0.5)
    raise UnknownDevice(name, tuple(dict.fromkeys(names[word].key for word in close))[:3])


def recognise(driver_name: str) -> Device | None:
    """The device that a driver (NVML, nvidia-smi) calls this; None for one that is not in the catalogue.

    ``driver_name`` may be a line of nvidia-smi, the name before the first comma. Another variant of a chip (an H100
    on a PCIe card, an A100 with 40 GB) is another device, and not recognised.
    """
    name = driver_name.partition(",")[0].strip()
    return next((device for device in catalogue().values() if name in device.nvml), None)


def _device(key: str, entry: Mapping[str, Any]) -> Device:
    price = entry.get("usd_per_hour") or entry["usd_per_core_hour"]
    return Device(
        key=key,
        name=entry["name"],
        aliases=tuple(entry["aliases"]),
        nvml=tuple(entry["nvml"]),
        memory_gb=entry["memory_gb"],
        bandwidth_gb_s=entry["bandwidth_gb_s"],
        tflops=entry["tflops"],
        tdp_w=entry["tdp_w"],
        data_sheet=entry["data_sheet"],
        price=ListPrice(float(price["value"]), str(price["date"]), price["source"]),
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().removeprefix("nvidia").removeprefix("amd"))
