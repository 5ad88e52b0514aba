"""What the host spends: the managers that are timed are full, and the rows say what they timed."""

import csv

import pytest

from dflash_paged.host_costs import filled_manager, match_times, measure_manager, record_manager, step_times


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("windows", [(), (64,)])
def test_a_filled_manager_has_few_free_blocks_and_room_for_its_steps(held, windows):
    m = filled_manager(640, 8, held, windows)
    stats = m.stats().groups[0]
    assert len(m.live_requests()) == 8 and m.num_groups == 1 + len(windows)
    assert stats.num_free <= (260 if held else 8)
    assert (stats.num_referenced > 250) if held else (stats.num_cached > 150)
    m.check_invariants()
    rows = step_times(m, num_steps=10)
    assert [r["call"] for r in rows] == ["prepare_resources", "update_resources", "both"]
    assert all(0 < r["best_ms"] <= r["median_ms"] <= r["p90_ms"] for r in rows)
    assert (m.stats().num_evicted > 0) == (not held)
    m.check_invariants()


def test_matching_finds_the_prompt():
    assert [r["call"] for r in match_times(1024, 3)] == [
        "find_prefix of tokens", "find_prefix, hashes kept", "add_sequence and free_resources"
    ]


def test_rows_are_written_with_the_machine_that_made_them(tmp_path, capsys):
    path = record_manager(tmp_path, sizes=(256,), num_reqs=8, num_steps=3, pause_s=0)
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 3 + 3 == len(capsys.readouterr().out.splitlines())
    assert all((int(r["num_evicted"]) > 0) == (r["blocks"] == "cached") for r in rows if r["num_requests"] == "8")
    assert {r["blocks"] for r in rows} == {"held", "cached"} and all(r["torch"] and r["date"] for r in rows)
    assert {r["num_groups"] for r in rows} == {"1", "2"}


def test_bad_sizes_are_refused():
    for call, words in (
        (lambda: filled_manager(10, 8, True), "num_blocks"), (lambda: filled_manager(512, 0, True), "num_reqs"),
        (lambda: step_times(filled_manager(640, 8, True), 0), "num_steps"), (lambda: match_times(1), "num_tokens"),
        (lambda: match_times(1024, 0), "repeats"), (lambda: step_times(filled_manager(640, 8, True), 3, 0), "num_rounds"), (lambda: list(measure_manager((10,))), "num_blocks"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
