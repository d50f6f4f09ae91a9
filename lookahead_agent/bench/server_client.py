"""Clients of OpenAI-compatible servers whose replies `bench --parity --against` compares."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lookahead_agent.errors import ConfigurationError, EngineError, extra_imports
from lookahead_agent.system.jsonl import Row

with extra_imports("a comparison of servers needs openai: pip install 'lookahead-agent[bench]'"):
    from openai import APIConnectionError, APIError, APIStatusError, AsyncOpenAI

_PATTERN = re.compile(r"([\w.+-][\w.+ -]*)=(?:(\S+)@)?(https?://\S+)")
_EXAMPLE = "plain=http://127.0.0.1:8000/v1 or plain=MODEL@http://127.0.0.1:8000/v1"
_PROBE: Any = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
_QUESTION: Any = [{"role": "user", "content": "What time is it?"}]
_REFUSALS = (401, 403, 404)  # statuses that refuse key, model or address: each further request would fail alike


@dataclass(frozen=True)
class ServerAddress:
    """A server that `--against` names."""

    name: str
    url: str
    model: str | None = None  # None: the only model that the server lists

    @property
    def key_variable(self) -> str:
        """The environment variable that has the API key."""
        return re.sub(r"\W", "_", self.name).upper() + "_API_KEY"


def parse_addresses(texts: Sequence[str]) -> list[ServerAddress]:
    """Parse `NAME=URL` and `NAME=MODEL@URL`; raises ConfigurationError for others, and for two with one name."""
    addresses = []
    for text in texts:
        if (match := _PATTERN.fullmatch(text)) is None:
            raise ConfigurationError(f"{text!r} is not a server: write it as in {_EXAMPLE}")
        addresses.append(ServerAddress(match[1], match[3].rstrip("/"), match[2]))
    if len({address.key_variable for address in addresses}) < len(addresses):
        raise ConfigurationError(f"each server needs a name of its own: {', '.join(each.name for each in addresses)}")
    return addresses


class ServerClient:
    """A client of a server; `check` finds its model."""

    def __init__(self, address: ServerAddress, client: Any = None) -> None:  # openai's versions differ in its type
        self.address = address
        self.model = address.model or ""
        # Without a variable of its own, the server gets no key: those of other services are not for it.
        key = os.environ.get(address.key_variable) or "none"
        self._client = AsyncOpenAI(base_url=address.url, api_key=key, http_client=client)

    async def check(self) -> None:
        """Find the model, and check that the server takes tools and puts them into the prompt.

        Raises:
            ConfigurationError: One of these fails; the message says what to do.
        """
        self.model = await self._choose_model()
        sizes = []
        for tools in ({"tools": [_PROBE]}, {}):
            try:
                body = await self._request({"messages": _QUESTION, "max_tokens": 1, "temperature": 0, **tools})
                sizes.append(_find(body, "usage", "prompt_tokens"))
                if _find(body, "choices", 0, "message") is None:
                    raise ConfigurationError(self._problem("answers, but not with a chat completion: correct the URL"))
            except (APIError, ValueError) as error:
                raise self._error(error, "a request with a tool" if tools else "a request") from error
        if sizes[0] is not None and sizes[0] == sizes[1]:
            raise ConfigurationError(
                self._problem("does not put tools into the prompt: choose a model whose chat template has tools")
            )

    async def reply(self, fields: Mapping[str, Any]) -> Row:
        """Request a chat completion; returns the fields of its row, or the `error` of a request that failed.

        Raises EngineError if each further request would fail too.
        """
        try:
            return _fields_of(await self._request(fields))
        except APIConnectionError as error:
            problem = f"does not answer any more ({error.__cause__ or error}): the same command continues"
            raise EngineError(self._problem(problem)) from error
        except APIStatusError as error:
            if error.status_code in _REFUSALS:
                raise EngineError(self._problem(f"refuses requests now ({_reason(error)})")) from error
            return {"error": _reason(error)}
        except (APIError, ValueError, LookupError, TypeError, AttributeError) as error:
            return {"error": f"no chat completion: {error!r}"}

    async def _request(self, fields: Mapping[str, Any]) -> Any:
        """Request a chat completion; returns the body's JSON value, and raises ValueError if there is none."""
        response = await self._client.chat.completions.with_raw_response.create(model=self.model, **fields)
        return response.http_response.json()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _choose_model(self) -> str:
        wanted = self.address.model
        try:
            response = await self._client.models.with_raw_response.list()
            entries = _find(response.http_response.json(), "data")
            listed = [str(entry["id"]) for entry in entries]
        except APIStatusError as error:
            if error.status_code == 404 and wanted is not None:
                return wanted  # the chat endpoint alone is needed
            raise self._error(error, "its list of models") from error
        except APIError as error:
            raise self._error(error, "its list of models") from error
        except (ValueError, LookupError, TypeError) as error:
            if wanted is not None:
                return wanted
            problem = "lists no models: end the URL with /v1, or write NAME=MODEL@URL"
            raise ConfigurationError(self._problem(problem)) from error
        if wanted is not None and wanted not in listed:
            raise ConfigurationError(self._problem(f"has no model {wanted!r}: choose of {', '.join(listed)}"))
        if wanted is None and len(listed) != 1:
            known = ", ".join(listed) or "none"
            raise ConfigurationError(self._problem(f"lists these models: {known}. Choose one with NAME=MODEL@URL"))
        return wanted or listed[0]

    def _error(self, error: Exception, what: str) -> ConfigurationError:
        """Turn the failure of a request into an error that says what to do."""
        match error:
            case APIStatusError(status_code=401 | 403):
                variable = self.address.key_variable
                problem = f"refuses the API key ({error.status_code}): set {variable} to the right one"
            case APIStatusError(status_code=404):
                problem = f"answers {what} with 404 ({_reason(error)}): correct the URL, which usually ends with /v1"
            case APIStatusError():
                problem = f"refuses {what} ({_reason(error)})"
                problem += ": vLLM needs --enable-auto-tool-choice and --tool-call-parser" if "tool" in what else ""
            case APIConnectionError():
                problem = f"does not answer ({error.__cause__ or error}): start it first"
            case _:
                problem = f"answers {what} with something else than JSON: end the URL with /v1"
        return ConfigurationError(self._problem(problem))

    def _problem(self, text: str) -> str:
        return f"{self.address.name}: {self.address.url} {text}"


def _fields_of(body: Any) -> Row:
    """Read a chat completion; raises LookupError, TypeError or AttributeError if it is none."""
    choice = body["choices"][0]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {
        "content": message.get("content") or "",
        "reasoning": message.get("reasoning") or message.get("reasoning_content") or "",
        "calls": [(str(call["name"]), _text(call.get("arguments"))) for call in calls],
        "finish_reason": choice.get("finish_reason"),
        "prompt_tokens": _find(body, "usage", "prompt_tokens"),
        "cached_tokens": _find(body, "usage", "prompt_tokens_details", "cached_tokens"),
        "output_tokens": _find(body, "usage", "completion_tokens"),
    }


def _text(arguments: Any) -> str:
    """Return arguments as written; a server that sends something else than a text has malformed calls."""
    return arguments if isinstance(arguments, str) else repr(arguments)


def _find(value: Any, *path: str | int) -> Any:
    """Return a part of a JSON value; None if it is missing."""
    for key in path:
        try:
            value = value[key]
        except (LookupError, TypeError):
            return None
    return value


def _reason(error: APIStatusError) -> str:
    """Describe the status of a failed request, with the server's message on one line."""
    message = _find(error.body, "message") or error.message
    return f"{error.status_code}: {' '.join(str(message).split())[:300]}"
