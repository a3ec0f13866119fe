"""An option that a command redefines: its own default and help, and one value for the command and the group."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from pdvsim.common.options import build, options
from pdvsim.sim.config import Server
from pdvsim.sim.limits import BatchLimit, DraftLength, Redefined


@dataclass(frozen=True)
class Tuned:
    """A command that may leave the draft length open."""

    num_speculative_tokens: Redefined[DraftLength | None] = None
    """Draft length; default: the best."""
    max_num_seqs: Redefined[BatchLimit] = 256
    server: Server = field(default_factory=Server)


def test_what_is_not_given_is_open_here_and_the_default_in_the_group() -> None:
    args = build(Tuned, {})
    assert (args.num_speculative_tokens, args.server.num_speculative_tokens) == (None, Server.num_speculative_tokens)
    assert args.max_num_seqs == args.server.max_num_seqs == 256


def test_what_is_given_is_the_same_in_both_and_checked_by_the_group() -> None:
    args = build(Tuned, {"num_speculative_tokens": "7", "max_num_seqs": 512, "max_draft_batch": 300})
    assert args.num_speculative_tokens == args.server.num_speculative_tokens == 7
    assert args.server == Server(num_speculative_tokens=7, max_num_seqs=512, max_draft_batch=300)
    with pytest.raises(ValueError, match=r"num-speculative-tokens .* 32, got 33"):
        build(Tuned, {"num_speculative_tokens": 33})
    with pytest.raises(ValueError, match=r"max-draft-batch .* max-num-seqs, 256, got 300"):
        build(Tuned, {"max_draft_batch": 300})


def test_the_help_lists_it_where_the_group_does_with_the_new_text_if_there_is_one() -> None:
    usual, here = options(Server), options(Tuned)
    assert list(here) == list(usual)
    assert here["num_speculative_tokens"].text == "Draft length; default: the best."
    assert here["num_speculative_tokens"].group is here["max_num_seqs"].group is Server
    assert (here["max_num_seqs"].text, here["max_num_seqs"].default) == (usual["max_num_seqs"].text, 256)
