"""NVIDIA GPUs through NVML: energy, power, clocks, throttling, temperature, memory, use; PCIe apart, for it is slow.

Units are NVML's own, with the unit in each name: mJ since the driver was loaded, mW, MHz, degrees Celsius, bytes, per
cent of the time in which any kernel ran. NVML gives PCIe throughput as the average over 20 ms that it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from gapmeter.servers.telemetry import About, Absent, ReadFailed, Row

# What one reading gives: the fields of a row, from a handle.
Reading = Callable[[ModuleType, Any], Row]


def _memory(nvml: ModuleType, handle: Any) -> Row:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return {"memory_used_bytes": int(memory.used), "memory_total_bytes": int(memory.total)}


def _instant_power(nvml: ModuleType, handle: Any) -> Row:
    (field,) = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
    if field.nvmlReturn != nvml.NVML_SUCCESS:
        raise nvml.NVMLError(field.nvmlReturn)
    return {"power_instant_mw": int(field.value.uiVal)}


def _use(nvml: ModuleType, handle: Any) -> Row:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    return {"busy_percent": int(rates.gpu), "memory_busy_percent": int(rates.memory)}


READINGS: Mapping[str, Reading] = {
    "energy": lambda nvml, handle: {"energy_mj": int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))},
    "power": lambda nvml, handle: {"power_mw": int(nvml.nvmlDeviceGetPowerUsage(handle))},
    "instant power": _instant_power,
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
_OF_INSTANCES = frozenset({"memory"})
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
    "name": lambda nvml, handle: nvml.nvmlDeviceGetName(handle),
    "uuid": lambda nvml, handle: nvml.nvmlDeviceGetUUID(handle),
    "power_limit_mw": lambda nvml, handle: int(nvml.nvmlDeviceGetEnforcedPowerLimit(handle)),
    "pcie_generation": lambda nvml, handle: int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
    "pcie_width": lambda nvml, handle: int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
    "pids": lambda nvml, handle: [int(p.pid) for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)],
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by NVML's number, and the instances of it that are used, where it is divided."""

    handle: Any
    instances: tuple[Any, ...] = ()

    def ask(self, nvml: ModuleType, name: str, read: Reading) -> Row:
        """The instances' readings summed, where they have one; else the whole GPU's. Raises NVMLError."""
        if name in _OF_INSTANCES and self.instances:
            rows = [read(nvml, instance) for instance in self.instances]
            return {key: sum(int(row[key]) for row in rows) for key in rows[0]}
        return read(nvml, self.handle)


class Gpus:
    """The GPUs that the server may use, read together; a reading that a GPU does not support is left out."""

    def __init__(self, nvml: ModuleType, gpus: Mapping[int, Gpu], name: str, readings: Mapping[str, Reading]):
        self.name = name
        self._nvml, self._gpus = nvml, gpus
        self._readings = {
            number: {name: read for name, read in readings.items() if _ask(nvml, gpu.ask, nvml, name, read) is not None}
            for number, gpu in gpus.items()
        }
        if not any(self._readings.values()):
            raise Absent("NVML answers, but none of these readings is supported by any GPU here")
        about: list[About] = []
        for number, gpu in gpus.items():
            facts = {key: _ask(nvml, ask, nvml, gpu.handle) for key, ask in _ABOUT.items()}
            if gpu.instances:
                facts["instances"] = [_ask(nvml, _ABOUT["uuid"], nvml, instance) for instance in gpu.instances]
                each = [_ask(nvml, _ABOUT["pids"], nvml, instance) or [] for instance in gpu.instances]
                facts["pids"] = sorted({*(facts["pids"] or ()), *(pid for pids in each for pid in pids)})
            unsupported = [name for name in readings if name not in self._readings[number]]
            about.append({"gpu": number, **facts, "unsupported": unsupported})
        driver = _ask(nvml, nvml.nvmlSystemGetDriverVersion)
        self.about: About = {"gpus": about, "throttle_bits": throttle_bits(nvml), "driver": driver}

    def read(self) -> list[Row]:
        rows: list[Row] = []
        for number, gpu in self._gpus.items():
            rows.append({"gpu": number})
            try:
                for name, reading in self._readings[number].items():
                    rows[-1] |= gpu.ask(self._nvml, name, reading)
            except self._nvml.NVMLError as error:
                raise ReadFailed(f"GPU {number}: {error}") from error
        return rows


def open_gpus(visible: str | None, order: str | None, name: str, readings: Mapping[str, Reading]) -> Gpus:
    """The GPUs named by ``visible`` and ``order``, as a source called ``name``.

    They are CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER (None: not set). Raises Absent without NVIDIA's driver library,
    a GPU, one that is visible, or any of the readings.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = {n: pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())}
        uuids = {n: pynvml.nvmlDeviceGetUUID(handle) for n, handle in handles.items()}
        names = {pynvml.nvmlDeviceGetName(handle) for handle in handles.values()}
    except pynvml.NVMLError_LibraryNotFound:
        raise Absent("no NVIDIA GPU here (its driver's library, NVML, is not installed)") from None
    except pynvml.NVMLError as error:
        raise Absent(f"NVML does not answer: {error}") from error
    if visible and visible.strip().startswith("MIG-"):
        shown = _instances(pynvml, visible, handles, uuids)
    else:
        numbered = len(names) < 2 or order == "PCI_BUS_ID"
        shown = {n: Gpu(handles[n]) for n in visible_gpus(visible, uuids, numbered=numbered)}
    if not shown:
        raise Absent("NVML finds no GPU" if not handles else f"CUDA_VISIBLE_DEVICES={visible} hides every GPU")
    return Gpus(pynvml, shown, name, readings)


def visible_gpus(visible: str | None, uuids: Mapping[int, str], *, numbered: bool = True) -> list[int]:
    """Which indices CUDA_VISIBLE_DEVICES leaves; numbers or beginnings of UUIDs, up to the first that is unknown.

    Not ``numbered``: CUDA's numbers are not NVML's, so that any GPU may be meant by one.
    """
    if visible is None:
        return list(uuids)
    chosen: list[int] = []
    for word in (part.strip() for part in visible.split(",")):
        if not numbered and word.isdigit() and int(word) < len(uuids):
            return list(uuids)
        matching = [n for n, uuid in uuids.items() if word == str(n) or (word and uuid.startswith(word))]
        if len(matching) != 1:
            break  # as CUDA does
        chosen += matching
    return chosen


def _instances(nvml: ModuleType, visible: str, handles: Mapping[int, Any], uuids: Mapping[int, str]) -> dict[int, Gpu]:
    """The GPUs that instances are parts of: ``MIG-UUID``, or as drivers before R470 wrote it ``MIG-GPU-UUID/GI/CI``."""
    found: dict[int, tuple[Any, ...]] = {}
    for word in (part.strip() for part in visible.split(",")):
        older = word.removeprefix("MIG-").partition("/")[0]
        if older.startswith("GPU-"):
            parent, instance = older, None
        else:
            instance = _ask(nvml, nvml.nvmlDeviceGetHandleByUUID, word)
            whole = instance and _ask(nvml, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, instance)
            parent = whole and _ask(nvml, nvml.nvmlDeviceGetUUID, whole)
            if instance is None:
                break  # as CUDA does
            if parent is None:
                continue
        for number in (n for n, uuid in uuids.items() if uuid == parent):
            found[number] = (*found.get(number, ()), *(() if instance is None else (instance,)))
    return {number: Gpu(handles[number], instances) for number, instances in found.items()}


def throttle_bits(nvml: ModuleType) -> dict[str, int]:
    """Plain words for the reasons that slow a GPU down, and their bits; being idle or set to a clock is none."""
    return {words: int(getattr(nvml, f"nvmlClocksThrottleReason{name}")) for name, words in _THROTTLE_WORDS.items()}


def _ask(nvml: ModuleType, ask: Callable[..., Any], *arguments: Any) -> Any:
    """What NVML answers, None where this GPU or driver does not."""
    try:
        return ask(*arguments)
    except nvml.NVMLError:
        return None
