"""Kernels are defined everywhere, launched where Triton is, and compile nothing anew from step to step."""

import ast
import importlib
import inspect
import subprocess
import sys

import pytest
import torch

from dflash_paged.kernels import ceil_div, power_of_two, runs_kernel

MODULES = ("block_table", "store", "bench")
# Strides of a projection: that they are multiples of 16 tells the compiler that loads may be wide.
PER_LAYER = {"k_pages", "v_pages", "k_scales", "v_scales", "odd_num_pages"}  # tuples
FLOATS = {"eps"}  # floats are never specialised


def kernels():
    """(module name, definition, decorator's options) of every kernel in the package."""
    found = []
    for name in MODULES:
        module = importlib.import_module(f"dflash_paged.{name}")
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                [decorator] = node.decorator_list
                assert decorator.func.id == "jit"
                call = ast.Call(ast.Name("dict", ast.Load()), [], decorator.keywords)
                call = ast.fix_missing_locations(ast.Expression(ast.copy_location(call, decorator)))
                options = eval(compile(call, name, "eval"), vars(module))
                found.append(pytest.param(node, options, id=f"{name}.{node.name}"))
    return found


def parameters(node):
    """Names of run-time parameters and of compile-time ones."""
    is_constant = lambda a: a.annotation is not None and ast.unparse(a.annotation) == "tl.constexpr"
    constants = [a.arg for a in node.args.args if is_constant(a)]
    return [a.arg for a in node.args.args if a.arg not in constants], constants


def test_every_kernel_of_the_package_is_found():
    names = {node.values[0].name for node in kernels()}
    assert names == {"_draft_inputs_kernel", "_verify_inputs_kernel", "_store_kernel", "_empty_kernel"}


@pytest.mark.parametrize("node,options", kernels())
def test_integers_that_change_from_step_to_step_compile_nothing_anew(node, options):
    """Otherwise 1, multiples of 16 and the rest each compile a kernel, in the middle of serving."""
    at_run_time, constants = parameters(node)
    pointers = {n for n in at_run_time if n.endswith("_ptr")}
    integers = set(at_run_time) - pointers - PER_LAYER - FLOATS
    assert integers == set(options.get("do_not_specialize", ()))
    assert all(n.isupper() for n in constants) and not any(n.isupper() for n in at_run_time)


@pytest.mark.parametrize("node,options", kernels())
def test_pointers_to_slices_are_not_specialised_on_alignment(node, options):
    """Of the step's tensors any slice may come, as a graph's buffers give them; weights and pages stay."""
    pointers = {n for n in parameters(node)[0] if n.endswith("_ptr")}
    free = set(options.get("do_not_specialize_on_alignment", ()))
    fixed = {"_store_kernel": {"k_ptr", "v_ptr", "cos_sin_ptr", "weight_ptr"}, "_empty_kernel": {"x_ptr"}}
    assert free == pointers - fixed.get(node.name, set())


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from dflash_paged import bench, block_table, store
from dflash_paged.kernels import jit

names = []
for module in (block_table, store, bench):
    for name, kernel in vars(module).items():
        if name.endswith("_kernel") and hasattr(kernel, "__getitem__"):
            names.append(name)
            try:
                kernel[(1,)](torch.zeros(1), N=1)
            except RuntimeError as error:
                assert str(error).startswith(f"{name}: expected Triton to be installed"), error
            else:
                raise AssertionError(f"{name} ran")
assert {*names} == {"_draft_inputs_kernel", "_empty_kernel", "_store_kernel", "_verify_inputs_kernel"}

@jit(do_not_specialize=["n"])
def twice_kernel(x_ptr, n):
    "What it does."

assert (twice_kernel.__name__, twice_kernel.__doc__) == ("twice_kernel", "What it does.")
case = bench.draft_inputs_case(2, 4, 4, 1, device="cpu")
assert block_table.build_draft_inputs(**case).ctx_lens.min() > 0  # references need no Triton
"""


def test_without_triton_kernels_are_defined_and_a_launch_says_which_is_missing():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_power_of_two_is_the_smallest_that_is_large_enough():
    for n in range(1, 2050):
        p = power_of_two(n)
        assert p & (p - 1) == 0 and n <= p < 2 * n
    assert power_of_two(0) == 1


def test_ceil_div_pieces_cover_and_no_piece_is_empty():
    for a in range(40):
        for b in range(1, 12):
            assert ceil_div(a, b) == len(range(0, a, b))
    assert ceil_div(2**62 + 1, 2) == 2**61 + 1


def test_only_cuda_tensors_run_a_kernel():
    assert not runs_kernel(torch.zeros(1)) and not runs_kernel(torch.zeros(1, device="meta"))
    if torch.cuda.is_available():
        assert runs_kernel(torch.zeros(1, device="cuda"))
