"""Decoding steps captured as CUDA graphs: all rules of capture and replay.

- A graph replays kernels with the addresses that they had when it was captured. Weights and KV cache get other ones at
  each switch, as they are freed in between; so a graph lives from its first use until either of them moves. Capturing
  is one forward's launches, and at most one per shape and switch.
- The first step captured is the largest that the submitted rows can need. All graphs share one memory pool, in which
  the smaller ones find the room of the larger: they run one after another, and leave nothing there.
- Each shape runs once before its first capture, on the stream that captures: libraries allocate and kernels are loaded
  on first use, which a capture forbids. Its rows are padding then, so that nothing is written but the scratch block.
  That stream stays the same, since matrix products keep a workspace for each.
- The device is waited for before graphs and their pool are dropped: the last of them may still run.
- The capture's error mode is "thread_local", as the threads of NCCL and of the swap may use the device meanwhile.
- What is captured neither waits for the device nor branches on its values; sizes come from the shape alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from spmdrl.engines.generation.native.fixed_step import StepShape
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.kernels import ops
from spmdrl.nouns.settings.rollout_config import RolloutConfig
from spmdrl.resources.layout import GenerationLayout

Run = Callable[[], None]


class Graph(Protocol):
    """A captured step."""

    num_bytes: int
    """Bytes of tensors that it keeps; the pool's reserve for intermediates belongs to the allocator, like its cache."""

    def replay(self) -> None:
        """Run the step once more, on the current stream."""
        ...


class CudaCapture:
    """Capture of steps into one memory pool."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def forget(self) -> None:
        torch.cuda.synchronize(self._device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Run) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def capture(self, run: Run) -> Graph:
        before = torch.cuda.memory_allocated(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return _CudaGraph(graph, torch.cuda.memory_allocated(self._device) - before)


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, num_bytes: int):
        self._graph = graph
        self.num_bytes = num_bytes

    def replay(self) -> None:
        self._graph.replay()


CAPTURES: dict[str, Callable[[torch.device], Any]] = {"cuda": CudaCapture}
"""Capture class per kind of device; other kinds have no graphs."""


class GraphSteps:
    """The graphs of one engine, by shape."""

    def __init__(self, device: torch.device, run: Callable[[StepShape], None]):
        self._device = device
        self._run = run
        self._capture: Any = None
        self._graphs: dict[StepShape, Graph] = {}
        self._warm: set[StepShape] = set()

    @property
    def num_bytes(self) -> int:
        return sum(graph.num_bytes for graph in self._graphs.values())

    def lacks(self, shape: StepShape) -> bool:
        """Return True if the shape must be captured before it can be replayed."""
        return shape not in self._graphs

    def capture(self, shape: StepShape) -> None:
        """Capture a step whose inputs are padding; a new shape also runs once."""
        if self._capture is None:
            self._capture = CAPTURES[self._device.type](self._device)
        if shape not in self._warm:
            self._capture.warm_up(lambda: self._run(shape))
            self._warm.add(shape)
        try:
            self._graphs[shape] = self._capture.capture(lambda: self._run(shape))
        except RuntimeError as error:
            raise RuntimeError(
                f"a decoding step of {shape.num_rows} rows couldn't be captured as a graph; set rollout.cuda_graphs to "
                "false to do without"
            ) from error

    def replay(self, shape: StepShape) -> None:
        self._graphs[shape].replay()

    def forget(self) -> None:
        """Drop all graphs and their memory, because weights or cache move."""
        if self._graphs:
            self._capture.forget()
            self._graphs.clear()


def _why_no_graphs(
    rollout: RolloutConfig, config: DecoderConfig, layout: GenerationLayout, device: torch.device | None
) -> str | None:
    """Return why a decoder's steps can't be captured here, or None if they can."""
    if device is not None and device.type not in CAPTURES:
        return f"graphs are captured on {' and '.join(CAPTURES)} alone, and the device is {device.type}"
    if config.moe is not None:
        return "the model is sparse, and the sizes of its experts' products depend on the tokens"
    if layout.tensor > 1:
        return f"resources.generation.tensor is {layout.tensor}, and a graph holds no collectives"
    if device is not None and not ops.reads_pages(device):
        return "attention over the paged cache needs Triton, which isn't installed"
    return None


def wants_graphs(
    rollout: RolloutConfig, config: DecoderConfig, layout: GenerationLayout, device: torch.device | None
) -> bool:
    """Return True if decoding steps run as graphs. Raises ValueError if they must and can't.

    Without a device, as it isn't here, one that captures graphs is meant.
    """
    if rollout.cuda_graphs is False:
        return False
    reason = _why_no_graphs(rollout, config, layout, device)
    if reason and rollout.cuda_graphs:
        raise ValueError(
            f"rollout.cuda_graphs is true, but {reason}; set it to null, which uses graphs where they can be"
        )
    return reason is None
