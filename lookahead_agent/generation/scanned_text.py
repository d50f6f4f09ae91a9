"""A text whose searches from ascending positions read each character a few times, however many they are."""

import re
from bisect import bisect_left
from collections import defaultdict
from functools import cached_property

from lookahead_agent.generation.tool_calls import BrokenJsonError, json_end

_TICKS = re.compile(r"`+")
_NO_SPACE = re.compile(r"\S")
_MAX_DEPTH = 200
"""Levels of JSON from which a value is broken, if it contains one that is too deep for the JSON parser."""
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[{}\[\]]', re.DOTALL)


class ScannedText:
    """A text that keeps the results of searches in it: a later search from before a result need not look again."""

    # A parser that searches the rest of a reply at each tag would take time that grows with the square of its length.

    def __init__(self, text: str) -> None:
        self.text = text
        self._places: dict[str, tuple[int, int]] = {}  # a position and the text's first place from there, by text
        self._matches: dict[re.Pattern[str], tuple[int, re.Match[str] | None]] = {}  # likewise, by pattern
        self._line = (0, 0)  # a position, and the beginning of its line
        self._broken_values: dict[int, tuple[str, int, bool]] = {}  # message, position and `unfinished`, by beginning

    def find(self, part: str, at: int) -> int:
        """Return the first place of a text from a position on; the length of the whole if there is none."""
        begin, place = self._places.get(part, (0, -1))
        if not begin <= at <= place:
            found = self.text.find(part, at)
            place = found if found >= 0 else len(self.text)
            self._places[part] = (at, place)
        return place

    def search(self, pattern: re.Pattern[str], at: int) -> re.Match[str] | None:
        """Return the first match of a pattern from a position on; None if there is none."""
        begin, match = self._matches.get(pattern, (len(self.text) + 1, None))
        if begin > at or (match is not None and match.start() < at):
            match = pattern.search(self.text, at)
            self._matches[pattern] = (at, match)
        return match

    def line_begin(self, at: int) -> int:
        """Return the beginning of the line of a position."""
        known_at, begin = self._line
        if at < known_at:
            known_at = begin = 0
        begin = max(begin, self.text.rfind("\n", known_at, at) + 1)
        self._line = (at, begin)
        return begin

    def is_blank(self, begin: int, end: int) -> bool:
        """Return whether a part of the text is white space or empty."""
        word = self.search(_NO_SPACE, begin)
        return word is None or word.start() >= end

    @cached_property
    def ticks(self) -> list[tuple[int, int]]:
        """The spans of runs of backticks."""
        return [match.span() for match in _TICKS.finditer(self.text)]

    @cached_property
    def _ticks_by_length(self) -> dict[int, list[int]]:
        begins = defaultdict(list)
        for begin, end in self.ticks:
            begins[end - begin].append(begin)
        return begins

    def ticks_end(self, length: int, begin: int, end: int) -> int | None:
        """Return the end of the first run of so many backticks between two positions; None if there is none."""
        places = self._ticks_by_length.get(length, [])
        index = bisect_left(places, begin)
        return places[index] + length if index < len(places) and places[index] < end else None

    def json_end(self, begin: int) -> int:
        """Return the end of the JSON value that begins at a position; raises BrokenJsonError if there is none."""
        if (known := self._broken_values.get(begin)) is not None:
            message, at, unfinished = known
            raise BrokenJsonError(message, at, unfinished=unfinished)
        try:
            return json_end(self.text, begin)
        except BrokenJsonError as error:
            self._remember(begin, error)
            raise

    def _remember(self, begin: int, error: BrokenJsonError) -> None:
        """Remember that the objects and lists that are open at an error in the value at `begin` are broken by it."""
        opened: list[int] = []
        too_deep = error.at == begin
        for token in _JSON_TOKEN.finditer(self.text, begin, len(self.text) if too_deep else error.at):
            if token[0] in "{[":
                opened.append(token.start())
            elif token[0] in "}]" and opened:
                opened.pop()
            if too_deep and len(opened) > 2 * _MAX_DEPTH:
                for place in opened[:_MAX_DEPTH]:
                    self._broken_values[place] = (str(error), place, False)
                return
        self._broken_values |= dict.fromkeys(opened, (str(error), error.at, error.unfinished))
