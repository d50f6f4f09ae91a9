"""What a server allows."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, SecretStr


class ServerSettings(BaseModel):
    """Limits of a server.

    Attributes:
        api_key: What clients must send as a bearer token; None: nothing.
        served_model: The model's name here; None: as the chat model calls it.
        max_body_bytes: Longest body of a request, in bytes.
        max_prompt_tokens: Longest prompt, in tokens; None: the context.
        max_tokens: Most tokens of a reply that a request may ask for.
        max_choices: Most replies (`n`) of one request.
        concurrent: Replies that are written at once.
        queue: Replies that may wait for that; beyond, requests are refused (429).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    api_key: SecretStr | None = None
    served_model: str | None = None
    max_body_bytes: int = Field(4 << 20, ge=1)
    max_prompt_tokens: int | None = Field(None, ge=1)
    max_tokens: int = Field(4096, ge=1)
    max_choices: int = Field(8, ge=1)
    concurrent: int = Field(32, ge=1)
    queue: int = Field(64, ge=0)
