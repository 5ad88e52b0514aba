"""The engine on a CUDA device, with kernels where there are some and references elsewhere: as on the CPU."""

import pytest
import torch
from conftest import TINY_LAYER_IDS, make_tiny_drafter, make_tiny_target

from dflash_paged.attention import draft_attention, explain_backend, prefill_attention
from dflash_paged.engine import Engine
from dflash_paged.evaluate import Judge, calibrate_drafter, collect_projections, environment
from dflash_paged.manager import KVCacheManager
from dflash_paged.memory import LayerSpec
from dflash_paged.store import PageView, read_rows_ref, store_draft_context, store_kv
from dflash_paged.target import PagedTarget

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = [list(range(5, 75)), [9] * 40, list(range(90, 10, -2)), [7, 8, 9]]


@pytest.fixture(autouse=True)
def ieee_products():
    """fp32 products are IEEE here, never TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(scope="module")
def cuda_models():
    return make_tiny_target().cuda(), make_tiny_drafter().to("cuda")


def test_environment_names_the_device():
    """A recorded measurement says which device and driver made it."""
    env = environment()
    print(env)
    assert "CPU" not in env["device"] and env["driver"]


@pytest.mark.parametrize("context", ["paged", "dense"])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4])
def test_engine_is_lossless_on_cuda(cuda_models, context, num_draft_tokens):
    """Greedy tokens equal `generate`'s on the same device, cold and on a prefix hit, ties settled in float64."""
    model, drafter = cuda_models
    engine = Engine(
        PagedTarget(model, TINY_LAYER_IDS), drafter, context=context, num_draft_tokens=num_draft_tokens,
        max_batch_size=3, max_seq_len=128, max_step_tokens=48,
    )
    judge = Judge(model, PROMPTS, 32)
    for _ in range(2):
        for i, result in enumerate(engine.generate(PROMPTS, 32)):
            same, ties = judge(i, result.token_ids)
            assert same, (i, ties)
        engine.manager.check_invariants()


def test_engine_with_several_groups_is_lossless_on_cuda():
    """Pitfall 21: a target and a drafter with full and sliding layers, a table and slots a group; cold, then on a hit."""
    from test_target import TARGETS

    model = TARGETS["qwen3-sliding"]().cuda()
    drafter = make_tiny_drafter(
        layer_types=["sliding_attention", "full_attention"], use_sliding_window=True, sliding_window=12, is_causal=False,
    ).to("cuda")
    engine = Engine(
        PagedTarget(model, TINY_LAYER_IDS), drafter, max_batch_size=3, max_seq_len=128, max_step_tokens=48,
        tokens_per_block=8,
    )
    assert engine.manager.num_groups == 3
    judge, lengths = Judge(model, PROMPTS, 32), []
    for _ in range(2):
        results = engine.generate(PROMPTS, 32)
        for i, result in enumerate(results):
            same, ties = judge(i, result.token_ids)
            assert same, (i, ties)
        lengths.append(sum(r.stats.num_verify_passes for r in results))
        engine.manager.check_invariants()
    assert sum(r.stats.num_reused_tokens for r in results) > 0 and lengths[0] == lengths[1]


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_engine_is_lossless_with_fp8_draft_pages_on_cuda(cuda_models, mode):
    """The draft's precision never reaches the output: calibrated fp8 pages, greedy tokens equal `generate`'s."""
    model, drafter = cuda_models
    options = dict(max_batch_size=3, max_seq_len=128, max_step_tokens=48)
    make = lambda dtype: Engine(
        PagedTarget(model, TINY_LAYER_IDS), drafter, draft_kv_dtype=dtype,
        draft_attention_mode="exact" if dtype == "inherit" else mode, **options,
    )
    calibrate_drafter(drafter, collect_projections(make("inherit"), PROMPTS, 16))
    judge = Judge(model, PROMPTS, 32)
    engine = make("float8_e4m3fn")
    assert engine.context.pages[0].dtype == torch.float8_e4m3fn
    assert engine.context.pages[0].v_layout == ("row" if mode == "exact" else "transposed")
    for i, result in enumerate(engine.generate(PROMPTS, 32)):
        assert judge(i, result.token_ids)[0], i
    assert len(engine.workspaces.made) == 2  # the target's geometry and the draft's


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_store_and_attention_agree_with_the_cpu(dtype):
    """The same rows give the same codes on both devices, and the kernels what the references give."""
    torch.manual_seed(0)
    rows, table, lens = 70, torch.tensor([[4, 1, 3], [0, 2, -1]], dtype=torch.int32), (70, 33)
    k, v = torch.randn(rows, 3, 64), torch.randn(rows, 3, 64)
    q, k_noise, v_noise = torch.randn(2, 8, 9, 64), torch.randn(2, 8, 3, 64), torch.randn(2, 8, 3, 64)
    found = {}
    for device in ("cpu", "cuda"):
        pages = torch.zeros(2, 5, 32, 3, 64, device=device).to(dtype)
        scale = torch.full((3,), 0.02, device=device) if dtype == torch.float8_e4m3fn else None
        view = PageView(pages[0], pages[1], k_scale=scale, v_scale=scale)
        for r, n in enumerate(lens):
            where = torch.arange(n)
            slots = (table[r, where // 32].long() * 32 + where % 32).to(device)
            store_kv(k[:n].to(device), v[:n].to(device), slots, view)
        starts, ends = (torch.tensor(x, dtype=torch.int32, device=device) for x in ((0, 5), lens))
        args = (view, table.to(device), starts, ends)
        draft = draft_attention(q.to(device), *args, k_noise.to(device), v_noise.to(device))
        flat = [x.flatten(0, 1).to(device) for x in (q, k_noise, v_noise)]
        bounds = torch.tensor([0, 8, 16], dtype=torch.int32, device=device)
        prefill = prefill_attention(flat[0], view, args[1], bounds, starts, ends, flat[1], flat[2])
        found[device] = [*read_rows_ref(view, slots), draft, prefill]
        assert explain_backend(view).name == ("reference" if device == "cpu" else "triton")
    codes, results = found["cuda"][:2], found["cuda"][2:]
    assert all(torch.equal(a.cpu(), b) for a, b in zip(codes, found["cpu"][:2]))
    limit = 1e-3 if dtype == torch.float8_e4m3fn else 2e-5  # fp32 queries meet fp8 pages as fp16
    for a, b in zip(results, found["cpu"][2:]):
        torch.testing.assert_close(a.cpu(), b, rtol=limit, atol=limit)


def test_draft_context_store_agrees_with_the_cpu(cuda_models):
    """Norm and RoPE of K, and V as it is, through slots with padding; canary rows stay."""
    torch.manual_seed(0)
    drafter = {"cpu": make_tiny_drafter(), "cuda": cuda_models[1]}
    features, positions = torch.randn(11, 144), torch.arange(3, 14)
    slots = torch.tensor([[5, 6, -1, 8, 9, 10, 11, -1, 13, 14, 15]])
    found = {}
    for device, model in drafter.items():
        model.ensure_positions(32)
        manager = KVCacheManager(
            target_layers=[LayerSpec(2, 16, "float32")], draft_layers=model.config.layer_specs("float32"),
            tokens_per_block=8, num_blocks=4, max_seq_len=16, max_batch_size=1, num_lookahead_tokens=5, device=device,
        )
        pages = [manager.page_view(i) for i in (1, 2)]
        for page in pages:
            page.k.fill_(7.0)
            page.v.fill_(7.0)
        store_draft_context(
            model.project_context(features.to(device)), positions.to(device), slots.to(device), pages, [0, 0],
            cos_sin=model.cos_sin, k_norm_weight=model.fused_kv()[2], eps=model.config.rms_norm_eps,
        )
        found[device] = torch.stack([x for p in pages for x in (p.k.cpu(), p.v.cpu())])
    torch.testing.assert_close(found["cuda"], found["cpu"], rtol=1e-5, atol=1e-5)
    assert (found["cuda"].flatten(1, 2)[:, 16:] == 7.0).all() and (found["cuda"].flatten(1, 2)[:, :5] == 7.0).all()
