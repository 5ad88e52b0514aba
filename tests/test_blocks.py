"""Blocks and prefixes: tree, pins, eviction a group, what a hit is worth. Random histories: test_manager_groups_model."""

import random
from array import array

import pytest

from dflash_paged import blocks as blocks_module
from dflash_paged.blocks import (
    MAX_TOKEN_ID,
    BlockLedger,
    GroupSpec,
    PrefixTree,
    Prompt,
    check_ledger,
    check_tokens,
    common_bytes,
    root_key,
)

SIZE = 8
FULL = GroupSpec(None, (0, 1), True, True, 16, 8, 16)
TARGET = GroupSpec(None, (0,), True, False, 8, 0, 16)
WINDOWED_TARGET = GroupSpec(20, (1,), True, False, 8, 0, 16)
WINDOWED_DRAFT = GroupSpec(12, (2,), False, True, 8, 8, 16)


def prompt_of(num_blocks: int, extra: int = 1, salt=None) -> Prompt:
    """Block i is eight times the token i."""
    return Prompt([*(i for i in range(num_blocks) for _ in range(SIZE)), *[99] * extra], salt, SIZE)


def chain(ledger: BlockLedger, num_blocks: int, held: bool = False, missing=()) -> list:
    """Publish a chain of blocks in every group; let go of them, the last one first, unless `held`."""
    parent, nodes = ledger.tree.root(None), []
    for i in range(num_blocks):
        own = [ledger.take(group, 1)[0] for group in range(len(ledger.groups))]
        parent = ledger.publish(parent, array("i", [i] * SIZE).tobytes(), own, draft_missing=i in missing)
        nodes.append(parent)
    if not held:
        for node in reversed(nodes):
            for group, block in enumerate(node.blocks):
                if block >= 0:
                    ledger.drop(group, [block])
    return nodes


def holders(ledger: BlockLedger):
    from collections import Counter

    return [Counter(dict(enumerate(pool.ref_counts))) for pool in ledger.pools]


# Groups and prompts


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 12, 20, 64])
def test_the_first_block_is_that_of_the_oldest_row_that_a_query_reads(window):
    """A query at n reads k with n - k < window; checked row by row."""
    group = GroupSpec(window, (0,), True, True, 8)
    for n in range(70):
        readable = [k for k in range(n) if n - k < window]
        assert group.first_block(n, SIZE) == (readable[0] // SIZE if readable else n // SIZE)
    assert GroupSpec(None, (0,), True, True, 8).first_block(1000, SIZE) == 0


def test_a_prompt_keeps_one_token_to_compute():
    for length, keys in ((0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2)):
        assert len(Prompt(range(length), None, SIZE).keys) == keys


def test_keys_depend_on_all_tokens_before_and_on_the_salt():
    base = prompt_of(3).keys
    assert prompt_of(3, 5).keys == base and prompt_of(2).keys == base[:2]
    changed = Prompt([1, *prompt_of(3).tokens[1:]], None, SIZE).keys
    assert not set(changed) & set(base), "the first token changes every key"
    for salt in (0, "0", "None", ""):
        assert not set(prompt_of(3, salt=salt).keys) & set(base)


@pytest.mark.parametrize("bad", [[1.0], [True], [-1], [MAX_TOKEN_ID + 1], ["1"], [None], [1, 2, 3.5]])
def test_tokens_that_are_no_token_ids_are_refused(bad):
    with pytest.raises(ValueError, match="^tokens: expected ints from 0"):
        check_tokens("tokens", bad)


def test_an_array_is_copied_and_checked_like_any_other():
    own = array("i", [1, 2, 3])
    prompt = Prompt(own, None, SIZE)
    own[0] = 9
    assert prompt.tokens.tolist() == [1, 2, 3]
    for bad in (array("i", [1, -2]), array("q", [1, -2]), array("d", [1.0])):
        with pytest.raises(ValueError, match="^tokens: expected ints"):
            check_tokens("tokens", bad)


def test_tokens_of_any_iterable_are_taken():
    for tokens in ([1, 2, MAX_TOKEN_ID], (1, 2, MAX_TOKEN_ID), iter([1, 2, MAX_TOKEN_ID])):
        assert check_tokens("tokens", tokens).tolist() == [1, 2, MAX_TOKEN_ID]
    assert check_tokens("tokens", []) == array("i")


def test_common_bytes_is_the_length_of_the_common_prefix():
    rng = random.Random(0)
    for _ in range(500):
        a = bytes(rng.choices((0, 1, 255), k=rng.randrange(0, 12)))
        b = bytes(rng.choices((0, 1, 255), k=rng.randrange(0, 12)))
        expected = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        assert common_bytes(a, b) == expected


def test_the_closest_child_has_the_longest_common_prefix():
    """Against a search over all children."""
    rng = random.Random(1)
    for _ in range(200):
        tree = PrefixTree(1)
        root = tree.root(None)
        children = [rng.choices(range(3), k=SIZE) for _ in range(rng.randrange(1, 20))]
        for tokens in children:
            tree.insert(root, array("i", tokens).tobytes())
        asked = rng.choices(range(3), k=rng.randrange(1, SIZE))
        length = lambda tokens: next((i for i, (a, b) in enumerate(zip(tokens, asked)) if a != b), len(asked))  # noqa: B023
        node, common = tree.closest_child(root, array("i", asked).tobytes())
        assert common == max(map(length, children))
        assert (node is None) == (common == 0)


def test_equal_hashes_of_different_contents_are_no_hit(monkeypatch):
    monkeypatch.setattr(blocks_module, "chain_hash", lambda parent_key, tokens: 7)
    ledger = BlockLedger([FULL], SIZE)
    root = ledger.tree.root(None)
    node = ledger.publish(root, array("i", [1] * SIZE).tobytes(), ledger.take(0, 1))
    assert ledger.publish(root, array("i", [2] * SIZE).tobytes(), ledger.take(0, 1)) is None
    assert ledger.publish(node, array("i", [1] * SIZE).tobytes(), ledger.take(0, 1)) is None
    assert ledger.tree.match(Prompt([2] * 9, None, SIZE)) == []
    assert ledger.tree.match(Prompt([1] * 20, None, SIZE)) == [node]
    assert ledger.tree.match(Prompt([1] * 9, "other", SIZE)) == []


# Eviction


def test_the_full_group_loses_leaves_first_and_windowed_groups_the_oldest():
    ledger = BlockLedger([TARGET, WINDOWED_DRAFT], SIZE)
    nodes = chain(ledger, 3)
    ledger.evict(1)
    assert [node.blocks[1] >= 0 for node in nodes] == [True, True, False]
    ledger.evict(0)
    assert [node.alive for node in nodes] == [True, True, False]
    check_ledger(ledger, holders(ledger))


def test_a_node_that_leaves_gives_its_windowed_blocks_back():
    """Its prefix can't be found any more: what is cached of it is free, what is held is its holder's alone."""
    ledger = BlockLedger([TARGET, WINDOWED_DRAFT], SIZE)
    nodes = chain(ledger, 2)
    ledger.hold(1, nodes[1].blocks[1])
    held = nodes[1].blocks[1]
    for _ in range(2):
        ledger.evict(0)
    check_ledger(ledger, holders(ledger))
    assert not ledger.tree.nodes and not ledger.tree.roots
    assert len(ledger.pools[1].free) == 15 and ledger.pools[1].ref_counts[held] == 1
    ledger.drop(1, [held])
    assert len(ledger.pools[1].free) == 16


def test_without_a_full_target_group_a_node_lives_while_it_offers_anything():
    """Even if the full group is the draft's: a missing draft block never shortens the target's hit."""
    for groups in ([WINDOWED_TARGET, WINDOWED_DRAFT], [GroupSpec(None, (2,), False, True, 8, 8, 16), WINDOWED_TARGET]):
        ledger = BlockLedger(groups, SIZE)
        assert not ledger.has_anchor
        nodes = chain(ledger, 3)
        for group in (0, 1):
            for _ in range(3):
                assert nodes[0].alive
                ledger.evict(group)
                check_ledger(ledger, holders(ledger))
        assert not ledger.tree.nodes and not ledger.tree.roots


def test_publishing_pins_a_block_for_each_of_its_holders():
    """A fork's twin holds the same block: its node stays until both have let go."""
    ledger = BlockLedger([FULL], SIZE)
    (block,) = ledger.take(0, 1)
    ledger.hold(0, block)
    node = ledger.publish(ledger.tree.root(None), array("i", [1] * SIZE).tobytes(), [block])
    assert node.pins == 2
    ledger.drop(0, [block])
    assert not ledger.pools[0].evictable
    ledger.drop(0, [block])
    assert list(ledger.pools[0].evictable) == [block]
    check_ledger(ledger, holders(ledger))


def test_a_draft_only_block_without_rows_is_not_published():
    ledger = BlockLedger([TARGET, WINDOWED_DRAFT], SIZE)
    nodes = chain(ledger, 2, held=True, missing=(1,))
    assert nodes[0].blocks[1] >= 0 and nodes[1].blocks[1] < 0
    assert nodes[1].draft_missing == 0, "the full group has no draft layers to miss"


# What a hit is worth


def test_a_hit_needs_only_the_windows_blocks_of_a_windowed_target():
    ledger = BlockLedger([TARGET, WINDOWED_TARGET], SIZE)
    nodes = chain(ledger, 6)  # the window of 20 reads from row 29 on: blocks 3 to 5
    for node in nodes[:3]:
        ledger.unlink(node, 1)
    assert len(ledger.find(prompt_of(6)).nodes) == 6
    ledger.unlink(nodes[3], 1)
    assert len(ledger.find(prompt_of(6)).nodes) == 0, "no shorter hit has its window whole either"
    check_ledger(ledger, holders(ledger))


def brute_force(ledger: BlockLedger, nodes: list) -> int:
    """The longest hit whose windowed target groups have every block that a next row reads, by trying all."""
    def valid(length):
        for group, spec in enumerate(ledger.groups):
            rows = [k for k in range(length * SIZE) if spec.window is None or length * SIZE - k < spec.window]
            if spec.has_target and any(nodes[k // SIZE].blocks[group] < 0 for k in rows):
                return False
        return True

    return max(length for length in range(len(nodes) + 1) if valid(length))


def test_the_longest_valid_hit_is_found_and_ctx_starts_covers_what_is_missing():
    """Random holes, against a search over all lengths and rows, for every policy."""
    rng = random.Random(3)
    for _ in range(300):
        groups = rng.choice([[TARGET, WINDOWED_TARGET, WINDOWED_DRAFT], [FULL, WINDOWED_DRAFT], [WINDOWED_TARGET, WINDOWED_DRAFT]])
        ledger = BlockLedger(groups, SIZE)
        nodes = chain(ledger, 8, missing=[i for i in range(8) if rng.random() < 0.15])
        for group in range(len(groups)):
            if group or not ledger.has_anchor:
                for node in rng.sample(nodes, rng.choice([0, 1, 2, 5])):
                    if node.blocks[group] >= 0:
                        ledger.unlink(node, group)
        check_ledger(ledger, holders(ledger))
        longest = brute_force(ledger, ledger.tree.match(prompt_of(8)))
        for policy, tail in (("mask", 0), ("recompute_tail", 16), ("recompute_tail", 17), ("truncate", 0)):
            hit = ledger.find(prompt_of(8), policy, tail)
            length = len(hit.nodes)
            assert length <= longest and (policy != "mask" or length == longest)
            assert brute_force(ledger, hit.nodes) == length, "its windows are whole"
            limit = {"mask": longest * SIZE, "truncate": 0}.get(policy, max(0, longest * SIZE - tail) // SIZE * SIZE)
            missing = set()
            for group, spec in enumerate(groups):
                rows = [k for k in range(length * SIZE) if spec.window is None or length * SIZE - k < spec.window]
                for k in rows if spec.has_draft else ():
                    node = hit.nodes[k // SIZE]
                    if node.blocks[group] < 0 or node.draft_missing >> group & 1:
                        missing.add(k // SIZE)
            assert all(i * SIZE < limit for i in missing), "a gap behind the limit"
            assert hit.ctx_start == (max(missing) + 1) * SIZE if missing else hit.ctx_start == 0


def test_a_complete_idle_block_is_never_replaced_by_one_without_draft_rows():
    """The sequence goes on with the better one; another group keeps it."""
    ledger = BlockLedger([FULL, WINDOWED_DRAFT], SIZE)
    (node,) = chain(ledger, 1)
    better = list(node.blocks)
    own = [ledger.take(group, 1)[0] for group in (0, 1)]
    private = list(own)
    ledger.publish(ledger.tree.root(None), node.tokens, own, draft_missing=True)
    assert node.blocks == better and node.draft_missing == 0
    assert own == [better[0], private[1]] and ledger.pools[0].ref_counts[better[0]] == 1
    assert private[0] in ledger.pools[0].free
    check_ledger(ledger, holders(ledger))


def test_a_block_that_a_fork_holds_too_takes_the_node_rather_than_a_block_of_others():
    """Switching to the better block would free nothing: what is available mustn't shrink."""
    ledger = BlockLedger([FULL], SIZE)
    (node,) = chain(ledger, 1)
    (block,) = ledger.take(0, 1)
    ledger.hold(0, block)
    available, own = ledger.pools[0].num_available, [block]
    ledger.publish(ledger.tree.root(None), node.tokens, own, draft_missing=True)
    assert own == [block] == node.blocks and node.pins == 2 and node.draft_missing == 1
    assert ledger.pools[0].num_available == available
    check_ledger(ledger, holders(ledger))


def test_shortening_a_hit_looks_at_each_block_once():
    """A narrow window that lost all its blocks: the hit falls to 0 in time linear in its length."""
    import time

    narrow, took = GroupSpec(9, (2,), False, True, 8, 8, 4000), {}
    for length in (500, 4000):
        ledger = BlockLedger([GroupSpec(None, (0,), True, False, 8, 0, 4000), narrow], SIZE)
        nodes = chain(ledger, length)
        for other in nodes:
            ledger.unlink(other, 1)
        prompt = prompt_of(length)
        start = time.thread_time()
        assert ledger.find(prompt, "truncate").nodes == []
        took[length] = time.thread_time() - start
    assert took[4000] < 30 * took[500] + 0.01


def test_tenants_whose_hashes_are_equal_in_python_have_roots_of_their_own():
    assert len({root_key(salt) for salt in (-1, -2, 0, 2**61 - 1, "0", None, "None")}) == 7


def test_no_root_stays_of_a_tenant_that_could_publish_nothing(monkeypatch):
    monkeypatch.setattr(blocks_module, "chain_hash", lambda parent_key, tokens: 7)
    ledger = BlockLedger([FULL], SIZE)
    ledger.publish(ledger.tree.root("a"), array("i", [1] * SIZE).tobytes(), ledger.take(0, 1))
    root = ledger.tree.root("b")
    assert ledger.publish(root, array("i", [2] * SIZE).tobytes(), ledger.take(0, 1)) is None
    ledger.prune(root)
    assert list(ledger.tree.roots) == ["a"]


def test_part_of_a_block_is_offered_only_with_its_draft_rows():
    ledger = BlockLedger([FULL], SIZE)
    chain(ledger, 3, missing=(2,))
    assert ledger.find(prompt_of(1, 0)).num_copied_tokens == 7
    assert ledger.find(Prompt([0] * 8 + [1] * 3 + [50] * 5, None, SIZE)).num_copied_tokens == 3
    hit = ledger.find(Prompt([0] * 8 + [1] * 8 + [2] * 3 + [50] * 5, None, SIZE))
    assert (len(hit.nodes), hit.source) == (2, None)
    assert ledger.find(prompt_of(1, 0), partial=False).source is None
    assert ledger.find(Prompt([0, 5], "other", SIZE)).source is None


def test_part_of_a_block_leaves_one_token_to_compute():
    ledger = BlockLedger([FULL], SIZE)
    chain(ledger, 2)
    for length in range(1, 17):
        hit = ledger.find(Prompt(prompt_of(2).tokens[:length], None, SIZE))
        assert len(hit.nodes) * SIZE + hit.num_copied_tokens == length - 1


@pytest.mark.parametrize("damage", [
    lambda ledger, nodes: ledger.pools[1].free.append(ledger.pools[1].free[0]),
    lambda ledger, nodes: ledger.pools[1].evictable.popitem(),
    lambda ledger, nodes: setattr(ledger.pools[0], "num_shared", 1),
    lambda ledger, nodes: setattr(nodes[1], "pins", 5),
    lambda ledger, nodes: nodes[0].blocks.__setitem__(1, -1),
    lambda ledger, nodes: nodes[0].children.clear(),
    lambda ledger, nodes: setattr(nodes[1], "tokens", nodes[0].tokens),
    lambda ledger, nodes: setattr(nodes[0], "draft_missing", 2),
    lambda ledger, nodes: ledger.tree.nodes.popitem(),
    lambda ledger, nodes: ledger.pools[0].evictable.move_to_end(next(iter(ledger.pools[0].evictable))),
])
def test_the_invariant_check_sees_damage(damage):
    ledger = BlockLedger([FULL, WINDOWED_DRAFT], SIZE)
    nodes = chain(ledger, 3)
    before = holders(ledger)
    check_ledger(ledger, before)
    damage(ledger, nodes)
    with pytest.raises((AssertionError, KeyError)):
        check_ledger(ledger, before)
