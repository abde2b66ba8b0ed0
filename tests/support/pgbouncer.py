"""A PgBouncer in transaction mode in front of a Postgres: Debian's package, which root installs where it is missing."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.ports import free_port

START_SECONDS = 10.0
INSTALL_SECONDS = 180


def find_pgbouncer() -> str | None:
    """The program, installed if this is root on a Debian; None if there is none to be had."""
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None and os.geteuid() == 0 and shutil.which("apt-get"):
        for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", "pgbouncer"]):
            subprocess.run(command, capture_output=True, timeout=INSTALL_SECONDS, check=False)
        program = shutil.which("pgbouncer", path="/usr/sbin")
    return program


@contextmanager
def pooled(program: str, url: str) -> Iterator[str]:
    """The URL of the same database through a pooler that gives a server connection away after each transaction."""
    at = urlsplit(url)
    account = "postgres" if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="saga-pooler-") as name:
        directory, port = Path(name), free_port()
        (directory / "pgbouncer.ini").write_text(
            f"[databases]\n* = host={at.hostname} port={at.port}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
            f"auth_type = trust\nauth_file = {directory / 'users'}\n"
            f"pool_mode = transaction\ndefault_pool_size = 5\nmax_client_conn = 100\n"
            f"logfile = {directory / 'log'}\n"
        )
        (directory / "users").write_text(f'"{at.username}" ""\n')
        _give_to(directory, account)
        process = subprocess.Popen(
            [program, "-q", str(directory / "pgbouncer.ini")],
            user=account,
            group=account,
            extra_groups=[] if account else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _await_port(port, process, directory)
            yield f"postgresql://{at.username}@127.0.0.1:{port}{at.path}"
        finally:
            process.terminate()
            process.wait(10)


def _give_to(directory: Path, account: str | None) -> None:
    if account is None:
        return
    owner = pwd.getpwnam(account)
    for path in (directory, *directory.iterdir()):
        os.chown(path, owner.pw_uid, owner.pw_gid)


def _await_port(port: int, process: subprocess.Popen[bytes], directory: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    log = directory / "log"
    raise RuntimeError(f"pgbouncer did not start: {log.read_text() if log.exists() else process.poll()}")
