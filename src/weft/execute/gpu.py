"""The GPU operations that the lab needs, as one object that tests can replace with a fake."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from weft.errors import UnavailableError
from weft.execute.clocks import Clocks

FLUSH_BYTES = 256 << 20
"""Several times the L2 of any current GPU."""
CALIBRATION_CYCLES = 8_000_000
"""Cycles of the sleep that is timed to convert milliseconds to cycles."""


class TorchGpu:
    """GPU `index` of this machine through torch.cuda (CUDA or ROCm)."""

    def __init__(self, index: int = 0) -> None:
        try:
            import torch
        except ImportError:
            raise UnavailableError(
                "a GPU is measured through PyTorch: pip install torch, or simulate one with --device sim:h100"
            ) from None
        if not torch.cuda.is_available() or torch.cuda.device_count() <= index:
            raise UnavailableError(
                "this machine has no GPU that PyTorch can use; check nvidia-smi and the torch build, "
                "or simulate one with --device sim:h100"
            )
        self._torch = torch
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        properties = torch.cuda.get_device_properties(index)
        self.name: str = properties.name
        self.sm_count: int = properties.multi_processor_count
        self.memory_bytes: int = properties.total_memory
        self.clocks = Clocks(str(getattr(properties, "uuid", "")), index)
        self.out_of_memory: Any = torch.OutOfMemoryError
        self._scratch: Any = None
        self._cycles_per_ms = 0.0

    def stream(self, *, high: bool = False) -> Any:
        """A new stream, at high or default priority."""
        return self._torch.cuda.Stream(self.device, priority=-1 if high else 0)

    def event(self, *, timing: bool = False) -> Any:
        """A new event."""
        return self._torch.cuda.Event(enable_timing=timing)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Context in which launches go to `stream`."""
        return self._torch.cuda.stream(stream)  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        """Wait for all work on the GPU."""
        self._torch.cuda.synchronize(self.device)

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two completed events."""
        return float(start.elapsed_time(end))

    def sleep(self, ms: float) -> None:
        """Keep the current stream busy for about `ms` with one thread."""
        if not self._cycles_per_ms:
            self._cycles_per_ms = self._calibrate()
        self._torch.cuda._sleep(max(1, int(ms * self._cycles_per_ms)))

    def flush_l2(self) -> None:
        """Overwrite the contents of the L2 cache."""
        if self._scratch is None:
            self._scratch = self._torch.empty(FLUSH_BYTES, dtype=self._torch.uint8, device=self.device)
        self._scratch.zero_()

    def release(self) -> None:
        """Return cached memory to the driver."""
        self._torch.cuda.empty_cache()

    def _calibrate(self) -> float:
        start, end = self.event(timing=True), self.event(timing=True)
        for _ in range(3):  # load the kernel and let the clock of an idle GPU rise
            self._torch.cuda._sleep(CALIBRATION_CYCLES)
        start.record()
        self._torch.cuda._sleep(CALIBRATION_CYCLES)
        end.record()
        end.synchronize()
        return CALIBRATION_CYCLES / max(self.elapsed_ms(start, end), 0.1)

    def info(self) -> dict[str, Any]:
        """Name and SM count of the GPU, and software versions."""
        torch = self._torch
        found = {"gpu": self.name, "sm_count": self.sm_count, "torch": torch.__version__}
        found["cuda"] = torch.version.cuda or f"hip {torch.version.hip}"
        try:
            import triton

            found["triton"] = triton.__version__
        except ImportError:
            pass
        return found
