"""The columns of a file of requests: by common names, or as the user names them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

ColumnRole = Literal["arrival_s", "prompt_tokens", "output_tokens", "acceptance", "session", "turn", "prompt"]

NAMES: dict[ColumnRole, tuple[str, ...]] = {  # in lower case, with underscores; the first one present is used
    "arrival_s": (
        "arrival_s", "arrival_time_s", "arrival_time", "arrival", "arrived_at", "arrival_timestamp", "arrival_ms",
        "arrival_time_ms", "timestamp", "timestamp_s", "timestamp_ms", "request_time", "start_time", "start_time_s",
        "start_time_ms", "created_at", "created", "time", "time_s", "time_ms", "datetime", "date", "when", "ts",
        "ts_ms",
    ),
    "prompt_tokens": (
        "prompt_tokens", "input_tokens", "num_prompt_tokens", "num_input_tokens", "context_tokens", "contexttokens",
        "request_tokens", "input_length", "prompt_length", "input_len", "prompt_len", "num_prefill_tokens",
        "prefill_tokens", "tokens_in", "prompt_token_count", "input_token_count", "usage_prompt_tokens", "in",
    ),
    "output_tokens": (
        "output_tokens", "completion_tokens", "num_output_tokens", "num_completion_tokens", "generated_tokens",
        "generatedtokens", "response_tokens", "output_length", "completion_length", "response_length", "output_len",
        "completion_len", "num_decode_tokens", "decode_tokens", "tokens_out", "completion_token_count",
        "output_token_count", "usage_completion_tokens", "expected_output_len", "out",
    ),
    "acceptance": ("acceptance", "acceptance_rate", "accept_rate", "draft_acceptance_rate", "alpha"),
    "session": ("session", "session_id", "conversation_id", "conversation", "chat_id", "thread_id", "user_id", "user"),
    "turn": ("turn", "turn_id", "turn_index", "turn_number"),
    "prompt": ("prompt", "question", "text"),
}  # fmt: skip
SHORT: dict[str, ColumnRole] = {  # what --columns calls them
    "prompt": "prompt_tokens", "output": "output_tokens", "time": "arrival_s", "acceptance": "acceptance",
    "session": "session", "turn": "turn", "text": "prompt",
}  # fmt: skip
GIVEN: dict[str, ColumnRole] = {role: role for role in NAMES} | SHORT


def columns_of(names: Sequence[str], given: Sequence[str] = ()) -> dict[ColumnRole, str]:
    """The names of a header or of an object's keys, by role; a KeyError for one that is `given` but not there.

    Those are written as `prompt=NAME`; a ValueError of one line if they are not. Such a column has no other role.
    """
    plain = {plain_name(name): name for name in reversed(names)}  # the first of two equal names
    chosen: dict[ColumnRole, str] = {}
    for text in given:
        what, equals, wanted = text.partition("=")
        if what not in GIVEN or not equals or not plain_name(wanted):
            raise ValueError(f"--columns takes {', '.join(f'{short}=NAME' for short in SHORT)}, got {text!r}")
        if GIVEN[what] in chosen:
            raise ValueError(f"--columns names {what} twice")
        chosen[GIVEN[what]] = plain[plain_name(wanted)]
    free = {name: column for name, column in plain.items() if column not in chosen.values()}
    columns = {role: next((free[name] for name in known if name in free), None) for role, known in NAMES.items()}
    return {role: name for role in NAMES if (name := chosen.get(role) or columns[role]) is not None}


def plain_name(name: str) -> str:
    """A name in lower case, with underscores."""
    return re.sub(r"\W+", "_", name.strip().lower()).strip("_")
