"""From Python values to the JSON that is stored with runs and steps, and back.

Arguments and results of workflows, and results of steps, are converted by the hints of their functions,
as those of tasks are (`pgqrs.codecs`). A result is given to the workflow as it will be given when it is
replayed, so that a workflow cannot tell the two apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pgqrs.codecs import Call, Signature
from pgqrs.config import Config
from pgqrs.payloads import encode

UNCHANGED = (str, int, bool, type(None))


def dump(value: Any, config: Config) -> str:
    """The JSON text of a value that is JSON; `InvalidPayload` if it is not."""
    return encode(value, max_bytes=config.max_payload_bytes, max_depth=config.max_payload_depth)


def dump_arguments(
    signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any], config: Config
) -> str:
    """The input of a run that was started with these arguments."""
    return dump(signature.encode(Call(tuple(args), dict(kwargs))), config)


def load_arguments(signature: Signature, input: Any) -> Call:
    """The arguments of a run. One that was created with another input gets it as its argument."""
    if isinstance(input, dict) and set(input) == {"args", "kwargs"}:
        return signature.decode(input)
    return Call((input,), {})


def dump_result(signature: Signature, value: Any, config: Config) -> str:
    """What a workflow or a step returned."""
    return dump(signature.encode_result(value), config)


def as_replayed(signature: Signature, value: Any, text: str) -> Any:
    """What was returned, as it will be when it is read from history."""
    return value if type(value) in UNCHANGED else signature.decode_result(json.loads(text))
