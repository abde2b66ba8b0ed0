"""What the demo says over HTTP: to Airflow what its UI says, and to the travel service what only a demo may say."""

from __future__ import annotations

from typing import Any

import httpx

Json = dict[str, Any]

TIMEOUT_SECONDS = 30.0


class AirflowApi:
    """Airflow's public REST API, spoken to as the UI does it. Threads may share one.

    :raises httpx.HTTPError: from every method, when Airflow does not answer or refuses.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        # Only ever to loopback: a proxy in the environment must not get in between.
        self._client = httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS, trust_env=False)

    def close(self) -> None:
        self._client.close()

    def call(self, method: str, path: str, body: Json | None = None, **params: Any) -> Json:
        if "authorization" not in self._client.headers:
            token = self._client.get("/auth/token").raise_for_status().json()["access_token"]
            self._client.headers["authorization"] = f"Bearer {token}"
        answer = self._client.request(method, f"/api/v2{path}", json=body, params=params)
        return dict(answer.raise_for_status().json())

    def answers_tasks(self) -> bool:
        """Whether the API that running tasks call is there; asking also makes it ready, which takes it seconds."""
        return self._client.get("/execution/health").is_success

    def healthy(self) -> set[str]:
        """The components that Airflow itself calls healthy."""
        said = self.call("GET", "/monitor/health")
        return {name for name, each in said.items() if each["status"] == "healthy"}

    def dag_ids(self) -> set[str]:
        return {each["dag_id"] for each in self.call("GET", "/dags", limit=100)["dags"]}

    def import_errors(self) -> list[str]:
        found = self.call("GET", "/importErrors", limit=100)["import_errors"]
        return [f"{each['filename']}: {each['stack_trace']}" for each in found]

    def trigger(self, dag_id: str, run_id: str, conf: Json) -> None:
        body = {"dag_run_id": run_id, "logical_date": None, "conf": conf}
        self.call("POST", f"/dags/{dag_id}/dagRuns", body)

    def mark_failed(self, dag_id: str, run_id: str) -> None:
        """What the button "Mark run as … failed" sends."""
        self.call("PATCH", f"/dags/{dag_id}/dagRuns/{run_id}", {"state": "failed"})

    def run_state(self, dag_id: str, run_id: str) -> str:
        return str(self.call("GET", f"/dags/{dag_id}/dagRuns/{run_id}")["state"])

    def task_states(self, dag_id: str, run_id: str) -> dict[str, str | None]:
        found = self.call("GET", f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances", limit=100)
        return {each["task_id"]: each["state"] for each in found["task_instances"]}


class TravelService:
    """The other side of the travel service: what it is told to do wrong, and what is in its ledger."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS + 10, trust_env=False)

    def close(self) -> None:
        self._client.close()

    def tell(self, do: str, **more: Any) -> None:
        self._client.post("/tell", json={"do": do, **more}).raise_for_status()

    def received(self, kind: str, trip: str, *, seconds: float) -> bool:
        """Wait until a call about this trip has come in."""
        asked = {"received": f"{kind}:1", "trip": trip, "timeout": seconds}
        return bool(self._client.get("/wait", params=asked).raise_for_status().json()["reached"])

    def release(self, kind: str, verb: str) -> int:
        """Let what is held or promised happen; returns how many calls that were."""
        let_go = self._client.post("/release", json={"kind": kind, "verb": verb})
        return int(let_go.raise_for_status().json()["released"])

    def net(self, trip: str) -> Json:
        """What the calls of this trip add up to: effects minus undos, with all that stands."""
        return dict(self._client.get("/net", params={"trip": trip}).raise_for_status().json())


class ModelService:
    """The scripted model behind the OpenAI protocol: what it says, and what it was asked."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS, trust_env=False)

    def close(self) -> None:
        self._client.close()

    def script(self, model: str, script: Json) -> None:
        self._client.post(f"/scripts/{model}", json=script).raise_for_status()

    def requests(self, model: str) -> list[Json]:
        """What this model was asked, in order."""
        rows = self._client.get("/ledger").raise_for_status().json()["requests"]
        return [row for row in rows if row["model"] == model]
