"""Readers: published formats are read as they are; anything else ends in a ValueError of one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import one_line

from pdvsim.sim.config import Acceptance, Traffic
from pdvsim.sim.workload import datasets
from pdvsim.sim.workload.datasets import Trace, read_sharegpt
from pdvsim.sim.workload.own import read_own
from pdvsim.sim.workload.requests import make_requests

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
read_azure, read_burstgpt, read_mooncake = (partial(read_own, kind=k) for k in ("azure", "burstgpt", "mooncake"))
Reader = Callable[[str], Trace]
READERS: list[Reader] = [read_azure, read_burstgpt, read_mooncake]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str | bytes], str]:
    def to_file(content: str | bytes) -> str:
        path = tmp_path / "data"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return to_file


Write = Callable[[str | bytes], str]


def rows(trace: Trace) -> list[tuple[float, int, int]]:
    arrivals = (trace.arrival_s - trace.arrival_s[0]).tolist()
    return [(round(t, 6), p, o) for t, (p, o) in zip(arrivals, trace.lengths.tolist(), strict=True)]


def refuses(read: Callable[[str], object], path: str, says: str) -> None:
    with one_line(path, says):
        read(path)


SECOND = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
AS_PUBLISHED = [
    # seven digits of a second, no line break at the end; the 2024 files add a zone
    (read_azure, AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109",
     [(0.0, 374, 44), (4.314579, 396, 109)]),
    (read_azure, AZURE + "2024-05-10 00:00:00.009930+00:00,2162,5\r\n2024-05-10 00:00:01+00:00,7,1\r\n",
     [(0.0, 2162, 5), (0.99007, 7, 1)]),
    # what vLLM keeps
    (read_burstgpt, BURST + "5,ChatGPT,472,18,490,Conversation log\n118,GPT-4,417,276,693,Conversation log\n"
     "120.5,GPT-4,300,0,300,API log\n131,GPT-4,20,7,27,API log\n", [(0.0, 417, 276), (13.0, 20, 7)]),
    # the second release puts two columns before the model, one of them sometimes empty
    (read_burstgpt, SECOND + "19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log\n"
     "19440161.0,,,GPT-4,36,29,65,API log\n", [(0.0, 906, 446), (51.0, 36, 29)]),
    # milliseconds
    (read_mooncake, '{"timestamp": 1000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n\n'
     '{"timestamp": 1036.339, "input_length": 186, "output_length": 107}', [(0.0, 6758, 500), (0.036339, 186, 107)]),
]  # fmt: skip


@pytest.mark.parametrize(("read", "content", "expected"), AS_PUBLISHED)
def test_files_are_read_as_published(write: Write, read: Reader, content: str, expected: list[tuple[Any, ...]]) -> None:
    assert rows(read(write(content))) == expected


GOOD = '{"timestamp": 0, "input_length": 1, "output_length": 1}\n'


@pytest.mark.parametrize(("read", "content", "message"), [
    (read_azure, AZURE, "holds no request"),
    (read_azure, AZURE + "2023-11-16 18:15:46,-3,4\n", "line 2: ContextTokens is '-3'; accepted: a whole number"),
    (read_azure, AZURE + '"2023', "line 2: is not CSV"),
    (read_burstgpt, BURST + "1,ChatGPT,5,5,10,API log\n", "holds no request"),
    (read_mooncake, GOOD + "[1]\n", "line 2: holds a list"),
    (read_mooncake, "[" * 100_000, "line 1: "),
    (read_mooncake, GOOD.replace(": 0", ": NaN"), "line 1: timestamp is nan"),
    (read_mooncake, GOOD.replace("output", "out"), "has no column output_length"),
    (read_mooncake, GOOD.replace(": 1", ": true"), "line 1: input_length is True"),
])  # fmt: skip
def test_a_broken_file_is_refused_by_line_and_field(
    write: Write, read: Callable[[str], object], content: str, message: str
) -> None:
    refuses(read, write(content), message)


@pytest.mark.parametrize("read", [*READERS, datasets._conversations])
def test_what_is_no_text_file_is_refused(read: Callable[[str], object], write: Write, tmp_path: Path) -> None:
    refuses(read, str(tmp_path / "missing"), "No such file")
    refuses(read, str(tmp_path), "Is a directory")
    refuses(read, write(b"\x1f\x8b\x08\xff\xfe" * 10), "not UTF-8")
    with pytest.raises(ValueError, match="not a file name"):
        read("a\0b")


# ShareGPT ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer of one token a word, and one more that it puts first, as Llama's does."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "<s>": 1, "word": 2}, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder = tmp_path_factory.mktemp("tokenizer")
    transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>").save_pretrained(folder)
    return str(folder)


def talk(*turns: tuple[str, int | str]) -> dict[str, Any]:
    messages = [(who, "word " * text if isinstance(text, int) else text) for who, text in turns]
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in messages]}


def test_sharegpt_counts_the_first_exchange_under_vllms_filter(write: Write, tokenizer: str) -> None:
    talks = [
        talk(("human", 9), ("gpt", 19), ("human", 500), ("gpt", 500)),
        talk(("gpt", 3), ("human", 11), ("gpt", 12)),  # continued from elsewhere: the first human turn and its reply
        talk(("human", "a 😀 \ud800 b"), ("gpt", 3)),  # half a surrogate pair is one unknown token
        talk(("human", 2), ("gpt", 50)),  # 3 tokens: too short
        talk(("human", 50), ("gpt", 2)),
        talk(("human", 1024), ("gpt", 50)),  # 1,025 tokens: too long
        talk(("human", 1000), ("gpt", 1047)),  # 2,049 together
        talk(("human", 1023), ("gpt", 1023)),  # 2,048 together: just fits
        talk(("human", 50)),
        talk(),
        {"id": "no turns"},
    ]
    path = write(json.dumps(talks))
    lengths = read_sharegpt(path, tokenizer, 100, np.random.default_rng(0)).lengths.tolist()
    assert sorted(lengths) == [[5, 4], [10, 20], [12, 13], [1024, 1024]]
    assert read_sharegpt(path, tokenizer, 2, np.random.default_rng(0)).lengths.tolist() == lengths[:2]

    traffic = Traffic(dataset_path=path, tokenizer=tokenizer, num_prompts=9)
    requests = make_requests(traffic, Acceptance())
    assert {(r.prompt_tokens, r.output_tokens) for r in requests} == {(p, o) for p, o in lengths}
