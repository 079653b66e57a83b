"""The cost of the policy-gradient head: loss and gradients from hidden states, compared with three
matrix products.

    python -m lab.policy_gradient [--tokens 2048] [--hidden 256] [--vocab 151936] [--rounds 3] [--dtype float32]
        [--device cuda]

Time is CPU time of one thread. In every round each variant runs once next to the three products
that no variant can avoid, `[T, H] × [H, V]`, `[T, V] × [V, H]` and `[V, T] × [T, H]`, into existing
buffers; the figure is the median over rounds of the ratio to them. Memory is peak resident memory
above hidden states and weight, each variant in its own process; it includes the weight's gradient,
which is as large as the weight.

Targets, in float32: at most 1.15 times the products if the coefficient follows from the token's own
log-prob, at most 1.5 times if it needs a log-prob pass, and at most 400 MB. (A CPU with bfloat16
instructions halves the time of the products and more, but not of the exponentials, and its product
with float32 sums costs twice one that rounds.) On a GPU, time is until the GPU is done, and memory
is the GPU's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before importing torch
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from lab.scoring import peak, reset_peak, seconds, where
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.scoring.head import Head
from mismatch_cli.models.scoring.policy_gradient import (
    CoefficientOf,
    LogpPass,
    logp_pass,
    policy_gradient_loss,
)

TARGETS = {"token-level": 1.15, "sequence-level": 1.5}
TARGET_MB = 400.0
PLAIN = SamplingSettings()
CAP = 3.0


class Case(NamedTuple):
    """One problem: T hidden states and a head, both with gradients, the sampled ids, and log μ
    and A of each.
    """

    hidden_TH: Tensor
    weight_VH: Tensor
    ids_T: Tensor
    logp_rollout_T: Tensor
    advantage_T: Tensor


def make_case(tokens: int, hidden: int, vocabulary: int, dtype: str) -> Case:
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    weight_VH = torch.empty(vocabulary, hidden, dtype=kind).normal_(std=1.5 / hidden**0.5)
    hidden_TH = torch.randn(tokens, hidden).to(kind)
    ids_T = torch.randint(0, vocabulary, (tokens,))
    logp_rollout_T = logp_pass(hidden_TH, Head(weight_VH), ids_T, PLAIN).logp_N + 0.2 * torch.randn(
        tokens
    )
    advantage_T = torch.randn(tokens).sign()
    return Case(
        hidden_TH.requires_grad_(), weight_VH.requires_grad_(), ids_T, logp_rollout_T, advantage_T
    )


def loss_of(
    case: Case, coefficient_of: CoefficientOf, first_pass: LogpPass | None = None
) -> Tensor:
    head = Head(case.weight_VH)
    return policy_gradient_loss(
        case.hidden_TH, head, case.ids_T, coefficient_of, PLAIN, first_pass=first_pass
    ).loss


def capped(case: Case, rows: slice, logp_R: Tensor) -> Tensor:
    """min(r, cap) · A, for every token."""
    ratio_R = (logp_R - case.logp_rollout_T[rows]).exp()
    return ratio_R.clamp(max=CAP) * case.advantage_T[rows]


def token_level(case: Case) -> Tensor:
    return loss_of(case, lambda rows, logp_R: capped(case, rows, logp_R))


def half_without_advantage(case: Case) -> Tensor:
    """A = 0 for the first half of the tokens, as when all answers to a prompt are right or all
    wrong.
    """
    advantage_T = case.advantage_T.clone()
    advantage_T[: len(advantage_T) // 2] = 0.0
    return token_level(case._replace(advantage_T=advantage_T))


def sequence_level(case: Case) -> Tensor:
    first_pass = logp_pass(case.hidden_TH, Head(case.weight_VH), case.ids_T, PLAIN)
    coefficient_T = (first_pass.logp_N - case.logp_rollout_T).mean().exp() * case.advantage_T
    return loss_of(case, lambda rows, _: coefficient_T[rows], first_pass)


def through_logits(case: Case) -> Tensor:
    """Autograd, with the same coefficients as `token_level`."""
    logits_TV = (case.hidden_TH @ case.weight_VH.T).float()
    logp_T = logits_TV.log_softmax(dim=-1).gather(1, case.ids_T[:, None])[:, 0]
    return -(capped(case, slice(None), logp_T.detach()) * logp_T).sum()


VARIANTS: dict[str, Callable[[Case], Tensor]] = {
    "token-level": token_level,
    "token-level, half of the tokens with A = 0": half_without_advantage,
    "sequence-level": sequence_level,
    "autograd through logits": through_logits,
}


def run(name: str, case: Case) -> None:
    """Forward and backward; the gradients of the last run are dropped first."""
    case.hidden_TH.grad = case.weight_VH.grad = None
    VARIANTS[name](case).backward()


def time_ratios(case: Case, rounds: int) -> tuple[dict[str, list[float]], float]:
    """For each variant, the ratio to the plain products in every round; and their best time in
    seconds.
    """
    hidden_TH, weight_VH = case.hidden_TH.detach(), case.weight_VH.detach()
    logits_TV = torch.zeros(len(hidden_TH), len(weight_VH), dtype=weight_VH.dtype)
    grad_TH, grad_VH = torch.zeros_like(hidden_TH), torch.zeros_like(weight_VH)

    def products() -> None:
        torch.mm(hidden_TH, weight_VH.T, out=logits_TV)
        torch.mm(logits_TV, weight_VH, out=grad_TH)
        torch.mm(logits_TV.T, hidden_TH, out=grad_VH)

    ratios: dict[str, list[float]] = {name: [] for name in VARIANTS}
    floors = []
    products()
    for _ in range(rounds):
        for name in VARIANTS:
            floors.append(seconds(products))
            ratios[name].append(seconds(lambda name=name: run(name, case)) / floors[-1])  # type: ignore[misc]
    return ratios, min(floors)


def peak_mb(name: str, args: argparse.Namespace) -> float:
    """Run one variant once in a new process and read its peak."""
    sizes = ["--hidden", args.hidden, "--vocab", args.vocab, "--tokens", args.memory_tokens]
    sizes += ["--dtype", args.dtype, "--device", args.device]
    command = [sys.executable, __file__, "--measure-memory", name, *map(str, sizes)]
    child = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(child.stdout.split()[-1])


def measure_memory(name: str, case: Case) -> float:
    """Peak above the resident memory before, in MB; what a first call leaves behind is not
    counted.
    """
    ids_T = case.ids_T[:32] % 64
    small = Case(
        case.hidden_TH.detach()[:32].requires_grad_(),
        case.weight_VH.detach()[:64].requires_grad_(),
        ids_T,
        case.logp_rollout_T[:32],
        case.advantage_T[:32],
    )
    # A small run first, for what libraries load once and keep
    run(name, small)
    before = reset_peak()
    run(name, case)
    return peak() - before


def agree(case: Case) -> None:
    """Check that the variants agree: a benchmark of wrong numbers is worthless."""
    case = Case(
        case.hidden_TH.detach()[:300].requires_grad_(),
        case.weight_VH,
        *(column[:300] for column in case[2:]),
    )
    run("autograd through logits", case)
    expected = case.hidden_TH.grad, case.weight_VH.grad
    run("token-level", case)
    tolerance = 1e-5 if case.weight_VH.dtype == torch.float32 else 0.01
    for gradient, exact in zip((case.hidden_TH.grad, case.weight_VH.grad), expected, strict=True):
        assert gradient is not None and exact is not None
        assert (gradient - exact).float().norm() <= tolerance * exact.float().norm()


def show(
    args: argparse.Namespace, ratios: dict[str, list[float]], memory: dict[str, float], floor: float
) -> None:
    from rich.console import Console
    from rich.table import Table

    head = f"Policy gradient, H = {args.hidden}, V = {args.vocab}, {args.dtype}"
    table = Table(title=f"{head}, {where(args.device)}, torch {torch.__version__}")
    table.add_column("variant")
    table.add_column(f"time / three products\n{args.tokens} tokens", justify="right")
    table.add_column("range", justify="right")
    table.add_column(f"peak memory\n{args.memory_tokens} tokens", justify="right")
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    for name, values in ratios.items():
        spread = f"{min(values):.2f}–{max(values):.2f}"
        table.add_row(name, f"{medians[name]:.2f}", spread, f"{memory[name]:,.0f} MB")
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    console.print(f"The three products take {1e3 * floor:.1f} ms; medians of {args.rounds} rounds.")
    if args.device != "cpu":
        return
    for name, target in TARGETS.items():
        verdict = "met" if medians[name] <= target and memory[name] <= TARGET_MB else "MISSED"
        console.print(
            f"Targets, {name} (at most {target} × the products, {TARGET_MB:.0f} MB): {verdict}."
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per round")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--memory-tokens", type=int, default=2048, help="tokens of the memory measurement"
    )
    parser.add_argument("--measure-memory", choices=list(VARIANTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_device(args.device)
    case = make_case(args.tokens, args.hidden, args.vocab, args.dtype)
    if args.measure_memory:
        print(measure_memory(args.measure_memory, case))
        return
    agree(case)
    ratios, floor = time_ratios(case, args.rounds)
    show(args, ratios, {name: peak_mb(name, args) for name in VARIANTS}, floor)


if __name__ == "__main__":
    main()
