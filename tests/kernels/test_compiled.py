"""Kernels that are compiled for a GPU where there is none: what the interpreter lets pass, and a compiler does not.

All in one process, because Triton takes seconds to start, and cannot both interpret and compile in the same one.
"""

from __future__ import annotations

import os
import subprocess
import sys

COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hookline_kernels.grouped_small import grouped_small_kernel
from hookline_kernels.latent_inputs_triton import turn_queries_kernel, write_entries_kernel
from hookline_kernels.linear_small import linear_small_kernel
from hookline_kernels.rms_norm_pair import rms_norm_pair_kernel

def build(kernel, constants, types):
    names = kernel.arg_names
    kinds = {name: types.get(name, "*bf16" if name.endswith("_ptr") else "i32") for name in names}
    signature = {name: "constexpr" if name in constants else kinds[name] for name in names}
    known = {(names.index(name),): value for name, value in constants.items() if name in names}
    try:
        triton.compile(ASTSource(kernel, signature, known), target=GPUTarget("cuda", 90, 32))
    except Exception as error:
        sys.exit(f"{kernel.__name__} with {constants}: {error}")

# One column: a GPU gets the size 1 as a constant, which has no methods; the interpreter does not.
constants = dict(columns=1, CODE=-1, HAS_BIAS=False, FORM=0, SPLIT_LIMIT=1, EVEN_N=False, EVEN_K=True)
constants |= dict(BLOCK_M=16, BLOCK_N=16, BLOCK_K=32, STAGES=2, PDL=False)
constants |= dict(TOP_K=2, BY_PAIR=False, ONCE=True, BLOCK_E=4)
types = dict(y_ptr="*fp32", partial_ptr="*fp32") | dict.fromkeys(("count_ptr", "order_ptr", "starts_ptr"), "*i32")
for kernel in (linear_small_kernel, grouped_small_kernel):
    build(kernel, constants, types)

# One head of queries and of keys; with an indexer and without.
sizes = dict(Q_SIZE=2048, L_SIZE=512, HALF=32, BLOCK_Q=2048, BLOCK_L=512, BLOCK_HALF=32, BLOCK_D=128, BLOCK_HEADS=4)
types = dict(cos_ptr="*fp32", sin_ptr="*fp32", index_weight_ptr="*fp32", index_bias_ptr="*fp32", slots_ptr="*i64")
for kernel in (write_entries_kernel, turn_queries_kernel):
    for interleaved, index_size in ((True, 128), (False, 128), (True, 0)):
        constants = sizes | dict(INDEX_SIZE=index_size, INTERLEAVED=interleaved, INDEX_INTERLEAVED=not interleaved)
        constants |= dict(heads=1, index_heads=1, head_parts=1, PDL=True)
        build(kernel, constants, types | dict(eps="fp32"))

build(rms_norm_pair_kernel, dict(SIZE=6144, BLOCK=8192, PDL=True), dict(eps="fp32"))
"""


def test_kernels_compile_for_a_gpu() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    found = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
