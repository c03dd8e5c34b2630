"""HTML as a tree of elements, so that text is escaped once, where it is written out."""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element, tostring

from horizon_lm.report import run_files

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Child = Element | str


def node(tag: str, *children: Child, **attributes: str) -> Element:
    """An element. In the names of attributes a final underscore is dropped and others are dashes: class_, data_x."""
    element = Element(tag, {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()})
    for child in children:
        if isinstance(child, Element):
            element.append(child)
        elif len(element):
            element[-1].tail = (element[-1].tail or "") + child
        else:
            element.text = (element.text or "") + child
    return element


def code(tag: str, text: str, **attributes: str) -> Element:
    """A script or a style sheet of ours, which HTML does not let escape."""
    if f"</{tag}" in text.lower():
        raise ValueError(f"a {tag} that holds its own end would not be read as a whole")
    return node(tag, text, **attributes)


def data(identifier: str, text: str) -> Element:
    """JSON for a script. No angle bracket is left in it, so no text of it can end the element or begin another."""
    for character in "<>&":  # in JSON they are only in strings
        text = text.replace(character, f"\\u{ord(character):04x}")
    return code("script", text, type="application/json", id=identifier)


def chart(name: str, figure: "Figure") -> Element:
    """The place of a figure and its data; the script of the page draws it."""
    return node("figure", node("div", data_figure=f"figure-{name}"), data(f"figure-{name}", figure.to_json()))


def table(headings: Sequence[str], rows: Sequence[Sequence[Child]], class_: str) -> Element:
    """A table with a row of headings."""
    head = node("thead", node("tr", *(node("th", heading, scope="col") for heading in headings)))
    body = node("tbody", *(node("tr", *(node("td", cell) for cell in row)) for row in rows))
    return node("table", head, body, class_=class_)


def document(*children: Element) -> str:
    """The text of a page."""
    root = node("html", *children, lang="en")
    return "<!DOCTYPE html>\n" + tostring(root, encoding="unicode", method="html") + "\n"


_HOW = {
    run_files.METRICS: "horizon-lm train writes it, a line every logging_steps steps.",
    run_files.SETTINGS: "horizon-lm train writes it before the first step.",
    run_files.PLAN: "horizon-lm train writes it before the first step, with what the run is planned to take.",
    run_files.PREDICTED: "horizon-lm train writes it where it knows how fast the machine is; horizon-lm doctor measures that.",
    run_files.MEASURED: "horizon-lm train writes it with --trace_steps 3, or any number of steps.",
}


def missing(name: str) -> Element:
    """A sentence about a file that is not there, and how to get it."""
    return absent(node("code", name), f" is missing: {_HOW[name]}")


def nothing_logged() -> Element:
    """A sentence about a run that ended before its first line."""
    return absent(
        node("code", run_files.METRICS), " has no line of a training step yet: the first one comes with step 1."
    )


def absent(*words: Child) -> Element:
    """A sentence about something that is not there."""
    return node("p", *words, class_="missing")
