"""Asynchronous tests run on uvloop, as the generator does; all share a null server, a tokenizer, a certificate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping

import pytest
import uvloop

from gapmeter.loadgen.tokenizer import PromptTokenizer, load_tokenizer
from gapmeter.servers.null.server import Schedule
from tests.kit.servers import faulty, null_process
from tests.kit.tokenizers import write_model


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def null() -> Iterator[str]:
    """A null server in a process of its own, 20 ms to the first token, 2 ms between tokens; its address."""
    with null_process("--first-ms", "20", "--gap-ms", "2") as (_, port):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def misbehaving() -> Iterator[str]:
    """One as fast, in a thread, that does wrong what a request's body says; its address."""
    with faulty(schedule=Schedule(first_ns=20_000_000, gap_ns=2_000_000)) as url:
        yield url


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    return load_tokenizer(write_model(tmp_path_factory.mktemp("model")))
