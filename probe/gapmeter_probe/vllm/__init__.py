"""The vLLM plugin: stamps the stages inside vLLM's processes when ``GAPMETER_PROBE_DIR`` names a folder.

vLLM loads ``register`` (entry point group ``vllm.general_plugins``) in each of its processes. Nothing of vLLM is
imported here: functions are wrapped where their module already is, and otherwise when vLLM itself imports it, so the
same code serves the API server, the engine core and the workers, whether they share a process or not.
"""

from __future__ import annotations

import logging
import os

from gapmeter_probe.writer import PROBE_DIR


def register() -> None:
    """Called by vLLM, possibly more than once in a process. Does nothing unless it was told where to write."""
    if not os.environ.get(PROBE_DIR):
        return
    try:
        from gapmeter_probe.hooks import install
        from gapmeter_probe.vllm.api import ApiProbe
        from gapmeter_probe.vllm.core import CoreProbe
        from gapmeter_probe.vllm.worker import WorkerProbe

        install([ApiProbe(), CoreProbe(), WorkerProbe()])
    except Exception as error:  # noqa: BLE001 - vLLM would end
        logging.getLogger("vllm.gapmeter_probe").warning("gapmeter: nothing of this process is recorded: %s", error)
