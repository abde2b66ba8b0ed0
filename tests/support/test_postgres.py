"""The throw-away Postgres keeps its promises: the tests of crashes rest on them."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from tests.support.postgres import PostgresServer, available_servers
from tests.support.wheel import ROOT

SERVERS = dict(available_servers())
DEADLINE_SECONDS = 30.0


@pytest.fixture(params=list(SERVERS), ids=lambda label: f"postgres{label}")
def bin_dir(request: pytest.FixtureRequest) -> Path:
    return SERVERS[request.param]


@pytest.fixture
def server(bin_dir: Path) -> Iterator[PostgresServer]:
    with PostgresServer(bin_dir) as server:
        yield server


def _eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def _count(server: PostgresServer) -> int:
    with psycopg.connect(server.url) as connection:
        row = connection.execute("SELECT count(*) FROM kept").fetchone()
        assert row is not None
        return int(row[0])


def test_what_was_acknowledged_outlives_every_way_to_stop_on_the_same_port(server: PostgresServer) -> None:
    port = server.port
    crashes: list[Callable[[], None]] = [server.kill9, lambda: server.stop("immediate"), server.stop]
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("CREATE TABLE kept (id int)")
    for done, crash in enumerate(crashes, start=1):
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("INSERT INTO kept VALUES (1)")
        crash()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(server.url)
        server.start()
        assert (_count(server), server.port) == (done, port)


def test_a_durable_server_forces_its_commits_to_the_disk(bin_dir: Path) -> None:
    for durable, fsync in ((True, "on"), (False, "off")):
        with PostgresServer(bin_dir, durable=durable) as server, psycopg.connect(server.dsn) as connection:
            assert connection.execute("SHOW fsync").fetchone() == (fsync,)
            assert connection.execute("SHOW synchronous_commit").fetchone() == ("on",)


def test_it_answers_on_the_loopback_address_only(server: PostgresServer) -> None:
    with psycopg.connect(server.url) as connection:
        assert connection.execute("SHOW listen_addresses").fetchone() == ("127.0.0.1",)
        assert connection.execute("SHOW unix_socket_directories").fetchone() == ("",)


def test_a_database_is_a_copy_of_its_template_and_can_be_dropped_while_in_use(server: PostgresServer) -> None:
    with psycopg.connect(server.create_database("model"), autocommit=True) as connection:
        connection.execute("CREATE TABLE kept (id int)")
    copy = psycopg.connect(server.create_database("copy", template="model"))
    assert copy.execute("SELECT count(*) FROM kept").fetchone() == (0,)
    server.drop_database("copy")
    with pytest.raises(psycopg.OperationalError):
        copy.execute("SELECT 1")


def test_a_server_whose_owner_is_killed_leaves_nothing_behind(bin_dir: Path) -> None:
    program = (
        "import os, sys\n"
        "from tests.support.postgres import PostgresServer\n"
        f"server = PostgresServer({str(bin_dir)!r})\n"
        "server.start()\n"
        "print(server.pid, server.directory, flush=True)\n"
        "sys.stdin.read()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pid, directory = owner.stdout.readline().split()
    assert Path(f"/proc/{pid}").exists()
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    _eventually(lambda: not Path(directory).exists(), f"{directory} is still there")
    _eventually(lambda: _gone(int(pid)), f"the server {pid} still runs")


def test_binaries_in_a_directory_of_its_owner_alone_are_used_all_the_same(tmp_path: Path) -> None:
    # As root the server runs as another user, and a checkout under /root is closed to it. Debian's installation is
    # never in such a place, and does not work from another one.
    label, bin_dir = list(SERVERS.items())[-1]
    assert label == "18", "the embedded Postgres is missing: run `make install`"
    package, private = bin_dir.parent.parent, tmp_path / "private"
    shutil.copytree(bin_dir.parent, private / package.name / bin_dir.parent.name, symlinks=True)
    shutil.copytree(package.with_name(f"{package.name}.libs"), private / f"{package.name}.libs")
    for path in (private, *private.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & 0o700)
    server = PostgresServer(private / package.name / bin_dir.parent.name / bin_dir.name)
    with server, psycopg.connect(server.url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
