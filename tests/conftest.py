"""What holds for all tests: nothing asks a model hub, a missing browser is no failure at home, no process is left."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests import lanes
from tests.kit.browser import BROWSERS, Tab, browser_tab
from tests.kit.servers import Certificate

# The same examples every time, so that who has changed nothing sees what CI saw; --hypothesis-profile=new draws others.
# How long an example takes says how busy the machine is, nothing about what it proves.
for _name, _same, _most in (("same", True, 100), ("new", False, 500)):
    settings.register_profile(
        _name, derandomize=_same, max_examples=_most, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )

_MARK = "GAPMETER_TEST_SESSION"
_PYTHONS_OWN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
_PATIENCE_S = 10.0


def pytest_addoption(parser: pytest.Parser) -> None:
    lanes.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    lanes.configure(config)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not config.getoption("hypothesis_profile", None):
        settings.load_profile("same")


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    lanes.run_first(session)
    return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lanes.arrange(items)
    if "CI" in os.environ or any(shutil.which(name) for name in BROWSERS):
        return
    missing = pytest.mark.skip(reason="no Chromium on the PATH (Debian: apt-get install chromium)")
    for item in items:
        if item.get_closest_marker("browser"):
            item.add_marker(missing)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lanes.summarize(terminalreporter, config)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """A self-signed one for localhost."""
    return _certificate(tmp_path_factory.mktemp("tls"), "-x509", "-days", "2")


@pytest.fixture(scope="session")
def expired_certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """Another, of January 2020."""
    made = _certificate(tmp_path_factory.mktemp("expired"))
    request = made.file.rename(made.folder / "request.pem")
    (made.folder / "index").touch()
    (made.folder / "ca.cnf").write_text(
        "[ca]\ndefault_ca=own\n[own]\ndatabase=index\nnew_certs_dir=.\nrand_serial=yes\ndefault_md=sha256\n"
        "policy=any\ncopy_extensions=copy\n[any]\ncommonName=supplied\n"
    )
    command = ["openssl", "ca", "-batch", "-notext", "-config", "ca.cnf", "-selfsign", "-keyfile", str(made.key)]
    command += ["-in", str(request), "-out", str(made.file), "-startdate", "20200101000000Z"]
    subprocess.run([*command, "-enddate", "20200201000000Z"], check=True, capture_output=True, cwd=made.folder)
    return made


def _certificate(folder: Path, *words: str) -> Certificate:
    """With a new key; without ``-x509`` among the words, what asks an authority for one."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl program makes the certificate")
    made = Certificate(folder)
    command = ["openssl", "req", *words, "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(made.key), "-out", str(made.file)]
    subprocess.run(command, check=True, capture_output=True)
    return made


@pytest.fixture
async def tab(tmp_path: Path) -> AsyncIterator[Tab]:
    """An empty page of a real browser."""
    async with browser_tab(tmp_path / "browser") as made:
        yield made


@pytest.fixture(scope="session", autouse=True)
def _no_process_outlives_the_tests() -> Iterator[None]:
    """Fails the session when a process that any test started, at any remove, still runs at its end."""
    mark = os.environ[_MARK] = uuid.uuid4().hex
    yield
    deadline = time.monotonic() + _PATIENCE_S
    while (left := _left(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    told = [f"{process.pid} {' '.join(process.cmdline())[:120]}" for process in left]
    for process in left:
        process.kill()
    assert not left, "still running after the last test: " + "; ".join(told)


def _left(mark: str) -> list[psutil.Process]:
    """Our descendants, and orphans that carry our mark in their environment."""
    ours = {process.pid for process in psutil.Process().children(recursive=True)}
    return [
        process for process in psutil.process_iter() if process.pid != os.getpid() and _is_ours(process, ours, mark)
    ]


def _is_ours(process: psutil.Process, ours: set[int], mark: str) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE or any(own in " ".join(process.cmdline()) for own in _PYTHONS_OWN):
            return False
        return process.pid in ours or process.environ().get(_MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
