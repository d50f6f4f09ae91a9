"""Options that several commands share, and the chat model built from them."""

import inspect
import json
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from lookahead_agent.agents.tool_sources import KINDS
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.cli.app import CHAT_CLASS
from lookahead_agent.cli.terminal import Terminal
from lookahead_agent.models.catalogue import DEFAULT_SET
from lookahead_agent.modes.table import Precision
from lookahead_agent.policy import VerifierPolicy, as_policy

Model = Annotated[str, typer.Option("--model", help="Target model: a catalogue name, a folder or a Hub id.")]
Draft = Annotated[str | None, typer.Option("--draft", help="Draft model. Default: the catalogue's.")]
_POLICIES = "off, exact, strict, balanced or fast, and possibly changes: balanced:depth=8:width=2."
Policy = Annotated[str, typer.Option("--policy", help=_POLICIES)]
_METHODS = "Method inside the target's steps: auto, none, shared_draft, draft_model, ngram or suffix."
_DEPTH = "Steps in flight at the front (γ), even where that is slower. Default: whatever is fastest."
Depth = Annotated[int | None, typer.Option("--depth", min=1, max=16, help=_DEPTH)]
_PRECISION = "Of the target's weights. Default: the fastest without loss."
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens of a reply.")]
_MAX_TOKENS = "Most tokens of a reply. Default: what is left of the context, or a template's limit."
_TEMPERATURE = "0 is greedy. Default: what the model's makers recommend."
Temperature = Annotated[float | None, typer.Option("--temperature", min=0.0, help=_TEMPERATURE)]
_DATASET = 'Problems: JSON Lines with question and answer, or "own" for the packaged ones.'
Dataset = Annotated[str, typer.Option("--dataset", help=_DATASET)]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Number of problems.")]
Skip = Annotated[int | None, typer.Option("--skip", min=0, help="Problems to leave out at the beginning.")]
Costs = Annotated[Path | None, typer.Option("--costs", help="Measured costs: read if the file is there, else written.")]
_TOOLS = f"Tools of templates, in place of a calculator: {', '.join(KINDS)}. Repeatable."
ToolSources = Annotated[list[str] | None, typer.Option("--tools", help=_TOOLS)]
_OUT = "Rows of results, appended; the same command continues them."
Out = Annotated[Path, typer.Option("--out", dir_okay=False, help=_OUT)]
_SECONDS = "Begin nothing new after so long; the same command continues."
Seconds = Annotated[float | None, typer.Option("--seconds", min=1, help=_SECONDS)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
_ARGUMENT = "Argument of both vLLM engines, such as dtype=float32. Repeatable."
EngineArgument = Annotated[list[str] | None, typer.Option("--engine-arg", metavar="NAME=VALUE", help=_ARGUMENT)]

Number = TypeVar("Number", int, float)

UNFINISHED = 75  # exit status after the time limit: EX_TEMPFAIL, run it again
DEFAULT_MODEL = DEFAULT_SET
DEFAULT_POLICY = "balanced"


def chat_class() -> Callable[..., ChatLookahead]:
    """Return the class of the commands' chat models."""
    return CHAT_CLASS.get() or ChatLookahead


def policy_of(name: str, depth: int | None) -> VerifierPolicy:
    """Return the named policy, with `depth` if one is given and the policy speculates."""
    policy = as_policy(name)
    if depth is None:
        return policy
    if not policy.speculates:
        Terminal(stderr=True).print("--depth has no effect: the policy 'off' runs the target alone.")
        return policy
    return policy.model_copy(update={"depth": depth})


def node_policies(values: Sequence[str] | None, nodes: Collection[str] = ()) -> dict[str, str]:
    """Parse `NODE=POLICY` options to policies by node; if `nodes` is not empty, other nodes are an error."""
    chosen = {}
    for text in values or ():
        node, _, policy = text.partition("=")
        if not node or not policy or (nodes and node not in nodes):
            form = "NODE=POLICY" + (f", where NODE is one of {', '.join(nodes)}" if nodes else "")
            raise typer.BadParameter(f"{text!r} is not {form}", param_hint="--node-policy")
        chosen[node] = policy
    return chosen


def check_text(text: str | None, option: str, *, empty: bool = True) -> None:
    """Check that a text is encodable and, unless `empty`, not blank, before a model or a database is opened."""
    if text is not None and not empty and not text.strip():
        raise typer.BadParameter("the question is empty", param_hint=option)
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        raise typer.BadParameter(f"{text!r} has bytes that are not {encoding}", param_hint=option) from None


def words(text: str) -> list[str]:
    """Split a comma-separated list."""
    return [word.strip() for word in text.split(",") if word.strip()]


def choices(text: str, known: Collection[str], option: str) -> list[str]:
    """Split a comma-separated list, which must have at least one entry and only entries of `known`."""
    chosen = list(dict.fromkeys(words(text)))
    unknown = ", ".join(word for word in chosen if word not in known)
    if unknown or not chosen:
        problem = f"{unknown}: choose" if unknown else "name at least one"
        raise typer.BadParameter(f"{problem} of {', '.join(known)}", param_hint=option)
    return chosen


def numbers(text: str, parse: Callable[[str], Number], option: str) -> list[Number]:
    """Parse a comma-separated list of numbers with `int`, or of probabilities with `float`."""
    try:
        parsed = [parse(word) for word in words(text)]
    except ValueError:
        parsed = []
    if not parsed or not (parse is int or all(0 <= number <= 1 for number in parsed)):
        example = "1,2,4" if parse is int else "0.4,0.6"
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as {example}", param_hint=option)
    return parsed


def engine_arguments(pairs: list[str] | None) -> dict[str, Any]:
    """Parse `NAME=VALUE` pairs to engine arguments; a value that is not valid JSON is a string."""
    arguments: dict[str, Any] = {}
    for pair in pairs or ():
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE", param_hint="--engine-arg")
        try:
            arguments[name.replace("-", "_")] = json.loads(value)
        except json.JSONDecodeError:
            arguments[name.replace("-", "_")] = value
    return arguments


@dataclass(frozen=True)
class PairOptions:
    """Options for the models that a command runs on this machine."""

    model: Model = DEFAULT_MODEL
    draft: Draft = None
    precision: Annotated[Precision, typer.Option(help=_PRECISION)] = "auto"
    draft_precision: Annotated[Precision, typer.Option(help="Of the draft's weights.")] = "auto"
    engine_args: EngineArgument = None

    def chat_model(self, **fields: Any) -> ChatLookahead:
        """Create the chat model with these options and further fields; nothing is loaded yet."""
        arguments = engine_arguments(self.engine_args)
        options = {name: value for name, value in vars(self).items() if name not in ("draft", "engine_args")}
        options |= {"draft_model": self.draft, "engine_args": arguments, "draft_engine_args": arguments}
        return chat_class()(**options, **fields)


@dataclass(frozen=True)
class ModelOptions(PairOptions):
    """Options for the models of a command, their servers and token speculation."""

    base_url: Annotated[str | None, typer.Option(help="OpenAI-compatible server of --model, up to /v1.")] = None
    draft_url: Annotated[str | None, typer.Option(help="The same for the draft.")] = None
    token_speculation: Annotated[str, typer.Option(help=_METHODS)] = "auto"


@dataclass(frozen=True)
class ReplyOptions(ModelOptions):
    """`ModelOptions` and options for sampling."""

    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None
    max_tokens: Annotated[int | None, typer.Option(min=1, help=_MAX_TOKENS)] = None
    temperature: Temperature = None


def with_option_group(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's one dataclass parameter, such as `ModelOptions`, by options for its fields."""
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    (group,) = [each for each in parameters if is_dataclass(each.annotation)]
    shared = inspect.signature(group.annotation, eval_str=True).parameters

    @wraps(command)
    def run(**values: Any) -> None:
        options = group.annotation(**{name: values.pop(name) for name in shared})
        command(**{group.name: options}, **values)

    flattened = [each for each in parameters if each is not group]
    flattened += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in shared.values()]
    run.__signature__ = inspect.Signature(flattened)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in flattened}
    return run
