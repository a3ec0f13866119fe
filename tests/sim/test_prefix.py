"""Blocks by the hash of their prefix: an LRU worked by hand, theory of caches, conservation, and nothing that leaks."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdvsim.sim.core import ENDLESS, Chain, Request
from pdvsim.sim.machine.kv import KvCache
from pdvsim.sim.machine.prefix import BLOCK, Reuse, block_hashes


def ask(tokens: int, *texts: tuple[int, int] | int, output: int = 1, id: int = 0) -> Request:
    """A request whose prompt is these texts, as (end, number); of the last one the number alone."""
    chain = tuple((ENDLESS, text) if isinstance(text, int) else text for text in texts)
    return Request(id, 0.0, tokens, output, bytes(output), chain)


def served(kv: KvCache, request: Request, answer: int = 0) -> int:
    """Prefill a prompt, decode, leave; return the tokens that were cached."""
    cached = kv.cached(request)
    assert kv.admit(request, request.prompt_tokens)
    assert request.state.prefilled == cached
    request.state.context = request.prompt_tokens + answer
    assert kv.grow(request, request.state.context)
    kv.check_integrity()
    kv.release(request)
    kv.check_integrity()
    return cached


def test_a_block_belongs_to_the_text_of_its_last_token() -> None:
    chain: Chain = ((40, 1), (64, 2), (ENDLESS, 3))
    first, second, *rest = block_hashes(chain, 0, 5)
    assert [first, second] == block_hashes(((ENDLESS, 1),), 0, 2)
    assert rest[:2] == block_hashes(((ENDLESS, 2),), 2, 4)  # tokens 32 to 39 are the first text's, the block is not
    assert rest[2:] == block_hashes(((ENDLESS, 3),), 4, 5) == block_hashes(chain, 4, 5)
    assert len({first, second, *rest}) == 5


def test_the_least_recently_used_block_goes_first_and_of_a_prompt_the_last() -> None:
    """Six blocks. A has three full ones, B two, C one; each prompt has one token more, in a block of its own."""
    kv = KvCache(6 * BLOCK, 0, True, Reuse())
    a, b, c, d = ask(49, 1), ask(33, 2), ask(17, 3), ask(49, 4)
    assert served(kv, a) == 0
    assert (kv.used_tokens, kv.cached_tokens, kv.prefixes.evictions) == (0, 3 * BLOCK, 0)
    assert served(kv, b) == 0  # three blocks for it: all six are taken, none is evicted
    assert (kv.cached_tokens, kv.prefixes.evictions) == (5 * BLOCK, 0)
    assert served(kv, c) == 0  # two blocks, one is free: the last of A's goes
    assert (kv.cached_tokens, kv.prefixes.evictions) == (5 * BLOCK, 1)
    assert kv.cached(a) == 2 * BLOCK
    assert served(kv, b) == 2 * BLOCK  # used again, and so after C
    assert served(kv, d) == 0  # four blocks, one is free: two of A, and C
    assert kv.prefixes.evictions == 4
    assert [kv.cached(request) for request in (a, b, c, d)] == [0, 2 * BLOCK, 0, 3 * BLOCK]


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 32, 33, 47, 48, 49])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_prompt_that_is_sent_again_is_computed_from_its_last_block_on(tokens: int, lost: int) -> None:
    """vLLM's rule, and one block less for a head: (L - 1) // 16 - 1 (vLLM issue 54360)."""
    kv = KvCache(1000, 0, True, Reuse(lost_blocks=lost))
    served(kv, ask(tokens, 1))
    assert served(kv, ask(tokens, 1)) == max(0, (tokens - 1) // 16 - lost) * 16


# laws -----------------------------------------------------------------------------------------------------------------


class PlainLru:
    """Blocks of requests that come one at a time, kept in one list in order of use."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.order: OrderedDict[tuple[int, ...], None] = OrderedDict()

    def serve(self, tokens: list[int]) -> int:
        names = [tuple(tokens[: BLOCK * (at + 1)]) for at in range(len(tokens) // BLOCK)]
        there = next((at for at, name in enumerate(names) if name not in self.order), len(names))
        for name in names[:there]:
            del self.order[name]
        while len(self.order) + -(-len(tokens) // BLOCK) > self.room:
            self.order.popitem(last=False)
        self.order.update(dict.fromkeys(reversed(names)))
        return BLOCK * min(there, (len(tokens) - 1) // BLOCK)


def check_plain(asked: list[tuple[int, int, int, int]], room: int) -> None:
    """Prompts of a text and another after it, with real tokens on the other side: the hits are the same."""
    kv, plain = KvCache(room * BLOCK, 0, True, Reuse()), PlainLru(room)
    for first, length, second, more in asked:
        pair = 100 + 10 * first + second + 1000 * length  # a text implies the one before it
        tokens = [first] * length + [pair] * more
        assert served(kv, ask(length + more, (length, first), pair)) == plain.serve(tokens)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 3), st.integers(1, 60)), max_size=60),
    st.integers(8, 20),
)
def test_one_request_at_a_time_equals_a_plain_list_of_tokens(asked: list[tuple[int, int, int, int]], room: int) -> None:
    check_plain(asked, room)


@pytest.mark.parametrize("room", [2, 3, 60])
def test_many_texts_of_unequal_chances_equal_a_plain_list_of_tokens(room: int) -> None:
    """A block each, as theories of caches have it; what holds of the list (King 1971, Che) holds of the cache."""
    chances = 1 / np.arange(1, 1001) ** 0.8
    texts = np.random.default_rng(room).choice(1000, size=2_000, p=chances / chances.sum())
    check_plain([(text, BLOCK, 0, 1) for text in texts.tolist()], room)


@settings(max_examples=30)
@given(st.data())
def test_blocks_are_conserved_under_random_traffic(data: st.DataObject) -> None:
    """Used, cached and free add up after every step, shared blocks are counted once, and at the end all are free."""
    kv = KvCache(data.draw(st.integers(10, 40)) * BLOCK, 4, True, Reuse(drafter=True))
    inside: list[Request] = []
    for number in range(data.draw(st.integers(1, 60))):
        step = data.draw(st.sampled_from(["admit", "read", "decode", "leave"]))
        if step == "admit":
            prefix, text = data.draw(st.integers(0, 80)), data.draw(st.integers(1, 4))
            tokens, own = prefix + data.draw(st.integers(1, 60)), data.draw(st.sampled_from([10 + text, 100 + number]))
            request = ask(tokens, (prefix, text), own + 1000 * prefix, output=50, id=number)
            start = kv.cached(request)
            if kv.admit(request, start + data.draw(st.integers(1, tokens - start))):
                inside.append(request)
        elif inside:
            request = inside[data.draw(st.integers(0, len(inside) - 1))]
            if step == "read" and not request.state.context:
                request.state.prefilled = min(request.prompt_tokens, request.state.held_tokens)
                if kv.grow(request, request.prompt_tokens):
                    kv.name(request, request.prompt_tokens)
                    request.state.prefilled = request.state.context = request.prompt_tokens
            elif step == "decode" and request.state.context and kv.grow(request, request.state.context + 5):
                request.state.context += 5
                request.state.drafter_lag = data.draw(st.integers(0, 20))
            elif step == "leave":
                kv.release(request)
                inside.remove(request)
        kv.check_integrity()
        assert len(kv._unread) <= len(kv.prefixes)  # nothing leaks
    for request in inside:
        kv.release(request)
    kv.check_integrity()
    assert kv.used_tokens == 0
