"""``--quick-processes N``: tests that need neither an engine nor the machine for themselves come first, N at a time.

They run in a pytest of their own, under xdist. Its reports become this one's as they come, so that there is one run
with one summary; what starts servers and commands or opens a browser follows, one test after the other.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from typing import Any

import pytest

ALONE = ("transformers", "vllm", "whole_run", "environment", "browser")
_REPORTS = "GAPMETER_TEST_REPORTS"  # the file descriptor that reports go to


class Relay:
    """Hands every report of a run under xdist to the pytest that started it."""

    def __init__(self, config: pytest.Config, descriptor: int) -> None:
        self._config, self._to = config, os.fdopen(descriptor, "wb")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        told.pop("node", None)  # xdist's
        pickle.dump(told, self._to)
        self._to.flush()

    def pytest_unconfigure(self) -> None:
        self._to.close()


def add_option(parser: pytest.Parser) -> None:
    text = "first run the tests that need neither an engine nor the machine for themselves, in N processes"
    parser.addoption("--quick-processes", type=int, default=0, metavar="N", help=text)


def configure(config: pytest.Config) -> None:
    """In the pytest that runs the quick tests, not in its workers."""
    if (descriptor := os.environ.get(_REPORTS)) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Relay(config, int(descriptor)))


def run_first(session: pytest.Session) -> None:
    """Run the quick ones among the collected tests, if asked; the others are left to pytest."""
    processes = session.config.getoption("quick_processes")
    worker = hasattr(session.config, "workerinput")  # all run under xdist anyway
    if not processes or worker or session.testsfailed or session.config.getoption("collectonly"):
        return
    quick = {item.nodeid for item in session.items if not any(map(item.get_closest_marker, ALONE))}
    session.items[:] = [item for item in session.items if item.nodeid not in quick]
    if quick:
        # pytest takes what has failed before its loop for errors of collection.
        session.config.option.continue_on_collection_errors = True
        reported, code, output = _run(session.config, processes)
        if session.shouldfail:  # -x or --maxfail
            return
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or reported != quick:
            raise RuntimeError(f"the quick tests ended with {code}, {len(reported)} of {len(quick)} told:\n{output}")


def _run(config: pytest.Config, processes: int) -> tuple[set[str], int, str]:
    """Relay the reports of what this run's arguments select; the tests told of, the exit code, the output."""
    marks = " and ".join(f"not {mark}" for mark in ALONE)
    asked = config.getoption("markexpr")
    words = ["-n", str(processes), "--dist", "loadfile", "-m", f"({asked}) and {marks}" if asked else marks]
    command = [sys.executable, "-m", "pytest", *config.invocation_params.args, "--quick-processes", "0", *words]
    incoming, outgoing = os.pipe()
    reported: set[str] = set()
    with tempfile.TemporaryFile() as output, os.fdopen(incoming, "rb") as reports:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, pass_fds=(outgoing,),
            env={**os.environ, _REPORTS: str(outgoing)}, cwd=config.invocation_params.dir,
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
