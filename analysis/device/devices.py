"""What a device can do and what an hour of it costs: the catalogue of gpus.yaml as frozen values.

Figures are the vendors' data sheets', dense only; prices are defaults with a date and a source. A GPU computes by
itself in the number formats for which the catalogue has a figure; a CPU's follow from the flags that its kernel lists.
A precision beyond them is emulated.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from gapmeter.analysis.results.manifest import PrecisionSupport
from gapmeter.scenarios.errors import either

CPU = "CPU"
_FORMATS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_QUANTIZED = {"fp8": "fp8", "fp4": "fp4", "nvfp4": "fp4", "mxfp4": "fp4", "int8": "int8", "w8a8": "int8"}
_WORDS = {"fp32": "float32", "tf32": "tf32", "fp16": "float16", "bf16": "bfloat16"}
# Any one of these flags of /proc/cpuinfo means native arithmetic in the format (x86, then Arm).
_CPU_FLAGS = {
    "bf16": {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16", "svebf16"},
    "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"},
    "int8": {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"},
}
CPU_FLAGS = frozenset().union(*_CPU_FLAGS.values())


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
    bandwidth_gb_s: float | None
    tflops: Mapping[str, float | None] | None
    data_sheet: str | None
    price: ListPrice

    @property
    def is_cpu(self) -> bool:
        return self.key == CPU


class UnknownDevice(ValueError):
    """No entry has this name."""


@cache
def catalogue() -> Mapping[str, Device]:
    """Every device by its key, in the file's order."""
    loaded: dict[str, Any] = yaml.safe_load((files("gapmeter.analysis") / "gpus.yaml").read_text(encoding="utf-8"))
    devices = {}
    for key, entry in loaded.items():
        price = entry.pop("usd_per_hour", None) or entry.pop("usd_per_core_hour")
        listed = ListPrice(float(price["value"]), str(price["date"]), price["source"])
        aliases, nvml = tuple(entry.pop("aliases")), tuple(entry.pop("nvml"))
        devices[key] = Device(key=key, aliases=aliases, nvml=nvml, price=listed, **entry)
    return devices


def find_device(name: str) -> Device:
    """The device of this name or alias, whatever its case and punctuation. Raises UnknownDevice."""
    names = {_plain(word): device for device in catalogue().values() for word in (device.key, *device.aliases)}
    found = names.get(_plain(name))
    if found is not None:
        return found
    close = get_close_matches(_plain(name), list(names), n=6, cutoff=0.5)
    nearest = list(dict.fromkeys(names[word].key for word in close))[:3]
    hint = f"did you mean {' or '.join(nearest)}? " if nearest else ""
    raise UnknownDevice(f'"{name}" is not in the catalogue; {hint}known are {", ".join(catalogue())}')


def recognize(driver_name: str) -> Device | None:
    """The device that a driver (NVML, nvidia-smi) calls this; None for one that is not in the catalogue.

    ``driver_name`` may be a line of nvidia-smi, the name before the first comma. Another variant of a chip (an H100
    on a PCIe card, an A100 with 40 GB) is another device, and not recognized.
    """
    name = driver_name.partition(",")[0].strip()
    return next((device for device in catalogue().values() if name in device.nvml), None)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().removeprefix("nvidia").removeprefix("amd"))


def format_of(precision: str) -> str:
    """fp32, bf16, fp16, fp8, fp4 or int8; "" for a word that names none (awq and gptq compute in 16 bits)."""
    word = precision.lower()
    return _FORMATS.get(word) or next((name for start, name in _QUANTIZED.items() if word.startswith(start)), "")


def support(precision: str, device: Device | None, cpu_flags: Collection[str] = ()) -> PrecisionSupport:
    """Whether ``device`` computes in ``precision``; None: a device that the catalogue does not know.

    ``cpu_flags`` are those of /proc/cpuinfo, for a CPU.
    """
    name = format_of(precision)
    formats: tuple[str, ...] = ()
    if device is not None:
        formats = cpu_formats(cpu_flags) if device.is_cpu else tuple(f for f, v in (device.tflops or {}).items() if v)
    native = name in formats if name and device is not None else None
    return PrecisionSupport(
        precision=precision,
        format=name if device is not None else "",
        device=device.key if device is not None else "",
        native=native,
        supported=tuple(_WORDS.get(each, each) for each in formats),
        emulated=native is False,
    )


def cpu_formats(flags: Collection[str]) -> tuple[str, ...]:
    """The formats in which a CPU with these flags computes natively; fp32 always."""
    return ("fp32", *(name for name, any_of in _CPU_FLAGS.items() if any_of & set(flags)))


def refusal(found: PrecisionSupport) -> str:
    """Why a precision is refused, and what to write instead."""
    return (
        f"{found.device} has no native {found.precision}: the engine would emulate it, slower, and say nothing of a "
        f"device that has it; write {either(found.supported)}, or server.emulation: mark to run it marked as emulated"
    )
