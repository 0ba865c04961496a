"""A model's size from its files alone, against counts by hand and published ones."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from gapmeter.errors import UNREACHABLE, UserError
from gapmeter.machine.roofline import describe_weights, last_level_cache, measure_peaks
from gapmeter.servers.launch import free_port
from gapmeter.servers.models import resolve_model
from gapmeter.study.resolve import resolve
from gapmeter.study.target import prepare_target

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 100,
    "num_key_value_heads": 1, "intermediate_size": 16, "torch_dtype": "bfloat16",
}  # fmt: skip


def model(folder: Path, tensors: dict[str, tuple[str, list[int]]] | None = None, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    if tensors:
        header = {name: {"dtype": t, "shape": shape, "data_offsets": [0, 0]} for name, (t, shape) in tensors.items()}
        packed = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(packed)) + packed)
    return folder


def test_the_tiny_model_is_counted_from_its_file_as_by_hand() -> None:
    found = describe_weights(Path(resolve_model("builtin:tiny")), "float32")
    embedding, layer = 8192 * 256, 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 688 + 2 * 256
    assert found.parameters == 2 * embedding + 4 * layer + 256
    assert found.step_parameters == embedding + 4 * layer + 256  # a row of the input embedding a token, not all of it
    assert found.step_bytes == 4 * found.step_parameters
    assert found.kv_bytes == 2 * 2 * 64 * 4
    assert found.source.startswith("safetensors")


def test_llama_3_8b_has_its_published_number_of_parameters_without_any_weights() -> None:
    found = describe_weights(Path(resolve_model("builtin:llama-8b")), "bfloat16")
    assert found.parameters == 8_030_261_248
    assert found.step_bytes == 2 * (8_030_261_248 - 128_256 * 4096)
    assert (found.layers, found.kv_bytes) == (32, 2 * 8 * 128 * 2)


def test_tied_embeddings_are_read_once_as_the_head(tmp_path: Path) -> None:
    apart = describe_weights(model(tmp_path), "bfloat16")
    tied = describe_weights(model(tmp_path, tie_word_embeddings=True), "bfloat16")
    assert apart.parameters - tied.parameters == 800
    assert apart.step_parameters == tied.step_parameters


def test_a_model_that_stores_no_head_has_tied_embeddings_unless_its_configuration_says_so(tmp_path: Path) -> None:
    """Gemma's leaves the key out, since its class ties them anyway."""
    tensors = {"model.embed_tokens.weight": ("BF16", [100, 8]), "l.weight": ("BF16", [8, 8])}
    silent = describe_weights(model(tmp_path, tensors), "bfloat16")
    tied = describe_weights(model(tmp_path, tensors, tie_word_embeddings=True), "bfloat16")
    assert silent == tied
    assert (silent.step_parameters, silent.head_parameters) == (864, 800)
    apart = describe_weights(model(tmp_path, tensors | {"lm_head.weight": ("BF16", [100, 8])}), "bfloat16")
    assert (apart.parameters, apart.step_parameters) == (1664, 864)


def test_a_packed_integer_holds_several_parameters(tmp_path: Path) -> None:
    tensors = {"l.qweight": ("I32", [4, 10]), "l.scales": ("F16", [10]), "lm_head.weight": ("BF16", [100, 8])}
    awq = {"quant_method": "awq", "bits": 4}
    found = describe_weights(model(tmp_path, tensors, quantization_config=awq), "float16")
    assert found.step_parameters == 8 * 40 + 10 + 800
    assert found.step_bytes == 40 * 4 + 10 * 2 + 800 * 2


@pytest.mark.parametrize("kind", ["linear_attention", "mamba", "conv"])
def test_a_layer_that_does_not_attend_keeps_no_keys(tmp_path: Path, kind: str) -> None:
    tensors = {"l.weight": ("BF16", [8, 8]), "lm_head.weight": ("BF16", [100, 8])}
    found = describe_weights(model(tmp_path, tensors, layer_types=[kind, "full_attention"]), "bfloat16")
    assert found.layers == 1


def test_quantized_tensors_count_as_stored_and_eight_bits_as_one_byte_but_for_the_head(tmp_path: Path) -> None:
    tensors = {"l.qweight": ("I32", [4, 10]), "l.scales": ("F16", [10]), "lm_head.weight": ("BF16", [100, 8])}
    stored = describe_weights(model(tmp_path, tensors), "awq")
    assert stored.step_bytes == 40 * 4 + 10 * 2 + 800 * 2
    linear = {"l.weight": ("BF16", [8, 8]), "l.norm": ("BF16", [8]), "lm_head.weight": ("BF16", [100, 8])}
    eight = describe_weights(model(tmp_path, linear), "fp8", "fp8_e4m3")
    assert eight.step_bytes == 64 + 8 * 2 + 800 * 2
    assert eight.kv_bytes == 2 * 1 * 4


def test_experts_stand_apart_and_sliding_layers_are_counted(tmp_path: Path) -> None:
    tensors = {"a.experts.0.w": ("BF16", [8, 8]), "a.experts.1.w": ("BF16", [8, 8]), "a.gate": ("BF16", [8, 2])}
    kinds = ["sliding_attention", "full_attention"]
    folder = model(tmp_path, tensors, num_experts=2, num_experts_per_tok=1, sliding_window=512, layer_types=kinds)
    found = describe_weights(folder, "bfloat16")
    assert (found.experts.parameters, found.experts.bytes, found.step_parameters) == (128, 256.0, 16)
    assert (found.sliding_layers, found.window) == (1, 512)


@pytest.mark.parametrize(
    ("count", "per_token"),
    [
        ("num_experts", "num_experts_per_tok"),  # Qwen
        ("num_local_experts", "num_experts_per_tok"),  # Mixtral
        ("n_routed_experts", "moe_topk"),  # LongCat
        ("moe_num_experts", "moe_k"),  # ERNIE
        ("num_experts", "num_experts_per_token"),  # Kimi
        ("num_experts", "top_k_experts"),  # Gemma
    ],
)
def test_experts_are_counted_whatever_their_config_calls_them(tmp_path: Path, count: str, per_token: str) -> None:
    tensors = {f"a.experts.{k}.w": ("BF16", [8, 8]) for k in range(4)}
    found = describe_weights(model(tmp_path, tensors, **{count: 4, per_token: 2}), "bfloat16")
    assert found is not None and found.experts is not None
    assert (found.experts.count, found.experts.per_token) == (4, 2)


@pytest.mark.parametrize("broken", ["no config", "other layout", "no safetensors", "other experts"])
def test_what_does_not_tell_its_size_is_none(tmp_path: Path, broken: str) -> None:
    if broken == "other layout":
        model(tmp_path, model_type="mamba")
    if broken == "no safetensors":
        model(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"not one at all")
    if broken == "other experts":
        model(tmp_path, {"a.experts.0.w": ("BF16", [8, 8])}, experts_of_another_name=1)
    assert describe_weights(tmp_path, "float32") is None


def test_the_peaks_of_a_core_are_measured_with_their_spread() -> None:
    found = measure_peaks((), 1_000_000.0, timeout_s=200)
    for name in ("triad", "read", "multiply"):
        rate = getattr(found, name)
        assert 0 < rate.low <= rate.median <= rate.high and rate.repeats >= 3
    assert 0.1 < found.triad.high < 10_000  # GB/s
    assert (found.cached is None) == (found.llc_bytes is None or found.llc_bytes <= 1_000_000)


def test_a_cache_that_several_cores_share_counts_once(tmp_path: Path) -> None:
    for core, shared in ((0, "0-1"), (1, "0-1"), (2, "2-3")):
        for index, (level, size, cores) in enumerate([(1, "48K", str(core)), (3, "32768K", shared)]):
            path = tmp_path / f"cpu{core}" / "cache" / f"index{index}"
            path.mkdir(parents=True)
            for name, value in (("level", level), ("size", size), ("shared_cpu_list", cores)):
                (path / name).write_text(f"{value}\n")
    assert last_level_cache([0, 1], tmp_path) == 32 << 20
    assert last_level_cache([0, 1, 2], tmp_path) == 64 << 20
    assert last_level_cache([9], tmp_path) is None


def test_a_flag_of_the_engine_is_known_however_its_name_is_written() -> None:
    port = free_port()
    args = f'server.args={{"--tensor-parallel-size": 2, "--port": {port}, "max-queue": 7}}'
    scenario = resolve("smoke", ["server.engine=transformers", args])
    target = prepare_target(scenario, (min(os.sched_getaffinity(0)),), lambda _: None, None)
    assert scenario.server.flags == {"tensor_parallel_size": 2, "port": port, "max_queue": 7}
    assert target.about.tensor_parallel == 2
    assert target.about.url == f"http://127.0.0.1:{port}"
    assert target.spec.command.count("--port") == 1


def test_an_engine_that_is_not_installed_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapmeter.study.target.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install torch transformers") as refused:
        prepare_target(resolve("smoke", ["server.engine=transformers"]), (), lambda _: None, None)
    assert refused.value.exit_code == UNREACHABLE
