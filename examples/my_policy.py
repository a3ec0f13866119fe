"""My policy: change one rule of a serving architecture, check its invariants, and compare it.

    python my_policy.py

The rule here: while many requests are being served, PDV prefills prompts in small chunks, so that these requests wait
less for their next tokens.
"""

import pdvsim
from pdvsim.sim.core import Chunk
from pdvsim.sim.policies.pdv import PDV
from pdvsim.testing import check_policy


class Courteous(PDV):
    """PDV that prefills in small chunks while more than `GUESTS` requests decode."""

    GUESTS, PIECE = 4, 256

    def next_chunks(self, budget: int, worker: int = 0) -> tuple[Chunk, ...]:
        """Prompts to prefill in the next forward."""
        return super().next_chunks(budget if self.in_flight <= self.GUESTS else min(budget, self.PIECE), worker)


def main() -> None:
    """Check it, then compare it with its base class."""
    check_policy(Courteous, real=False)
    for arch in ("pdv", Courteous):
        load = {"request_rate": 12, "num_prompts": 100, "input_len": 1500, "output_len": 200}
        run = pdvsim.run(arch=arch, num_speculative_tokens=2, **load)
        print(f"{run.result.experiment.arch:30} TTFT {run.metrics['mean_ttft_ms']:6.1f} ms, ", end="")
        print(f"TPOT {run.metrics['mean_tpot_ms']:5.2f} ms, p99 ITL {run.metrics['p99_itl_ms']:5.1f} ms")


if __name__ == "__main__":
    main()
