"""The cost of the LM head: log-prob, entropy, rank and log-probs at 20 ids, compared with the plain
matrix product.

    python -m lab.scoring [--tokens 512] [--hidden 1024] [--vocab 151936] [--rounds 5] [--dtype float32]
        [--device cuda]

Time is CPU time of one thread. In every round each variant runs once next to the plain product `[T,
H] × [H, V]` into a existing buffer; the figure is the median over rounds of the ratio to that
product. Memory is peak resident memory above hidden states and weights, each variant in its own
process; a scoring run can only add less to the peak of its backbone. On a GPU, time is until the
GPU is done, and memory is the GPU's.

Targets, in float32: at most 1.2 times the product, and at most 100 MB. (A CPU with bfloat16
instructions halves the product but not the exponentials, so there the same work weighs more.)
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before importing torch
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.scoring.head import Head, score_hidden
from mismatch_cli.models.torch_settings import prepare_imports

QUERIES = 20
TARGET_RATIO, TARGET_MB = 1.2, 100.0


class Case(NamedTuple):
    """One problem: T hidden states, a head, the sampled ids and 20 ids per token."""

    hidden_TH: torch.Tensor
    weight_VH: torch.Tensor
    target_T: torch.Tensor
    query_TK: torch.Tensor


def make_case(tokens: int, hidden: int, vocabulary: int, dtype: str) -> Case:
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    weight_VH = torch.empty(vocabulary, hidden, dtype=kind).normal_(std=1.5 / hidden**0.5)
    ids_TQ = torch.randint(0, vocabulary, (tokens, QUERIES + 1))
    return Case(torch.randn(tokens, hidden).to(kind), weight_VH, ids_TQ[:, 0], ids_TQ[:, 1:])


def tiles(case: Case) -> torch.Tensor:
    return score_hidden(
        case.hidden_TH, Head(case.weight_VH), case.target_T, case.query_TK, SamplingSettings()
    ).logp_T


def full_logits(case: Case) -> torch.Tensor:
    logits_TV = (case.hidden_TH @ case.weight_VH.T).float()
    return logits_TV.log_softmax(dim=-1).gather(1, case.target_T[:, None])[:, 0]


def full_logits_everything(case: Case) -> torch.Tensor:
    logits_TV = (case.hidden_TH @ case.weight_VH.T).float()
    logp_TV = logits_TV.log_softmax(dim=-1)
    logp_T1 = logp_TV.gather(1, case.target_T[:, None])
    torch.special.entr(logp_TV.exp()).sum(dim=1)
    (logp_TV > logp_T1).sum(dim=1)
    logp_TV.gather(1, case.query_TK)
    return logp_T1[:, 0]


def trl(case: Case) -> torch.Tensor:
    from trl.trainer.utils import selective_log_softmax

    return selective_log_softmax(case.hidden_TH @ case.weight_VH.T, case.target_T)


class Variant(NamedTuple):
    run: Callable[[Case], torch.Tensor]
    outputs: str


VARIANTS = {
    "mismatch-cli": Variant(tiles, "log-prob, entropy, rank, log-prob at 20 ids"),
    "full logits, the same outputs": Variant(
        full_logits_everything, "log-prob, entropy, rank, log-prob at 20 ids"
    ),
    "full logits, log_softmax + gather": Variant(full_logits, "log-prob"),
    "TRL selective_log_softmax": Variant(trl, "log-prob"),
}


def seconds(run: Callable[[], object]) -> float:
    """CPU time of one thread, or the time until the GPU is done."""
    if not torch.cuda.is_initialized():
        start = time.process_time()
        run()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def time_ratios(case: Case, names: list[str], rounds: int) -> tuple[dict[str, list[float]], float]:
    """For each variant, the ratio to the plain product in every round; and the product's best
    time in seconds.
    """
    product_TV = torch.zeros(len(case.hidden_TH), len(case.weight_VH), dtype=case.weight_VH.dtype)
    ratios: dict[str, list[float]] = {name: [] for name in names}
    floors = []
    for round_ in range(rounds + 1):
        for name in names:
            floor = seconds(lambda: torch.mm(case.hidden_TH, case.weight_VH.T, out=product_TV))
            ratio = seconds(lambda name=name: VARIANTS[name].run(case)) / floor  # type: ignore[misc]
            # The first round warms up
            if round_ > 0:
                ratios[name].append(ratio)
                floors.append(floor)
    return ratios, min(floors)


def peak_mb(name: str, args: argparse.Namespace) -> float:
    """Run one variant once in a new process and read its peak."""
    sizes = ["--hidden", args.hidden, "--vocab", args.vocab, "--tokens", args.memory_tokens]
    sizes += ["--dtype", args.dtype, "--device", args.device]
    command = [sys.executable, __file__, "--measure-memory", name, *map(str, sizes)]
    child = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(child.stdout.split()[-1])


def measure_memory(name: str, case: Case) -> float:
    """Peak above the resident memory before, in MB; a variant's imports are not counted."""
    small = Case(
        case.hidden_TH[:32], case.weight_VH[:64], case.target_T[:32] % 64, case.query_TK[:32] % 64
    )
    VARIANTS[name].run(small)
    before = reset_peak()
    VARIANTS[name].run(case)
    return peak() - before


def reset_peak() -> float:
    """Reset the process's high-water mark to what is resident now, if the system can (Linux)."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        return peak()
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")
    return peak()


def peak() -> float:
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 1e6
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        # The file counts kibibytes
        return int(line.split()[1]) * 1024 / 1e6
    # macOS counts bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def agree(case: Case, names: list[str]) -> None:
    """Check that the variants agree: a benchmark of wrong numbers is worthless."""
    exact_T = full_logits(case)
    for name in names:
        worst = (VARIANTS[name].run(case).float() - exact_T).abs().max().item()
        # TRL gathers in the logits' dtype: its bfloat16 log-probs are rounded to bfloat16.
        is_rounded = case.weight_VH.dtype != torch.float32 and name == "TRL selective_log_softmax"
        assert worst < (0.1 if is_rounded else 1e-4), name


def installed() -> tuple[list[str], str]:
    """The variants that can run here, and a note about TRL, which may be missing."""
    prepare_imports()
    try:
        import trl
    except ImportError:
        without_trl = [name for name in VARIANTS if not name.startswith("TRL")]
        return without_trl, "trl not installed: pip install trl"
    return list(VARIANTS), f"trl {trl.__version__}"


def where(device: str) -> str:
    return "one thread" if device == "cpu" else torch.cuda.get_device_name()


def show(
    args: argparse.Namespace, ratios: dict[str, list[float]], memory: dict[str, float], floor: float
) -> None:
    from rich.console import Console
    from rich.table import Table

    head = f"LM head, H = {args.hidden}, V = {args.vocab}, {args.dtype}"
    table = Table(title=f"{head}, {where(args.device)}, torch {torch.__version__}")
    table.add_column("variant")
    table.add_column("outputs")
    table.add_column(f"time / product\n{args.tokens} tokens", justify="right")
    table.add_column("range", justify="right")
    table.add_column(f"peak memory\n{args.memory_tokens} tokens", justify="right")
    for name, values in ratios.items():
        spread = f"{min(values):.2f}–{max(values):.2f}"
        table.add_row(
            name,
            VARIANTS[name].outputs,
            f"{statistics.median(values):.2f}",
            spread,
            f"{memory[name]:,.0f} MB",
        )
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    console.print(f"The plain product takes {1e3 * floor:.1f} ms; medians of {args.rounds} rounds.")
    if args.device != "cpu":
        return
    ours = statistics.median(ratios["mismatch-cli"]), memory["mismatch-cli"]
    verdict = "met" if ours[0] <= TARGET_RATIO and ours[1] <= TARGET_MB else "MISSED"
    console.print(f"Targets (at most {TARGET_RATIO} × the product, {TARGET_MB:.0f} MB): {verdict}.")


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=512, help="tokens per round")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--memory-tokens", type=int, default=2048, help="tokens of the memory measurement"
    )
    parser.add_argument("--measure-memory", choices=list(VARIANTS), help=argparse.SUPPRESS)
    return parser


def main() -> None:
    args = command_line().parse_args()
    torch.set_num_threads(1)
    torch.set_default_device(args.device)
    case = make_case(args.tokens, args.hidden, args.vocab, args.dtype)
    if args.measure_memory:
        print(measure_memory(args.measure_memory, case))
        return
    names, trl_says = installed()
    agree(case, names)
    ratios, floor = time_ratios(case, names, args.rounds)
    show(args, ratios, {name: peak_mb(name, args) for name in names}, floor)
    print(trl_says)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
