"""The checks are worth something only if wrong shaders fail them: at least 28 of 30 mutants are caught."""

from __future__ import annotations

import os

import pytest

from tests.mutation import mutants
from tests.mutation.hunt import hunt

SEED = 1
# Mutants that compute the same as the shader: (file, line before, line after) -> why.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "elementwise/math.wgsl",
        "let r = select(normal, round(x * 16777216.0) * 5.9604645e-8, abs(x) < 6.1035156e-5);   // subnormals: steps of 2^-24",  # noqa: E501
        "let r = select(normal, round(x * 16777216.0) * 5.9604645e-8, abs(x) <= 6.1035156e-5);   // subnormals: steps of 2^-24",  # noqa: E501
    ): "2^-14 itself is a number of either kind",
    (
        "elementwise/math.wgsl",
        "return select(r, r + y, r != 0 && ((r < 0) != (y < 0)));",
        "return select(r, r + y, r != 0 && ((r < 0) != (y <= 0)));",
    ): "for y = 0 both give r",
    (
        "reduce/fold.wgsl",
        "if (lane < n) {",
        "if (lane <= n) {",
    ): "lane n changes what lane 0 read a subgroup before: a race that software drivers decide in the right way",
    (
        "matmul/block_out_any.wgsl",
        "for (var c = 0u; c < 4u; c++) { if (j + c < p.n) { v[c] = f32(bias[j + c]); } }",
        "for (var c = 0u; c < 4u; c++) { if (true) { v[c] = f32(bias[j + c]); } }",
    ): "columns past n are not stored; the bias is then read past its end, which guard bytes do not see",
    (
        "norm/rms_norm.wgsl",
        "let first = min(row, p.rows - 1u) * p.packs;",
        "let first = min(row, p.rows - 0u) * p.packs;",
    ): "rows past the end are not stored; they are then read in vain",
    (
        "movement/transpose.wgsl",
        "if (r < p.rows && c < p.cols) { tile[k * 33u + lane.x] = x[x_base + r + c * p.x_col]; }",
        "if (r < p.rows || c < p.cols) { tile[k * 33u + lane.x] = x[x_base + r + c * p.x_col]; }",
    ): "what lies outside is not stored; it is then read in vain",
    (
        "sample/sample.wgsl",
        "if (limited && settings.top_k <= blocks()) { floor_key = max(floor_key, kth_key(lane, settings.top_k, blocks(), true)); }",  # noqa: E501
        "if (limited && settings.top_k <= blocks()) { floor_key = min(floor_key, kth_key(lane, settings.top_k, blocks(), true)); }",  # noqa: E501
    ): "a lower bound lets more blocks be looked into, in vain",
    (
        "matmul/gemm_block.wgsl",
        "if (depth < BK) {",
        "if (true) {",
    ): "a whole step leaves every value as it is",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("ANYGPU_BACKEND", "wgpu") != "wgpu" or bool(os.environ.get("ANYGPU_LIMITS")),
    reason="says something about the checks, not about the device: once is enough",
)
def test_checks_catch_wrong_shaders():
    verdicts = list(hunt(SEED, 30, EQUIVALENT))
    caught = [v for v in verdicts if v.outcome == "caught"]
    survived = [v for v in verdicts if v.outcome == "survived"]
    assert len(caught) + len(survived) == 30
    assert len(caught) >= 28, "\n".join(map(str, survived))


def test_equivalent_mutants_are_still_possible():
    """An entry whose line has changed excuses nothing any more."""
    there = {(m.file, m.before.strip(), m.after.strip()) for m in mutants.draw(SEED)}
    assert set(EQUIVALENT) <= there


def test_a_draw_is_stable_and_covers_every_kind():
    first = mutants.draw(SEED)
    assert first == mutants.draw(SEED) != mutants.draw(SEED + 1)
    assert {m.kind for m in first[:60]} == {"+-", "<", "guard", "factor", "01", "max"}
    assert len({m.file for m in first[:30]}) >= 8


def test_changes_are_what_their_kind_says(tmp_path):
    def changed(code):
        return {(kind, code[:start] + text + code[end:]) for kind, start, end, text in mutants._changes(code)}

    assert changed("if (i >= p.n) { return; }") == {
        ("<", "if (i > p.n) { return; }"), ("guard", "if (false) { return; }"),
    }  # fmt: skip
    assert changed("if (a && b) { x += 1u; }") == {
        ("guard", "if (true) { x += 1u; }"), ("guard", "if (a || b) { x += 1u; }"),
        ("+-", "if (a && b) { x -= 1u; }"), ("01", "if (a && b) { x += 0u; }"),
    }  # fmt: skip
    assert changed("y = x[row * p.cols + max(c, 0.0)];") == {
        ("factor", "y = x[row * (p.cols + 1u) + max(c, 0.0)];"), ("+-", "y = x[row * p.cols - max(c, 0.0)];"),
        ("max", "y = x[row * p.cols + min(c, 0.0)];"), ("01", "y = x[row * p.cols + max(c, 1.0)];"),
    }  # fmt: skip
    assert changed("let v = array<vec4<f32>, 4>(); let z = 10u + 1e-5;") == {
        ("+-", "let v = array<vec4<f32>, 4>(); let z = 10u - 1e-5;")
    }  # fmt: skip
    mutant = next(m for m in mutants.of_file("cache/cache.wgsl") if m.kind == "+-")
    (tmp_path / "cache").mkdir()
    mutant.undo(tmp_path)
    whole = (tmp_path / mutant.file).read_text().splitlines()
    mutant.write(tmp_path)
    other = (tmp_path / mutant.file).read_text().splitlines()
    assert [i for i, (a, b) in enumerate(zip(whole, other, strict=True), 1) if a != b] == [mutant.line]
