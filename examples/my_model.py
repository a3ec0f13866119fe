"""My model: a pair that is not a preset, from its config.json.

    python my_model.py [draft/config.json target/config.json]

Only the config.json of a supported family is needed; weights are not read. Unmeasured forward times are predicted, with
an error bar. Without files the script uses a made-up 13B target.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

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
    """With and without the drafter, on two GPUs."""
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
        with TemporaryDirectory() as folder:
            target = Path(folder, "my_target.json")
            target.write_text(json.dumps(TARGET), encoding="utf-8")
            main("tinyllama-1.1b", str(target), num_prompts=40)
