"""How LangChain writes a chat model down and makes it again."""

from __future__ import annotations

import pickle
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.load.serializable import SerializedConstructor, SerializedNotImplemented

from lookahead_agent.errors import ConfigurationError
from lookahead_agent.policy import VerifierPolicy


class SerializableModel(BaseChatModel):
    """A chat model that `langchain_core.load` and `pickle` can write down and make again."""

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Yes: `langchain_core.load` can write it down and make it again."""
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """By what `langchain_core.load` knows the class: a name that stays, wherever the class is."""
        return ["lookahead_agent", "chat_model"]

    def to_json(self) -> SerializedConstructor | SerializedNotImplemented:
        """What `langchain_core.load` writes down, with policies as their fields."""
        written = super().to_json()
        if written["type"] == "constructor":
            for name in {"policy", "policies"} & written["kwargs"].keys():
                written["kwargs"][name] = _as_fields(written["kwargs"][name])
        return written

    @property
    def lc_secrets(self) -> dict[str, str]:
        """Fields that are not written down, and the environment variables that they are read from again."""
        return {
            "api_key": "LOOKAHEAD_API_KEY",
            "draft_api_key": "LOOKAHEAD_DRAFT_API_KEY",
            "judge_api_key": "LOOKAHEAD_JUDGE_API_KEY",
            "embedding_api_key": "LOOKAHEAD_EMBEDDING_API_KEY",
        }

    def __reduce__(self) -> tuple[Any, ...]:
        # The fields say which engines are meant; another process finds or starts them.
        fields = {name: getattr(self, name) for name in self.model_fields_set - {"profile"}}
        for name, value in fields.items():
            try:
                if value is not None and name == "engines":
                    raise TypeError("engines belong to their process")
                pickle.dumps(value)
            except (TypeError, AttributeError, pickle.PicklingError) as error:
                raise ConfigurationError(
                    f"{name} cannot be pickled ({error}): pickle a model without it, and give it where it is read again"
                ) from error
        return _made_of, (type(self), fields)


def _made_of(kind: type[SerializableModel], fields: dict[str, Any]) -> SerializableModel:
    """A model from its fields; what `pickle` calls."""
    return kind(**fields)


def _as_fields(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_fields(policy) for key, policy in value.items()}
    return value.model_dump(exclude_unset=True) if isinstance(value, VerifierPolicy) else value
