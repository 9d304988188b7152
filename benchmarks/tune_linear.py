"""Tunes the products for few tokens on this machine's GPU and writes the table that ships with the kernels.

    python benchmarks/tune_linear.py --seconds 240 [--out kernels/tuned.json] [--store] [--m 1,8,32] [--dtype bfloat16]
    python benchmarks/tune_linear.py --product mlp:gated:9728:896 --product down:plain:896:4864

Prints a line a product and number of tokens as it goes (microseconds a call and TB/s of weights read, ours and the
library's), and the whole table at the end. `--out` merges the choices into that file; `--store` keeps them for this
user. Without either nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

from hookline_kernels import tuning
from hookline_kernels.tune_linear import LLAMA_8B, TOKENS, Product, line, sweep


def product(text: str) -> Product:
    """From name:kind:N:K."""
    name, kind, n, k = text.split(":")
    if kind not in tuning.KINDS:
        raise argparse.ArgumentTypeError(f"kind must be one of {', '.join(tuning.KINDS)}, got {kind!r}")
    return Product(name, kind, int(n), int(k))


def main() -> None:
    """Exit code 1 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--product", type=product, action="append", help="name:kind:N:K; Llama-8B's by default")
    parser.add_argument("--m", default=",".join(map(str, TOKENS)), help="numbers of tokens, the most valuable first")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--no-pdl", action="store_true", help="do not try programmatic dependent launch")
    parser.add_argument("--out", type=Path, help="JSON to merge the choices into")
    parser.add_argument("--store", action="store_true", help="keep the choices in this user's cache")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tune_linear: this needs a CUDA device, and torch sees none")
    found: list[tuning.TunedChoice] = []
    options = {"dtype": getattr(torch, args.dtype), "seconds": args.seconds, "pdl": not args.no_pdl}
    print_now = partial(print, flush=True)
    for choice in sweep(args.product or LLAMA_8B, [int(m) for m in args.m.split(",")], report=print_now, **options):
        found.append(choice)
        if args.out:  # at each choice: what is measured is not lost if the machine goes away
            old = tuning.parse(args.out.read_text(), str(args.out)) if args.out.is_file() else ()
            args.out.write_text(tuning.dump(tuning.merge(old, [choice])))
    print("\n" + "\n".join(line(choice) for choice in sorted(found, key=lambda choice: choice.key)))
    if args.store:
        print(f"stored in {tuning.store(found)}", file=sys.stderr)


if __name__ == "__main__":
    main()
