"""The WGSL loader: needs no adapter."""

from __future__ import annotations

import re
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu import ShaderError, wgsl

FILES = sorted(str(path.relative_to(wgsl.SHADERS)) for path in wgsl.SHADERS.rglob("*.wgsl"))
MORE_BUFFERS = {"norm_qkv_bias_rope": 9}  # entries that nn takes only where the device allows so many
MAIN = "@compute @workgroup_size(1) fn main() "


@pytest.fixture
def root(tmp_path):
    """Call it with {path: text} to write shader files; gives the folder to load from."""

    def write(files: dict[str, str]):
        for path, text in files.items():
            target = tmp_path / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        return tmp_path

    return write


def source(text: str, **options) -> wgsl.Source:
    lines = text.splitlines()
    return wgsl.assemble("test", lines, [("test", i) for i in range(1, len(lines) + 1)], **options)


def names(text: str, entry: str = "main") -> list[str]:
    return [binding.name for binding in source(text).used_by(entry)]


# Every shader file -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subgroups", [False, True], ids=["plain", "subgroups"])
@pytest.mark.parametrize("path", FILES)
def test_every_shader_file_loads_with_its_defaults(path, subgroups):
    loaded = wgsl.load(path, subgroups=subgroups)
    assert len(loaded.lines) == loaded.code.count("\n")
    for entry in loaded.entries:
        used = loaded.used_by(entry)
        assert sum(binding.access != "uniform" for binding in used) <= MORE_BUFFERS.get(entry, 8)
        slots = [(binding.group, binding.index) for binding in used]
        assert len(slots) == len(set(slots)), f"{entry}: two bindings share a number"


def test_the_shader_folder_is_not_empty():
    assert sum(bool(wgsl.load(path).entries) for path in FILES) >= 5


# Includes and parts ----------------------------------------------------------------------------------------------


def test_an_include_is_pasted_in_place_with_its_own_line_numbers(root):
    folder = root(
        {"a.wgsl": "// head\n// include lib/b.wgsl\nconst C: u32 = 3u;\n", "lib/b.wgsl": "// b\nconst B = 1;"}
    )
    loaded = wgsl.load("a.wgsl", root=folder)
    assert loaded.code == "// head\n// b\nconst B = 1;\nconst C: u32 = 3u;\n"
    assert [loaded.where(i) for i in range(1, 5)] == ["a.wgsl:1", "lib/b.wgsl:1", "lib/b.wgsl:2", "a.wgsl:3"]
    assert loaded.where(0) == loaded.where(99) == "a.wgsl"


def test_a_file_is_pasted_once_even_in_a_cycle(root):
    folder = root(
        {
            "a.wgsl": "// include b.wgsl\n// include c.wgsl\n// include b.wgsl\nconst A = 1;",
            "b.wgsl": "// include c.wgsl\nconst B = 1;",
            "c.wgsl": "// include a.wgsl\nconst C = 1;",
        }
    )
    assert wgsl.load("a.wgsl", root=folder).code == "const C = 1;\nconst B = 1;\nconst A = 1;\n"


def test_a_missing_file_is_reported_with_the_line_that_asks_for_it(root):
    folder = root({"a.wgsl": "// include b.wgsl", "b.wgsl": "\n\n// include lib/none.wgsl"})
    with pytest.raises(ShaderError, match=r"b\.wgsl:3 asks for shader 'lib/none\.wgsl', which is not there"):
        wgsl.load("a.wgsl", root=folder)
    with pytest.raises(ShaderError, match=r"the loader asks for shader 'z\.wgsl', which is not there"):
        wgsl.load("z.wgsl", root=folder)


def test_subgroup_variants_are_taken_where_they_exist(root):
    folder = root(
        {
            "a.wgsl": "// include x.wgsl\n// include y.wgsl",
            "x.wgsl": "const X = 1;",
            "x_subgroup.wgsl": "const X = 2;",
            "y.wgsl": "const Y = 1;",
        }
    )
    assert wgsl.load("a.wgsl", root=folder).code == "const X = 1;\nconst Y = 1;\n"
    assert wgsl.load("a.wgsl", root=folder, subgroups=True).code == "const X = 2;\nconst Y = 1;\n"


def test_parts_replace_an_include_and_take_variants_too(root):
    folder = root(
        {
            "a.wgsl": "// include x.wgsl as format",
            "x.wgsl": "const X = 1;",
            "y.wgsl": "const X = 2;",
            "y_subgroup.wgsl": "const X = 3;",
        }
    )
    parts = {"format": "y.wgsl"}
    assert wgsl.load("a.wgsl", root=folder).code == "const X = 1;\n"
    assert wgsl.load("a.wgsl", root=folder, parts=parts).code == "const X = 2;\n"
    assert wgsl.load("a.wgsl", root=folder, parts=parts, subgroups=True).code == "const X = 3;\n"
    with pytest.raises(ShaderError, match=r"a\.wgsl: no part \['mask'\]; it includes the parts \['format'\]"):
        wgsl.load("a.wgsl", root=folder, parts={"mask": "y.wgsl"})
    with pytest.raises(ShaderError, match=r"a\.wgsl:1 asks for shader 'none\.wgsl'"):
        wgsl.load("a.wgsl", root=folder, parts={"format": "none.wgsl"})


def test_only_a_line_that_is_an_include_includes(root):
    folder = root({"a.wgsl": "// include b.wgsl for sums\nconst A = 1; // include b.wgsl\n/*\n// include b.wgsl\n*/\n"})
    assert wgsl.load("a.wgsl", root=folder).code.count("include") == 3


# Types, constants, slots -----------------------------------------------------------------------------------------


def test_alias_lines_take_the_given_type():
    text = "alias Elem = f32;   // storage\nalias Quad = vec4<f32>;\nalias Row = array<f32, 4>;"
    got = source(text, types={"Elem": "f16", "Quad": "vec4<f16>", "Row": "array<f16, 8>"}).code
    assert got == "alias Elem = f16;   // storage\nalias Quad = vec4<f16>;\nalias Row = array<f16, 8>;\n"


def test_override_lines_stay_and_their_values_go_to_the_pipeline():
    got = source("override WG: u32 = 256u;\noverride EPS = 1e-6;\n", constants={"WG": 64})
    assert got.code == "override WG: u32 = 256u;\noverride EPS = 1e-6;\n"
    assert got.overrides == {"WG", "EPS"}
    assert got.constants == {"WG": 64}


@pytest.mark.parametrize(
    ("line", "value", "want"),
    [
        ("const A: u32 = 4u;", 8, "const A: u32 = 8u;"),
        ("const A: u32 = 2u * 8u;  // why", 0xFFFFFFFF, "const A: u32 = 4294967295u;  // why"),
        ("const A: i32 = 4;", -3, "const A: i32 = -3;"),
        ("const A: f32 = 4.0;", 1e-6, "const A: f32 = 1e-06f;"),
        ("const A: f32 = 4.0;", 2, "const A: f32 = 2.0f;"),
        ("const A: f16 = 4.0h;", 0.5, "const A: f16 = 0.5h;"),
        ("const A: bool = true;", False, "const A: bool = false;"),
        ("const A: u32 = 0u;", True, "const A: u32 = 1u;"),
        ("const A = 4u;", 5, "const A = 5u;"),
        ("const A = true;", False, "const A = false;"),
        ("const A = 1.5;", 2.5, "const A = 2.5f;"),
        ("const A = 4;", 5, "const A = 5;"),
        ("const A: Elem = 1.0;", 0.25, "const A: Elem = 0.25;"),
        ("const A: Elem = 1.0;", 3, "const A: Elem = 3;"),
        ("  const A: u32 = 1u; const B: u32 = 2u;", 9, "  const A: u32 = 9u; const B: u32 = 2u;"),
    ],
)
def test_const_lines_take_the_given_value(line, value, want):
    assert source(line, constants={"A": value}).code == want + "\n"


@pytest.mark.parametrize(
    ("line", "value", "message"),
    [
        ("const A: u32 = 4u;", -1, "test: const A = -1: a u32 is a whole number in 0 to 4294967295"),
        ("const A: u32 = 4u;", 2.5, "test: const A = 2.5: a u32 is a whole number in 0 to 4294967295"),
        (
            "const A: i32 = 4;",
            2**31,
            "test: const A = 2147483648: a i32 is a whole number in -2147483648 to 2147483647",
        ),
        (
            "const A: f32 = 4.0;",
            float("inf"),
            "test: const A = inf: WGSL has no such literal; use a large finite number",
        ),
        ("const A = 4.0;", float("nan"), "test: const A = nan: WGSL has no such literal; use a large finite number"),
    ],
)
def test_a_value_that_its_type_cannot_hold_is_refused(line, value, message):
    with pytest.raises(ShaderError, match=re.escape(message)):
        source(line, constants={"A": value})


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_f32_constants_keep_every_bit(value):
    text = source("const A: f32 = 0.0;", constants={"A": value}).code
    literal = text.removeprefix("const A: f32 = ").removesuffix("f;\n")
    assert re.fullmatch(r"-?\d+(\.\d+)?(e[+-]\d+)?", literal)
    assert struct.pack("<f", float(literal)) == struct.pack("<f", value)


def test_slots_replace_their_line_and_keep_the_line_map():
    text = "const A = 1;\nfn epilogue(v: f32) -> f32 { return v; }   // slot: fused code\nconst B = 2;"
    got = source(text, slots={"epilogue": "fn epilogue(v: f32) -> f32 {\n  return v + 1.0;\n}"})
    assert got.code == "const A = 1;\nfn epilogue(v: f32) -> f32 {\n  return v + 1.0;\n}\nconst B = 2;\n"
    assert [got.where(i) for i in range(1, 6)] == ["test:1", "test:2", "test:2", "test:2", "test:3"]


@pytest.mark.parametrize("kind", ["types", "constants", "slots"])
def test_unknown_names_are_refused(kind):
    text = "alias Elem = f32;\nconst A: u32 = 1u;\noverride O: u32 = 1u;\nfn f(v: f32) -> f32 { return v; }\n"
    with pytest.raises(
        ShaderError, match=r"test: nothing named \['Nope', 'f'\] to set; look for a missing alias, const"
    ):
        source(text, **{kind: {"Nope": 1, "f": 2} if kind == "constants" else {"Nope": "f16", "f": "fn f() {}"}})


def test_commented_lines_are_not_rewritten():
    text = (
        "// const A: u32 = 1u;\n/* alias B = f32;\nconst C: u32 = 1u;\nfn s(v: f32) -> f32 { return v; } // slot\n*/\n"
    )
    for option in ({"constants": {"A": 2}}, {"types": {"B": "f16"}}, {"constants": {"C": 2}}, {"slots": {"s": ""}}):
        with pytest.raises(ShaderError, match="nothing named"):
            source(text, **option)
    assert source(text).code == text


# Bindings, Params, entries ---------------------------------------------------------------------------------------

HEAD = """
struct Params { rows: u32, shift: i32, eps: f32, }
@group(0) @binding(0) var<storage, read> x: array<f32>;
@binding(1) @group(0) var<storage, read_write> out : array<vec4<f32>, 8>;
@group(1) @binding(2u)
var < storage > extra: array<atomic<u32>>;
@group(0) @binding(3) var<uniform> p: Params;
"""


def test_bindings_and_params_are_read_from_the_text():
    got = source(HEAD + MAIN + "{}")
    assert [(b.group, b.index, b.name, b.access, b.type) for b in got.bindings] == [
        (0, 0, "x", "read", "array<f32>"),
        (0, 1, "out", "read_write", "array<vec4<f32>, 8>"),
        (1, 2, "extra", "read", "array<atomic<u32>>"),
        (0, 3, "p", "uniform", "Params"),
    ]
    assert got.params == (("rows", "u32"), ("shift", "i32"), ("eps", "f32"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("struct Params { v: vec4<f32> }\n", "Params has 'v: vec4<f32>'; Params fields are plain u32, i32 or f32"),
        ("struct Params { @size(16) v: f32 }\n", "Params has '@size(16) v: f32'; Params fields are plain"),
        ("", "the uniform's type Params is not a struct of this file"),
        ("struct Params { v: u32 }\n@group(0) @binding(7) var<uniform> q: Params;\n", "several uniforms (q, p)"),
    ],
)
def test_params_that_cannot_be_packed_are_refused(text, message):
    with pytest.raises(ShaderError, match=re.escape(message)):
        source(text + "@group(0) @binding(0) var<uniform> p: Params;\n")


def test_a_binding_without_plain_numbers_is_refused():
    with pytest.raises(ShaderError, match=r"test: binding x needs @group\(n\) @binding\(n\), with plain numbers"):
        source("const N = 1;\n@group(0) @binding(N) var<storage, read> x: array<f32>;")


def test_entries_are_the_compute_functions_only():
    text = (
        "fn helper() {}\n@must_use fn used() -> f32 { return 1.0; }\n"
        "@compute @workgroup_size(max(WG, 1u)) fn a() {}\n@workgroup_size(4)\n@compute\nfn b() {}\n"
        "// @compute @workgroup_size(1) fn c() {}\n"
    )
    got = source(text)
    assert got.entries == ("a", "b")
    for name in ("helper", "c", "none"):
        with pytest.raises(ShaderError, match=rf"test: no entry point '{name}'; it has a, b"):
            got.used_by(name)
    with pytest.raises(ShaderError, match="it has none"):
        source("fn helper() {}").used_by("main")


BINDINGS = "".join(
    f"@group(0) @binding({i}) var<storage, read_write> {name}: array<f32>;\n" for i, name in enumerate("abxyz")
)


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("{ a[0] = b[0]; }", "ab"),
        ("{ a[0] = wg.x + v . y; }", "a"),  # members
        ("{ a[0] = 1e3 + 0x0b + 2.x; }", "a"),  # nothing inside numbers
        ("{ let x = y[0]; a[0] = x; }", "ay"),  # a local name hides the binding
        ("{ let x = x[0]; a[0] = x; }", "ax"),  # its own initialiser does not see it yet
        ("{ { let x = 1.0; a[0] = x; } a[1] = x[0]; }", "ax"),  # only to the end of its block
        ("{ var x: array<f32, 4>; a[0] = x[0]; }", "a"),
        ("{ var<function> x = 1.0; a[0] = x; }", "a"),
        ("{ const x = 1.0; a[0] = x; }", "a"),
        ("{ for (var x = 0u; x < 4u; x++) { a[x] = 1.0; } }", "a"),
        ("{ for (var x = 0u; x < 4u; x++) { if (x > 1u) { a[x] = 1.0; } } a[0] = x[0]; }", "ax"),
        ("{ for (var i = 0u; i < u32(z[0]); i++) { a[i] = 1.0; } }", "az"),
        ("{ // y[0] = 1.0;\n /* z[0] = 1.0; /* b[0] */ x[0] */ a[0] = 1.0; }", "a"),
        ("{ let p = &x; (*p)[0] = 1.0; }", "x"),
        ("{ switch u32(x[0]) { case 1u: { let y = 1.0; a[0] = y; } default: { b[0] = 1.0; } } }", "abx"),
        ("{ loop { let x = 1u; if (x > 0u) { break; } continuing { a[0] = 1.0; } } }", "a"),
        ("{}", ""),
    ],
)
def test_bindings_an_entry_uses(body, want):
    assert names(BINDINGS + MAIN + body) == list(want)


def test_parameters_hide_bindings_and_attributes_are_no_use():
    text = BINDINGS + "fn f(x: f32, y: vec2<f32>) -> f32 { return x + y.x; }\n"
    text += "@compute @workgroup_size(1) fn main(@builtin(workgroup_id) z: vec3<u32>) { a[z.x] = f(1.0, vec2f()); }"
    assert names(text) == ["a"]


def test_helpers_are_followed_through_each_other_and_a_hidden_helper_is_not():
    text = BINDINGS + (
        "fn one() -> f32 { return two() + b[0]; }\nfn two() -> f32 { return x[0]; }\n"
        "fn three() -> f32 { return z[0]; }\n"
        "@compute @workgroup_size(1) fn main() { let three = 1.0; a[0] = one() + three; }\n"
        "@compute @workgroup_size(1) fn other() { a[0] = three(); }"
    )
    assert names(text) == ["a", "b", "x"]
    assert names(text, "other") == ["a", "z"]


def test_each_entry_uses_its_own_subset():
    loaded = wgsl.load("norm/rms_norm.wgsl")
    everything = {binding.name for binding in loaded.bindings}
    assert len(loaded.entries) > 0
    assert everything == {binding.name for entry in loaded.entries for binding in loaded.used_by(entry)}


@given(st.lists(st.sampled_from(["//", "/*", "*/", "\n", " ", "a", "*", "/", "b1"]), max_size=25).map("".join))
def test_comments_are_stripped_as_wgsl_says(code):
    got = wgsl.strip_comments(code)
    assert got.count("\n") == code.count("\n")
    # the same by a plain character loop
    want, depth, line, i = "", 0, False, 0
    while i < len(code):
        two = code[i : i + 2]
        if code[i] == "\n":
            want, line, i = want + "\n", False, i + 1
        elif line:
            i += 1
        elif two == "/*" or (two == "*/" and depth):
            want, depth, i = want + " ", depth + (1 if two == "/*" else -1), i + 2
        elif depth:
            i += 1
        elif two == "//":
            line, i = True, i + 2
        else:
            want, i = want + code[i], i + 1
    assert got == want


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("alias E = f16;", {"f16"}),
        ("let v = vec4h(1.0h);", {"f16"}),
        ("let v = 0.5h;", {"f16"}),
        ("// f16 and subgroups\nlet v = f32(x) / vec4f();", set()),
        ("let s = subgroupAdd(1u);", {"subgroups"}),
        ("fn f(@builtin(subgroup_size) n: u32) -> f16 {}", {"f16", "subgroups"}),
    ],
)
def test_extensions_the_code_needs(text, want):
    assert source(text).extensions() == want
