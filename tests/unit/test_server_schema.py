"""What the server's own OpenAPI description allows, it answers without failing."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from schemathesis import openapi
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from lookahead_agent.server import ServerSettings
from lookahead_agent.server.app import create_app
from tests.unit.chat import scripted_chat

app = create_app(scripted_chat("First this.\n\nIt is 4.", max_tokens=20), ServerSettings(max_tokens=50))
schema = openapi.from_asgi("/openapi.json", app)


@schema.parametrize()
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
def test_no_request_makes_the_server_fail(case) -> None:  # type: ignore[no-untyped-def]
    response = case.call()
    case.validate_response(response, checks=[not_a_server_error, response_schema_conformance, content_type_conformance])
