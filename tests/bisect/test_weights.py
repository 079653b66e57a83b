"""An engine's live tensors under the trainer's names: all equal if nothing is wrong, and each
fault by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.bisect.altered_model import folder_with, folder_with_config
from mismatch_cli.bisect.model_config import config_differences
from mismatch_cli.bisect.relations import difference
from mismatch_cli.bisect.weights import compare_adapters, compare_weights, group_name
from mismatch_cli.models.engines import EngineSettings, create_engine
from mismatch_cli.models.loading import load_causal_lm
from mismatch_cli.models.saved_tensors import SavedTensors
from tests.changed_models import WEIGHTS, copied, scaled
from tests.families import FAMILIES, save_family
from tests.lora import save_adapter


@contextmanager
def running(
    model: str,
    engine: str = "vllm",
    dtype: str = "float32",
    adapter: str | None = None,
    **extra: Any,
) -> Iterator[Any]:
    sampling, extra = SamplingSettings(max_tokens=4), extra | {"max_model_len": 64}
    settings = EngineSettings(model, sampling, 0, dtype=dtype, adapter=adapter, extra=extra)
    with closing(create_engine(engine, settings)) as started:
        yield started


ON_VLLM = (
    ("gemma2", "bfloat16"),
    ("phi", "float32"),
    ("gpt_neox", "bfloat16"),
    ("qwen3_moe", "float32"),
    ("gpt_oss", "bfloat16"),
)


@pytest.mark.slow
def test_every_tensor_of_vllm_is_read_and_equal(tmp_path):
    """Tied, reordered and biased by vLLM's Transformers backend; experts fused in the folder or
    not.
    """
    for family, dtype in ON_VLLM:
        model = save_family(tmp_path / dtype, family, getattr(torch, dtype))
        with running(model, dtype=dtype) as engine:
            comparison = compare_weights(engine, model)
        # Named, though not in the folder
        head = int(FAMILIES[family].settings.get("tie_word_embeddings", False))
        assert (comparison.unread, comparison.differing) == ({}, ()), (family, dtype)
        assert comparison.compared == len(SavedTensors(model).shapes) + head, (family, dtype)


@pytest.mark.slow
def test_every_tensor_of_hugging_face_is_read_and_equal(tmp_path):
    for family in ("phi", "gpt_neox", "mixtral", "gpt_oss", "qwen3_next"):
        model = save_family(tmp_path, family)
        with running(model, "hf") as engine:
            comparison = compare_weights(engine, model)
        assert (comparison.unread, comparison.differing) == ({}, ()), family
        assert comparison.compared >= len(SavedTensors(model).shapes), family


Q, K, UP = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
)
GATES = ["model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.gate_proj.weight"]
DOWN, OUT, NORM = (
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.norm.weight",
)
V = "model.layers.1.self_attn.v_proj.weight"
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROPE = {"rope_type": "default", "rope_theta": 500.0}


def _to_int8(weight: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    step = (weight.abs().max() if dim is None else weight.abs().amax(dim, keepdim=True)) / 127
    return (weight / step).round() * step


def _faults(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        Q: weights[Q] * 1.01,
        K: torch.randn_like(weights[K]) / 8,
        UP: torch.randn_like(weights[UP]) / 8,
        DOWN: _to_int8(weights[DOWN]),
        V: _to_int8(weights[V], dim=1),
        OUT: weights[OUT].bfloat16().float(),
        GATES[0]: weights[GATES[1]],
        GATES[1]: weights[GATES[0]],
    }


EXPECTED = {
    Q: ("scaled", "× 1.0100"),
    K: ("other", ""),
    UP: ("other", ""),
    DOWN: ("rounded", "to int8 values per tensor, step"),
    V: ("rounded", "to int8 values per row, steps"),
    OUT: ("rounded", "to bfloat16"),
    GATES[0]: ("other", f"the trainer's {GATES[1]}"),
    GATES[1]: ("other", f"the trainer's {GATES[0]}"),
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Any:
    """A trainer's folder, an engine's folder with faults, what was found with vLLM, and the
    tensors kept.
    """
    folder = tmp_path_factory.mktemp("planted")
    trainer = save_family(folder, "llama")
    faulty = copied(trainer, folder / "faulty", tensors=_faults)
    with running(faulty) as engine:
        return (
            trainer,
            faulty,
            compare_weights(engine, trainer, keep_in=folder / "kept"),
            folder / "kept",
        )


def _told(comparison: Any) -> dict[str, tuple[str, str]]:
    return {d.tensor: (d.relation, d.detail) for d in comparison.differing}


def _is_expected(differing: dict[str, tuple[str, str]]) -> None:
    assert differing.keys() == EXPECTED.keys()
    for name, (relation, detail) in EXPECTED.items():
        assert differing[name][0] == relation and differing[name][1].startswith(detail), (
            name,
            differing[name],
        )


def test_each_fault_is_named_by_tensor_and_relation(planted):
    trainer, faulty, comparison, _ = planted
    _is_expected(_told(comparison))
    assert comparison.unread == {} and comparison.compared == len(SavedTensors(trainer).shapes)
    by_name = {d.tensor: d for d in comparison.differing}
    assert by_name[Q].relative == pytest.approx(0.01, rel=1e-4) and by_name[Q].share > 0.99
    assert 1 < by_name[K].relative < 2 and 0.001 < by_name[OUT].relative < 0.003
    with running(faulty, "hf") as engine:
        _is_expected(_told(compare_weights(engine, trainer)))


@pytest.mark.slow
def test_faults_are_found_beneath_the_rounding_of_bfloat16(planted, tmp_path):
    """An engine in bfloat16: neither rounding by its dtype nor weights rounded to it are a
    difference.
    """
    trainer, faulty, _, _ = planted
    with running(trainer, "hf", "bfloat16") as engine:
        assert compare_weights(engine, trainer).differing == ()
    with running(faulty, "hf", "bfloat16") as engine:
        differing = _told(compare_weights(engine, trainer))
    assert differing.keys() == EXPECTED.keys() - {OUT}
    assert {name: differing[name][0] for name in differing} == {
        name: EXPECTED[name][0] for name in differing
    }


def test_the_result_as_json_and_in_groups(planted):
    _, _, comparison, _ = planted
    as_json = json.loads(json.dumps(comparison.to_json()))
    assert as_json["compared"] == comparison.compared and as_json["unread"] == []
    assert as_json["differing"][0].keys() == {"tensor", "relation", "relative", "detail"}
    groups = {group.relation: group for group in comparison.groups()}
    assert groups["scaled"].name == Q and groups["rounded"].name == "weights"
    assert set(groups["other"].tensors) == {K, UP, *GATES}
    assert group_name([Q, "lm_head.weight"]) == "weights"
    assert group_name([UP, GATES[0]]) == "model.layers.0.mlp"


def test_the_trainer_loads_with_the_engines_tensors(planted, tmp_path):
    trainer, faulty, comparison, tensors = planted
    for names in ([Q], [K, DOWN], [d.tensor for d in comparison.differing]):
        folder = folder_with(trainer, tensors, names, tmp_path / f"with-{len(names)}")
        loaded, own, engine = (
            load_causal_lm(str(m)).state_dict() for m in (folder, trainer, faulty)
        )
        assert all(
            torch.equal(loaded[name], (engine if name in names else own)[name]) for name in own
        )


@pytest.mark.slow
def test_a_head_that_kept_its_old_weights_is_found_and_given_to_the_trainer(tmp_path):
    """Without the head's name vLLM's reloading silently keeps the packed copy of a tied head."""
    old = save_family(tmp_path, "llama", tie_word_embeddings=True)
    new = copied(
        old,
        tmp_path / "new",
        tensors=lambda weights: {EMBEDDINGS: weights[EMBEDDINGS].flip(0).contiguous()},
    )
    with running(old) as engine:
        engine.llm.collective_rpc(
            "reload_weights",
            kwargs={"weights_iterator": iter(load_file(f"{new}/{WEIGHTS}").items())},
        )
        comparison = compare_weights(engine, new, keep_in=tmp_path / "kept")
        engine.load_weights(load_causal_lm(new))
        assert compare_weights(engine, new).differing == ()
    assert [(d.tensor, d.relation) for d in comparison.differing] == [(HEAD, "other")]
    loaded = load_causal_lm(str(folder_with(new, tmp_path / "kept", [HEAD], tmp_path / "with")))
    weights = load_file(f"{new}/{WEIGHTS}")
    assert torch.equal(loaded.lm_head.weight, weights[EMBEDDINGS].flip(0))
    assert torch.equal(loaded.model.embed_tokens.weight, weights[EMBEDDINGS])


@pytest.mark.slow
def test_replacing_only_the_embeddings_leaves_a_tied_head_as_it_is(tmp_path):
    trainer = save_family(tmp_path, "gemma2")
    faulty = copied(trainer, tmp_path / "faulty", tensors=scaled(EMBEDDINGS, 2))
    with running(faulty, "hf") as engine:
        comparison = compare_weights(engine, trainer, keep_in=tmp_path / "kept")
    assert _told(comparison) == {EMBEDDINGS: ("scaled", "× 2.0000"), HEAD: ("scaled", "× 2.0000")}
    own = load_file(f"{trainer}/{WEIGHTS}")[EMBEDDINGS]
    alone = load_causal_lm(
        str(folder_with(trainer, tmp_path / "kept", [EMBEDDINGS], tmp_path / "alone"))
    )
    assert torch.equal(alone.model.embed_tokens.weight, 2 * own) and torch.equal(
        alone.lm_head.weight, own
    )
    both = load_causal_lm(
        str(folder_with(trainer, tmp_path / "kept", [EMBEDDINGS, HEAD], tmp_path / "both"))
    )
    assert torch.equal(both.model.embed_tokens.weight, 2 * own) and torch.equal(
        both.lm_head.weight, 2 * own
    )


@pytest.mark.slow
def test_one_expert_is_named_and_replaced(tmp_path):
    """Each expert has its own tensor in the folder; vLLM and transformers fuse them."""
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    trainer = save_family(tmp_path, "qwen3_moe")
    faulty = copied(trainer, tmp_path / "faulty", tensors=scaled(name, 0.99))
    with running(faulty) as engine:
        comparison = compare_weights(engine, trainer, keep_in=tmp_path / "kept")
    assert _told(comparison) == {name: ("scaled", "× 0.9900")}
    loaded = load_causal_lm(
        str(folder_with(trainer, tmp_path / "kept", [name], tmp_path / "with"))
    ).state_dict()
    engine_model = load_causal_lm(faulty).state_dict()
    assert all(torch.equal(loaded[each], engine_model[each]) for each in loaded)


def _in_int8(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Linear layers as compressed-tensors saves them, with a scale per row."""
    saved = {}
    for name in [name for name in weights if "_proj" in name]:
        weight = weights[name].float()
        step = weight.abs().amax(1, keepdim=True) / 127
        saved |= {name: (weight / step).round().to(torch.int8), f"{name}_scale": step}
    return saved


def _quantised(model: str, into: Path) -> str:
    """int8 linear layers, whose inputs are rounded at run time."""
    whole = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": whole | {"strategy": "channel", "dynamic": False},
        "input_activations": whole | {"strategy": "token", "dynamic": True},
    }
    method = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    return copied(model, into, {"quantization_config": method}, _in_int8)


@pytest.mark.slow
def test_a_quantised_engine_is_read_under_the_trainers_names(tmp_path):
    trainer = save_family(tmp_path, "llama", torch.bfloat16)
    with running(_quantised(trainer, tmp_path / "int8"), dtype="bfloat16") as engine:
        comparison = compare_weights(engine, trainer, keep_in=tmp_path / "kept")
    saved = SavedTensors(trainer)
    assert (comparison.compared, comparison.unread) == (len(saved.shapes), {})
    assert {d.tensor for d in comparison.differing} == {
        name for name in saved.shapes if "_proj" in name
    }
    assert all(d.detail.startswith("to int8 values per row") for d in comparison.differing)
    assert [(group.name, group.relation) for group in comparison.groups()] == [
        ("weights", "rounded")
    ]
    loaded = load_causal_lm(
        str(
            folder_with(
                trainer, tmp_path / "kept", comparison.groups()[0].tensors, tmp_path / "with"
            )
        )
    )
    of_int8 = _to_int8(saved.read(DOWN).float(), dim=1)
    assert (loaded.state_dict()[DOWN].float() - of_int8).abs().max() <= 2**-8 * of_int8.abs().max()


@pytest.mark.slow
def test_the_model_weights_under_an_adapter_are_read(tmp_path):
    """Both engines wrap the adapted layers; adapters are compared by digest."""
    trainer = save_family(tmp_path, "llama")
    faulty = copied(trainer, tmp_path / "faulty", tensors=scaled(Q, 1.01))
    adapter = save_adapter(trainer, tmp_path / "adapter")
    for engine in ("vllm", "hf"):
        with running(faulty, engine, adapter=adapter) as started:
            comparison = compare_weights(started, trainer)
        assert (_told(comparison), comparison.unread) == ({Q: ("scaled", "× 1.0100")}, {}), engine
        assert comparison.compared == len(SavedTensors(trainer).shapes), engine
    assert compare_adapters({"adapter": adapter}, {"adapter": adapter}) is None
    assert compare_adapters({"adapter": adapter}, {}).tensor == "adapter"


def test_in_several_files_and_in_older_ones(tmp_path):
    """A trainer in shards, one saved as pickles, and names without the prefix of the layers."""
    trainer = save_family(tmp_path, "llama")
    faulty = copied(trainer, tmp_path / "faulty", tensors=scaled(Q, 1.01))
    model = load_causal_lm(trainer)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="200KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    for other in ("pickled", "short"):
        copied(trainer, tmp_path / other)
        (tmp_path / other / WEIGHTS).unlink()
    torch.save(dict(model.state_dict()), tmp_path / "pickled/pytorch_model.bin")
    short = {
        name.removeprefix("model."): weight
        for name, weight in load_file(f"{trainer}/{WEIGHTS}").items()
    }
    save_file(short, tmp_path / "short" / WEIGHTS, {"format": "pt"})
    with running(faulty, "hf") as engine:
        for other in ("sharded", "pickled", "short"):
            comparison = compare_weights(engine, str(tmp_path / other), keep_in=tmp_path / "kept")
            name = Q.removeprefix("model.") if other == "short" else Q
            assert (_told(comparison), comparison.unread) == ({name: ("scaled", "× 1.0100")}, {}), (
                other
            )
            if other == "pickled":
                with pytest.raises(MismatchError, match="pickles"):
                    folder_with(str(tmp_path / other), tmp_path / "kept", [name], tmp_path / "no")
                continue
            loaded = load_causal_lm(
                str(
                    folder_with(
                        str(tmp_path / other), tmp_path / "kept", [name], tmp_path / f"to-{other}"
                    )
                )
            )
            assert torch.equal(loaded.state_dict()[Q], load_file(f"{faulty}/{WEIGHTS}")[Q]), other


def test_what_one_side_lacks_is_named(tmp_path):
    trainer = save_family(tmp_path, "llama")
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    more = copied(trainer, tmp_path / "more", tensors=lambda _: {buffer: torch.ones(4)})
    less = copied(trainer, tmp_path / "less")
    weights = load_file(f"{trainer}/{WEIGHTS}")
    save_file(
        {name: weights[name] for name in weights if name != NORM},
        f"{less}/{WEIGHTS}",
        {"format": "pt"},
    )
    with running(trainer, "hf") as engine:
        assert compare_weights(engine, more).unread == {buffer: "the engine has no such tensor"}
        assert compare_weights(engine, less).unread == {
            NORM: "the trainer's folder has no such tensor"
        }
        (tmp_path / "less" / WEIGHTS).write_bytes(b"no tensors")
        with pytest.raises(MismatchError, match="cannot be read"):
            compare_weights(engine, less)


def test_differences_of_configurations(tmp_path):
    trainer = save_family(tmp_path, "qwen3_moe")
    rollout = save_family(
        tmp_path / "rollout", "qwen3_moe", num_experts_per_tok=1, rope_parameters=ROPE
    )
    assert config_differences(trainer, trainer) == []
    experts, rope = config_differences(rollout, trainer)
    assert (experts.key, experts.rollout, experts.trainer, experts.inner) == (
        "num_experts_per_tok",
        1,
        2,
        (),
    )
    assert (rope.key, rope.inner) == ("rope_parameters", ("rope_theta",))
    overrides = {"num_experts_per_tok": 1, "rope_parameters": ROPE, "head_dtype": "float32"}
    assert config_differences(trainer, trainer, overrides) == [experts, rope]
    assert json.loads(json.dumps(rope.to_json()))["rollout"] == rope.rollout
    folder = folder_with_config(
        trainer, {each.key: each.rollout for each in (experts, rope)}, tmp_path / "with"
    )
    assert config_differences(rollout, str(folder)) == []
    loaded, own = load_causal_lm(str(folder)), load_causal_lm(trainer)
    assert (loaded.config.num_experts_per_tok, loaded.config.rope_parameters["rope_theta"]) == (
        1,
        500.0,
    )
    assert all(
        torch.equal(weight, own.state_dict()[name]) for name, weight in loaded.state_dict().items()
    )


@pytest.mark.slow
def test_overrides_are_resolved_as_vllm_resolves_them(tmp_path):
    """vLLM ignores a `rope_theta` if `rope_parameters` has one already, so it is not a
    difference.
    """
    model = save_family(tmp_path, "llama")
    for overrides in ({"rope_theta": 500.0}, {"rope_parameters": ROPE, "rms_norm_eps": 0.01}):
        with running(model, hf_overrides=overrides) as engine:
            resolved = engine.llm.llm_engine.vllm_config.model_config.hf_text_config.to_dict()
        rollout_values = {
            difference.key: difference.rollout
            for difference in config_differences(model, model, overrides)
        }
        own = load_causal_lm(model).config.to_dict()
        assert {
            key for key in ("rope_parameters", "rms_norm_eps") if resolved[key] != own[key]
        } == rollout_values.keys()
        assert all(resolved[key] == value for key, value in rollout_values.items())


def test_adapters_are_compared_by_their_digests():
    none, one, other = (
        {},
        {"adapter": "a", "adapter_digest": "1" * 16},
        {"adapter": "b", "adapter_digest": "2" * 16},
    )
    assert (
        compare_adapters(none, none) is None
        and compare_adapters(one, one | {"adapter": "copy"}) is None
    )
    assert compare_adapters(one, none).detail == f"{'1' * 16} instead of none"
    assert compare_adapters(one, other).to_json() == {
        "tensor": "adapter",
        "relation": "other",
        "relative": None,
        "detail": f"{'1' * 16} instead of {'2' * 16}",
    }


def _weight(rows: int = 64, columns: int = 256) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)) / 8


def _in_fp8(weight: torch.Tensor) -> torch.Tensor:
    step = weight.abs().amax(1, keepdim=True) / 448
    return (weight / step).to(torch.float8_e4m3fn).float() * step


def _in_int4(weight: torch.Tensor) -> torch.Tensor:
    """Groups of 64 neighbours, each from its smallest to its largest value, as GPTQ and AWQ do."""
    groups = weight.reshape(-1, 64)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step = (high - low) / 15
    return ((groups / step).round() * step).reshape(weight.shape)


def test_how_a_tensor_was_rounded():
    fine = _weight()
    cases = {
        "to float16": fine.half().float(),
        "to bfloat16": fine.bfloat16().float(),
        "to float8_e4m3fn": fine.to(torch.float8_e4m3fn).float(),
        "to float8_e4m3fn values per row": _in_fp8(fine),
        "to int8 values per tensor": _to_int8(fine),
        "to int8 values per row": _to_int8(fine, dim=1),
        "to int4 values per 64 neighbours": _in_int4(fine),
    }
    for detail, coarse in cases.items():
        rounding = difference(coarse, fine)
        assert rounding.relation == "rounded" and rounding.detail.startswith(detail), (
            detail,
            rounding,
        )
        back = difference(fine, coarse)
        assert back.relation == "rounded" and back.detail.startswith(f"the trainer's {detail}"), (
            detail,
            back,
        )
    both = difference(_to_int8(fine, dim=1).bfloat16(), fine.bfloat16())
    assert both.detail.startswith("to int8 values per row")


def test_neither_rounding_nor_a_factor():
    fine = _weight()
    noise = torch.randn(fine.shape, generator=torch.Generator().manual_seed(4))
    for other in (
        noise / 8,
        fine + noise / 1000,
        fine.flip(0),
        fine.where(noise < 1, 0.0),
        fine * (1 + noise / 50),
    ):
        assert difference(other, fine).relation == "other"
        assert difference(other.bfloat16(), fine.bfloat16()).relation == "other"
    assert difference(fine[:32], fine).detail == "of shape (32, 256), not (64, 256)"
    assert difference(torch.full_like(fine, math.nan), fine).relation == "other"
    assert difference(fine, torch.zeros_like(fine)).relative == math.inf
    assert difference(-torch.zeros(4), torch.zeros(4)) is None


def test_small_factors_and_one_element():
    fine = _weight()
    assert difference(fine * 1.0001, fine).detail == "× 1.0001000"
    assert difference((fine * 1.01).bfloat16(), fine.bfloat16()).relation == "scaled"
    # As saved
    assert (
        difference(fine.bfloat16().float(), (fine.bfloat16() * 1.01).float()).relation == "scaled"
    )
    in_fp8 = (fine * 1.5).to(torch.float8_e4m3fn).float()
    assert difference(in_fp8, fine).relation == "scaled"
    assert difference(torch.tensor([1.5]), torch.tensor([1.0])).relation == "other"


def test_precision_of_the_trainer():
    """A bfloat16 folder computed in float32: a float32 engine with unrounded weights differs
    from it.
    """
    fine = _weight()
    assert difference(fine, fine.bfloat16()) is None
    assert difference(fine, fine.bfloat16(), torch.float32).detail == "the trainer's to bfloat16"
    assert difference(fine.bfloat16(), fine) is None
    assert (
        difference(fine.half(), fine, torch.bfloat16) is None
        and difference(fine, fine, torch.bfloat16) is None
    )
