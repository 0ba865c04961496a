"""What a model is made of, read from its folder without loading it: parameters, bytes as served, KV cache.

From the headers of the safetensors files (they name every tensor with type and shape) and config.json; where there are
no weights, from config.json alone for the Llama layout. What cannot be known this way is None, never guessed.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_STORED = {
    "F64": 8.0, "F32": 4.0, "F16": 2.0, "BF16": 2.0, "F8_E4M3": 1.0, "F8_E5M2": 1.0, "I64": 8.0, "I32": 4.0,
    "I16": 2.0, "I8": 1.0, "U8": 1.0, "BOOL": 1.0,
}  # fmt: skip
_FLOATS = {"F64", "F32", "F16", "BF16"}
_DTYPES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
_LLAMA_LAYOUT = {"llama", "mistral"}
_LARGEST_HEADER = 1 << 28


@dataclass(frozen=True, slots=True)
class Tensor:
    """One stored tensor."""

    name: str
    dtype: str
    elements: int
    matrix: bool


@dataclass(frozen=True, slots=True)
class Experts:
    """The part of a mixture of experts of which a token uses ``per_token`` out of ``count``."""

    parameters: int
    bytes: float
    count: int
    per_token: int


@dataclass(frozen=True, slots=True)
class Weights:
    """A model as a roofline needs it.

    ``step_parameters`` and ``step_bytes``: what every decode step reads whole, that is all but the input embedding
    (of which it reads a row a token) and but ``experts``. ``head_parameters`` of these make the logits.
    ``kv_bytes`` is one token's key and value in one layer; ``sliding_layers`` of the ``layers`` look back ``window``
    tokens only. ``attention_width`` is heads times head size. ``source`` says what was read.
    """

    parameters: int
    step_parameters: int
    step_bytes: float
    head_parameters: int
    layers: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    attention_width: int
    kv_bytes: float
    sliding_layers: int
    window: int | None
    precision: str
    experts: Experts | None
    source: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe_weights(folder: Path, precision: str, kv_precision: str | None = None) -> Weights | None:
    """The model in ``folder`` served at ``precision``; None where its files do not tell enough.

    ``kv_precision`` is the engine's own word for the KV cache (fp8), None for the model's.
    """
    try:
        whole = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config: dict[str, Any] = whole.get("text_config") or whole
        tensors = list(_stored_tensors(folder))
        source = "safetensors headers and config.json"
        if not tensors:
            tensors, source = _llama_tensors(config), "config.json (no weights are stored)"
        return _weights(tensors, config, precision, kv_precision, source) if tensors else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _weights(
    tensors: list[Tensor], config: Mapping[str, Any], precision: str, kv_precision: str | None, source: str
) -> Weights:
    tied = bool(config.get("tie_word_embeddings"))
    text = [t for t in tensors if "vision" not in t.name and "visual." not in t.name]
    used = [t for t in text if not (tied and _is_head(t.name))]
    stored = _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), 4.0)
    routed = [t for t in used if ".experts." in t.name]
    step = [t for t in used if t not in set(routed) and (tied or not _is_embedding(t.name))]
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    sliding, window = _sliding(config)
    kv_elements, kv_heads = _kv_elements(config, heads, head_dim)
    kv_dtype = 1.0 if kv_precision and kv_precision.startswith("fp8") else _DTYPES.get(precision, stored)
    return Weights(
        parameters=sum(t.elements for t in used),
        step_parameters=sum(t.elements for t in step),
        step_bytes=sum(_served_bytes(t, precision, stored) for t in step),
        head_parameters=int(config["vocab_size"]) * int(config["hidden_size"]),
        layers=int(config["num_hidden_layers"]),
        attention_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        attention_width=heads * head_dim,
        kv_bytes=kv_elements * kv_dtype,
        sliding_layers=sliding,
        window=window,
        precision=precision,
        experts=_experts(routed, config, precision, stored),
        source=source,
    )


def _served_bytes(tensor: Tensor, precision: str, stored: float) -> float:
    """Bytes of a tensor in the server's memory: cast to a dtype, to 8 bits where a matrix is, or as it is stored."""
    if tensor.dtype not in _FLOATS:
        return tensor.elements * _STORED[tensor.dtype]
    if precision in _DTYPES:
        return tensor.elements * _DTYPES[precision]
    if precision == "fp8" and tensor.matrix and not (_is_embedding(tensor.name) or _is_head(tensor.name)):
        return float(tensor.elements)
    return tensor.elements * min(_STORED[tensor.dtype], stored)


def _experts(routed: list[Tensor], config: Mapping[str, Any], precision: str, stored: float) -> Experts | None:
    if not routed:
        return None
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next(int(config[name]) for name in names if config.get(name))
    total = sum(_served_bytes(t, precision, stored) for t in routed)
    return Experts(sum(t.elements for t in routed), total, count, int(config["num_experts_per_tok"]))


def _kv_elements(config: Mapping[str, Any], heads: int, head_dim: int) -> tuple[int, int]:
    """Numbers that one token leaves in one layer's cache, and the heads that share them."""
    if config.get("kv_lora_rank"):  # multi-head latent attention keeps one compressed vector
        return int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]), 1
    kv_heads = int(config.get("num_key_value_heads") or heads)
    return 2 * kv_heads * head_dim, kv_heads


def _sliding(config: Mapping[str, Any]) -> tuple[int, int | None]:
    """How many layers look back a window only, and that window."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return 0, None
    kinds = config.get("layer_types")
    count = sum(kind == "sliding_attention" for kind in kinds) if kinds else int(config["num_hidden_layers"])
    return (count, int(window)) if count else (0, None)


def _is_embedding(name: str) -> bool:
    return name.endswith(("embed_tokens.weight", "wte.weight", "word_embeddings.weight"))


def _is_head(name: str) -> bool:
    return name.endswith("lm_head.weight")


def _stored_tensors(folder: Path) -> Iterable[Tensor]:
    """Every tensor of the files that the index names, or of all where there is none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    for name in names:
        yield from read_header(folder / name)


def read_header(path: Path) -> list[Tensor]:
    """The tensors of a safetensors file: a length (u64), then JSON. Raises OSError, or ValueError for another file."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        if not 0 < size < _LARGEST_HEADER:
            raise ValueError(f"{path} is no safetensors file")
        header: dict[str, Any] = json.loads(file.read(size))
    tensors = {name: value for name, value in header.items() if name != "__metadata__"}
    return [Tensor(n, v["dtype"], math.prod(v["shape"]), len(v["shape"]) > 1) for n, v in tensors.items()]


def _llama_tensors(config: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a Llama of this configuration has; none for other layouts."""
    if config.get("model_type") not in _LLAMA_LAYOUT:
        return []
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    dim = int(config.get("head_dim") or hidden // heads)
    wide, narrow = heads * dim, int(config.get("num_key_value_heads") or heads) * dim
    inner, vocabulary = int(config["intermediate_size"]), int(config["vocab_size"])
    layer = {"q_proj": hidden * wide, "k_proj": hidden * narrow, "v_proj": hidden * narrow, "o_proj": wide * hidden}
    layer |= {"gate_proj": hidden * inner, "up_proj": hidden * inner, "down_proj": inner * hidden}
    tensors = [Tensor("embed_tokens.weight", "F32", vocabulary * hidden, True), Tensor("norm", "F32", hidden, False)]
    tensors.append(Tensor("lm_head.weight", "F32", vocabulary * hidden, True))
    for number in range(int(config["num_hidden_layers"])):
        tensors += [Tensor(f"{number}.{name}", "F32", count, True) for name, count in layer.items()]
        tensors += [Tensor(f"{number}.norm{which}", "F32", hidden, False) for which in (1, 2)]
    return tensors
