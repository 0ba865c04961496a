"""What needs neither torch nor a model: the command line and its mistakes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gapmeter.servers.launch import Service
from gapmeter.servers.transformers import transformers_command


def _words(args: dict[str, Any]) -> list[str]:
    spec = transformers_command("py", Service("/m", "name", 80, 4, "bfloat16", args, (2, 3)))
    assert spec.command[:4] == ("py", "-P", "-m", "gapmeter.servers.transformers")
    return list(spec.command[4:])


def test_the_command_names_model_address_batch_and_precision() -> None:
    words = dict(zip(_words({})[::2], _words({})[1::2], strict=True))
    assert words == {
        "--model": "/m", "--served-model-name": "name", "--host": "127.0.0.1", "--port": "80", "--max-batch": "4",
        "--precision": "bfloat16",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"max_queue": 9}, ["--max-queue", "9"]),
        ({"prefix_cache": False}, ["--no-prefix-cache"]),
        ({"async-batching": True}, ["--async-batching"]),
        ({"max_model_len": None}, []),
        ({"device": "cpu"}, ["--device", "cpu"]),
    ],
)
def test_further_flags_are_passed_on(args: dict[str, Any], words: list[str]) -> None:
    assert _words(args)[12:] == words


def test_flags_of_the_scenario_win_over_ours() -> None:
    assert _words({"max_batch": 16}).count("--max-batch") == 1
    assert _words({"max_batch": 16})[_words({"max_batch": 16}).index("--max-batch") + 1] == "16"


def test_the_model_s_threads_are_as_many_as_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    env = transformers_command("py", Service("/m", "n", 1, 1, "float32", {}, (2, 3))).env
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS" not in transformers_command("py", Service("/m", "n", 1, 1, "float32", {}, ())).env


# what is wrong, the flags, what standard error says
MISTAKES = [
    ("no such folder", ["--model", "/no/such/folder"], "there is no model folder /no/such/folder"),
    ("no such built-in", ["--model", "builtin:huge"], "there is no built-in model 'huge'; there are builtin:tiny"),
    ("too long", ["--model", "{tiny}", "--max-model-len", "99999"], "more than the model's 4096 positions"),
    ("unknown precision", ["--model", "{tiny}", "--precision", "fp4"], "invalid choice: 'fp4'"),
    ("no weights", ["--model", "{tiny}"], "holds no weights (*.safetensors); add them"),
    ("no tokenizer", ["--model", "{bare}"], "has no tokenizer (tokenizer.json)"),
    ("a broken tokenizer", ["--model", "{broken}"], "cannot serve"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "said"), [row[1:] for row in MISTAKES], ids=[row[0] for row in MISTAKES])
def test_a_mistake_ends_the_server_with_a_sentence(flags: list[str], said: str, tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("tiny", "bare", "broken")}
    for folder in folders.values():
        folder.mkdir()
        (folder / "config.json").write_text('{"max_position_embeddings": 4096}')
    (folders["broken"] / "tokenizer.json").write_text('{"model": 1}')
    (folders["tiny"] / "tokenizer.json").write_text(
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": []}'
    )
    if "--max-model-len" in flags:
        (folders["tiny"] / "model.safetensors").write_bytes(b"")
    words = [word.format(**folders) for word in flags]
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "gapmeter.servers.transformers", *words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode in (1, 2) and said in ended.stderr and "Traceback" not in ended.stderr
