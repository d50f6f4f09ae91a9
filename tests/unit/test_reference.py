"""The reference names what the code has: environment variables, signatures, fields. No prompt has an ellipsis."""

from __future__ import annotations

import inspect
import pydoc
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent import ChatLookahead, VerifierPolicy
from lookahead_agent.agents import planning, templates
from lookahead_agent.agents.prompts import describe_tools
from lookahead_agent.agents.templates import _FROM_ENVIRONMENT, TEMPLATES, template
from lookahead_agent.agents.tool_sources import load_tools

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"


def test_configuration_page_names_every_environment_variable() -> None:
    code = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "lookahead_agent").rglob("*.py"))
    read = set(re.findall(r"\bLOOKAHEAD_[A-Z0-9_]*[A-Z0-9]\b", code))
    read |= {f"LOOKAHEAD_{field.upper()}" for field in _FROM_ENVIRONMENT} | set(ChatLookahead().lc_secrets.values())
    page = (REFERENCE / "configuration.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\bLOOKAHEAD_[A-Z0-9_]+\b", page)) == read


def test_api_page_has_the_signatures_of_what_users_call() -> None:
    named = re.findall(r"^::: (\S+)$", (REFERENCE / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {f"graphs.{name}.build_{name}" for name in TEMPLATES} <= set(named)
    objects = {path.rpartition(".")[2]: _find(path) for path in named}
    assert {"load_tools", "make_tool", "checkpointer", "TraceRecorder", "ChatLookahead"} <= objects.keys()
    assert all(found.__doc__ for name, found in objects.items() if callable(found)), "each says what it does"


@pytest.mark.parametrize("name", TEMPLATES)
def test_function_of_a_template_shows_its_signature_and_help(name: str) -> None:
    build = getattr(templates, f"build_{name}")
    parameters = inspect.signature(build).parameters
    assert [*parameters][:3] == ["llm", "tools", "checkpointer"]
    assert not any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters.values())
    assert f"build_{name}(llm: " in pydoc.plain(pydoc.render_doc(build))
    assert f"build_{name}" in dir(templates)
    with pytest.raises(AttributeError, match="build_other"):
        templates.__getattr__("build_other")


def _find(path: str) -> Any:
    if path.startswith("graphs."):
        _, module, name = path.split(".")
        return getattr(template("graphs", module), name)
    try:
        return import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(import_module(module), name)


def test_configuration_page_names_fields_that_exist() -> None:
    text = (REFERENCE / "configuration.md").read_text(encoding="utf-8").partition("## Policies")[0]
    fields = {
        name for row in re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert {"thinking", "max_tokens", "policies"} <= fields
    assert fields <= ChatLookahead.model_fields.keys() | VerifierPolicy.model_fields.keys()


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_of_a_template_have_no_ellipsis_that_a_model_copies(name: str, tmp_path: Path) -> None:
    modules = [vars(template("graphs", name)), vars(planning)]
    texts = [value for names in modules for key, value in names.items() if isinstance(value, str) and key.isupper()]
    texts.append(describe_tools(load_tools(["calculator", "python", "http:example.com", f"files:{tmp_path}"])))
    assert len(texts) > 5
    assert [text for text in texts if "…" in text or "..." in text] == []
