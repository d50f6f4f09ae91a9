"""A tokenizer for counting, read from a model's folder without transformers, whose import takes ten seconds."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from lookahead_agent.engines.chat_template import bound_operations
from lookahead_agent.engines.model_files import read_object
from lookahead_agent.engines.tokenizer import HFTokenizer

_UNCHANGED = {
    "Qwen2Tokenizer": ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    "PreTrainedTokenizer": (None, "llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    "TokenizersBackend": (None, "llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
}
"""Types of models whose `tokenizer.json` transformers loads without changes, by the class of the tokenizer."""


def load_counting_tokenizer(folder: Path) -> HFTokenizer:
    """Load a folder's tokenizer for counting: without transformers if that has the same ids, else with it.

    Raises ModelNotFoundError if the folder has no fast tokenizer.
    """
    try:
        config = read_object(folder / "tokenizer_config.json")
        backend = _FileBackend(folder, config) if _is_read_unchanged(folder, config) else None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # error of damaged files, such as a panic of Rust; transformers says what is wrong with them
        backend = None
    return HFTokenizer(folder, backend if backend is not None and backend.has_all_tokens else None)


def _is_read_unchanged(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether transformers reads the tokenizer of `tokenizer.json` as it is, and makes chats by a single template."""
    kind = str(config.get("tokenizer_class")).removesuffix("Fast")
    model = read_object(folder / "config.json") if (folder / "config.json").exists() else {}
    return (
        model.get("model_type") in _UNCHANGED.get(kind, ())
        and "auto_map" not in {*config, *model}
        and isinstance(config.get("chat_template"), str | None)
        and not (folder / "additional_chat_templates").exists()
        and not config.get("add_prefix_space")
        and (kind != "Qwen2Tokenizer" or "eos_token" in config)
    )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of a configuration by name, such as "eos_token"."""
    values = {name: value for name, value in config.items() if name.endswith("_token")}
    values = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: value for name, value in values.items() if isinstance(value, str)}


class _FileBackend:
    """The part of the interface of transformers' tokenizers that `HFTokenizer` needs for chats and texts."""

    is_fast = True

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from tokenizers import Tokenizer

        self.name_or_path = str(folder)
        self.backend_tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()
        file = folder / "chat_template.jinja"
        self.chat_template: Any = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
        self.special_tokens_map = _special_tokens(config)
        self.bos_token, eos_token = (self.special_tokens_map.get(name) for name in ("bos_token", "eos_token"))
        self.eos_token_id = self.backend_tokenizer.token_to_id(eos_token) if eos_token is not None else None
        self.added_tokens_decoder = self.backend_tokenizer.get_added_tokens_decoder()
        listed = [*(config.get("added_tokens_decoder") or {}).values(), *self.special_tokens_map.values()]
        contents = {entry["content"] if isinstance(entry, dict) else entry for entry in listed}
        self.has_all_tokens = contents <= self.get_added_vocab().keys()  # else transformers adds them to the file's

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def get_added_vocab(self) -> dict[str, int]:
        return {token.content: token_id for token_id, token in self.added_tokens_decoder.items()}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        tokenize: bool,
        **options: Any,
    ) -> str:
        options = {**self.special_tokens_map, **options}
        if options.get("continue_final_message"):
            from transformers.utils.chat_template_utils import render_jinja_template

            bound_operations()
            (text,), _ = render_jinja_template([messages], tools, chat_template=self.chat_template, **options)
            return str(text)
        options.pop("continue_final_message", None)
        return str(self._template.render(messages=messages, tools=tools, documents=None, **options))

    @cached_property
    def _template(self) -> Any:
        """The chat template, in an environment with the names that transformers gives to templates."""
        from datetime import datetime

        from jinja2 import TemplateError, ext, nodes
        from jinja2.parser import Parser

        from lookahead_agent.engines.template_sandbox import BoundedEnvironment

        class Generation(ext.Extension):
            """The tag around the model's own tokens, which matters to training only."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Parser) -> list[nodes.Node]:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, **options)

        def refuse(message: str) -> None:
            raise TemplateError(message)

        def strftime_now(form: str) -> str:
            return datetime.now().strftime(form)

        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
        )
        environment.filters["tojson"] = to_json
        environment.globals |= {
            "raise_exception": refuse,
            "strftime_now": strftime_now,
        }
        return environment.from_string(self.chat_template)
