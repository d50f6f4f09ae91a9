"""The profile of a chat model, which LangChain's middleware reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from langchain_core.language_models.model_profile import ModelProfile

from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.generation.local_backend import LocalBackend
from lookahead_agent.models import configured


def profile_of(backend: LocalBackend, max_tokens: int) -> ModelProfile:
    """The profile of a model whose replies have at most `max_tokens`, without loading it."""
    template, thinks = _template(backend)
    profile = ModelProfile(
        max_output_tokens=max_tokens,
        text_inputs=True,
        image_inputs=False,
        image_url_inputs=False,
        pdf_inputs=False,
        audio_inputs=False,
        video_inputs=False,
        image_tool_message=False,
        pdf_tool_message=False,
        text_outputs=True,
        image_outputs=False,
        audio_outputs=False,
        video_outputs=False,
        reasoning_output=thinks,
        # A call that is required is held to its grammar, whatever the template says of tools.
        tool_calling=template is None or "tools" in template,
        tool_choice=True,
        tool_call_streaming=True,
        structured_output=True,
        attachment=False,
        temperature=True,
    )
    if backend.runtime is not None:
        profile["name"] = backend.runtime.models.target.name
    if (context := backend.known_context_length()) is not None:
        profile["max_input_tokens"] = context
    return profile


def _template(backend: LocalBackend) -> tuple[str | None, bool]:
    """The target's chat template, None where it is not at hand, and whether the model thinks apart."""
    if (engines := backend.running) is not None:
        tokenizer = engines.target.tokenizer
        template = tokenizer.chat_template if isinstance(tokenizer, HFTokenizer) else None
        return template, backend.thinking(engines) is not None
    assert backend.runtime is not None
    if (catalogued := backend.runtime.models.catalogued) is not None:
        return None, catalogued.thinking is not None
    folder = configured(backend.runtime.models.target)
    template = _read(folder) if folder is not None else None
    return template, "</think>" in (template or "")


def _read(folder: Path) -> str | None:
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    stated: Any = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None
    return stated if stated is None or isinstance(stated, str) else json.dumps(stated)
