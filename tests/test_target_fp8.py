"""fp8 pages of the target: scales from real rows, and speculation equal to plain decoding over the same pages."""

import pytest
import torch
from conftest import TINY_LAYER_IDS, make_tiny_target
from test_engine import Oracle, Script, run_all, watched

from dflash_paged.engine import Engine
from dflash_paged.target import PagedTarget, calibrate_target


@pytest.fixture(scope="module")
def oracle():
    return Oracle()


@pytest.fixture(scope="module")
def fp8_target(oracle):
    return calibrate_target(PagedTarget(oracle.model, TINY_LAYER_IDS), oracle.prompts)


def test_scales_are_the_largest_values_over_448_of_each_layer_and_head(fp8_target, oracle):
    model, seen = make_tiny_target(eos_token_id=None), torch.zeros(2, 4, 2)
    for prompt in oracle.prompts:
        cache = model(torch.tensor([prompt]), use_cache=True).past_key_values
        for layer in range(4):
            for i, rows in enumerate((cache.layers[layer].keys, cache.layers[layer].values)):
                seen[i, layer] = torch.maximum(seen[i, layer], rows[0].detach().abs().amax((1, 2)))
    for got, largest in zip(fp8_target.kv_scales, seen):
        assert got.shape == (4, 2) and got.dtype == torch.float32
        torch.testing.assert_close(got, largest / 448)
    assert fp8_target.config._attn_implementation == model.config._attn_implementation


@pytest.mark.parametrize("accept", [None, 0, 4])
def test_speculation_over_fp8_pages_equals_plain_decoding_over_fp8_pages(fp8_target, tiny_drafter, oracle, monkeypatch, accept):
    """Chunks, batches and rejections: every reader sees the rounded rows, never the projected ones."""
    options = dict(max_seq_len=96, tokens_per_block=8, kv_dtype="float8_e4m3fn", max_batch_size=3)
    plain = Engine(fp8_target, None, **options)
    prompts = [oracle.prompts[i] for i in (4, 9, 6, 2)]
    want = [r.token_ids for r in plain.generate(prompts, 20, stop_token_ids=[])]
    assert want != [oracle(p, 20) for p in prompts], "rounding that changes nothing tests nothing"

    class Known(Oracle):
        def __init__(self):
            self.texts = [p + w + [2] * 8 for p, w in zip(prompts, want)]

    pick = None if accept is None else lambda num_tokens: accept
    script = Script(monkeypatch, Known(), accept=pick)
    engine = script.engine = watched(Engine(
        fp8_target, tiny_drafter, draft_kv_dtype="float32", max_step_tokens=16, **options
    ))
    assert {p.dtype for i, p in enumerate(engine.manager.pools.tensors)} == {torch.float8_e4m3fn, torch.float32}
    for prompt in prompts:
        engine.add_request(prompt, 20, stop_token_ids=[])
    results = run_all(engine)
    assert [results[i].token_ids for i in range(4)] == want


def test_fp8_needs_scales_and_prompts(tiny_target, fp8_target, tiny_drafter):
    with pytest.raises(ValueError, match="kv_dtype: expected a target with calibrated scales"):
        Engine(PagedTarget(tiny_target), None, kv_dtype="float8_e4m3fn")
    with pytest.raises(ValueError, match="at least one row"):
        calibrate_target(PagedTarget(tiny_target), [[]])
    with pytest.raises(ValueError, match="kv_scales"):  # the draft inherits fp8 and has no scales of its own
        Engine(fp8_target, tiny_drafter, kv_dtype="float8_e4m3fn")
