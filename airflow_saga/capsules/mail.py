"""A mail: sent by SMTP, and recalled from the mailbox it went to, where there is a login to that.

A mail that has left cannot be called back. What an undo can do is to take it out of a mailbox that one has access to
(a shared one, or any with a master login). Without ``imap_conn_id`` the action is NON_COMPENSABLE: it is named at the
end of an undo, and a person decides.

.. code-block:: python

    tell_desk = send_mail("tell_desk", conn_id="smtp", imap_conn_id="desk_mailbox")
    tell_customer = send_mail("tell_customer", conn_id="smtp")

    tell_desk("desk@example.org", "Booking 4711", "Please print the papers.")
"""

from __future__ import annotations

import imaplib
import re
import smtplib
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from email.message import EmailMessage
from email.utils import formatdate
from typing import Any

from airflow_saga.capsules.declare import connection_named, declare, seconds_for_network
from airflow_saga.core.actions import NON_COMPENSABLE, Action
from airflow_saga.core.errors import CompensationRejected, NotApplied, Unavailable
from airflow_saga.core.records import ActionRecord, Applied, Later, ProbeAnswer

AWAY_SECONDS = 30.0
MOST_FOLDERS = 200
_FOLDER = rb'\((?P<flags>[^)]*)\) (?:"[^"]*"|NIL) (?P<name>.+)'
ABSENT = "not in the mailbox"


@dataclass(frozen=True)
class Mail:
    """Through which server mails go, and where they can be found again; see :func:`send_mail`."""

    conn_id: str
    imap_conn_id: str | None
    sender: str | None
    domain: str
    timeout_seconds: float
    delivered_within: timedelta

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, to: str, subject: str, text: str, key: str) -> dict[str, Any]:
        told = {"message_id": self.message_id(key), "to": to}
        if self.imap_conn_id is not None and self._is_there(key):
            return told
        found = connection_named(self.conn_id)
        sender = self.sender or found.extra_dejson.get("from_email") or found.login
        message = EmailMessage()
        try:
            message["From"], message["To"], message["Subject"] = sender, to, subject
            message["Message-ID"], message["Date"] = told["message_id"], formatdate()
            message.set_content(text)
        except (ValueError, TypeError) as problem:
            raise NotApplied(f"no mail can be made of this, so nothing was sent: {problem}") from problem
        client = self._addressed(found, sender, to)
        try:
            code, said = client.data(message.as_bytes())
        except smtplib.SMTPDataError as refused:
            raise NotApplied(f"the mail was refused: {_said(refused)}") from refused
        finally:
            client.close()
        if not 200 <= code < 300:
            answer = smtplib.SMTPResponseException(code, said)
            raise NotApplied(f"the mail was refused: {_said(answer)}")
        return told

    def _is_there(self, key: str) -> bool:
        """Sent by an earlier attempt; whoever cannot be asked has not said so."""
        try:
            with self._mailbox() as mailbox:
                return bool(self._find(mailbox, key))
        except (OSError, imaplib.IMAP4.error) as problem:
            raise NotApplied(
                f"the mailbox of connection {self.imap_conn_id!r} cannot be asked whether the mail is there already "
                f"({type(problem).__name__}); nothing was sent"
            ) from problem

    def _addressed(self, found: Any, sender: str, to: str) -> smtplib.SMTP:
        """Everything up to the text of the mail; nothing of it sends one."""
        client: smtplib.SMTP | None = None
        try:
            client = self._smtp(found)
            for code, said in (client.mail(sender), client.rcpt(to)):
                if code not in (250, 251):
                    raise smtplib.SMTPResponseException(code, said)
        except (OSError, smtplib.SMTPException) as problem:
            if client is not None:
                client.close()
            raise NotApplied(
                f"the server of connection {self.conn_id!r} took no mail to {to}: {_said(problem)}"
            ) from problem
        return client

    def _smtp(self, found: Any) -> smtplib.SMTP:
        extra = found.extra_dejson
        place = (found.host or "localhost", found.port or 0)
        if extra.get("disable_ssl"):
            client = smtplib.SMTP(*place, timeout=self.timeout_seconds)
            if not extra.get("disable_tls"):
                client.starttls(context=ssl.create_default_context())
        else:
            client = smtplib.SMTP_SSL(
                *place, timeout=self.timeout_seconds, context=ssl.create_default_context()
            )
        client.ehlo_or_helo_if_needed()
        if found.login:
            client.login(found.login, found.password or "")
        return client

    def message_id(self, key: str) -> str:
        return f"<saga-{key}@{self.domain}>"

    # -- finding and recalling ----------------------------------------------------------------------------------------

    def verify(self, record: ActionRecord) -> ProbeAnswer:
        with self._mailbox() as mailbox:
            if not self._find(mailbox, record.key):
                return NotApplied()
        return Applied({"message_id": self.message_id(record.key), "to": record.params["to"]})

    def undo(self, record: ActionRecord) -> Later | None:
        name = f"the mailbox of connection {self.imap_conn_id!r}"
        try:
            with self._mailbox() as mailbox:
                found = self._find(mailbox, record.key)
                for folder, uids in found.items():
                    self._remove(mailbox, folder, uids)
        except NotApplied as away:
            raise Unavailable(name, AWAY_SECONDS) from away
        except OSError as away:
            raise Unavailable(name, AWAY_SECONDS) from away
        if found or record.later_token == ABSENT:
            return None
        # Taken back by an earlier try, deleted by its reader, or still on its way: the last would show by then.
        return Later(ABSENT, after=self.delivered_within)

    def _find(self, mailbox: imaplib.IMAP4, key: str) -> dict[str, list[str]]:
        """In which folders it lies, and under which UIDs."""
        found = {}
        for folder in self._folders(mailbox):
            if mailbox.select(folder, readonly=True)[0] != "OK":
                continue
            _, data = mailbox.uid("SEARCH", "HEADER", "Message-ID", _quoted(self.message_id(key)))
            uids = (data[0] or b"").decode().split()
            if uids:
                found[folder] = uids
        return found

    def _folders(self, mailbox: imaplib.IMAP4) -> list[str]:
        folders = []
        for line in mailbox.list()[1]:
            # A name with unusual characters comes as a literal, in two parts; such folders are not searched.
            match = re.match(_FOLDER, line) if isinstance(line, bytes) else None
            if match and b"\\noselect" not in match["flags"].lower():
                name = match["name"].decode()
                folders.append(name if name.startswith('"') else _quoted(name))
        if len(folders) > MOST_FOLDERS:
            raise imaplib.IMAP4.error(f"the mailbox has more than {MOST_FOLDERS} folders")
        return folders

    def _remove(self, mailbox: imaplib.IMAP4, folder: str, uids: list[str]) -> None:
        mailbox.select(folder)
        mailbox.uid("STORE", ",".join(uids), "+FLAGS.SILENT", r"(\Deleted)")
        if "UIDPLUS" in mailbox.capabilities:
            done, said = mailbox.uid("EXPUNGE", ",".join(uids))
        else:
            done, said = mailbox.expunge()
        if done != "OK":
            raise CompensationRejected(f"the mail may not be removed from {folder}: {said}")

    @contextmanager
    def _mailbox(self) -> Iterator[imaplib.IMAP4]:
        assert self.imap_conn_id is not None
        found = connection_named(self.imap_conn_id)
        secure = found.extra_dejson.get("use_ssl", True)
        host, port = found.host or "localhost", found.port
        mailbox: imaplib.IMAP4
        if secure:
            mailbox = imaplib.IMAP4_SSL(
                host, port or 993, timeout=self.timeout_seconds, ssl_context=ssl.create_default_context()
            )
        else:
            mailbox = imaplib.IMAP4(host, port or 143, timeout=self.timeout_seconds)
        try:
            mailbox.login(found.login or "", found.password or "")
            # What a server can do is told anew after the login.
            told = mailbox.capability()[1][0].decode().upper().split()
            mailbox.capabilities = tuple(told)
            yield mailbox
        finally:
            with suppress(OSError, imaplib.IMAP4.error):
                mailbox.logout()


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _said(problem: BaseException) -> str:
    if isinstance(problem, smtplib.SMTPResponseException):
        said = problem.smtp_error
        text = said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
        return f"{problem.smtp_code} {text}"
    return f"{type(problem).__name__}: {problem}"


def send_mail(
    name: str,
    *,
    conn_id: str,
    imap_conn_id: str | None = None,
    sender: str | None = None,
    domain: str = "airflow-saga.invalid",
    delivered_within: timedelta = timedelta(minutes=1),
    timeout: timedelta | None = None,
    **options: Any,
) -> Action[Any, Any]:
    """An action ``send(to, subject, text)`` that gives ``{"message_id", "to"}``; the Message-ID has the key in it.

    :param conn_id: an Airflow SMTP connection.
    :param imap_conn_id: an Airflow IMAP connection to the mailbox that the mails arrive in. They are looked up there
        where nobody knows whether they went out, and recalled from there, from whatever folder. Without it nothing can
        be looked up or recalled.
    :param sender: else ``from_email`` of the SMTP connection, else its login.
    :param domain: behind the ``@`` of the Message-ID.
    :param delivered_within: how long a mail that was taken may be on its way: it is not called missing before.
    :param timeout: of one call; default 10 s.
    :param options: as of :func:`airflow_saga.action`.
    """
    mail = Mail(conn_id, imap_conn_id, sender, domain, seconds_for_network(timeout), delivered_within)

    def send(to: str, subject: str, text: str, *, key: str) -> dict[str, Any]:
        return mail.send(to, subject, text, key)

    if timeout is not None:
        options["timeout"] = timeout
    if imap_conn_id is None:
        return declare(send, name, mail, compensate=NON_COMPENSABLE, verify=None, **options)
    options.setdefault("settle_after", delivered_within)
    return declare(send, name, mail, compensate=mail.undo, verify=mail.verify, **options)
