"""Lists as MkDocs' Markdown wants them: what belongs to an item is indented by four; GitHub takes the marker's width.

MkDocs calls the function named `on_...`.
"""

import re
from typing import Any

MARKER = re.compile(r"([-*]|\d+\.) +(?=\S)")
FENCE = re.compile(r" {0,3}(```|~~~)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs asks for the text of a page.

    Args:
        markdown: as it was written.
    """
    return "\n".join(indented(markdown.split("\n")))


def indented(lines: list[str]) -> list[str]:
    """The same lines, with those of an item below its first indented by four.

    Args:
        lines: of a document, or of an item without its indentation.
    """
    found: list[str] = []
    fenced, number = False, 0
    while number < len(lines):
        line, marker = lines[number], MARKER.match(lines[number])
        fenced ^= FENCE.match(line) is not None
        number += 1
        if fenced or marker is None:
            found.append(line)
            continue
        width, end = marker.end(), number
        while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" " * width)):
            end += 1
        while not lines[end - 1].strip():  # what follows the item is not its own
            end -= 1
        own = indented([line[width:], *(other[width:].rstrip() for other in lines[number:end])])
        found += [marker[0] + own[0], *(" " * 4 + other if other.strip() else "" for other in own[1:])]
        if (
            "" in own and end < len(lines) and MARKER.match(lines[end])
        ):  # else the next item goes on with this one's text
            found.append("")
        number = end
    return found
