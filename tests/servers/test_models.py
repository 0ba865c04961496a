from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from gapmeter.servers.models import ModelError, builtin_model, check_folder, default_cache, has_weights, resolve_model


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def tiny(cache: Path) -> Path:
    return builtin_model("tiny", cache)


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_same_recipe_makes_the_same_files_and_the_same_folder_name(tiny: Path, tmp_path: Path) -> None:
    again = builtin_model("tiny", tmp_path)
    assert again.name == tiny.name
    assert _digests(again) == _digests(tiny)


def test_a_model_that_is_there_is_not_made_again(tiny: Path, cache: Path) -> None:
    before = (tiny / "model.safetensors").stat().st_mtime_ns
    assert builtin_model("tiny", cache) == tiny
    assert (tiny / "model.safetensors").stat().st_mtime_ns == before


def test_the_tokenizer_has_exactly_8192_entries_and_gives_back_what_it_is_given(tiny: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 8192
    text = "The queue was full; 503 später — 日本語 🙂\n\ttabs\x00and \U000103ff"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("the engine will answer every request").ids) <= 8


def test_weights_are_a_whole_safetensors_file_of_seven_million_parameters_drawn_around_zero(tiny: Path) -> None:
    data = (tiny / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    del header["__metadata__"]
    assert max(entry["data_offsets"][1] for entry in header.values()) == len(data) - 8 - length
    assert sum(int(np.prod(entry["shape"])) for entry in header.values()) == 7_096_576
    start, end = header["model.embed_tokens.weight"]["data_offsets"]
    values = np.frombuffer(data[8 + length + start : 8 + length + end], "<f4")
    assert abs(float(values.mean())) < 1e-4 and abs(float(values.std()) - 0.02) < 1e-4


@pytest.mark.parametrize("name", ["llama-1b", "llama-8b"])
def test_large_shapes_have_a_text_for_every_id_and_no_weights_but_a_seed(name: str, cache: Path) -> None:
    folder = builtin_model(name, cache)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"] == 128_256
    assert all(tokenizer.decode([token]) for token in (8192, 100_000, 128_255))
    assert not has_weights(folder) and config["gapmeter_random_weights"] == 1


def test_several_at_once_make_one_folder_and_leave_no_draft(tmp_path: Path) -> None:
    made: list[Path] = []
    threads = [threading.Thread(target=lambda: made.append(builtin_model("tiny", tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 1 and len(made) == 3
    assert list(tmp_path.iterdir()) == [made[0]]


def _folder(path: Path, *names: str) -> Path:
    path.mkdir()
    for name in names:
        (path / name).write_text("{}")
    return path


def test_a_folder_with_configuration_and_tokenizer_passes_through(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m", "config.json", "tokenizer.json")
    assert resolve_model(str(folder)) == folder


def test_a_folder_without_tokenizer_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer \(tokenizer\.json\).*save_pretrained"):
        resolve_model(str(_folder(tmp_path / "m", "config.json")))


def test_a_folder_without_configuration_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        check_folder(_folder(tmp_path / "m", "tokenizer.json"))


@pytest.mark.parametrize("name", ["/no/such/folder", "./nope", "~/nope-gapmeter", "a/b/c"])
def test_a_path_that_is_no_folder_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match="there is no model folder"):
        resolve_model(name)


def test_an_unknown_built_in_model_lists_those_there_are() -> None:
    with pytest.raises(ModelError, match="builtin:tiny, builtin:llama-1b, builtin:llama-8b"):
        resolve_model("builtin:huge")


def test_a_hub_id_that_cannot_be_had_says_so(tmp_path: Path) -> None:
    asking = "from gapmeter.servers.models import resolve_model; resolve_model('nobody/no-such-model')"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    asked = subprocess.run([sys.executable, "-c", asking], env=env, capture_output=True, text=True, timeout=60)
    assert "ModelError: 'nobody/no-such-model' is neither a folder nor a model that the hub gives us" in asked.stderr


def test_a_cache_that_cannot_be_written_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="GAPMETER_CACHE"):
        builtin_model("tiny", tmp_path / "file" / "models")


def test_the_environment_says_where_models_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GAPMETER_CACHE", str(tmp_path))
    assert default_cache() == tmp_path
    monkeypatch.delenv("GAPMETER_CACHE")
    assert default_cache().parts[-2:] == (".cache", "models")
