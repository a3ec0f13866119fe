"""Prove it on my GPU: run a simulated experiment on the GPU, and compare the metrics.

    python prove_it_on_my_gpu.py            # on this machine's GPU
    python prove_it_on_my_gpu.py tiny       # tiny models on the CPU, to try the script; their errors are meaningless

The same policy serves the same requests in simulation and in real time. If the metrics agree, predictions for similar
loads and settings apply to your GPU. If not, measure it: pdvsim profile, then pdvsim calibrate.
"""

import sys

import torch

import pdvsim
from pdvsim.realrun.machine import Machine
from pdvsim.realrun.site import serve

METRICS = ("output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "mean_e2el_ms")


def main(tiny: bool) -> None:
    """One closed loop, simulated and real."""
    requests = {"num_prompts": 4, "input_len": 16, "output_len": 8} if tiny else {"num_prompts": 200}
    simulated = pdvsim.run(arch="pdv", max_concurrency=4, num_speculative_tokens=2, **requests)
    machine = Machine(device="cpu", tiny=True) if tiny else Machine()
    real = pdvsim.Run(serve(simulated.result.experiment, machine))
    print(f"{'':20}{'simulated':>12}{'real':>12}{'error':>9}")
    for metric in METRICS:
        predicted, measured = simulated.metrics[metric], real.metrics[metric]
        print(f"{metric:20}{predicted:12.2f}{measured:12.2f}{predicted / measured - 1:+9.1%}")


if __name__ == "__main__":
    tiny = "tiny" in sys.argv[1:]
    if not tiny and not torch.cuda.is_available():
        sys.exit("no CUDA device here; to try the script: python prove_it_on_my_gpu.py tiny")
    main(tiny)
