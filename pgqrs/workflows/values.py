"""From Python values to the JSON that is stored with runs and steps, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pgqrs.config import Config
from pgqrs.payloads import encode


def dump(value: Any, config: Config) -> str:
    """The JSON text of an input, an output or a signal; `InvalidPayload` if it has none."""
    return encode(value, max_bytes=config.max_payload_bytes, max_depth=config.max_payload_depth)


def dump_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], config: Config) -> str:
    """The input of a run that was started with these arguments."""
    return dump({"args": list(args), "kwargs": dict(kwargs)}, config)


def load_arguments(input: Any) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a run. One that was created with another input gets it as its argument."""
    if isinstance(input, dict) and set(input) == {"args", "kwargs"}:
        return input["args"], input["kwargs"]
    return [input], {}


def as_replayed(value: Any, text: str) -> Any:
    """A value as it will be when it is read from history: a workflow must not tell the two apart."""
    return value if type(value) in (str, int, bool, type(None)) else json.loads(text)
