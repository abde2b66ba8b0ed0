"""Brings the services that the tests of the capsules talk to and that no wheel has; quick where all is there.

Run it as ``python -m tests.support.install_services``. Dovecot comes from the distribution (as root, by apt-get), the
mock of the payment service from npm, into ``.run/node``. Both are made to be found by ``tests.support.services``.
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
PAYMENTS_VERSION = "0.0.16"
INSTALL_SECONDS = 600


def dovecot() -> str | None:
    """Where the IMAP server is; it lies in sbin, which not everybody has on their path."""
    return shutil.which("dovecot", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def has_imap() -> bool:
    return dovecot() is not None and Path("/usr/lib/dovecot/imap").exists()


def has_payments() -> bool:
    return (NODE_HOME / "node_modules" / PAYMENTS / "package.json").exists()


def install_imap() -> None:
    if os.geteuid() != 0:
        raise SystemExit("there is no dovecot with IMAP; as root: apt-get install -y dovecot-imapd")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    _run("apt-get", "update", "-q", environment=environment)
    _run(
        "apt-get", "install", "-y", "-q", "--no-install-recommends", "dovecot-imapd", environment=environment
    )


def install_payments() -> None:
    if shutil.which("npm") is None:
        raise SystemExit(f"there is no npm, which brings {PAYMENTS}; as root: apt-get install -y npm")
    NODE_HOME.mkdir(parents=True, exist_ok=True)
    _run(
        "npm",
        "install",
        "--ignore-scripts",
        "--no-audit",
        "--no-fund",
        *("--prefix", str(NODE_HOME)),
        f"{PAYMENTS}@{PAYMENTS_VERSION}",
    )


def _run(*command: str, environment: dict[str, str] | None = None) -> None:
    print("+", *command, flush=True)
    subprocess.run(command, check=True, env=environment, timeout=INSTALL_SECONDS)


def main() -> int:
    if not has_imap():
        install_imap()
    if not has_payments():
        install_payments()
    missing = [name for name, there in (("dovecot", has_imap()), (PAYMENTS, has_payments())) if not there]
    if missing:
        print(f"not there after the installation: {', '.join(missing)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
