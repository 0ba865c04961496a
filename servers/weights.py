"""What a model is made of, read from its folder without loading it: parameters, bytes as served, KV cache.

From the headers of the safetensors files (they name every tensor with type and shape) and config.json; where there are
no weights, from config.json alone for the Llama layout. What cannot be known this way is None, never guessed.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
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
        tensors, source = _stored_tensors(folder), "safetensors headers and config.json"
        if not tensors and config.get("model_type") in _LLAMA_LAYOUT:
            tensors = [_tensor(name, "F32", shape) for name, shape in llama_shapes(config).items()]
            source = "config.json (no weights are stored)"
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
    kv_heads = int(config.get("num_key_value_heads") or heads)
    kv_elements = 2 * kv_heads * head_dim  # numbers that one token leaves in one layer's cache
    if config.get("kv_lora_rank"):  # multi-head latent attention keeps one compressed vector
        kv_elements, kv_heads = int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]), 1
    layers, kinds = int(config["num_hidden_layers"]), config.get("layer_types")
    sliding, window = 0, config.get("sliding_window")
    if window and config.get("use_sliding_window") is not False:
        sliding = sum(kind == "sliding_attention" for kind in kinds) if kinds else layers
    experts = None
    if routed:
        counts = ("num_experts", "num_local_experts", "n_routed_experts")
        experts = Experts(
            parameters=sum(t.elements for t in routed),
            bytes=sum(_served_bytes(t, precision, stored) for t in routed),
            count=next(int(config[name]) for name in counts if config.get(name)),
            per_token=int(config["num_experts_per_tok"]),
        )
    kv_dtype = 1.0 if kv_precision and kv_precision.startswith("fp8") else _DTYPES.get(precision, stored)
    return Weights(
        parameters=sum(t.elements for t in used),
        step_parameters=sum(t.elements for t in step),
        step_bytes=sum(_served_bytes(t, precision, stored) for t in step),
        head_parameters=int(config["vocab_size"]) * int(config["hidden_size"]),
        layers=layers,
        attention_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        attention_width=heads * head_dim,
        kv_bytes=kv_elements * kv_dtype,
        sliding_layers=sliding,
        window=int(window) if sliding else None,
        precision=precision,
        experts=experts,
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


def _is_embedding(name: str) -> bool:
    return name.endswith(("embed_tokens.weight", "wte.weight", "word_embeddings.weight"))


def _is_head(name: str) -> bool:
    return name.endswith("lm_head.weight")


def _stored_tensors(folder: Path) -> list[Tensor]:
    """Every tensor of the files that the index names, or of all where there is none.

    A safetensors file is a length (u64), then JSON. Raises OSError, or ValueError for another file.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    tensors: list[Tensor] = []
    for name in names:
        with (folder / name).open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            if not 0 < size < _LARGEST_HEADER:
                raise ValueError(f"{folder / name} is no safetensors file")
            header: dict[str, Any] = json.loads(file.read(size))
        header.pop("__metadata__", None)
        tensors += [_tensor(name, value["dtype"], value["shape"]) for name, value in header.items()]
    return tensors


def _tensor(name: str, dtype: str, shape: Sequence[int]) -> Tensor:
    return Tensor(name, dtype, math.prod(shape), len(shape) > 1)


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
