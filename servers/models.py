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
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
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
_BUILTIN_NAMES = ", ".join(f"{BUILTIN}{name}" for name in SHAPES)


def resolve_model(name: str) -> Path:
    """The folder of ``builtin:NAME``, of a path, or of a hub id (downloaded if it is not there yet).

    Raises ModelError when there is no such model, or it lacks a configuration or a tokenizer.
    """
    if name.startswith(BUILTIN):
        return builtin_model(name.removeprefix(BUILTIN), default_cache())
    folder = Path(os.path.expanduser(name))  # of nobody known it leaves the name as it is
    if not folder.is_dir():
        if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise ModelError(f"there is no model folder {name}; name a folder, a hub id or one of {_BUILTIN_NAMES}")
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
        raise ModelError(f"there is no built-in model {name!r}; there are {_BUILTIN_NAMES}")
    source = json.dumps([_RECIPE, asdict(shape), _TRAINED, _SPECIAL, _TEMPLATE, _words()])
    folder = cache / f"{name}-{hashlib.sha256(source.encode()).hexdigest()[:10]}"
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


def _snapshot(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and only hub ids need it

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"{hub_id!r} is neither a folder nor a model that the hub gives us ({reason}); "
            f"name a folder or one of {_BUILTIN_NAMES}"
        ) from error


def _write(folder: Path, shape: Shape) -> None:
    def write(name: str, value: dict[str, Any]) -> None:
        (folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")

    config = _config(shape)
    _tokenizer(shape.vocabulary).save(str(folder / "tokenizer.json"))
    tokens = {"eos_token": _SPECIAL[2], "pad_token": _SPECIAL[3], "chat_template": _TEMPLATE}
    more = {"clean_up_tokenization_spaces": False, "model_max_length": shape.positions}
    write("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, **more})
    write("config.json", config)
    write("generation_config.json", {"eos_token_id": 2, "pad_token_id": 3, "do_sample": False})
    if shape.weights:
        _write_weights(folder / "model.safetensors", config, shape.seed)


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
    if entries <= _TRAINED:
        return tokenizer
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    for number in itertools.takewhile(lambda _: len(vocabulary) < entries, itertools.count()):
        letters = ""
        while number or not letters:
            letters += chr(ord("a") + number % 26)
            number //= 26
        vocabulary.setdefault(f"Ġ{letters}", len(vocabulary))
    return Tokenizer.from_str(json.dumps(content))


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


def llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that a Llama of this configuration has, in the order in which a checkpoint names them."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    dim = int(config.get("head_dim") or hidden // heads)
    wide, narrow = heads * dim, int(config.get("num_key_value_heads") or heads) * dim
    inner, vocabulary = int(config["intermediate_size"]), int(config["vocab_size"])
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (wide, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, wide),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for number in range(int(config["num_hidden_layers"])):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes


def _write_weights(path: Path, config: dict[str, Any], seed: int) -> None:
    """Normal deviates of the usual width, ones for norms, in the safetensors layout.

    That is the length of a JSON header (u64), the header, the tensors end to end.
    """
    draw, shapes = np.random.default_rng(seed), llama_shapes(config)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for shape in shapes.values():
            if len(shape) == 1:
                values = np.ones(shape, np.float32)
            else:
                values = draw.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
            file.write(values.astype("<f4").tobytes())
