"""Pictures are drawn small, and show what they showed."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from lookahead_agent.bench.plots import as_svg, new_figure
from lookahead_agent.bench.small_svg import small_svg

SVG = """<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 9 9">
 <metadata><made>today</made></metadata>
 <defs>
  <path id="mark" d="M -0.012345 1.987654
L 10.000001 -2.5 "/>
 </defs>
 <g id="text_1">
  <!-- a comment -->
  <text style="font-family: 'A', 'B', 'C', sans-serif; fill: #123" transform="rotate(-0 1.5 2)">0.12345 of  20</text>
  <use xlink:href="#mark" x="1.25001" y="3"/>
  <text transform="rotate(-90 1 2)">seconds</text>
 </g>
</svg>"""


def test_what_is_seen_stays_and_what_is_not_goes() -> None:
    small = small_svg(SVG)
    root = ElementTree.fromstring(small)
    texts = [element for element in root.iter() if element.tag.endswith("}text")]
    assert [element.text for element in texts] == ["0.12345 of  20", "seconds"], "numbers in texts are no places"
    assert texts[0].attrib == {"style": "font-family: 'A', sans-serif; fill: #123"}
    assert texts[1].attrib == {"transform": "rotate(-90 1 2)"}
    (path,) = (element for element in root.iter() if element.tag.endswith("}path"))
    assert path.attrib == {"id": "mark", "d": "M 0 2 L 10 -2.5"}
    (use,) = (element for element in root.iter() if element.tag.endswith("}use"))
    assert use.attrib["x"] == "1.3"
    assert use.attrib["{http://www.w3.org/1999/xlink}href"] == "#mark"
    assert not set(re.findall(r"metadata|comment|text_1", small))
    assert small_svg(small) == small


def test_a_plot_is_small_and_the_same_each_time() -> None:
    def drawn() -> str:
        figure, axes = new_figure(3, 2)
        (axes,) = axes.flat
        axes.plot([0.1, 0.2, 0.7], [1, 4, 2])
        axes.set_xlabel("share of 0.25")
        return as_svg(figure)

    assert drawn() == drawn()
    assert drawn().startswith("<svg")
    assert "share of 0.25" in drawn()
    assert len(drawn().splitlines()) < 10
