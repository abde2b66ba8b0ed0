"""What a person or a script does to Airflow from outside, as calls: its public REST API, and waiting for its answers.

Nothing here knows how Airflow was started. The invariant: every wait has a deadline, and one that runs out says what
was there instead, so that a failure can be read without running it again. An API server that does not answer counts as
"not yet" while waiting, since tests kill it on purpose; a single call fails at once.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import httpx

T = TypeVar("T")
Json = dict[str, Any]

FINISHED = frozenset({"success", "failed"})
"""The states in which a DAG run is over."""

POLL_SECONDS = 0.1
SLOWEST_POLL_SECONDS = 0.6
"""What is long awaited is looked at less often: many wait at the same time, and looking costs Airflow work."""
PAGE = 100
# A busy machine may need longer for everything: this stretches every wait of the end-to-end tests.
PATIENCE = float(os.environ.get("SAGA_TEST_PATIENCE", "1"))


class AirflowApiError(RuntimeError):
    """Airflow's API refused a call; `status` is the HTTP status and the text holds what it said."""

    def __init__(self, response: httpx.Response) -> None:
        request = response.request
        super().__init__(f"{request.method} {request.url} -> {response.status_code}: {response.text[:2000]}")
        self.status = response.status_code


class NotInTimeError(AssertionError):
    """What was waited for did not happen before the deadline; the text holds what was there instead."""


class AirflowApi:
    """One Airflow, spoken to as a logged-in admin. Task instances that are not mapped have `map_index` -1.

    :param api_url: where its API server listens, without a path.
    """

    def __init__(self, api_url: str) -> None:
        self.api_url = api_url
        # Only ever to loopback: a proxy in the environment must not get in between.
        self._client = httpx.Client(base_url=api_url, timeout=30, trust_env=False)

    def close_connections(self) -> None:
        self._client.close()

    def request(self, method: str, path: str, body: object = None, **params: Any) -> Any:
        """Call `/api/v2` + path and return the JSON that came back, None for an empty answer.

        :raises AirflowApiError: for any status that is not 2xx.
        :raises httpx.TransportError: when nobody answers.
        """
        return self._call(method, f"/api/v2{path}", body, params)

    def _call(self, method: str, path: str, body: object, params: Mapping[str, Any]) -> Any:
        if "authorization" not in self._client.headers:
            self._log_in()
        response = self._client.request(method, path, json=body, params=dict(params))
        if not response.is_success:
            raise AirflowApiError(response)
        return response.json() if response.content else None

    def saga(
        self, method: str, dag_id: str, run_id: str, verb: str = "", body: Json | None = None
    ) -> tuple[int, Json]:
        """Call the plugin's own API about one run; the status and what it says, also where it refuses."""
        if "authorization" not in self._client.headers:
            self._log_in()
        path = "/".join(["/saga/api/v1/dags", dag_id, "runs", quote(run_id, safe=""), *filter(None, [verb])])
        response = self._client.request(method, path, json=body)
        return response.status_code, response.json()

    def _log_in(self) -> None:
        response = self._client.get("/auth/token")
        if not response.is_success:
            raise AirflowApiError(response)
        self._client.headers["authorization"] = f"Bearer {response.json()['access_token']}"

    # -- what is there -----------------------------------------------------------------------------------------------

    def health(self) -> dict[str, str]:
        """Each component with what Airflow says of it; raises httpx.TransportError while nobody answers."""
        return {name: each["status"] for name, each in self.request("GET", "/monitor/health").items()}

    def answers_tasks(self) -> bool:
        """Whether the API that running tasks call is there; asking also makes it ready, which takes it seconds."""
        return self._client.get("/execution/health").is_success

    def dag(self, dag_id: str) -> Json:
        return self.request("GET", f"/dags/{dag_id}")

    def dag_ids(self) -> list[str]:
        return [each["dag_id"] for each in self._all("/dags", "dags")]

    def import_errors(self) -> dict[str, str]:
        """The DAG files that Airflow could not load, with the stack traces."""
        return {each["filename"]: each["stack_trace"] for each in self._all("/importErrors", "import_errors")}

    def run(self, dag_id: str, run_id: str) -> Json:
        return self.request("GET", f"/dags/{dag_id}/dagRuns/{run_id}")

    def runs(self, dag_id: str = "~") -> list[Json]:
        """The runs of a DAG (or of all), oldest first."""
        return self._all(f"/dags/{dag_id}/dagRuns", "dag_runs", order_by="id")

    def run_state(self, dag_id: str, run_id: str) -> str:
        return self.run(dag_id, run_id)["state"]

    def task_instances(self, dag_id: str, run_id: str) -> list[Json]:
        """The task instances of a run, each index of a mapped task by itself."""
        return self._all(f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances", "task_instances")

    def task_instance(self, dag_id: str, run_id: str, task_id: str, map_index: int = -1) -> Json:
        return self.request("GET", f"{_task(dag_id, run_id, task_id)}/{map_index}")

    def task_states(self, dag_id: str, run_id: str) -> dict[str, str | None]:
        """Task id -> state; an index of a mapped task is called `task[3]`."""
        return {_name(each): each["state"] for each in self.task_instances(dag_id, run_id)}

    def tries(self, dag_id: str, run_id: str, task_id: str, map_index: int = -1) -> list[Json]:
        """Every attempt of a task so far, also those that Airflow has given up."""
        path = f"{_task(dag_id, run_id, task_id)}/{map_index}/tries"
        return self.request("GET", path)["task_instances"]

    def xcom(
        self, dag_id: str, run_id: str, task_id: str, key: str = "return_value", map_index: int = -1
    ) -> Any:
        """A value as it stands in the database; what JSON has no form for is wrapped by Airflow's serializer."""
        path = f"{_task(dag_id, run_id, task_id)}/xcomEntries/{key}"
        return self.request("GET", path, map_index=map_index)["value"]

    def hitl(self, dag_id: str = "~", run_id: str = "~", *, unanswered: bool = True) -> list[Json]:
        """The questions put to people (Required Actions): by default those that wait for an answer."""
        return self._all(
            f"/dags/{dag_id}/dagRuns/{run_id}/hitlDetails",
            "hitl_details",
            **({"response_received": "false"} if unanswered else {}),
        )

    def _all(self, path: str, key: str, **params: Any) -> list[Json]:
        found: list[Json] = []
        while True:
            page = self.request("GET", path, limit=PAGE, offset=len(found), **params)
            found += page[key]
            if len(found) >= page["total_entries"] or not page[key]:
                return found

    # -- what a person does ------------------------------------------------------------------------------------------

    def trigger(
        self,
        dag_id: str,
        conf: Mapping[str, Any] | None = None,
        run_id: str | None = None,
        *,
        timeout: float = 60,
    ) -> str:
        """Start a run and return its id; waits for the DAG first if Airflow has not parsed it yet."""
        self.wait_dag(dag_id, timeout=timeout)
        body = {
            "logical_date": None,
            "conf": dict(conf or {}),
            "dag_run_id": run_id or f"test__{uuid.uuid4().hex[:12]}",
        }
        return self.request("POST", f"/dags/{dag_id}/dagRuns", body)["dag_run_id"]

    def patch_run(self, dag_id: str, run_id: str, state: str) -> Json:
        """Mark a run `failed`, `success` or `queued`, as the button in the UI does."""
        return self.request("PATCH", f"/dags/{dag_id}/dagRuns/{run_id}", {"state": state})

    def patch_task(
        self, dag_id: str, run_id: str, task_id: str, state: str, map_index: int | None = None
    ) -> list[Json]:
        """Mark a task `failed`, `success` or `skipped`: all indexes of a mapped one unless one is given."""
        path = _task(dag_id, run_id, task_id) + ("" if map_index is None else f"/{map_index}")
        return self.request("PATCH", path, {"new_state": state})["task_instances"]

    def clear(
        self,
        dag_id: str,
        run_id: str,
        task_ids: Collection[str | tuple[str, int]] | None = None,
        *,
        only_failed: bool = False,
        downstream: bool = False,
        upstream: bool = False,
    ) -> None:
        """Clear the given tasks (or `(task, index)`) and nothing else unless asked for; without any, the whole run."""
        if task_ids is None:
            body = {"dry_run": False, "only_failed": only_failed}
            self.request("POST", f"/dags/{dag_id}/dagRuns/{run_id}/clear", body)
            return
        self.request(
            "POST",
            f"/dags/{dag_id}/clearTaskInstances",
            {
                "dry_run": False,
                "dag_run_id": run_id,
                "task_ids": list(task_ids),
                "only_failed": only_failed,
                "include_downstream": downstream,
                "include_upstream": upstream,
            },
        )

    def pause(self, dag_id: str, paused: bool = True) -> None:
        self.request("PATCH", f"/dags/{dag_id}", {"is_paused": paused})

    def delete_run(self, dag_id: str, run_id: str) -> None:
        self.request("DELETE", f"/dags/{dag_id}/dagRuns/{run_id}")

    def answer_hitl(
        self,
        dag_id: str,
        run_id: str,
        task_id: str,
        options: Collection[str],
        params: Mapping[str, Any] | None = None,
        map_index: int = -1,
    ) -> Json:
        """Answer a question as a person does. Airflow may lose an answer that comes soon after its question."""
        body = {"chosen_options": list(options), "params_input": dict(params or {})}
        return self.request("PATCH", f"{_task(dag_id, run_id, task_id)}/{map_index}/hitlDetails", body)

    # -- waiting -----------------------------------------------------------------------------------------------------

    def wait_for(self, look: Callable[[], T], timeout: float, what: str) -> T:
        """Look again and again until something true comes back, and return that.

        :param look: called ten times a second, then less and less often. What the API refuses or does not answer counts
            as not yet.
        :param timeout: in seconds, times SAGA_TEST_PATIENCE.
        :raises NotInTimeError: when the time is over; says what was last seen.
        """
        deadline = time.monotonic() + timeout * PATIENCE
        pause = POLL_SECONDS
        seen: object = None
        while True:
            try:
                seen = look()
            except (AirflowApiError, httpx.TransportError) as error:
                seen = error
            else:
                if seen:
                    return seen
            self.check()
            if time.monotonic() > deadline:
                raise NotInTimeError(f"not within {timeout * PATIENCE:g} s: {what}; last seen: {seen!r}")
            time.sleep(pause)
            pause = min(pause * 1.1, SLOWEST_POLL_SECONDS)

    def check(self) -> None:
        """Called while waiting: raise here what makes further waiting useless."""

    def wait_dag(self, dag_id: str, timeout: float = 60) -> Json:
        """Wait until Airflow knows a DAG. A file that does not load is told with its trace."""
        try:
            return self.wait_for(lambda: self.dag(dag_id), timeout, f"DAG {dag_id} is known")
        except NotInTimeError as late:
            errors = "\n".join(f"{name}:\n{trace}" for name, trace in self.import_errors().items())
            raise NotInTimeError(f"{late}\nDAG files that do not load: {errors or 'none'}") from None

    def wait_run(
        self, dag_id: str, run_id: str, until: Collection[str] = FINISHED, timeout: float = 60
    ) -> str:
        """Wait until a run is in one of the states and return it; by default until it is over."""

        def state() -> str | None:
            now = self.run_state(dag_id, run_id)
            return now if now in until else None

        try:
            return self.wait_for(state, timeout, f"run {run_id} of {dag_id} is {' or '.join(sorted(until))}")
        except NotInTimeError as late:
            raise NotInTimeError(f"{late}\n{self._picture(dag_id, run_id)}") from None

    def wait_task(
        self,
        dag_id: str,
        run_id: str,
        task_id: str,
        until: Collection[str],
        timeout: float = 60,
        map_index: int = -1,
    ) -> Json:
        """Wait until a task instance is in one of the states (`none` for no state yet) and return it."""

        def instance() -> Json | None:
            now = self.task_instance(dag_id, run_id, task_id, map_index)
            return now if (now["state"] or "none") in until else None

        what = f"task {task_id}[{map_index}] of {dag_id} is {' or '.join(sorted(until))}"
        try:
            return self.wait_for(instance, timeout, what)
        except NotInTimeError as late:
            raise NotInTimeError(f"{late}\n{self._picture(dag_id, run_id)}") from None

    def _picture(self, dag_id: str, run_id: str) -> str:
        """The state of a run and of its tasks, for the text of a failure."""
        try:
            return f"{dag_id} {run_id}: {self.run_state(dag_id, run_id)} {self.task_states(dag_id, run_id)}"
        except (AirflowApiError, httpx.TransportError) as error:
            return f"{dag_id} {run_id}: {error}"


def _task(dag_id: str, run_id: str, task_id: str) -> str:
    return f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}"


def _name(instance: Json) -> str:
    index = instance["map_index"]
    return instance["task_id"] if index == -1 else f"{instance['task_id']}[{index}]"
