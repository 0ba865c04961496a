"""The catalogue of devices: complete, dense, dated, and found under the names that people write."""

from __future__ import annotations

import re

import pytest

from gapmeter.analysis.device.devices import CPU, Device, UnknownDevice, catalogue, find_device, recognize

GPUS = [device for device in catalogue().values() if not device.is_cpu]
FORMATS = {"fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8"}
NAMED = {"A100-80", "H100-SXM", "H200", "B200", "L40S", "L4", "A10G", "T4", "RTX-4090", "MI300X", CPU}


def test_the_catalogue_has_the_devices_that_the_documents_name() -> None:
    assert set(catalogue()) == NAMED


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.key)
def test_every_gpu_has_a_bandwidth_a_data_sheet_and_a_figure_or_null_for_every_format(gpu: Device) -> None:
    assert set(gpu.tflops) == FORMATS
    assert all(figure is None or figure > 0 for figure in gpu.tflops.values())
    assert gpu.bandwidth_gb_s > 0
    assert gpu.data_sheet


@pytest.mark.parametrize("device", catalogue().values(), ids=lambda device: device.key)
def test_every_price_has_a_date_and_a_source(device: Device) -> None:
    assert device.price.usd > 0
    assert re.fullmatch(r"20\d\d-\d\d", device.price.date)
    assert len(device.price.source) > 5


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.key)
def test_no_sparse_figure_stands_among_the_dense_ones(gpu: Device) -> None:
    """Dense arithmetic at most doubles when a format's bits halve; a sparse figure would be four times the next."""
    known = {name: figure for name, figure in gpu.tflops.items() if figure is not None}
    for wide, narrow in (("tf32", "fp16"), ("fp16", "fp8"), ("fp16", "bf16"), ("fp8", "fp4")):
        if wide in known and narrow in known:
            assert known[narrow] <= 2.1 * known[wide]


# What peers and vendors quote for the same chip with sparsity, which must not be what stands here.
@pytest.mark.parametrize(
    ("key", "name", "dense"),
    [("H100-SXM", "bf16", 989.4), ("H100-SXM", "fp8", 1978.9), ("A100-80", "bf16", 312), ("L4", "fp16", 121),
     ("L40S", "bf16", 362), ("B200", "fp4", 9000), ("MI300X", "bf16", 1307.4), ("RTX-4090", "bf16", 165.2)],
)  # fmt: skip
def test_dense_figures_are_those_of_the_data_sheets(key: str, name: str, dense: float) -> None:
    assert (catalogue()[key].tflops or {})[name] == dense


@pytest.mark.parametrize(
    ("written", "key"),
    [("H100", "H100-SXM"), ("h100 sxm", "H100-SXM"), ("NVIDIA H200", "H200"), ("rtx 4090", "RTX-4090"),
     ("4090", "RTX-4090"), ("a100-80gb", "A100-80"), ("Tesla T4", "T4"), ("AMD MI300X", "MI300X"), ("cpu", CPU)],
)  # fmt: skip
def test_a_device_is_found_under_the_names_that_people_write(written: str, key: str) -> None:
    assert find_device(written).key == key


def test_an_unknown_name_is_told_with_the_nearest_ones() -> None:
    with pytest.raises(UnknownDevice, match=r'^"H10O" is not in the catalogue; did you mean H100-SXM or '):
        find_device("H10O")
    with pytest.raises(UnknownDevice, match=r'"abacus" is not in the catalogue; known are H100-SXM, '):
        find_device("abacus")


def test_no_two_devices_share_a_name() -> None:
    for device in catalogue().values():
        assert all(find_device(name) is device for name in (device.key, *device.aliases))


@pytest.mark.parametrize(
    ("line", "key"),
    [("NVIDIA H100 80GB HBM3, 81559 MiB, 570.1", "H100-SXM"), ("NVIDIA H200", "H200"), ("Tesla T4", "T4"),
     ("NVIDIA A100-SXM4-80GB", "A100-80"), ("NVIDIA A100-SXM4-40GB", None), ("NVIDIA H100 PCIe", None),
     ("NVIDIA L40S", "L40S"), ("NVIDIA L40", None)],
)  # fmt: skip
def test_the_driver_s_name_is_recognized_and_a_variant_is_not_taken_for_it(line: str, key: str | None) -> None:
    found = recognize(line)
    assert (found.key if found else None) == key
