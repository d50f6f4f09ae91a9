"""An OpenAI-compatible server in front of `ChatLookahead`."""

from pydantic import BaseModel, ConfigDict, Field, SecretStr


class ServerSettings(BaseModel):
    """Limits of a server, and how it authorises clients."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    api_key: SecretStr | None = None  # bearer token that clients must send; None: no authentication
    served_model: str | None = None  # the model's name in the API; None: the chat model's `model`
    # Maximum request body in bytes; None: 32 for each token of the context plus 64 KiB, up to 4 MiB.
    max_body_bytes: int | None = Field(None, ge=1)
    max_tokens: int = Field(4096, ge=1)  # maximum of `max_tokens` in a request
    max_choices: int = Field(8, ge=1)  # maximum number of replies (`n`) to one request
    concurrent: int = Field(32, ge=1)  # replies that are generated at once
    queue: int = Field(64, ge=0)  # replies that may wait for a slot; further requests get status 429
    # Names that clients may send as `Host`; IP addresses are always allowed. "*.example.com" allows every name with
    # this suffix, "*" every name. The test clients of Starlette and schemathesis send "testserver".
    allowed_hosts: tuple[str, ...] = ("localhost", "testserver")
    cors_origins: tuple[str, ...] = ()  # allowed CORS origins, such as "https://app.example.com"; "*": all
    request_timeout: float = Field(20, gt=0, allow_inf_nan=False)  # seconds until a request must have arrived in full
    # Maximum number of connections; above it, the connection that has waited longest for a request is closed.
    connections: int = Field(512, ge=1)
    # Digest of the engines of a daemon. Clients of its Unix socket, this user's programs, send a `GenerateRequest`.
    engines_digest: str | None = None

    def body_limit(self, context_length: int) -> int:
        """Maximum size of a request body, in bytes."""
        return self.max_body_bytes or min(4 << 20, 32 * context_length + (64 << 10))
