"""Agreement among the processes of one training with PyTorch."""

import torch
import torch.distributed

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from typing import Any


def on_any_rank(is_true: bool, device: "Any") -> bool:
    """True on all ranks if `is_true` on any. All ranks must call it; `device` is the tensors' of the training."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return is_true
    flag = torch.tensor(int(is_true), device=device)
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return bool(flag)
