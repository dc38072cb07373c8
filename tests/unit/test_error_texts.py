"""Errors as they are stored."""

from __future__ import annotations

import pickle

import pytest

import pgqrs
from pgqrs.config import Config
from pgqrs.error_texts import MAX_BYTES, MAX_MESSAGE, error_message, error_text
from pgqrs.errors import InvalidConfig

PLAIN = Config()


def without_digits(text: str) -> str:
    return "".join("#" if sign.isdigit() else sign for sign in text)


class Hostile(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_short_texts_stay_as_they_are() -> None:
    assert error_text(None, PLAIN) is None
    assert error_text("x" * MAX_BYTES, PLAIN) == "x" * MAX_BYTES
    assert error_text("a\0b\ud800", PLAIN) == "a\\0b\\ud800"


@pytest.mark.parametrize("sign", ["x", "ä", "€", "𝄞"])
def test_long_texts_keep_their_beginning_and_their_end(sign: str) -> None:
    text = error_text(f"began {sign * 1_000_000} ended", PLAIN)
    assert text is not None
    assert len(text.encode()) <= MAX_BYTES
    assert text.startswith("began ")
    assert text.endswith(" ended")
    assert "bytes left out" in text
    assert error_text(text, PLAIN) == text


def test_an_exception_that_cannot_say_what_it_is_about() -> None:
    assert "Hostile" in (error_text(Hostile(), PLAIN) or "")
    assert "Hostile" in error_message(Hostile(), PLAIN)


@pytest.mark.parametrize("given", [without_digits, f"{__name__}:without_digits"])
def test_a_function_redacts(given: object) -> None:
    config = Config(redact_errors=given)  # type: ignore[arg-type]
    assert error_text("card 4711", config) == "card ####"
    assert error_message(ValueError("card 4711"), config) == "card ####"
    assert "4711" not in (error_text(ValueError("card 4711"), config) or "4711")


@pytest.mark.parametrize(
    "broken", [lambda text: None, lambda text: 1 // 0, "no_such_module:redact", f"{__name__}:no"]
)
def test_if_redacting_fails_nothing_is_kept(
    broken: object, caplog: pytest.LogCaptureFixture
) -> None:
    text = error_text("card 4711", Config(redact_errors=broken))  # type: ignore[arg-type]
    assert text is not None
    assert "withheld" in text
    assert "4711" not in text
    assert "redact_errors failed" in caplog.text
    assert "4711" not in caplog.text


def test_the_setting_is_checked_and_comes_from_the_environment() -> None:
    for wrong in ("no path", 7):
        with pytest.raises(InvalidConfig, match="redact_errors"):
            Config(redact_errors=wrong)  # type: ignore[arg-type]
    config = Config.from_env({"PGQRS_REDACT_ERRORS": "app.privacy:redact"})
    assert config.redact_errors == "app.privacy:redact"
    assert pickle.loads(pickle.dumps(Config(redact_errors=without_digits))).redact_errors


def test_errors_of_our_own_statements_do_not_show_parameters() -> None:
    with pgqrs.Store("sqlite::memory:", upgrade=True) as store:
        store.admin().create_queue("q")
        with store.engine.begin() as connection:
            connection.exec_driver_sql("DROP TABLE pgqrs_messages")
        with pytest.raises(pgqrs.StatementFailed) as caught:
            store.producer("q").enqueue("pay" * 3)
    text = error_text(caught.value, PLAIN)
    assert text is not None
    assert "pgqrs_messages" in text
    assert "pay" * 3 not in text


def test_the_notes_of_an_error_come_last_however_long_it_is() -> None:
    error = ValueError("long\n" * 10_000)
    error.add_note("the cause: card 4711")
    assert error_message(error, PLAIN).endswith("\nthe cause: card 4711")
    assert len(error_message(error, PLAIN)) == MAX_MESSAGE
    config = Config(redact_errors=without_digits)
    assert error_message(error, config).endswith("\nthe cause: card ####")
