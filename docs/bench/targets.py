"""What the kernels are meant to reach on two devices, and where a stored run says how far they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """The least of a field over the rows of a suite whose key matches.

    field: of a row of `anygpu bench --json`; "rate" is GFLOP/s, GB/s or tokens/s, "share" of the row's ceiling,
    "beside" of the rate of another row, "ratio" the peer's seconds over ours. `scale` turns it into `unit`.
    Fields of the row's `extra` count too. rule: only rows with this one. backends: those that the target is for.
    """

    text: str
    suite: str
    key: str
    field: str
    wanted: float
    unit: str = ""
    scale: float = 1.0
    backends: tuple[str, ...] = ("wgpu", "dawn")
    rule: float = 0.0
    most: bool = False  # `wanted` is the most, and the largest counts

    def found(self, run: dict[str, Any]) -> tuple[float, int] | None:
        """The figure in a run, and how many rows it stands for; None where nothing was measured."""
        rows = [
            row
            for row in run.get("rows", [])
            if row["suite"] == self.suite
            and row["status"] == "ok"
            and re.fullmatch(self.key, row["key"])
            and self.rule in (0.0, row.get("rule"))
        ]
        fields = [{**row, **row.get("extra", {})} for row in rows]
        values = [row[self.field] * self.scale for row in fields if self.field in row]
        return ((max if self.most else min)(values), len(values)) if values else None

    def met(self, value: float) -> bool:
        """Whether a figure is enough."""
        return value <= self.wanted if self.most else value >= self.wanted


T, PERCENT = ("TFLOP/s", 1e-3), ("%", 100.0)
WGPU, DAWN = ("wgpu",), ("dawn",)
TRAINED = r"f32 .. \S+  (gpt-char|gpt2-124m) .*"
SQUARE, TALL = r"q\w+ 4096x4096 batch 1", r"q\w+ 22016x4096 batch 1"
SMOL = r"(SmolLM2-135M.*|synthetic:smollm2.*)"
SEVEN = r"synthetic:llama-7b-q4_0 decode .*"
ANY = r".*"
H200 = (
    Target("f32 product 4096^3", "gemm", r"f32 nn 4096x4096x4096", "rate", 45, *T),
    Target("f32 products of gpt-char and GPT-2 training", "gemm", TRAINED, "rate", 42, *T),
    Target("f16 product 4096^3, matrix units", "gemm", r"f16 nn 4096x4096x4096", "rate", 400, *T, DAWN),
    Target("f16 product 4096^3 over f32", "gemm", r"f16 nn 4096x4096x4096", "beside", 1.0, "x", 1.0, WGPU),
    Target("f16 over f32, 16 and 64 rows", "gemm", r"f16 nt (16|64)x4096x4096", "beside", 1.5, "x", 1.0, WGPU),
    Target("odd shapes over the next multiple of the tile", "gemm", ANY, "beside", 80, *PERCENT, rule=0.8),
    Target("bias, GELU, residual over the plain product", "gemm", ANY, "beside", 95, *PERCENT, rule=0.95),
    Target("4- and 8-bit products of prompts over f16", "gemm", ANY, "beside", 60, *PERCENT, rule=0.6),
    Target("2- to 8-bit matrix times vector, 4096x4096", "gemv", SQUARE, "share", 50, "% of copy", 100),
    Target("the same, 22016x4096", "gemv", TALL, "share", 70, "% of copy", 100),
    Target("rows a second from batch to batch, 1 to 64", "gemv", r"q\w+ .*", "beside", 100, *PERCENT),
    Target("f16 attention, heads of 64", "attention", r"f16 4x16x4096x64.*", "rate", 100, *T, DAWN),
    Target("f16 attention, heads of 128", "attention", r"f16 4x16x4096x128.*", "rate", 120, *T, DAWN),
    Target(
        "attention's bytes at 256k tokens over its operands'", "attention", ANY, "bytes_taken", 1.05, "x", most=True
    ),
    Target("attention over three kernels", "attention", r"f\d+ 1x8x4096x\d+", "beside", 4.0, "x"),
    Target("f32 attention over PyTorch's math", "attention", r"f32 4x16x4096x\d+.*", "ratio", 1.5, "x", 1.0, WGPU),
    Target("softmax, norms, chains, sums, moves of 64 MB and more", "memory", ANY, "share", 85, "% of copy", 100),
    Target("SmolLM2-135M Q4_1 decode", "llm", SMOL + " decode .*", "rate", 1500, "tokens/s", 1.0, WGPU),
    Target("SmolLM2-135M Q4_1 decode", "llm", SMOL + " decode .*", "rate", 900, "tokens/s", 1.0, DAWN),
    Target("SmolLM2-135M Q4_1, prompt of 128", "llm", SMOL + " prompt 128", "rate", 25_000, "tokens/s"),
    Target("SmolLM2-135M Q4_1, prompt of 512", "llm", SMOL + " prompt 512", "rate", 50_000, "tokens/s"),
    Target("Gemma 3 270M decode over llama.cpp", "llm", r"gemma-3-270m.* decode .*", "ratio", 2.0, "x"),
    Target("Llama 7B Q4_0 (random weights) decode", "llm", SEVEN, "share", 60, "% of bandwidth", 100),
)
LLVMPIPE = (
    Target("f32 product 1024^3", "gemm", r"f32 nn 1024x1024x1024", "rate", 16, "GFLOP/s"),
    Target("SmolLM2-135M Q4_1 decode", "llm", SMOL + " decode .*", "rate", 12, "tokens/s"),
    Target("SmolLM2-135M Q4_1, prompt", "llm", SMOL + r" prompt \d+", "rate", 25, "tokens/s"),
)
DEVICES: dict[str, Sequence[Target]] = {"H200": H200, "llvmpipe": LLVMPIPE}
