"""Which precisions a device computes in by itself."""

from __future__ import annotations

import pytest

from gapmeter.analysis.device.devices import CPU, catalogue, cpu_formats, refusal, support
from gapmeter.analysis.judge.warnings import emulation_warning
from tests.kit.results import manifest

ICE_LAKE = {"avx512f", "avx512_vnni"}
SAPPHIRE_RAPIDS = {"avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8"}


@pytest.mark.parametrize(
    ("precision", "device", "flags", "native"),
    [
        ("float32", CPU, set(), True), ("bfloat16", CPU, ICE_LAKE, False), ("bfloat16", CPU, SAPPHIRE_RAPIDS, True),
        ("float16", CPU, {"avx512_bf16"}, False), ("float16", CPU, SAPPHIRE_RAPIDS, True),
        ("int8", CPU, ICE_LAKE, True), ("fp8", CPU, SAPPHIRE_RAPIDS, False), ("bfloat16", CPU, {"bf16"}, True),
        ("fp8", "H100-SXM", set(), True), ("fp8", "A100-80", set(), False), ("bfloat16", "T4", set(), False),
        ("float16", "T4", set(), True), ("nvfp4", "B200", set(), True), ("nvfp4", "H200", set(), False),
        ("fp8_e4m3", "L4", set(), True), ("awq", "L4", set(), None),
    ],
)  # fmt: skip
def test_native_formats_are_those_of_the_data_sheet_or_of_the_processor_s_flags(
    precision: str, device: str, flags: set[str], native: bool | None
) -> None:
    assert support(precision, catalogue()[device], flags).native is native


def test_a_device_outside_the_catalogue_is_not_judged() -> None:
    found = support("float16", None)
    assert found.native is None and not found.emulated


def test_a_refusal_lists_what_the_device_has_and_the_way_to_run_it_anyway() -> None:
    said = refusal(support("bfloat16", catalogue()["T4"]))
    assert said.startswith("T4 has no native bfloat16: ")
    assert "write float32, float16 or int8, or server.emulation: mark" in said


def test_every_cpu_has_fp32() -> None:
    assert cpu_formats(()) == ("fp32",)
    assert cpu_formats(SAPPHIRE_RAPIDS) == ("fp32", "bf16", "fp16", "int8")


def test_an_emulated_result_says_so_beside_every_latency() -> None:
    told = support("float16", catalogue()[CPU], ICE_LAKE).to_json()
    (warning,) = emulation_warning(manifest(target={"precision": told}))
    assert warning.text == "emulated: CPU has no native float16 arithmetic"
    assert warning.flag == "--set server.precision=float32"
    assert not list(emulation_warning(manifest()))
