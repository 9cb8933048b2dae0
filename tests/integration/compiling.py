"""Run by test_direct_kernels.py without TRITON_INTERPRET: the kernels compiled, no GPU needed.

The interpreter takes more than the compiler does. Prints one JSON object: machine code bytes by
kernel.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hpstore.loaders.gpu.direct import kernels
from hpstore.loaders.gpu.direct.gpu_decode import BLOCK_WORDS

HOPPER = GPUTarget("cuda", 90, 32)


# Any: a kernel of Triton, which has no types
def compiled(kernel: Any, types: dict[str, str], values: dict[str, int]) -> int:
    """Bytes of machine code for a Hopper GPU."""
    signature = {**types, **dict.fromkeys(values, "constexpr")}
    constants = {(kernel.arg_names.index(name),): value for name, value in values.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return len(triton.compile(source, target=HOPPER).asm["cubin"])


COMBINE = {
    "memory": "*i32",
    "sources": "*i64",
    "targets": "*i64",
    "factors": "*i32",
    "words": "i32",
    "rows": "i32",
}
DIGEST = {
    "memory": "*i64",
    "starts": "*i64",
    "lengths": "*i64",
    "seeds": "*i64",
    "table": "*i64",
    "digests": "*i64",
}

if __name__ == "__main__":
    found = {
        f"combine-{k}-{rows}": compiled(
            kernels.combine, COMBINE, {"K": k, "ROWS": rows, "BLOCK": BLOCK_WORDS}
        )
        for k, rows in ((4, 2), (8, 4), (2, 1), (10, 8))
    }
    found["digest"] = compiled(kernels.digest, DIGEST, {})
    json.dump(found, sys.stdout)
