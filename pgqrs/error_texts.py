"""Errors as they are stored: as text, redacted by the application, and never longer than 64 KiB.

Every error that the library stores passes here: of messages and dead letters, steps, runs, schedules.
`Config.redact_errors` sees the whole text before it is cut, so that no half of a secret is left. If it
fails, nothing of the text is kept: a secret in the database is worse than a lost traceback.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

from pgqrs.config import Config
from pgqrs.errors import InvalidConfig

MAX_BYTES = 64 * 1024
"""Bytes of an error that are kept, in UTF-8: its beginning and its end."""
MAX_MESSAGE = 10_000
"""Characters of a message that are kept without a traceback."""
_MARK = "\n… {:,} bytes left out …\n"
_LONGEST_MARK = 64
Redact = Callable[[str], str]
logger = logging.getLogger("pgqrs")


def error_text(error: str | BaseException | None, config: Config) -> str | None:
    """An error as text that every backend can store: an exception with its traceback."""
    if error is None:
        return None
    whole = _traceback(error) if isinstance(error, BaseException) else error
    text = redacted(whole, config)
    return _cut(text.replace("\0", "\\0").encode(errors="backslashreplace"))


def error_message(error: str | BaseException, config: Config) -> str:
    """What an error says, without its traceback, and not more than a screenful of it. Its notes come
    last, as in a traceback, however long the rest is.
    """
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    last = (error_text(notes, config) or "")[:MAX_MESSAGE]
    return (error_text(said(error), config) or "")[: MAX_MESSAGE - len(last)] + last


def as_logged(
    error: str | BaseException | None, config: Config
) -> tuple[str, BaseException | None]:
    """What to add to a log line for an error, and what to log as its traceback: if the application
    redacts errors, the redacted text instead.
    """
    if isinstance(error, BaseException) and config.redact_errors is None:
        return "", error
    text = error_text(error, config)
    return "" if text is None else f"\n{text}", None


def said(error: str | BaseException) -> str:
    """`str(error)`, also of an exception that cannot say it."""
    try:
        return str(error)
    except Exception as exc:
        return f"<{type(error).__qualname__}, whose text cannot be had: {type(exc).__qualname__}>"


def redacted(text: str, config: Config) -> str:
    """A text without what the application does not want to be kept."""
    if config.redact_errors is None:
        return text
    try:
        changed: Any = redactor(config.redact_errors)(text)
        if isinstance(changed, str):
            return changed
        reason = f"it returned {type(changed).__name__}, not str"
    except InvalidConfig as exc:
        reason = str(exc)
    except Exception as exc:
        reason = f"it raised {type(exc).__qualname__}"  # its text may quote what it was given
    logger.error("redact_errors failed, so the text of an error is not kept: %s", reason)
    return f"<error text withheld: redact_errors failed, {reason}>"


def redactor(given: str | Redact) -> Redact:
    """The function, also by its import path `module:function`."""
    if not isinstance(given, str):
        return given
    module, _, name = given.partition(":")
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as exc:
        raise InvalidConfig(f"redact_errors {given!r} cannot be imported: {exc}") from exc
    if not callable(found):
        raise InvalidConfig(f"redact_errors {given!r} cannot be called")
    redact: Redact = found
    return redact


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # whatever an exception does to be hard to show
        return f"{type(error).__qualname__}: {said(error)}"


def _cut(text: bytes) -> str:
    """The beginning and the end: a traceback begins with where, and ends with what."""
    if len(text) <= MAX_BYTES:
        return text.decode()
    half = (MAX_BYTES - _LONGEST_MARK) // 2
    mark = _MARK.format(len(text) - 2 * half)
    head, tail = text[:half], text[-half:]
    return head.decode(errors="ignore") + mark + tail.decode(errors="ignore")
