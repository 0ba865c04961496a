"""Asynchronous tests here run on uvloop, as the generator does; others have a null server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import uvloop

from gapmeter.loadgen.tokenizer import PromptTokenizer, load_tokenizer
from tests.loadgen.tiny_tokenizer import write_model


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    """Byte-level BPE with a chat template."""
    return load_tokenizer(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def null() -> Iterator[str]:
    """A null server in a process of its own: 20 ms to the first token, 2 ms between tokens. Yields its address."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "gapmeter.servers.null",
        "--with-parent",
        "--first-ms",
        "20",
        "--gap-ms",
        "2",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()
