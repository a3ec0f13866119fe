"""Bad input: one line on standard error that names what is wrong, exit code 2, and nothing written.

The rule itself is in `refused`; whatever else a file or a command line may hold is tried by tests/cli/test_fuzz.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import another, one_line

from pdvsim.cli import COMMANDS, command_class
from pdvsim.common.options import build, options
from pdvsim.sim.config import GROUPS
from pdvsim.sim.limits import Of

DRAFTS = "draft-table --dataset-name random --input-len 64 --output-len 16 --max-num-seqs 8"
SPREAD = "run --pair none:deepseek-v3 --engine sglang --enable-expert-parallel"
OVER_NVLINK = "--all2all-backend flashinfer_nvlink_two_sided"
APART = "run --arch pd --disaggregate 1p1d"
TABLE = "run --controller table --num-speculative-tokens-per-batch-size"
REFUSED = [  # what the line must name: the option, its value, its limit, or what would be taken
    ("rum", "run"),
    ("capacity --slo ttft:9", "--slo --goodput"),
    ("sweep --overwrite", "--overwrite"),
    ("run 8", "unexpected argument '8'"),
    ("run --json=yes", "--json yes"),
    ("run --num-prompts １０", "--num-prompts １０"),
    ("run --goodput ttft:1_000", "metric:milliseconds"),
    ("run --arch pd --disaggregate １p１d", "engines of each kind"),
    ("run --arch pdx", "pdx pd? autoregressive"),
    ("run --goodput ttfx:5", "goodput ttfx"),
    ("run --goodput p99_ttft:0.5", "milliseconds p99_ttft:500"),
    ("speedup --num-prompts 3", "--num-prompts 8 concurrent"),
    ("run --dataset-name azure", "--dataset-path"),
    ("run --config /no/such.toml", "/no/such.toml"),
    ("run --dataset-name mooncake --dataset-path /no/such.jsonl", "/no/such.jsonl"),
    ("run --num-prompts 8 --warmup-requests 8", "no request is left"),
    ("run --pair ngram:llama-2-7b --drafter model", "--drafter"),
    ("run --drafter eagle3 --arch pdv-ahead", "--drafter"),
    ("run --drafter eagle3 --place prefill=1 verify=1", "GPU"),
    ("sweep --concurrency 1 --request-rate 2", "exclusive"),
    ("sweep --concurrency 1 --max-concurrency 2", "exclusive"),
    ("sweep --arch pdv,pdv", "twice"),
    ("map --num-runs 9999", "100000"),
    ("plot", "results"),
    ("profile", "measure"),
    ("profile --models gpt-5", "gpt-5"),
    ("calibrate --from-bench a.json --from-vllm x.log", "--from-bench"),
    ("calibrate --from-kernels .", "needs --engine"),
    ("calibrate --from-kernels . --engine vllm --gpu l4 -o x.npz", "l4"),
    ("calibrate --from-kernels . --engine vllm --gpu h200 -o x.json", ".npz"),
    ("calibrate --from-kernels . --engine vllm --gpu h200 -o x.npz", "data/h200_sxm"),
    ("validate --rows 3", "--rows --silicon"),
    ("validate --bench x.json", "--bench"),
    ("acceptance --drafter none", "acceptance"),
    ("live --no-browser --port 0 --token short", "token"),
    ("map --arch pd", "arch two"),
    ("map --concurrency 1 --request-rate 2", "--concurrency --request-rate"),
    ("map --y size", "pairs one"),
    ("map --synthetic-acceptance-rates 0.5", "--synthetic-acceptance-rates"),
    ("map --objective goodput", "objective --goodput"),
    ("map --against pd --arch pdv,colocated", "--against pdv colocated"),
    ("map --y card", "try-cards"),
    ("capacity", "give --goodput"),
    ("capacity --goodput ttft:0", "met"),
    ("advise", "--request-rate --concurrency --num-prompts"),
    ("advise --request-rate 3 --concurrency 2", "--request-rate --concurrency"),
    ("advise --request-rate 3 --arch pd --place prefill=1 verify=1", "pd decode"),
    (f"{DRAFTS} --arch pdv", "--arch"),
    (f"{DRAFTS} --drafter none", "drafter"),
    (f"{DRAFTS} --against 5 --max-k 3", "--against --max-k"),
    (f"{DRAFTS} --pair tinyllama-1.1b:llama-2-7b --input-len 4000", "--input-len"),
    ("reproduce five-way", "three-way"),
    ("run --num-prompts 2 --model gpt-oss-20b --quantization fp8", "gpt-oss-20b"),
    ("run --num-prompts 2 --data-parallel-size 2", "--data-parallel-size experts"),
    ("validate --run 9999", "runs 1 to"),
    ("validate --run 173", "launches"),
    ("validate --write --contention max", "--write"),
    ("sweep --vary num-speculative-token=2", "num-speculative-token num-speculative-tokens"),
    ("sweep --vary max_concurrency=4", "--concurrency"),
    ("sweep --vary 2", "vary flag=value"),
    ("sweep --vary acceptance-rate=", "acceptance-rate"),
    ("sweep --vary acceptance-rate=0.5 acceptance_rate=0.6", "acceptance_rate twice"),
    ("sweep --vary controller=fixed,feedback --arch baseline", "baseline"),
    ("sweep --vary use-trace-timestamps=yes", "true false"),
    ("advise --request-rate 8 --output answer.json", "answer.json"),  # a folder
    # names
    ("run --gpu h1000", "unknown gpu 'h1000' (did you mean h100-sxm?)"),
    ("run --pair none:qwen2-7", "unknown model 'qwen2-7' (did you mean qwen2-7b"),
    ("run --pair none:stepfun-ai/Step-3.7-Flash", "is not supported: its layers"),
    ("run --pair none:llama-3.1-8b-fp8-fp8", "has quantised weights as it is published"),
    ("run --pair p-eagle-llama-3.1-8b:qwen3-8b", "p-eagle-llama-3.1-8b is not the head of qwen3-8b"),
    # GPUs of a server
    ("run --arch colocated --place decode=1", "--place needs separate lanes colocated"),
    ("run --arch pd --place decode=0+1", "pd verifies in its decode lane, on one GPU"),
    ("run --arch pdv --place decode=2", "--place leaves GPU 1 empty"),
    ("run --arch pdv --place prefill=1+", "'prefill=1+' must be lane=GPU"),
    ("run --arch pdv --place decode=1 decode=0", "place names decode twice"),
    ("run --arch pdv --place prefill=1+1", "'prefill=1+1' names a GPU twice"),
    ("run --arch pdv --place verify=0+1", "a target verifies on one GPU"),
    ("run --arch pdv --place decode=1 --cards h200", "--cards names 1 cards, 2 GPUs"),
    ("run --arch pdv --place decode=1+2 --cards h200,l4,h200", "--cards: the GPUs of one lane must be of one type"),
    ("run --arch pd --disaggregate 0p1d", "'0p1d' must be 1 to 64 engines"),
    ("run --arch pdv --disaggregate 1p1d", "--disaggregate needs --arch pd, not pdv"),
    (f"{APART} --place decode=1", "leave out --place"),
    (f"{APART} --cards h200", "--cards: --disaggregate takes 2, got 1"),
    (f"{APART} --drafter eagle3 --draft-kv recomputed", "--draft-kv recomputed: eagle3 reads hidden states"),
    ("run --pair llama-3.2-1b:llama-3.1-70b", "or give --tensor-parallel-size 2"),
    ("run --pair llama-3.2-1b:llama-3.1-70b --gpu l4 --gpu-memory-utilization 0.5", "smaller models"),
    ("run --tensor-parallel-size 4 --draft-tensor-parallel-size 2", "must be 1 or tensor-parallel-size, 4, got 2"),
    ("run --pair qwen2-1.5b:qwen2.5-72b --tensor-parallel-size 8", "its heads, 12, --draft-tensor-parallel-size 1"),
    ("run --arch pd --pair none:qwen3-30b-a3b --data-parallel-size 2", "ranks step together, autoregressive, not pd"),
    ("run --pair none:deepseek-v3 --data-parallel-size 16", "are 16 GPUs: more than 8 need --enable-expert-parallel"),
    (f"{SPREAD} --data-parallel-size 24", "over 24 GPUs: its number of experts, 256, is no multiple"),
    (f"{SPREAD} --data-parallel-size 8 {OVER_NVLINK}", "its NVLink joins no h200, and not 8"),
    # policies and their options
    ("run --max-num-seqs 8 --max-verify-batch 9", "max-verify-batch at most max-num-seqs, 8, got 9"),
    ("run --controller table", "needs --num-speculative-tokens-per-batch-size"),
    (f"{TABLE} 1:3,1:2", "must begin with 1 and rise"),
    (f"{TABLE} 1:99", "'1:99' from 0 to 32"),
    ("run --arch adaptive --controller adaptive-verification", "adaptive no --controller adaptive-verification"),
    ("run --controller adaptive-verification --drafter ngram", "adaptive-verification not --drafter ngram"),
    ("run --arch pdv-ahead --acceptance-trace rounds.jsonl", "pdv-ahead needs --acceptance-rate or --acceptance-model"),
    ("run --num-turns 6 --no-enable-prefix-caching --kv-offload-gb 10", "--kv-offload-gb no effect it belongs to"),
    ("run --arch pdv --contention serial --priority preemptive", "no effect --priority"),
    # engines
    ("run --enforce-eager --engine vllm==0.13.0", "--enforce-eager no effect it belongs to vllm, 0.14 or later"),
    ("run --engine pdvsim==1.0", "--engine: invalid choice 'pdvsim==1.0'"),
    ("run --engine vllm --padding sglang", "--padding sglang: profile h200-vllm is padded as vllm"),
    # records
    ("run --no-detailed --save-detailed", "need records, which --no-detailed does not keep"),
    ("sweep --no-detailed --save-detailed", "need records, which --no-detailed does not keep"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "named"), REFUSED)
def test_bad_input_is_one_line_and_writes_nothing(
    line: str, named: str, refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reason = refused(shlex.split(line))
    assert [name for name in named.split() if name not in reason] == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_is_refused_where_no_choice_has_it(command: str) -> None:
    """With the choice that it belongs to. Those of experiments: tests/sim/test_relevance.py."""
    kind: type = command_class(command)
    known = options(kind)
    for option in known.values():
        belongs = [mark for mark in option.marks if isinstance(mark, Of) and option.owner not in GROUPS.values()]
        usual = any(of.chosen(lambda name: False, lambda name: known[name].default) for of in belongs)
        if belongs and not usual:
            with one_line(f"{option.flag} has no effect here: it belongs to", *belongs):
                build(kind, {option.name: another(option)})
