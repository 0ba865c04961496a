"""One server of each engine for all tests that load one and need no flags of their own: a start takes a minute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.injection import Delayed, delayed
from tests.engines.cases import CASES, ENGINES


@pytest.fixture(scope="session", params=ENGINES.values())
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Delayed]:
    """Delays can be put into it; unless a test does so there are none. ``@on(NAME)``: only one of the engines."""
    with delayed(request.param, tmp_path_factory.mktemp(request.param), CASES) as made:
        yield made
