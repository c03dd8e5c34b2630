"""Build HTML as a tree of elements, so that text is escaped in a single place, when the page is written."""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element, tostring

from horizon_lm.report import run_files

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Child = Element | str


def node(tag: str, *children: Child, **attributes: str) -> Element:
    """Return an element. In attribute names, a final underscore is dropped and others become dashes: class_, data_x."""
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
    """Return a script or style element, whose text HTML does not escape. Raise ValueError if it contains an end tag."""
    if f"</{tag}" in text.lower():
        raise ValueError(f"the text of a {tag} element must not contain its end tag")
    return node(tag, text, **attributes)


def data(identifier: str, text: str) -> Element:
    """Return a script element with JSON. Angle brackets are encoded, so that no text can end the element."""
    for character in "<>&":  # in JSON they occur only in strings
        text = text.replace(character, f"\\u{ord(character):04x}")
    return code("script", text, type="application/json", id=identifier)


def chart(name: str, figure: "Figure") -> Element:
    """Return the element of a figure with its data, which the script of the page draws."""
    return node("figure", node("div", data_figure=f"figure-{name}"), data(f"figure-{name}", figure.to_json()))


def table(headings: Sequence[str], rows: Sequence[Sequence[Child]], class_: str) -> Element:
    """Return a table with a row of headings."""
    head = node("thead", node("tr", *(node("th", heading, scope="col") for heading in headings)))
    body = node("tbody", *(node("tr", *(node("td", cell) for cell in row)) for row in rows))
    return node("table", head, body, class_=class_)


def document(*children: Element) -> str:
    """Return a page as text."""
    root = node("html", *children, lang="en")
    return "<!DOCTYPE html>\n" + tostring(root, encoding="unicode", method="html") + "\n"


_ORIGINS = {
    run_files.METRICS: "horizon-lm train writes a line every logging_steps steps.",
    run_files.SETTINGS: "horizon-lm train writes it before the first step.",
    run_files.PLAN: "horizon-lm train writes it before the first step.",
    run_files.PREDICTED: "horizon-lm train writes it if horizon-lm doctor has measured this machine.",
    run_files.MEASURED: "horizon-lm train --trace_steps 3 writes it.",
}


def missing(name: str) -> Element:
    """Return a note about a missing file and how to get it."""
    return absent(node("code", name), f" is missing: {_ORIGINS[name]}")


def nothing_logged() -> Element:
    """Return a note about a run without metrics."""
    return absent(node("code", run_files.METRICS), " has no training step yet: the first line comes with step 1.")


def absent(*words: Child) -> Element:
    """Return a note about missing data."""
    return node("p", *words, class_="missing")
