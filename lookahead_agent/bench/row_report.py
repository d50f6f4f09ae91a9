"""The report of rows that other programs wrote: counts, medians and sums by group."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from lookahead_agent.bench.pictures import Bar, Panel
from lookahead_agent.bench.report import BaseReport
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.trace.node_times import Table

_GROUPS = ("version", "variant", "configuration", "precision", "template")
"""Fields that name a configuration: rows with equal ones are one group, unless the caller names others."""


class RowReport(BaseReport):
    """The report of rows with any fields; `by` names the fields that form groups.

    Raises ConfigurationError if a field of `by` does not exist, or no field has numbers or truth values.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], by: Sequence[str] = ()) -> None:
        flat = [dict(_flatten(row)) for row in rows]
        fields = list(dict.fromkeys(name for row in flat for name in row))
        if unknown := [name for name in by if name not in fields]:
            raise ConfigurationError(f"no row has the field {', '.join(unknown)}: choose of {', '.join(fields)}")
        self._rows = flat
        self._by = list(by) or [name for name in _GROUPS if name in fields]
        columns = {name: [row[name] for row in flat if row.get(name) is not None] for name in fields}
        self._truths = [name for name in fields if name not in self._by and _all_of(columns[name], bool)]
        self._numbers = [name for name in fields if name not in self._by and _all_of(columns[name], int | float)]
        self._numbers = [name for name in self._numbers if name not in self._truths]
        if not self._truths and not self._numbers:
            raise ConfigurationError("the file has no results of a benchmark: its rows have no numbers")

    def conditions(self) -> str:
        """Describe the rows."""
        by = f", by {', '.join(self._by)}" if self._by else ""
        return f"{len(self._rows)} rows of another program{by}."

    def sections(self) -> list[tuple[str, list[Table]]]:
        """Return one table with a row for each group."""
        records = self.records()
        headings = [name.replace("_", " ") for name in records[0]]
        rows = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row.values()] for row in records]
        return [("", [(headings, rows)])]

    def records(self) -> list[dict[str, Any]]:
        """Return each group's number of rows, true values by field, and median and sum of its numbers."""
        groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in self._rows:
            groups.setdefault(tuple(str(row.get(name, "")) for name in self._by), []).append(row)
        records = []
        for key, members in groups.items():
            record: dict[str, Any] = {**(dict(zip(self._by, key, strict=True)) or {"group": "all"})}
            record["rows"] = len(members)
            if any("error" in row for row in self._rows):
                record["errors"] = sum(bool(row.get("error")) for row in members)
            for name in self._truths:
                record[name] = sum(bool(row.get(name)) for row in members)
            for name in self._numbers:
                values = [row[name] for row in members if row.get(name) is not None]
                record[f"{name}, median"] = float(median(values)) if values else ""
                record[f"{name}, sum"] = float(sum(values))
            records.append(record)
        return records

    def panels(self) -> list[Panel]:
        """Return a panel for each field with truth values, and for the medians of each field with numbers."""
        records = self.records()
        labels = [" ".join(str(record[name]) for name in self._by) or "all" for record in records]
        return [
            Panel(name.replace("_", " "), bars)
            for name in (*self._truths, *(f"{name}, median" for name in self._numbers))
            if (bars := [Bar(label, row[name]) for label, row in zip(labels, records, strict=True) if row[name] != ""])
        ]


def _flatten(row: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """List the fields of a row and of the mappings in it, by names such as "int8.seconds"."""
    fields: list[tuple[str, Any]] = []
    for name, value in row.items():
        fields += _flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(f"{prefix}{name}", value)]
    return fields


def _all_of(values: Sequence[Any], kind: Any) -> bool:
    return bool(values) and all(isinstance(value, kind) for value in values)
