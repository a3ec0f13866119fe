"""Options that do nothing are refused, by one line; what looks like a mistake is noted once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from refusals import another

import pdvsim
from pdvsim.bench.sweep import Sweep
from pdvsim.common.options import options
from pdvsim.decide.advice import Question
from pdvsim.decide.capacity import Plan
from pdvsim.decide.goal import Goal
from pdvsim.decide.space import Space
from pdvsim.sim.config import DEFAULTS, GROUP_OF, Acceptance, Arch, Experiment, Hardware, Server, Traffic
from pdvsim.sim.limits import Fact, flag_of
from pdvsim.sim.policies import ARCHS
from pdvsim.sim.relevance import RULES, Doubt, applicable, choices, idle
from pdvsim.sim.run import simulate

SMALL = Traffic("random", num_prompts=4, input_len=32, output_len=8, request_rate=50.0)


VALUES: dict[str, Any] = {  # of options whose ends are no values that go with all others
    "window": "peak", "synthetic_acceptance_rates": (0.9, 0.8, 0.7, 0.6), "acceptance_model": "cnn-ngram",
    "num_speculative_tokens_per_batch_size": ("1:3", "2:1"), "controller": "goodput", "columns": ("prompt=x",),
    "cards": ("h200",), "gpu_memory_utilization": 0.5, "draft_tensor_parallel_size": 1,
}  # fmt: skip


def changed(name: str, experiment: Experiment) -> Experiment:
    """The experiment with an option at another value."""
    return experiment.with_settings(**{name: VALUES.get(name) or another(options(Experiment)[name])})


READ = ("tokenizer", "acceptance_trace", "dataset_path", "use_trace_timestamps", "cards")  # wherever they are given
GUESSED = ("acceptance_rate", "acceptance_concentration")
EVERY = choices()


def test_a_choice_is_made_of_options_and_facts() -> None:
    for name, belongs in EVERY.items():
        named = {word for of in belongs for word in (*of.given, *of.without, *dict(of.values))}
        assert named <= {"arch", *Fact, *DEFAULTS}, name
    assert set(RULES) == set(Fact)


@pytest.mark.parametrize("arch", ARCHS)
def test_options_declared_idle_do_nothing(arch: Arch) -> None:
    """An option of a choice that an architecture has not is refused with it; the records are the same without it."""
    plain = Experiment(arch, SMALL, hardware=Hardware(kv_capacity_tokens=10**5))
    expected = simulate(plain).launches
    for name, belongs in EVERY.items():
        if arch == "pdv-ahead" and GROUP_OF[name] == "acceptance" and name not in GUESSED:
            continue  # refused before: what comes after a draft is unknown then
        other = changed(name, plain)
        if name in idle(other):
            assert applicable(other) == plain
            with pytest.raises(ValueError, match=f"{flag_of(name)} has no effect here: it belongs to ") as refusal:
                simulate(other)
            assert all(str(of) in str(refusal.value) for of in belongs)
            launches = unchecked(other) if name not in READ else expected
            assert all((launches[column] == expected[column]).all() for column in expected), name


def unchecked(experiment: Experiment) -> Any:
    """The launches of a run without the refusal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pdvsim.sim.run.refuse_idle", lambda experiments: None)
        return simulate(experiment).launches


def test_a_sweep_takes_what_acts_in_one_of_its_architectures() -> None:
    base = Experiment("pd", SMALL, Acceptance(0.8), Server(num_workers=2, verify_gather="never", priority="partition"))
    sweep = Sweep(("colocated", "baseline", "pdv", "autoregressive"), request_rate=(4.0,), base=base)
    colocated, baseline, pdv, plain = (point.experiment for point in sweep.points())
    assert colocated.server == Server()
    assert baseline.server == Server(num_workers=2)
    assert pdv.server == Server(verify_gather="never", priority="partition")
    assert plain == Experiment("autoregressive", replace(SMALL, request_rate=4.0))
    assert pdv.acceptance == baseline.acceptance == Acceptance(0.8)
    with pytest.raises(ValueError, match="--verify-gather has no effect here"):
        Sweep(("colocated", "baseline"), request_rate=(4.0,), base=base)


def test_decisions_take_what_acts_in_one_of_their_architectures() -> None:
    base = Experiment("pd", SMALL, server=Server(num_workers=2, max_speculative_tokens=5))
    goal = Goal("throughput", ("ttft:500",))
    Question(base, Space(("baseline", "pd")), goal)
    with pytest.raises(ValueError, match="--num-workers has no effect here"):
        Question(base, Space(("pd", "pdv")), goal)
    with pytest.raises(ValueError, match="--max-speculative-tokens has no effect here"):
        Question(base, Space(("baseline",), controllers=("fixed",)), goal)
    routed = Experiment("pd", SMALL, hardware=Hardware(router="random"))
    Plan(replace(routed, hardware=replace(routed.hardware, replicas=2)), ("pd",), 1, goal)
    with pytest.raises(ValueError, match="--router has no effect here"):
        Plan(routed, ("pd",), 1, goal)


# doubts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "says"), [
    ({"pair": "llama-2-7b:tinyllama-1.1b"}, "larger than its target"),
    ({"pair": "llama-3.2-1b:llama-2-7b"}, "128,256 tokens and llama-2-7b 32,000"),
    ({"pair": "llama-2-7b:llama-2-7b"}, "takes as long as one of its target"),
])  # fmt: skip
def test_a_doubt_is_a_warning(options: dict[str, Any], says: str) -> None:
    small = {"dataset_name": "random", "input_len": 32, "output_len": 8, "num_prompts": 2, "arch": "pd"}
    with pytest.warns(Doubt, match=says):
        pdvsim.run(**small, **options)
    with pytest.warns(Doubt, match=says):
        pdvsim.sweep(jobs=1, concurrency=[1], **small, **options)


@pytest.mark.parametrize("drafter", ["eagle3", "ngram"])
def test_the_recorded_acceptance_of_a_drafter_counts_as_not_given(drafter: str) -> None:
    """An architecture that never drafts takes it, and behaves as without; another recording is refused."""
    small = {"model": "llama-3.1-8b", "drafter": drafter, "num_prompts": 2, "output_len": 2}
    run = pdvsim.run(arch="autoregressive", **small)
    assert run.result.experiment.acceptance.acceptance_model == f"sharegpt-{drafter}"
    plain = pdvsim.run(arch="autoregressive", acceptance_rate=Acceptance.acceptance_rate, **small)
    assert run.metrics == plain.metrics
    with pytest.raises(ValueError, match="--acceptance-model has no effect here"):
        pdvsim.run(arch="autoregressive", acceptance_model="gsm8k-eagle3", **small)
    with pytest.raises(ValueError, match="--acceptance-rate has no effect here"):
        pdvsim.run(arch="autoregressive", acceptance_rate=0.9, **small)
