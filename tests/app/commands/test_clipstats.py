"""`clipstats` and `algorithms` as users type them: defaults, custom masks, what a trace lacks,
and mistakes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.base.places import bundled
from mismatch_cli.rules.algorithms.table import TABLE
from tests.paths import ROOT

PAIR = ["-a", "grpo-clip-higher", "-a", "dppo-binary-tv"]
MASK = """
from mismatch_cli import Decision

FORMULA = "{r} > {limit}"

def trust_region(compared, advantage_T, *, limit: float = 1.5):
    return Decision(compared.ratio_T <= limit, compared.ratio_less_1_T)
"""


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A working folder with a run that holds the bundled trace."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(bundled("traces/fp8-kv"), tmp_path / "run" / "trace")
    return tmp_path


@pytest.fixture
def clipstats(typed):
    return partial(typed, "clipstats")


def written(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_without_an_argument_words_of_a_real_model_are_judged(tmp_path, monkeypatch, clipstats):
    monkeypatch.chdir(tmp_path)
    code, out, err = clipstats("--no-plots")
    assert code == 0
    assert "bundled" in err and "9.6 × AS STRICT" in out
    skipped = written(tmp_path / "clipstats")["skipped"]
    assert skipped and all("needs the top" in row["reason"] for row in skipped)


def test_a_training_run_is_judged_by_the_whole_table(tmp_path, monkeypatch, clipstats):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = clipstats("fp8-kv")
    assert code == 0
    assert "Wrote clipstats/report.html" in err
    for words in (
        "Same strictness",
        "Overlap",
        "Bad updates",
        "1.8 × AS STRICT",
        "gspo-rollout",
        "mask-0.8",
        "29 more",
    ):
        assert words in out
    assert len(out.splitlines()) <= 40 and max(map(len, out.splitlines())) <= 80
    result = written(tmp_path / "clipstats")
    assert [row["name"] for row in result["algorithms"]] == list(TABLE) and not result["skipped"]
    page = (tmp_path / "clipstats" / "report.html").read_text(encoding="utf-8")
    assert set(re.findall('<figure id="figure-(.*?)">', page)) == {
        "mask-regions",
        "blocked-by-probability",
        "blocked-over-steps",
        "bad-updates",
        "sweeps",
        "overlap",
    }
    assert clipstats(*PAIR, "--quiet")[0] == 0  # overwritten: it was ours
    (tmp_path / "clipstats" / "summary.json").write_text("{}")
    assert clipstats(*PAIR, "--quiet")[0] == 1  # not ours


def test_what_everybody_calls_dppo_and_grpo_is_said_once(here, clipstats):
    code, out, err = clipstats("run", "-a", "dppo:delta=0.1", "-a", "grpo", "--compare", "dppo:delta=0.1", "grpo",
        "--json",
    )  # fmt: skip
    assert code == 0
    assert {row["name"] for row in json.loads(out)["algorithms"]} == {
        "dppo-binary-tv:delta=0.1", "grpo-clip-higher",
    }  # fmt: skip
    lines = [line for line in err.splitlines() if " is " in line]
    assert lines == [
        "dppo:delta=0.1 is dppo-binary-tv:delta=0.1; others are dppo-binary-kl and dppo-topk-tv.",
        "grpo is grpo-clip-higher; others are ppo and ppo-dual-clip.",
    ]


def test_a_run_gets_its_own_clipstats_which_are_overwritten(here, clipstats):
    for _ in range(2):
        assert clipstats("run", *PAIR, "--quiet")[0] == 0
    _, out, _ = clipstats("run", *PAIR, "--json", "--quiet")
    assert json.loads(out) == written(here / "run" / "clipstats")
    assert len(json.loads(out)["algorithms"]) == 2


def test_a_file_without_its_ending_is_suggested(here, clipstats):
    assert "with its ending" not in clipstats("run", "-a", "zmask")[2]
    (here / "zmask.py").write_text(MASK)
    code, _, err = clipstats("run", "-a", "zmask:limit=2")
    assert code == 2 and "Your own file is typed with its ending: zmask.py." in err
    (here / "of,two.py").write_text(MASK)
    assert clipstats("run", "-a", "of,two.py", "--json", "--quiet")[0] == 0


@pytest.mark.parametrize("number", [1, 3])
def test_a_file_or_a_variable_names_two_to_compare(here, clipstats, monkeypatch, number):
    names = ["zz"] * number
    (here / "settings.toml").write_text(f"compare = {json.dumps(names)}")
    _, _, err = clipstats("run", "--config", "settings.toml")
    assert "'--compare' in settings.toml: it needs 2 values, NAME NAME." in " ".join(err.split())
    monkeypatch.setenv("MISMATCH_COMPARE", " ".join(names))
    _, _, err = clipstats("run")
    assert "'--compare' in MISMATCH_COMPARE: it needs 2 values, NAME NAME." in " ".join(err.split())


@pytest.mark.parametrize("command", ["clipstats", "diagnose", "gate"])
def test_without_an_argument_the_run_that_is_here_is_named(here, typed, command):
    line = f"run is here: mismatch-cli {command} run"
    assert line in typed(command, "--json")[2]
    assert line not in typed(command, "run", "--json")[2]
    shutil.rmtree(here / "run")
    assert " is here: " not in typed(command, "--json")[2]


def test_algorithms_are_compared_in_the_order_that_was_typed(here, clipstats):
    names = ["ppo-rollout", "dppo-binary-tv"]
    for first, second in (names, names[::-1]):
        _, out, _ = clipstats("run", "-a", first, "-a", second, "--quiet")
        assert written(here / "run" / "clipstats")["compared"] == [first, second]
        assert out.index(f"\n{first} ") < out.index(f"\n{second} ")
        assert f"clipstats run -a {first} -a " in out


def test_parameters_custom_masks_and_what_is_compared(here, clipstats):
    (here / "my_mask.py").write_text(MASK)
    flags = [
        "-a",
        "binary-tv:max_tv=0.1,anchor=recomputed",
        "--compare",
        "my_mask.py:limit=1.2",
        "clip-higher",
    ]
    code, out, _ = clipstats("run", *flags, "--quiet")
    assert code == 0
    result = written(here / "run" / "clipstats")
    assert [row["name"] for row in result["algorithms"]] == [
        "binary-tv:max_tv=0.1,anchor=recomputed",
        "my_mask:limit=1.2",
        "grpo-clip-higher",
    ]
    assert result["compared"] == ["my_mask:limit=1.2", "grpo-clip-higher"]
    assert result["algorithms"][1]["blocked_when"] == "r > 1.2"
    assert "Only my_mask:limit=1.2 blocks" in out and "Only grpo-clip-higher blocks" in out


def test_a_mask_that_fails_on_real_data_is_named(here, clipstats):
    (here / "short.py").write_text(
        MASK.replace("compared.ratio_T <= limit", "compared.ratio_T[:2] <= limit")
    )
    code, _, err = clipstats("run", "-a", "short.py", "--quiet")
    assert code == 1 and "short.py must return" in err and "shape (2,)" in err and "bug" not in err


TOUCHES = """
from mismatch_cli import Decision

def trust_region(compared, advantage_T):
    print("a word")
    for column in (compared.ratio_T, compared.logp_current_T, compared.logp_anchor_T, compared.difference_T):
        column[:] = -0.1
    advantage_T[:] = 0
    return Decision(advantage_T == 0, advantage_T)
"""


def test_a_mask_that_changes_its_inputs_changes_no_other_number(here, clipstats):
    (here / "touches.py").write_text(TOUCHES)
    own = ["-a", "touches.py"]
    _, plain, _ = clipstats("run", *PAIR, "--json", "--quiet", "-o", "plain")
    for order, arguments in {"first": [*own, *PAIR], "last": [*PAIR, *own]}.items():
        code, out, err = clipstats("run", *arguments, "--json", "--quiet", "-o", order)
        assert code == 0 and "a word" in err
        alone, beside = (
            {row["name"]: row for row in json.loads(x)["algorithms"]} for x in (plain, out)
        )
        assert {name: beside[name] for name in alone} == alone
        assert json.loads(out)["sweeps"] == json.loads(plain)["sweeps"]


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("how", ["raise SystemExit(0)", "os._exit(0)"])
def test_a_mask_that_ends_the_program_is_an_error(here, clipstats, workers, how):
    """On real data, where it behaves on the two tokens on which masks are tried out; and when it
    is imported.
    """
    leaving = "import os\n" + MASK.replace(
        "    return", f"    if len(advantage_T) > 2: {how}\n    return"
    )
    early = here / "early.py"
    early.write_text(f"import os\n{how}\n{MASK}")
    code, out, err = clipstats("run", *PAIR, "-a", str(early), "--json", "--quiet")
    assert code == 1 and not out and "early.py tries to end the program" in err
    mask = here / "leaves.py"  # whose full name is new: a module is loaded once
    mask.write_text(leaving)
    code, out, err = clipstats(
        "run", *PAIR, "-a", str(mask), "--workers", workers, "--json", "--quiet"
    )
    assert code == 1 and not out and not (here / "run" / "clipstats" / "summary.json").exists()
    assert "leaves.py tries to end the program" in err and "bug" not in err


def test_workers_give_the_same_bits(here, clipstats):
    one, two = (
        clipstats("run", *PAIR, "--theory", "--workers", number, "--json", "--quiet")[1]
        for number in ("1", "2")
    )
    assert json.loads(one)["theory"] is not None
    assert one == two


@pytest.mark.slow
def test_equal_weights_say_not_applicable_instead_of_zero(tmp_path, monkeypatch, clipstats):
    """A trace that `probe` made, without a later checkpoint."""
    monkeypatch.chdir(tmp_path)
    assert (
        run(["probe", "--engine", "hf", "--num-prompts", "12", "--noise-responses", "0", "--quiet"])
        == 0
    )
    code, out, _ = clipstats("probe-model", "--quiet")
    assert code == 0
    result = written(tmp_path / "probe-model" / "clipstats")
    assert result["has"]["recomputed"] == "equal weights"
    skipped = {row["algorithm"]: row["reason"] for row in result["skipped"]}
    assert {"minirl", "ppo", "gspo", "mask-0.5-recompute"} <= set(skipped)
    assert all("not applicable" in skipped[name] for name in ("minirl", "ppo", "gspo"))
    assert {"grpo-clip-higher", "ppo-icepop"} <= {row["name"] for row in result["algorithms"]}
    assert (
        "cannot be judged" in out
        and "mismatch-cli rescore probe-model --trainer-model LATER --weights newer" in out
    )


def test_without_advantages_both_signs_are_analysed(tmp_path, monkeypatch, clipstats):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"text": f"Add {i} and 2."}) + "\n" for i in range(11))
    )
    made = [
        "probe",
        "--engine",
        "hf",
        "--prompts",
        "prompts.jsonl",
        "--prompt-field",
        "text",
        "--max-tokens",
        "20",
    ]
    assert run([*made, "--noise-responses", "0", "--quiet", "--output", "run"]) == 0
    code, out, _ = clipstats("run", *PAIR, "--quiet")
    assert code == 0
    result = written(tmp_path / "run" / "clipstats")
    assert not result["has"]["advantages"]
    for row in result["algorithms"]:
        assert (
            row["blocked"]["all"]["value"] is None
            and row["blocked"]["positive"]["value"] is not None
        )
    assert "if A > 0" in out and "MISMATCH_ANSWER_FIELD" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-a", "grpo-clip-hihger"], 2, "Did you mean grpo-clip-higher"),
        (["-a", "dppo-binary-tv:max_tv=-0.1"], 2, "δ=-0.1 is out of range"),
        (["-a", "icepop:band_low=3,band_high=2"], 2, "band_low=3, band_high=2 is out of range"),
        (["-a", "dppo-binary-tv:max_vt=0.1"], 2, "Did you mean max_tv"),
        (["-a", "nowhere.py"], 2, "nowhere.py does not exist"),
        (["-a", "ppo,nowhere.py"], 2, "Name each by itself: -a ppo -a nowhere.py"),
        (["-a", "ppo:epsilon=0.2,dppo"], 2, "and each of several algorithms by itself"),
        (["--compare", "ppo", "nothing"], 2, "Unknown algorithm 'nothing'"),
        (["gone"], 1, "gone does not exist"),
        (["--workers", "0"], 2, "--workers"),
        (["--workers", "²"], 2, "--workers ² is invalid"),
        (["-o", "/proc/nope"], 1, "/proc/nope cannot be written"),
        (["-a", "dppo-binary-tv:max_tv=1.5"], 2, "choose a number from 0 to 1"),
        (["-a", "top-k-tv:k=30"], 1, "needs the top 30 log-probs, but the trace has the top 20"),
    ],
)
def test_mistakes(here, clipstats, arguments, code, message):
    got, _, err = clipstats(*(["run"] if "gone" not in arguments else []), *arguments, "--quiet")
    assert got == code
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_the_control_blocks_nothing(tmp_path, monkeypatch, clipstats):
    """float32 on both sides, equal weights."""
    monkeypatch.chdir(tmp_path)
    assert clipstats(str(bundled("traces") / "float32"), *PAIR, "-o", "out", "--quiet")[0] == 0
    for row in written(tmp_path / "out")["algorithms"]:
        assert row["blocked"]["all"]["value"] == 0


def test_algorithms_are_printed_with_their_formulas(capfd):
    assert run(["algorithms", "--json"]) == 0
    table = json.loads(capfd.readouterr().out)
    assert [row["name"] for row in table["algorithms"]] == list(TABLE)
    rows = {row["name"]: row for row in table["algorithms"]}
    assert rows["grpo-clip-higher"]["blocked_when"] == (
        "A > 0 and r > 1 + ε_high, or A < 0 and r < 1 − ε_low (ε = 0.2 / 0.28)"
    )
    assert rows["ppo-tis"]["weight"] == "r′ · min(ρ, 2)" and rows["pg-tis"]["aliases"] == ["cispo"]
    assert run(["algorithms"]) == 0
    out = capfd.readouterr().out
    for row in table["algorithms"]:
        assert row["name"] in out and row["source"].split(":")[0] in " ".join(out.split())


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--json"])
def test_a_reader_that_stops_early_is_not_an_error(here, flags):
    command = (
        f"{sys.executable} -m mismatch_cli clipstats run -a ipo --quiet {flags} -o out | head -n 3"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 3 and not done.stderr


def test_an_algorithm_that_was_named_is_left_out_with_its_reason(here, clipstats):
    """On the screen, and what to type for it; of a whole table only how many."""
    equal = str(bundled("traces") / "bfloat16")
    code, out, _ = clipstats(equal, "-a", "ppo", "-a", "gspo", "-a", "dppo-binary-tv")
    assert code == 0
    said = " ".join(out.split())
    assert "ppo, gspo: not applicable: the trainer has the weights that sampled" in said
    assert "--trainer-model LATER --weights newer" in said and "--full says why" not in said
    out = " ".join(clipstats(equal)[1].split())
    assert "cannot be judged on this trace: --full says why" in out and "not applicable" not in out
