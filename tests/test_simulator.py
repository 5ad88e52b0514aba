"""The simulator: every request ends with its own tokens, the same for a seed, and the planner's answer comes out."""

import random
import time
from dataclasses import fields, replace

import pytest

from dflash_paged.memory import CATALOGUE, GB
from dflash_paged.scheduler import Scheduler, StepPlan
from dflash_paged.simulator import (
    ASSUMPTIONS, ISSUE_DESIGNS, Design, Scenario, SimulatedRequest, Simulator, TokenRuns, assumptions, capacity_rows, compare,
    figure_designs, figure_timeline, make_scheduler, planned_running, pool_bytes, result_rows, row_bytes, scenario_workload, simulate,
    simulated_request, step_clock, step_costs, step_work, table,
)
from dflash_paged.workload import Acceptance, WorkloadRow

POLICIES = ("guaranteed_no_evict", "max_utilization")
SMALL = Scenario(num_requests=120, requests_per_s=4.0, seed=3)
TIGHT = Design("dense", max_batch_size=72)  # about 70,000 tokens
LONG = [WorkloadRow(i / 100, 2000 + i, 2500, priority=i % 3) for i in range(60)]  # outputs outgrow prompts
COLUMNS = ("start_s", "step_s", "running", "waiting", "decoding", "prompt_rows", "preempted", "used", "promised")


def columns(result) -> list:
    """The record of a run as lists."""
    return [[list(c) if hasattr(c, "typecode") else c for c in getattr(result.record, name)] for name in COLUMNS]


def check_run(result, num_requests: int) -> None:
    """All requests ended with their own lengths, in order of time, and nothing is left behind."""
    record = result.record
    assert len(result.requests) + len(result.refused) == num_requests and result.num_unserved == 0
    assert result.failure is None
    assert len({r.request_id for r in result.requests}) == len(result.requests)
    for r in result.requests:
        assert r.num_new_tokens == len(r.tokens) - r.prompt_len == r.row.output_tokens and r.finish_reason == "length"
        assert r.row.arrival_s <= r.admitted_s < r.first_token_s <= r.ended_s <= result.end_s + 1e-9
        assert r.num_prefilled + r.num_reused >= r.prompt_len
    ends = [start + seconds for start, seconds in zip(record.start_s, record.step_s)]
    assert all(end <= start + 1e-9 for end, start in zip(ends, record.start_s[1:])) and min(record.step_s) > 0
    assert ends[-1] == pytest.approx(result.end_s) and record.waiting[-1] == 0
    by_step = [getattr(record, name) for name in COLUMNS[:7]]
    assert len({len(column) for column in (*by_step, *record.used, *record.promised)}) == 1
    assert sum(record.preempted) == result.num_preemptions == sum(r.num_preemptions for r in result.requests)
    assert sum(record.prompt_rows) == sum(r.num_prefilled for r in result.requests)
    for pool in result.pools:
        stats = pool.manager.stats()
        assert stats.num_referenced == 0 and all(g.num_referenced == 0 for g in stats.groups)
        assert not pool.manager.live_requests()


@pytest.fixture(scope="module")
def runs():
    """The small scenario, served by the three designs under both correct policies."""
    designs = [Design(context, admission=policy) for context in ("dense", "separate", "manager") for policy in POLICIES]
    return compare(SMALL, designs)


# Tokens


@pytest.mark.parametrize("prefix_tokens, length", [(0, 0), (0, 5), (3, 5), (5, 5), (7, 7), (2, 9)])
def test_token_runs_are_the_list_that_they_describe(prefix_tokens, length):
    runs, want = TokenRuns(1, prefix_tokens, 2, length), [1] * prefix_tokens + [2] * (length - prefix_tokens)
    bounds = [None, *range(-length - 2, length + 3)]
    assert len(runs) == length and list(runs) == want and list(reversed(runs)) == want[::-1]
    assert all(runs[a:b] == want[a:b] for a in bounds for b in bounds)
    assert [runs[i] for i in range(length)] == want and (1 in runs, 2 in runs) == (1 in want, 2 in want)


def test_token_runs_grow_by_their_owner():
    runs = TokenRuns(1, 2, 5, 2)
    runs.extend(3)
    assert list(runs) == [1, 1, 5, 5, 5] and runs[1:4] == [1, 5, 5]


@pytest.mark.parametrize("index", [-1, -2, -5])
def test_token_runs_count_from_the_end_too(index):
    assert TokenRuns(1, 2, 9, 5)[index] == [1, 1, 9, 9, 9][index]


@pytest.mark.parametrize("step", [2, 3, -1, -2])
def test_token_runs_take_steps(step):
    assert TokenRuns(1, 2, 9, 5)[::step] == [1, 1, 9, 9, 9][::step]


@pytest.mark.parametrize("index", [5, 6, -6])
def test_token_runs_end(index):
    with pytest.raises(IndexError):
        TokenRuns(1, 2, 9, 5)[index]


def test_requests_share_what_their_rows_share():
    """Prefix and owner decide; without an owner nobody is like another."""
    make = lambda i, **kw: simulated_request(i, WorkloadRow(0, 6, 2, **kw), Acceptance((1,)), 0)
    a, b = make(0, prefix=3, prefix_tokens=4), make(1, prefix=3, prefix_tokens=4)
    assert a.tokens[:4] == b.tokens[:4] and not set(a.tokens[4:]) & set(b.tokens[4:])
    assert make(2, prefix=4, prefix_tokens=4).tokens[0] != a.tokens[0]
    assert list(make(3, owner=7).tokens) == list(make(4, owner=7).tokens) != list(make(5, owner=8).tokens)
    assert not set(make(6).tokens) & set(make(7).tokens)
    several = (dict(owner=0), dict(), dict(prefix=0, prefix_tokens=6), dict(owner=9))
    everything = [set(make(i, **kw).tokens) for i, kw in enumerate(several)]
    assert sum(map(len, everything)) == len(set().union(*everything))


def test_gains_are_those_of_seed_and_number():
    def gains(number: int, seed: int) -> list[int]:
        request = simulated_request(number, WorkloadRow(0, 5, 50), Acceptance.from_mean(3, 7), seed)
        return [request.gain() for _ in range(40)]

    assert gains(1, 0) == gains(1, 0) != gains(2, 0) and gains(1, 0) != gains(1, 1)


# Whole runs


def test_every_request_ends_with_its_tokens_and_every_block_comes_back(runs):
    for result in runs.values():
        check_run(result, SMALL.num_requests)


@pytest.mark.parametrize("design", [Design(), Design("dense", admission="max_utilization")], ids=lambda d: d.name)
def test_a_run_is_the_same_for_the_same_seed_only(runs, design):
    again, other = simulate(SMALL, design), simulate(replace(SMALL, seed=4), design)
    assert again.summary() == runs[design.name].summary() != other.summary()
    assert columns(again) == columns(runs[design.name]) != columns(other)
    times = lambda result: [(r.request_id, r.admitted_s, r.first_token_s, r.ended_s) for r in result.requests]
    assert times(again) == times(runs[design.name])


def test_what_a_request_gains_does_not_depend_on_the_design(runs):
    """Without preemptions each takes as many passes, whoever serves it."""
    calm = [result.requests for result in runs.values() if not result.num_preemptions]
    passes = [{r.request_id: r.num_passes for r in requests} for requests in calm]
    assert len(passes) >= 3 and all(one == passes[0] for one in passes)


def test_requests_accept_what_the_scenario_says():
    """Outputs are long, so that what is cut at their ends hardly shows."""
    result = simulate(replace(SMALL, max_seq_len=8192), Design(), [WorkloadRow(0, 10, 4000) for _ in range(40)])
    assert result.summary()["acceptance"] == pytest.approx(SMALL.acceptance().mean, rel=0.01)
    assert all(r.acceptance_length == pytest.approx(SMALL.acceptance().mean, rel=0.1) for r in result.requests)


def test_nothing_that_was_admitted_runs_out_of_blocks(runs):
    """Held and promised blocks together never exceed a pool."""
    for name, result in runs.items():
        for used, promised, pool in zip(result.record.used, result.record.promised, result.pools):
            blocks = pool.spec.num_blocks
            assert max(used) <= blocks
            assert "max-utilization" in name or max(a + b for a, b in zip(used, promised)) <= blocks
        assert max(result.record.running) <= SMALL.max_batch_size
        decoding = zip(result.record.decoding, result.record.prompt_rows)
        assert all(5 * n + rows <= SMALL.max_step_tokens for n, rows in decoding)


@pytest.mark.parametrize("policy", POLICIES)
def test_preempted_requests_end_with_their_own_lengths(policy):
    result = simulate(Scenario(), replace(TIGHT, admission=policy), LONG)
    check_run(result, len(LONG))
    assert (result.num_preemptions > 0) == (policy == "max_utilization")
    again = sum(r.num_prefilled + r.num_reused - r.prompt_len for r in result.requests)
    assert (again > 0) == (policy == "max_utilization")


def test_idle_time_is_jumped_over():
    rows = [WorkloadRow(at, 100, 20) for at in (0.0, 1000.0, 5000.5)] + [WorkloadRow(5000.5, 50, 1)]
    result = simulate(SMALL, Design(), rows)
    check_run(result, 4)
    assert len(result.record) < 80 and 5000.5 < result.end_s < 5002 and sum(result.record.step_s) < 2
    assert [r.admitted_s for r in sorted(result.requests, key=lambda r: r.request_id)] == [0.0, 1000.0, 5000.5, 5000.5]


def test_a_request_of_one_token_takes_no_verify_pass():
    (request,) = simulate(SMALL, Design(), [WorkloadRow(0.0, 100, 1)]).requests
    assert request.num_passes == 0 and request.first_token_s == request.ended_s
    assert request.acceptance_length != request.acceptance_length


def test_rows_are_served_in_order_of_arrival_and_priority():
    rows = [WorkloadRow(float(9 - i), 100, 5) for i in range(10)]
    result = simulate(SMALL, Design(), rows)
    served = sorted(result.requests, key=lambda r: r.admitted_s)
    assert [r.row.arrival_s for r in served] == sorted(r.arrival_s for r in rows)
    busy = [WorkloadRow(0.0, 2000, 500, priority=9 * (i == 40)) for i in range(50)]
    result = simulate(replace(SMALL, max_batch_size=4), Design(), busy)
    waited = {r.request_id: r.admitted_s for r in result.requests}
    assert waited[40] == 0.0 < waited[20]


def test_a_run_may_end_before_its_requests_do():
    result = simulate(SMALL, Design(), until_s=5.0)
    assert 5.0 <= result.end_s < 6.0 and result.num_unserved == result.summary()["unserved"] > 0
    assert columns(simulate(SMALL, Design()))[1][: len(result.record)] == columns(result)[1]


def test_500_requests_are_simulated_in_seconds():
    started = time.perf_counter()
    result = simulate(replace(Scenario(), num_requests=500), Design())
    assert time.perf_counter() - started < 10 and 0 < result.wall_s < 10
    check_run(result, 500)


# One bad request


@pytest.mark.parametrize("policy", POLICIES)
def test_an_oversized_request_is_refused_alone_with_the_numbers(policy):
    """Pitfall 32: one is longer than the pool, one than the longest sequence."""
    rows = [WorkloadRow(i / 10, 3000, 50) for i in range(10)]
    rows[3], rows[7] = WorkloadRow(0.3, 100_000, 50), WorkloadRow(0.7, 131_072, 1)
    result = simulate(Scenario(), replace(TIGHT, admission=policy), rows)
    check_run(result, 10)
    assert [r.request_id for r, _ in result.refused] == [3, 7] and result.summary()["refused"] == 2
    blocks = result.pools[0].spec.num_blocks
    (_, pool_words), (_, length_words) = result.refused
    assert "100000 prompt + 50 new" in pool_words and f"the pool has {blocks}" in pool_words
    assert "131072" in length_words and "max_seq_len" in length_words


# What the designs do


def test_capacity_of_the_issues_setting():
    rows = {row["design"]: row for row in capacity_rows(Scenario())}
    assert rows["dense bf16"]["tokens"] == 155_712 and rows["manager bf16"]["tokens"] == 770_208
    assert {round(row["dense buffer, GB"], 2) for row in rows.values()} == {85.91, 0}
    assert rows["manager bf16"]["in the pool"] == 126_976 + 10_240 and rows["dense bf16"]["in the pool"] == 126_976
    assert rows["manager fp8"]["in the pool"] == (126_976 + 10_240) // 2
    assert rows["separate bf16"]["dense buffer, GB"] == 0
    assert len({len(line) for line in table(list(rows.values())).splitlines()}) == 1


@pytest.mark.parametrize("design", ISSUE_DESIGNS, ids=lambda design: design.name)
def test_managers_have_the_blocks_that_the_capacity_says(design):
    (row,), scheduler = capacity_rows(Scenario(), [design]), make_scheduler(Scenario(), design)
    assert isinstance(scheduler, Scheduler) and row["pool, GB"] == pool_bytes(Scenario(), design) / GB
    blocks = [pool.spec.num_blocks for pool in scheduler.pools]
    assert len(blocks) == (2 if design.context == "separate" else 1)
    if design.context == "separate":
        assert all(abs(n * 32 - row["tokens"]) <= 32 for n in blocks)
    else:
        assert blocks == [scheduler.manager.num_blocks] == [row["tokens"] // 32]
    used = sum(32 * n * size for n, size in zip(blocks, (row["target B/token"], row["draft B/token"])))
    used = used if design.context == "separate" else 32 * blocks[0] * row["in the pool"]
    assert 0 <= pool_bytes(Scenario(), design) - used < 2 * 32 * row["in the pool"]


def test_the_dense_buffer_starves_admission_and_the_manager_does_not():
    found = compare(Scenario(requests_per_s=4.0, num_requests=400), [Design("dense"), Design("manager")])
    dense, paged = found["dense bf16"], found["manager bf16"]
    assert dense.quantile("queue_s", 0.5) > 10 * max(0.1, paged.quantile("queue_s", 0.5))
    blocks = dense.pools[0].spec.num_blocks
    full = [(u + p) / blocks * s for u, p, s, n in zip(
        dense.record.used[0], dense.record.promised[0], dense.record.step_s, dense.record.waiting) if n]
    assert sum(full) / sum(s for s, n in zip(dense.record.step_s, dense.record.waiting) if n) > 0.9
    assert dense.counted(while_waiting=True) > 0.9 > paged.counted()
    assert dense.summary()["max_running"] < 32 < paged.summary()["max_running"]
    assert dense.summary()["tokens_per_s"] < 0.85 * paged.summary()["tokens_per_s"]


@pytest.mark.parametrize("policy", ["target_only", *POLICIES])
def test_counting_the_target_alone_fails_in_mid_run(policy):
    """Pitfall 14: a prefix that is shared in the target's pool isn't in the draft's own."""
    scenario = Scenario(num_prefixes=16, prefix_tokens=20_000, num_requests=300, requests_per_s=None)
    result = simulate(scenario, Design("separate", admission=policy))
    if policy != "target_only":
        check_run(result, 300)
        return
    assert "target_only" in result.failure and result.num_unserved > 0 and len(result.record) > 0
    assert result.summary()["failure"] == result.failure and result.summary()["unserved"] == result.num_unserved


def test_shared_prefixes_are_computed_once():
    plain = replace(SMALL, num_prefixes=4, prefix_tokens=4096)
    own = [replace(row, prefix=None, prefix_tokens=0) for row in scenario_workload(plain)]
    for context in ("dense", "separate", "manager"):
        result, alone = simulate(plain, Design(context)), simulate(plain, Design(context), own)
        check_run(result, SMALL.num_requests)
        assert alone.summary()["reused"] == 0 < result.summary()["reused"] <= 4096 * SMALL.num_requests
        assert result.summary()["prefilled"] < alone.summary()["prefilled"] and result.end_s <= alone.end_s


def test_missing_draft_rows_cost_acceptance_where_they_are_missing():
    """Pitfall 16: the manager's rows come back with their blocks."""
    scenario = replace(SMALL, num_requests=40, num_prefixes=2, prefix_tokens=4096, missing_acceptance_length=1.02)
    found = compare(scenario, [Design("dense"), Design("separate"), Design("manager")])
    accepted = {name.split()[0]: result.summary()["acceptance"] for name, result in found.items()}
    usual = simulate(replace(scenario, missing_acceptance_length=None), Design("manager")).summary()["acceptance"]
    assert accepted["manager"] == usual > 2 and max(accepted["dense"], accepted["separate"]) < 1.3


# The planner


@pytest.mark.parametrize("trace, count, policy, cap", [
    *(("azure-conversation-2023", 3000, *case) for case in zip((*POLICIES, POLICIES[0]), (None, None, 2048))),
    *(("mooncake-conversation-2025", 1000, policy, cap) for policy in POLICIES for cap in (None, 2048)),
])
def test_a_full_house_is_the_one_that_was_planned(trace, count, policy, cap):
    scenario = Scenario(trace=trace, num_requests=count, requests_per_s=None, max_batch_size=1024, max_new_tokens=cap)
    rows, design = scenario_workload(scenario), Design(admission=policy)
    result, plan = simulate(scenario, design, rows), planned_running(scenario, design, rows)
    start, stop = result.busy_window()
    assert 0 <= start < stop <= result.end_s and 1 < plan < 1000
    assert result.over_time(result.record.running, start, stop) == pytest.approx(plan, rel=0.03)


@pytest.mark.parametrize("design, count, seed", [
    (Design("dense", "float8_e4m3fn"), 2500, 1), (Design("manager"), 1500, 0),
])
def test_the_issues_designs_are_the_ones_that_were_planned(design, count, seed):
    """64 slots, 8,192 rows a step: what lies free while the queue's first waits counts most in a small pool."""
    scenario = Scenario(num_requests=count, requests_per_s=None, seed=seed)
    rows = scenario_workload(scenario)
    result = simulate(scenario, design, rows)
    running = result.over_time(result.record.running, *result.busy_window())
    assert running == pytest.approx(planned_running(scenario, design, rows), rel=0.03)


def test_a_plan_for_outputs_of_one_token_and_for_nobody():
    rows = [WorkloadRow(0.0, 1000, 1) for _ in range(50)]
    assert planned_running(Scenario(num_requests=50, requests_per_s=None, max_new_tokens=None), Design(), rows) > 1
    with pytest.raises(ValueError, match="rows: expected at least one"):
        planned_running(Scenario(), Design(), [])


def test_slots_limit_a_full_house_too():
    scenario = Scenario(trace="azure-code-2023", num_requests=200, requests_per_s=None, max_batch_size=16)
    rows = scenario_workload(scenario)
    result, plan = simulate(scenario, Design(), rows), planned_running(scenario, Design(), rows)
    assert plan == 16 == max(result.record.running)
    assert result.over_time(result.record.running, *result.busy_window()) == pytest.approx(16, rel=0.03)


# Steps


def test_the_work_of_a_plan_by_hand():
    """Windows cut what attention reads; a draft reads from its first row on."""
    def request(number, prompt, rows, ctx_start=0, output=1):
        tokens = TokenRuns(0, 0, 1, prompt + output)
        return SimulatedRequest(number, tokens, prompt, 100, num_rows=rows, prefill_len=prompt, ctx_start=ctx_start)

    decode = [request(0, 100, 100), request(1, 50, 50, ctx_start=30)]
    prefill = [(request(2, 64, 0, output=0), 64), (request(3, 500, 200, output=0), 100)]
    work = step_work(StepPlan(decode, prefill), 5, {None: 10, 64: 3}, {None: 2})
    assert work.num_rows == 164 + 10 == work.stored_rows and work.num_sampled == 10 + 1 and work.num_drafting == 2 + 1
    assert work.target_bytes == 10 * 150 + 3 * (63 + 50)
    assert work.draft_bytes == 2 * (150 - 30)
    assert work.prefill_pairs == 64 * 65 / 2 + 100 * 200 + 100 * 101 / 2


def test_a_run_takes_the_time_of_its_steps():
    """The clock adds up what each plan costs."""
    result, scheduler = simulate(SMALL, Design(), [WorkloadRow(0.0, 5000, 1)]), make_scheduler(SMALL, Design())
    request = simulated_request(0, WorkloadRow(0.0, 5000, 1), SMALL.acceptance(), 0)
    scheduler.add(request)
    plan = scheduler.schedule()
    want = step_costs(SMALL, Design()).step_s(step_work(plan, 5, *row_bytes(SMALL, Design())))
    assert step_clock(SMALL, Design())(plan) == pytest.approx(want) == result.end_s


def test_moments_of_a_run_by_hand():
    result = simulate(SMALL, Design(), [WorkloadRow(0.0, 100, 30), WorkloadRow(0.5, 100, 30)])
    record = result.record
    whole = sum(n * s for n, s in zip(record.running, record.step_s)) / result.end_s
    assert result.over_time(record.running) == pytest.approx(whole) and result.over_time(record.step_s, 0.2, 0.3) == 0
    first = result.over_time(record.running, record.start_s[0], record.start_s[0] + record.step_s[0])
    assert first == record.running[0] and result.utilisation() <= result.counted() <= 1
    spans = sorted(r.ended_s - r.row.arrival_s for r in result.requests)
    assert [result.quantile("total_s", q) for q in (0, 0.49, 0.5, 1)] == [spans[0], spans[0], spans[1], spans[1]]
    with pytest.raises(ValueError, match="name"):
        result.quantile("nothing", 0.5)


# What is shown


def test_every_assumption_says_where_it_comes_from():
    assert set(ASSUMPTIONS) == {field.name for field in fields(Scenario)} and all(ASSUMPTIONS.values())
    rows = {row["assumption"]: row for row in assumptions(Scenario())}
    assert rows["num_draft_tokens"]["value"] == 4 and rows["acceptance_length"]["value"] == 3.43
    assert set(rows) > set(ASSUMPTIONS) and all(row["from"] for row in rows.values())


def test_results_are_a_row_each_and_a_figure(runs):
    rows = result_rows(runs)
    assert [row["design"] for row in rows] == list(runs) and len(table(rows).splitlines()) == 1 + len(runs)
    figure = figure_timeline({name: runs[name] for name in ("dense bf16", "manager bf16")})
    assert len(figure.axes) == 4 and "4,866 blocks" in figure.axes[0].get_title()


# Bad scenarios


@pytest.mark.parametrize("name, value", [
    ("gpu", "A100"), ("target_work", "x"), ("draft_work", "x"), ("trace", "x"), ("num_draft_tokens", 8),
    ("num_draft_tokens", -1),
    ("num_requests", 0), ("num_requests", 1.5), ("requests_per_s", -1.0), ("requests_per_s", 0), ("cv", -1.0),
    ("max_seq_len", 0),
    ("max_seq_len", -5), ("max_batch_size", 0), ("max_batch_size", -2), ("tokens_per_block", 33),
    ("max_step_tokens", 0),
    ("max_step_tokens", 300), ("host_us", -1.0), ("host_us", float("nan")), ("max_new_tokens", 0), ("num_prefixes", -1),
    ("prefix_tokens", -1), ("acceptance_length", 0.5), ("acceptance_length", 17.0), ("accepted_of", -1),
    ("missing_acceptance_length", 0.5), ("missing_acceptance_length", 99.0),
])
def test_bad_scenarios_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        simulate(Scenario(**{"num_requests": 3, name: value}), Design())


@pytest.mark.parametrize("name, value", [
    ("context", "x"), ("admission", "x"), ("kv_dtype", "int3"), ("draft_kv_dtype", "int3"), ("max_batch_size", 0),
    ("max_batch_size", -1), ("max_batch_size", 1.5),
])
@pytest.mark.parametrize("context", ["dense", "manager"])
def test_bad_designs_are_refused_by_name(context, name, value):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        simulate(replace(SMALL, num_requests=3), Design(**{"context": context, name: value}))


@pytest.mark.parametrize("call", [simulate, make_scheduler, pool_bytes])
def test_slots_that_leave_no_room_cannot_start(call):
    with pytest.raises(ValueError, match="machine.*dense bf16, 200 slots.*bytes are missing: it cannot start"):
        call(SMALL, Design("dense", max_batch_size=200))
    assert simulate(replace(SMALL, num_requests=3), Design(max_batch_size=200)).summary()["requests"] == 3


def test_random_workloads_end_under_every_design():
    """Lengths at the edges of blocks, prefixes, owners, priorities, no drafts at all."""
    for seed in range(6):
        rng = random.Random(seed)
        scenario = replace(
            SMALL, num_draft_tokens=rng.choice([0, 1, 4, 7]), max_batch_size=rng.choice([1, 5, 60]),
            max_seq_len=rng.choice([2048, 131_072]), tokens_per_block=rng.choice([8, 32, 64]),
            max_step_tokens=rng.choice([512, 8192]), missing_acceptance_length=rng.choice([None, 1.1]),
        )
        rows = []
        for _ in range(40):
            prompt, output = rng.choice([1, 31, 32, 33, 64, 700, 1900]), rng.choice([1, 2, 32, 100, 140])
            prefix, owner = rng.choice([None, 0, 1]), rng.choice([None, None, 0, 1])
            rows.append(WorkloadRow(
                rng.random() * 5, prompt, output, rng.choice([None, output, output + 50]), rng.randrange(10), prefix,
                0 if prefix is None else rng.randrange(prompt + 1), owner,
            ))
        for context in ("dense", "separate", "manager"):
            result = simulate(scenario, Design(context, admission=rng.choice(POLICIES)), rows)
            assert len(result.refused) == 0
            check_run(result, 40)


def test_means_count_the_time_in_which_nothing_runs():
    scenario = Scenario(requests_per_s=None)
    requests = [simulated_request(i, WorkloadRow(at, 8, 1), scenario.acceptance(), 0) for i, at in enumerate((0.0, 1000.0))]
    result = Simulator(make_scheduler(scenario, Design()), requests, lambda plan: 1.0).run()
    assert result.end_s == 1001 and result.summary()["mean_running"] == pytest.approx(2 / 1001)
    assert result.over_time(result.record.running, 500, 900) == 0 and result.over_time(result.record.running, 0, 2) == 0.5


def test_a_run_that_is_stopped_counts_what_it_did_and_who_still_waits():
    scenario = Scenario(requests_per_s=None, max_batch_size=1, max_new_tokens=None)
    rows = [WorkloadRow(0.0, 8, 200), WorkloadRow(0.0, 8, 200), WorkloadRow(900.0, 8, 2)]
    requests = [simulated_request(i, row, scenario.acceptance(), 0) for i, row in enumerate(rows)]
    simulator = Simulator(make_scheduler(scenario, Design()), requests, lambda plan: 1.0)
    result = simulator.run(until_s=12.0)
    assert result.end_s == 12 and result.num_unserved == 3 and result.quantile("queue_s", 0.99) == 12
    assert result.summary()["tokens_per_s"] == pytest.approx(requests[0].num_new_tokens / 12)
    assert [w.reason for w in result.scheduler.why_waiting()] == ["slots"]
    assert simulator.run(until_s=500.0).end_s == 500, "an idle jump stops there too"


def test_an_abort_from_outside_does_not_keep_a_run_from_ending():
    scenario = Scenario(requests_per_s=None)
    requests = [simulated_request(i, WorkloadRow(0.0, 8, 50), scenario.acceptance(), 0) for i in range(3)]
    simulator = Simulator(make_scheduler(scenario, Design()), requests, lambda plan: 1.0)
    simulator.step()
    simulator.scheduler.abort(1)
    result = simulator.run()
    assert len(result.requests) == 2 and result.num_unserved == 1


def test_no_two_kinds_of_tokens_are_alike():
    """Own tokens, a conversation's and a prefix's: only the same kind and number hits."""
    rows = [WorkloadRow(0.0, 64, 2), WorkloadRow(9.0, 64, 2, owner=0), WorkloadRow(18.0, 64, 2, owner=999_999),
            WorkloadRow(27.0, 96, 2, prefix=0, prefix_tokens=64), WorkloadRow(36.0, 64, 2, owner=700_000_000),
            WorkloadRow(45.0, 96, 2, prefix=0, prefix_tokens=64)]
    result = simulate(Scenario(max_new_tokens=None), Design(), rows)
    assert [r.num_reused for r in sorted(result.requests, key=lambda r: r.request_id)] == [0, 0, 0, 0, 0, 64]


def test_acceptance_follows_the_rows_that_are_missing_now():
    """After a preemption without a hit nothing is missing any more, and the request gains as others do."""
    scenario = Scenario(requests_per_s=None, missing_acceptance_length=1.0, max_new_tokens=None)
    rows = [WorkloadRow(0.0, 64, 2, prefix=0, prefix_tokens=64), WorkloadRow(50.0, 96, 400, prefix=0, prefix_tokens=64)]
    requests = [simulated_request(i, row, scenario.acceptance(), 0) for i, row in enumerate(rows)]
    scheduler = make_scheduler(scenario, Design("separate"), True)
    simulator = Simulator(scheduler, requests, lambda plan: 1.0, scenario.acceptance(missing=True), 0)
    simulator.run(until_s=70.0)
    assert requests[1].ctx_start == 64 and requests[1].acceptance_length == 1
    scheduler.preempt(1)
    scheduler.manager.clear_prefix_index()
    before = requests[1].num_passes
    simulator.run()
    assert requests[1].ctx_start == 0 and (requests[1].num_new_tokens - before) / (requests[1].num_passes - before) > 1.5


def test_a_design_that_cannot_start_is_a_row_and_the_others_run():
    scenario = Scenario(requests_per_s=4.0, num_requests=20, max_batch_size=96)
    rows = {row["design"]: row for row in capacity_rows(scenario)}
    assert rows["dense bf16"]["tokens"] == "cannot start" and rows["manager bf16"]["tokens"] == 770_208
    assert list(compare(scenario)) == ["separate bf16", "manager bf16", "separate fp8", "manager fp8"]


def test_capacity_is_the_managers_with_windows_too():
    pair = CATALOGUE["Qwen3.8-27B"]
    scenario = Scenario(pair=pair, max_seq_len=32_768)
    (row,) = capacity_rows(scenario, [Design()])
    assert row["tokens"] == make_scheduler(scenario, Design()).manager.blocks_per_group[0] * 32


def test_figures_show_every_design_that_ran():
    results = compare(Scenario(requests_per_s=4.0, num_requests=20), [Design("dense"), Design()])
    assert len(figure_designs(results).axes) == 3


@pytest.mark.parametrize("fields, words", [
    (dict(pair=None), "pair"), (dict(machine=3), "machine"), (dict(trace="azure"), "trace"), (dict(requests_per_s=-1.0), "requests_per_s"),
    (dict(cv=-1.0), "cv"), (dict(max_new_tokens=0), "max_new_tokens"), (dict(tokens_per_block=7), "tokens_per_block"),
    (dict(seed="x"), "seed"), (dict(time_scale=0.0), "time_scale"),
])
def test_a_scenario_is_checked_when_it_is_made(fields, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        Scenario(**fields)


def test_nonsense_asked_of_a_result_is_refused():
    result = simulate(Scenario(num_requests=5), Design())
    for share in (-0.5, 7):
        with pytest.raises(ValueError, match="share: expected a number from 0 to 1"):
            result.quantile("queue_s", share)
    with pytest.raises(ValueError, match="design: expected a Design"):
        simulate(Scenario(num_requests=5), "dense")
    assert len(repr(Scenario())) < 1200
