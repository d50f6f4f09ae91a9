"""SVG files of plots, small enough to be kept beside what they show."""

from __future__ import annotations

import re
from xml.etree import ElementTree

_SVG = "http://www.w3.org/2000/svg"
_SPACES = {"": _SVG, "xlink": "http://www.w3.org/1999/xlink"}
_PLACES = ("d", "x", "y", "points")
"""Attributes that say where something is, in points; a tenth of one is not seen."""
_FONTS = re.compile(r"('[^']+'), (?:'[^']+', )+sans-serif")


def small_svg(text: str) -> str:
    """An SVG element as matplotlib writes it, with places in tenths of a point and without what nothing shows.

    Args:
        text: From "<svg" to its end.
    """
    for prefix, space in _SPACES.items():
        ElementTree.register_namespace(prefix, space)
    root = ElementTree.fromstring(text)
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    used = set(re.findall(r"#([\w.-]+)", text))
    for element in root.iter():
        attributes = element.attrib
        for name in _PLACES:
            if name in attributes:
                attributes[name] = " ".join(re.sub(r"-?\d+\.\d+", _tenths, attributes[name]).split())
        if "style" in attributes:
            attributes["style"] = _FONTS.sub(r"\1, sans-serif", attributes["style"])
        if attributes.get("id", "") not in used:
            attributes.pop("id", None)
        if attributes.get("transform", "").startswith("rotate(-0 "):
            del attributes["transform"]
        # Between elements there is nothing but what formats the file.
        element.text, element.tail = ((each if (each or "").strip() else None) for each in (element.text, element.tail))
    for child in root:
        child.tail = "\n"
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _tenths(number: re.Match[str]) -> str:
    return f"{round(float(number[0]), 1) + 0.0:g}"  # adding 0.0 makes zero of minus zero
