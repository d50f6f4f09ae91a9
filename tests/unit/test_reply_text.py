"""`ReplyText` streams the text that no later stop string can remove."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lookahead_agent.decoding.prefixes import ReplyText
from lookahead_agent.engines import ScriptedTokenizer

_WORDS = st.lists(st.sampled_from(["a", "b", " ", "\n", "ab", "."]), max_size=30)


@given(st.lists(_WORDS, max_size=5), st.lists(st.sampled_from(["b ", "a b", "\n\n", "."]), max_size=2))
def test_streamed_text_ends_before_the_first_stop_string(commits: list[list[str]], stop: list[str]) -> None:
    tokenizer, streamed = ScriptedTokenizer(), []
    text = ReplyText(tokenizer, (), tuple(stop), streamed.append)
    whole = ""
    for words in commits:
        text.commit([token for word in words for token in tokenizer.encode(word)])
        whole += "".join(words)
        assert text.text == whole
        end = min([position for word in stop if (position := whole.find(word)) >= 0], default=len(whole))
        assert whole[:end].startswith("".join(streamed))
        longest = max((len(word) for word in stop), default=1)
        assert len("".join(streamed)) >= min(end, len(whole) - longest + 1)
    end = min([position for word in stop if (position := whole.find(word)) >= 0], default=len(whole))
    assert text.finish() == whole[:end] == "".join(streamed)
