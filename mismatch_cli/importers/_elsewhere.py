"""Files that only their own framework can open: the few lines to run there, which write the plain schema."""

from __future__ import annotations

import re
from pathlib import Path

from mismatch_cli.errors import MismatchError

SKYRL = """import json, pickle
batch = pickle.load(open({path!r}, "rb"))
with open("dump.jsonl", "w") as file:
    for i, sequence in enumerate(batch["sequences"]):
        real = batch["response_mask"][i].bool()
        ids = sequence[batch["attention_mask"][i].bool()].tolist()
        cut = len(ids) - int(real.sum())
        row = {{"prompt_ids": ids[:cut], "response_ids": ids[cut:]}}
        names = {{"logp_rollout": "rollout_logprobs", "logp_trainer": "action_log_probs", "advantage": "advantages",
                 "loss_mask": "loss_mask"}}
        for name, key in names.items():
            if batch.get(key) is not None:
                row[name] = batch[key][i][real].tolist()
        file.write(json.dumps(row) + "\\n")
"""

OAT = """import json
import pandas
prompts, references, buffers = pandas.read_pickle({path!r})
with open("dump.jsonl", "w") as file:
    for item in (item for buffer in buffers for item in buffer):
        row = {{"prompt_ids": list(item.prompt_ids), "response_ids": list(item.response_ids)}}
        row |= {{"logp_rollout": list(item.response_logprobs), "reward": float(sum(item.rewards))}}
        file.write(json.dumps(row) + "\\n")
"""

VERL_DATA_PROTO = """import json
from verl import DataProto
batch = DataProto.load_from_disk({path!r}).batch
width = batch["responses"].shape[1]
with open("dump.jsonl", "w") as file:
    for i in range(len(batch["responses"])):
        real = batch["attention_mask"][i].bool()
        row = {{"prompt_ids": batch["prompts"][i][real[:-width]].tolist()}}
        row |= {{"response_ids": batch["responses"][i][real[-width:]].tolist()}}
        row |= {{"logp_rollout": batch["rollout_log_probs"][i][real[-width:]].tolist()}}
        if "response_mask" in batch.keys():
            row["loss_mask"] = batch["response_mask"][i][real[-width:]].tolist()
        file.write(json.dumps(row) + "\\n")
"""

VERL_QUEUE = """import json, torch
data = torch.load({path!r}, weights_only=False)["tensordict"]
columns = {{name: list(data[name].unbind(0)) for name in ("prompts", "responses", "rollout_log_probs")}}
with open("dump.jsonl", "w") as file:
    for prompt, response, logp in zip(*columns.values()):
        row = {{"prompt_ids": prompt.tolist(), "response_ids": response.tolist(), "logp_rollout": logp.tolist()}}
        file.write(json.dumps(row) + "\\n")
"""

SLIME = """import torch
keep = ("tokens", "response_length", "loss_mask", "rollout_log_probs", "reward", "index", "remove_sample")
data = torch.load({path!r}, weights_only=False)
samples = [{{key: sample.get(key) for key in keep}} for sample in data["samples"]]
torch.save({{"rollout_id": data["rollout_id"], "samples": samples}}, "rollout_data.pt")
"""

# The framework, what its files are called, and the lines.
KNOWN = (
    ("SkyRL", r"global_step_\d+_training_input\.pkl", SKYRL),
    ("oat", r"buffer_step\d+\.pkl", OAT),
    ("verl", r".*\.dp", VERL_DATA_PROTO),
    ("verl", r"tq_batch\.pt", VERL_QUEUE),
    ("slime or miles", r"(eval_)?\d+\.pt", SLIME),
)


class NeedsItsFramework(MismatchError):
    """A file that is not opened here; `lines` are what to run where it can be."""

    def __init__(self, path: Path, reason: str) -> None:
        framework, self.lines = _known(path)
        written = "rollout_data.pt" if "torch.save" in self.lines else "dump.jsonl"
        advice = (
            f"Run the lines above where {framework} is installed, then: mismatch-cli import {written}"
            if self.lines
            else "Write it from its own framework in the plain schema instead: mismatch-cli import --schema"
        )
        super().__init__(f"{path} {reason}. {advice}")


def _known(path: Path) -> tuple[str, str]:
    """The framework that calls its files so, and the lines for this one; nothing for a name that nobody uses."""
    for framework, pattern, lines in KNOWN:
        if re.fullmatch(pattern, path.name):
            return framework, lines.format(path=str(path))
    return "", ""
