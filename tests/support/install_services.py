"""Brings what the tests talk to and look with, and no wheel has; quick where all is there.

Run it as ``python -m tests.support.install_services``. Dovecot (an IMAP server) and Chromium come from the distribution
(as root, by apt-get); the mock of the payment service and axe-core (which finds what keeps people out of a page) from
npm, into ``.run/node``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NODE_HOME = ROOT / ".run" / "node"
PAYMENTS = "stripe-stateful-mock"
AXE = "axe-core"
NPM_VERSIONS = {PAYMENTS: "0.0.16", AXE: "4.14.1"}
INSTALL_SECONDS = 600


def dovecot() -> str | None:
    """Where the IMAP server is; it lies in sbin, which not everybody has on their path."""
    return shutil.which("dovecot", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def has_imap() -> bool:
    return dovecot() is not None and Path("/usr/lib/dovecot/imap").exists()


def has_browser() -> bool:
    return shutil.which("chromium") is not None


def has_package(name: str) -> bool:
    return (NODE_HOME / "node_modules" / name / "package.json").exists()


def install_from_distribution(*packages: str) -> None:
    if os.geteuid() != 0:
        raise SystemExit(f"something is missing; as root: apt-get install -y {' '.join(packages)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    _run("apt-get", "update", "-q", environment=environment)
    _run("apt-get", "install", "-y", "-q", "--no-install-recommends", *packages, environment=environment)


def install_from_npm(*packages: str) -> None:
    if shutil.which("npm") is None:
        raise SystemExit(
            f"there is no npm, which brings {', '.join(packages)}; as root: apt-get install -y npm"
        )
    NODE_HOME.mkdir(parents=True, exist_ok=True)
    wanted = [f"{name}@{NPM_VERSIONS[name]}" for name in packages]
    _run(
        "npm",
        "install",
        "--ignore-scripts",
        "--no-audit",
        "--no-fund",
        *("--prefix", str(NODE_HOME)),
        *wanted,
    )


def _run(*command: str, environment: dict[str, str] | None = None) -> None:
    print("+", *command, flush=True)
    subprocess.run(command, check=True, env=environment, timeout=INSTALL_SECONDS)


def _missing() -> tuple[list[str], list[str]]:
    """What is not there: packages of the distribution, packages of npm."""
    from_distribution = [
        name for name, there in (("dovecot-imapd", has_imap()), ("chromium", has_browser())) if not there
    ]
    return from_distribution, [name for name in NPM_VERSIONS if not has_package(name)]


def main() -> int:
    from_distribution, from_npm = _missing()
    if from_distribution:
        install_from_distribution(*from_distribution)
    if from_npm:
        install_from_npm(*from_npm)
    missing = [name for names in _missing() for name in names]
    if missing:
        print(f"not there after the installation: {', '.join(missing)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
