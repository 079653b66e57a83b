"""What can be checked at the start is: before a library is imported, a run starts or a file is
written.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mismatch_cli.app.cli import COMMANDS
from mismatch_cli.base import registry
from mismatch_cli.base.places import bundled
from tests.paths import ROOT

FLOAT32 = str(bundled("traces") / "float32")
HEAVY = (
    "torch",
    "transformers",
    "datasets",
    "peft",
    "vllm",
    "math_verify",
    "matplotlib",
    "pandas",
    "jinja2",
)
FILES = {
    "reward.py": "def score(response):\n    return 1\n",
    "broken.py": "import nothing_of_this_name\n",
    "preset.toml": 'algorithm = "dppo-binary-tv:max_tv=-1"\n',
    "few.jsonl": '{"problem": "1 + 1", "answer": "2"}\n',
    "unanswered.jsonl": '{"problem": "1 + 1"}\n',
    "chat.jsonl": '{"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], "answer": "2"}\n',
    "bad.jsonl": "{}\n[1]\n",
    "empty.jsonl": "",
    "unknown.toml": "[limits.kk]\nmax = 1\n",
    "negative.toml": "[limits.k3]\nmax_times_floor = -1\n",
    "taken/precious.txt": "mine",
    "merged/adapter_config.json": '{"r": 8, "lora_alpha": 16, "modules_to_save": ["lm_head"]}',
    "newer/manifest.json": '{"format": "mismatch-cli trace", "format_version": 99}',
    "damaged/manifest.json": "{",
}
NO_MODEL = ("/no/such/model", "There is no model folder /no/such/model")
NO_TRACE = ("gone", "gone does not exist. Name a run folder")
NEWER = ("../files/newer", "has trace format 99")
TAKEN = "--output ../files/taken"

# Command lines, each with part of its error. No library is imported for these.
SAMPLED = (
    ("--engine vlm", "Did you mean vllm?"),
    ("--engine hf --engine-arg seven=7", "has no argument seven"),
    ("--engine-arg seven", "is not KEY=VALUE"),
    ("--engine-url http://localhost", "needs --engine server"),
    ("--prompts gone.jsonl", "gone.jsonl does not exist"),
    ("--prompts ../files/bad.jsonl", "line 2 is not a JSON object"),
    ("--prompts ../files/empty.jsonl", "holds no prompts"),
    ("--prompt-field problm", "Did you mean problem?"),
    ("--prompt-template chatt", "Did you mean chat?"),
    ("--prompts ../files/chat.jsonl --prompt-template raw", "which needs a chat template"),
    ("--temperature 0", "greedy decoding has no sampling distribution"),
    ("--temperature inf", "greedy decoding has no sampling distribution"),
    ("--top-p 1.5", "top_p = 1.5 is out of range"),
    ("--threads 100000", "more than any machine has"),
    ("--rollout-dtype floot32", "Did you mean float32"),
    ("--reward ../files/reward.py:scores", "has no function 'scores'"),
    ("--reward gone.py:score", "no such function"),
    ("--resume", "has no run to resume"),
    ("--resume --force", "use one of them"),
    (TAKEN, "taken is not a run folder: it contains precious.txt"),
    NO_MODEL,
)
LIGHT = {
    "bisect": (
        NO_TRACE,
        ("--stages 7", "--stages 7 is invalid"),
        ("--prompts problems.jsonl", "--prompts is only for a model"),
        ("--trainer-model /no/such/model", NO_MODEL[1]),
    ),
    "guide": (("trainn", "trainn"),),
    "probe": (
        *SAMPLED,
        ("--trainer-model /no/such/model", NO_MODEL[1]),
        ("--trainer-dtype bf16", "Did you mean bfloat16"),
        ("--top-logprobs 999999", "exceeds the vocabulary of 2048 tokens"),
        ("--adapter /no/such/folder", "/no/such/folder is not an adapter"),
        ("--trainer-adapter ../files/merged", "contains full modules (lm_head)"),
        ("--merge-adapter", "needs an adapter of the trainer to merge"),
        ("--attn somebody/kernel", "is code on the hub"),
        ("--like gone", NO_TRACE[1]),
        ("--like ../files/damaged", "manifest.json is damaged"),
    ),
    "curate": (
        *SAMPLED,
        ("--prompts ../files/unanswered.jsonl", "has no problem with an answer"),
        ("--keep 0.8 0.2", "is not a range of accuracies"),
    ),
    "rescore": (
        NO_TRACE,
        NEWER,
        ("--trainer-model /no/such/model", NO_MODEL[1]),
        ("--trainer-adapter /no/such/folder", "/no/such/folder is not an adapter"),
        ("--weights older", "--weights older is invalid"),
        ("--temperature 0", "greedy decoding has no sampling distribution"),
        ("--trainer-dtype bf16", "Did you mean bfloat16"),
        (TAKEN, "taken is not a run folder: it contains precious.txt"),
        (f"--output {FLOAT32}/new", "overlaps the input"),
    ),
    "train": (
        ("--dataset ../files/chat.jsonl --prompt-template raw", "which needs a chat template"),
        ("--track trackio,wandd", "Unknown tracker 'wandd'. Did you mean wandb"),
        ("--as verll", "Unknown framework 'verll'. Did you mean verl"),
        ("--preset miniatur", "Unknown preset 'miniatur'. Did you mean miniature"),
        ("--engine vlm", "Unknown engine 'vlm'. Did you mean vllm"),
        ("--aggregation token", "Unknown aggregation 'token'. Did you mean token-mean"),
        ("--prompt-template chatt", "Unknown template 'chatt'. Did you mean chat"),
        ("--temperature 0", "greedy decoding has no sampling distribution"),
        ("--threads 100000", "more than any machine has"),
        ("--attn somebody/kernel", "is code on the hub"),
        ("--dataset gone.jsonl", "gone.jsonl does not exist"),
        ("--dataset ../files/few.jsonl", "is more than the 1 problems available"),
        ("--dataset ../files/unanswered.jsonl", "has no problem with an answer"),
        (
            "--dataset ../files/few.jsonl --prompts-per-step 1 --prompt-field problm",
            "Did you mean problem?",
        ),
        ("--eval-dataset gone.parquet", "gone.parquet"),
        (f"--model {NO_MODEL[0]}", NO_MODEL[1]),
    ),
    "report": (
        NO_TRACE,
        NEWER,
        ("../files/damaged", "manifest.json is damaged"),
        ("../files", "holds no trace: manifest.json is missing"),
        ("../files/few.jsonl", "is a file, but a trace is a folder"),
        ("--export xml", "--export: Unknown format 'xml'"),
        ("--figure rewrad", "Unknown figure 'rewrad'. Nearest: "),
        ("--figure paper-5 --json", "leave out --json"),
        ("--figure paper-5 --open", "leave out --open"),
        ("--figure paper-2 gone", NO_TRACE[1]),
        ("--as verll", "Did you mean verl"),
        ("--as verl --output here", "--as verl only prints"),
        ("--as verl --open", "--as verl only prints: leave out --open"),
        ("--json --open", "writes no page: leave out open, or name --output"),
        ("gone --as verl", NO_TRACE[1]),
        (TAKEN, "taken holds other files"),
    ),
    "clipstats": (
        NO_TRACE,
        NEWER,
        ("--json --open", "leave out open"),
        (TAKEN, "taken holds other files"),
    ),
    "compare": (
        (f"{FLOAT32} gone", NO_TRACE[1]),
        ("gone", "compare needs two traces, and one is named"),
        ("1 2 3 4 5 6 7", "7 traces are too many: name at most 6"),
        ("--pair mismatches", "Unknown pair 'mismatches'. Did you mean mismatch"),
        (TAKEN, "taken holds other files"),
    ),
    "diagnose": (
        NO_TRACE,
        ("--earlier-model /no/such/model", NO_MODEL[1]),
        ("--trainer-model ../files", "is not a model folder: it has no config.json"),
        (TAKEN, "taken holds other files"),
    ),
    "gate": (
        NO_TRACE,
        ("--baseline gone", NO_TRACE[1]),
        ("--junit ../files/few.jsonl", "already exists"),
    ),
    "watch": (
        ("gone/run", "nor does the folder around it"),
        ("--baseline gone", NO_TRACE[1]),
        ("--on-alarm true", "Without limits there are no alarms"),
        ("s3://bucket/run", "watch follows local files"),
        (f"--output {FLOAT32}/new {FLOAT32}", "overlaps the input"),
        (TAKEN, "taken already exists, but not from `watch`"),
    ),
    "import": (
        ("gone", "gone does not exist. Name a dump"),
        ("--format slimy --tokenizer /no/such/model", "Did you mean slime?"),
        ("--tokenizer /no/such/model", NO_MODEL[1]),
        ("--weights older", "--weights: Unknown kind of weights 'older'"),
        ("--top-k -1", "--top-k -1 is too small"),
        ("--columns response_ids=tokens --format trl", "leave out one"),
        (TAKEN, "taken is not a run folder: it contains precious.txt"),
    ),
    "algorithms": (("pg-is", "unexpected extra argument"),),
    "verdict": (
        ("trl", "Which metric of trl?"),
        ("0.02", "0.02 of which metric? Type its name too: mismatch-cli verdict NAME=0.02."),
        (
            "trl 0.02",
            "mismatch-cli verdict trl NAME=0.02. For names: mismatch-cli verdict --list trl",
        ),
        ("k3=nan", "'nan' is not a finite number"),
        ("k3=1e400", "is too large"),
        ("k3=2%", "not a percentage"),
        ("k3=0,02", "Write it as 0.02"),
        ("k3=1 --model qwen", "--model qwen does not say whether it has experts. Use dense-7b or"),
        ("k3=1 --model new/one-8B", "does not say whether it has experts. Use dense-8b or moe-8b"),
        ("k3=1 --dtype bf17", "Did you mean bf16"),
        ("k3=1 --top-p 2", "--top-p 2.0 is out of range"),
        ("--list trl k3=1", "leave out k3=1"),
        ("--list trll", "Unknown framework 'trll'. Did you mean trl"),
    ),
}
ALGORITHMS = (
    ("-a pg-is -a dpo-binary-tv", "Unknown algorithm 'dpo-binary-tv'. Did you mean"),
    ("-a pg-is -a dppo-binary-tv:max_tvv=0.1", "dppo-binary-tv has no parameter 'max_tvv'"),
    ("-a pg-is -a dppo-binary-tv:max_tv=-1", "δ=-1 is out of range"),
    ("-a gone.py", "gone.py does not exist"),
    ("-a ../files/broken.py", "cannot be imported"),
)
# These need tables of formulas (numpy) or of columns (Arrow).
WITH_NUMPY = {
    "gate": (
        ("--limits prime", "Did you mean prime-rl?"),
        ("--limits gone.toml", "gone.toml"),
    ),
    "train": (
        *ALGORITHMS,
        (
            "-a pg-is -a dppo-topk-tv:k=99999",
            "dppo-topk-tv:k=99999 needs the top 99,999 log-probs, but",
        ),
        ("--preset ../files/preset.toml", "δ=-1 is out of range"),
        ("--reward gone.py:score", "no such function"),
        ("--reward ../files/reward.py:scores", "has no function 'scores'"),
        ("--reward ../files/broken.py:score", "cannot be loaded (ModuleNotFoundError"),
        (TAKEN, "contains no training run"),
    ),
    "watch": (
        ("--limits prime", "Did you mean prime-rl?"),
        ("--algorithm dpo-binary-tv", "Unknown algorithm 'dpo-binary-tv'. Did you mean"),
    ),
    "clipstats": (*ALGORITHMS, ("--compare pg-is dpo", "Unknown algorithm 'dpo'")),
    "verdict": (
        ("mismatch abs_d_maen=1", "Did you mean abs_d_mean"),
        ("trl logp_diffrence/mean=1", "List all: mismatch-cli verdict --list trl"),
        ("verl k3=1", "It is a mismatch-cli metric: leave out verl"),
        ("verll k3=1", "neither a framework nor a metric. Did you mean the framework verl"),
        ("kl3 trl", "Did you mean the metric k3?"),
        ("oat-zero", "'oat-zero' is neither a framework nor a metric. List all"),
        ("trl_kl", "Did you mean the framework trl or roll, or the metric vllm_kl?"),
        ("k3=0.1 kl", "kl needs a number: mismatch-cli verdict kl 0.02"),
        ("trl k3", "It is a mismatch-cli metric: leave out trl"),
        ("k3=0.1 trl mean=1", "trl is a framework: name it first"),
        ("mean=0.1", "Name the framework first"),
        ("trl mean=0.1", "Type more of the name"),
        ("reward_mean=1", "describes responses, not a gap"),
        ("k3=-1", "it is always at least 0"),
        ("pearson=1.5", "between -1 and 1"),
    ),
}
# These need Arrow: the contents of a file, or the metrics of a framework.
WITH_ARROW = {
    "gate": (
        ("--limits ../files/unknown.toml", "Unknown metric 'kk'. Did you mean k3"),
        ("--limits ../files/negative.toml", "cannot be negative"),
    ),
    "import": (
        ("--columns respons_ids=tokens", "Did you mean response_ids"),
        ("--columns tokens", "'tokens' is not ours=theirs"),
        ("../files/few.jsonl", "unrecognized format"),
        ("../files/empty.jsonl", "is empty"),
    ),
    "train": (("--engine server", "belong together"),),
}
# Reads command lines and answers each with exit code, stdout, stderr, and the imported modules.
SCRIPT = """
import contextlib, io, json, sys
from mismatch_cli.app.cli import run
for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(json.loads(line))
    print(json.dumps([code, out.getvalue(), err.getvalue(), sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def refused(tmp_path: Path, *tables: dict[str, tuple[tuple[str, str], ...]]) -> set[str]:
    """Type every line of the tables in one new process; return what it has imported at the end."""
    for name, text in FILES.items():
        path = tmp_path / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    here = tmp_path / "here"
    here.mkdir()
    mistakes = [
        ([name, *line.split()], said)
        for table in tables
        for name in table
        for line, said in table[name]
    ]
    checked = [([*words, "--show-config"], said) for words, said in mistakes if words[0] == "train"]
    mistakes += [mistake for mistake in checked if "--output" not in mistake[0]]
    typed = "".join(f"{json.dumps(words)}\n" for words, _ in mistakes)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=typed,
        env=environment,
        cwd=here,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    imported: set[str] = set()
    otherwise = []
    for (words, said), answer in zip(
        mistakes, map(json.loads, process.stdout.splitlines()), strict=True
    ):
        code, out, err, modules = answer
        assert code in (1, 2) and not out, (words, answer)
        if said not in " ".join(err.split()):
            otherwise.append(f"{' '.join(words)}: {err.strip()}, not: {said}")
        assert "Traceback" not in err and "bug" not in err, err
        heavy = sorted(set(modules).intersection(HEAVY) - imported)
        assert not heavy, f"{' '.join(words)} has imported {', '.join(heavy)}"
        imported |= set(modules)
    assert not otherwise, "\n".join(otherwise)
    assert not list(here.rglob("*"))
    return imported


@pytest.mark.slow
def test_mistakes_are_reported_before_anything_is_imported(tmp_path):
    assert set(LIGHT) == set(registry.names(COMMANDS))
    assert not refused(tmp_path, LIGHT) & {"numpy", "pyarrow"}


def test_mistakes_in_an_algorithm_need_only_numpy(tmp_path):
    assert "pyarrow" not in refused(tmp_path, WITH_NUMPY)


def test_mistakes_in_a_file_need_only_numpy_and_arrow(tmp_path):
    assert "pyarrow" in refused(tmp_path, WITH_ARROW)
