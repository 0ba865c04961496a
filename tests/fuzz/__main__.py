"""``make fuzz``: atheris on each target in turn, from valid examples of it with bytes and structures made wrong.

``python -m tests.fuzz SECONDS [TARGET …]``: the seconds are divided by the targets. What was new goes to
``.cache/fuzz/TARGET``, from which the next run starts; an input that fails to ``.cache/fuzz/TARGET-crash-…``.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from pathlib import Path

FOUND = Path(".cache/fuzz")
_MOST_MEMORY_MB = 4096


def main(words: list[str]) -> int:
    """A process a target: libFuzzer ends the one that it runs in. Returns 1 where a target failed."""
    from tests.fuzz.targets import TARGETS

    seconds, *names = words
    names = names or list(TARGETS)
    if not seconds.isdecimal() or not TARGETS.keys() >= set(names):
        sys.exit(f"python -m tests.fuzz SECONDS [TARGET …], of: {', '.join(TARGETS)}")
    each = str(max(1, int(seconds) // len(names)))
    failed = [
        name for name in names if subprocess.run([sys.executable, "-m", "tests.fuzz", "of", name, each]).returncode
    ]
    print(f"{len(names)} targets, {each} s each: {', '.join(failed) or 'none'} failed", file=sys.stderr)
    return bool(failed)


def fuzz(name: str, seconds: str) -> None:
    """One target; does not return."""
    try:
        import atheris
    except ModuleNotFoundError:
        sys.exit("atheris is not installed: make fuzz does that, where a build for this Python and system is published")
    with atheris.instrument_imports(include=["gapmeter"]):
        from tests.fuzz.mutate import mutated
        from tests.fuzz.targets import TARGETS

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        at = random.Random(seed)
        return bytes(atheris.Mutate(data, most)) if at.random() < 0.4 else mutated(data, at)[:most]

    target, found = TARGETS[name], FOUND / name
    found.mkdir(parents=True, exist_ok=True)
    sys.setrecursionlimit(10_000)
    with tempfile.TemporaryDirectory() as seeds:
        largest = 4096
        for number, seed in enumerate(target.seeds()):
            (Path(seeds) / str(number)).write_bytes(seed)
            largest = max(largest, 2 * len(seed))
        limits = [f"-timeout={target.seconds:.0f}", f"-rss_limit_mb={_MOST_MEMORY_MB}", f"-max_len={largest}"]
        asked = [f"-max_total_time={seconds}", f"-artifact_prefix={found}-", "-print_final_stats=1", "-verbosity=0"]
        atheris.Setup([name, *limits, *asked, str(found), seeds], target.try_input, custom_mutator=mutate)
        print(f"{name}:", file=sys.stderr)
        atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1:2] == ["of"]:
        fuzz(*sys.argv[2:])
    sys.exit(main(sys.argv[1:]))
