"""From Python values to the JSON that is stored with runs and steps, and back.

Arguments and results of workflows, and results of steps, are converted by the hints of their functions,
as those of tasks are (`pgqrs.codecs`). A result is given to the workflow as it will be given when it is
replayed, so that a workflow cannot tell the two apart.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pgqrs.codecs import Call, Signature
from pgqrs.config import Config
from pgqrs.errors import InvalidPayload
from pgqrs.payloads import encode
from pgqrs.sqltypes import Undecodable

UNCHANGED = (str, int, bool, type(None))


def dump(value: Any, config: Config) -> str:
    """The JSON text of a value that is JSON; `InvalidPayload` if it is not."""
    return encode(value, max_bytes=config.max_payload_bytes, max_depth=config.max_payload_depth)


def dump_stored(value: Any) -> str:
    """The JSON text of what was stored before, with a little around it: nothing limits that."""
    return encode(value, max_bytes=sys.maxsize, max_depth=sys.maxsize)


def dump_arguments(
    signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any], config: Config
) -> str:
    """The input of a run that was started with these arguments."""
    return dump(signature.encode(Call(tuple(args), dict(kwargs))), config)


def load_arguments(signature: Signature, input: Any) -> Call:
    """The arguments of a run. One that was created with another input gets it as its argument."""
    if isinstance(input, dict) and set(input) == {"args", "kwargs"}:
        return signature.decode(input)
    if type(input) is Undecodable:
        raise InvalidPayload("input", "the stored text is not JSON")
    return Call((input,), {})


def dump_result(signature: Signature, value: Any, config: Config) -> str:
    """What a workflow or a step returned."""
    return dump(signature.encode_result(value), config)


def as_recorded(signature: Signature, value: Any, config: Config) -> tuple[Any, str]:
    """What a step returned as it will be when it is read from history, and as it is recorded.

    Most results are such that nothing can change them on the way; the others are read at once, so
    that what cannot be read is refused here.
    """
    if type(value) in UNCHANGED and signature.keeps_scalars:
        return value, dump(value, config)
    text = dump_result(signature, value, config)
    try:
        return signature.decode_result(json.loads(text)), text
    except Exception as exc:
        raise InvalidPayload("result", f"cannot be read again: {exc}") from exc
