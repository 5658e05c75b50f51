"""An mkdocs hook: formulas become MathML when the site is built.

Browsers draw MathML themselves, so that the site needs no script and no font from elsewhere.
pymdownx.arithmatex finds the formulas, latex2mathml translates them.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Called by mkdocs with the HTML of each page."""

    def translate(match: re.Match[str]) -> str:
        tag, formula = match.groups()
        display = "inline" if tag == "span" else "block"
        mathml = convert(html.unescape(formula).strip(), display=display)
        return f'<{tag} class="formula">{mathml}</{tag}>'

    return _FORMULA.sub(translate, content)
