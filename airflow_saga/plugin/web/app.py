"""The app itself: what each of its answers has in common."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import psycopg
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse

from airflow_saga import __version__
from airflow_saga.core.errors import SagaError, StoreError, UnknownSagaError, VerbRefusedError
from airflow_saga.metadata import MetadataUnreadableError
from airflow_saga.plugin.web import access
from airflow_saga.plugin.web.api import api, display, refused
from airflow_saga.plugin.web.pages import failed_page, pages
from airflow_saga.plugin.web.upkeep import upkeep_api
from airflow_saga.store.connect import first_line

HEADERS = {
    # Texts of models and of the outside world are shown here: nothing in them may become a script, a style, a request.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def make_app() -> FastAPI:
    """Without FastAPI's own pages of documentation, which would be open to everybody."""
    app = FastAPI(
        title="Airflow Saga",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        dependencies=access.EVERY_ROUTE,
    )
    app.include_router(api)
    app.include_router(upkeep_api)
    app.include_router(pages)

    @app.get("/api/v1/openapi.json", include_in_schema=False)
    def openapi() -> JSONResponse:
        described = [route for route in app.routes if getattr(route, "path", "").startswith("/api/")]
        return JSONResponse(get_openapi(title=app.title, version=app.version, routes=described))

    app.middleware("http")(_with_headers)
    app.exception_handler(HTTPException)(_http_problem)
    app.exception_handler(RequestValidationError)(_wrong_request)
    app.exception_handler(SagaError)(_saga_problem)
    app.exception_handler(MetadataUnreadableError)(_saga_problem)
    app.exception_handler(psycopg.Error)(_store_problem)
    return app


async def _with_headers(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    response = await call_next(request)
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def _answer(request: Request, status: int, message: str) -> Response:
    shown = display().text(message) or ""
    if "/api/" in request.url.path:
        return refused(shown, status)
    return failed_page(request, status, shown)


def _http_problem(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    return _answer(request, problem.status_code, str(problem.detail))


def _wrong_request(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, RequestValidationError)
    # What was sent is not repeated: it may hold a secret.
    told = [f"{'.'.join(str(part) for part in error['loc'])}: {error['msg']}" for error in problem.errors()]
    return _answer(request, 422, "; ".join(told))


def _saga_problem(request: Request, problem: Exception) -> Response:
    if isinstance(problem, UnknownSagaError):
        status = 404
    elif isinstance(problem, VerbRefusedError):
        status = 409
    else:
        status = 503 if isinstance(problem, StoreError | MetadataUnreadableError) else 400
    return _answer(request, status, str(problem))


def _store_problem(request: Request, problem: Exception) -> Response:
    return _answer(request, 503, f"the saga store failed: {first_line(problem)}; look: airflow saga doctor")
