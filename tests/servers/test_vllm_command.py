from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from gapmeter.servers.launch import Service
from gapmeter.servers.vllm import VllmMissing, find_python, installed, vllm_command


def flags(args: dict[str, Any], precision: str = "float32", version: str = "0.32.0") -> list[str]:
    spec = vllm_command(Path("py"), Service("/m", "name", 81, 4, precision, args, ()), version=version)
    assert spec.command[:3] == ("py", "-m", "vllm.entrypoints.openai.api_server")
    return list(spec.command[3:])


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, "--max-num-seqs 4"),
        ({}, "--dtype float32"),
        ({}, "--max-model-len 2048"),
        ({}, "--served-model-name name"),
        ({"max_model_len": 512}, "--max-model-len 512"),
        ({"max-num-seqs": 9}, "--max-num-seqs 9"),
        ({"enforce_eager": True}, "--enforce-eager"),
        ({"enable_prefix_caching": False}, "--no-enable-prefix-caching"),
        ({"--seed": 7}, "--seed 7"),
        ({"hf_overrides": {"a": [1]}}, '--hf-overrides {"a": [1]}'),
    ],
)
def test_arguments_become_flags_and_win_over_ours(args: dict[str, Any], expected: str) -> None:
    words = " ".join(flags(args)) + " "
    assert f"{expected} " in words
    assert words.count(expected.split()[0] + " ") == 1


def test_none_leaves_one_of_our_flags_out() -> None:
    assert "--max-model-len" not in flags({"max_model_len": None})


@pytest.mark.parametrize(
    ("precision", "flag"), [("bfloat16", "--dtype"), ("auto", "--dtype"), ("fp8", "--quantization")]
)
def test_precision_is_a_dtype_or_a_quantization(precision: str, flag: str) -> None:
    words = flags({}, precision)
    assert words[words.index(flag) + 1] == precision


@pytest.mark.parametrize(("version", "has"), [("0.26.3", False), ("0.27.0", True), ("0.32.0+cpu", True), ("1.0", True)])
def test_flags_that_old_versions_do_not_know_are_left_out(version: str, has: bool) -> None:
    assert ("--enable-per-request-metrics" in flags({}, version=version)) is has


def test_the_models_threads_are_bound_to_the_servers_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "HF_HUB_OFFLINE", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)
    bound = vllm_command(Path("py"), Service(tmp_path, "n", 1, 1, "auto", {}, (1, 3)), version="0.32.0").env
    assert bound["VLLM_CPU_OMP_THREADS_BIND"] == "1,3"
    assert bound["HF_HUB_OFFLINE"] == "1"
    free = vllm_command(Path("py"), Service("org/model", "n", 1, 1, "auto", {}, ()), version="0.32.0").env
    assert "VLLM_CPU_OMP_THREADS_BIND" not in free
    assert "HF_HUB_OFFLINE" not in free, "a hub id may have to be fetched"


@pytest.mark.parametrize(
    ("cores", "args", "backend"),
    [
        ((1,), {}, "uni"),
        ((), {}, None),
        ((1, 2), {}, None),
        ((1,), {"distributed_executor_backend": "mp"}, "mp"),
        ((1,), {"tensor_parallel_size": 2}, None),
        ((1, 2), {"distributed_executor_backend": "uni"}, "uni"),
    ],
)
def test_on_one_core_the_worker_lives_in_the_engine_unless_asked_otherwise(
    cores: tuple[int, ...], args: dict[str, Any], backend: str | None
) -> None:
    spec = vllm_command(Path("py"), Service("/m", "n", 1, 1, "auto", args, cores), version="0.32.0")
    words = list(spec.command)
    found = words[words.index("--distributed-executor-backend") + 1] if backend else None
    assert found == backend
    assert ("--distributed-executor-backend" in words) is (backend is not None)
    assert spec.env.get("VLLM_ENABLE_V1_MULTIPROCESSING") == ("0" if backend == "uni" else None)


def test_what_the_users_environment_says_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "16")
    assert "VLLM_CPU_KVCACHE_SPACE" not in vllm_command(
        Path("py"), Service("/m", "n", 1, 1, "auto", {}, ()), version="0.32.0"
    ).env  # fmt: skip


def test_the_interpreter_named_in_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = tmp_path / ".venv-vllm" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)
    monkeypatch.delenv("GAPMETER_VLLM_PYTHON", raising=False)
    assert find_python(tmp_path) == own
    monkeypatch.setenv("GAPMETER_VLLM_PYTHON", sys.executable)
    assert find_python(tmp_path) == Path(sys.executable)
    monkeypatch.setenv("GAPMETER_VLLM_PYTHON", str(tmp_path / "nothing"))
    with pytest.raises(VllmMissing, match=r"GAPMETER_VLLM_PYTHON names .*nothing, which is not a program"):
        find_python(tmp_path)


def test_an_interpreter_without_vllm_is_refused_with_the_remedy(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(VllmMissing, match="has no vLLM; run `make vllm`"):
        installed(bare)
    with pytest.raises(VllmMissing, match="could not be asked"):
        installed(tmp_path / "nothing")


@pytest.mark.skipif(bool(os.environ.get("GAPMETER_VLLM_PYTHON")), reason="an interpreter is named")
def test_no_interpreter_at_all_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(VllmMissing, match="run `make vllm` to set it up, or set GAPMETER_VLLM_PYTHON"):
        find_python(tmp_path)


def test_a_shape_without_weights_is_loaded_with_random_ones_and_a_model_with_weights_is_not(tmp_path: Path) -> None:
    def words() -> tuple[str, ...]:
        return vllm_command(Path("py"), Service(tmp_path, "n", 1, 1, "auto", {}, ()), version="0.32.0").command

    assert words()[words().index("--load-format") + 1] == "dummy"
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert "--load-format" not in words()
