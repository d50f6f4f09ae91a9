"""Keeps what is secret in URLs out of messages."""

import re
from urllib.parse import unquote, unquote_plus, urlsplit, urlunsplit

_PASSWORD = re.compile(r"://[^/@:?#]*:([^@]*(?:@[^/?#@]*)*)@")
_SECRET_PARAMETER = re.compile(
    r"[?&;](?:\w*passw\w*|pwd|passphrase|\w*token|\w*secret|api_?key)=([^&;#]*)", re.IGNORECASE
)
_MIN_LENGTH = 3  # characters; a shorter one would be replaced inside of words


def hide_passwords(text: str, url: str) -> str:
    """Return a text that may hold a URL, or parts of it, with `***` in place of the URL's passwords."""
    shown = url
    secrets: set[str] = set()
    for pattern in (_PASSWORD, _SECRET_PARAMETER):
        secrets.update(pattern.findall(url))
        shown = pattern.sub(lambda found: found[0].replace(found[1], "***") if found[1] else found[0], shown)
    text = text.replace(url, shown) if url else text
    spellings = {spelling for secret in secrets for spelling in (secret, unquote(secret), unquote_plus(secret))}
    for secret in sorted(spellings, key=len, reverse=True):
        if len(secret) >= _MIN_LENGTH:
            text = text.replace(secret, "***")
    return text


def without_secrets(url: str) -> str:
    """An address without a user's name, password or query, which may be secret."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "an invalid address"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
