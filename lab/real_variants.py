"""What `diagnose` says of a real model: ten healthy runs and ten faulty ones.

    python -m lab.real_variants --folder /tmp/variants [--model .real-model]

Healthy runs are recorded with real vLLM, at other temperatures, precisions, lengths and scripts.
A fault is planted into the trainer's folder (its configuration, a tensor, all weights one step
away), whose model then scores the responses of the first healthy run again; one is the engine's
(an fp8 cache). What has been recorded is not recorded again.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_COMMAND = [sys.executable, "-m", "mismatch_cli"]
_PROBE = ("--num-prompts", "24", "--samples-per-prompt", "4", "--max-tokens", "96")
_CJK = ["请用中文介绍一下北京。", "日本の四季について書いてください。", "한국 음식을 소개해 주세요.",
        "什么是人工智能？", "東京の観光地を教えてください。", "写一首关于春天的诗。"]  # fmt: skip
_YES_OR_NO = [f"Is {n} a prime number? Answer with one word." for n in range(2, 66)]
Folder = Callable[[Path, Path], None]


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=Path(".real-model"))
    parser.add_argument("--threads", default="1")
    return parser


def main() -> None:
    options = command_line().parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    model, folder, threads = options.model.resolve(), options.folder.resolve(), options.threads
    for name, prompts in (("cjk", _CJK), ("short", _YES_OR_NO)):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for text in prompts:
                file.write(json.dumps({"problem": text}) + "\n")
    for name, kind, words in _unplanted(model, folder):
        _run(folder / name, threads, *words)
        _say(folder / name, kind)
    for name, plant in _PLANTED.items():
        faulty = folder / f"{name}-model"
        if not (folder / name / "trace").exists():
            shutil.copytree(model, faulty, dirs_exist_ok=True)
            plant(model, faulty)
            _run(folder / name, threads, "rescore", str(folder / "healthy"), *_with(faulty))
            shutil.rmtree(faulty)
        _say(folder / name, "faulty")


def _unplanted(model: Path, folder: Path) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """The runs whose flags are all that differs: name, kind, and what is typed."""
    probe, rescore = ("probe", str(model)), ("rescore", str(folder / "healthy"))
    for name, flags in _healthy(folder).items():
        yield name, "healthy", (*probe, *flags)
    for name, flags in _SCORED_AGAIN.items():
        yield name, "healthy", (*rescore, *flags)
    yield "fp8-cache", "faulty", (*probe, *_PROBE, "--kv-cache-dtype", "fp8")
    for name, flags in _SETTINGS.items():
        yield name, "faulty", (*rescore, *flags)


def _healthy(folder: Path) -> dict[str, tuple[str, ...]]:
    few = ("--num-prompts", "8", "--samples-per-prompt", "4", "--max-tokens", "96")
    long = ("--num-prompts", "10", "--samples-per-prompt", "2", "--max-tokens", "500")
    cjk = (
        "--prompts",
        str(folder / "cjk.jsonl"),
        *("--samples-per-prompt", "8", "--max-tokens", "96"),
    )
    short = ("--prompts", str(folder / "short.jsonl"), "--max-tokens", "1")
    half = ("--rollout-dtype", "float16", "--trainer-dtype", "float16")
    return {
        "healthy": _PROBE,
        "temperature-0.1": (*_PROBE, "--temperature", "0.1"),
        "temperature-0.7": (*_PROBE, "--temperature", "0.7"),
        "temperature-1.3": (*_PROBE, "--temperature", "1.3"),
        "eight-prompts": few,
        "float16": (*_PROBE, *half),
        "cjk": cjk,
        "one-token": short,
        "500-tokens": long,
    }


# The healthy run, scored again
_SCORED_AGAIN = {
    "float32-trainer": ("--trainer-dtype", "float32"),
    "other-batches": ("--token-budget", "700"),
}
_SETTINGS = {
    "float32-head": ("--float32-head",),
    "trainer-at-0.85": ("--temperature", "0.85"),
}


def _config(**changes: float) -> Folder:
    """Numbers of config.json, times a factor."""

    def plant(_model: Path, faulty: Path) -> None:
        path = faulty / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        for name, factor in changes.items():
            place = config if name in config else config["rope_parameters"]
            place[name] *= factor
        path.write_text(json.dumps(config), encoding="utf-8")

    return plant


def _tensors(changed: Callable[[str, torch.Tensor], torch.Tensor]) -> Folder:
    def plant(model: Path, faulty: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        tensors = {name: changed(name, tensor).contiguous() for name, tensor in tensors.items()}
        save_file(tensors, faulty / "model.safetensors", {"format": "pt"})

    return plant


def _one_tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 1.03 if "layers.12.self_attn.o_proj" in name else tensor


def _steps(rate: float, only: str = "") -> Folder:
    """AdamW's first step, rate · sign of the gradient of a text's likelihood."""

    def plant(model: Path, faulty: Path) -> None:
        signs = _gradient_signs(model)

        def moved(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if only not in name or name not in signs:
                return tensor
            return (tensor.float() - rate * signs[name]).to(tensor.dtype)

        _tensors(moved)(model, faulty)

    return plant


def _gradient_signs(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "To find the area of the circle, square its radius and multiply by pi. " * 8
    ids = tokenizer(text, return_tensors="pt").input_ids
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {
        name: parameter.grad.sign()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def _adapter(model: Path, faulty: Path) -> None:
    """A LoRA adapter with the weights of a few steps, merged in the trainer only."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    adapted: Any = get_peft_model(
        loaded, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=1e-3)
    adapted.merge_and_unload().save_pretrained(faulty)


_PLANTED: Mapping[str, Folder] = {
    "rope-1.4": _config(rope_theta=1.4),
    "rope-3": _config(rope_theta=3.0),
    "epsilon-30": _config(rms_norm_eps=30.0),
    "one-tensor": _tensors(_one_tensor),
    "one-layer": _steps(5e-4, "layers.12."),
    "one-step-old": _steps(1e-5),
    "lora-not-merged": _adapter,
}


def _with(faulty: Path) -> tuple[str, ...]:
    return ("--trainer-model", str(faulty), "--weights", "equal")


def _run(folder: Path, threads: str, *words: str) -> None:
    if (folder / "summary.json").exists():
        return
    line = [*_COMMAND, *words, "--threads", threads, "--output", str(folder), "--force", "--quiet"]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _say(folder: Path, kind: str) -> None:
    line = [*_COMMAND, "diagnose", str(folder), "--json"]
    diagnosis: dict[str, Any] = json.loads(
        subprocess.run(line, check=True, capture_output=True).stdout
    )
    expected = diagnosis["unexplained"]["expected"]
    suspects = [row["setting"] for row in diagnosis["suspects"] if row["setting"]]
    share = expected["share_by_grid"]
    by_grid = "" if share is None else f"{100 * share:.0f} %"
    print(
        f"{kind} | {folder.name} | {diagnosis['sample']['tokens']} | {diagnosis['abs_d_mean']:.4f} "
        f"| {expected['low']:.4f}–{expected['high']:.4f} | {by_grid} | {diagnosis['faults']} | "
        f"{diagnosis['first_cause']} | {suspects[:1]}",
        flush=True,
    )


if __name__ == "__main__":
    main()
