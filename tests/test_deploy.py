"""The compose file and the Kubernetes manifest say what this version's command line understands, and fit together."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import yaml

from gapmeter.cli import parser
from gapmeter.commands.flags import address_of
from gapmeter.commands.measure import workers_of
from gapmeter.errors import UserError
from gapmeter.scenarios.source import list_scenarios

DEPLOY = Path(__file__).resolve().parent.parent / "docs" / "deploy"


def compose() -> tuple[dict[str, list[str]], dict[str, int]]:
    """(name → command, name → how many) of the services."""
    services: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    counts = {name: service.get("deploy", {}).get("replicas", 1) for name, service in services.items()}
    return {name: service["command"] for name, service in services.items()}, counts


def kubernetes() -> tuple[dict[str, list[str]], dict[str, int]]:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    jobs = {each["metadata"]["name"]: each["spec"] for each in documents if each["kind"] == "Job"}
    commands = {name: job["template"]["spec"]["containers"][0]["args"] for name, job in jobs.items()}
    return commands, {name: job.get("parallelism", 1) for name, job in jobs.items()}


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAPMETER_WORKER_SECRET", "both files pass one on")


@pytest.fixture(params=[compose, kubernetes], ids=["compose", "kubernetes"])
def deployed(request: pytest.FixtureRequest) -> tuple[dict[str, list[str]], dict[str, int]]:
    found: tuple[dict[str, list[str]], dict[str, int]] = request.param()
    return found


def parsed(command: list[str]) -> argparse.Namespace:
    return parser().parse_args(command)


def test_every_command_is_one_that_the_command_line_understands(
    deployed: tuple[dict[str, list[str]], dict[str, int]],
) -> None:
    commands, _ = deployed
    words = {name: parsed(command) for name, command in commands.items()}
    assert sorted(command[0] for command in commands.values()) == ["run", "worker"]
    (run,) = (found for name, found in words.items() if commands[name][0] == "run")
    assert run.scenario in dict(list_scenarios())


def test_workers_call_the_master_where_it_listens_and_are_as_many_as_it_waits_for(
    deployed: tuple[dict[str, list[str]], dict[str, int]],
) -> None:
    commands, counts = deployed
    (master,) = (name for name, command in commands.items() if command[0] == "run")
    (worker,) = (name for name, command in commands.items() if command[0] == "worker")
    run = parsed(commands[master])
    asked = workers_of(run.workers, run.listen, run.patience)
    assert address_of("--master", parsed(commands[worker]).master) == (master, asked.listen_port)
    assert asked.listen_host == "0.0.0.0"
    assert asked.count == counts[worker]


def test_the_service_and_the_policy_of_the_cluster_open_the_masters_two_ports_and_no_other() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    by_kind = {each["kind"]: each for each in documents if each["kind"] in ("Service", "NetworkPolicy")}
    commands, _ = kubernetes()
    port = address_of("--listen", parsed(commands["gapmeter-master"]).listen)[1]
    assert [each["port"] for each in by_kind["Service"]["spec"]["ports"]] == [port, port + 1]
    (rule,) = by_kind["NetworkPolicy"]["spec"]["ingress"]
    assert [each["port"] for each in rule["ports"]] == [port, port + 1]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"app": "gapmeter-worker"}}}]


@pytest.mark.parametrize("listen", ["localhost", "127.0.0.5:0", "[::1]:5600"])
def test_workers_on_this_machine_need_no_secret(listen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GAPMETER_WORKER_SECRET", raising=False)
    assert workers_of(2, listen, "9s") is not None


@pytest.mark.parametrize("listen", ["10.0.0.5", "[::]:5600", "127.example"])
def test_workers_on_other_machines_need_a_secret(listen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GAPMETER_WORKER_SECRET", raising=False)
    with pytest.raises(UserError, match="need a shared secret"):
        workers_of(2, listen, "9s")


@pytest.mark.parametrize("text", ["", ":5557", "host:port", "host:70000", "[::1", "[::1]5557"])
def test_an_address_that_is_none_is_a_sentence(text: str) -> None:
    with pytest.raises(Exception, match=r"--listen .* is not an address; write"):
        address_of("--listen", text)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("host", "host", 5557),
        ("[::1]:5600", "::1", 5600),
        ("[fe80::1%eth0]", "fe80::1%eth0", 5557),
        ("::1", "::1", 5557),
    ],
)
def test_an_ipv6_address_is_written_bare_or_in_brackets_before_a_port(text: str, host: str, port: int) -> None:
    assert address_of("--master", text) == (host, port)
