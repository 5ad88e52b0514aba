"""Workloads: lengths, arrivals and acceptance have the moments that they name, and a bad row is told apart."""

import math
import random
import re
from dataclasses import astuple
from statistics import fmean, pstdev

import pytest

from dflash_paged.workload import (
    TRACES, Acceptance, Quantiles, TraceError, TraceFit, WorkloadRow, arrival_times, from_zero, make_workload,
    read_trace,
)

OWN = "arrival_s,prompt_tokens,output_tokens"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
MOONCAKE = '{{"timestamp": {}, "input_length": {}, "output_length": {}, "hash_ids": [1, 2]}}'
NO_NUMBERS = [math.nan, math.inf, -math.inf, -1, True, "1", [1]]
SMALL = TraceFit(Quantiles.lognormal(100, 1, 400), Quantiles.lognormal(30, 1, 200), 1.0, "test")


# Lengths


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("side", ["prompt", "output"])
def test_drawn_lengths_have_the_mean_and_the_quantiles_of_their_trace(name, side):
    lengths, rng = getattr(TRACES[name], side), random.Random(f"{name} {side}")
    drawn = sorted(lengths.draw(rng) for _ in range(20_000))
    assert fmean(drawn) == pytest.approx(lengths.mean, rel=0.02)
    for share in (0.1, 0.25, 0.5, 0.75, 0.9):
        below = sum(length <= lengths.at(share) + 0.5 for length in drawn) / len(drawn)
        atom = sum(abs(length - lengths.at(share)) < 1 for length in drawn) / len(drawn)
        assert share - 0.015 <= below <= share + 0.015 + atom, share


@pytest.mark.parametrize("name", TRACES)
def test_quantiles_pass_through_their_points_and_never_fall_between_them(name):
    for lengths in (TRACES[name].prompt, TRACES[name].output):
        shares, tokens = zip(*lengths.points)
        assert [lengths.at(share) for share in shares] == pytest.approx(tokens)
        between = [lengths.at(i / 1000) for i in range(1001)]
        assert between == sorted(between) and fmean(between) == pytest.approx(lengths.mean, rel=0.02)


def test_a_fit_has_the_mean_that_was_published_for_the_whole_trace():
    published = {name: fit for name, fit in TRACES.items() if fit.published_mean_tokens}
    assert published
    for fit in published.values():
        assert (fit.prompt.mean, fit.output.mean) == pytest.approx(fit.published_mean_tokens, rel=0.05)


def test_every_trace_has_a_rate_and_a_source():
    assert all(fit.requests_per_s > 0 and fit.source and fit.prompt.points[0][0] == 0 for fit in TRACES.values())


def test_a_constant_length_is_all_that_is_drawn():
    lengths, rng = Quantiles.constant(7), random.Random(0)
    assert {lengths.draw(rng) for _ in range(100)} == {7} and lengths.mean == lengths.at(0) == lengths.at(0.3) == 7


@pytest.mark.parametrize("median, sigma", [(100, 0.5), (1000, 1.0), (50, 0.0)])
def test_a_lognormal_has_its_median_and_deviation(median, sigma):
    lengths, rng = Quantiles.lognormal(median, sigma, 10**9, 513), random.Random(1)
    logs = [math.log(lengths.draw(rng)) for _ in range(20_000)]
    assert lengths.at(0.5) == pytest.approx(median, rel=0.01)
    assert fmean(logs) == pytest.approx(math.log(median), abs=0.02) and pstdev(logs) == pytest.approx(sigma, abs=0.02)


def test_a_lognormal_is_cut_at_both_ends():
    lengths, rng = Quantiles.lognormal(10, 2, 50), random.Random(2)
    drawn = [lengths.draw(rng) for _ in range(5000)]
    assert min(drawn) == 1 and max(drawn) == 50 and fmean(drawn) == pytest.approx(lengths.mean, rel=0.03)
    assert Quantiles.lognormal(10_000, 0.1, 100).mean == 100


@pytest.mark.parametrize("points", [
    (), ((0, 1),), ((0, 1), (0.5, 3)), ((0.1, 1), (1, 3)), ((0, 5), (1, 4)), ((0, 0), (1, 3)), ((0, -1), (1, 3)),
    ((0, 1), (0.5, 2), (0.5, 3), (1, 4)), ((0, 1), (0.7, 2), (0.5, 3), (1, 4)), ((0, 1), (math.nan, 2), (1, 3)),
    ((0, 1), (1, math.nan)), ((0, 1), (1, math.inf)), ((0, "a"), (1, "b")), ((0, 1), ("x", 2), (1, 3)),
    ((0, 1, 2), (1, 2, 3)),
    None, 5,
], ids=repr)
def test_points_that_are_no_quantiles_are_refused_by_name(points):
    with pytest.raises(ValueError, match="points"):
        Quantiles(points)


@pytest.mark.parametrize("call, name", [
    (lambda: Quantiles.constant(0), "num_tokens"), (lambda: Quantiles.constant(1.5), "num_tokens"),
    (lambda: Quantiles.lognormal(0, 1, 10), "median_tokens"),
    (lambda: Quantiles.lognormal(math.nan, 1, 10), "median_tokens"),
    (lambda: Quantiles.lognormal(5, -1, 10), "sigma"), (lambda: Quantiles.lognormal(5, math.inf, 10), "sigma"),
    (lambda: Quantiles.lognormal(5, 1, 0), "max_tokens"), (lambda: Quantiles.lognormal(5, 1, 10, 1), "num_points"),
    (lambda: Quantiles.lognormal(5, 1, 10, 0), "num_points"),
])
def test_bad_lengths_are_refused_by_name(call, name):
    with pytest.raises(ValueError, match=name):
        call()


# Arrivals


@pytest.mark.parametrize("cv", [0, 0.5, 1, 3])
@pytest.mark.parametrize("rate", [0.25, 40])
def test_gaps_have_the_mean_and_the_deviation_asked_for(cv, rate):
    """Pooled over seeds: at cv 3 the mean of 20,000 gaps is itself uncertain by 2 %."""
    times = [arrival_times(20_000, rate, cv, seed) for seed in range(4)]
    gaps = [b - a for one in times for a, b in zip([0.0, *one], one)]
    assert fmean(gaps) == pytest.approx(1 / rate, rel=0.03) and min(gaps) >= 0
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.05, abs=1e-6)


def test_without_a_rate_everything_is_there_at_once():
    assert arrival_times(5, None) == [0.0] * 5


def test_arrivals_are_those_of_their_seed():
    """A longer run begins as a shorter one."""
    assert arrival_times(50, 2.0, 1.5, 3) == arrival_times(80, 2.0, 1.5, 3)[:50]
    assert arrival_times(50, 2.0, 1.5, 3) != arrival_times(50, 2.0, 1.5, 4)


@pytest.mark.parametrize("rate", [0, *NO_NUMBERS], ids=repr)
def test_nonsense_rates_are_refused_by_name(rate):
    with pytest.raises(ValueError, match="requests_per_s"):
        arrival_times(3, rate)


@pytest.mark.parametrize("rate", [None, 1.0])
@pytest.mark.parametrize("cv", [*NO_NUMBERS, 1e-200], ids=repr)
def test_nonsense_deviations_are_refused_by_name(cv, rate):
    """One that is legal but next to nothing arrives evenly."""
    if cv == 1e-200:
        assert arrival_times(3, rate, cv) == pytest.approx([1, 2, 3] if rate else [0, 0, 0])
        return
    with pytest.raises(ValueError, match="cv"):
        arrival_times(3, rate, cv)


@pytest.mark.parametrize("count", [0, 2.0, None, *NO_NUMBERS], ids=repr)
def test_nonsense_counts_are_refused_by_name(count):
    with pytest.raises(ValueError, match="num_requests"):
        arrival_times(count, 1.0)


# Workloads


@pytest.mark.parametrize("trace", [*TRACES, SMALL], ids=[*TRACES, "own"])
def test_a_workload_is_that_of_its_seed_and_keeps_to_the_length(trace):
    settings = dict(max_seq_len=2000, requests_per_s=3.0, cv=2.0, seed=5)
    rows = make_workload(trace, 300, **settings)
    assert rows == make_workload(trace, 300, **settings) != make_workload(trace, 300, **{**settings, "seed": 6})
    assert all(r.prompt_tokens + r.output_tokens <= 2000 and r.max_new_tokens is None for r in rows)
    assert [r.arrival_s for r in rows] == arrival_times(300, 3.0, 2.0, 5)
    assert all(r.prefix is None and r.prefix_tokens == 0 and r.owner is None for r in rows)


def test_a_workload_has_the_lengths_of_its_trace():
    rows, fit = make_workload("azure-conversation-2023", 10_000, max_seq_len=100_000), TRACES["azure-conversation-2023"]
    assert fmean(r.prompt_tokens for r in rows) == pytest.approx(fit.prompt.mean, rel=0.03)
    assert fmean(r.output_tokens for r in rows) == pytest.approx(fit.output.mean, rel=0.03)


def test_lengths_depend_on_neither_rate_nor_cap():
    """The designs and the rates that are compared serve the same requests."""
    plain = make_workload(SMALL, 200, max_seq_len=1000, seed=1)
    capped = make_workload(SMALL, 200, max_seq_len=1000, seed=1, requests_per_s=7.0, cv=0.3, max_new_tokens=40)
    assert [r.prompt_tokens for r in plain] == [r.prompt_tokens for r in capped]
    assert [min(r.output_tokens, 40) for r in plain] == [r.output_tokens for r in capped]


def test_the_cap_of_clients_is_what_admission_counts():
    """It is cut where the sequence ends, and no output exceeds it."""
    rows = make_workload(SMALL, 500, max_seq_len=300, max_new_tokens=50)
    assert all(r.max_new_tokens == min(50, 300 - r.prompt_tokens) >= r.output_tokens for r in rows)
    assert {r.max_new_tokens for r in rows} > {50} and max(r.output_tokens for r in rows) == 50


def test_prefixes_come_before_the_drawn_prompt():
    plain = make_workload(SMALL, 400, max_seq_len=10_000)
    rows = make_workload(SMALL, 400, max_seq_len=10_000, num_prefixes=4, prefix_tokens=64)
    assert {r.prefix for r in rows} == {0, 1, 2, 3} and {r.prefix_tokens for r in rows} == {64}
    assert min(r.prompt_tokens for r in rows) > 64
    assert fmean(r.prompt_tokens for r in rows) == pytest.approx(64 + fmean(r.prompt_tokens for r in plain), rel=0.15)
    crowded = make_workload(SMALL, 400, max_seq_len=100, num_prefixes=2, prefix_tokens=98)
    assert all((r.prompt_tokens, r.output_tokens, r.prefix_tokens) == (99, 1, 98) for r in crowded)


@pytest.mark.parametrize("name, value", [
    ("trace", "nothing"), ("trace", None), ("trace", []), ("num_requests", 0), ("num_requests", 1.5),
    ("max_seq_len", 1),
    ("max_seq_len", "9"), ("requests_per_s", 0), ("requests_per_s", math.nan), ("cv", -1), ("max_new_tokens", 0),
    ("max_new_tokens", True), ("num_prefixes", -1), ("num_prefixes", 1.5), ("prefix_tokens", -1),
    ("prefix_tokens", "a"),
])
def test_bad_workloads_are_refused_by_name(name, value):
    settings = {"trace": SMALL, "num_requests": 3, "max_seq_len": 1000, name: value}
    with pytest.raises(ValueError, match=name):
        make_workload(**settings)


def test_a_prefix_leaves_room_for_a_token_of_each_side():
    with pytest.raises(ValueError, match="prefix_tokens"):
        make_workload(SMALL, 3, max_seq_len=100, num_prefixes=2, prefix_tokens=99)


@pytest.mark.parametrize("name, value", [
    *(("arrival_s", value) for value in NO_NUMBERS), ("prompt_tokens", 0), ("prompt_tokens", 1.0), ("output_tokens", 0),
    ("output_tokens", True), ("max_new_tokens", 4), ("max_new_tokens", "9"), ("prefix_tokens", 11),
    ("prefix_tokens", -1),
    ("prefix", None), ("prefix", "x"), ("priority", 10), ("priority", -1), ("priority", "a"), ("owner", "x"),
    ("owner", 1.5),
], ids=repr)
def test_bad_rows_are_refused_by_name(name, value):
    fields = {"arrival_s": 0.0, "prompt_tokens": 10, "output_tokens": 5, "prefix": 1, "prefix_tokens": 4, name: value}
    with pytest.raises(ValueError, match=name):
        WorkloadRow(**fields)


# Acceptance


@pytest.mark.parametrize("k", [0, 1, 4, 15])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 1.0])
def test_an_acceptance_has_the_mean_that_it_was_made_from(k, share):
    acceptance = Acceptance.from_mean(1 + share * k, k)
    assert acceptance.mean == pytest.approx(1 + share * k, abs=1e-6) and len(acceptance.shares) == k + 1
    assert sum(acceptance.shares) == pytest.approx(1) and min(acceptance.shares) >= 0


def test_each_draft_is_right_with_one_chance_given_those_before_it():
    shares = Acceptance.from_mean(2.5, 5).shares
    reached = [sum(shares[i:]) for i in range(6)]
    assert [b / a for a, b in zip(reached, reached[1:])] == pytest.approx([reached[1]] * 5)


@pytest.mark.parametrize("mean, k, name", [
    (5.001, 4, "mean"), (0.99, 4, "mean"), (1.01, 0, "mean"), *((value, 4, "mean") for value in NO_NUMBERS),
    (2, -1, "num_draft_tokens"), (2, 1.5, "num_draft_tokens"),
])
def test_a_mean_that_no_drafts_can_give_is_refused(mean, k, name):
    with pytest.raises(ValueError, match=name):
        Acceptance.from_mean(mean, k)


def test_fewer_drafts_keep_the_shares_of_the_first():
    acceptance = Acceptance((0.1, 0.2, 0.3, 0.25, 0.15))
    for k in range(4):
        cut = acceptance.cut(k)
        assert cut.shares[:k] == acceptance.shares[:k] and cut.shares[k] == pytest.approx(sum(acceptance.shares[k:]))
        assert len(cut.shares) == k + 1 and cut.mean <= acceptance.mean
    assert acceptance.cut(4) == acceptance.cut(9) == acceptance
    whole = Acceptance.from_mean(3.43, 15)
    assert whole.cut(4).mean == pytest.approx(sum((1 - whole.shares[0]) ** i for i in range(5)))


@pytest.mark.parametrize("shares", [(0.1, 0.2, 0.3, 0.4), (3, 0, 1), (0, 0, 1), (1, 0, 0), (1,), (0, 2, 0, 6, 0)])
def test_drawn_gains_have_their_shares(shares):
    acceptance, rng, count = Acceptance(shares), random.Random(3), 20_000
    drawn = [acceptance.draw(rng) for _ in range(count)]
    got = [drawn.count(i + 1) / count for i in range(len(shares))]
    assert sum(got) == 1 and got == pytest.approx([s / sum(shares) for s in shares], abs=0.012)
    assert all((g == 0) == (s == 0) for g, s in zip(got, shares))
    assert fmean(drawn) == pytest.approx(acceptance.mean, rel=0.02)


def test_recorded_gains_are_counted():
    acceptance = Acceptance.from_gains(iter([1, 1, 3, 5, 1]), 4)
    assert acceptance.shares == (3, 0, 1, 0, 1) and acceptance.mean == 11 / 5


@pytest.mark.parametrize("call, name", [
    *((lambda shares=shares: Acceptance(shares), "shares") for shares in (
        (), (0, 0), (-1, 2), (math.nan,), (math.inf, 1), ("a",), (True, True), None,
    )),
    (lambda: Acceptance.from_gains([0], 4), "gains"), (lambda: Acceptance.from_gains([6], 4), "gains"),
    (lambda: Acceptance.from_gains([1.5], 4), "gains"), (lambda: Acceptance.from_gains([], 4), "shares"),
    (lambda: Acceptance((1, 1)).cut(-1), "num_draft_tokens"),
])
def test_bad_acceptances_are_refused_by_name(call, name):
    with pytest.raises(ValueError, match=name):
        call()


# Files


@pytest.fixture
def write(tmp_path):
    """Lines into a file; its path."""
    def to(name, *lines):
        path = tmp_path / name
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return to


def lengths(rows):
    return [(r.prompt_tokens, r.output_tokens) for r in rows]


def test_an_azure_file_is_read_to_a_fraction_of_a_microsecond(write):
    path = write("a.csv", AZURE, "2023-11-16 18:17:03.9799600,374,44", "2023-11-16 18:17:04.0319600,396,109",
                 "2023-11-17 00:00:00,5,6")
    rows = read_trace(path)
    assert [r.arrival_s for r in rows] == pytest.approx([0, 0.052, 20_576.02004], abs=1e-6)
    assert lengths(rows) == [(374, 44), (396, 109), (5, 6)]


def test_a_mooncake_file_is_in_milliseconds(write):
    rows = read_trace(write("m.jsonl", MOONCAKE.format(3000, 6758, 500), "", MOONCAKE.format(27_500, 7, 1)))
    assert [r.arrival_s for r in rows] == [0, 24.5] and lengths(rows) == [(6758, 500), (7, 1)]


def test_a_file_of_ones_own_has_every_field(write):
    header = f"{OWN},max_new_tokens,priority,prefix,prefix_tokens,owner"
    rows = read_trace(write("o.csv", header, "1.5,30,4,8,2,3,16,9", "2.5,30,4,,,,,"))
    assert rows == [WorkloadRow(0.0, 30, 4, 8, 2, 3, 16, 9), WorkloadRow(1.0, 30, 4)]


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_workload_comes_back_from_a_file(write, suffix):
    options = dict(max_new_tokens=60, num_prefixes=3, prefix_tokens=8)
    rows = make_workload(SMALL, 50, max_seq_len=1000, requests_per_s=2.0, **options)
    names = [*OWN.split(","), "max_new_tokens", "priority", "prefix", "prefix_tokens"]
    if suffix == "csv":
        lines = [",".join(names), *(",".join(map(str, astuple(r)[:7])) for r in rows)]
    else:
        lines = ["{" + ", ".join(f'"{n}": {v}' for n, v in zip(names, astuple(r))) + "}" for r in rows]
    assert read_trace(write(f"w.{suffix}", *lines)) == from_zero(rows)


def test_a_byte_order_mark_is_no_part_of_the_header(write):
    assert lengths(read_trace(write("b.csv", "\ufeff" + OWN, "0,1,2"))) == [(1, 2)]


def test_rows_are_put_in_order_and_the_first_is_at_zero(write):
    """Those that come at once keep the order of the file."""
    rows = read_trace(write("o.csv", OWN, "7,1,1", "5.5,2,1", "7,3,1", "5.5,4,1", "6,5,1"))
    assert [(r.arrival_s, r.prompt_tokens) for r in rows] == [(0, 2), (0, 4), (0.5, 5), (1.5, 1), (1.5, 3)]


BAD_CSV = [  # a line and what the reason has to name
    ("0,x,5", "prompt_tokens"), ("0,5,", "output_tokens"), ("0,,5", "prompt_tokens"), (",5,5", "arrival_s"),
    ("0,-3,5", "prompt_tokens"),
    ("0,0,5", "prompt_tokens"), ("0,5,0", "output_tokens"), ("0,5.5,5", "prompt_tokens"), ("0,nan,5", "prompt_tokens"),
    ("nan,5,5", "arrival_s"), ("inf,5,5", "arrival_s"), ("-1,5,5", "arrival_s"), ("soon,5,5", "arrival_s"),
    ("0,5", "column"),
    ("0,5,5,5", "column"), ("0,900,101", "1000"), ("0,1e3,5", "prompt_tokens"),
]
BAD_AZURE = [
    ("yesterday,5,5", "TIMESTAMP"), ("2023-13-16 18:17:03.9799600,5,5", "TIMESTAMP"),
    ("2023-11-16 18:17:03.97x,5,5", "TIMESTAMP"),
    ("2023-11-16 18:17:03.1e5,5,5", "TIMESTAMP"), ("2023-11-16 18:17:03+00:00,5,x", "GeneratedTokens|TIMESTAMP"),
    (",5,5", "TIMESTAMP|arrival_s"),
    ("nan,5,5", "TIMESTAMP"), ("2023-11-16 18:17:03,5,", "GeneratedTokens|output_tokens"),
]
BAD_JSON = [
    ("{", "JSON"), ("hello", "JSON"), ("[1, 2, 3]", "object"), ("7", "object"), ("null", "object"),
    ('{"timestamp": 1, "input_length": 5}', "output_tokens"), (MOONCAKE.format(1, 5.5, 5), "input_length"),
    (MOONCAKE.format("NaN", 5, 5), "timestamp"), (MOONCAKE.format(1, "NaN", 5), "input_length"),
    (MOONCAKE.format(1, "Infinity", 5), "input_length"), (MOONCAKE.format(1, "true", 5), "input_length"),
    (MOONCAKE.format("true", 5, 5), "timestamp"), (MOONCAKE.format("null", 5, 5), ""),
    (MOONCAKE.format(1, "[5]", 5), "input_length"),
    (MOONCAKE.format("[1]", 5, 5), "timestamp"), (MOONCAKE.format(1, '""', 5), "input_length|prompt_tokens"),
    (MOONCAKE.format(-1, 5, 5), "timestamp"), (MOONCAKE.format(1, 0, 5), "prompt_tokens"),
    (MOONCAKE.format(1, 900, 101), "1000"),
    (MOONCAKE.format(1, "1" * 5000, 5), ""), (MOONCAKE.format("1" * 400, 5, 5), "timestamp"),
]


@pytest.mark.parametrize("name, head, good, bad", [
    ("b.csv", [OWN], "3,7,{}", BAD_CSV), ("b.csv", [AZURE], "2023-11-16 18:17:03.5000000,7,{}", BAD_AZURE),
    ("b.jsonl", [], MOONCAKE.replace("{}", "500", 1).replace("{}", "7", 1), BAD_JSON),
], ids=["own", "Azure", "Mooncake"])
def test_each_bad_row_has_its_line_and_reason_and_all_good_rows_are_kept(write, name, head, good, bad):
    lines = [*head, good.format(1)]
    for number, (line, _) in enumerate(bad):
        lines += [line, good.format(number + 2)]
    path, first = write(name, *lines), len(head) + 2
    with pytest.raises(TraceError) as caught:
        read_trace(path, max_seq_len=1000)
    error = caught.value
    assert [line for line, _ in error.bad] == list(range(first, first + 2 * len(bad), 2))
    assert lengths(error.rows) == [(7, n + 1) for n in range(len(bad) + 1)] and error.rows[0].arrival_s == 0
    assert f"{len(bad)} of {2 * len(bad) + 1}" in str(error) and f"line {first}: {error.bad[0][1]}" in str(error)
    assert read_trace(path, max_seq_len=1000, skip_bad_rows=True) == error.rows


@pytest.mark.parametrize("head, line, words", [
    *(([OWN], *case) for case in BAD_CSV), *(([AZURE], *case) for case in BAD_AZURE),
    *(([], *case) for case in BAD_JSON),
], ids=lambda value: repr(value)[:50])
def test_a_bad_row_alone_is_a_trace_error_that_says_why(write, head, line, words):
    path = write("b.csv" if head else "b.jsonl", *head, line)
    for skip in (False, True):
        with pytest.raises(TraceError) as caught:
            read_trace(path, max_seq_len=1000, skip_bad_rows=skip)
        (number, reason), = caught.value.bad
        assert number == len(head) + 1 and re.search(words, reason) and caught.value.rows == []


def test_lines_are_counted_over_empty_ones(write):
    good = MOONCAKE.format(0, 1, 1)
    for path in (write("e.csv", OWN, "0,1,1", "", "", "0,x,1"), write("e.jsonl", good, "", "", "", "?")):
        with pytest.raises(TraceError) as caught:
            read_trace(path)
        assert [line for line, _ in caught.value.bad] == [5]


def test_a_missing_column_spoils_every_row_and_is_named(write):
    with pytest.raises(TraceError, match="prompt_tokens or ContextTokens or input_length") as caught:
        read_trace(write("c.csv", "arrival_s,output_tokens", "0,1", "1,1"), skip_bad_rows=True)
    assert [line for line, _ in caught.value.bad] == [2, 3]


def test_a_message_names_five_bad_rows_and_counts_the_rest(write):
    with pytest.raises(TraceError, match="m.csv: 8 of 9 rows.*line 6: .*; and 3 more$"):
        read_trace(write("m.csv", OWN, *["0,0,0"] * 8, "0,1,1"))


@pytest.mark.parametrize("lines", [[], [""], [OWN], [OWN, ""]])
@pytest.mark.parametrize("skip", [False, True])
def test_a_file_without_requests_is_refused(write, lines, skip):
    with pytest.raises(ValueError, match="path"):
        read_trace(write("e.csv", *lines), skip_bad_rows=skip)
    if OWN not in lines:
        with pytest.raises(ValueError, match="path"):
            read_trace(write("e.jsonl", *lines), skip_bad_rows=skip)


def test_other_files_are_refused(write, tmp_path):
    with pytest.raises(ValueError, match="path.*'.txt'"):
        read_trace(write("t.txt", OWN, "0,1,1"))
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none.csv")


@pytest.mark.parametrize("value", [0, -3, "x", 10.5, True])
def test_a_bad_max_seq_len_is_the_callers_and_no_rows_fault(write, value):
    with pytest.raises(ValueError, match="max_seq_len") as caught:
        read_trace(write("l.csv", OWN, "0,5,5"), max_seq_len=value)
    assert not isinstance(caught.value, TraceError)


def test_rows_from_zero_keep_all_else():
    rows = [WorkloadRow(5.0, 3, 1, prefix=1, prefix_tokens=2), WorkloadRow(2.0, 9, 1, priority=3)]
    assert from_zero(rows) == [WorkloadRow(0.0, 9, 1, priority=3), WorkloadRow(3.0, 3, 1, prefix=1, prefix_tokens=2)]
    assert from_zero([]) == [] and rows[0].arrival_s == 5.0
