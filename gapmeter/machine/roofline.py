"""The two sides of a roofline: what a decode step of the model reads, and what this machine's cores can do at most.

Weights are described from the headers of the safetensors files (they name every tensor with type and shape) and
config.json; where there are no weights, from config.json alone for the Llama layout. What cannot be known this way is
None, never guessed.

Peaks are measured for about a second by ``-m gapmeter.machine.roofline SETTINGS`` (JSON), which prints one JSON
document. One thread a core, all at once, each on arrays of its own; a rate is the sum over threads. The figures are
those of the cores that a server of ours will get.

- triad: a = b + s c (McCalpin's STREAM) as two passes of numpy, 5 x 8 bytes an element, what a write allocates not
  counted, over arrays of four times the last-level cache;
- read: the dot product of two such arrays, 2 x 8 bytes an element: a decode step mostly reads;
- cached: the same dot product over as many bytes as the model has weights, where these fit into the cache;
- multiply: C = A B of single-precision matrices, 2 n^3 operations. numpy has no 16-bit arithmetic that an engine uses,
  so other precisions have no figure here.
"""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gapmeter.records.process import text_of
from gapmeter.servers.models import llama_shapes

if TYPE_CHECKING:  # the process that measures prints JSON, and starts without them in a third of the time
    from gapmeter.analysis.results.device import Weights
    from gapmeter.analysis.results.manifest import Peaks


_STORED = {
    "F64": 8.0, "F32": 4.0, "F16": 2.0, "BF16": 2.0, "F8_E4M3": 1.0, "F8_E5M2": 1.0, "I64": 8.0, "I32": 4.0,
    "I16": 2.0, "I8": 1.0, "U8": 1.0, "BOOL": 1.0,
}  # fmt: skip
_FLOATS = {"F64", "F32", "F16", "BF16"}
_PACKED = ("qweight", "weight_packed", "_blocks")
_DTYPES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
_LLAMA_LAYOUT = {"llama", "mistral"}
# What models' configs call how many experts a layer has, and how many of them compute a token.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
_LARGEST_HEADER = 1 << 28
_BUDGET_S = 0.22  # a kernel, once its arrays are there
_FEWEST = 3
_LARGEST_BYTES = 1 << 30
_SIZE = 768  # of the matrices
_CACHES = Path("/sys/devices/system/cpu")
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
Floats = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One stored tensor."""

    name: str
    dtype: str
    elements: int
    matrix: bool


def describe_weights(folder: Path, precision: str, kv_precision: str | None = None) -> Weights | None:
    """The model in ``folder`` served at ``precision``; None where its files do not tell enough.

    ``kv_precision`` is the engine's own word for the KV cache (fp8), None for the model's. ``step_parameters`` and
    ``step_bytes``: what every decode step reads whole, that is all but the input embedding (of which it reads a row a
    token) and but ``experts``. ``head_parameters`` of these make the logits. ``kv_bytes`` is one token's key and value
    in one layer; ``sliding_layers`` of the ``layers`` look back ``window`` tokens only. ``attention_width`` is heads
    times head size. ``source`` says what was read.
    """
    try:
        whole = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config: dict[str, Any] = whole.get("text_config") or whole
        tensors, source = _stored_tensors(folder), "safetensors headers and config.json"
        if not tensors and config.get("model_type") in _LLAMA_LAYOUT:
            tensors = [_tensor(name, "F32", shape) for name, shape in llama_shapes(config).items()]
            source = "config.json (no weights are stored)"
        quantized = whole.get("quantization_config") or config.get("quantization_config") or {}
        group: dict[str, Any] = next(iter((quantized.get("config_groups") or {}).values()), {})
        bits = int(quantized.get("bits") or (group.get("weights") or {}).get("num_bits") or 4)
        return _weights(tensors, config, precision, kv_precision, source, bits) if tensors else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # of a file that says something else
        return None


def _weights(
    tensors: list[Tensor], config: Mapping[str, Any], precision: str, kv_precision: str | None, source: str, bits: int
) -> Weights:
    from gapmeter.analysis.results.device import Experts, Weights

    text = [t for t in tensors if "vision" not in t.name and "visual." not in t.name]
    tied = config.get("tie_word_embeddings")  # left out where it is what the model's class does anyway
    tied = not any(_is_head(t.name) for t in text) if tied is None else bool(tied)
    used = [t for t in text if not (tied and _is_head(t.name))]
    stored = _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), 4.0)
    routed = [t for t in used if ".experts." in t.name]
    step = [t for t in used if ".experts." not in t.name and (tied or not _is_embedding(t.name))]
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    kv_elements = 2 * kv_heads * head_dim  # numbers that one token leaves in one layer's cache
    if config.get("kv_lora_rank"):  # multi-head latent attention keeps one compressed vector
        kv_elements, kv_heads = int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]), 1
    layers, kinds = int(config["num_hidden_layers"]), config.get("layer_types")
    if kinds:  # others keep a state of a fixed size in place of keys and values
        layers = sum(kind.endswith("attention") and kind != "linear_attention" for kind in kinds)
    sliding, window = 0, config.get("sliding_window")
    if window and config.get("use_sliding_window") is not False:
        sliding = sum(kind == "sliding_attention" for kind in kinds) if kinds else layers
    experts = None
    if routed:
        experts = Experts(
            parameters=sum(_numbers(t, bits) for t in routed),
            bytes=sum(_served_bytes(t, precision, stored) for t in routed),
            count=_first(config, _EXPERTS),
            per_token=_first(config, _EXPERTS_PER_TOKEN),
        )
    kv_dtype = 1.0 if kv_precision and kv_precision.startswith("fp8") else _DTYPES.get(precision, stored)
    return Weights(
        parameters=sum(_numbers(t, bits) for t in used),
        step_parameters=sum(_numbers(t, bits) for t in step),
        step_bytes=sum(_served_bytes(t, precision, stored) for t in step),
        head_parameters=int(config["vocab_size"]) * int(config["hidden_size"]),
        layers=layers,
        attention_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        attention_width=heads * head_dim,
        kv_bytes=kv_elements * kv_dtype,
        sliding_layers=sliding,
        window=int(window) if window and sliding else None,
        precision=precision,
        experts=experts,
        source=source,
    )


def _first(config: Mapping[str, Any], keys: Sequence[str]) -> int:
    """What the config has by the first of these names that it knows. Raises KeyError where it knows none."""
    return int(config[next(filter(config.get, keys), keys[0])])


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


def _numbers(tensor: Tensor, bits: int) -> int:
    """How many parameters a tensor holds: a packed one has several, of so many ``bits`` each, in every integer."""
    packed = tensor.name.endswith(_PACKED) and tensor.dtype not in _FLOATS
    return int(tensor.elements * 8 * _STORED[tensor.dtype] // bits) if packed else tensor.elements


def measure_peaks(cores: Sequence[int], weight_bytes: float | None, timeout_s: float = 15.0) -> Peaks | None:
    """The peaks of these cores in a process of their own; None when they could not be measured."""
    from gapmeter.analysis.results.manifest import Peaks

    settings = json.dumps({"cores": list(cores), "weight_bytes": weight_bytes})
    single = dict.fromkeys(_THREAD_VARIABLES, "1")  # the threads are ours
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "gapmeter.machine.roofline", settings],
            capture_output=True, text=True, timeout=timeout_s, check=True, env={**os.environ, **single},
        )  # fmt: skip
        return Peaks.model_validate_json(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def main(arguments: Sequence[str]) -> int:
    settings = json.loads(arguments[0])
    if settings["cores"]:
        os.sched_setaffinity(0, settings["cores"])
    began = time.perf_counter()
    cores = tuple(sorted(os.sched_getaffinity(0)))
    cache = last_level_cache(cores)
    length = max(1 << 16, min(4 * (cache or 1 << 25), _LARGEST_BYTES) // 8 // len(cores))  # of one array of one core
    parts = [[np.ones(length) for _ in range(3)] for _ in cores]
    squares = [[np.ones((_SIZE, _SIZE), np.float32) for _ in range(3)] for _ in cores]
    weight_bytes, cached = settings["weight_bytes"], None
    if weight_bytes and cache and weight_bytes < cache:  # as many bytes as a step reads, from two arrays of half that
        short = max(1024, int(weight_bytes / 16 / len(parts)))
        small = [(part[1][:short].copy(), part[2][:short].copy()) for part in parts]
        cached = measure_rate([partial(np.dot, *pair) for pair in small], 16.0 * short * len(parts) / 1e9)
    peaks = {
        "cores": cores,
        "llc_bytes": cache,
        "array_bytes": 8 * length * len(cores),
        "triad": measure_rate([partial(_triad, *part) for part in parts], 40.0 * length * len(cores) / 1e9),
        "read": measure_rate([partial(np.dot, part[1], part[2]) for part in parts], 16.0 * length * len(cores) / 1e9),
        "cached": cached,
        "multiply": measure_rate(
            [partial(np.matmul, a, b, out=c) for c, a, b in squares], 2.0 * _SIZE**3 * len(cores) / 1e12
        ),
        "multiply_precision": "float32",
    }
    print(json.dumps({**peaks, "took_s": time.perf_counter() - began}))
    return 0


def last_level_cache(cores: Sequence[int], root: Path = _CACHES) -> int | None:
    """Bytes of the last-level caches that these cores have, each shared one counted once; None where unknown."""
    sizes: dict[str, int] = {}
    for core in cores:
        entries = [(int(text_of(p / "level") or 0), p) for p in (root / f"cpu{core}" / "cache").glob("index*")]
        level, path = max(entries, default=(0, root), key=lambda entry: entry[0])
        size = text_of(path / "size")
        if level and size.endswith("K") and size[:-1].isdigit():
            sizes[text_of(path / "shared_cpu_list") or str(core)] = int(size[:-1]) * 1024
    return sum(sizes.values()) or None


def measure_rate(work: Sequence[Callable[[], None]], amount: float) -> dict[str, float]:
    """``amount`` per second over repeats in which every thread does its work once; the first is not counted.

    As the fields of a MeasuredRate.
    """
    times: list[float] = []
    together = threading.Barrier(len(work) + 1)
    over = threading.Event()

    def thread(mine: Callable[[], None]) -> None:
        while True:
            together.wait()
            if over.is_set():
                return
            mine()
            together.wait()

    threads = [threading.Thread(target=thread, args=(mine,), daemon=True) for mine in work]
    for each in threads:
        each.start()
    until = time.perf_counter() + _BUDGET_S
    while len(times) <= _FEWEST or time.perf_counter() < until:
        began = time.perf_counter()
        together.wait()
        together.wait()
        times.append(time.perf_counter() - began)
    over.set()
    together.wait()
    rates = sorted(amount / took for took in times[1:])
    return {"median": float(np.median(rates)), "low": rates[0], "high": rates[-1], "repeats": len(rates)}


def _triad(a: Floats, b: Floats, c: Floats) -> None:
    np.multiply(c, 3.0, out=a)
    np.add(a, b, out=a)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
