"""Lies in a measured server's PYTHONPATH: takes the probe's hooks out of the server, and puts them back.

SIGUSR2 says when; the file that ``GAPMETER_UNHOOK`` names says what is out: all of them, or none. So one server is
measured with the probe and without, and nothing of this is in the probe. ``GAPMETER_PYTHON_ONLY`` hides its C module.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

_SWITCH = os.environ.get("GAPMETER_UNHOOK", "")
_wrapped: list[tuple[Any, str, Any, Any]] = []  # owner, attribute, what was there, what the probe put there
_probes: list[Any] = []
_changed: list[tuple[Any, str, Any]] = []


def _put(owner: Any, name: str, value: Any) -> None:
    _changed.append((owner, name, vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)))
    setattr(owner, name, value)


def _switched(*_: Any) -> None:
    part = Path(_SWITCH).read_text()
    while _changed:
        owner, name, value = _changed.pop()
        setattr(owner, name, value)
    if part == "all":
        _take_out()
    Path(f"{_SWITCH}.{os.getpid()}").write_text(part)


def _take_out() -> None:
    for owner, name, original, wrapped in _wrapped:
        if vars(owner).get(name) is wrapped:
            _put(owner, name, original)
    for probe in _probes:
        if not hasattr(probe, "_steps"):  # vLLM's engine counts its steps, hooked or not
            _put(probe, "writer", None)
    app = sys.modules.get("gapmeter.servers.api.app")
    if app is not None:
        made = app.RequestStamps  # type: ignore[attr-defined]
        _put(app, "RequestStamps", lambda writer, *rest: made(None, *rest))


def _watch() -> None:
    from gapmeter_probe import hooks

    begin, apply = hooks.Probe.__init__, hooks._apply

    def made(probe: Any) -> None:
        begin(probe)
        _probes.append(probe)

    def applied(probe: Any, hook: Any, target: str, module: Any) -> None:
        owner: Any = module
        *path, attribute = target.partition(":")[2].split(".")
        for part in path:
            owner = getattr(owner, part, None)
        before = vars(owner).get(attribute) if owner is not None else None
        apply(probe, hook, target, module)
        after = vars(owner).get(attribute) if owner is not None else None
        if after is not before:
            first = next((kept for kept in _wrapped if kept[0] is owner and kept[1] == attribute), None)
            if first:
                _wrapped.remove(first)
            _wrapped.append((owner, attribute, first[2] if first else before, after))

    hooks.Probe.__init__, hooks._apply = made, applied  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR2, _switched)


if os.environ.get("GAPMETER_PYTHON_ONLY"):
    sys.modules["gapmeter_probe._native"] = None  # type: ignore[assignment]  # importing it fails from now on
if _SWITCH and os.environ.get("GAPMETER_PROBE_DIR"):
    _watch()
