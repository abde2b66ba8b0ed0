"""docker/compose.yaml, without an engine: valid, reachable from this machine alone, and the same for all of Airflow."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from airflow.cli.cli_parser import get_parser
from airflow.configuration import retrieve_configuration_description
from cryptography.fernet import Fernet

from airflow_saga.get_provider_info import get_provider_info
from tests.docker.compose import DOCKER, FILE, ROOT, VARIABLE, airflow_services, filled, read_env, services

BIN = Path(sys.executable).parent
SERVICES = services()
AIRFLOW = airflow_services()
ENVIRONMENT: dict[str, str] = AIRFLOW["scheduler"]["environment"]
OPTION = re.compile(r"AIRFLOW__([A-Z0-9_]+?)__([A-Z0-9_]+)")


@pytest.fixture(scope="module")
def env_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("docker") / ".env"
    subprocess.run([DOCKER / "env.sh", file], check=True, timeout=30)
    return file


def test_the_file_is_what_compose_accepts() -> None:
    schema = ("--builtin-schema", "vendor.compose-spec")
    done = subprocess.run(
        [BIN / "check-jsonschema", *schema, FILE], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_everything_that_the_issue_names_is_there_with_two_workers_alike() -> None:
    assert set(AIRFLOW) == {
        *("init", "api-server", "scheduler", "dag-processor", "triggerer"),
        *("worker-1", "worker-2"),
    }
    assert set(SERVICES) - set(AIRFLOW) == {"postgres", "redis", "travel", "model"}
    first, second = SERVICES["worker-1"], SERVICES["worker-2"]
    assert {**first, "hostname": None} == {**second, "hostname": None}
    # The name that a worker is found by when its logs are asked for.
    assert (first["hostname"], second["hostname"]) == ("worker-1", "worker-2")


@pytest.mark.parametrize("name", SERVICES)
def test_a_port_is_published_to_this_machine_alone(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name].get("ports", []))
    assert "network_mode" not in SERVICES[name]


@pytest.mark.parametrize("name", AIRFLOW)
def test_all_of_airflow_has_the_same_image_and_the_same_environment(name: str) -> None:
    assert AIRFLOW[name]["environment"] == ENVIRONMENT
    assert AIRFLOW[name]["image"] == SERVICES["travel"]["image"]
    assert AIRFLOW[name]["build"] == SERVICES["travel"]["build"]


def test_each_option_in_the_environment_is_one_that_airflow_knows() -> None:
    known = retrieve_configuration_description(include_airflow=True, include_providers=True)
    options = {(section, option) for section, each in known.items() for option in each["options"]}
    named = {OPTION.fullmatch(name) for name in ENVIRONMENT if name.startswith("AIRFLOW__")}
    assert None not in named
    assert {(match[1].lower(), match[2].lower()) for match in named if match} <= options


@pytest.mark.parametrize("name", AIRFLOW)
def test_each_command_is_one_that_airflow_has(name: str) -> None:
    parser = get_parser()
    for command in _airflow_commands(AIRFLOW[name]):
        assert parser.parse_args(command).func


def _airflow_commands(service: dict[str, Any]) -> list[list[str]]:
    """What follows `airflow` in the command and in the health check of a service."""
    command, check = service["command"], service.get("healthcheck", {}).get("test", [])
    lines = command[2].split("&&") if command[0] == "bash" else [" ".join(command)]
    lines += [" ".join(check[1:])] if "airflow" in check else []
    return [line.split()[1:] for line in lines]


def test_each_address_in_the_environment_is_that_of_a_service() -> None:
    hosts = {
        host for value in ENVIRONMENT.values() for host in re.findall(r"(?:@|//)([a-z][a-z-]*):\d", value)
    }
    # The API server has a second name, for the people who look at it.
    assert hosts - {"airflow", "saga", "localhost"} == {"api-server", "postgres", "redis", "travel", "model"}
    assert ENVIRONMENT["AIRFLOW__API__BASE_URL"] == "http://localhost:8080"
    assert SERVICES["api-server"]["ports"] == ["127.0.0.1:8080:8080"]


@pytest.mark.parametrize("name", [name for name in SERVICES if name != "init"])
def test_each_service_that_stays_says_how_it_is_and_comes_back(name: str) -> None:
    assert SERVICES[name]["healthcheck"]["test"]
    assert SERVICES[name]["restart"] == "unless-stopped"


def test_what_is_waited_for_can_be_waited_for() -> None:
    for name, service in SERVICES.items():
        for other, how in service.get("depends_on", {}).items():
            kind = "service_completed_successfully" if other == "init" else "service_healthy"
            assert how == {"condition": kind}, f"{name} -> {other}"
            assert other == "init" or SERVICES[other]["healthcheck"]


def test_a_worker_has_the_time_to_let_a_step_stop() -> None:
    grace = float(get_provider_info()["config"]["saga"]["options"]["stop_grace_seconds"]["default"])
    match = re.fullmatch(r"(\d+)s", SERVICES["worker-1"]["stop_grace_period"])
    assert match is not None
    assert int(match[1]) >= 2 * grace


def test_no_secret_is_written_in_the_file(env_file: Path) -> None:
    secrets = set(read_env(env_file))
    demanded = {
        match["name"]
        for match in VARIABLE.finditer(FILE.read_text())
        if match["name"] and match["how"] != "-"
    }
    assert demanded == secrets
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            if name.rpartition("_")[2] in ("KEY", "SECRET", "PASSWORD"):
                assert VARIABLE.fullmatch(value), name
            for password in re.findall(r"://[^:/@{]+:(.+?)@", value):
                assert VARIABLE.fullmatch(password), name
    connection = json.loads(filled(ENVIRONMENT["AIRFLOW_CONN_CONCIERGE_LLM"], {}))
    assert connection["password"] == "none"


def test_the_secrets_are_fresh_good_and_for_their_owner_alone(env_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    subprocess.run([DOCKER / "env.sh", other], check=True, timeout=30)
    ours, theirs = read_env(env_file), read_env(other)
    assert not set(ours.values()) & set(theirs.values())
    assert all(len(value) >= 44 and re.fullmatch(r"[\w=-]+", value) for value in ours.values())
    Fernet(ours["FERNET_KEY"])
    assert other.stat().st_mode & 0o777 == 0o600
    before = other.read_bytes()
    subprocess.run([DOCKER / "env.sh", other], check=True, timeout=30)
    assert other.read_bytes() == before
    assert "docker/.env" in (ROOT / ".gitignore").read_text().splitlines()
