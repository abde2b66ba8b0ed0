"""Mails: recalled where there is a mailbox to recall them from, and named where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from airflow_saga.core.errors import NotApplied, Unavailable
from airflow_saga.core.records import Applied, Later
from tests.capsules import trials
from tests.capsules.conftest import SetConnection, record_of
from tests.capsules.trials import Trial, tell_customer, tell_desk
from tests.runtime.lab import Lab
from tests.support.ports import free_port
from tests.support.services import MailSystem


@pytest.fixture
def mail(request: pytest.FixtureRequest, mail_system: MailSystem) -> Iterator[Trial]:
    yield trials.mail(request)
    mail_system.refuse, mail_system.deliver = None, True


def undo(mail: Trial, **more: Any) -> Any:
    assert tell_desk.compensation is not None
    return tell_desk.compensation(record_of("tell_desk", mail.args, mail.key, **more))


def find(mail: Trial) -> Any:
    assert tell_desk.verify is not None
    return tell_desk.verify(record_of("tell_desk", mail.args, mail.key, in_doubt=True))


def test_without_a_mailbox_a_mail_stands_and_is_named(lab: Lab, mail: Trial) -> None:
    lab.step(lambda saga: tell_customer(**mail.args))
    assert lab.undo().saga.state == "PARTIALLY_CANCELLED"
    assert lab.states() == [("tell_customer", "NON_COMPENSABLE")]
    assert (mail.effects(), mail.standing()) == (1, 1)


def test_only_the_mail_of_this_action_is_recalled(mail: Trial) -> None:
    result = tell_desk.fn(**mail.args, key=mail.key)
    tell_desk.fn(**mail.args, key="another")
    undo(mail, result=result)
    assert mail.standing() == 1
    assert isinstance(find(mail), NotApplied)


def test_a_mail_that_was_moved_into_another_folder_is_recalled(mail: Trial, mail_system: MailSystem) -> None:
    user = mail.args["to"]
    tell_desk.fn(**mail.args, key=mail.key)
    with mail_system.logged_in(user) as client:
        client.create('"Done things"')
        client.select("INBOX")
        client.uid("MOVE", "1:*", '"Done things"')
    assert (mail.standing(), mail_system.count(user, '"Done things"')) == (0, 1)
    assert isinstance(find(mail), Applied)
    undo(mail)
    assert mail_system.count(user, '"Done things"') == 0


def test_a_mail_that_is_not_there_is_looked_for_once_more(mail: Trial, mail_system: MailSystem) -> None:
    mail_system.deliver = False
    tell_desk.fn(**mail.args, key=mail.key)
    later = undo(mail)
    assert later == Later("not in the mailbox", after=timedelta(seconds=0.2))
    mail_system.put(mail.args["to"], mail_system.taken[-1][1])
    assert undo(mail, later_token=later.token) is None
    assert mail.standing() == 0
    assert undo(mail, later_token=later.token) is None


def test_a_mail_that_the_server_refuses_was_not_sent(mail: Trial, mail_system: MailSystem) -> None:
    mail_system.refuse = "554 no spam"
    with pytest.raises(NotApplied, match="554 no spam"):
        tell_desk.fn(**mail.args, key=mail.key)
    assert mail.effects() == 0


def test_a_mail_whose_answer_is_lost_is_found_in_the_mailbox(
    lab: Lab, mail: Trial, mail_system: MailSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    import smtplib

    data = smtplib.SMTP.data

    def lost(self: Any, message: Any) -> Any:
        data(self, message)
        raise smtplib.SMTPServerDisconnected("gone before the answer")

    monkeypatch.setattr(smtplib.SMTP, "data", lost)
    lab.step(lambda saga: tell_desk(**mail.args))
    assert (mail.effects(), lab.states()) == (1, [("tell_desk", "DONE")])


def test_what_makes_no_mail_is_refused(mail: Trial) -> None:
    for wrong in ({"to": "a@b.example\nBcc: all@b.example"}, {"subject": "two\nlines"}):
        with pytest.raises(NotApplied):
            tell_desk.fn(**{**mail.args, **wrong}, key=mail.key)
    assert mail.effects() == 0


def test_servers_that_are_away(mail: Trial, set_connection: SetConnection) -> None:
    away = {"host": "127.0.0.1", "port": free_port(), "login": "u", "password": "pw-9x"}
    set_connection("smtp", "smtp", **away, extra={"disable_ssl": True, "disable_tls": True})
    with pytest.raises(NotApplied, match="took no mail") as raised:
        tell_desk.fn(**mail.args, key=mail.key)
    assert "pw-9x" not in str(raised.value)
    set_connection("mailbox", "imap", **away, extra={"use_ssl": False})
    with pytest.raises(NotApplied, match="cannot be asked"):
        tell_desk.fn(**mail.args, key=mail.key)
    with pytest.raises(Unavailable):
        undo(mail)
