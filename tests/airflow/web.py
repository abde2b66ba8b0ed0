"""Airflow's own API server app with the plugin in it, in this process, and its users by their role."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from fastapi.testclient import TestClient
from httpx import Response

ROLES = ("viewer", "user", "op", "admin")
HOST = "http://testserver"


class Web:
    """Requests of users of the four roles of Airflow's simple auth manager."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.plugin_app = next(route.app for route in app.routes if getattr(route, "path", "") == "/saga")
        self._client = TestClient(app, base_url=HOST, raise_server_exceptions=False)

    def get(self, path: str, role: str | None = "viewer", **more: Any) -> Response:
        return self.call("GET", path, role, **more)

    def post(self, path: str, body: object = None, role: str | None = "user", **more: Any) -> Response:
        return self.call("POST", path, role, json={} if body is None else body, **more)

    def call(self, method: str, path: str, role: str | None, **more: Any) -> Response:
        """As a program does it, with a token in the header."""
        headers = dict(more.pop("headers", {}))
        if role is not None:
            headers["authorization"] = f"Bearer {self.token(role)}"
        return self._client.request(method, f"/saga{path}", headers=headers, **more)

    def browse(self, method: str, path: str, role: str = "user", **more: Any) -> Response:
        """As a browser does it, with a cookie."""
        headers = {"cookie": f"_token={self.token(role)}", **more.pop("headers", {})}
        return self._client.request(method, f"/saga{path}", headers=headers, **more)

    def airflow(self, path: str, role: str = "viewer") -> Response:
        """Airflow's own API."""
        headers = {"authorization": f"Bearer {self.token(role)}"}
        return self._client.get(f"/api/v2{path}", headers=headers)

    def token(self, role: str) -> str:
        from airflow.api_fastapi.app import get_auth_manager
        from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

        return str(get_auth_manager().generate_jwt(SimpleAuthManagerUser(username=f"{role}_1", role=role)))


def of(run: tuple[str, str], *more: str) -> str:
    """The path of a saga, below ``/saga`` or ``/saga/api/v1``."""
    return "/".join(["/dags", quote(run[0], safe=""), "runs", quote(run[1], safe=""), *more])


def api(run: tuple[str, str], *more: str) -> str:
    return f"/api/v1{of(run, *more)}"
