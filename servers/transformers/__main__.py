"""``python -m gapmeter.servers.transformers --model FOLDER ...``: the API process, which starts the engine process."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from time import monotonic_ns

from gapmeter.servers.api.app import ApiOptions, serve
from gapmeter.servers.api.text import TextModel
from gapmeter.servers.engine_client import EngineClient, GenerationRequest, Message
from gapmeter.servers.launch import LOOPBACK
from gapmeter.servers.models import ModelError, check_weights, resolve_model
from gapmeter.servers.transformers import PRECISIONS, TransformersSettings

_MODEL_LEN = 2048


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gapmeter.servers.transformers", description=__doc__)
    parser.add_argument("--model", required=True, help="a folder, a hub id, or builtin:NAME")
    parser.add_argument("--served-model-name", help="what clients call it (default: as in --model)")
    parser.add_argument("--host", default=LOOPBACK)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    parser.add_argument("--max-batch", type=int, default=8, help="most requests that run together")
    parser.add_argument("--max-queue", type=int, default=1024, help="most requests that wait beside them; more get 503")
    parser.add_argument(
        "--max-model-len", type=int, help=f"prompt plus output (default: the model's, at most {_MODEL_LEN})"
    )
    parser.add_argument("--max-batch-tokens", type=int, default=512, help="most tokens in one step, on a CPU")
    parser.add_argument("--kv-tokens", type=int, default=0, help="size of the KV cache (default: all requests in full)")
    parser.add_argument("--page-size", type=int, default=64, help="tokens in a block of the KV cache")
    parser.add_argument("--scheduler", choices=("fifo", "prefill_first"), default="fifo")
    parser.add_argument("--prefix-cache", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--async-batching", action=argparse.BooleanOptionalAction, help="default: as Transformers chooses"
    )
    parser.add_argument("--cuda-graphs", action=argparse.BooleanOptionalAction, help="default: as Transformers chooses")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N (default: the first CUDA device, else cpu)")
    parser.add_argument("--seed", type=int, default=0, help="draws seeds for requests that name none")
    return parser


def main() -> int:
    """Parse the flags, read the model's text side, and serve."""
    args = _parser().parse_args()
    try:
        folder = resolve_model(args.model)
        check_weights(folder)
        text = TextModel(folder)
        length = _model_len(folder, args.max_model_len)
    except (ModelError, OSError, ValueError) as error:
        print(f"cannot serve {args.model}: {error}", file=sys.stderr)
        return 1
    api = ApiOptions(args.host, args.port, args.served_model_name or args.model, length, "transformers")
    named = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(named) if named.isdigit() and int(named) > 0 else len(os.sched_getaffinity(0))
    values = vars(args) | {"model": str(folder), "max_model_len": length, "threads": threads}
    settings = json.dumps({field.name: values[field.name] for field in fields(TransformersSettings)})
    most = args.max_batch + args.max_queue
    return serve(EngineClient("gapmeter.servers.transformers.engine", settings, most, encode), text, api)


def encode(request: GenerationRequest) -> Message:
    """What the engine needs of a request; the last value is when it was sent."""
    return (
        list(request.prompt_ids), request.max_tokens, request.min_tokens, request.ignore_eos, request.temperature,
        request.seed, monotonic_ns(),
    )  # fmt: skip


def _model_len(folder: Path, requested: int | None) -> int:
    """Raises ModelError when more is requested than the model has positions."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    positions = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    if requested and positions and requested > positions:
        raise ModelError(f"--max-model-len {requested} is more than the model's {positions} positions")
    return requested or min(positions or _MODEL_LEN, _MODEL_LEN)


if __name__ == "__main__":
    sys.exit(main())
