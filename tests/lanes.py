"""``--lanes N``: tests that can share the machine come first, N at a time; then those that are ``alone``, one by one.

Tests of one file stay together, and so do all that start an engine, so that no two engines run at once: they are one
lane's work, and come first, while the other lanes take file after file. The lanes are a pytest of their own, under
xdist. Its reports become this one's as they come, so that there is one run with one summary.

What fails in a lane, in a few files, runs again with those that are ``alone``, and that is what counts: beside two
other servers on as many cores a measured figure may be refused for the machine's sake. The summary names it.
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
_FILES = 3  # failures in more than these are not the machine's doing
_again = pytest.StashKey[dict[str, str]]()


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
    shared = {item.nodeid: item for item in session.items if not item.get_closest_marker(ALONE)}
    session.items[:] = [item for item in session.items if item.get_closest_marker(ALONE)]
    if shared:
        engines = {item.nodeid.partition("::")[0] for item in shared.values() if _turn(item) == 0}
        # pytest takes what has failed before its loop for errors of collection.
        session.config.option.continue_on_collection_errors = True
        told, code, output = _run(session.config, lanes, engines)
        if session.shouldfail:  # -x or --maxfail
            return
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or set(told) != set(shared):
            raise RuntimeError(f"the lanes ended with {code}, {len(told)} of {len(shared)} told:\n{output}")
        session.config.stash[_again] = again = {name: why for name, why in told.items() if why}
        session.items += [shared[name] for name in again]


def summarize(terminal: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name what failed in the lanes and passed when it was alone."""
    failed = {report.nodeid for word in ("failed", "error") for report in terminal.getreports(word)}
    told = {name: why for name, why in config.stash.get(_again, {}).items() if name not in failed}
    if told:
        terminal.section("failed beside other tests, passed alone")
        for name, why in told.items():
            terminal.line(f"{name}: {why}")


def _run(config: pytest.Config, lanes: int, engines: set[str]) -> tuple[dict[str, str], int, str]:
    """Relay the reports of what this run's arguments select, but of what is to run again.

    The tests told of, with why if they shall run again; the exit code; the output.
    """
    asked = config.getoption("markexpr")
    marks = f"({asked}) and not {ALONE}" if asked else f"not {ALONE}"
    words = ["-n", str(lanes), "--no-loadscope-reorder", "-m", marks]
    command = [sys.executable, "-m", "pytest", *config.invocation_params.args, "--lanes", "0", *words]
    incoming, outgoing = os.pipe()
    told: dict[str, list[pytest.TestReport]] = {}
    failed: set[str] = set()
    with tempfile.TemporaryFile() as output, os.fdopen(incoming, "rb") as reports:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, pass_fds=(outgoing,),
            env={**os.environ, _REPORTS: str(outgoing), _ENGINE_FILES: os.pathsep.join(engines)},
            cwd=config.invocation_params.dir,
        )  # fmt: skip
        os.close(outgoing)
        with process:
            while (report := _next(config, reports)) is not None:
                of_test = told.setdefault(report.nodeid, [])
                of_test.append(report)
                if report.when == "teardown":
                    if any(each.failed for each in of_test) and not config.getoption("maxfail"):
                        failed.add(report.nodeid)
                    else:
                        _relay(config, of_test)
        if len({name.partition("::")[0] for name in failed}) > _FILES:
            for name in failed:
                _relay(config, told[name])
            failed.clear()
        output.seek(0)
        why = {name: _why(of_test) if name in failed else "" for name, of_test in told.items()}
        return why, process.returncode, output.read().decode(errors="replace")[-4000:]


def _relay(config: pytest.Config, reports: list[pytest.TestReport]) -> None:
    for report in reports:
        config.hook.pytest_runtest_logreport(report=report)


def _why(reports: list[pytest.TestReport]) -> str:
    """The first line of what failed."""
    lines = next(report.longreprtext for report in reports if report.failed).splitlines()
    return next((line[1:].strip() for line in lines if line.startswith("E ")), "") or "failed"


def _next(config: pytest.Config, reports: Any) -> Any:
    try:
        return config.hook.pytest_report_from_serializable(config=config, data=pickle.load(reports))
    except EOFError:
        return None
