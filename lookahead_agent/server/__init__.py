"""An OpenAI-compatible server in front of `ChatLookahead`."""

from pydantic import BaseModel, ConfigDict, Field, SecretStr


class ServerSettings(BaseModel):
    """Limits of a server, and its clients' rights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    api_key: SecretStr | None = None  # bearer token that clients must send; None: none
    served_model: str | None = None  # the model's name here; None: as the chat model calls it
    # Longest body of a request; None: 32 for each token of the context, and 64 KiB for the rest, up to 4 MiB.
    max_body_bytes: int | None = Field(None, ge=1)
    max_tokens: int = Field(4096, ge=1)  # most tokens of a reply that a request may ask for
    max_choices: int = Field(8, ge=1)  # most replies (`n`) of one request
    concurrent: int = Field(32, ge=1)  # replies that are written at once
    queue: int = Field(64, ge=0)  # replies that may wait for that; beyond, requests are refused (429)
    # Names by which clients may call the server in the `Host` header, beside IP addresses, which are always allowed;
    # "*.example.com" allows every name that ends so, and "*" all. The second is what the test clients of Starlette and
    # schemathesis call an application.
    allowed_hosts: tuple[str, ...] = ("localhost", "testserver")
    cors_origins: tuple[str, ...] = ()  # origins of web pages that may call it, as "https://app.example.com"; "*": all
    request_timeout: float = Field(20, gt=0, allow_inf_nan=False)  # seconds in which a request must have arrived
    # Most connections at once; beyond, those that have waited longest without a request are closed.
    connections: int = Field(512, ge=1)
    # Digest of the engines, for a Unix socket of this user's own programs alone: they send a `GenerateRequest`.
    engines_digest: str | None = None

    def body_limit(self, context_length: int) -> int:
        """Longest body of a request, in bytes."""
        return self.max_body_bytes or min(4 << 20, 32 * context_length + (64 << 10))
