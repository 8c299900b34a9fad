"""Suite dispatch: what a dispatch costs the host to record and submit, and the device to start.

us: one replay right after the other. paused_us: each after a pause, when caches and clocks are cold. busy_us: beside a
busy Python thread; waiting for the device is a pause there, so the fair ratio is busy_us / paused_us.
"""

from __future__ import annotations

import statistics
import threading
import time
from typing import TYPE_CHECKING

from apps import term

if TYPE_CHECKING:
    from gpu import Device, Plan

DISPATCHES = 180
PAUSE = 0.01  # seconds before a timed call
BINDINGS = (2, 4, 6, 8)


def record_cost(device: Device, *, runs: int) -> list[dict[str, float]]:
    """Microseconds a dispatch of encode + finish + submit, on distinct buffers, by number of bindings."""
    rows = []
    for bindings in BINDINGS:
        plan = _empty_plan(device, bindings)
        seconds = {"us": _median(plan, runs, pause=0.0), "paused_us": _median(plan, runs, pause=PAUSE)}
        with _Busy():
            seconds["busy_us"] = _median(plan, runs, pause=PAUSE)
        rows.append({"bindings": bindings} | {name: round(s * 1e6 / DISPATCHES, 2) for name, s in seconds.items()})
    return rows


def text_of(record: list[dict[str, float]]) -> str:
    """The costs as an aligned table."""
    rows = [
        (r["bindings"], r["us"], r["paused_us"], r["busy_us"], f"{r['busy_us'] / r['paused_us']:.2f}x") for r in record
    ]
    header = ("bindings", "us/dispatch", f"after {PAUSE * 1000:g} ms", "beside a busy thread", "ratio")
    return "record: encode + finish + submit\n" + term.table(rows, header=header, right=(0, 1, 2, 3, 4))


def _empty_plan(device: Device, bindings: int) -> Plan:
    """Dispatches that do nothing, each on buffers of its own."""
    last = bindings - 1
    names = [f"b{i}" for i in range(bindings)]
    access = ["read"] * last + ["read_write"]
    declared = "".join(
        f"@group(0) @binding({i}) var<storage, {access[i]}> {name}: array<f32>;\n" for i, name in enumerate(names)
    )
    total = " + ".join(f"{name}[0]" for name in names[:-1])
    body = f"if (g.x == 77777u) {{ {names[-1]}[0] = {total}; }}"
    text = (
        f"{declared}@compute @workgroup_size(32)\nfn nothing(@builtin(global_invocation_id) g: vec3<u32>) {{ {body} }}"
    )
    kernel = device.kernel_source(text, "nothing", label=f"nothing on {bindings}")
    record = device.recorder()
    for _ in range(DISPATCHES):
        record(kernel, grid=1, **{name: device.alloc(256) for name in names})
    return record.plan()


def _median(plan: Plan, runs: int, *, pause: float) -> float:
    """Seconds of one replay's encode, finish and submit."""
    times = []
    for _ in range(runs + 3):
        time.sleep(pause)
        start = time.perf_counter()
        plan.replay()
        times.append(time.perf_counter() - start)
        plan.device.wait()
    return statistics.median(times[3:])


class _Busy:
    """A Python thread that never lets go of the interpreter on its own."""

    def __enter__(self) -> None:
        self._over = False
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join()

    def _spin(self) -> None:
        count = 0
        while not self._over:
            count += 1
