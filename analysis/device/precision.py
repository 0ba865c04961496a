"""Which number formats a device computes in by itself, and what a run's precision is there: native or emulated.

A GPU's formats are those for which the catalogue has a figure; a CPU's follow from the flags that its kernel lists.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gapmeter.analysis.device.devices import Device
from gapmeter.analysis.results.manifest import PrecisionSupport

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


def format_of(precision: str) -> str:
    """fp32, bf16, fp16, fp8, fp4 or int8; "" for a word that names none (awq and gptq compute in 16 bits)."""
    word = precision.lower()
    if word in _FORMATS:
        return _FORMATS[word]
    return next((name for start, name in _QUANTIZED.items() if word.startswith(start)), "")


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
        f"device that has it; write {_either(found.supported)}, or server.emulation: mark to run it marked as emulated"
    )


def _either(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else "".join(words)
