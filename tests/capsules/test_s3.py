"""Objects in a bucket: exactly our version goes, and nobody's write is lost."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_saga.capsules import s3
from airflow_saga.capsules.s3 import put_object
from airflow_saga.core.errors import NotApplied, Unavailable
from airflow_saga.core.records import Applied
from tests.capsules import trials
from tests.capsules.conftest import SetConnection, record_of
from tests.capsules.trials import BUCKET, QUICK, publish, withdraw
from tests.runtime.lab import Lab
from tests.support.ports import free_port

put_unversioned = put_object("put_unversioned", conn_id="objects", bucket="plain", **QUICK)


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Any:
    return trials.s3_client(request)


def put_by_somebody(client: Any, name: str, body: bytes) -> None:
    client.put_object(Bucket=BUCKET, Key=name, Body=body)


def read(client: Any, name: str) -> bytes | None:
    try:
        return bytes(client.get_object(Bucket=BUCKET, Key=name)["Body"].read())
    except client.exceptions.NoSuchKey:
        return None


def undo(action: Any, name: str, key: str, result: Any = None) -> None:
    action.compensation(record_of(action.name, {"object_key": name}, key, result=result))


def find(action: Any, name: str, key: str) -> Any:
    return action.verify(record_of(action.name, {"object_key": name}, key, in_doubt=True))


def test_what_somebody_wrote_since_stays_current(client: Any, lab: Lab) -> None:
    put_by_somebody(client, "a/since", b"before")
    lab.step(lambda saga: publish("a/since", b"ours"))
    put_by_somebody(client, "a/since", b"theirs")
    assert lab.undo().saga.state == "CANCELLED"
    assert read(client, "a/since") == b"theirs"
    assert len(trials.versions_of(client, "a/since")) == 2, "only ours is gone"


def test_a_version_that_somebody_has_written_over_is_found(client: Any) -> None:
    made = publish.fn("a/over", b"ours", key="k")
    put_by_somebody(client, "a/over", b"theirs")
    assert find(publish, "a/over", "k") == Applied(made)
    assert publish.fn("a/over", b"ours", key="k") == made
    assert read(client, "a/over") == b"theirs"


def test_a_write_in_between_is_not_overwritten_unseen(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    head = s3.Bucket._head
    bodies = iter([b"theirs", b"theirs again"])
    written: list[bytes] = []

    def then_somebody_writes(self: s3.Bucket, *args: Any) -> Any:
        found = head(self, *args)
        written.append(next(bodies))
        put_by_somebody(client, "a/race", written[-1])
        return found

    monkeypatch.setattr(s3.Bucket, "_head", then_somebody_writes)
    for _ in range(2):  # where nothing was, and where something was
        with pytest.raises(NotApplied, match="not put"):
            publish.fn("a/race", b"ours", key="k")
        assert read(client, "a/race") == written[-1]


def test_an_object_that_starts_alike_is_another_one(client: Any) -> None:
    publish.fn("a/name.longer", b"x", key="k")
    assert isinstance(find(publish, "a/name", "k"), NotApplied)


def test_a_delete_is_told_from_one_that_came_before(client: Any) -> None:
    put_by_somebody(client, "a/twice", b"1")
    client.delete_object(Bucket=BUCKET, Key="a/twice")
    put_by_somebody(client, "a/twice", b"2")
    assert isinstance(find(withdraw, "a/twice", "k"), NotApplied)
    bucket = s3.Bucket("objects", BUCKET, 4.0)
    with bucket._client() as own:  # the first half of a delete, whose process died then
        version = client.head_object(Bucket=BUCKET, Key="a/twice")["VersionId"]
        tags = {"TagSet": bucket._tags_before(own, "a/twice", "k")}
        own.put_object_tagging(Bucket=BUCKET, Key="a/twice", VersionId=version, Tagging=tags)
    assert isinstance(find(withdraw, "a/twice", "k"), NotApplied)
    made = withdraw.fn("a/twice", key="k")
    assert read(client, "a/twice") is None
    assert find(withdraw, "a/twice", "k") == Applied(made)
    undo(withdraw, "a/twice", "k", made)
    assert read(client, "a/twice") == b"2"


def test_an_object_that_is_not_there_is_not_deleted(client: Any) -> None:
    with pytest.raises(NotApplied, match="no object"):
        withdraw.fn("a/nowhere", key="k")
    assert trials.versions_of(client, "a/nowhere") == []


def test_a_bucket_without_versions_is_refused(client: Any) -> None:
    if "plain" not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket="plain", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    with pytest.raises(NotApplied, match="keeps no versions"):
        put_unversioned.fn("a", b"x", key="k")
    assert client.list_objects_v2(Bucket="plain")["KeyCount"] == 0


def test_a_store_that_is_away_has_changed_nothing(set_connection: SetConnection) -> None:
    extra = {"region_name": "eu-west-1", "endpoint_url": f"http://127.0.0.1:{free_port()}"}
    set_connection("objects", "aws", login="planted-id", password="planted-secret", extra=extra)
    with pytest.raises(NotApplied, match="nothing was put") as raised:
        publish.fn("a", b"x", key="k")
    assert "planted-secret" not in str(raised.value)
    with pytest.raises(Unavailable):
        undo(publish, "a", "k", {"object_key": "a", "version_id": "v"})


def test_a_client_is_made_from_the_connection_where_the_provider_is_missing(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "AwsBaseHook", None)
    publish.fn("a/bare", b"x", key="k")
    assert read(client, "a/bare") == b"x"
