"""docker/compose.yaml as docker compose reads it, as far as the tests need it: merged, its variables put in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
FILE = DOCKER / "compose.yaml"

# `$$`, `${NAME}`, `${NAME:-default}` and `${NAME:?message}`: the forms that the file uses.
VARIABLE = re.compile(r"\$(?:(?P<dollar>\$)|\{(?P<name>\w+)(?::(?P<how>[-?])(?P<word>[^}]*))?\})")


def services() -> dict[str, dict[str, Any]]:
    """Each service with what the anchors say of it, variables as they are written."""
    return dict(yaml.safe_load(FILE.read_text())["services"])


def airflow_services() -> dict[str, dict[str, Any]]:
    """Those that run Airflow."""
    return {name: each for name, each in services().items() if "airflow" in " ".join(each.get("command", []))}


def filled(text: str, variables: Mapping[str, str]) -> str:
    """A text with its variables put in.

    :raises KeyError: a variable that has to be given is not.
    """

    def value(match: re.Match[str]) -> str:
        if match["dollar"]:
            return "$"
        if match["how"] == "-":
            return variables.get(match["name"]) or match["word"]
        return variables[match["name"]]

    return VARIABLE.sub(value, text)


def read_env(file: Path) -> dict[str, str]:
    """The variables of a file such as docker/.env."""
    return dict(line.split("=", 1) for line in file.read_text().splitlines())
