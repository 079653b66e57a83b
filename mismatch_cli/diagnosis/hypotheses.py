"""How a side may have misread the responses: other positions, padding that attention sees, and
other prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from mismatch_cli.diagnosis.model import Hypothesis

if TYPE_CHECKING:
    import torch

    Frequencies = Callable[[torch.Tensor], torch.Tensor]

ROUND = (8, 64, 128, 256, 512, 1024, 2048)  # common multiples for padded lengths


def scaled_positions(factor: float) -> Hypothesis:
    """RoPE with every position divided by a factor: linear scaling."""
    return _rope(f"RoPE scaled linearly by {factor:.4g}", lambda frequency_F: frequency_F / factor)


def scaled_base(factor: float) -> Hypothesis:
    """RoPE with its base multiplied by a factor, the same as NTK scaling."""

    def changed(frequency_F: torch.Tensor) -> torch.Tensor:
        import torch

        count = len(frequency_F)
        exponent_F = torch.arange(count, device=frequency_F.device, dtype=torch.float32) / count
        return frequency_F * float(factor) ** -exponent_F

    return _rope(f"RoPE base times {factor:.4g}", changed)


def positions_of(config: Any) -> list[Hypothesis]:
    """What to try first: common factors, and YaRN from this model's context lengths."""
    encodings = list(map(scaled_positions, FACTORS))
    encodings += map(scaled_base, BASE_FACTORS)
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in parameters:
        return encodings
    most = int(config.max_position_embeddings)
    trained = {most, int(parameters.get("original_max_position_embeddings", most))}
    for factor in YARN_FACTORS:
        for n in sorted(trained | {int(most / factor)}):
            name = f"YaRN with factor {factor:g} from {n} positions"
            yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": n}
            encodings.append(_with_parameters(name, yarn))
    if parameters.get("rope_type", "default") != "default":
        encodings.append(_with_parameters("RoPE without its scaling", {"rope_type": "default"}))
    return encodings


FACTORS = (0.125, 0.25, 0.5, 2.0, 4.0, 8.0, 16.0)
BASE_FACTORS = (1e-3, 1e-2, 0.1, 0.25, 0.5, 2.0, 4.0, 10.0, 50.0, 100.0, 1000.0)
YARN_FACTORS = (2.0, 4.0, 8.0, 32.0)


def padded(count: int, token: int) -> Hypothesis:
    """A number of padding tokens on the left, which attention sees."""
    name = f"{count} tokens {token} before the prompt"
    return Hypothesis(name, prompt=lambda ids: [token] * count + ids)


def padded_to(length: int, token: int) -> Hypothesis:
    """Prompts left-padded to one length, with padding that attention sees."""
    name = f"prompts padded to {length} with token {token}"
    return Hypothesis(name, prompt=lambda ids: [token] * max(0, length - len(ids)) + ids)


def padding_tokens(config: Any) -> list[int]:
    """The usual ids of padding: the padding token, the end of sequence, and 0."""
    return list(dict.fromkeys([*_token_ids(config, "pad", "eos").values(), 0]))


def padded_lengths(longest: int) -> list[int]:
    """The lengths to which prompts are padded: the longest, and the usual multiples above it."""
    return sorted({longest, *(-(-longest // n) * n for n in ROUND)})


def other_prompts(config: Any) -> list[Hypothesis]:
    """Prompts with a token that is missing or duplicated, or with runs of one token (placeholders
    of an image) at another length.
    """
    prompts = []
    for name, token in _token_ids(config, "bos", "eos", "pad").items():
        before = padded(1, token).prompt
        prompts.append(Hypothesis(f"the {name} token before the prompt", prompt=before))
    prompts += [
        Hypothesis("the first token twice", prompt=lambda ids: [*ids[:1], *ids]),
        Hypothesis("the last token twice", prompt=lambda ids: [*ids, *ids[-1:]]),
    ]
    for at in (*range(MOST_MISSING), *range(-MOST_MISSING, 0)):
        prompts.append(_lacking(f"without token {at} of the prompt", [at]))
    for count in (2, 3, 4):
        prompts.append(_lacking(f"without the first {count} tokens", range(count)))
        prompts.append(_lacking(f"without the last {count} tokens", range(-count, 0)))
    prompts += [
        Hypothesis("each run of one token as one", prompt=partial(_cut_runs, 1)),
        Hypothesis("without its runs of one token", prompt=partial(_cut_runs, 0)),
    ]
    # One side may have left an image or a video as a single placeholder
    for token in _token_ids(config, "image", "video").values():
        for count in EXPANDED:
            name = f"each placeholder {token} {count} times"
            prompts.append(Hypothesis(name, prompt=partial(_expand, token, count)))
    return prompts


def _lacking(name: str, places: Sequence[int]) -> Hypothesis:
    return Hypothesis(name, prompt=partial(_without, places))


def _cut_runs(length: int, ids: list[int]) -> list[int]:
    """The ids with every long run of one id cut to a length; all of them if none would be left."""
    cut: list[int] = []
    for _, group in groupby(ids):
        run = list(group)
        cut += run[:length] if len(run) >= _RUN else run
    return cut or ids


def _expand(token: int, count: int, ids: list[int]) -> list[int]:
    """The ids with each placeholder so many times."""
    expanded: list[int] = []
    for i in ids:
        expanded += [i] * count if i == token else [i]
    return expanded


MOST_MISSING = 4  # tokens from either end of the prompt
EXPANDED = (4, 16, 64, 256)  # patches of an image
_RUN = 4  # tokens: digits and blank lines repeat less often


def _token_ids(config: Any, *names: str) -> dict[str, int]:
    """The special tokens in the configuration; the first of several."""
    token_ids = {}
    for name in names:
        ids = getattr(config, f"{name}_token_id", None)
        if ids is not None:
            token_ids[name] = ids[0] if isinstance(ids, list) else int(ids)
    return token_ids


def _without(places: Sequence[int], ids: list[int]) -> list[int]:
    """The ids without those at some places, counted from either end; all of them if none would
    be left.
    """
    missing = {place % len(ids) for place in places}
    return [token for i, token in enumerate(ids) if i not in missing] or ids


def _rope(name: str, frequencies: Frequencies) -> Hypothesis:
    """Change the inverse frequencies in every rotary embedding of the model."""

    def changed(model: Any) -> AbstractContextManager[None]:
        changes = []
        for module in model.modules():
            for attribute, buffer_F in module.named_buffers(recurse=False):
                if attribute.endswith("inv_freq"):
                    changes.append((module, attribute, frequencies(buffer_F)))
        return _set(changes)

    return Hypothesis(name, changed=changed)


def _with_parameters(name: str, parameters: dict[str, Any]) -> Hypothesis:
    """Rotary embeddings built by transformers from the model's base and other `rope_parameters`."""

    def changed(model: Any) -> AbstractContextManager[None]:
        import torch
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        config = deepcopy(model.config.get_text_config())
        config.rope_parameters = {"rope_theta": config.rope_parameters["rope_theta"]} | parameters
        changes: list[tuple[Any, str, Any]] = []
        for module in model.modules():
            frequency_F = getattr(module, "inv_freq", None)
            if not isinstance(frequency_F, torch.Tensor):
                continue
            if parameters["rope_type"] == "default":
                compute = module.compute_default_rope_parameters
            else:
                compute = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
            new_F, scaling = compute(config, device=frequency_F.device)
            # Some models ignore the device
            changes.append((module, "inv_freq", new_F.to(frequency_F)))
            changes.append((module, "attention_scaling", scaling))
        return _set(changes)

    return Hypothesis(name, changed=changed)


@contextmanager
def _set(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes of modules temporarily; a module without a scaling scales by 1."""
    before = [(module, name, getattr(module, name, 1.0)) for module, name, _ in changes]
    try:
        for change in changes:
            setattr(*change)
        yield
    finally:
        for original in before:
            setattr(*original)
