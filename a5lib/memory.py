"""Measured memory: the card's peak within a phase, and the process's resident set. It plans nothing yet."""

from __future__ import annotations

import psutil
import torch

from a5lib.records import MemoryPoint


class MemoryRecorder:
    """Marks phases and keeps one `MemoryPoint` for each, in bytes.

    >>> recorder = MemoryRecorder(torch.device("cpu"))
    >>> recorder.start()
    >>> recorder.stop("update").phase
    'update'
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self) -> None:
        """Forget the card's earlier peak."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def stop(self, phase: str) -> MemoryPoint:
        """Wait for the card and read both: the peak allocated since `start`, and the resident set now."""
        peak = 0
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            peak = torch.cuda.max_memory_allocated(self.device)
        return MemoryPoint(phase, psutil.Process().memory_info().rss, peak)
