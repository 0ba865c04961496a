"""NVIDIA GPUs through NVML: energy, power, clocks, throttling, temperature, memory, use; PCIe apart, for it is slow.

Units are NVML's own, with the unit in each name: mJ since the driver was loaded, mW, MHz, degrees Celsius, bytes, per
cent of the time in which any kernel ran. NVML gives PCIe throughput as the average over 20 ms that it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from gapmeter.servers.telemetry import About, Absent, ReadFailed, Row

# What one reading gives: the fields of a row, from a handle.
Reading = Callable[[ModuleType, Any], Row]


def _memory(nvml: ModuleType, handle: Any) -> Row:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return {"memory_used_bytes": int(memory.used), "memory_total_bytes": int(memory.total)}


def _use(nvml: ModuleType, handle: Any) -> Row:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    return {"busy_percent": int(rates.gpu), "memory_busy_percent": int(rates.memory)}


READINGS: Mapping[str, Reading] = {
    "energy": lambda nvml, handle: {"energy_mj": int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))},
    "power": lambda nvml, handle: {"power_mw": int(nvml.nvmlDeviceGetPowerUsage(handle))},
    "SM clock": lambda nvml, handle: {"sm_mhz": int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))},
    "memory clock": lambda nvml, handle: {"memory_mhz": int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))},
    "throttle reasons": lambda nvml, handle: {
        "throttle_mask": int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    },
    "temperature": lambda nvml, handle: {
        "temperature_c": int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    },
    "memory": _memory,
    "utilisation": _use,
}
PCIE_READINGS: Mapping[str, Reading] = {
    "PCIe received": lambda nvml, handle: {
        "pcie_rx_kb_s": int(nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES))
    },
    "PCIe sent": lambda nvml, handle: {
        "pcie_tx_kb_s": int(nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES))
    },
}
_THROTTLE_WORDS = {
    "SwPowerCap": "power cap",
    "HwSlowdown": "hardware slowdown",
    "SyncBoost": "kept in step with another GPU",
    "SwThermalSlowdown": "too hot (driver)",
    "HwThermalSlowdown": "too hot (hardware)",
    "HwPowerBrakeSlowdown": "power brake",
}
_ABOUT: Mapping[str, Callable[[ModuleType, Any], Any]] = {
    "name": lambda nvml, handle: _text(nvml.nvmlDeviceGetName(handle)),
    "uuid": lambda nvml, handle: _text(nvml.nvmlDeviceGetUUID(handle)),
    "max_sm_mhz": lambda nvml, handle: int(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
    "power_limit_mw": lambda nvml, handle: int(nvml.nvmlDeviceGetEnforcedPowerLimit(handle)),
    "pcie_generation": lambda nvml, handle: int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
    "pcie_width": lambda nvml, handle: int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
    "pids": lambda nvml, handle: [int(p.pid) for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)],
}


class Gpus:
    """The GPUs that the server may use, read together; a reading that a GPU does not support is left out."""

    def __init__(self, nvml: ModuleType, handles: Mapping[int, Any], name: str, readings: Mapping[str, Reading]):
        self.name = name
        self._nvml, self._handles = nvml, handles
        self._readings = {
            gpu: {name: read for name, read in readings.items() if _ask(nvml, read, handle) is not None}
            for gpu, handle in handles.items()
        }
        if not any(self._readings.values()):
            raise Absent("NVML answers, but none of these readings is supported by any GPU here")
        gpus: list[About] = []
        for gpu, handle in handles.items():
            facts = {key: _ask(nvml, ask, handle) for key, ask in _ABOUT.items()}
            unsupported = [name for name in readings if name not in self._readings[gpu]]
            gpus.append({"gpu": gpu, **facts, "unsupported": unsupported})
        driver = _ask(nvml, lambda nvml, _: _text(nvml.nvmlSystemGetDriverVersion()))
        self.about: About = {"gpus": gpus, "throttle_bits": throttle_bits(nvml), "driver": driver}

    def read(self) -> list[Row]:
        rows: list[Row] = []
        for gpu, handle in self._handles.items():
            rows.append({"gpu": gpu})
            try:
                for reading in self._readings[gpu].values():
                    rows[-1] |= reading(self._nvml, handle)
            except self._nvml.NVMLError as error:
                raise ReadFailed(f"GPU {gpu}: {error}") from error
        return rows


def open_gpus(visible: str | None, name: str, readings: Mapping[str, Reading]) -> Gpus:
    """The GPUs named by ``visible`` (as CUDA_VISIBLE_DEVICES; None: all), as a source called ``name``.

    Raises Absent without NVIDIA's driver library, a GPU, one that is visible, or any of the readings.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = {n: pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())}
        uuids = {n: _text(pynvml.nvmlDeviceGetUUID(handle)) for n, handle in handles.items()}
    except pynvml.NVMLError_LibraryNotFound:
        raise Absent("no NVIDIA GPU here (its driver's library, NVML, is not installed)") from None
    except pynvml.NVMLError as error:
        raise Absent(f"NVML does not answer: {error}") from error
    shown = {n: handles[n] for n in visible_gpus(visible, uuids)}
    if not shown:
        raise Absent("NVML finds no GPU" if not handles else f"CUDA_VISIBLE_DEVICES={visible} hides every GPU")
    return Gpus(pynvml, shown, name, readings)


def visible_gpus(visible: str | None, uuids: Mapping[int, str]) -> list[int]:
    """Which indices CUDA_VISIBLE_DEVICES leaves; numbers or beginnings of UUIDs, up to the first that is unknown."""
    if visible is None:
        return list(uuids)
    chosen: list[int] = []
    for word in (part.strip() for part in visible.split(",")):
        matching = [n for n, uuid in uuids.items() if word == str(n) or (word and uuid.startswith(word))]
        if len(matching) != 1:
            break  # as CUDA does
        chosen += matching
    return chosen


def throttle_bits(nvml: ModuleType) -> dict[str, int]:
    """Plain words for the reasons that slow a GPU down, and their bits; being idle or set to a clock is none."""
    return {words: int(getattr(nvml, f"nvmlClocksThrottleReason{name}")) for name, words in _THROTTLE_WORDS.items()}


def _ask(nvml: ModuleType, ask: Callable[[ModuleType, Any], Any], handle: Any = None) -> Any:
    """What NVML answers, None where this GPU or driver does not."""
    try:
        return ask(nvml, handle)
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
