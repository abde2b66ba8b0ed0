"""docker/Dockerfile and the scripts beside it, without an engine: lint, and the files that they name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docker.compose import DOCKER, ROOT, services

DOCKERFILE = DOCKER / "Dockerfile"
TEXT = DOCKERFILE.read_text().replace("\\\n", " ")
COPIED = {
    source
    for line in re.findall(r"^COPY (?:--\S+ )*(.+)$", TEXT, flags=re.MULTILINE)
    for source in line.split()[:-1]
}
"""Everything in the context that the image is made of."""


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_context_holds_what_is_copied_and_nothing_else() -> None:
    lines = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert lines[0] == "*"
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == COPIED
    assert all((ROOT / source).exists() for source in COPIED)


def test_the_image_has_a_fixed_base_and_does_not_run_as_root() -> None:
    (base,) = re.findall(r"^FROM (\S+)$", TEXT, flags=re.MULTILINE)
    version = re.fullmatch(r"python:(3\.\d+)-slim-\w+", base)
    assert version is not None
    assert (ROOT / "constraints" / f"constraints-{version[1]}.txt").exists()
    (user,) = re.findall(r"^USER (\S+)$", TEXT, flags=re.MULTILINE)
    assert f"--uid {user} airflow" in TEXT


@pytest.mark.parametrize("name", [name for name, each in services().items() if "build" in each])
def test_a_volume_is_mounted_where_the_image_has_a_directory_for_its_user(name: str) -> None:
    # A volume that is mounted on nothing belongs to root.
    (made,) = re.findall(r"install --directory --owner airflow (.+)$", TEXT, flags=re.MULTILINE)
    mounted = {volume.split(":")[1] for volume in services()[name].get("volumes", [])}
    assert mounted <= set(made.split())


@pytest.mark.parametrize("script", sorted(DOCKER.glob("*.sh")), ids=lambda script: script.name)
def test_a_script_can_be_read_and_run(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True, timeout=30)
    assert script.stat().st_mode & 0o111 == 0o111
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in script.read_text()
