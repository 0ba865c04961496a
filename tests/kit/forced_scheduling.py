"""Runs vLLM's API server with asynchronous scheduling on a CPU, where vLLM itself turns it off. For tests only.

``python forced_scheduling.py FLAGS...``. The processes that vLLM spawns run this file's top again, so they agree.
"""

from __future__ import annotations

import runpy
from typing import Any

from vllm.platforms.cpu import CpuPlatform

_checked = CpuPlatform.check_and_update_config.__func__


def _check_and_keep_asynchronous(platform: Any, config: Any) -> None:
    _checked(platform, config)
    config.scheduler_config.async_scheduling = True


CpuPlatform.check_and_update_config = classmethod(_check_and_keep_asynchronous)

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
