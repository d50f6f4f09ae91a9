"""Steps between two vocabularies: ids where draft and target share one, text at step boundaries where they do not."""

from __future__ import annotations

from dataclasses import replace

from lookahead_agent.decoding.step import Step, StepEnd
from lookahead_agent.engines.tokenizer import Tokenizer
from lookahead_agent.errors import EngineError


class Vocabularies:
    """Translates steps between the draft's tokens and the target's.

    Args:
        target: The target's tokenizer, in whose tokens a reply is.
        draft: The draft's.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self._target = target
        self._draft = draft
        self.shared = target.fingerprint == draft.fingerprint

    def from_draft(self, step: Step, budget: int) -> Step:
        """A step that the draft wrote, in the target's tokens.

        Args:
            step: In the draft's tokens.
            budget: Tokens that the reply may still have; a step that uses them up ends the reply.

        Raises:
            EngineError: The step has no tokens, or one that the target's vocabulary does not have.
        """
        if not step.token_ids:
            raise EngineError("the draft model ended a step without writing anything")
        if self.shared:
            if max(step.token_ids) >= self._target.size or min(step.token_ids) < 0:
                raise EngineError("the draft model wrote a token that is not in the vocabulary")
            return step
        ids = self._target.encode(step.text)
        if step.end is StepEnd.EOS:
            ids.append(min(self._target.eos_ids))
        return replace(step, token_ids=tuple(ids), end=StepEnd.BUDGET if len(ids) >= budget else step.end)

    def to_draft(self, step: Step) -> tuple[int, ...]:
        """The draft's tokens for a step of the target."""
        return step.token_ids if self.shared else tuple(self._draft.encode(step.text))
