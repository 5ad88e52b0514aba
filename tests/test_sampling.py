"""Sampling: random numbers, distributions, the rejection rule, and that what comes out is the target's own."""

import math
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch

from dflash_paged import sampling
from dflash_paged.checks import NO_TOKEN
from dflash_paged.sampling import (
    ACCEPT,
    DRAFT,
    RESAMPLE,
    SamplingParams,
    accept_greedy,
    accept_sampled,
    accept_sampled_ref,
    read_sampling,
    sample,
    sample_drafts,
    sampling_probs,
    uniform,
)

# Limits of p-values. Some 130 are looked at here: at 1e-3 one correct sampler in 8 would be refused, at 1e-5 one in
# 800. The lowest, 1.2e-4 of the one-hot drafts, is chance: 24 other ranges of seeds gave it nothing below 0.03.
LIKELY, IMPOSSIBLE = 1e-5, 1e-9
LAST_U = 1 - 2.0**-53  # the largest number that `uniform` returns


def options(rows, temperature=1.0, top_p=1.0, top_k=0, device="cpu"):
    """The three tensors of `rows` equal requests."""
    return (
        torch.full((rows,), temperature, device=device),
        torch.full((rows,), top_p, device=device),
        torch.full((rows,), top_k, dtype=torch.int64, device=device),
    )


def p_value(counts, expected):
    """Pearson's chi-square test; cells that expect fewer than 5 are pooled, one that expects nothing must be empty."""
    counts, expected = counts.double().flatten(), expected.double().flatten()
    if counts[expected == 0].sum() > 0:
        return 0.0
    small = (expected > 0) & (expected < 5)
    observed, wanted = counts[expected >= 5], expected[expected >= 5]
    if expected[small].sum() >= 5:
        observed = torch.cat([observed, counts[small].sum()[None]])
        wanted = torch.cat([wanted, expected[small].sum()[None]])
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    degrees = torch.tensor(max(len(wanted) - 1, 1), dtype=torch.float64)
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))


# Options


@pytest.mark.parametrize(
    "given,want",
    [
        ({}, SamplingParams(0.0, 1.0, 0, 0)),
        ({"seed": 7}, SamplingParams(0.0, 1.0, 0, 7)),
        ({"default_seed": 9}, SamplingParams(0.0, 1.0, 0, 9)),
        ({"seed": 0, "default_seed": 9}, SamplingParams(0.0, 1.0, 0, 0)),
        ({"temperature": 0}, SamplingParams(0.0, 1.0, 0, 0)),
        ({"temperature": -0.0}, SamplingParams(0.0, 1.0, 0, 0)),
        ({"temperature": 0, "top_p": 0.5, "top_k": 3}, SamplingParams(0.0, 0.5, 3, 0)),
        ({"temperature": 1}, SamplingParams(1.0, 1.0, 0, 0)),
        ({"temperature": 1e-5}, SamplingParams(1e-5, 1.0, 0, 0)),
        ({"top_p": 0.9}, SamplingParams(1.0, 0.9, 0, 0)),
        ({"top_p": 1}, SamplingParams(1.0, 1.0, 0, 0)),
        ({"top_k": 5}, SamplingParams(1.0, 1.0, 5, 0)),
        ({"top_k": 0}, SamplingParams(1.0, 1.0, 0, 0)),
        ({"temperature": np.float32(0.5), "top_k": np.int64(4)}, SamplingParams(0.5, 1.0, 4, 0)),
        ({"temperature": 0.3, "seed": 2**63 - 1}, SamplingParams(0.3, 1.0, 0, 2**63 - 1)),
    ],
)
def test_options_mean_what_they_say(given, want):
    """Nothing given is greedy; top-p or top-k alone samples at temperature 1, never greedily (pitfalls 41, 42)."""
    params = read_sampling(**given)
    assert params == want and params.is_greedy == (want.temperature == 0)
    with pytest.raises(FrozenInstanceError):
        params.seed = 3


@pytest.mark.parametrize(
    "name,value",
    [("temperature", v) for v in (math.nan, math.inf, -math.inf, -1, -1e-9, 1e-9, 9.9e-6, 1e300, 10**400)]
    + [("temperature", v) for v in (True, "1", 1j, torch.tensor(1.0))]
    + [("top_p", v) for v in (0, -0.1, 1.0001, math.nan, math.inf, True, False, "0.9")]
    + [("top_k", v) for v in (-1, 1.0, 2**31, True, "5", math.nan)]
    + [("seed", v) for v in (-1, 2**63, 1.0, True, "0")],
)
def test_options_out_of_range_are_refused_by_name(name, value):
    """NaN, infinite, negative, tiny and wrongly typed values are errors, whatever the others say (pitfall 42)."""
    for others in ({}, {"temperature": 0}, {"temperature": 1.0}):
        with pytest.raises(ValueError, match=f"^{name}: expected .*, got "):
            read_sampling(**{**others, name: value})


# Random numbers


def splitmix(seed, position, stream):
    """`uniform` in Python's unbounded integers."""
    mask = 2**64 - 1

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    start = mix((seed + 0x1E3779B97F4A7C15 * (stream + 1)) & mask)
    state = mix((start + position * 0x9E3779B97F4A7C15) & mask)
    return (mix((state + seed) & mask) >> 11) * 2.0**-53


def test_uniform_is_the_written_function_of_seed_position_and_stream():
    """Bit for bit, for every shape, whatever else is in the batch: alone, in another order, repeated."""
    seeds = torch.tensor([0, 1, 2, 12345, 2**32, 2**63 - 1, 2**63 - 2, 7 << 40])
    positions = torch.tensor([0, 1, 2, 31, 4096, 131_071, 2**40]).expand(8, -1)
    for stream in (DRAFT, ACCEPT, RESAMPLE):
        u = uniform(seeds, positions, stream)
        assert u.dtype == torch.float64 and u.shape == (8, 7)
        assert u.tolist() == [[splitmix(s, p, stream) for p in positions[0].tolist()] for s in seeds.tolist()]
        assert torch.equal(uniform(seeds.flip(0), positions.flip(1), stream), u.flip(0, 1))
        assert torch.equal(uniform(seeds[3:4], positions[3:4], stream), u[3:4])
        assert torch.equal(uniform(seeds, positions[:, 4].contiguous(), stream), u[:, 4])
        assert torch.equal(uniform(seeds, positions[..., None].expand(8, 7, 2), stream), u[..., None].expand(8, 7, 2))


GRIDS = {  # [N, 2]: pairs of neighbours
    "positions": lambda n: (torch.zeros(n, 1).long().expand(n, 2), 2 * torch.arange(n)[:, None] + torch.arange(2)),
    "seeds": lambda n: (2 * torch.arange(n)[:, None] + torch.arange(2), torch.full((n, 2), 17)),
    "request ids in a seed's low bits": lambda n: (
        (5 << 32) + 2 * torch.arange(n)[:, None] + torch.arange(2), torch.full((n, 2), 300)),
    "seeds in high bits": lambda n: ((2 * torch.arange(n)[:, None] + torch.arange(2)) << 32, torch.full((n, 2), 1)),
    "seed one up, position one down": lambda n: (
        torch.arange(n)[:, None] + torch.arange(2), 100 - torch.arange(2).expand(n, 2)),
}


@pytest.mark.parametrize("streams", [(0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("grid", GRIDS)
def test_uniform_is_even_and_neighbours_and_streams_are_independent(grid, streams):
    """64 bins; 16 x 16 bins of pairs; correlation within 4.5 standard errors."""
    count = 65_536
    seeds, positions = GRIDS[grid](count)
    left = uniform(seeds[:, 0].contiguous(), positions[:, 0].contiguous(), streams[0])
    right = uniform(seeds[:, 1].contiguous(), positions[:, 1].contiguous(), streams[1])
    same = uniform(seeds[:, 0].contiguous(), positions[:, 0].contiguous(), streams[1])
    assert 0 <= left.min() and left.max() < 1
    assert p_value(torch.bincount((left * 64).long(), minlength=64), torch.full((64,), count / 64)) > LIKELY
    others = [right] if streams[0] == streams[1] else [right, same]
    for other in others:
        cells = (left * 16).long() * 16 + (other * 16).long()
        assert p_value(torch.bincount(cells, minlength=256), torch.full((256,), count / 256)) > LIKELY
        assert abs(torch.corrcoef(torch.stack([left, other]))[0, 1]) < 4.5 / math.sqrt(count)


def test_uniform_gives_no_number_twice():
    seeds, positions = torch.arange(300), torch.arange(300).expand(300, 300)
    drawn = torch.cat([uniform(seeds, positions, stream).flatten() for stream in range(3)])
    assert len(drawn.unique()) == 3 * 300 * 300


# Distributions


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 7, 2000])
def test_probabilities_are_those_of_the_warpers_of_transformers(temperature, top_p, top_k):
    """Temperature, top-k, top-p in `generate`'s order; the same tokens survive, with the same probabilities."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    for vocab, scale in ((50, 1.0), (1000, 3.0)):
        logits = scale * torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab))
        want = TemperatureLogitsWarper(temperature)(None, logits)
        want = TopKLogitsWarper(top_k)(None, want) if top_k else want
        want = TopPLogitsWarper(top_p)(None, want) if top_p < 1 else want
        found = sampling_probs(logits.view(2, 3, vocab), *options(2, temperature, top_p, top_k)).view(6, vocab)
        assert torch.equal(found > 0, want.softmax(-1) > 0)
        torch.testing.assert_close(found, want.softmax(-1), rtol=1e-5, atol=0)


def test_ties_for_the_last_place_of_a_top_k_go_to_the_first():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert sampling_probs(logits, *options(1, 1.0, 1.0, 2)).tolist() == [[0, 0.5, 0.5, 0, 0]]
    assert sampling_probs(torch.zeros(1, 4), *options(1, 1.0, 0.5)).tolist() == [[0.5, 0.5, 0, 0]]


def test_a_greedy_row_is_a_one_hot_at_the_first_largest_logit():
    """Ties as `torch.argmax` has them; top-p and top-k don't matter."""
    logits = torch.tensor([[[0.0, 3.0, 3.0, 1.0], [-1.0, -2.0, -1.0, -9.0]]]).expand(3, 2, 4)
    top_p, top_k = torch.tensor([1.0, 0.1, 1.0]), torch.tensor([0, 0, 1])
    for sorts in (False, True):
        probs = sampling_probs(logits, torch.zeros(3), top_p, top_k, sorts)
        assert probs.dtype == torch.float32
        assert probs.tolist() == [[[0, 1, 0, 0], [1, 0, 0, 0]]] * 3
        assert torch.equal(probs.argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_other_dtypes_are_computed_in_fp32(dtype):
    logits = 4 * torch.randn(3, 2, 40, generator=torch.Generator().manual_seed(3))
    chosen = (torch.tensor([0.0, 0.7, 1.2]), torch.tensor([1.0, 0.8, 1.0]), torch.tensor([0, 0, 9]))
    probs = sampling_probs(logits.to(dtype), *chosen)
    assert probs.dtype == torch.float32
    assert torch.equal(probs, sampling_probs(logits.to(dtype).float(), *chosen))
    drafts, draft_probs = sample_drafts(logits.to(dtype), *chosen, torch.arange(3), torch.zeros(3, dtype=torch.int64))
    assert torch.equal(draft_probs, probs) and drafts.dtype == torch.int64
    assert torch.equal(drafts[0], logits.to(dtype)[0].argmax(-1))


@pytest.mark.parametrize("top_p", [0.5, 0.999999, 1.0])
def test_a_row_without_top_p_keeps_its_tail_beside_one_with_it(top_p):
    """Sorting for a neighbour changes no bit of a row that asks for none, whose sum reaches 1 early (pitfall 42)."""
    logits = 8 * torch.randn(4, 20_000, generator=torch.Generator().manual_seed(5))
    temperature, top_k = torch.tensor([0.5, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 50])
    cuts = torch.tensor([1.0, 1.0, 1.0, top_p])
    alone, beside = (sampling_probs(logits, temperature, cuts, top_k, sorts) for sorts in (False, True))
    assert torch.equal(alone[:3], beside[:3])
    assert (beside[3] > 0).sum() <= 50


# Draws


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sample_inverts_the_cumulated_probabilities(dtype):
    probs = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.25, 0.0], dtype=dtype)
    borders = [(0.0, 1), (0.4999999, 1), (0.5, 3), (0.7499999, 3), (0.75, 4), (LAST_U, 4)]
    u = torch.tensor([b[0] for b in borders], dtype=torch.float64)
    assert sample(probs.expand(6, 6), u).tolist() == [b[1] for b in borders]
    assert sample(probs.expand(3, 2, 6), u.view(3, 2)).tolist() == [[1, 1], [3, 3], [4, 4]]


def test_sample_never_draws_a_token_of_probability_zero():
    """Also at both ends of [0, 1), where a row's fp32 sum isn't 1, and from a residual of almost nothing."""
    generator = torch.Generator().manual_seed(0)
    for scale in (1.0, 1e-3, 1e-9):
        probs = torch.softmax(5 * torch.randn(3000, 33, generator=generator), -1)
        probs = probs * (torch.rand(3000, 33, generator=generator) < 0.3) * scale
        probs = probs[probs.sum(-1) > 0]
        edges = torch.tensor([0.0, 2.0**-53, 0.5, LAST_U], dtype=torch.float64)
        u = torch.rand(len(probs), 4, generator=generator, dtype=torch.float64)
        u = torch.cat([u, edges.expand(len(probs), 4)], 1)
        token = sample(probs[:, None].expand(-1, 8, -1), u)
        assert (probs.gather(1, token) > 0).all()


def test_sample_stays_in_the_vocabulary_whatever_the_numbers():
    """A NaN row can't send an index past an embedding."""
    probs = torch.full((4, 9), torch.nan)
    probs[1, :5] = 0.2
    token = sample(probs, torch.tensor([0.0, 0.3, 0.9, LAST_U], dtype=torch.float64))
    assert ((token >= 0) & (token < 9)).all()


@pytest.mark.parametrize("scale", [1.0, 1e-8])
def test_sample_draws_each_token_as_often_as_it_should(scale):
    probs = torch.tensor([0.3, 0.0, 0.25, 0.2, 0.15, 0.07, 0.02, 0.01])
    count = 100_000
    u = uniform(torch.arange(count), torch.zeros(count, dtype=torch.int64), RESAMPLE)
    counts = torch.bincount(sample((probs * scale).expand(count, -1), u), minlength=8)
    assert p_value(counts, probs * count) > LIKELY
    assert p_value(counts, (probs * 0.9 + 0.1 / 8) * count) < IMPOSSIBLE


# The rule


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3])
def test_greedy_acceptance_is_the_longest_equal_prefix(num_drafts):
    """All cases over three tokens, by a loop; a request without drafts keeps none of them."""
    axes = [torch.arange(3)] * (2 * num_drafts + 1)
    cases = torch.cartesian_prod(*axes).view(-1, 2 * num_drafts + 1)
    drafts, choices = cases[:, :num_drafts], cases[:, num_drafts:]
    for has in (True, False):
        accepted, tokens = accept_greedy(drafts, choices, torch.full((len(cases),), has))
        for d, c, a, t in zip(drafts.tolist(), choices.tolist(), accepted.tolist(), tokens.tolist()):
            want = 0
            while has and want < num_drafts and d[want] == c[want]:
                want += 1
            assert a == want and t == d[:want] + [c[want]] + [NO_TOKEN] * (num_drafts - want)
    assert accepted.dtype == tokens.dtype == torch.int64


def random_case(seed, rows=24, num_drafts=3, vocab=6, greedy=0.25, sharp=2.0, has=0.85):
    """Arguments of `accept_sampled` for mixed requests, and which of them are greedy."""
    generator = torch.Generator().manual_seed(seed)
    logits = sharp * torch.randn(rows, num_drafts + 1, vocab, generator=generator)
    guesses = logits[:, :num_drafts] + torch.randn(rows, num_drafts, vocab, generator=generator)
    is_greedy = torch.rand(rows, generator=generator) < greedy
    temperature = torch.where(is_greedy, 0.0, 0.5 + torch.rand(rows, generator=generator))
    cuts = 0.3 + 0.7 * torch.rand(rows, generator=generator)
    top_p = torch.where(torch.rand(rows, generator=generator) < 0.5, 1.0, cuts)
    top_k = torch.randint(0, vocab, (rows,), generator=generator)
    seeds = torch.randint(0, 2**62, (rows,), generator=generator)
    positions = torch.randint(0, 5000, (rows,), generator=generator)
    has_drafts = torch.rand(rows, generator=generator) < has
    return (logits, guesses, temperature, top_p, top_k, seeds, positions, has_drafts), is_greedy


def decide(logits, guesses, temperature, top_p, top_k, seeds, positions, has_drafts, sorts=True):
    """What a step computes: drafts and their q, p, accepted counts and tokens."""
    chosen = (temperature, top_p, top_k)
    drafts, q = sample_drafts(guesses, *chosen, seeds, positions, sorts)
    p = sampling_probs(logits, *chosen, sorts)
    return drafts, q, p, *accept_sampled(drafts, q, p, has_drafts, seeds, positions)


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 7])
def test_the_batch_decides_as_the_loop(num_drafts):
    """`accept_sampled` against `accept_sampled_ref` over random tables, cuts, greedy rows, requests without drafts."""
    counts = torch.zeros(num_drafts + 1, dtype=torch.int64)
    for seed in range(20):
        case, _ = random_case(seed, num_drafts=num_drafts)
        seeds, positions, has_drafts = case[-3:]
        drafts, q, p, accepted, tokens = decide(*case)
        at = positions[:, None] + torch.arange(num_drafts + 1)
        accept_u, resample_u = (uniform(seeds, at, stream).tolist() for stream in (ACCEPT, RESAMPLE))
        for r in range(len(seeds)):
            k = num_drafts if has_drafts[r] else 0
            want = accept_sampled_ref(
                drafts[r, :k].tolist(), q[r, :k].tolist(), p[r].tolist(), accept_u[r], resample_u[r]
            )
            assert accepted[r] == len(want) - 1
            assert tokens[r].tolist() == want + [NO_TOKEN] * (num_drafts + 1 - len(want))
        counts += torch.bincount(accepted, minlength=num_drafts + 1)
    assert (counts > 0).all(), "every number of accepted drafts came up"


def test_requests_decide_alone_and_in_any_order_bit_for_bit():
    """Each row by itself and in shuffled batches: the same drafts, q, p and tokens (pitfall 42)."""
    for seed in range(10):
        case, _ = random_case(seed, vocab=50, num_drafts=4)
        whole = decide(*case)
        order = torch.randperm(24, generator=torch.Generator().manual_seed(seed))
        for found, want in zip(decide(*(x[order] for x in case)), whole):
            assert torch.equal(found, want[order])
        for r in range(24):
            for found, want in zip(decide(*(x[r : r + 1] for x in case)), whole):
                assert torch.equal(found, want[r : r + 1])


def test_greedy_rows_decide_as_greedy_decoding_does_whatever_their_neighbours_do():
    """One-hot rows give `accept_greedy`'s result beside sampled rows, with sorts and without (pitfall 42)."""
    for seed in range(20):
        case, is_greedy = random_case(seed, greedy=0.5)
        logits, guesses, has_drafts = case[0], case[1], case[-1]
        for sorts in (True, False):
            drafts, _, _, accepted, tokens = decide(*case, sorts=sorts)
            assert torch.equal(drafts[is_greedy], guesses.argmax(-1)[is_greedy])
            want = accept_greedy(drafts, logits.argmax(-1), has_drafts)
            assert torch.equal(accepted[is_greedy], want[0][is_greedy])
            assert torch.equal(tokens[is_greedy], want[1][is_greedy])


def test_a_greedy_row_ignores_what_is_left_in_its_draft_probs():
    """A step of greedy requests writes no q: rows of earlier requests or zeros may stand there."""
    for seed in range(20):
        case, is_greedy = random_case(seed, greedy=1.0)
        drafts, q, p, *want = decide(*case)
        stale = torch.softmax(torch.randn(q.shape, generator=torch.Generator().manual_seed(seed)), -1)
        for other in (stale, torch.zeros_like(q), q.flip(-1), q.flip(0)):
            found = accept_sampled(drafts, other, p, *(case[i] for i in (7, 5, 6)))
            assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])


def test_without_drafts_nothing_of_them_is_read():
    """Placeholder ids and NaN in the rows of a request that has no drafts; its token is that of a step with K = 0."""
    case, _ = random_case(0)
    seeds, positions = case[5:7]
    drafts, q, p, *_ = decide(*case)
    none = torch.zeros(24, dtype=torch.bool)
    plain = accept_sampled(drafts[:, :0], q[:, :0], p[:, :1], none, seeds, positions)
    for token in (NO_TOKEN, 6, 2**40):
        found = accept_sampled(torch.full_like(drafts, token), q * torch.nan, p, none, seeds, positions)
        assert found[0].tolist() == [0] * 24
        assert torch.equal(found[1][:, :1], plain[1]) and (found[1][:, 1:] == NO_TOKEN).all()


def test_a_perfect_drafter_is_always_accepted():
    """q = p: u q(x) < p(x) for every u below 1."""
    p = torch.softmax(torch.randn(500, 4, 8, generator=torch.Generator().manual_seed(1)), -1)
    seeds, positions = torch.arange(500), torch.zeros(500, dtype=torch.int64)
    drafts = sample(p[:, :3], uniform(seeds, torch.arange(3).expand(500, 3), DRAFT))
    accepted, tokens = accept_sampled(drafts, p[:, :3], p, torch.ones(500, dtype=torch.bool), seeds, positions)
    assert (accepted == 3).all() and torch.equal(tokens[:, :3], drafts)


def test_a_draft_that_the_target_never_says_is_rejected_even_at_zero(monkeypatch):
    """The comparison is strict: 0 q(x) < 0 is false."""
    monkeypatch.setattr(sampling, "uniform", lambda seeds, positions, stream: torch.zeros(positions.shape).double())
    p, q = torch.tensor([[[0.0, 0.4, 0.6], [1.0, 0.0, 0.0]]]), torch.tensor([[[1.0, 0.0, 0.0]]])
    one = torch.zeros(1, dtype=torch.int64)
    accepted, tokens = accept_sampled(one[None], q, p, torch.ones(1, dtype=torch.bool), one, one)
    assert accepted.tolist() == [0] and tokens.tolist() == [[1, NO_TOKEN]]


def test_an_empty_residual_falls_back_to_the_target():
    """p below q by rounding alone: a rejected draft is replaced from p, whose numbers it gets."""
    count = 2000
    p = torch.tensor([0.5, 0.25, 0.15]).expand(count, 2, 3)
    q = torch.tensor([0.5, 0.25, 0.25]).expand(count, 1, 3)
    seeds, positions = torch.arange(count), torch.full((count,), 40)
    drafts = torch.full((count, 1), 2)
    accepted, tokens = accept_sampled(drafts, q, p, torch.ones(count, dtype=torch.bool), seeds, positions)
    rejected = accepted == 0
    assert 500 < rejected.sum() < 1100
    assert torch.equal(tokens[rejected, 0], sample(p[:, 0], uniform(seeds, positions, RESAMPLE))[rejected])


# The target's own samples

VOCAB, NUM_DRAFTS, LENGTH, REQUESTS = 8, 2, 3, 40_000
BONUS = 3
_generator = torch.Generator().manual_seed(11)
TARGET = 1.3 * torch.randn(VOCAB, VOCAB, generator=_generator)  # logits of a token after another
NOISE = torch.randn(VOCAB, NUM_DRAFTS, VOCAB, generator=_generator)
DRAFTERS = {  # [bonus, draft, V] logits; the second draft doesn't know the first, as in a DFlash block
    "good": torch.stack([TARGET, TARGET.mean(0).expand(VOCAB, -1)], 1) + 0.5 * NOISE,
    "bad": 1.5 * NOISE,
    "opposite": torch.stack([-TARGET, -TARGET], 1),
    "certain": 12 * NOISE,
}
CASES = [
    (1.0, 1.0, 0, "good"), (1.0, 1.0, 0, "bad"), (0.7, 0.9, 0, "good"), (1.3, 1.0, 4, "bad"), (1.0, 0.8, 5, "opposite"),
    (1.5, 1.0, 0, "certain"), (0.5, 0.95, 3, "good"),
]


def generate(temperature, top_p, top_k, drafter, *, report=None, draft_ids=None, has_drafts=True, requests=REQUESTS):
    """[requests, LENGTH] tokens after BONUS, over as many steps as it takes; each request has its own seed.

    `report(q, logits)` gives the q that acceptance is told, `draft_ids(logits)` replaces the drafts.
    """
    chosen, seeds = options(requests, temperature, top_p, top_k), torch.arange(requests)
    last, gained = torch.full((requests,), BONUS), torch.zeros(requests, dtype=torch.int64)
    out = torch.full((requests, LENGTH * (NUM_DRAFTS + 2)), NO_TOKEN)
    has = torch.full((requests,), has_drafts)
    for _ in range(LENGTH):
        positions, logits = 100 + gained, DRAFTERS[drafter][last]
        drafts, q = sample_drafts(logits, *chosen, seeds, positions)
        drafts = drafts if draft_ids is None else draft_ids(logits)
        p = sampling_probs(TARGET[torch.cat([last[:, None], drafts], 1)], *chosen)
        accepted, tokens = accept_sampled(drafts, q if report is None else report(q, logits), p, has, seeds, positions)
        out.scatter_(1, gained[:, None] + torch.arange(NUM_DRAFTS + 1), tokens)
        last, gained = tokens.gather(1, accepted[:, None])[:, 0], gained + accepted + 1
    return out[:, :LENGTH]


def expected_counts(temperature, top_p, top_k, requests=REQUESTS):
    """[V, V, V]: how often the target by itself says each three tokens after BONUS."""
    p = sampling_probs(TARGET, *options(VOCAB, temperature, top_p, top_k)).double()
    return requests * p[BONUS][:, None, None] * p[:, :, None] * p[None]


def joint_p_values(tokens, case):
    """p-values of the first token, the first two and the first three."""
    want = expected_counts(*case[:3])
    counts = torch.bincount((tokens * torch.tensor([VOCAB**2, VOCAB, 1])).sum(1), minlength=VOCAB**3).view(want.shape)
    return [p_value(counts.sum(later), want.sum(later)) for later in ((1, 2), 2)] + [p_value(counts, want)]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("has_drafts", [True, False])
def test_samples_are_distributed_as_the_targets_own(case, has_drafts):
    """Chi-square over 40,000 seeds: one, two and three tokens, which one, two or three passes decided (pitfall 31)."""
    tokens = generate(*case, has_drafts=has_drafts)
    assert min(joint_p_values(tokens, case)) > LIKELY


@pytest.mark.parametrize("case", CASES, ids=str)
def test_drafts_are_accepted_as_often_as_the_distributions_overlap(case):
    """A first draft is kept with probability sum min(p, q), within 4.5 standard errors."""
    *chosen, drafter = case
    chosen, seeds = options(REQUESTS, *chosen), torch.arange(REQUESTS)
    drafts, q = sample_drafts(DRAFTERS[drafter][BONUS].expand(REQUESTS, -1, -1), *chosen, seeds, seeds * 0 + 9)
    p = sampling_probs(TARGET[torch.cat([torch.full((REQUESTS, 1), BONUS), drafts], 1)], *chosen)
    accepted, _ = accept_sampled(drafts, q, p, torch.ones(REQUESTS, dtype=torch.bool), seeds, seeds * 0 + 9)
    want = float(torch.minimum(p[0, 0], q[0, 0]).double().sum())
    found = float((accepted > 0).double().mean())
    assert abs(found - want) <= 4.5 * math.sqrt(want * (1 - min(want, 1)) / REQUESTS) + 1e-6


def shared(first, second):
    """`uniform` with one stream for two purposes."""
    return lambda seeds, positions, stream: uniform(seeds, positions, first if stream == second else stream)


@pytest.mark.parametrize("pair", [(DRAFT, ACCEPT), (DRAFT, RESAMPLE), (ACCEPT, RESAMPLE)])
def test_sharing_a_stream_would_be_noticed(monkeypatch, pair):
    """Draft, acceptance and replacement from the same numbers: the test of distributions fails (pitfall 31)."""
    monkeypatch.setattr(sampling, "uniform", shared(*pair))
    assert min(min(joint_p_values(generate(*case), case)) for case in CASES[:2]) < IMPOSSIBLE


def test_numbers_that_forget_the_position_would_be_noticed(monkeypatch):
    monkeypatch.setattr(sampling, "uniform", lambda seeds, positions, stream: uniform(seeds, positions * 0, stream))
    case = CASES[1]
    assert min(joint_p_values(generate(*case), case)) < IMPOSSIBLE


def test_replacing_from_the_target_instead_of_the_residual_would_be_noticed(monkeypatch):
    """What was rejected for being too frequent would get a second chance."""
    row = lambda accepted, draft_probs, probs, has_drafts: probs[torch.arange(len(probs)), accepted]
    monkeypatch.setattr(sampling, "_weights", row)
    for case in CASES[:2]:
        assert joint_p_values(generate(*case), case)[0] < IMPOSSIBLE


@pytest.mark.parametrize("wrong", [0.7, 1.4])
def test_the_q_of_another_temperature_would_be_noticed(wrong):
    """The drafts came from one distribution, acceptance is told another."""
    case = CASES[0]
    tokens = generate(*case, report=lambda q, logits: sampling_probs(logits, *options(len(q), wrong)))
    assert min(joint_p_values(tokens, case)) < IMPOSSIBLE


def test_greedy_drafts_with_the_q_of_sampled_ones_would_be_noticed():
    """A draft that was the likeliest token has a one-hot for its q, and with that one it is lossless."""
    case = CASES[0]
    best = lambda logits: logits.argmax(-1)
    assert joint_p_values(generate(*case, draft_ids=best), case)[0] < IMPOSSIBLE
    one_hot = lambda q, logits: torch.nn.functional.one_hot(logits.argmax(-1), VOCAB).float()
    assert min(joint_p_values(generate(*case, draft_ids=best, report=one_hot), case)) > LIKELY


def test_greedy_requests_generate_what_the_target_says():
    tokens = generate(0.0, 1.0, 0, "bad", requests=50)
    want, last = [], BONUS
    for _ in range(LENGTH):
        last = int(TARGET[last].argmax())
        want.append(last)
    assert tokens.tolist() == [want] * 50


# Contracts


def good_arguments():
    case, _ = random_case(2, rows=4)
    drafts, q, p, *_ = decide(*case)
    logits, guesses, temperature, top_p, top_k, seeds, positions, has_drafts = case
    chosen = dict(temperature=temperature, top_p=top_p, top_k=top_k)
    return {
        uniform: dict(seeds=seeds, positions=positions, stream=DRAFT),
        sampling_probs: dict(logits=logits, **chosen),
        sample: dict(probs=p, u=uniform(seeds, positions[:, None].expand(4, 4), DRAFT)),
        accept_greedy: dict(drafts=drafts, choices=logits.argmax(-1), has_drafts=has_drafts),
        accept_sampled: dict(
            drafts=drafts, draft_probs=q, probs=p, has_drafts=has_drafts, seeds=seeds, positions=positions
        ),
        sample_drafts: dict(logits=guesses, **chosen, seeds=seeds, positions=positions),
    }


MISFITS = [
    (uniform, "seeds", lambda x: x.int()), (uniform, "positions", lambda x: x.double()),
    (uniform, "positions", lambda x: x[:3]), (uniform, "stream", lambda x: 3),
    (sampling_probs, "temperature", lambda x: x[:3]), (sampling_probs, "temperature", lambda x: x.long()),
    (sampling_probs, "top_p", lambda x: x[:, None]), (sampling_probs, "top_k", lambda x: x.int()),
    (sample, "u", lambda x: x.float()), (sample, "u", lambda x: x[:, :3]),
    (accept_greedy, "drafts", lambda x: x.int()), (accept_greedy, "choices", lambda x: x[:, :-1]),
    (accept_greedy, "has_drafts", lambda x: x.long()),
    (accept_sampled, "drafts", lambda x: x[0]), (accept_sampled, "draft_probs", lambda x: x[..., :-1]),
    (accept_sampled, "draft_probs", lambda x: x.double()), (accept_sampled, "probs", lambda x: x[:, :-1]),
    (accept_sampled, "has_drafts", lambda x: x[:1]), (accept_sampled, "seeds", lambda x: x[:1]),
    (accept_sampled, "positions", lambda x: x[:, None]), (accept_sampled, "positions", lambda x: x.int()),
    (sample_drafts, "logits", lambda x: x[0]), (sample_drafts, "seeds", lambda x: x[:2]),
    (sample_drafts, "positions", lambda x: x[:2]), (sample_drafts, "top_k", lambda x: x.float()),
]


@pytest.mark.parametrize("call,name,change", MISFITS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_misfits_are_refused_by_name(call, name, change):
    arguments = good_arguments()[call]
    call(**arguments)
    with pytest.raises(ValueError, match=f"^{name}: expected .*, got "):
        call(**{**arguments, name: change(arguments[name])})


def test_nothing_waits_for_the_device():
    """On the meta device a number that the host would have to know is an error."""
    for call, arguments in good_arguments().items():
        call(**{name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in arguments.items()})


def test_arguments_are_left_as_they_were():
    for call, arguments in good_arguments().items():
        before = {name: x.clone() for name, x in arguments.items() if isinstance(x, torch.Tensor)}
        call(**arguments)
        assert all(torch.equal(arguments[name], x) for name, x in before.items())


# On a CUDA device

cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on(device, case):
    return tuple(x.to(device) for x in case)


@pytest.mark.parametrize("vocab", [pytest.param(v, marks=cuda) for v in (50, 151_936)])
def test_cuda_requests_decide_alone_and_in_any_order_bit_for_bit(vocab):
    """Sums in fixed point don't depend on how a scan is split over threads, which depends on the batch (pitfall 42)."""
    case = on("cuda", random_case(3, vocab=vocab, num_drafts=4, rows=24)[0])
    whole = decide(*case)
    order = torch.randperm(24, device="cuda")
    for found, want in zip(decide(*(x[order] for x in case)), whole):
        assert torch.equal(found, want[order])
    for r in range(24):
        for found, want in zip(decide(*(x[r : r + 1] for x in case)), whole):
            assert torch.equal(found, want[r : r + 1])


@pytest.mark.parametrize("unused", [pytest.param(0, marks=cuda)])
def test_cuda_gives_the_cpus_numbers_and_tokens(unused):
    """The same random numbers bit for bit, and from the same probabilities the same tokens."""
    for seed in range(5):
        case, _ = random_case(seed, vocab=3000, num_drafts=4)
        drafts, q, p, *want = decide(*case)
        _, _, _, _, _, seeds, positions, has_drafts = case
        at = positions[:, None] + torch.arange(5)
        for stream in range(3):
            assert torch.equal(uniform(seeds.cuda(), at.cuda(), stream).cpu(), uniform(seeds, at, stream))
        assert torch.equal(sample(q.cuda(), uniform(seeds, at[:, :-1], DRAFT).cuda()).cpu(), drafts)
        found = accept_sampled(*on("cuda", (drafts, q, p, has_drafts, seeds, positions)))
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, want))


@pytest.mark.parametrize("sorts", [pytest.param(s, marks=cuda) for s in (False, True)])
def test_cuda_graph_replays_with_other_requests(sorts):
    """Captured once, without a wait for the device; replayed it decides as the eager code does."""
    cases = [on("cuda", random_case(seed, vocab=32_000, num_drafts=4)[0]) for seed in range(4)]
    buffers = tuple(x.clone() for x in cases[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        decide(*buffers, sorts=sorts)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decide(*buffers, sorts=sorts)
    for case in cases:
        for buffer, x in zip(buffers, case):
            buffer.copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            want = decide(*case, sorts=sorts)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(torch.equal(a, b) for a, b in zip(out, want))
