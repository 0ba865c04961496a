"""``--lanes N``: tests that can share the machine come first, N at a time; then those that are ``alone``, one by one.

Tests of one file stay together, and so do all that start an engine, so that no two engines run at once: they are one
lane's work, and come first, while the other lanes take file after file. The lanes are a pytest of their own, under
xdist. Its reports become this one's as they come, so that there is one run with one summary.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

ALONE = "alone"
_ENGINES = ("transformers", "vllm")
_WHOLE = ("whole_run", "browser", "environment")
# For the pytest that runs the lanes: the file descriptor that reports go to, and the files that start engines.
_REPORTS, _ENGINE_FILES = "GAPMETER_TEST_REPORTS", "GAPMETER_TEST_ENGINE_FILES"


class Lanes(LoadScopeScheduling):
    """Which tests stay together: those of a file, and all in files that start engines."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "engines" if file in os.environ[_ENGINE_FILES].split(os.pathsep) else file


class Relay:
    """Hands every report of the lanes to the pytest that started them."""

    def __init__(self, config: pytest.Config, descriptor: int) -> None:
        self._config, self._to = config, os.fdopen(descriptor, "wb")

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Producer) -> Lanes:
        return Lanes(config, log)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        told.pop("node", None)  # xdist's
        pickle.dump(told, self._to)
        self._to.flush()

    def pytest_unconfigure(self) -> None:
        self._to.close()


def add_option(parser: pytest.Parser) -> None:
    text = "first run the tests that do not need the machine for themselves, N at a time"
    parser.addoption("--lanes", type=int, default=0, metavar="N", help=text)


def configure(config: pytest.Config) -> None:
    """In the pytest that runs the lanes, not in its workers."""
    if (descriptor := os.environ.get(_REPORTS)) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Relay(config, int(descriptor)))


def arrange(items: list[pytest.Item]) -> None:
    """In a worker of the lanes: what takes longest comes first, so that no lane is left with it at the end."""
    if _REPORTS in os.environ:
        items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    return next((turn for turn, marks in enumerate((_ENGINES, _WHOLE)) if any(map(item.get_closest_marker, marks))), 2)


def run_first(session: pytest.Session) -> None:
    """Run in lanes what can be, if asked; the others are left to pytest."""
    lanes = session.config.getoption("lanes")
    worker = hasattr(session.config, "workerinput")  # all run under xdist anyway
    if not lanes or worker or session.testsfailed or session.config.getoption("collectonly"):
        return
    shared = [item for item in session.items if not item.get_closest_marker(ALONE)]
    session.items[:] = [item for item in session.items if item.get_closest_marker(ALONE)]
    if shared:
        engines = {item.nodeid.partition("::")[0] for item in shared if _turn(item) == 0}
        # pytest takes what has failed before its loop for errors of collection.
        session.config.option.continue_on_collection_errors = True
        reported, code, output = _run(session.config, lanes, engines)
        if session.shouldfail:  # -x or --maxfail
            return
        whole = reported == {item.nodeid for item in shared}
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not whole:
            raise RuntimeError(f"the lanes ended with {code}, {len(reported)} of {len(shared)} told:\n{output}")


def _run(config: pytest.Config, lanes: int, engines: set[str]) -> tuple[set[str], int, str]:
    """Relay the reports of what this run's arguments select; the tests told of, the exit code, the output."""
    asked = config.getoption("markexpr")
    marks = f"({asked}) and not {ALONE}" if asked else f"not {ALONE}"
    words = ["-n", str(lanes), "--no-loadscope-reorder", "-m", marks]
    command = [sys.executable, "-m", "pytest", *config.invocation_params.args, "--lanes", "0", *words]
    incoming, outgoing = os.pipe()
    reported: set[str] = set()
    with tempfile.TemporaryFile() as output, os.fdopen(incoming, "rb") as reports:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, pass_fds=(outgoing,),
            env={**os.environ, _REPORTS: str(outgoing), _ENGINE_FILES: os.pathsep.join(engines)},
            cwd=config.invocation_params.dir,
        )  # fmt: skip
        os.close(outgoing)
        with process:
            while (report := _next(config, reports)) is not None:
                reported.add(report.nodeid)
                config.hook.pytest_runtest_logreport(report=report)
        output.seek(0)
        return reported, process.returncode, output.read().decode(errors="replace")[-4000:]


def _next(config: pytest.Config, reports: Any) -> Any:
    try:
        return config.hook.pytest_report_from_serializable(config=config, data=pickle.load(reports))
    except EOFError:
        return None
