"""The page to try the model, and what browsers let it do."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi.responses import HTMLResponse


def page() -> HTMLResponse:
    """Return the page; its policy lets it run its own script and style only, and talk to this server only."""
    text = files(__package__).joinpath("page.html").read_text("utf-8")
    policy = (
        f"default-src 'none'; script-src {_hashes(text, 'script')}; style-src {_hashes(text, 'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)


def _hashes(text: str, tag: str) -> str:
    """Return the policy's sources for a page's inline elements of a kind."""
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
