"""Programs to compare with in the same run: PyTorch (CUDA where it drives the same card, else the CPU) and NumPy.

None of them is needed: a peer that is not installed leaves its column empty.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from apps.bench.measure import BATCH_SECONDS, Sample, repeat

if TYPE_CHECKING:
    from gpu.device import Capabilities


class Torch:
    """PyTorch, eager. f32 products without TF32, as ours."""

    def __init__(self, caps: Capabilities, *, rotate: int) -> None:
        self.torch: Any = importlib.import_module("torch")
        cuda = self.torch.cuda
        name = cuda.get_device_name(0) if cuda.is_available() else ""
        same = bool(name) and (name in caps.name or caps.name in name)
        self.device = "cuda" if same else "cpu"
        where = f"CUDA {self.torch.version.cuda}" if same else f"CPU, {self.torch.get_num_threads()} threads"
        self.name = f"torch {self.torch.__version__} ({where})"
        self.short = "torch" if same else "torch CPU"
        self.rotate = rotate
        self._kept: tuple[Any, Any] | None = None
        self.torch.backends.cuda.matmul.allow_tf32 = False
        self.torch.backends.cudnn.allow_tf32 = False

    def random(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A tensor of uniform values in [-1, 1)."""
        kind = {"f32": self.torch.float32, "f16": self.torch.float16, "bf16": self.torch.bfloat16}[dtype]
        return self.torch.rand(shape, dtype=kind, device=self.device) * 2 - 1

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gave for this key before, or a new one in place of the last."""
        if self._kept is None or self._kept[0] != key:
            self._kept = None
            self._kept = (key, make())
        return self._kept[1]

    def with_math(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """The call with attention as separate products and softmax."""
        attention = importlib.import_module("torch.nn.attention")

        def in_math() -> Any:
            with attention.sdpa_kernel(attention.SDPBackend.MATH):
                return call()

        return in_math

    def time(self, make: Callable[[Any], Callable[[], Any]], limit: float) -> Sample:
        """Seconds of one call."""
        with self.torch.no_grad():
            call = make(self)
            return self._cuda(call, limit) if self.device == "cuda" else on_host(call, limit)

    def _cuda(self, call: Callable[[], Any], limit: float) -> Sample:
        cuda = self.torch.cuda

        def batch(count: int) -> float:
            first, last = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            first.record()
            for _ in range(count):
                call()
            last.record()
            last.synchronize()
            return first.elapsed_time(last) * 1e-3 / count

        batch(1)
        once = batch(2)
        count = int(min(max(BATCH_SECONDS / max(once, 1e-7), 1), 2000))
        batch(count)
        return repeat(lambda: batch(count), limit, clock="gpu")

    def free(self) -> None:
        """Give memory back, so that it is there for the next row."""
        self._kept = None
        if self.device == "cuda":
            self.torch.cuda.empty_cache()


class NumPy:
    """NumPy on the host's cores, f32."""

    short = "numpy"

    def __init__(self) -> None:
        self.name = f"numpy {np.__version__} (CPU)"
        self._rng = np.random.default_rng(0)

    def time(self, make: Callable[[np.random.Generator], Callable[[], Any]], limit: float) -> Sample:
        """Seconds of one call."""
        return on_host(make(self._rng), limit)

    def free(self) -> None:
        """Nothing is held."""


def on_host(call: Callable[[], Any], limit: float) -> Sample:
    """Seconds of one call by the host's clock."""

    def batch(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count

    once = batch(1)
    if once > limit:
        return Sample.of([once], "wall")
    count = int(min(max(BATCH_SECONDS / max(once, 1e-7), 1), 1000))
    return repeat(lambda: batch(count), limit, clock="wall")


def installed(name: str) -> bool:
    """Whether a package is there, without importing it."""
    return importlib.util.find_spec(name) is not None
