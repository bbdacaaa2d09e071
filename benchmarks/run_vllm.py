"""vLLM's CPU build, offline batch: the same answers of fixed length, for its rollout rate alone."""

from __future__ import annotations

import argparse
import json
import time

from vllm import LLM, SamplingParams

from benchmarks.common import SCENARIOS, problems


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scenario", choices=SCENARIOS, default="short")
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    options = parser.parse_args()
    scenario = SCENARIOS[options.scenario]
    engine = LLM(
        options.model,
        dtype=options.dtype,
        max_model_len=1024,
        max_num_seqs=64,
        enable_prefix_caching=True,
        gpu_memory_utilization=0.3,  # on the CPU build: the share of the machine's memory
    )
    params = SamplingParams(
        n=scenario.group_size, temperature=1.0, max_tokens=scenario.tokens, ignore_eos=True, logprobs=0
    )
    rows = problems(scenario.prompts * 4, 0)
    rates = []
    for batch in range(4):
        asked = rows[batch * scenario.prompts : (batch + 1) * scenario.prompts]
        chats = [[{"role": "user", "content": question}] for question, _ in asked]
        start = time.perf_counter()
        outputs = engine.chat(chats, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
        rates.append(tokens / seconds)
    print("RESULT " + json.dumps({"side": "vllm", "rollout_tokens_per_second": sorted(rates[1:])[1], "rates": rates}))


if __name__ == "__main__":
    main()
