"""An OpenAI-compatible server in front of `ChatLookahead`."""

from pydantic import BaseModel, ConfigDict, Field, SecretStr


class ServerSettings(BaseModel):
    """Limits of a server, and its clients' rights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    api_key: SecretStr | None = None
    """Bearer token that clients must send; None: none."""
    served_model: str | None = None
    """The model's name here; None: as the chat model calls it."""
    max_body_bytes: int | None = Field(None, ge=1)
    """Longest body of a request; None: 32 for each token of the context, and 64 KiB for the rest, up to 4 MiB."""
    max_tokens: int = Field(4096, ge=1)
    """Most tokens of a reply that a request may ask for."""
    max_choices: int = Field(8, ge=1)
    """Most replies (`n`) of one request."""
    concurrent: int = Field(32, ge=1)
    """Replies that are written at once."""
    queue: int = Field(64, ge=0)
    """Replies that may wait for that; beyond, requests are refused (429)."""
    # The second is the name by which Starlette's and schemathesis' test clients call an application.
    allowed_hosts: tuple[str, ...] = ("localhost", "testserver")
    """Names by which clients may call the server in the `Host` header, beside IP addresses, which are always allowed;
    "*.example.com" allows every name that ends so, and "*" all."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the server, such as "https://app.example.com"; "*": all."""
    request_timeout: float = Field(20, gt=0, allow_inf_nan=False)
    """Seconds in which a request must have arrived."""
    connections: int = Field(512, ge=1)
    """Most connections at once; beyond, those that have waited longest without a request are closed."""
    engines_digest: str | None = None
    """Digest of the engines, for a Unix socket of this user's own programs alone: they send a `GenerateRequest`."""

    def body_limit(self, context_length: int) -> int:
        """Longest body of a request, in bytes."""
        return self.max_body_bytes or min(4 << 20, 32 * context_length + (64 << 10))
