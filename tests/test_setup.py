"""Setting up an environment: whole or not at all, only when needed, and with a sentence that says what to do."""

from __future__ import annotations

import fnmatch
import functools
import importlib.util
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("Makefile", "pyproject.toml", "setup.py", "setup", "scenarios", "loadgen", "probe", "records", "analysis")
NO_INDEX = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what a set-up reads, so that nothing here touches the environment that runs these tests."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(source, tmp_path / name)
    return tmp_path


@pytest.fixture
def silent_index() -> Iterator[socket.socket]:
    """A package index that takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(60)
        yield listener


def load(checkout: Path) -> ModuleType:
    """The set-up script of ``checkout`` as a module."""
    spec = importlib.util.spec_from_file_location("environment", checkout / "setup" / "environment.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["environment"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def environment(**more: str) -> dict[str, str]:
    """Ours without what a surrounding make or pip set-up would leak into the one under test."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PIP_", "MAKE", "MFLAGS", "TORCH_", "VLLM_"))
        and name not in ("SCENARIO", "ENGINE", "URL", "GENERATOR", "ARGS", "CI")
    }
    return {**kept, "TORCH_BUILD": "cpu", **more}


def make(checkout: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "-s", *words],
        cwd=checkout,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def begin(checkout: Path, index: socket.socket) -> subprocess.Popen[str]:
    """A set-up that is in the middle of asking ``index`` for torch."""
    address = f"http://127.0.0.1:{index.getsockname()[1]}/"
    process = subprocess.Popen(
        [sys.executable, "setup/environment.py", "core", "transformers"],
        cwd=checkout, env=environment(PIP_INDEX_URL=address, PIP_CONFIG_FILE=os.devnull),
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    asked, _ = index.accept()
    asked.close()
    return process


def whole_environment(checkout: Path, parts: tuple[str, ...]) -> Path:
    """A virtual environment that claims to hold ``parts``."""
    folder = checkout / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "pip").symlink_to(Path(sysconfig.get_path("purelib")) / "pip")  # quicker than ensurepip
    script = load(checkout)
    for part in parts:
        (folder / f"gapmeter-{part}.stamp").write_text(script.key(part))
    return folder


@pytest.mark.environment
def test_where_the_cpu_torch_cannot_be_found_the_target_names_torch_index_and_leaves_nothing(checkout: Path) -> None:
    done = make(checkout, "loadtest", "SCENARIO=chat-p99", f"PYTHON={sys.executable}", **NO_INDEX)
    assert done.returncode == 2
    assert "with the variable TORCH_INDEX" in done.stderr
    assert re.search(r"finds no torch==[\d.]+\+cpu for Python 3\.\d+", done.stderr)
    assert done.stdout == ""
    assert not (checkout / ".venv").exists()


def test_a_set_up_that_was_told_to_outlive_its_terminal_does(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """As nohup says it; else a signal ends it tidily."""
    script = load(checkout)
    monkeypatch.setattr(script, "bring_up", lambda *_: None)
    for number, before in ((signal.SIGHUP, signal.SIG_IGN), (signal.SIGTERM, signal.SIG_DFL)):
        request.addfinalizer(functools.partial(signal.signal, number, signal.signal(number, before)))
    assert script.main(["core"]) == 0
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert callable(signal.getsignal(signal.SIGTERM))


@pytest.mark.environment
def test_a_set_up_that_is_terminated_leaves_nothing(checkout: Path, silent_index: socket.socket) -> None:
    process = begin(checkout, silent_index)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "interrupted; nothing is left half installed" in said
    assert not (checkout / ".venv").exists()


@pytest.mark.environment
def test_what_a_killed_set_up_left_is_removed_by_the_next_one(checkout: Path) -> None:
    words = [sys.executable, "setup/environment.py", "core"]
    process = subprocess.Popen(words, cwd=checkout, env=environment(**NO_INDEX), stderr=subprocess.DEVNULL)
    unfinished = checkout / ".venv" / ".unfinished"
    while not unfinished.exists():
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert unfinished.exists()
    done = make(checkout, "setup", f"PYTHON={sys.executable}", **NO_INDEX)
    assert "left unfinished by an earlier set-up; starting it anew" in done.stderr
    assert not (checkout / ".venv").exists()


def test_an_addition_that_cannot_be_found_leaves_a_working_environment_as_it_was(checkout: Path) -> None:
    folder = whole_environment(checkout, ("core", "dev"))
    done = make(checkout, "setup", **NO_INDEX)
    assert "TORCH_INDEX" in done.stderr
    assert (folder / "bin" / "python").exists()
    assert sorted(path.name for path in folder.glob("*.stamp")) == ["gapmeter-core.stamp", "gapmeter-dev.stamp"]
    assert not (folder / ".unfinished").exists()


def test_a_set_up_that_has_nothing_to_do_says_and_does_nothing(checkout: Path) -> None:
    whole_environment(checkout, ("core", "dev", "transformers", "locust", "otel"))
    done = make(checkout, "setup", **NO_INDEX)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_no_python_that_is_new_enough_is_a_sentence(checkout: Path) -> None:
    done = make(checkout, "setup", "PYTHON=")
    assert done.returncode == 2
    assert "needs Python 3.11 or newer" in done.stderr


@pytest.mark.parametrize(
    ("variables", "parts"),
    [
        ({"SCENARIO": "chat-p99"}, ("core", "transformers")),
        ({"SCENARIO": "chat-p99", "ENGINE": "vllm"}, ("core", "transformers", "vllm")),
        ({"SCENARIO": "chat-p99", "ENGINE": "simulated"}, ("core",)),
        ({"SCENARIO": "chat-p99", "URL": "http://127.0.0.1:8000", "ENGINE": "vllm"}, ("core",)),
        ({"SCENARIO": "chat-p99", "ARGS": "--set server.engine=vllm"}, ("core", "transformers", "vllm")),
        ({"SCENARIO": "chat-p99", "ARGS": "--engine=simulated --json"}, ("core",)),
        ({"SCENARIO": "chat-p99", "ARGS": "--url http://127.0.0.1:1"}, ("core",)),
        ({"SCENARIO": "no-such-scenario"}, ("core",)),
        ({"SCENARIO": "of-no-engine"}, ("core", "transformers")),
        ({"SCENARIO": "of-an-address"}, ("core",)),
        ({"SCENARIO": "chat-p99", "GENERATOR": "locust"}, ("core", "transformers", "locust")),
        ({"SCENARIO": "chat-p99", "ENGINE": "simulated", "ARGS": "--set load.generator=locust"}, ("core", "locust")),
        ({"SCENARIO": "chat-p99", "URL": "http://127.0.0.1:8000", "GENERATOR": "locust"}, ("core", "locust")),
        ({"SCENARIO": "chat-p99", "ENGINE": "simulated", "LOCUSTFILE": "mine.py"}, ("core", "locust")),
        ({"SCENARIO": "chat-p99", "ENGINE": "simulated", "ARGS": "--workers 2"}, ("core", "locust")),
    ],
)
def test_a_run_sets_up_the_engine_that_it_will_use(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], parts: tuple[str, ...]
) -> None:
    for name in ("SCENARIO", "ENGINE", "URL", "GENERATOR", "ARGS", "LOCUSTFILE"):
        monkeypatch.setenv(name, variables.get(name, ""))
    for name, server in (("of-no-engine", "max_batch: 4"), ("of-an-address", "url: http://h:1")):
        (checkout / "scenarios" / f"{name}.yaml").write_text(f"server: {{{server}}}\n")
    assert load(checkout).parts_for_run() == parts


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("server:\n  engine: vllm   # or another\n", "vllm"),
        ("server: {engine: transformers, model: 'builtin:tiny'}\n", "transformers"),
        ("server: {model: m, engine: 'vllm'}\n", "vllm"),
        ("name: x\n# engine: vllm\n", ""),
    ],
)
def test_the_engine_is_read_from_the_scenario(checkout: Path, text: str, engine: str) -> None:
    assert load(checkout)._engine_in_scenario(text) == engine


@pytest.mark.parametrize(
    ("file", "old", "new", "affected"),
    [
        ("pyproject.toml", "line-length = 120", "line-length = 119", set()),
        ("pyproject.toml", '"pyyaml>=6.0.1,<7"', '"pyyaml>=6.0.2,<7"', {"core", "fuzz"}),
        ("pyproject.toml", '"types-pyyaml",', '"types-pyyaml>=6",', {"dev"}),
        ("setup/constraints.txt", "aiohttp==", "#aiohttp==", {"core", "dev", "transformers", "locust", "otel", "fuzz"}),
        ("setup/fuzz.txt", "atheris==", "#atheris==", {"fuzz"}),
        ("setup/constraints-vllm.txt", "aiohttp==", "#aiohttp==", {"vllm"}),
        ("analysis/ledger/_intervals.c", "memcpy(", "memcpy (", {"core", "fuzz"}),
        ("loadgen/_receive.c", "recvmsg(", "recvmsg (", {"core", "fuzz"}),
        ("records/_events.c", "memcmp(", "memcmp (", {"core", "fuzz"}),
        ("probe/gapmeter_probe/_native.c", "mremap", "mremap ", {"core", "vllm", "fuzz"}),
    ],
)
def test_a_change_sets_up_anew_only_the_parts_that_it_decides(
    checkout: Path, file: str, old: str, new: str, affected: set[str]
) -> None:
    script = load(checkout)
    before = {part: script.key(part) for part in script.FOLDERS}
    path = checkout / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert {part for part in script.FOLDERS if script.key(part) != before[part]} == affected


def test_an_environment_of_another_place_is_not_taken_for_this_ones(checkout: Path) -> None:
    assert load(checkout).key("core") != load(ROOT).key("core")


def test_every_pinned_version_is_one_that_pyproject_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + [*itertools.chain(*project["optional-dependencies"].values())]
    lines = [line for line in (ROOT / "setup" / "constraints.txt").read_text().splitlines() if "==" in line]
    pinned = {_plain(line.partition("==")[0]): line.partition("==")[2] for line in lines}
    for requirement in map(Requirement, asked):
        if requirement.name != "gapmeter-probe":
            assert pinned[_plain(requirement.name)] in requirement.specifier, requirement


def test_every_data_file_of_a_package_is_installed_with_it() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = setuptools["package-data"]["*"]
    folders = [ROOT / name.rstrip("*") for name in setuptools["packages"]["find"]["include"]]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and "probe" not in path.parts]
    data = [path for path in files if path.suffix not in (".py", ".pyc")]
    assert data
    for path in data:
        package = next(parent for parent in path.parents if (parent / "__init__.py").exists())
        name = path.relative_to(package).as_posix()
        assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns), f"{path} is in no wheel"


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


@pytest.mark.parametrize(
    ("given", "typed"),
    [
        (
            ("loadtest", "SCENARIO=it's mine.yaml", "ENGINE=vllm", "GENERATOR=locust", "LIVE=1",
             "LOCUSTFILE=my users.py", "ARGS=--set 'slo=[\"errors <= 1 %\"]'"),
            ("run", "it's mine.yaml", "--engine", "vllm", "--set", "load.generator=locust", "--live", "--locustfile",
             "my users.py", "--set", 'slo=["errors <= 1 %"]'),
        ),
        (
            ("capacity", "SCENARIO=chat-p99", "URL=http://h:1", "GENERATOR=locust", "OVER=server.max_batch=4,8"),
            ("capacity", "chat-p99", "--url", "http://h:1", "--set", "load.generator=locust", "--over",
             "server.max_batch=4,8"),
        ),
        (("loadtest", "SCENARIO=smoke", "LIVE=0"), ("run", "smoke")),
        (("report", "RUN=runs/a b", "ARGS=-v"), ("report", "runs/a b", "-v")),
        (("compare", "A=a 1,a 2", "B=b", "ARGS=c"), ("compare", "a 1,a 2", "b", "c")),
    ],
)  # fmt: skip
def test_a_target_hands_on_every_variable_that_its_help_names(
    tmp_path: Path, given: tuple[str, ...], typed: tuple[str, ...]
) -> None:
    stub = tmp_path / "stub"
    stub.write_text("#!/bin/sh\nprintf '[%s]' \"$@\"\necho\n")
    stub.chmod(0o755)
    makefile = (ROOT / "Makefile").read_text()
    (tmp_path / "Makefile").write_text(makefile.replace(".venv/bin/python", str(stub)))
    said = make(tmp_path, *given, PYTHON=str(stub)).stdout.splitlines()
    assert said[-1] == "".join(f"[{word}]" for word in ("-P", "-m", "gapmeter", *typed))
    described = re.search(rf"^{given[0]}:.*## (.*)$", makefile, re.MULTILINE)
    assert described
    assert all(word.partition("=")[0] in described[1] for word in given[1:] if not word.startswith("ARGS"))
