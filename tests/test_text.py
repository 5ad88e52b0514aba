"""Stop strings and text: what decoding one token, one character at a time would give, wherever tokens are cut."""

import random

import pytest
from conftest import TINY_LAYER_IDS, make_tiny_drafter
from test_engine import Oracle, Script, run_all, watched

import dflash_paged.engine as engine_module
from dflash_paged.engine import Engine, RefusedRequest, RunningRequest, emit_tokens
from dflash_paged.graphs import GraphLadder, imitate
from dflash_paged.target import PagedTarget
from dflash_paged.text import TextStream, check_stop_strings, fast_tokenizer

EURO, SMILE = "€", "😀"  # 3 and 4 bytes


def fast(backend, **special):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def word_tokenizer():
    """97 words of a few letters, so that stop strings begin, end and lie across them; `</s>` is special."""
    from tokenizers import Tokenizer, decoders, models

    words = ["<s>", "</s>"] + [f"{a}{b}{c}" for a in "abcde" for b in "fghij" for c in "klmno"][:95]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<s>"))
    backend.decoder = decoders.Fuse()  # no spaces between them
    return fast(backend, bos_token="<s>", eos_token="</s>")


def byte_tokenizer(pieces=()):
    """Byte-level BPE of one byte a token, then `pieces` (bytes) merged; id of a byte: the byte itself."""
    from tokenizers import Tokenizer, decoders, models

    shown = [b for r in (range(33, 127), range(161, 173), range(174, 256)) for b in r]
    hidden = [b for b in range(256) if b not in shown]
    char = {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}
    vocab = {char[b]: b for b in range(256)} | {"".join(char[b] for b in p): 256 + i for i, p in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return fast(backend)


def small_byte_tokenizer():
    """97 tokens: letters, and the single bytes of a few characters of two to four bytes."""
    from tokenizers import Tokenizer, decoders, models

    many = sorted({b for c in "é€😀" for b in c.encode()})
    full = byte_tokenizer().get_vocab()
    of_byte = {b: token for token, b in full.items()}
    tokens = [of_byte[b] for b in many] + [of_byte[ord(a)] for a in "abcdefgh"]
    tokens += [x + y for x in "abcdefgh" for y in "abcdefghijkl"][: 97 - len(tokens)]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return fast(backend)


def fallback_tokenizer():
    """Words of letters with bytes to fall back on, as Llama 2, Mistral and Gemma have it; byte b is token 10 + b."""
    from tokenizers import Tokenizer, decoders, models

    vocab = {t: i for i, t in enumerate(["<unk>", "▁", "a", "b", "▁a", "▁b", "c", "d", "e", "f"])}
    vocab |= {f"<0x{b:02X}>": 10 + b for b in range(256)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1),
    ])
    return fast(backend)


def words_of(tokenizer, token_ids) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True)


def plain_end(tokenizer, prompt, new, strings, cap, stops=()):
    """(tokens, reason, text, stop string) of one-token decoding that gives `new`: each token, then each character."""
    start = len(words_of(tokenizer, prompt))
    for n in range(1, len(new) + 1):
        text = words_of(tokenizer, prompt + new[:n])[start:].rstrip("\ufffd")
        for end in range(1, len(text) + 1):
            found = [s for s in strings if text[:end].endswith(s)]
            if found:
                longest = max(found, key=len)
                return new[:n], "stop", text[: end - len(longest)], longest
        if new[n - 1] in stops:
            return new[:n], "stop", text, None
        if n >= cap:
            return new[:n], "length", text, None
    raise AssertionError("too few tokens")


# The stream alone


def test_the_text_is_what_decoding_all_tokens_gives_behind_the_prompt():
    for tokenizer, vocab in ((word_tokenizer(), range(97)), (byte_tokenizer(), b"abc \n.")):
        for seed in range(60):
            rng = random.Random(seed)
            ids = [rng.choice(vocab) for _ in range(40)]
            cut = rng.randrange(30)
            start = len(words_of(tokenizer, ids[:cut]))
            stream = TextStream(tokenizer, ids[:cut])
            for n, token in enumerate(ids[cut:], cut + 1):
                assert stream.add(token) is False
                assert stream.text == stream.settled == words_of(tokenizer, ids[:n])[start:]


def test_a_character_of_several_tokens_comes_when_it_is_whole():
    tokenizer = byte_tokenizer()
    stream, seen = TextStream(tokenizer, list(b"ab")), []
    for byte in f"x{EURO}y{SMILE}".encode():
        stream.add(byte)
        seen.append(stream.text)
    assert seen == ["x", "x", "x", "x€", "x€y", "x€y", "x€y", "x€y", "x€y😀"]


def test_a_character_that_the_prompt_began_is_completed():
    """Wherever the part of the prompt that the stream sees begins: its first token may lie inside a character."""
    tokenizer = byte_tokenizer()
    for text in (EURO * 6, "ab" + SMILE * 4, SMILE * 5):
        data = text.encode()
        for cut in range(1, len(data)):
            stream = TextStream(tokenizer, list(data[:cut]))
            for byte in data[cut:] + b"z":
                stream.add(byte)
            whole = data[:cut].decode(errors="ignore")
            assert stream.text == (text + "z")[len(whole) :], (text, cut)


@pytest.mark.parametrize("strings,found,text", [
    (["abcd", "bc"], "bc", "xa"), (["bcd", "abcd"], "abcd", "x"), (["cd", "bcd", "d"], "bcd", "xa"),
    (["zz", "e"], "e", "xabcd"),
    (["xabcdefg"], "xabcdefg", ""), (["abcdefgh"], None, "xabcdefg"), ([], None, "xabcdefg"),
])
@pytest.mark.parametrize("pieces", [["xabcdefg"], ["xab", "cdefg"], ["xabc", "d", "efg"], list("xabcdefg")])
def test_the_string_that_is_complete_first_ends_the_text_however_it_is_cut(strings, found, text, pieces):
    """Of two that end together, the longer."""
    tokenizer = byte_tokenizer([p.encode() for p in pieces])
    stream, ended = TextStream(tokenizer, [65], strings), []
    for i in range(len(pieces)):
        ended.append(stream.add(256 + i))
        if ended[-1]:
            break
    assert ended == [False] * (len(ended) - 1) + [found is not None]
    assert (stream.stop_string, stream.text) == (found, text)
    assert stream.settled == text or (strings and not found)
    if found is None and strings:
        assert stream.text == text and text.startswith(stream.settled)


def test_settled_text_is_never_taken_back_and_holds_no_more_than_it_must():
    """It grows only; what it holds back is the longest end that begins a stop string."""
    tokenizer = byte_tokenizer()
    for seed in range(200):
        rng = random.Random(seed)
        strings = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 6))) + "c" for _ in range(rng.randint(1, 3))]
        stream, last, text = TextStream(tokenizer, [], strings), "", ""
        for _ in range(30):
            text += rng.choice("aabbc")
            ended = stream.add(ord(text[-1]))
            settled = stream.settled
            assert settled.startswith(last)
            if ended:
                assert settled == stream.text == text[: -len(stream.stop_string)]
                break
            held = max(k for k in range(7) if not k or any(len(s) > k and text.endswith(s[:k]) for s in strings))
            assert settled == text[: len(text) - held] and stream.text == text
            last = settled


def test_a_stop_string_may_begin_and_end_within_a_token_but_not_in_the_prompt():
    tokenizer = byte_tokenizer([b"ab", b"cd"])
    stream = TextStream(tokenizer, [256, 257], ["cda", "bcd"])
    assert not stream.add(256) and stream.text == "ab"  # "cda" would begin in the prompt
    assert stream.add(257) and stream.text == "a" and stream.stop_string == "bcd"


def test_special_tokens_are_no_text():
    tokenizer = word_tokenizer()
    stream = TextStream(tokenizer, [5], ["</s>"])
    assert not stream.add(1) and not stream.add(0) and stream.text == ""


@pytest.mark.parametrize("make", [byte_tokenizer, fallback_tokenizer, small_byte_tokenizer, word_tokenizer])
def test_no_sequence_of_tokens_is_an_error(make):
    """A model may say anything, half characters too: an error here would fail the whole batch's step, again and again.

    Once text is settled it stays; where the tokens are valid text in the end, it's that text.
    """
    tokenizer = make()
    size = len(tokenizer.get_vocab())
    for seed in range(400):
        rng = random.Random(seed)
        some = [rng.randrange(size) for _ in range(4)] + [10 + b for b in b"A\xc3\xa9\xe2\x82\xac" if 10 + b < size]
        ids = [rng.choice(some) for _ in range(30)]
        stream, last = TextStream(tokenizer, ids[: seed % 12], ["zzz"]), ""
        for token in ids[seed % 12 :]:
            stream.add(token)
            assert stream.settled.startswith(last)
            last = stream.settled


def test_stop_strings_and_tokenizers_are_checked_by_name():
    tokenizer = word_tokenizer()
    assert check_stop_strings("abc", tokenizer) == ("abc",)
    assert check_stop_strings(["a", "bc"], tokenizer) == ("a", "bc")
    assert check_stop_strings([], None) == check_stop_strings((), tokenizer) == ()
    for bad in ([""], ["a", ""], [b"a"], [1], 7, {"a"}, None, "", ["a", None], {"a": 1}):
        with pytest.raises(ValueError, match="stop_strings"):
            check_stop_strings(bad, tokenizer)
    for strings in (["a"], "a"):
        with pytest.raises(ValueError, match="stop_strings.*tokenizer"):
            check_stop_strings(strings, None)
    for bad in (object(), "name", None):
        with pytest.raises(ValueError, match="tokenizer"):
            fast_tokenizer(bad)


# In the engine


@pytest.fixture(scope="module")
def oracle():
    return Oracle()


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


def make(oracle, tokenizer, graphs=False, **options):
    options = dict(max_seq_len=96, tokens_per_block=8, tokenizer=tokenizer) | options
    engine = watched(Engine(PagedTarget(oracle.model, TINY_LAYER_IDS), make_tiny_drafter(), **options))
    if graphs:
        engine.graphs = GraphLadder(engine.device_step, [2, engine.max_batch_size], imitate)
    return engine


def test_tokens_end_at_a_string_for_every_offset_cap_and_cut_into_blocks(oracle, tokenizer):
    """Pitfall 37 with strings: tokens, reason and text are one-token decoding's, whatever is accepted at once. The
    string begins in one token and ends in another, lies within one or ends with one."""
    prompt, new = oracle.prompts[1], oracle(oracle.prompts[1], 16)
    text = words_of(tokenizer, new)
    for begin in range(24):
        for string in {text[begin : begin + length] for length in (1, 2, 3, 4, 7)}:
            for cap in range(1, 12):
                want = plain_end(tokenizer, prompt, new, [string], cap)
                for block in (1, 2, 3, 5):
                    stream = TextStream(tokenizer, prompt, [string])
                    request = RunningRequest(0, list(prompt), len(prompt), cap, stream=stream)
                    for first in range(0, 16, block):
                        count = emit_tokens(request, new[first : first + block], 999)
                        assert count == block or request.finish_reason
                        if request.finish_reason:
                            break
                    got = request.tokens[len(prompt) :], request.finish_reason, stream.text, stream.stop_string
                    assert got == want, (string, cap, block)


@pytest.mark.parametrize("context,accept", [("paged", 0), ("paged", 2), ("paged", 4), ("dense", 4)])
def test_a_stop_string_ends_as_in_one_token_decoding(oracle, tokenizer, monkeypatch, context, accept):
    """Pitfall 37 with strings, through the engine; the rows published are those of emitted tokens only."""
    script = Script(monkeypatch, oracle, accept=lambda length: accept)
    prompt = oracle.prompts[1]
    new = oracle(prompt, 24)
    text = words_of(tokenizer, new)
    engine = script.engine = make(oracle, tokenizer, context=context, max_batch_size=1, enable_prefix_reuse=False)
    for begin in range(1, 20, 5):
        for length in (1, 4):
            string = text[begin : begin + length]
            for cap in (1, 4, 5, 6, 9):
                [result] = engine.generate([prompt], cap, stop_strings=[string], stop_token_ids=[])
                want = plain_end(tokenizer, prompt, new, [string], cap)
                got = result.token_ids, result.finish_reason, result.text, result.stop_string
                assert got == want, (string, cap)
    engine = script.engine = make(oracle, tokenizer, context=context, max_batch_size=1)
    string = text[28:31]
    [result] = engine.generate([prompt], 24, stop_strings=string, stop_token_ids=[])
    rows = len(prompt) + len(result.token_ids) - 1
    assert result.stop_string == string and engine.manager.stats().num_published == rows // 8


@pytest.mark.parametrize("accept", [0, 4])
def test_a_stop_token_and_a_stop_string_end_at_whichever_comes_first(oracle, tokenizer, monkeypatch, accept):
    script = Script(monkeypatch, oracle, accept=lambda length: accept)
    prompt = oracle.prompts[5]
    new = oracle(prompt, 20)
    engine = script.engine = make(oracle, tokenizer, max_batch_size=1)
    for at in range(0, 7, 2):
        for stop in range(7):
            string = words_of(tokenizer, new)[3 * at + 1 : 3 * at + 4]
            [result] = engine.generate([prompt], 20, stop_strings=[string], stop_token_ids=[new[stop]])
            want = plain_end(tokenizer, prompt, new, [string], 20, [new[stop]])
            assert (result.token_ids, result.finish_reason, result.text, result.stop_string) == want


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", ["words", "bytes"])
def test_pieces_of_on_text_add_up_to_the_text(oracle, monkeypatch, kind, graphs):
    """No piece is empty, none is taken back; several requests, stops across tokens and characters of several tokens."""
    tokenizer = word_tokenizer() if kind == "words" else small_byte_tokenizer()
    script = Script(monkeypatch, oracle, seed=5)
    engine = script.engine = make(oracle, tokenizer, graphs, max_batch_size=3, max_step_tokens=24)
    pieces, ids = {}, {}
    note = lambda i, piece: pieces.setdefault(i, []).append(piece)
    for n, i in enumerate((9, 0, 4, 6, 2, 7)):
        prompt, new = oracle.prompts[i], oracle(oracle.prompts[i], 26)
        text = words_of(tokenizer, prompt + new)[len(words_of(tokenizer, prompt)) :]
        strings = [s for s in ([text[12:15], "zzz"], [], [text[4:6]])[n % 3] if s and "\ufffd" not in s]
        options = dict(stop_token_ids=[], stop_strings=strings, on_text=note)
        ids[engine.add_request(prompt, 26, **options)] = prompt, new, strings
    results = run_all(engine)
    for i, (prompt, new, strings) in ids.items():
        assert "".join(pieces[i]) == results[i].text and all(pieces[i])
        if kind == "words":
            want = plain_end(tokenizer, prompt, new, strings, 26)
            assert (results[i].token_ids, results[i].finish_reason, results[i].text, results[i].stop_string) == want


def test_text_comes_as_soon_as_it_is_settled(oracle, tokenizer, monkeypatch):
    """Without a stop string in sight every step's tokens come with the step."""
    script = Script(monkeypatch, oracle, accept=lambda length: 2)
    engine, seen = make(oracle, tokenizer), []
    script.engine = engine
    note = lambda i, piece: seen.append(piece)
    engine.add_request(oracle.prompts[4], 20, stop_token_ids=[], stop_strings=["zzz"], on_text=note)
    while engine.running or engine.waiting:
        engine.step()
        for request in engine.running:
            assert "".join(seen) == words_of(tokenizer, request.tokens[request.prompt_len :])
    assert "".join(seen) == words_of(tokenizer, oracle(oracle.prompts[4], 20))


def test_text_is_refused_without_a_tokenizer_and_absent_where_nobody_asks(oracle, tokenizer):
    """Pitfall 41: nothing is dropped in silence, nothing else is touched."""
    engine = make(oracle, None)
    for options in (dict(stop_strings=["a"]), dict(stop_strings="a"), dict(on_text=print)):
        with pytest.raises(RefusedRequest, match=f"{[*options][0]}.*tokenizer"):
            engine.add_request(oracle.prompts[1], 4, **options)
        with pytest.raises(RefusedRequest):
            engine.generate([oracle.prompts[1]], 4, **options)
    assert not engine.waiting and not engine.num_requests
    [result] = engine.generate([oracle.prompts[1]], 4, stop_strings=[], stop_token_ids=[])
    assert result.text is None and result.stop_string is None
    engine = make(oracle, tokenizer)
    for options, name in ((dict(stop_strings=[""]), "stop_strings"), (dict(stop_strings=[3]), "stop_strings"),
                          (dict(on_text=3), "on_text"), (dict(on_token="f"), "on_token")):
        with pytest.raises(RefusedRequest, match=name):
            engine.add_request(oracle.prompts[1], 4, **options)
    with pytest.raises(ValueError, match="tokenizer"):
        make(oracle, object())
    [result] = engine.generate([oracle.prompts[1]], 4, stop_token_ids=[])
    assert result.text is None and result.token_ids == oracle(oracle.prompts[1], 4)


@pytest.mark.parametrize("place,graphs", [("start", True), ("update_resources", False), ("forward", True),
                                          ("emit_tokens", False), ("emit_tokens", True)])
def test_after_failed_steps_and_preemptions_the_text_is_right(oracle, tokenizer, monkeypatch, place, graphs):
    """No piece comes twice, none is lost, and a stop that a failed step saw is seen again."""
    engine = make(oracle, tokenizer, graphs, max_batch_size=2)
    owner, name = {
        "start": (engine.device_step.readback, "start"), "update_resources": (engine.manager, "update_resources"),
        "forward": (engine.target, "forward"), "emit_tokens": (engine_module, "emit_tokens"),
    }[place]
    real, calls = getattr(owner, name), iter(range(1, 10**6))

    def fail_sometimes(*args):
        fails = next(calls) % 5 == 3
        if fails and name == "emit_tokens":  # behind its work: the stream knows tokens that didn't happen
            real(*args)
        if fails:
            raise RuntimeError("planted")
        return real(*args)

    monkeypatch.setattr(owner, name, fail_sometimes)
    pieces, ids, results, steps, planted = {}, {}, {}, 0, 0
    for i in (9, 4, 6, 2):
        new = oracle(oracle.prompts[i], 18)
        string = words_of(tokenizer, new)[31:34]
        note = lambda i, piece: pieces.setdefault(i, []).append(piece)
        options = dict(stop_token_ids=[], stop_strings=[string], on_text=note)
        ids[engine.add_request(oracle.prompts[i], 18, **options)] = i, string
    while engine.running or engine.waiting:
        steps += 1
        if steps % 7 == 4 and engine.running:
            engine.preempt(engine.running[0].request_id)
        try:
            results.update((r.request_id, r) for r in engine.step())
        except RuntimeError as error:
            assert "planted" in str(error)
            planted += 1
    assert planted >= 3
    for request_id, (i, string) in ids.items():
        result = results[request_id]
        want = plain_end(tokenizer, oracle.prompts[i], oracle(oracle.prompts[i], 18), [string], 18)
        assert (result.token_ids, result.finish_reason, result.text, result.stop_string) == want
        assert "".join(pieces[request_id]) == result.text


def test_an_aborted_request_has_its_text_and_hears_no_more(oracle, tokenizer):
    engine, seen = make(oracle, tokenizer), []
    i = engine.add_request(oracle.prompts[9], 30, stop_token_ids=[], on_text=lambda i, piece: seen.append(piece))
    for _ in range(4):
        engine.step()
    result = engine.abort(i)
    assert result.finish_reason == "aborted" and "".join(seen) == result.text == words_of(tokenizer, result.token_ids)
    engine.step()
    assert "".join(seen) == result.text
