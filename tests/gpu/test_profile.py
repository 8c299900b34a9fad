"""gpu.profile: which dispatches ran, whose work they were, what the host did, and how it is told."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import numpy as np
import pytest

import gpu
from gpu import Cost, Device, GpuError, Scope, tracing
from gpu.ceilings import Ceilings
from gpu.chrome import trace_of
from gpu.native import PublicCalls
from gpu.page import Page, nesting
from gpu.roofline import quantity, roof_of
from gpu.tracing import Event
from gpu.work import spread

PEAK = Ceilings(1e9, 1e10, None, 1e-6, True)
TEXT = """
struct Params { n: u32, by: f32 }
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@group(0) @binding(2) var<uniform> p: Params;
@compute @workgroup_size(64)
fn scale(@builtin(global_invocation_id) g: vec3<u32>) { if (g.x < p.n) { out[g.x] = x[g.x] * p.by; } }
"""
N = 1000


def chain(device, record, x, *, steps=3, scoped=True):
    """x * 2^steps, one dispatch a step, each in a scope of its own; returns the buffer."""
    kernel = device.kernel_source(TEXT, "scale", label="scale")
    for i in range(steps):
        out = record.temp(4 * N)
        scope = Scope(f"step {i}", path=f"model.{i}", kind="norm", operands=["f32 1000"], results=["f32 1000"],
                      cost=Cost(N, 4 * N, 4 * N))  # fmt: skip
        if scoped:
            with record.scope(scope):
                record(kernel, -(-N // 64), x=x, out=out, n=N, by=2.0)
        else:
            record(kernel, -(-N // 64), x=x, out=out, n=N, by=2.0)
        x = out
    return x


def planned(device, **options):
    host = np.arange(N, dtype=np.float32)
    record = device.recorder()
    out = chain(device, record, device.upload(host), **options)
    return record, out, host


def test_a_replayed_plan_gives_the_same_bits_and_every_dispatch(device):
    record, out, host = planned(device)
    plan = record.plan()
    with gpu.profile(device, ceilings=PEAK) as p:
        pending = plan.replay(read=(out, 4 * N))
        plan.replay()
    assert pending is not None
    assert np.array_equal(np.frombuffer(pending.result(), np.float32), host * 8)
    assert device.profile is None and len(p.submits) == 2
    if not device.caps.timestamps:
        assert [event.dispatches for event in p.events] == [3, 3]
        return
    assert [event.name for event in p.events] == ["step 0", "step 1", "step 2"] * 2
    assert [event.submit for event in p.events] == [0] * 3 + [1] * 3
    first = p.events[0]
    assert (first.path, first.kind, first.kernel, first.grid) == ("model.0", "norm", "scale", (16, 1, 1))
    assert (first.operands, first.results) == (("f32 1000",), ("f32 1000",))
    assert first.buffers == (("x", 4 * N), ("out", 4 * N))
    assert first.cost == Cost(N, 4 * N, 4 * N)
    assert all(event.seconds >= 0 for event in p.events)
    starts = [event.start for event in p.events]
    assert starts == sorted(starts)
    assert p.overhead_s >= 0 and f"{p.overhead_s * 1e6:.1f} us" in p.note
    for event in p.events:  # the pass's own cost is taken off, down to a launch
        assert 0 <= event.seconds <= event.measured
        assert event.seconds >= min(event.measured, PEAK.launch_s)
        assert event.measured - event.seconds <= p.overhead_s + 1e-12


def test_a_submit_begins_on_the_device_after_the_host_made_it(device):
    record, _, _ = planned(device)
    plan = record.plan()
    with gpu.profile(device, ceilings=PEAK) as p:
        for _ in range(4):
            plan.replay()
            device.wait()
    for made in p.submits:
        assert made.submitted - 1e-6 <= made.start <= made.end <= p.seconds + 1e-3
    assert 0 < p.busy_s <= p.seconds


def test_eager_recordings_are_seen(device):
    with gpu.profile(device, ceilings=PEAK) as p:
        record, out, host = planned(device)
        record.submit()
        got = device.read(out, np.float32, N)
    assert np.array_equal(got, host * 8)
    assert sum(event.dispatches for event in p.events) == 3
    names = [span.name for span in p.spans]
    assert "upload" in names and "encode" in names and "submit" in names and "wait" in names


def test_a_plan_that_goes_out_in_several_submits(device):
    record, out, host = planned(device, steps=5)
    plan = record.plan(per_submit=2)
    with gpu.profile(device, ceilings=PEAK) as p:
        plan.replay()
    assert [made.first for made in p.submits] == [0, 2, 4]
    assert {made.replay for made in p.submits} == {0}
    plan.split(4, first=1)
    with gpu.profile(device, ceilings=PEAK) as p:
        plan.replay()
    assert [made.first for made in p.submits] == [0, 1, 3]
    assert np.array_equal(device.read(out, np.float32, N), host * 32)
    if device.caps.timestamps:
        assert [event.name for event in p.events] == [f"step {i}" for i in range(5)]
        assert [event.submit for event in p.events] == [0, 1, 1, 2, 2]


def test_the_public_api_is_timed_too(fresh):
    fresh.use_calls(PublicCalls())
    record, out, host = planned(fresh)
    plan = record.plan()
    with gpu.profile(fresh, ceilings=PEAK) as p:
        pending = plan.replay(read=(out, 4 * N))
    assert pending is not None
    assert np.array_equal(np.frombuffer(pending.result(), np.float32), host * 8)
    assert sum(event.dispatches for event in p.events) == 3


def test_whole_submits_cost_what_their_scopes_cost(device):
    record, _, _ = planned(device)
    plan = record.plan()
    with gpu.profile(device, per="submit", ceilings=PEAK) as p:
        plan.replay()
    (event,) = p.events
    assert (event.name, event.kind, event.dispatches) == ("3 dispatches", "submit", 3)
    assert event.cost == Cost(3 * N, 12 * N, 12 * N)
    assert p.overhead_s == 0 and event.seconds == event.measured


def test_without_timestamps_it_is_the_hosts_clock_and_says_so(fresh):
    fresh.caps = replace(fresh.caps, timestamps=False)
    record, out, host = planned(fresh, scoped=False)
    plan = record.plan(per_submit=2)
    with gpu.profile(fresh, ceilings=PEAK) as p:
        plan.replay()
    assert np.array_equal(fresh.read(out, np.float32, N), host * 8)
    assert [(event.name, event.cost) for event in p.events] == [("2 dispatches", None), ("1 dispatches", None)]
    assert all(event.seconds > 0 for event in p.events)
    assert "has no timestamps" in p.note and "waiting included" in p.note
    assert p.note in p.table()


def test_costs_get_the_state_that_the_replay_wrote(device):
    seen = []

    def cost(state, turn):
        seen.append(state)
        return Cost(float(state[0])) if state else Cost(99.0)

    record, state = device.recorder(), device.alloc(4)
    with record.scope(Scope("outer", cost=cost)):
        chain(device, record, device.upload(np.zeros(N, np.float32)), steps=1, scoped=False)
    plan = record.plan()
    assert seen == []  # recording asks nobody
    with gpu.profile(device, per="submit", ceilings=PEAK) as p:
        plan.replay(write=(state, b"\x07\0\0\0"))
        plan.replay(write=(state, b"\x09\0\0\0"))
        plan.replay()
    assert [event.cost for event in p.events] == [Cost(7.0), Cost(9.0), Cost(99.0)]


def test_a_repeated_plan_costs_every_turn_for_itself(device):
    record, state = device.recorder(), device.alloc(4)
    with record.scope(Scope("step", path="m", cost=lambda state, turn: Cost(float(state[0] + turn)))):
        chain(device, record, device.upload(np.zeros(N, np.float32)), steps=2, scoped=False)
    plan = record.plan().repeated(3)
    with gpu.profile(device, per="submit", ceilings=PEAK) as p:
        plan.replay(write=(state, b"\x0a\0\0\0"))
    assert p.events[0].cost == Cost(10.0 + 11.0 + 12.0)
    with gpu.profile(device, ceilings=PEAK) as p:
        plan.replay(write=(state, b"\x0a\0\0\0"))
    if device.caps.timestamps:
        costs = [event.cost.flops for event in p.events]
        assert [costs[i] + costs[i + 1] for i in (0, 2, 4)] == pytest.approx([10.0, 11.0, 12.0])
        assert {event.buffers for event in p.events} == {(("x", 4 * N), ("out", 4 * N))}


def test_spread_shares_by_time_and_leaves_inner_scopes_theirs():
    outer, inner, silent = Scope("a", cost=Cost(100, 40, 8)), Scope("b", cost=Cost(60, 10, 0)), Scope("c")
    inner.parent = silent.parent = outer
    found = spread([(s, 0) for s in (outer, silent, inner, None)], np.array([1.0, 3.0, 5.0, 0.5]), None)
    assert found == [Cost(25, 10, 2), Cost(75, 30, 6), Cost(60, 10, 0), None]
    assert spread([(inner, 0)] * 2, np.array([0.0, 0.0]), None) == [Cost(30, 5, 0)] * 2
    assert spread([(inner, 0), (inner, 1)], np.array([1.0, 3.0]), None) == [Cost(60, 10, 0)] * 2
    assert spread([(silent, 0)], np.array([2.0]), None) == [Cost(100, 40, 8)]


def test_a_step_on_the_way_has_a_name_and_a_kind_of_its_own(device):
    if not device.caps.timestamps:
        return
    record, x = device.recorder(), device.upload(np.zeros(N, np.float32))
    outer = Scope("product", path="layers.0", kind="linear", operands=["f32 1000"], cost=Cost(9.0))
    with record.scope(outer):
        with record.scope(Scope("norm", kind="norm", cost=Cost(4.0))):
            x = chain(device, record, x, steps=1, scoped=False)
        chain(device, record, x, steps=1, scoped=False)
    plan = record.plan()
    with gpu.profile(device, ceilings=PEAK) as p:
        plan.replay()
    assert [(e.name, e.path, e.kind, e.cost) for e in p.events] == [
        ("product: norm", "layers.0", "norm", Cost(4.0)),
        ("product", "layers.0", "linear", Cost(9.0)),
    ]
    with gpu.profile(device, per="submit", ceilings=PEAK) as p:
        plan.replay()
    assert p.events[0].cost == Cost(13.0)


def test_many_submits_are_read_on_the_way(device, monkeypatch):
    monkeypatch.setattr(tracing, "DRAIN", 4)
    record, _, _ = planned(device, steps=1)
    plan = record.plan()
    with gpu.profile(device, ceilings=PEAK) as p:
        for _ in range(11):
            plan.replay()
    assert len(p.submits) == 11 and len(p.events) == 11
    if device.caps.timestamps:
        assert "wait" not in [span.name for span in p.spans]  # the profile's own waiting is not the program's
        starts = [event.start for event in p.events]
        assert starts == sorted(starts)


def test_a_submit_of_more_dispatches_than_were_described(device, monkeypatch):
    monkeypatch.setattr(tracing, "PASSES", 2)
    record, out, host = planned(device, steps=5)
    plan = record.plan()
    with gpu.profile(device, ceilings=PEAK) as p:
        plan.replay()
    assert sum(event.dispatches for event in p.events) == 5
    assert np.array_equal(device.read(out, np.float32, N), host * 32)


def test_gaps_say_what_the_host_did(device):
    record, _, _ = planned(device)
    plan = record.plan()
    with gpu.profile(device, per="submit", ceilings=PEAK) as p:
        plan.replay()
        device.wait()
        with p.span("thinking", about="life"):
            time.sleep(0.05)
        plan.replay()
    (gap,) = p.gaps()
    assert gap.seconds > 0.04 and gap.doing["python"] > 0.04
    assert sum(gap.doing.values()) == pytest.approx(gap.seconds, abs=1e-4)
    (span,) = [span for span in p.spans if span.name == "thinking"]
    assert span.details == {"about": "life"} and span.seconds > 0.04
    assert p.host()["wait"] > 0


def test_spans_are_nested(device):
    record, _, _ = planned(device, steps=1)
    plan = record.plan()
    with gpu.profile(device, ceilings=PEAK) as p, p.span("outer"), p.span("inner") as details:
        plan.replay()
        details["more"] = 3
    depths = {span.name: span.depth for span in p.spans}
    assert depths["outer"] == 0 and depths["inner"] == 1 and depths["encode"] == 2
    assert next(span for span in p.spans if span.name == "inner").details == {"more": 3}


def test_compiling_is_host_time(fresh):
    with gpu.profile(fresh, ceilings=PEAK) as p:
        record, _, _ = planned(fresh)
        record.submit()
    assert [s.details["kernel"] for s in p.spans if s.name == "compile"] == ["scale"]


def test_nothing_ran(device):
    with gpu.profile(device) as p:
        pass
    assert (p.events, p.submits, p.gaps(), p.busy_s) == ([], [], [], 0.0)
    assert "nothing ran on the device" in p.table()
    assert check_trace(trace_of(p)) == 0
    assert "No work of known cost" in Page("empty").profile(p).html()


def test_only_the_copy_of_a_result(device):
    """A replay without dispatches may still read."""
    out = device.upload(np.arange(4, dtype=np.uint32))
    plan = device.recorder().plan()
    with gpu.profile(device) as p:
        pending = plan.replay(read=(out, 16))
    assert pending is not None and np.frombuffer(pending.result(), np.uint32).tolist() == [0, 1, 2, 3]
    assert p.events == [] and len(p.submits) == 1


def test_what_cannot_be_profiled(device, fresh):
    with pytest.raises(GpuError, match="profile: per is 'kernel'; expected 'dispatch' or 'submit'"):
        gpu.profile(device, per="kernel")  # type: ignore[arg-type]
    with pytest.raises(GpuError, match=r"profile: \d devices are open; pass the one to watch"):
        gpu.profile()
    with gpu.profile(device), pytest.raises(GpuError, match="profiles cannot be nested"), gpu.profile(device):
        pass
    assert device.profile is None


def test_the_only_open_device_need_not_be_named(monkeypatch, device):
    monkeypatch.setattr(Device, "all_open", lambda: [device])
    assert gpu.profile().device is device


def test_devices_that_are_open_are_known():
    with Device.open() as one:
        assert one in Device.all_open()
    assert one not in Device.all_open()


def test_an_exception_ends_the_watching(device):
    with pytest.raises(ZeroDivisionError), gpu.profile(device):
        _ = 1 / 0
    assert device.profile is None
    with gpu.profile(device):
        pass


def test_ceilings_are_measured_where_none_are_given(fresh):
    record, _, _ = planned(fresh)
    plan = record.plan()
    with gpu.profile(fresh) as p:
        plan.replay()
    assert p.ceilings is not None and "measured on this device" in p.table()


# --- roofline --------------------------------------------------------------------------------------------------------


def event(seconds, cost, **more):
    given = {"name": "k", "path": "", "kind": "norm", "kernel": "k", "grid": (1, 1, 1), "operands": (), "results": ()}
    given |= {"buffers": (), "start": 0.0, "measured": seconds, "seconds": seconds, "cost": cost, "submit": 0}
    return Event(**(given | more))


@pytest.mark.parametrize(
    "seconds, cost, share, bound",
    [
        (2e-3, Cost(1e3, 0.5e6, 0.5e6), 0.5, "bandwidth"),  # a megabyte: a millisecond
        (2e-3, Cost(1e7, 0, 1e5), 0.5, "compute"),  # ten million operations: a millisecond
        (2e-6, Cost(1, 4, 4), 4e-3, "launch"),
        (2.1e-6, Cost(1, 4, 4), 8e-9 / 2.1e-6, "latency"),
        (1e-3, Cost(1, 50e3, 50e3), 0.1, "latency"),
        (0.5e-3, Cost(0, 1e6, 0), 2.0, "bandwidth"),  # out of a cache
    ],
)
def test_what_bounds_an_event(seconds, cost, share, bound):
    roof = roof_of(event(seconds, cost), PEAK)
    assert roof is not None
    assert (roof.share, roof.bound) == (pytest.approx(share), bound)


def test_matrix_units_have_a_roof_of_their_own():
    peak = replace(PEAK, matrix_flops=1e11)
    scalar, matrix = (roof_of(event(2e-3, Cost(1e8, 0, 1), matrix=m), peak) for m in (False, True))
    assert scalar is not None and matrix is not None
    assert (scalar.share, matrix.share) == (pytest.approx(5.0), pytest.approx(0.5))
    assert roof_of(event(1.0, None), peak) is None


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"),
        (7, "7"),
        (0.5, "0.50"),
        (999, "999"),
        (1000, "1.00 k"),
        (12345, "12.3 k"),
        (999_950, "1.00 M"),
        (4.12e12, "4.12 T"),
    ],
)
def test_quantities(value, text):
    assert quantity(value) == text
    assert quantity(value, "B").endswith("B")


def test_layers_are_one_row_and_the_table_adds_up(device):
    if not device.caps.timestamps:
        return
    record, _, _ = planned(device)
    plan = record.plan()
    with gpu.profile(device, ceilings=PEAK) as p:
        plan.replay()
    rows = p.rows()
    assert [row.name for row in rows] == ["model.* step 0", "model.* step 1", "model.* step 2"]
    (one,) = p.rows(by=lambda e: e.kind)
    assert (one.name, one.count, one.cost) == ("norm", 3, Cost(3 * N, 12 * N, 12 * N))
    assert one.seconds == pytest.approx(sum(row.seconds for row in rows))
    assert one.share == pytest.approx(24 * N / 1e9 / one.seconds)
    text = p.table(limit=1)
    assert "2 more" in text and "model.* step" in text and "3 dispatches" not in text


# --- traces and pages ------------------------------------------------------------------------------------------------


def check_trace(trace):
    """Hold a trace against the Trace Event Format; returns the number of slices."""
    trace = json.loads(json.dumps(trace, allow_nan=False))
    assert isinstance(trace["traceEvents"], list) and trace["displayTimeUnit"] in ("ms", "ns")
    tracks, last, names = {}, 0.0, set()
    for e in trace["traceEvents"]:
        assert {"ph", "pid", "tid", "ts", "name", "args"} <= e.keys()
        assert isinstance(e["pid"], int) and isinstance(e["tid"], int) and isinstance(e["name"], str)
        if e["ph"] == "M":
            assert e["name"] in ("process_name", "thread_name", "process_sort_index", "thread_sort_index")
            names.add((e["pid"], e["tid"]))
            continue
        assert e["ph"] == "X" and isinstance(e["cat"], str)
        assert e["ts"] >= last and e["dur"] >= 0, "sorted by their beginning"
        last = e["ts"]
        tracks.setdefault((e["pid"], e["tid"]), []).append((round(1000 * e["ts"]), round(1000 * (e["ts"] + e["dur"]))))
    assert tracks.keys() <= names, "every track has a name"
    for track in tracks.values():
        around = []
        for start, end in track:
            while around and around[-1] <= start:
                around.pop()
            assert not around or end <= around[-1], "nested or apart"
            around.append(end)
    return sum(map(len, tracks.values()))


def profiled(device, *names):
    record = device.recorder()
    x = device.upload(np.zeros(N, np.float32))
    kernel = device.kernel_source(TEXT, "scale", label="scale")
    for name in names:
        with record.scope(Scope(name, path=f"layers.0.{name}", kind=name, operands=[name], cost=Cost(N, 4, 4))):
            record(kernel, 1, x=x, out=record.temp(4 * N), n=N, by=1.0)
    plan = record.plan()
    with gpu.profile(device, ceilings=PEAK) as p, p.span(names[0], word=names[-1]):
        plan.replay()
        plan.replay()
    return p


def test_a_trace_is_valid(device, tmp_path):
    p = profiled(device, "one", "two", "three")
    p.to_chrome(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    slices = check_trace(trace)
    assert slices >= 6
    assert trace["otherData"]["device"] == device.caps.name
    if device.caps.timestamps:
        (first, *_) = [e for e in trace["traceEvents"] if e["name"] == "one" and "kernel" in e["args"]]
        assert first["args"]["path"] == "layers.0.one" and first["args"]["flops"] == N
        assert [e["name"] for e in trace["traceEvents"] if e.get("cat") == "part"][:2] == ["layers.0", "one"]


def test_a_validator_that_finds_faults():
    """The checks above can fail."""
    good = {"ph": "X", "pid": 1, "tid": 1, "ts": 0.0, "dur": 5.0, "name": "a", "cat": "c", "args": {}}
    name = {"ph": "M", "pid": 1, "tid": 1, "ts": 0, "name": "thread_name", "args": {"name": "t"}}

    def check(*events):
        return check_trace({"traceEvents": [name, *events], "displayTimeUnit": "ms"})

    assert check(good, good | {"ts": 1.0, "dur": 4.0}, good | {"ts": 5.0}) == 3
    for bad in ([good, good | {"ts": 3.0}], [good | {"ts": 3.0}, good], [good | {"dur": -1.0}], [good | {"tid": 2}]):
        with pytest.raises(AssertionError):
            check(*bad)


HOSTILE = ("</script><script>alert(1)</script>", "<!--<script>", "&lt;b&gt;", "\u2028'\"\\", "{{data}}")


def embedded(page):
    """The data of a page, as a browser's parser would find it."""
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_a_page_shows_hostile_names_as_text(device, tmp_path):
    p = profiled(device, *HOSTILE)
    p.to_html(tmp_path / "page.html", title=HOSTILE[0])
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "alert(1)" in page and "<script>alert" not in page and "<!--<script" not in page
    assert len(re.findall(r"<script\b", page)) == 2 and len(re.findall(r"</script>", page)) == 2
    assert page.count("&lt;/script&gt;&lt;script&gt;alert(1)") == 1  # the title
    data = embedded(page)
    assert data["title"] == HOSTILE[0]
    assert {item[2] for item in data["tracks"][0]["items"]} >= {HOSTILE[0]}
    if device.caps.timestamps:
        assert json.dumps(HOSTILE[3])[1:-1] in json.dumps(data)
        assert {row["cells"][0].split(" ", 1)[1] for row in data["rows"]} == set(HOSTILE)
        assert len(data["kinds"]) == len(HOSTILE)


def test_a_page_loads_nothing(device, tmp_path):
    profiled(device, "one").to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href)\s*=|@import|url\(|import\(|fetch\(|XMLHttp""", page)
    assert [u for u in re.findall(r"https?://[^\s\"'`]+", page) if u != "http://www.w3.org/2000/svg"] == []
    assert "innerHTML" not in page and "document.write" not in page and "insertAdjacentHTML" not in page


def test_a_page_holds_the_timeline(device):
    p = profiled(device, "one", "two")
    data = embedded(Page("t").profile(p).html())
    tracks = {track["name"]: track for track in data["tracks"]}
    assert list(tracks) == ["host", "model", "device", "idle"]
    assert sum(1 for item in tracks["host"]["items"] if item[2] == "one") == 1
    count = 4 if device.caps.timestamps else 2
    assert len(tracks["device"]["items"]) == count
    for item in tracks["device"]["items"]:
        assert item[5] < len(data["details"]) and item[0] >= 0 and item[1] >= 0
    if device.caps.timestamps:
        assert "layers.0.one" in data["details"][tracks["device"]["items"][0][5]]
        assert data["roof"]["dots"][0]["x"] == N / 8


def test_nesting_of_slices():
    assert nesting([(0, 10), (0, 4), (4, 10), (5, 6), (10, 12)]) == [0, 1, 1, 2, 0]
    assert nesting([]) == []
