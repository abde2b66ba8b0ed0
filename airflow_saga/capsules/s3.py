"""Objects in a versioned bucket (S3 and what speaks like it): put or deleted, and the earlier version restored.

An undo removes exactly the version (or the delete marker) that its action has made. What was current before it is
current again, unless somebody has written since: then theirs stays current, and only what is ours goes.

.. code-block:: python

    publish = put_object("publish", conn_id="aws", bucket="reports")
    withdraw = delete_object("withdraw", conn_id="aws", bucket="reports")

    publish("2030/summary.json", b"{...}", "application/json")
    withdraw("2029/summary.json")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError, ConnectTimeoutError, EndpointConnectionError, NoCredentialsError

try:  # here, and not at the first call: it takes seconds, and a call has a limit
    from airflow.providers.amazon.aws.hooks.base_aws import AwsBaseHook
except ImportError:
    AwsBaseHook = None  # type: ignore[assignment, misc]

from airflow_saga.capsules.declare import connection_named, declare, seconds_for_network
from airflow_saga.core.actions import Action
from airflow_saga.core.errors import NotApplied, SagaError, Unavailable
from airflow_saga.core.records import ActionRecord, Applied, ProbeAnswer

MARK = "saga-key"
"""Metadata of a version: the key of the action that wrote it; tag of a version that one is about to delete."""
MARK_BEFORE = "saga-marker-before"
"""Another tag of the latter: the newest delete marker there was then. Dates have whole seconds, and tell less."""
NONE = "none"
AWAY_SECONDS = 30.0
MOST_VERSIONS = 100
"""Of one object, newest first: so many are asked whose they are."""
_NOT_SENT = (EndpointConnectionError, ConnectTimeoutError, NoCredentialsError)
_RACE = ("PreconditionFailed", "ConditionalRequestConflict")
_REFUSED = ("AccessDenied", "NoSuchBucket", "InvalidAccessKeyId", "SignatureDoesNotMatch", "EntityTooLarge")


@dataclass(frozen=True)
class Bucket:
    """A bucket, as one capsule writes to it; see :func:`put_object`."""

    conn_id: str
    bucket: str
    timeout_seconds: float

    # -- put ----------------------------------------------------------------------------------------------------------

    def put(self, params: dict[str, Any], key: str) -> dict[str, Any]:
        name = params["object_key"]
        with self._client() as s3:
            with _proving("nothing was put"):
                self._check_versioned(s3)
                found = self._written(s3, name, key)
                if found is not None:
                    return found
                current = self._head(s3, name)
            condition = {"IfMatch": current["ETag"]} if current else {"IfNoneMatch": "*"}
            try:
                written = s3.put_object(
                    Bucket=self.bucket,
                    Key=name,
                    Body=params["body"],
                    ContentType=params["content_type"],
                    Metadata={MARK: key},
                    **condition,
                )
            except ClientError as problem:
                # The other writer may have been an earlier attempt of ours.
                if _code(problem) in _RACE and (found := self._written(s3, name, key)) is not None:
                    return found
                raise _refused_or_open(problem, f"{self.bucket}/{name} was not put") from problem
            return self._told(name, written["VersionId"], written["ETag"])

    def verify_put(self, record: ActionRecord) -> ProbeAnswer:
        with self._client() as s3:
            found = self._written(s3, record.params["object_key"], record.key)
        return NotApplied() if found is None else Applied(found)

    def _written(self, s3: Any, name: str, key: str) -> dict[str, Any] | None:
        """The version that carries the key."""
        for version in self._versions(s3, name)["Versions"]:
            head = s3.head_object(Bucket=self.bucket, Key=name, VersionId=version["VersionId"])
            if head["Metadata"].get(MARK) == key:
                return self._told(name, version["VersionId"], version["ETag"])
        return None

    # -- delete -------------------------------------------------------------------------------------------------------

    def delete(self, name: str, key: str) -> dict[str, Any]:
        with self._client() as s3:
            with _proving("nothing was deleted"):
                self._check_versioned(s3)
                found = self._deleted(s3, name, key)
                if found is not None:
                    return found
                current = self._head(s3, name)
                if current is None:
                    raise NotApplied(f"{self.bucket} has no object {name}, so nothing was deleted")
                # A delete marker carries nothing of its own: the version below it says whose it is.
                s3.put_object_tagging(
                    Bucket=self.bucket,
                    Key=name,
                    VersionId=current["VersionId"],
                    Tagging={"TagSet": self._tags_before(s3, name, key)},
                )
            try:
                marker = s3.delete_object(Bucket=self.bucket, Key=name)
            except ClientError as problem:
                raise _refused_or_open(problem, f"{self.bucket}/{name} was not deleted") from problem
            return self._told(name, marker["VersionId"], None)

    def verify_delete(self, record: ActionRecord) -> ProbeAnswer:
        with self._client() as s3:
            found = self._deleted(s3, record.params["object_key"], record.key)
        return NotApplied() if found is None else Applied(found)

    def _tags_before(self, s3: Any, name: str, key: str) -> list[dict[str, str]]:
        markers = self._versions(s3, name)["DeleteMarkers"]
        before = markers[0]["VersionId"] if markers else NONE
        return [{"Key": MARK, "Value": key}, {"Key": MARK_BEFORE, "Value": before}]

    def _deleted(self, s3: Any, name: str, key: str) -> dict[str, Any] | None:
        """The delete marker that came next after the version that is tagged with the key, the current one then."""
        known = self._versions(s3, name)
        for version in known["Versions"] if known["DeleteMarkers"] else ():
            found = s3.get_object_tagging(Bucket=self.bucket, Key=name, VersionId=version["VersionId"])
            tags = {tag["Key"]: tag["Value"] for tag in found["TagSet"]}
            if tags.get(MARK) == key:
                marker = _next_after(tags[MARK_BEFORE], known["DeleteMarkers"])
                return None if marker is None else self._told(name, marker, None)
        return None

    # -- undo ---------------------------------------------------------------------------------------------------------

    def undo_put(self, record: ActionRecord) -> None:
        self._remove(record, self._written)

    def undo_delete(self, record: ActionRecord) -> None:
        self._remove(record, self._deleted)

    def _remove(self, record: ActionRecord, find: Callable[[Any, str, str], dict[str, Any] | None]) -> None:
        """Remove the version or the marker; one that is gone already is no error to the service."""
        name = record.params["object_key"]
        try:
            with self._client() as s3:
                made = record.result or find(s3, name, record.key)
                if made is not None:
                    s3.delete_object(Bucket=self.bucket, Key=name, VersionId=made["version_id"])
        except _NOT_SENT as away:
            raise Unavailable(
                f"the bucket {self.bucket} (connection {self.conn_id!r})", AWAY_SECONDS
            ) from away

    # -- the service --------------------------------------------------------------------------------------------------

    def _told(self, name: str, version_id: str, etag: str | None) -> dict[str, Any]:
        return {"bucket": self.bucket, "object_key": name, "version_id": version_id, "etag": etag}

    def _check_versioned(self, s3: Any) -> None:
        if s3.get_bucket_versioning(Bucket=self.bucket).get("Status") != "Enabled":
            raise NotApplied(
                f"the bucket {self.bucket} keeps no versions, so nothing in it could be restored; nothing was done. "
                f"Enable versioning: aws s3api put-bucket-versioning --bucket {self.bucket} "
                f"--versioning-configuration Status=Enabled"
            )

    def _head(self, s3: Any, name: str) -> dict[str, Any] | None:
        try:
            return dict(s3.head_object(Bucket=self.bucket, Key=name))
        except ClientError as problem:
            if problem.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
                return None
            raise

    def _versions(self, s3: Any, name: str) -> dict[str, list[dict[str, Any]]]:
        """The newest versions and delete markers of one object, the newest first."""
        page = s3.list_object_versions(Bucket=self.bucket, Prefix=name, MaxKeys=MOST_VERSIONS)
        return {
            kind: [each for each in page.get(kind, ()) if each["Key"] == name]
            for kind in ("Versions", "DeleteMarkers")
        }

    @contextmanager
    def _client(self) -> Iterator[Any]:
        config = Config(
            connect_timeout=self.timeout_seconds / 2,
            read_timeout=self.timeout_seconds,
            retries={"total_max_attempts": 1},
        )
        client = _client_of(self.conn_id, config)
        try:
            yield client
        finally:
            client.close()


def _client_of(conn_id: str, config: Config) -> Any:
    """As the Amazon provider makes it, where it is installed; else from the fields that it reads, too."""
    found = connection_named(conn_id)
    if AwsBaseHook is not None:
        return AwsBaseHook(aws_conn_id=conn_id, client_type="s3", config=config).get_conn()
    extra = found.extra_dejson
    return boto3.client(
        "s3",
        aws_access_key_id=found.login,
        aws_secret_access_key=found.password,
        aws_session_token=extra.get("aws_session_token"),
        region_name=extra.get("region_name"),
        endpoint_url=extra.get("endpoint_url"),
        config=config,
    )


def _next_after(before: str, markers: list[dict[str, Any]]) -> str | None:
    """The marker that came next after one, of a list that has the newest first."""
    ids = [marker["VersionId"] for marker in markers]
    newer = ids if before == NONE else ids[: ids.index(before)]
    return newer[-1] if newer else None


@contextmanager
def _proving(what: str) -> Iterator[None]:
    """Around what comes before the change: whatever goes wrong there has changed nothing."""
    try:
        yield
    except NotApplied:
        raise
    except Exception as problem:
        raise NotApplied(f"{what}: {type(problem).__name__}: {problem}") from problem


def _refused_or_open(problem: ClientError, what: str) -> Exception:
    if _code(problem) in (*_RACE, *_REFUSED):
        return NotApplied(f"{what}: {problem}")
    return SagaError(f"nobody knows whether {what}: {problem}")


def _code(problem: ClientError) -> str:
    return str(problem.response.get("Error", {}).get("Code"))


# -- the factories ----------------------------------------------------------------------------------------------------


def put_object(
    name: str, *, conn_id: str, bucket: str, timeout: timedelta | None = None, **options: Any
) -> Action[Any, Any]:
    """An action ``put(object_key, body, content_type="application/octet-stream")``.

    It gives ``{"bucket", "object_key", "version_id", "etag"}``. Somebody who writes the object at the same time is not
    overwritten unseen: then nothing is put, and it is tried again.

    :param conn_id: an Airflow AWS connection.
    :param bucket: it has to keep versions; else nothing is put.
    :param timeout: of one call; default 10 s.
    :param options: as of :func:`airflow_saga.action`.
    """
    place = Bucket(conn_id, bucket, seconds_for_network(timeout))

    def put(
        object_key: str, body: bytes | str, content_type: str = "application/octet-stream", *, key: str
    ) -> dict[str, Any]:
        content = body.encode() if isinstance(body, str) else body
        return place.put({"object_key": object_key, "body": content, "content_type": content_type}, key)

    if timeout is not None:
        options["timeout"] = timeout
    return declare(put, name, place, compensate=place.undo_put, verify=place.verify_put, **options)


def delete_object(
    name: str, *, conn_id: str, bucket: str, timeout: timedelta | None = None, **options: Any
) -> Action[Any, Any]:
    """An action ``delete(object_key)`` that hides an object behind a delete marker; its undo removes the marker.

    Parameters as of :func:`put_object`.
    """
    place = Bucket(conn_id, bucket, seconds_for_network(timeout))

    def delete(object_key: str, *, key: str) -> dict[str, Any]:
        return place.delete(object_key, key)

    if timeout is not None:
        options["timeout"] = timeout
    return declare(delete, name, place, compensate=place.undo_delete, verify=place.verify_delete, **options)
