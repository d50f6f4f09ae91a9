"""Int8 weights as the kernel reads them, in memory and in converted folders: quantized, and packed in panels."""

import contextlib
import mmap
from collections.abc import Sequence

import torch

ROWS = 32  # rows that are interleaved in memory, COLUMNS columns of each at a time
COLUMNS = 4  # columns whose products one step adds to a sum
_BLOCK = 1 << 17  # weights that are quantized at a time: few enough to stay in a core's cache


def quantize_linear(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize weights, shape (outputs, inputs), to symmetric int8 with scales of their dtype, shape (outputs, 1).

    The result is bit for bit that of compressed-tensors' W8A8, which GPUs load.
    """
    scale = weight.new_empty(weight.shape[0], 1)
    integers = torch.empty_like(weight, dtype=torch.int8)
    for part in _row_blocks(weight):
        block = weight[part]
        largest = block.abs().amax(dim=1, keepdim=True).float() / 127.5
        scale[part] = torch.where(largest == 0, torch.finfo(torch.float32).eps, largest)
        integers[part] = (block / scale[part]).clamp_(-128, 127).round_()
    return integers, scale


def quantize_output_layer(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize weights, shape (outputs, inputs), to symmetric int8, with float32 scales of shape (outputs,)."""
    exact = weight.detach()
    scale = torch.empty(exact.shape[0], dtype=torch.float32)  # the default dtype may be bf16 while a model loads
    integers = torch.empty_like(exact, dtype=torch.int8)
    for part in _row_blocks(exact):
        block = exact[part].float()
        scale[part] = (block.abs().amax(dim=1) / 127).clamp_(min=1e-12)
        integers[part] = (block / scale[part, None]).round_().clamp_(-127, 127)
    return integers, scale


def _row_blocks(weight: torch.Tensor) -> list[slice]:
    rows = max(1, _BLOCK // weight.shape[1])
    return [slice(begin, begin + rows) for begin in range(0, weight.shape[0], rows)]


def fills_panels(rows: int, columns: int) -> bool:
    """Whether weights of this shape are packed without padding, so that packed weights tell their shape."""
    return rows % ROWS == 0 and columns % COLUMNS == 0


def pack(integers: torch.Tensor) -> torch.Tensor:
    """Pack int8 weights, shape (outputs, inputs), as the kernel reads them: (panels, steps, ROWS, COLUMNS)."""
    rows, columns = integers.shape
    if not fills_panels(rows, columns):
        integers = torch.nn.functional.pad(integers, (0, -columns % COLUMNS, 0, -rows % ROWS))
    # torch moves four bytes as one integer seven times as fast.
    steps = integers.contiguous().view(torch.int32)
    packed = steps.view(-1, ROWS, steps.shape[1]).transpose(1, 2).contiguous()
    return packed[..., None].view(torch.int8)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Undo `pack`, except for its padding."""
    panels, steps = packed.shape[:2]
    words = packed.view(torch.int32)[..., 0].transpose(1, 2).contiguous()
    return words.view(torch.int8).view(panels * ROWS, steps * COLUMNS)


def merge(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate packed weights in memory of this process: some systems drop the pages of a mapped file when idle."""
    room = mmap.mmap(-1, sum(part.numel() for part in parts), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # The kernel may be built without huge pages.
            room.madvise(mmap.MADV_HUGEPAGE)
    merged = torch.frombuffer(room, dtype=torch.int8).view(-1, *parts[0].shape[1:])
    return torch.cat(list(parts), out=merged)
