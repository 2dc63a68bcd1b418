"""The command line: what scripts depend on, and what bad input gets."""

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from treewy.cache import POLICIES
from treewy.cli import doctor
from treewy.cli.doctor import Check
from treewy.cli.main import main
from treewy.cli.trials import TRIALS, Operands, Trial
from treewy.errors import BackendError
from treewy.hf.checkpoint import SHIPPED
from treewy.ops.dispatch import BACKENDS

KEYS = {
    "text",
    "token_ids",
    "num_verify_steps",
    "mean_accept_len",
    "accept_hist",
    "tokens_per_s",
    "state_bytes",
    "conv_bytes",
    "kv_bytes",
}
PROMPT = "The captain looked at the sea and"


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["generate", PROMPT, "--dtype", "float32", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Return the exit code and the one line a refused command prints."""
    code = main(list(arguments))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("\n")
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("treewy: ")
    return code, captured.err


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the shipped checkpoint, to be broken."""
    return Path(shutil.copytree(SHIPPED, tmp_path / "checkpoint"))


def test_json_has_the_contracts_keys(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, "--max-new-tokens", "12")
    assert result.keys() >= KEYS
    assert len(result["token_ids"]) == 12
    delivered = sum(int(length) * count for length, count in result["accept_hist"].items())
    assert delivered == 11
    assert result["mean_accept_len"] == pytest.approx(11 / result["num_verify_steps"])


@pytest.mark.parametrize("commit", POLICIES)
@pytest.mark.parametrize("shape", [("--chain", "3"), ("--tree", "3,3,3")])
def test_compare_holds_the_variants_side_by_side(
    capsys: pytest.CaptureFixture[str], commit: str, shape: tuple[str, str]
) -> None:
    result = run_json(capsys, "--max-new-tokens", "16", "--compare", "--commit", commit, *shape)
    compare = result["compare"]
    assert compare["equal"] is True
    assert compare["first_diff"] is None
    assert compare["none"]["token_ids"] == result["token_ids"]
    assert all(compare[policy]["token_ids"] == result["token_ids"] for policy in POLICIES)
    assert compare["transformers"]["first_diff"] is None
    assert compare["none"].keys() >= KEYS
    assert compare["reconstruct"]["state_bytes"] < compare["ring"]["state_bytes"]
    assert compare["reconstruct"]["state_bytes"] < compare["store_all"]["state_bytes"]
    assert compare[commit]["state_bytes"] == result["state_bytes"]


def test_store_all_holds_a_state_per_row_and_reconstruct_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, "--max-new-tokens", "16", "--compare", "--tree", "3,3,3")
    rows = 1 + 3 + 9 + 27
    config = json.loads((SHIPPED / "config.json").read_text())
    per_head = config["linear_value_head_dim"] * config["linear_key_head_dim"]
    num_layers = config["layer_types"].count("linear_attention")
    one_state = 4 * num_layers * config["linear_num_value_heads"] * per_head
    assert result["compare"]["store_all"]["state_bytes"] == (1 + rows) * one_state
    assert one_state < result["state_bytes"] < 3 * one_state


def test_other_drafters_and_budgets_decode_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """The shipped model drafting for itself is right wherever its likeliest token is drafted: in every step."""
    wanted = run_json(capsys, "--draft", "none", "--max-new-tokens", "13")["token_ids"]
    for options in (("ngram",), ("model", "--draft-model", str(SHIPPED)), ("mtp",)):
        result = run_json(capsys, "--draft", *options, "--tree", "best:16x3x4", "--max-new-tokens", "13")
        assert result["token_ids"] == wanted
        if options[0] == "model":
            assert result["accept_rate_by_depth"]["1"] == 1.0
            assert result["num_drafted"] <= 15 * result["num_verify_steps"]


def test_draft_none_takes_one_step_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, "--draft", "none", "--max-new-tokens", "8")
    assert result["num_verify_steps"] == 7
    assert result["accept_hist"] == {"1": 7}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", PROMPT, "--tree", "3,x"], "'3,x'"),
        (["generate", PROMPT, "--tree", "3,0"], "'3,0'"),
        (["generate", PROMPT, "--tree", ""], "''"),
        (["generate", PROMPT, "--tree", "best:0"], "got 0"),
        (["generate", PROMPT, "--tree", "best:16x"], "'best:16x'"),
        (["generate", PROMPT, "--draft", "model"], "Give --draft-model"),
        (["generate", PROMPT, "--draft-model", "/no/such/folder"], "draft mtp"),
        (["generate", PROMPT, "--draft", "model", "--draft-model", "/no/such/folder"], "/no/such/folder"),
        (["generate", PROMPT, "--chain", "-1"], "-1"),
        (["generate", PROMPT, "--chain", "3", "--tree", "3"], "Drop one"),
        (["generate", PROMPT, "--draft", "none", "--chain", "3"], "draft none"),
        (["generate", PROMPT, "--bogus"], "--bogus"),
        (["generate", PROMPT, "--max-new-tokens", "0"], "max_new_tokens"),
        (["generate", PROMPT, "--draft", "telepathy"], "telepathy"),
        (["generate", PROMPT, "--dtype", "float8"], "float8"),
        (["generate", PROMPT, "--device", "abacus"], "abacus"),
        (["generate", ""], "empty"),
        (["generate", "word " * 20_000], "context"),
        (["generate", PROMPT, "--model", "/no/such/folder"], "/no/such/folder"),
        (["teleport"], "teleport"),
    ],
)
def test_bad_usage_gets_one_clear_line_and_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    """Fault L09: options that contradict each other, or mean nothing, are refused at the start by name."""
    code, line = refused(capsys, *arguments)
    assert code == 2
    assert said in line


@pytest.mark.parametrize(
    "arguments",
    [
        ("--temperature", "0.8", "--compare"),
        ("--temperature", "-1"),
        ("--top-p", "0"),
        ("--top-k", "-3"),
        ("--min-p", "2"),
        ("--temperature", "0.8", "--seed", "-3"),
    ],
)
def test_impossible_sampling_is_refused(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    code, line = refused(capsys, "generate", PROMPT, *arguments)
    assert code == 2
    assert arguments[-1] in line or "compare" in line


def test_argmax_drafts_leave_the_text_of_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--max-new-tokens", "24", "--temperature", "0.9", "--seed", "4", "--drafts", "argmax")
    drafted, plain = run_json(capsys, *options), run_json(capsys, *options, "--draft", "none")
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["num_verify_steps"] < plain["num_verify_steps"]


def test_a_seed_makes_sampling_repeatable(capsys: pytest.CaptureFixture[str]) -> None:
    """The seed that a run without one reports gives the same text again, and another gives another."""
    options = ("--max-new-tokens", "24", "--temperature", "0.9", "--top-k", "50", "--top-p", "0.95", "--min-p", "0.01")
    first = run_json(capsys, *options)
    assert run_json(capsys, *options, "--seed", str(first["seed"]))["token_ids"] == first["token_ids"]
    assert run_json(capsys, *options, "--seed", str(first["seed"] + 1))["token_ids"] != first["token_ids"]
    assert "seed" not in run_json(capsys, "--max-new-tokens", "4")


def _truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def _drop_head(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("mtp.")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def _drop_layer(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if ".layers.1." not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (_truncate, "model.safetensors"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config"),
        (_drop_head, "mtp.fc.weight"),
        (_drop_layer, "layers.1."),
    ],
)
def test_a_bad_checkpoint_gets_one_clear_line(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, fault: object, said: str
) -> None:
    fault(checkpoint)
    before = sorted(checkpoint.iterdir())
    code, line = refused(capsys, "generate", PROMPT, "--model", str(checkpoint))
    assert code in (1, 2)
    assert said in line
    assert sorted(checkpoint.iterdir()) == before


def test_a_checkpoint_without_a_head_still_decodes_undrafted(
    capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    expected = run_json(capsys, "--max-new-tokens", "8")["token_ids"]
    _drop_head(checkpoint)
    result = run_json(capsys, "--max-new-tokens", "8", "--draft", "none", "--model", str(checkpoint))
    assert result["token_ids"] == expected


def run_process(*arguments: str, **options: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "treewy.cli.main", *arguments], capture_output=True, text=True, check=False, **options
    )


def test_defaults_alone_start_and_answer() -> None:
    """Fault G09: default settings did not start."""
    done = run_process("generate", stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 100


def test_a_prompt_may_be_piped_and_stdout_holds_the_text_alone() -> None:
    done = run_process("generate", "--max-new-tokens", "5", input=PROMPT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(PROMPT)
    assert "tokens/s" in done.stderr
    assert "\x1b[" not in done.stdout


def test_tokens_are_coloured_by_kind_on_a_terminal() -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "treewy.cli.main", "generate", PROMPT, "--max-new-tokens", "24"]
    environment = os.environ | {"TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        command, stdout=slave, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, env=environment
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            shown += os.read(master, 65536)
        except OSError:
            break
        if process.poll() is not None and not shown:
            break
    assert process.wait() == 0
    assert b"\x1b[32m" in shown  # accepted
    assert b"\x1b[33m" in shown or b"\x1b[36m" in shown  # recovered or bonus


def test_doctor_tries_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    """Every backend of every op that should work here: here, Triton's interpreter stands for a GPU."""
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    tried = {check["name"] for check in report["checks"]}
    assert all(check["works"] for check in report["checks"])
    assert "shipped checkpoint" in tried
    for trial in TRIALS:
        words = report["ops"][trial.op]
        assert list(words) == list(BACKENDS)
        for backend in ("eager", "reference", "triton"):
            assert words[backend] == "works"
            assert f"ops.{trial.op} {backend} on cpu" in tried
        if trial.op != "gdn.commit_verify":
            assert words["cuda"] == "none"
    word = "works" if torch.cuda.is_available() else "needs a GPU"
    assert report["ops"]["gdn.commit_verify"]["cuda"] == word
    on_gpus = {f"ops.gdn.commit_verify cuda on cuda:{i}" for i in range(torch.cuda.device_count())}
    assert {name for name in tried if " cuda on " in name} == on_gpus


def test_doctor_needs_no_gpu_and_no_interpreter() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = run_process("doctor", "--json", env=environment | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {words["triton"] for words in report["ops"].values()} == {"needs a GPU"}
    assert report["ops"]["gdn.commit_verify"]["cuda"] == "needs a GPU"
    assert not [check for check in report["checks"] if "triton" in check["name"] or "cuda" in check["name"]]


def test_doctor_in_the_interpreter_of_a_fresh_process() -> None:
    """Nothing that tests set up is there to help."""
    done = run_process("doctor", "--json", env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    assert {words["triton"] for words in json.loads(done.stdout)["ops"].values()} == {"works"}


@pytest.mark.parametrize("backend", ["eager", "reference", "triton"])
@pytest.mark.parametrize("fault", ["it raises", "it is wrong", "it is not a number"])
def test_doctor_fails_where_a_backend_does(
    backend: str, fault: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = TRIALS[1]

    def run(asked: str, on: Operands) -> torch.Tensor:
        if asked != backend:
            return sound.run(asked, on)
        if fault == "it raises":
            raise OSError("libsomething.so is not there\nand more")
        return sound.run(asked, on) * (float("nan") if fault == "it is not a number" else 1.001)

    def define(on: Operands) -> torch.Tensor:
        return sound.run("reference", on)

    monkeypatch.setattr("treewy.cli.trials.TRIALS", [sound._replace(run=run, define=define)])
    assert main(["doctor", "--json"]) == 1
    shown = capsys.readouterr()
    assert f"ops.conv.verify {backend} on cpu does not" in shown.err
    report = json.loads(shown.out)
    others = {"eager", "reference", "triton"} - {backend}
    assert report["ops"]["conv.verify"] == {backend: "does not work", "cuda": "none"} | dict.fromkeys(others, "works")
    if fault == "it raises":
        assert "libsomething.so is not there" in {check["detail"] for check in report["checks"]}


def test_doctor_calls_what_fails_on_one_device_broken() -> None:
    tried = [Check("on cuda:0", True, ""), Check("on cuda:1", False, "")]
    assert [doctor._word(True, tried), doctor._word(True, tried[:1])] == ["does not work", "works"]


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.op)
def test_doctor_knows_which_backends_an_op_has(trial: Trial) -> None:
    for backend in set(BACKENDS) - set(trial.backends):
        with pytest.raises(BackendError, match=f"has no {backend} kernel"):
            trial.run(backend, Operands("cpu", torch.float32))
    for backend in trial.kernels:
        if backend == "cuda":
            with pytest.raises(BackendError, match="must run on a GPU"):
                trial.run(backend, Operands("cpu", torch.bfloat16))
        else:
            trial.run(backend, Operands("cpu", torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.op)
def test_every_backend_of_every_op_works_on_a_gpu(trial: Trial) -> None:
    for backend in trial.backends:
        assert trial.error(backend, "cuda:0") <= trial.bound_of(backend)


def test_doctor_says_what_does_not_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("treewy.hf.checkpoint.SHIPPED", tmp_path)
    monkeypatch.setattr("treewy.cli.trials.TRIALS", ())
    assert main(["doctor"]) == 1
    assert "shipped checkpoint" in capsys.readouterr().err


def test_piped_text_keeps_its_tabs() -> None:
    done = run_process("generate", "def f():\n\treturn 1\n", "--max-new-tokens", "5")
    assert done.stdout.startswith("def f():\n\treturn 1\n")


def test_json_is_one_ascii_line_whatever_the_locale() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = run_process("generate", "naïve café —", "--max-new-tokens", "5", "--json", env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    json.loads(done.stdout)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tree", "5000"], "4096 rows"),
        (["--tree", "4000"], "3072"),
        (["--tree", "500,500"], "4096 rows"),
        (["--chain", "100000"], "4095"),
        (["--device", "meta"], "meta"),
        (["--model", "~nosuchuser/folder"], "~nosuchuser/folder"),
        (["--model", "nosuch\x00folder"], "nosuch"),
    ],
)
def test_odd_options_get_one_clear_line(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    code, line = refused(capsys, "generate", PROMPT, *arguments)
    assert code == 2
    assert said in line


def test_a_prompt_that_is_no_text_gets_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, line = refused(capsys, "generate", "\udcff\udcfe")
    assert code == 2
    assert "UTF-8" in line


@pytest.mark.parametrize("content", ["[]", '{"weight_map": ["x"]}', '{"weight_map": {"a": 1}}', "\x80"])
def test_a_bad_index_gets_one_clear_line(capsys: pytest.CaptureFixture[str], checkpoint: Path, content: str) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(content, encoding="latin-1")
    code, line = refused(capsys, "generate", PROMPT, "--model", str(checkpoint))
    assert code == 2
    assert "model.safetensors.index.json" in line


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "abc"),
        ("num_attention_heads", 0),
        ("layer_types", ["linear_attention"]),
        ("mamba_ssm_dtype", "float3"),
    ],
)
def test_a_bad_config_gets_one_line(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, key: str, value: object
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {key: value}))
    code, _ = refused(capsys, "generate", PROMPT, "--model", str(checkpoint))
    assert code in (1, 2)


def test_logits_that_are_not_finite_are_an_error(capsys: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    """Fault F10: NaN is reported, not decoded as token 0."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(checkpoint / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], torch.nan)
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    code, line = refused(capsys, "generate", PROMPT, "--json", "--model", str(checkpoint))
    assert code == 1
    assert "finite" in line


def test_a_full_disk_is_one_line_and_a_failure() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "treewy.cli.main", "generate", PROMPT, "--max-new-tokens", "3", "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "No space left" in done.stderr


def test_the_table_names_every_variant_once_and_its_title_is_about_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from treewy.hf.stock import Stock

    arguments = ["generate", PROMPT, "--dtype", "float32", "--max-new-tokens", "8", "--compare"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "same tokens" in shown
    for name in (*(f"mtp, {policy}" for policy in POLICIES), "no drafts", "transformers"):
        assert shown.count(name) == 1
    monkeypatch.setattr("treewy.cli.session.stock_generate", lambda *_: Stock([1, 2, 3], 1.0))
    assert main(arguments) == 0
    assert "tokens differ" in capsys.readouterr().out


def test_version_and_module_entry() -> None:
    done = subprocess.run([sys.executable, "-m", "treewy", "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("treewy ")


def test_a_small_model_runs_on_one_thread_unless_told_otherwise() -> None:
    code = (
        "import sys, torch; from treewy.cli.main import main;"
        "main(['generate', 'a b', '--max-new-tokens', '2']); print(torch.get_num_threads(), file=sys.stderr)"
    )
    for chosen, threads in ((None, "1"), ("2", "2")):
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        environment |= {"OMP_NUM_THREADS": chosen} if chosen else {}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        assert done.stderr.splitlines()[-1] == threads
