"""An OpenAI-compatible server in front of `ChatLookahead`."""

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

_KEY = re.compile(r"[!-~]+")
"""Visible ASCII characters: an HTTP header carries no others unchanged."""


def _keys(value: Any) -> Any:
    """Turn one key or several into a list, without surrounding white space; no message contains a key."""
    keys = [value] if isinstance(value, (str, SecretStr)) else list(value or ())
    texts = [key.get_secret_value() if isinstance(key, SecretStr) else key for key in keys]
    if not all(isinstance(text, str) and _KEY.fullmatch(text.strip()) for text in texts):
        raise ValueError("an API key is empty, or has white space or characters outside of ASCII")
    return [text.strip() for text in texts]


class ServerSettings(BaseModel):
    """Limits of a server, and how it authorises clients."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    # Bearer tokens, of which clients must send one; each is a client of its own. None: no authentication.
    api_key: Annotated[tuple[SecretStr, ...], BeforeValidator(_keys)] = ()
    served_model: str | None = None  # the model's name in the API; None: the chat model's `model`
    # Maximum request body in bytes; None: 32 for each token of the context plus 64 KiB, up to 4 MiB.
    max_body_bytes: int | None = Field(None, ge=1)
    max_tokens: int = Field(4096, ge=1)  # longest reply; a larger `max_tokens` of a request is cut to it
    max_choices: int = Field(8, ge=1)  # maximum number of replies (`n`) to one request
    concurrent: int = Field(32, ge=1)  # replies that are generated at once
    queue: int = Field(64, ge=0)  # replies that may wait for a slot; further requests get status 429
    stored_responses: int = Field(1000, ge=0)  # responses that are kept for later requests, of all clients together
    stored_bytes: int = Field(64 << 20, ge=0)  # their length, with their conversations; each client has an equal share
    # Whether a request's policy may start models that do not run, while the others wait.
    start_models: bool = False
    # Names that clients may send as `Host`; IP addresses are always allowed. "*.example.com" allows every name with
    # this suffix, "*" every name. The test clients of Starlette and schemathesis send "testserver".
    allowed_hosts: tuple[str, ...] = ("localhost",)
    cors_origins: tuple[str, ...] = ()  # allowed CORS origins, such as "https://app.example.com"; "*": all
    request_timeout: float = Field(20, gt=0, allow_inf_nan=False)  # seconds until a request must have arrived in full
    # Maximum number of connections; above it, the connection that has waited longest for a request is closed.
    connections: int = Field(512, ge=1)
    # Digest of the engines of a daemon. Clients of its Unix socket, this user's programs, send a `GenerateRequest`.
    engines_digest: str | None = None

    def body_limit(self, context_length: int) -> int:
        """Maximum size of a request body, in bytes."""
        return self.max_body_bytes or min(4 << 20, 32 * context_length + (64 << 10))
