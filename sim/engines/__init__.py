"""The serving engines: one file each, and what they share (`base`)."""

from __future__ import annotations

from pdvsim.sim.core import ServingEngine
from pdvsim.sim.engines.base import InferenceEngine
from pdvsim.sim.engines.pdvsim import PDVSIM
from pdvsim.sim.engines.sglang import SGLANG
from pdvsim.sim.engines.trtllm import TENSORRT_LLM
from pdvsim.sim.engines.vllm import VLLM

ENGINES: dict[ServingEngine, InferenceEngine] = {engine.name: engine for engine in (PDVSIM, VLLM, SGLANG, TENSORRT_LLM)}
