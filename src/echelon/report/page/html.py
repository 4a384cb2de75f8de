"""HTML elements as text. Text is escaped unless it is `Html`, so that no name or message of a run becomes markup."""

from __future__ import annotations

import re
from html import escape
from typing import TypeAlias

VOID = ("meta", "br", "path", "rect", "line")  # elements without content; SVG's are closed with a slash
_INVISIBLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")  # control characters, which HTML does not allow


class Html(str):
    """Markup, which is not escaped again."""

    __slots__ = ()


Child: TypeAlias = "Html | str | float | None"


def text(value: Html | str | float | None) -> Html:
    """Return text with its markup escaped; nothing for None."""
    if value is None:
        return Html("")
    return value if isinstance(value, Html) else Html(escape(_INVISIBLE.sub("\ufffd", str(value))))


def element(name: str, /, *children: Child, **attributes: Child) -> Html:
    """Return an element. A trailing underscore of an attribute is dropped, others become hyphens; None omits it."""
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            words.append(f'{key.rstrip("_").replace("_", "-")}="{text(value)}"')
    opening = " ".join(words)
    if name in VOID and not children:
        return Html(f"<{opening}/>")
    return Html(f"<{opening}>{join(*children)}</{name}>")


def join(*children: Child) -> Html:
    """Return the children one after another."""
    return Html("".join(map(text, children)))
