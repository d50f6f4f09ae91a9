"""Words of texts in many languages, for an index: normalised, segmented, and with their stems."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import regex

from lookahead_agent.errors import extra_imports

_SPACELESS = r"\p{Han}\p{Hiragana}\p{Katakana}ー々〆\p{Hangul}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}"
# A run of a script without spaces between words (and Korean, which writes particles onto words), or another word.
_WORDS = regex.compile(
    rf"(?P<run>[{_SPACELESS}][{_SPACELESS}\p{{M}}]*)|(?:(?![{_SPACELESS}])[\p{{L}}\p{{M}}\p{{N}}_])+"
)
# Marks that people leave out: of alphabets, and the dots below letters of India. In other scripts, a mark is a letter.
_ACCENTS = regex.compile(
    r"(?<=[\p{Latin}\p{Greek}\p{Cyrillic}\p{Hebrew}\p{Arabic}])\p{Mn}+|[\u093c\u09bc\u0a3c\u0abc\u0b3c\u0cbc]"
)
# Letters that people write in two ways.
_SPELLINGS = str.maketrans({
    "ı": "i", "ł": "l", "ø": "o", "đ": "d", "ð": "d", "ħ": "h", "ŧ": "t", "æ": "ae", "œ": "oe", "þ": "th",
    "ة": "ه", "ى": "ي", "ک": "ك", "ی": "ي", "ך": "כ", "ם": "מ", "ן": "נ", "ף": "פ", "ץ": "צ",
})  # fmt: skip
# Invisible characters inside of words: hyphens at line ends, joiners, directions.
_INVISIBLE = regex.compile("[\u00ad\u200c-\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff\u0640]")
# The parts of a name in code, such as `max_count` and `maxCount`.
_PARTS = regex.compile(r"_+|(?<=\p{Ll})(?=\p{Lu})")
# Hebrew writes articles, prepositions and conjunctions onto words. Snowball has no stemmer for it.
_HEBREW_PREFIX, _HEBREW_PLURAL = regex.compile("[והבלמשכ](?=\\w{3})"), regex.compile("(?<=\\w\\w)(?:ימ|ות)$")
_HEBREW = regex.compile(r"\p{Hebrew}")
_LONGEST = 100

# Snowball's stemmers by script.
_STEMMERS = {
    "Latin": (
        "english", "german", "french", "spanish", "portuguese", "italian", "dutch", "swedish", "norwegian", "danish",
        "finnish", "turkish", "hungarian", "romanian", "catalan", "indonesian",
    ),
    "Cyrillic": ("russian",),
    "Devanagari": ("hindi",),
    "Greek": ("greek",),
    "Arabic": ("arabic",),
    "Armenian": ("armenian",),
    "Tamil": ("tamil",),
}  # fmt: skip
_SCRIPTS = {script: regex.compile(rf"\p{{{script}}}") for script in _STEMMERS}


class Words:
    """Splits texts into words. It is for one thread at a time, as Snowball's stemmers are."""

    def __init__(self) -> None:
        with extra_imports("the search of documents needs its extra: pip install 'lookahead-agent[tools]'"):
            import chardet  # noqa: F401  # the search detects encodings by it later
            import Stemmer
            from bm25s import stopwords

        # A stemmer's own cache would never forget the words of a document.
        self._stemmers: dict[str, Any] = {
            name: Stemmer.Stemmer(name, 0) for names in _STEMMERS.values() for name in names
        }
        lists = {
            name: getattr(stopwords, f"STOPWORDS_{'EN_PLUS' if name == 'english' else name.upper()}", ())
            for name in self._stemmers
        }
        self._stop_words = {name: frozenset(map(fold, words)) for name, words in lists.items()}
        self._english = frozenset(stopwords.STOPWORDS_EN)
        self.stems = lru_cache(maxsize=100_000)(self._stems)

    def of_document(self, texts: Sequence[str]) -> list[list[str]]:
        """Return the words of a document's passages, without the stop words of its language."""
        passages = [[(word, is_run) for word, is_run in split(text)] for text in texts]
        counts = Counter(word for words in passages for word, is_run in words if not is_run)
        hits = {name: sum(counts[word] for word in words) for name, words in self._stop_words.items() if words}
        language = max(hits, key=lambda name: hits[name])
        known = hits[language] > 1
        left_out = self._stop_words[language] if known else self._english
        languages = (language,) if known else tuple(self._stemmers)
        return [list(self._tokens(words, languages, left_out, run_letters=True)) for words in passages]

    def of_question(self, question: str) -> list[str]:
        """Return the words of a question, with their stems in each language."""
        return list(self._tokens(split(question), tuple(self._stemmers), frozenset(), run_letters=False))

    def _tokens(
        self,
        words: Iterable[tuple[str, bool]],
        languages: tuple[str, ...],
        left_out: frozenset[str],
        *,
        run_letters: bool,
    ) -> Iterator[str]:
        for word, is_run in words:
            if is_run:
                yield from (word[at : at + 2] for at in range(len(word) - 1))
                if run_letters or len(word) == 1:
                    yield from word
            elif word not in left_out:
                yield from self.stems(word, languages)

    def _stems(self, word: str, languages: tuple[str, ...]) -> tuple[str, ...]:
        """Return the word without accents, and its stems; those of accented words differ."""
        plain = strip_accents(word)
        found = {plain: None}
        for script, names in _STEMMERS.items():
            if _SCRIPTS[script].search(word):
                chosen = [name for name in names if name in languages] or (names if len(names) == 1 else ())
                for stemmer in (self._stemmers[name] for name in chosen):
                    found |= dict.fromkeys((stemmer.stemWord(plain), strip_accents(stemmer.stemWord(word))))
        if _HEBREW.match(word):
            found |= dict.fromkeys(_hebrew_forms(plain))
        return tuple(filter(None, found))


def fold(text: str) -> str:
    """Return a text in one spelling: composed, of one width, without case and invisible characters."""
    return text.lower() if text.isascii() else unicodedata.normalize("NFKC", _compose(text).casefold())


def _compose(text: str) -> str:
    return str(_INVISIBLE.sub("", unicodedata.normalize("NFKC", text)))


def strip_accents(word: str) -> str:
    """Return a word without the accents of alphabets, in one of its spellings."""
    return unicodedata.normalize("NFC", _ACCENTS.sub("", unicodedata.normalize("NFD", word))).translate(_SPELLINGS)


def split(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the words of a text, and the parts of names in code, each with whether it is a run without spaces."""
    for match in _WORDS.finditer(_compose(text)):
        if match["run"] is not None:
            yield fold(match[0]), True
            continue
        word = match[0][:_LONGEST]
        whole = fold(word)
        yield whole, False
        if "_" in word or not (word.islower() or word.istitle()):
            parts = [fold(part) for part in _PARTS.split(word) if part]
            yield from ((part, False) for part in parts if part != whole)


def _hebrew_forms(word: str) -> Iterator[str]:
    """Yield a word without one and two of the letters that Hebrew writes onto words, each without a plural's ending."""
    for _ in range(3):
        yield word
        yield _HEBREW_PLURAL.sub("", word)
        if _HEBREW_PREFIX.match(word) is None:
            return
        word = word[1:]
