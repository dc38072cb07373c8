"""Which durable calls made a run fail, so that a retry makes them again.

An error that a durable call raises carries the call. A run that ends by such an error, or by one raised
`from` it, or by a group of them, was failed by those calls. An error raised while another one is being
handled tells nothing: the workflow may well have dealt with that.
"""

from __future__ import annotations

from typing import TypeVar

from pgqrs.repositories.steps import Failures

E = TypeVar("E", bound=BaseException)


class Escaped(Exception):
    """User code raised what is no `Exception`: an exit, an interrupt, a cancellation of its own. That is
    a failure as others are. As it is, it would end the thread or the event loop of everybody.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


_CALLS = "_pgqrs_calls"


def blame(error: E, *step_ids: str, after: int | None = None) -> E:
    """The error, which this call raises; of a timeout, its beginning and its end. `after` is how many
    calls the workflow has made by now, where it makes one after the other.
    """
    setattr(error, _CALLS, Failures(list(step_ids), after))
    return error


def blame_all(error: BaseException, others: list[BaseException]) -> None:
    """The error stands for others as well, which were raised side by side."""
    found = failures_of(error)
    if found.steps:
        steps = [step for each in (error, *others) for step in failures_of(each).steps]
        setattr(error, _CALLS, found._replace(steps=list(dict.fromkeys(steps))))


def failures_of(error: BaseException | None) -> Failures:
    """The calls that raised this error."""
    if error is None:
        return Failures()
    carried: Failures | None = getattr(error, _CALLS, None)
    if carried is not None:
        return carried
    if isinstance(error, BaseExceptionGroup):
        each = [step for one in error.exceptions for step in failures_of(one).steps]
        return Failures(list(dict.fromkeys(each)))
    return failures_of(error.__cause__)
