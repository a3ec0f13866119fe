"""My model: a pair that is no preset, from its config.json.

    python my_model.py [draft/config.json target/config.json]

A config.json of the Llama, Qwen2 or Gemma family is all that is needed; weights are not read. What was never measured
is predicted, and the table says so with an error bar. Without files a target of 13B is made up here.
"""

import json
import sys
from pathlib import Path

import pdvsim

TARGET = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 40,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def main(draft: str, target: str, num_prompts: int = 100) -> None:
    """With the drafter and without it, on two cards."""
    for gpu in ("h200", "a100-80gb"):
        for arch, drafts in (("autoregressive", None), ("colocated", 3)):
            run = pdvsim.run(
                arch=arch,
                pair=f"{draft}:{target}",
                gpu=gpu,
                num_speculative_tokens=drafts,
                max_concurrency=8,
                num_prompts=num_prompts,
            )
            speed, low, high = (run.metrics.get(f"output_throughput{end}", 0.0) for end in ("", "_low", "_high"))
            print(f"{gpu:10} {arch:15} {speed:7.0f} tokens/s ({low:.0f} to {high:.0f}),", run.result.meta["foundation"])


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(sys.argv[1], sys.argv[2])
    else:
        Path("my_target.json").write_text(json.dumps(TARGET), encoding="utf-8")
        main("tinyllama-1.1b", "my_target.json", num_prompts=40)
