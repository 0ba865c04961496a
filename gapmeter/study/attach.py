"""A server that already runs: who it says it is, and where its probe writes."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from gapmeter import errors
from gapmeter.errors import UserError
from gapmeter.loadgen.address import Address, authorization
from gapmeter.scenarios import Scenario

PROBE_DIR = "GAPMETER_PROBE_DIR"
_ANSWER_S = 10.0


def served_models(scenario: Scenario, api_key: str | None) -> tuple[str, list[str]]:
    """The address without a final slash or ``/v1``, and the models that the server there lists.

    Raises UserError when nothing answers there, or it does not list its models.
    """
    base = (scenario.server.url or "").rstrip("/").removesuffix("/v1")
    url = f"{base}/v1/models"
    try:
        headers = dict(authorization(api_key))
        Address.of(base, tuple(headers.items()))
    except ValueError as error:
        raise UserError(str(error), errors.BAD_SCENARIO) from error
    # No proxy: the load goes straight to the server, so this must too.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(
            urllib.request.Request(url, headers=headers),
            timeout=min(_ANSWER_S, scenario.server.ready_timeout_ns / 1e9),
        ) as answer:
            models = [str(entry["id"]) for entry in json.load(answer)["data"]]
    except urllib.error.HTTPError as error:
        raise UserError(_refused(url, error), errors.UNREACHABLE) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise UserError(f"no server answers at {url}: {getattr(reason, 'strerror', None) or reason}; is it running, "
                        "and is the address right?", errors.UNREACHABLE) from error  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{url} does not list models as OpenAI-compatible servers do", errors.UNREACHABLE) from error
    return base, models


def _refused(url: str, error: urllib.error.HTTPError) -> str:
    with error:
        said = f"{url} answered {error.code} {error.reason}"
    if error.code in (401, 403):
        return f"{said}; pass --api-key or set GAPMETER_API_KEY"
    return f"{said}; is it the address of an OpenAI-compatible server that is ready?"


def choose_model(wanted: str, named: bool, models: list[str], url: str) -> str:
    """Which of the served models to ask: the wanted one, or the only one where nobody ``named`` another.

    Raises UserError when that is not clear.
    """
    if wanted in models:
        return wanted
    if not models:
        raise UserError(f"the server at {url} serves no model", errors.UNREACHABLE)
    if named or len(models) > 1:
        known = ", ".join(sorted(models))
        raise UserError(f"the server at {url} serves {known}, not {wanted}; name one with --model", errors.BAD_SCENARIO)
    return models[0]


def find_probe_folder(url: str, named: Path | None) -> Path | None:
    """Where the server's probe writes: the folder that was ``named``, else the one that the environment says.

    GAPMETER_PROBE_DIR is looked for in our environment, then in that of the local process that listens at ``url``.
    None when there is none. Raises UserError when the folder that was named holds no records.
    """
    if named is not None:
        if not any(named.glob("*.gap")):
            what = "holds no probe records" if named.is_dir() else "is no folder"
            raise UserError(f"--probe-dir: {named} {what}; start the server with {PROBE_DIR}={named}", errors.USAGE)
        return named
    told = os.environ.get(PROBE_DIR)
    found = Path(told) if told else _listener_probe_folder(url)
    return found if found is not None and any(found.glob("*.gap")) else None


def _listener_probe_folder(url: str) -> Path | None:
    """From the environment of the process that listens there, where it is a local one that we may look at."""
    try:
        for pid in listeners(url):
            process = psutil.Process(pid)
            folder = process.environ().get(PROBE_DIR)
            if folder:
                return Path(process.cwd()) / folder
    except psutil.Error:
        return None
    return None


def listeners(url: str) -> tuple[int, ...]:
    """The local processes that listen at ``url``; none where it is elsewhere, or not ours to look at."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    local = {address.address for all_of in psutil.net_if_addrs().values() for address in all_of}
    if parts.hostname not in local | {"localhost"}:
        return ()
    try:
        found = psutil.net_connections("tcp")
    except psutil.Error:
        return ()
    listening = [c for c in found if c.status == psutil.CONN_LISTEN and c.laddr[1:2] == (port,)]
    return tuple(sorted({connection.pid for connection in listening if connection.pid}))
