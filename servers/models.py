"""Which model a server loads: a built-in one made on the spot, a local folder, or a snapshot of a hub id.

A built-in model's folder is named after everything that went into it, so a changed recipe makes a new folder, and is
moved into place whole. Making one needs neither torch nor Transformers.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import random
import shutil
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BUILTIN = "builtin:"
CACHE_VARIABLE = "GAPMETER_CACHE"
RANDOM_WEIGHTS_KEY = "gapmeter_random_weights"  # in config.json: no weights here, draw them from this seed

_RECIPE = 1  # raise to remake every built-in model
_TRAINED = 8192
_SPECIAL = ("<|end|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]

Floats = NDArray[np.float32]


class ModelError(ValueError):
    """A model cannot be had; the message says which and what to do."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's dimensions. ``weights`` False: only the configuration is written, for random weights on the device."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int = _TRAINED
    positions: int = 4096
    rope_theta: float = 10_000.0
    tied: bool = False
    head_dim: int = 64
    weights: bool = False
    seed: int = 1


SHAPES: dict[str, Shape] = {
    "tiny": Shape(256, 4, 4, 2, 688, weights=True),
    "llama-1b": Shape(2048, 16, 32, 8, 8192, 128_256, 131_072, 500_000.0, tied=True),
    "llama-8b": Shape(4096, 32, 32, 8, 14_336, 128_256, 131_072, 500_000.0, head_dim=128),
}


def resolve_model(name: str) -> Path:
    """The folder of ``builtin:NAME``, of a path, or of a hub id (downloaded if it is not there yet).

    Raises ModelError when there is no such model, or it lacks a configuration or a tokenizer.
    """
    if name.startswith(BUILTIN):
        return builtin_model(name.removeprefix(BUILTIN), default_cache())
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise ModelError(f"there is no model folder {name}; name a folder, a hub id or one of {_builtin_names()}")
        folder = _snapshot(name)
    check_folder(folder)
    return folder


def check_folder(folder: Path) -> None:
    """Raises ModelError when a server could not be started from ``folder``."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is not a model folder: it has no config.json")
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(
            f"the model folder {folder} has no tokenizer (tokenizer.json); add the one it was trained with: "
            f"AutoTokenizer.from_pretrained(ITS_SOURCE).save_pretrained({str(folder)!r})"
        )


def has_weights(folder: Path) -> bool:
    """Whether the folder holds weights; the large built-in models do not (vLLM then needs --load-format dummy)."""
    return any(next(folder.glob(pattern), None) for pattern in _WEIGHTS)


def check_weights(folder: Path) -> None:
    """Raises ModelError when ``folder`` has no weights and does not say that random ones will do."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not has_weights(folder) and RANDOM_WEIGHTS_KEY not in config:
        raise ModelError(
            f'the model folder {folder} holds no weights (*.safetensors); add them, or "{RANDOM_WEIGHTS_KEY}": 1 to '
            "its config.json for random ones"
        )


def builtin_model(name: str, cache: Path) -> Path:
    """The folder of a built-in model in ``cache``, made in a second or two when it is not there. Raises ModelError."""
    shape = SHAPES.get(name)
    if shape is None:
        raise ModelError(f"there is no built-in model {name!r}; there are {_builtin_names()}")
    folder = cache / f"{name}-{_digest(shape)}"
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
    except OSError as error:
        raise ModelError(f"{cache} cannot be written ({error.strerror}); set {CACHE_VARIABLE} to a folder") from error
    try:
        _write(draft, shape)
        draft.chmod(0o755)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process made the same one first
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def default_cache() -> Path:
    """``GAPMETER_CACHE``, else .cache/models in the checkout, else in the user's cache."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    checkout = Path(__file__).resolve().parent.parent
    if (checkout / "pyproject.toml").is_file():
        return checkout / ".cache" / "models"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gapmeter" / "models"


def _builtin_names() -> str:
    return ", ".join(f"{BUILTIN}{name}" for name in SHAPES)


def _snapshot(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and only hub ids need it

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"{hub_id!r} is neither a folder nor a model that the hub gives us ({reason}); "
            f"name a folder or one of {_builtin_names()}"
        ) from error


def _digest(shape: Shape) -> str:
    source = [_RECIPE, asdict(shape), _TRAINED, _SPECIAL, _TEMPLATE, _words()]
    return hashlib.sha256(json.dumps(source).encode()).hexdigest()[:10]


def _write(folder: Path, shape: Shape) -> None:
    tokenizer = _tokenizer(shape.vocabulary)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(shape))
    _write_json(folder / "config.json", _config(shape))
    _write_json(folder / "generation_config.json", {"eos_token_id": 2, "pad_token_id": 3, "do_sample": False})
    if shape.weights:
        _write_safetensors(folder / "model.safetensors", _weights(shape))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


# -- the tokenizer


def _words() -> list[str]:
    return Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split()


def _text() -> Iterator[str]:
    """Lines of words with a rank-frequency law: English ones, their inflections, and syllables put together."""
    draw = random.Random(1)
    common = list(dict.fromkeys(_words()))
    syllables = [c + v + e for c in "bcdfghlmnprstvw" for v in "aeiou" for e in ("", "n", "r", "s", "l")]
    made = ["".join(draw.choices(syllables, k=draw.choice((2, 2, 3)))) for _ in range(6000)]
    bent = [word + end for word in common for end in ("s", "ed", "ing", "er", "ly", "ness") if len(word) > 3]
    ranked = common + draw.sample(bent, len(bent)) + made
    upto = list(itertools.accumulate(1 / (rank + 3) for rank in range(len(ranked))))
    for line in range(10_000):
        words = draw.choices(ranked, cum_weights=upto, k=16) + ranked[line * 4 % len(ranked) :][:4]
        yield " ".join(words).capitalize() + draw.choice((".", ".", "?", ":", ","))


def _tokenizer(entries: int) -> Tokenizer:
    """A byte-level BPE trained on ``_text``, and beyond that as many more entries that no merge leads to.

    The latter give every id of a large vocabulary a text, so that random weights produce something to read.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_TRAINED, min_frequency=1, special_tokens=list(_SPECIAL), show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator(_text(), trainer)
    if tokenizer.get_vocab_size() != _TRAINED:
        raise ModelError(f"the tokenizer came out with {tokenizer.get_vocab_size()} entries instead of {_TRAINED}")
    return _with_fillers(tokenizer, entries) if entries > _TRAINED else tokenizer


def _with_fillers(tokenizer: Tokenizer, entries: int) -> Tokenizer:
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    number = 0
    while len(vocabulary) < entries:
        vocabulary.setdefault(f"Ġ{_base26(number)}", len(vocabulary))
        number += 1
    return Tokenizer.from_str(json.dumps(content))


def _base26(number: int) -> str:
    letters = ""
    while True:
        letters += chr(ord("a") + number % 26)
        number //= 26
        if not number:
            return letters


def _tokenizer_config(shape: Shape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _SPECIAL[2],
        "pad_token": _SPECIAL[3],
        "chat_template": _TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.positions,
    }


# -- the network


def _config(shape: Shape) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.positions,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "torch_dtype": "float32" if shape.weights else "bfloat16",
    }
    return config if shape.weights else {**config, RANDOM_WEIGHTS_KEY: shape.seed}


def _weights(shape: Shape) -> dict[str, Floats]:
    """Normal deviates of the usual width, in the order in which a checkpoint names them."""
    draw = np.random.default_rng(shape.seed)
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def normal(rows: int, columns: int) -> Floats:
        return draw.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.02)

    weights = {"model.embed_tokens.weight": normal(shape.vocabulary, shape.hidden)}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        weights[f"{at}input_layernorm.weight"] = np.ones(shape.hidden, np.float32)
        weights[f"{at}self_attn.q_proj.weight"] = normal(wide, shape.hidden)
        weights[f"{at}self_attn.k_proj.weight"] = normal(narrow, shape.hidden)
        weights[f"{at}self_attn.v_proj.weight"] = normal(narrow, shape.hidden)
        weights[f"{at}self_attn.o_proj.weight"] = normal(shape.hidden, wide)
        weights[f"{at}post_attention_layernorm.weight"] = np.ones(shape.hidden, np.float32)
        weights[f"{at}mlp.gate_proj.weight"] = normal(shape.intermediate, shape.hidden)
        weights[f"{at}mlp.up_proj.weight"] = normal(shape.intermediate, shape.hidden)
        weights[f"{at}mlp.down_proj.weight"] = normal(shape.hidden, shape.intermediate)
    weights["model.norm.weight"] = np.ones(shape.hidden, np.float32)
    if not shape.tied:
        weights["lm_head.weight"] = normal(shape.vocabulary, shape.hidden)
    return weights


def _write_safetensors(path: Path, weights: dict[str, Floats]) -> None:
    """The safetensors layout: the length of a JSON header (u64), the header, the tensors end to end."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, value in weights.items():
        size = math.prod(value.shape) * value.itemsize
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for value in weights.values():
            file.write(value.astype("<f4").tobytes())
