"""Requests generated from the schemas of the server cause no server error."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from schemathesis import openapi
from schemathesis.checks import not_a_server_error

from lookahead_agent.server import ServerSettings
from lookahead_agent.server.app import create_app
from lookahead_agent.server.protocol import ChatRequestBody, CompletionRequestBody
from lookahead_agent.server.responses_request import ResponseRequestBody
from tests.unit.chat import scripted_chat

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequestBody,
    "/v1/responses": ResponseRequestBody,
    "/v1/completions": CompletionRequestBody,
}
HEADERS = [
    {"name": f"X-Lookahead-{name}", "in": "header", "schema": {"type": "string", "maxLength": 300}}
    for name in ("Policy", "Node")
]


def openapi_document() -> dict[str, Any]:
    _, schemas = models_json_schema(
        [(model, "validation") for model in BODIES.values()], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {"/health": {"get": {"responses": {}}}, "/v1/models": {"get": {"responses": {}}}}
    for path, model in BODIES.items():
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
        body = {"required": True, "content": content}
        paths[path] = {"post": {"requestBody": body, "parameters": HEADERS, "responses": {}}}
    info = {"title": "server", "version": "1"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas["$defs"]}}


app = create_app(
    scripted_chat("First this.\n\nIt is 4.", max_tokens=20),
    ServerSettings(max_tokens=50, allowed_hosts=("testserver",)),
)
schema = openapi.from_dict(openapi_document())
schema.app = app


@schema.parametrize()
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
def test_generated_requests_cause_no_server_error(case) -> None:  # type: ignore[no-untyped-def]
    response = case.call()
    case.validate_response(response, checks=[not_a_server_error])
