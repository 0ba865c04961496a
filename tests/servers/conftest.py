"""The model that tests of servers share."""

from __future__ import annotations

from pathlib import Path

import pytest

from gapmeter.servers.models import builtin_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model's folder; nobody may change it."""
    return builtin_model("tiny", tmp_path_factory.mktemp("models"))
