"""Third-party services for the tests of the capsules, on loopback: each a process or a thread of its own.

A starter is a context manager that gives the service when it answers, and takes it away again. What no wheel brings is
installed by ``install_services``; a starter says so where it is missing.
"""

from __future__ import annotations

import ctypes
import imaplib
import mailbox
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.install_services import NODE_HOME, PAYMENTS, dovecot, has_imap, has_package
from tests.support.ports import free_port

START_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
HOST = "127.0.0.1"
MAIL_PASSWORD = "mail-password-4711"
_INSTALL = "run: python -m tests.support.install_services"


@dataclass(frozen=True)
class Server:
    """A service that answers."""

    port: int
    directory: Path

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


@contextmanager
def calendars() -> Iterator[Server]:
    """Radicale, a CalDAV server; everybody may do everything."""
    with _directory("calendars") as directory:
        port = free_port()
        command = [sys.executable, "-m", "radicale", "--config", "", "--auth-type", "none"]
        place = ["--server-hosts", f"{HOST}:{port}", "--storage-filesystem-folder", str(directory / "store")]
        with _process([*command, *place], port, directory):
            yield Server(port, directory)


@contextmanager
def object_store() -> Iterator[Server]:
    """Moto's server, which speaks S3."""
    with _directory("objects") as directory:
        port = free_port()
        moto = str(Path(sys.executable).with_name("moto_server"))
        with _process([moto, "-H", HOST, "-p", str(port)], port, directory):
            yield Server(port, directory)


_PAYMENTS = """
import http from 'node:http';
import mock from 'stripe-stateful-mock';
http.createServer(mock.createExpressApp()).listen(+process.argv[2], process.argv[3]);
"""


@contextmanager
def payments() -> Iterator[Server]:
    """A stateful mock of Stripe: idempotency keys, stored answers, tokens that fail."""
    if not has_package(PAYMENTS):
        raise RuntimeError(f"the mock of the payment service is not installed; {_INSTALL}")
    with _directory("payments") as directory:
        port = free_port()
        # Beside its modules: Node looks for them from where the program lies.
        program = NODE_HOME / f"payments-{port}.mjs"
        program.write_text(_PAYMENTS)
        try:
            with _process(["node", str(program), str(port), HOST], port, directory):
                yield Server(port, directory)
        finally:
            program.unlink()


# -- mail -------------------------------------------------------------------------------------------------------------

_IMAP_CONFIGURATION = """
protocols = imap
listen = {host}
base_dir = {directory}/run
log_path = {directory}/dovecot.log
ssl = no
disable_plaintext_auth = no
first_valid_uid = 8
mail_location = maildir:{directory}/box/%u
passdb {{
  driver = static
  args = password={password}
}}
userdb {{
  driver = static
  args = uid={account} gid={group} home={directory}/home/%u
}}
service imap-login {{
  inet_listener imap {{
    port = {port}
  }}
  inet_listener imaps {{
    port = 0
  }}
}}
"""
# Only root may run its processes as users of their own, in empty directories.
_IMAP_WITHOUT_ROOT = """
default_internal_user = {name}
default_internal_group =
default_login_user = {name}
service anvil {{
  chroot =
}}
service imap-login {{
  chroot =
}}
service stats {{
  chroot =
}}
"""


@dataclass
class MailSystem:
    """An SMTP server that keeps a ledger of what it took, and an IMAP server that shows where it was put.

    :ivar taken: (recipient, whole mail) of each mail that was accepted, in order.
    :ivar refuse: an answer for the text of a mail, instead of taking it.
    :ivar deliver: whether what is taken is put into the mailbox.
    """

    smtp_port: int
    imap_port: int
    directory: Path
    account: pwd.struct_passwd
    taken: list[tuple[str, bytes]] = field(default_factory=list)
    refuse: str | None = None
    deliver: bool = True

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        if self.refuse is not None:
            return self.refuse
        for to in envelope.rcpt_tos:
            self.taken.append((to, envelope.content))
            if self.deliver:
                self.put(to, envelope.content)
        return "250 taken"

    def put(self, user: str, content: bytes) -> None:
        root = self.directory / "box" / user
        mailbox.Maildir(str(root)).add(content)
        for path in (root, *root.rglob("*")):
            os.chown(path, self.account.pw_uid, self.account.pw_gid)

    @contextmanager
    def logged_in(self, user: str) -> Iterator[imaplib.IMAP4]:
        client = imaplib.IMAP4(HOST, self.imap_port, timeout=10)
        try:
            client.login(user, MAIL_PASSWORD)
            yield client
        finally:
            client.logout()

    def count(self, user: str, folder: str = "INBOX") -> int:
        with self.logged_in(user) as client:
            client.select(folder, readonly=True)
            return len(client.uid("SEARCH", "ALL")[1][0].split())


@contextmanager
def mail_system() -> Iterator[MailSystem]:
    """aiosmtpd puts what it takes into Maildirs, and Dovecot serves them."""
    from aiosmtpd.controller import Controller

    program = dovecot()
    if program is None or not has_imap():
        raise RuntimeError(f"there is no dovecot with IMAP; {_INSTALL}")
    account = _mail_account()
    with _directory("mail") as directory:
        system = MailSystem(free_port(), free_port(), directory, account)
        directory.chmod(0o755)
        for name in ("box", "home"):
            (directory / name).mkdir()
            os.chown(directory / name, account.pw_uid, account.pw_gid)
        configuration = directory / "dovecot.conf"
        configuration.write_text(
            (_IMAP_CONFIGURATION + ("" if os.geteuid() == 0 else _IMAP_WITHOUT_ROOT)).format(
                host=HOST,
                directory=directory,
                password=MAIL_PASSWORD,
                port=system.imap_port,
                name=account.pw_name,
                account=account.pw_uid,
                group=account.pw_gid,
            )
        )
        smtp = Controller(system, hostname=HOST, port=system.smtp_port)
        smtp.start()
        try:
            with _process([program, "-F", "-c", str(configuration)], system.imap_port, directory):
                yield system
        finally:
            smtp.stop()


def _mail_account() -> pwd.struct_passwd:
    """Dovecot serves no mailbox of root: there is a user `mail` on every Debian."""
    return pwd.getpwnam("mail") if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())


# -- processes --------------------------------------------------------------------------------------------------------


@contextmanager
def _directory(name: str) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix=f"saga-{name}-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _process(command: list[str], port: int, directory: Path) -> Iterator[None]:
    log = directory / "output.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory,
            preexec_fn=_end_with_parent,
        )
    try:
        _wait_for(lambda: _answers(port), process, log)
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _end_with_parent() -> None:
    """Tests that are killed leave no service behind (Linux)."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_for(there: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not there():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{process.args} does not answer:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.05)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0
