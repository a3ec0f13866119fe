"""Speed-up of suffix decoding over plain decoding by concurrency and task: `python studies/suffix_gains.py`.

Llama-3.1-8B on vLLM 0.10.1, the version of the report compared with, and an H200; prompts of 500 tokens and answers of
200, draft length 8, one run per cell. The acceptance is that of a look-up in recorded tokens (`suffix_lookups.py`).
"""

from __future__ import annotations

from dataclasses import replace

from pdvsim.sim.config import Acceptance, Experiment, Hardware, Server, Traffic
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate
from pdvsim.view.table import TextTable

CONCURRENCY = (1, 8, 32, 64, 128)
TASKS = ("sharegpt", "cnn", "gsm8k", "instructcoder")
HARDWARE = Hardware("h200", engine="vllm==0.10.1", band=False)


def gain(task: str, clients: int) -> float:
    """Time of plain decoding over that with drafts that are accepted as in a task, in a closed loop."""
    requests = max(24, 4 * clients)
    traffic = Traffic("random", num_prompts=requests, max_concurrency=clients, input_len=500, output_len=200)
    server = Server("suffix:llama-3.1-8b", num_speculative_tokens=8, max_num_seqs=256)
    drafting = Experiment("colocated", traffic, Acceptance(acceptance_model=f"{task}-suffix"), server, HARDWARE)
    plain = applicable(replace(drafting, arch="autoregressive"))
    plain_s, drafting_s = (float(simulate(one).deliveries["time_s"].max()) for one in (plain, drafting))
    return plain_s / drafting_s


if __name__ == "__main__":
    table = [{"task": task} | {str(n): f"{gain(task, n):.2f}" for n in CONCURRENCY} for task in TASKS]
    print(TextTable(table, notes=("speed-up over plain decoding, by concurrency",)))
