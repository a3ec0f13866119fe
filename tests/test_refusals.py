"""Bad input: one line on standard error that names what is wrong, exit code 2, and nothing written.

The rule itself is in `refused`; whatever else a file or a command line may hold is tried by tests/cli/test_fuzz.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

DRAFTS = "draft-table --dataset-name random --input-len 64 --output-len 16 --max-num-seqs 8"
REFUSED = [
    ("map --arch pd", "arch needs at least two values"),
    ("map --num-runs 1", "num-runs must be at least 2"),
    ("map --concurrency 1 --request-rate 2", "give one of --concurrency and --request-rate"),
    ("map --pairs a:b", "--pairs needs --y size"),
    ("map --y size", "pairs needs at least one value"),
    ("map --acceptances 0.5,0.5", "acceptances names a value twice"),
    ("map --synthetic-acceptance-rates 0.5", "cannot be combined with --synthetic-acceptance-rates"),
    ("map --objective goodput", "objective goodput needs --goodput"),
    ("map --against pd --arch pdv,colocated", "--against pd is not one of those compared: pdv, colocated"),
    ("map --y card", "try-cards needs at least one value"),
    ("map --y card --try-cards z80", "unknown gpu 'z80'"),
    ("map --y card --try-cards h200,h200", "try-cards names a value twice"),
    ("map --try-cards h200", "--try-cards needs --y card"),
    ("capacity", "give --goodput"),
    ("capacity --goodput ttft:0", "cannot be met"),
    ("capacity --goodput ttft:9 --request-rate 3", "unknown option --request-rate"),
    ("capacity --goodput ttft:9 --arch pd,pd", "arch names a value twice"),
    ("advise", "give --request-rate, --concurrency, or --num-prompts alone"),
    ("advise --request-rate 3 --concurrency 2", "give one of --request-rate and --concurrency"),
    ("advise --concurrency 0", "concurrency must be 1 to"),
    ("advise --request-rate 3 --num-runs 1", "num-runs must be at least 2"),
    ("advise --request-rate 3 --objective headroom", "objective headroom needs --goodput"),
    ("advise --request-rate 3 --arch pd --place prefill=1 verify=1", "pd verifies in its decode lane"),
    (f"{DRAFTS} --arch pdv", "unknown option --arch"),
    (f"{DRAFTS} --drafter none", "a draft table needs a drafter"),
    (f"{DRAFTS} --against 5 --max-k 3", "--against 5 is beyond --max-k 3"),
    (f"{DRAFTS} --max-num-seqs 5000", "max-num-seqs must be 1 to 4096, got 5000"),
    (f"{DRAFTS} --max-k 0", "max-k must be 1 to 32"),
    (f"{DRAFTS} --synthetic-acceptance-rates 0.8,0.5", "gives 2 positions; drafts have up to 8"),
    (f"{DRAFTS} --num-speculative-tokens 4", "--num-speculative-tokens"),
    (f"{DRAFTS} --pair tinyllama-0b", "unknown model 'tinyllama-0b'"),
    (f"{DRAFTS} --gpu h9000", "unknown gpu 'h9000'"),
    (f"{DRAFTS} --pair tinyllama-1.1b:llama-2-7b --input-len 4000", "lower --input-len"),
    (f"{DRAFTS} --indifference 1", "indifference must be 0 to 0.99"),
    (f"{DRAFTS} --padding vllm", "--padding"),
    (f"{DRAFTS} --acceptance-trace /no/such.jsonl", "/no/such.jsonl"),
    ("reproduce five-way", "three-way"),
    ("reproduce", "table"),
    ("reproduce three-way --num-runs 0", "num-runs must be 1 to 10000, got 0"),
    ("reproduce three-way --seed -1", "seed must be 0 to"),
    ("run --num-prompts 2 --expert-overlap 0.5", "--expert-overlap has no effect here: it needs a target with experts"),
    ("run --num-prompts 2 --model qwen3-30b-a3b --expert-overlap 0", "expert-overlap must be 0.01 to 1, got 0"),
    ("run --num-prompts 2 --quantization nf4", "--quantization: invalid choice 'nf4'; one of fp8"),
    ("run --num-prompts 2 --kv-cache-dtype int8", "--kv-cache-dtype: invalid choice 'int8'; one of auto, fp8"),
    (
        "run --num-prompts 2 --model gpt-oss-20b --quantization fp8",
        "gpt-oss-20b has quantised weights as it is published",
    ),
    ("run --num-prompts 2 --enable-expert-parallel", "it needs a target with experts"),
    ("run --num-prompts 2 --ep-size 8", "--enable-expert-parallel"),
    ("run --num-prompts 2 --data-parallel-size 2", "needs a target with experts"),
    ("validate --run 9999", "runs 1 to"),
    ("validate --run 173", "no launches were saved"),
    ("validate --write --contention max", "--write needs all runs"),
    ("validate --tiny", " --serve"),
    ("validate --serve plan.jsonl --json", "--serve can "),
    (
        "sweep --vary num-speculative-token=2",
        "vary: unknown flag num-speculative-token; did you mean num-speculative-tokens?",
    ),
    ("sweep --vary arch=pd", "vary: use --arch for arch"),
    ("sweep --vary max_concurrency=4", "vary: use --concurrency for max_concurrency"),
    ("sweep --vary 2", "vary takes flag=value,value, got '2'"),
    ("sweep --vary num-speculative-tokens=two", "--num-speculative-tokens must be a whole number, got 'two'"),
    ("sweep --vary num-speculative-tokens=99", "num-speculative-tokens must be 0 to 32, got 99"),
    ("sweep --vary num-speculative-tokens=4,4", "names a value twice"),
    ("sweep --vary acceptance-rate=", "vary: acceptance-rate needs a value"),
    ("sweep --vary acceptance-rate=0.5 acceptance_rate=0.6", "vary names acceptance_rate twice"),
    ("sweep --vary acceptance-rate=nan", "acceptance-rate must be 0 to 1, got nan"),
    ("sweep --vary controller=fixd", "invalid choice 'fixd'"),
    ("sweep --vary controller=fixed,feedback --arch baseline", "which baseline does not have"),
    ("sweep --vary use-trace-timestamps=yes", "must be true or false"),
    ("sweep --vary pair=a", "unknown model 'a'"),
    ("sweep --vary gpu=h9000", "unknown gpu 'h9000'"),
]


@pytest.mark.parametrize(("line", "says"), REFUSED)
def test_bad_input_is_one_line_and_writes_nothing(
    line: str, says: str, refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in refused(shlex.split(line))
    assert not list(tmp_path.iterdir())
