"""Held-out answers as the runtime decoded them, token by token, for whoever looks at a tracker."""

import html
from typing import NamedTuple

COLOURS = {"accepted": "#b7ebc6", "recovered": "#f6c1bc", "bonus": "#d6e4ff", "target": "#eeeeee"}


class Sample(NamedTuple):
    """tokens: (text, kind) with kind "accepted", "recovered" (the target's, in place of a rejected
    draft), "bonus" (the target's, behind a draft that was kept whole) or "target" (nothing was
    drafted)."""

    prompt: str
    tokens: list[tuple[str, str]]


def as_html(sample: Sample) -> str:
    """The answer with a colour per kind of token, and what the colours mean."""
    spans = [
        f'<span title="{kind}" style="background:{COLOURS[kind]}">{html.escape(text)}</span>'
        for text, kind in sample.tokens
    ]
    legend = [
        f'<span style="background:{colour}">{kind}</span>' for kind, colour in COLOURS.items()
    ]
    answer = f'<pre style="white-space:pre-wrap">{"".join(spans)}</pre>'
    return f"{answer}<small>{' '.join(legend)}</small>"
